"""Every kind of node implements every abstract primitive, and the primitives agree."""

import pytest
import torch

from tensordict import NonTensorData, TensorDict, UnbatchedTensor, is_tensorclass
from tensordict.core import registry
from tensordict.core.leaf import Leaf
from tensordict.core.lock import lock
from tensordict.core.node import Node
from tensordict.core.traverse import holders, leaves, leaves_with_path, nodes_with_path, rebuild

from .kinds import KINDS, check_same, content

ABSTRACT = [
    name
    for name, value in vars(Node).items()
    if getattr(getattr(value, "__func__", value), "__isabstractmethod__", False)
]


@pytest.mark.parametrize("kind", registry.node_kinds())
@pytest.mark.parametrize("name", ABSTRACT)
def test_every_abstract_primitive_is_implemented(kind, name):
    found = getattr(registry.node_class(kind), name)
    assert not getattr(found, "__isabstractmethod__", False), (kind, name)


def test_there_are_abstract_primitives_and_kinds():
    assert len(ABSTRACT) > 10 and {"dense", "lazy_stack"} <= set(registry.node_kinds())


@pytest.mark.parametrize("kind", sorted(registry._leaves))
def test_every_leaf_kind_implements_the_contract(kind):
    cls = registry.leaf_class(kind)
    for name in ("_value", "_restructure", "_with", "_stack", "_cat"):
        mine = getattr(cls, name)
        base = getattr(Leaf, name)
        assert getattr(mine, "__func__", mine) is not getattr(base, "__func__", base), (kind, name)


@pytest.mark.parametrize("kind", KINDS)
def test_collect_and_rebuild_agree(kind):
    node = KINDS[kind]()
    tensors = leaves(node)
    assert [x for _, x in leaves_with_path(node)] == tensors or all(
        a is b for (_, a), b in zip(leaves_with_path(node), tensors)
    )
    again = rebuild(node, [x.clone() for x in tensors])
    assert type(again) is type(node)
    check_same(content(again), content(node))
    assert all(a is not b for a, b in zip(leaves(again), tensors))


@pytest.mark.parametrize("kind", KINDS)
def test_names_items_and_fetch_agree(kind):
    node = KINDS[kind]()
    names = list(node._names())
    assert [name for name, _ in node._items()] == names
    for name in names:
        assert node._class_of(name) is type(node._fetch(name)), name
        entry = node._fetch(name)
        shape = entry.batch_size if isinstance(entry, Node) else entry.shape
        assert node._shape_of(name) == shape
    assert node._fetch("missing") is None and node._class_of("missing") is None


@pytest.mark.parametrize("kind", KINDS)
def test_store_and_remove_go_through(kind):
    node = KINDS[kind]()
    x = torch.rand(3, 4, 2)
    node._store("a", x)
    assert torch.equal(node._fetch("a"), x)
    node._remove("a")
    assert node._fetch("a") is None and "a" not in node._names()
    assert all("a" not in holder._names() for holder in holders(node))


@pytest.mark.parametrize("kind", KINDS)
def test_several_entries_are_stored_at_once(kind):
    node = KINDS[kind]()
    first, *_ = [name for name, entry in node._items() if isinstance(entry, torch.Tensor)]
    entries = {"a": torch.rand(3, 4, 2), first: torch.rand(3, 4)}
    node._store_all(entries)
    for name, entry in entries.items():
        assert torch.equal(node._fetch(name), entry)


@pytest.mark.parametrize("kind", KINDS)
def test_a_nested_write_makes_the_way(kind):
    node = KINDS[kind]()
    if is_tensorclass(node.get("n")):
        with pytest.raises(AttributeError, match="no such field"):
            node.set(("n", "deep", "x"), torch.ones(3, 4))
        return
    node.set(("n", "deep", "x"), torch.ones(3, 4))
    assert torch.equal(node.get(("n", "deep", "x")), torch.ones(3, 4)), kind


@pytest.mark.parametrize("kind", KINDS)
def test_like_takes_entries_over(kind):
    node = KINDS[kind]()
    out = node._like({"a": torch.zeros(3, 4)})
    assert type(out) is type(node) and list(out._names()) == ["a"]
    assert out.batch_size == node.batch_size and not out.is_locked
    assert list(node._names()) == ["a", "i", "n", "s", "tag"]


@pytest.mark.parametrize("kind", KINDS)
def test_header_and_parts_make_the_node_again(kind):
    from tensordict.core.traverse import parts

    node = KINDS[kind]()
    again = type(node)._from_header(node._header(), dict(parts(node)))
    check_same(content(again), content(node))


@pytest.mark.parametrize("kind", KINDS)
def test_locking_reaches_everything(kind):
    node = KINDS[kind]()
    lock(node)
    assert all(part.is_locked for _, part in nodes_with_path(node))
    for write in (
        lambda: node.set("a", torch.zeros(3, 4)),
        lambda: node.set(("n", "new"), torch.zeros(3, 4)),
        lambda: node.get("n").set("new", torch.zeros(3, 4)),
        lambda: node.del_("a"),
        lambda: node.pop("a"),
        lambda: node.clear(),
        lambda: node.rename_key_("a", "i"),
        lambda: node.select("a", inplace=True),
    ):
        with pytest.raises(RuntimeError, match="locked"):
            write()
    node.set_("a", torch.zeros(3, 4, 5))
    assert node.get("a").eq(0).all()
    node.unlock_()
    assert not any(part.is_locked for _, part in nodes_with_path(node))
    node.set("a", torch.zeros(3, 4))


@pytest.mark.parametrize("kind", KINDS)
def test_a_child_of_a_locked_node_stays_locked(kind):
    node = KINDS[kind]()
    child = node.get("n")
    node.lock_()
    with pytest.raises(RuntimeError, match="part of a locked graph"):
        (node.get("n") if child.is_locked is False else child).unlock_()
    node.unlock_()


def test_a_locked_typed_view_may_go_before_its_node():
    from .kinds import typed

    node = typed().lock_()
    inner = node._bare()
    child = inner["n"]
    del node
    with pytest.raises(RuntimeError, match="part of a locked graph"):
        child.unlock_()
    inner.unlock_()
    assert not child.is_locked


@pytest.mark.parametrize("kind", KINDS)
def test_moved_to_a_device_when_written(kind):
    td = TensorDict(batch_size=[3, 4], device="meta")
    td["x"] = KINDS[kind]()
    assert all(x.is_meta for x in leaves(td))
    assert all(part.device == torch.device("meta") for _, part in nodes_with_path(td))


def test_an_unbatched_tensor_is_no_column():
    x = UnbatchedTensor(torch.arange(5))
    td = TensorDict({"x": x, "y": torch.zeros(3, 2), "z": NonTensorData("z")}, [3])
    for out in (td[0], td[:2], torch.stack([td, td], 1), torch.cat([td, td]), td.reshape(3, 1)):
        assert torch.equal(out["x"], torch.arange(5)) and out.get("x").batch_size == out.batch_size
    other = TensorDict({"x": UnbatchedTensor(torch.ones(5)), "y": torch.zeros(3, 2)}, [3])
    with pytest.raises(TypeError, match="differ"):
        torch.stack([td.exclude("z"), other])
    assert TensorDict({"x": x}, [3], device="meta")["x"].is_meta
