"""Locks: who holds what, and that a refused change changes nothing."""

import gc

import pytest
import torch

from tensordict import TensorDict
from tensordict.core.lock import Origin, origin_of, set_origin, touched
from tensordict.core.traverse import leaves, nodes_with_path
from tensordict.errors import LOCKED_MESSAGE


def tree():
    return TensorDict(
        {"a": torch.zeros(2), "n": {"b": torch.ones(2), "m": {"c": torch.ones(2)}}}, [2]
    )


def state(td):
    return [(p, n.is_locked, dict(n._items())) for p, n in nodes_with_path(td)]


REFUSED = {
    "setitem": lambda td: td.__setitem__("a", torch.zeros(2)),
    "nested": lambda td: td.__setitem__(("n", "b"), torch.zeros(2)),
    "new_nested": lambda td: td.__setitem__(("q", "r"), torch.zeros(2)),
    "set": lambda td: td.set("x", torch.zeros(2)),
    "update": lambda td: td.update({"a": torch.zeros(2)}),
    "update_nested": lambda td: td.update({"n": {"b": torch.zeros(2)}}),
    "pop": lambda td: td.pop("a"),
    "popitem": lambda td: td.popitem(),
    "del": lambda td: td.__delitem__(("n", "b")),
    "clear": lambda td: td.clear(),
    "rename": lambda td: td.rename_key_("a", "z"),
    "setdefault": lambda td: td.setdefault("z", torch.zeros(2)),
    "create_nested": lambda td: td.create_nested("z"),
    "non_tensor": lambda td: td.set_non_tensor("z", 1),
    "rows": lambda td: td.__setitem__(0, {"z": 1}),
    "rows_nested": lambda td: td.__setitem__(0, {"n": {"z": 1}}),
    "select": lambda td: td.select("a", inplace=True),
    "exclude": lambda td: td.exclude("a", inplace=True),
    "flatten_keys": lambda td: td.flatten_keys(inplace=True),
    "unflatten_keys": lambda td: td.unflatten_keys(inplace=True),
    "split_keys": lambda td: td.split_keys(["a"], inplace=True),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_when_locked(name):
    td = tree().lock_()
    before = state(td)
    with pytest.raises(RuntimeError) as error:
        REFUSED[name](td)
    assert str(error.value) == LOCKED_MESSAGE
    after = state(td)
    assert [(p, locked, list(entries)) for p, locked, entries in after] == [
        (p, locked, list(entries)) for p, locked, entries in before
    ]
    for (_, _, old), (_, _, new) in zip(before, after):
        assert all(old[k] is new[k] for k in old)


ALLOWED = {
    "set_": lambda td: td.set_("a", 3.0),
    "set_nested": lambda td: td.set_(("n", "m", "c"), 3.0),
    "set_inplace": lambda td: td.set("a", torch.ones(2), inplace=True),
    "update_": lambda td: td.update_({"a": torch.ones(2)}),
    "update_inplace": lambda td: td.update({"a": torch.ones(2)}, inplace=True),
    "rows": lambda td: td.__setitem__(0, {"a": 3.0}),
    "apply_": lambda td: td.apply_(lambda x: x + 1),
    "iadd": lambda td: td.__iadd__(1),
    "zero_": lambda td: td.zero_(),
    "fill_": lambda td: td.fill_("a", 1.0),
    "copy_": lambda td: td.copy_(tree()),
    "names": lambda td: setattr(td, "names", ["x"]),
    "batch_size": lambda td: setattr(td, "batch_size", []),
    "auto_device_": lambda td: td.auto_device_(),
    "clear_device_": lambda td: td.clear_device_(),
    "requires_grad_": lambda td: td.requires_grad_(),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_allowed_when_locked(name):
    td = tree().lock_()
    before = leaves(td)
    ALLOWED[name](td)
    assert td.is_locked and all(x is y for x, y in zip(before, leaves(td)))


def test_children_are_locked_and_unlocked_with_the_root():
    td = tree().lock_()
    assert all(node.is_locked for _, node in nodes_with_path(td))
    with pytest.raises(RuntimeError, match="part of a locked graph"):
        td["n"].unlock_()
    with pytest.raises(RuntimeError, match="part of a locked graph"):
        td["n", "m"].unlock_()
    assert all(node.is_locked for _, node in nodes_with_path(td))
    td.unlock_()
    assert not any(node.is_locked for _, node in nodes_with_path(td))


def test_a_child_of_two_parents():
    child = TensorDict(x=1)
    one, two = TensorDict(c=child), TensorDict(c=child)
    one.lock_(), two.lock_()
    with pytest.raises(RuntimeError, match="part of a locked graph"):
        one.unlock_()
    assert one.is_locked and child.is_locked
    del two
    gc.collect()
    one.unlock_()
    assert not child.is_locked


def test_a_child_that_was_locked_first():
    child = TensorDict(x={"y": 1}).lock_()
    parent = TensorDict(c=child).lock_()
    with pytest.raises(RuntimeError, match="part of a locked graph"):
        child.unlock_()
    parent.unlock_()
    assert not child.is_locked and not child["x"].is_locked


def test_a_child_held_twice_by_one_parent():
    child = TensorDict(x=1)
    parent = TensorDict(a=child, b=child).lock_()
    parent.unlock_()
    assert not child.is_locked


def test_locked_trees_are_freed_without_the_collector():
    import weakref

    gc.disable()
    try:
        td = tree().lock_()
        refs = [weakref.ref(node) for _, node in nodes_with_path(td)]
        del td
        assert all(ref() is None for ref in refs)
    finally:
        gc.enable()


def test_cached_leaves_follow_changes_of_values_in_place_of_entries():
    td = tree().lock_()
    assert leaves(td) is leaves(td)
    td.update({"n": {"b": torch.zeros(2)}}, ignore_lock=True)
    assert any(x is td["n", "b"] for x in leaves(td))
    touched(td["n", "m"])
    assert td._lock.leaves is None and td["n"]._lock.leaves is None


def test_lock_in_the_constructor_and_as_an_attribute():
    td = TensorDict(a=1, lock=True)
    assert td.is_locked
    td.is_locked = False
    td["a"] = 2
    td.is_locked = True
    assert td.is_locked and td.lock_() is td


def test_as_context_managers():
    td = tree()
    with td.lock_():
        assert td.is_locked
        with td.unlock_():
            td["a"] = torch.ones(2)
        assert td.is_locked
    assert not td.is_locked and td["a"].sum() == 2
    td.lock_()
    with td.lock_():
        pass
    assert td.is_locked


def test_results_are_locked_or_not():
    td = TensorDict({"a": torch.zeros(2, 2)}, [2, 2]).lock_()
    for out in (td.view(4), td.reshape(4), td.permute(1, 0), td.unsqueeze(0), td.expand(3, 2, 2), td.split(1)[0], td.detach(), td.data, td.to(torch.float64), td.float(), td[:1].lock_()):  # fmt: skip
        assert out.is_locked
    for out in (td.clone(), td.copy(), td[0], td.unbind(0)[0], torch.stack([td, td]), torch.cat([td, td]), td + 1, td.select("a"), td.exclude("a"), td.flatten_keys(), td.empty(), td.apply(lambda x: x)):  # fmt: skip
        assert not out.is_locked
    assert td.apply(lambda x: x, propagate_lock=True).is_locked


def test_origins():
    td = tree()
    set_origin(td, Origin("shared", buffer=torch.zeros(1)))
    assert td.is_locked and origin_of(td).kind == "shared" and origin_of(td["n"]).buffer is None
    td.unlock_()
    assert origin_of(td) is None and origin_of(td["n"]) is None
