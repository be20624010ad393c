"""``torch.utils._pytree`` and `torch.vmap` look into tensordicts."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch.utils import _pytree as pytree

from tensordict import (
    LazyStackedTensorDict,
    MetaData,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    lazy_stack,
    stack,
    tensorclass,
)
from tensordict._pytree import register_with_optree


def tree():
    return TensorDict(
        {
            "a": torch.arange(12.0).view(3, 4),
            "s": "text",
            "n": TensorDict({"b": torch.ones(3, 4, 5), "rows": ["x", "y", "z"]}, [3]),
            "long": TensorDict({"c": torch.ones(3, 4, 5)}, [3, 4, 5]),
            "e": {},
        },
        [3],
        names=["x"],
    )


def square():
    return TensorDict({"a": torch.arange(9).view(3, 3)}, [3, 3], names=["x", "y"])


def test_flatten_and_back():
    td = tree()
    leaves, spec = pytree.tree_flatten(td)
    assert [x.shape for x in leaves] == [(3, 4), (3, 4, 5), (3, 4, 5)] and leaves[0] is td["a"]
    back = pytree.tree_unflatten(leaves, spec)
    assert list(back.keys(True)) == list(td.keys(True)) and back.names == ["x"]
    assert back["s"] == "text" and back["n", "rows"] == ["x", "y", "z"]
    assert back["long"].batch_size == (3, 4, 5)


def test_key_paths():
    pairs = pytree.tree_flatten_with_path({"td": tree()})[0]
    assert [pytree.keystr(path) for path, _ in pairs] == [
        "['td']['a']",
        "['td']['n']['b']",
        "['td']['long']['c']",
    ]
    named = pytree.tree_map_with_path(lambda path, x: x + len(path), tree())
    assert named["n", "b"][0, 0, 0] == 3


def test_two_trees_are_mapped_together():
    td = tree()
    total = pytree.tree_map(lambda x, y: x + y, td, td)
    assert torch.equal(total["n", "b"], td["n", "b"] * 2)
    with pytest.raises(ValueError):
        pytree.tree_map(lambda x, y: x, td, TensorDict(a=1))


@pytest.mark.parametrize(
    ("fn", "batch", "names"),
    [
        (lambda x: x[:2], (2, 4), ["x", "y"]),
        (lambda x: x.sum(), (), []),
        (lambda x: x.unsqueeze(0), (1, 3, 4), [None, "x", "y"]),
        (lambda x: x[0], (4,), ["y"]),
        (lambda x: x[:, 0], (3,), ["x"]),
        (lambda x: x.flatten(0, 1), (), []),
        (lambda x: x.unsqueeze(-1), (3, 4), ["x", "y"]),
    ],
)
def test_the_batch_follows_the_leaves(fn, batch, names):
    td = TensorDict(
        {"a": torch.zeros(3, 4), "n": TensorDict({"b": torch.zeros(3, 4, 5)}, [3, 4]), "s": "t"},
        [3, 4],
        names=["x", "y"],
    )
    out = pytree.tree_map(fn, td)
    assert out.batch_size == batch and out["n"].batch_size == batch
    assert out.names == names
    for entry in (out["a"], out["n", "b"], out.get("s")):
        assert entry.shape[: len(batch)] == batch


def test_other_values_than_tensors():
    td = TensorDict({"a": torch.zeros(3), "s": "t"}, [3])
    out = pytree.tree_map(lambda x: (x.ndim, "q"), td)
    assert out["a"] == (1, "q") and out["s"] == "t"
    assert pytree.tree_leaves(out) == [1, "q"]


def test_subclasses_keep_their_class_and_can_be_freed_of_us():
    class Mine(TensorDict):
        pass

    out = pytree.tree_map(lambda x: x + 1, Mine(a=1))
    assert type(out) is Mine and out["a"] == 2


def test_unflattened_trees_are_freed_without_the_collector():
    gc.disable()
    try:
        out = pytree.tree_map(lambda x: x, tree())
        ref = weakref.ref(out)
        del out
        assert ref() is None
    finally:
        gc.enable()


def test_vmap_takes_a_dimension_and_gives_it_back():
    seen = []

    def fn(td):
        seen.append((td.batch_size, td.names, td["long"].batch_size, td["s"], td["e"].batch_size))
        return td

    out = torch.vmap(fn)(tree())
    assert seen == [((), [], (4, 5), "text", ())]
    assert out.batch_size == (3,) and out.names == [None] and out["s"] == "text"
    assert out["long"].batch_size == (3, 4, 5) and out["n", "rows"] == ["x", "y", "z"]
    assert torch.equal(out["n", "b"], tree()["n", "b"])


@pytest.mark.parametrize("dim", [0, 1])
def test_vmap_over_each_dimension_of_a_square(dim):
    td = square()
    names = []

    def fn(row):
        names.extend(row.names)
        return row

    out = torch.vmap(fn, in_dims=dim, out_dims=dim)(td)
    assert names == [["y"], ["x"]][dim] and out.batch_size == (3, 3)
    assert torch.equal(out["a"], td["a"])


def test_vmap_twice_with_chunks_and_with_none():
    td = square()
    twice = torch.vmap(torch.vmap(lambda x: x["a"] + 1))(td)
    assert torch.equal(twice, td["a"] + 1)
    assert torch.equal(torch.vmap(lambda x: x["a"].sum(), chunk_size=2)(td), td["a"].sum(1))
    both = torch.vmap(lambda x, t: x + t["a"], in_dims=(0, None))(torch.zeros(5), td)
    assert both.shape == (5, 3, 3)


def test_grad_and_jacobians():
    td = TensorDict({"a": torch.arange(3.0), "n": {"b": torch.ones(3)}}, [3])

    def loss(t):
        return (t["a"] ** 2).sum() + (t["n", "b"] * 3).sum()

    grad = torch.func.grad(loss)(td)
    assert torch.equal(grad["a"], 2 * td["a"]) and torch.equal(
        grad["n", "b"], torch.full((3,), 3.0)
    )
    jac = torch.func.jacrev(lambda t: t["a"] * 2)(td)
    assert torch.equal(jac["a"], 2 * torch.eye(3))


def test_vmap_under_compile():
    tds = stack([TensorDict(a=torch.full((2,), float(i))) for i in range(3)])
    fn = torch.compile(
        lambda t: torch.vmap(lambda x: x["a"].sum())(t), backend="eager", fullgraph=True
    )
    assert torch.equal(fn(tds), tds["a"].sum(1))


def test_optree():
    optree = pytest.importorskip("optree", reason="optree is an extra")
    register_with_optree()
    register_with_optree()
    td = tree()
    assert [x.shape for x in optree.tree_leaves(td)] == [(3, 4), (3, 4, 5), (3, 4, 5)]
    out = optree.tree_map(lambda x: x + 1, {"td": td})["td"]
    assert (
        torch.equal(out["n", "b"], td["n", "b"] + 1) and out["s"] == "text" and out.names == ["x"]
    )
    paths = optree.tree_paths(td)
    assert paths == [("a",), ("n", "b"), ("long", "c")]

    class Later(TensorDict):
        pass

    assert type(optree.tree_map(lambda x: x, Later(a=1))) is Later
    with pytest.raises(ValueError):
        optree.tree_map(lambda x, y: x, td, TensorDict(a=1))


def stacks():
    even = [TensorDict({"a": torch.full((3, 2), float(i)), "s": "x"}, [3]) for i in range(2)]
    ragged = [TensorDict(a=torch.zeros(n)) for n in (2, 3)]
    return lazy_stack(even), lazy_stack(ragged)


def test_lazy_stacks():
    even, ragged = stacks()
    assert type(pytree.tree_map(lambda x: x + 1, even)) is LazyStackedTensorDict
    assert [x.shape for x in pytree.tree_leaves(ragged)] == [(2,), (3,)]
    mapped = pytree.tree_map(lambda x: x + 1, ragged)
    assert [m["a"].shape for m in mapped.unbind(0)] == [(2,), (3,)]
    for dim in (0, 1):
        out = torch.vmap(lambda t: t["a"] + 1, in_dims=dim, out_dims=dim)(even)
        assert torch.equal(out, even["a"] + 1)
    assert torch.vmap(lambda t: t)(even).batch_size == (2, 3)
    held = TensorDict({"l": even, "x": torch.zeros(2)}, [2])
    assert torch.equal(torch.vmap(lambda t: t["l", "a"])(held), even["a"])


def test_values_outside_of_tensordicts_have_no_leaves():
    for value in (NonTensorData("a"), MetaData(1), NonTensorStack("a", "b")):
        leaves, spec = pytree.tree_flatten([value, torch.zeros(1)])
        assert len(leaves) == 1 and pytree.tree_unflatten(leaves, spec)[0] is value
        assert spec == pytree.tree_structure([type(value)("c"), torch.ones(2)])


@tensorclass
class Point:
    x: torch.Tensor
    s: str
    n: torch.Tensor = None


def test_typed_classes():
    point = Point(x=torch.arange(3.0), s="a", batch_size=[3])
    out = pytree.tree_map(lambda x: x + 1, point)
    assert type(out) is Point and out.s == "a" and out.n is None
    assert torch.equal(torch.vmap(lambda p: p.x * 2)(point), point.x * 2)
    same = torch.vmap(lambda p: p)(point)
    assert type(same) is Point and same.batch_size == (3,)
