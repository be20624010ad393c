"""What users of tensordicts rely on: construction, values, keys, locks; table by table."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import numpy as np
import pytest
import torch

from tensordict import (
    NonTensorData,
    NonTensorStack,
    TensorDict,
    is_leaf_nontensor,
    lazy_stack,
    set_get_defaults_to_none,
    unravel_key,
    unravel_key_list,
    unravel_key_to_tuple,
)

# --- construction ---------------------------------------------------------------------------------


def test_batch_sizes():
    assert TensorDict().batch_size == torch.Size([])
    source = TensorDict({"a": torch.zeros(3)}, [3])
    assert TensorDict(source).batch_size == torch.Size([]), "not inherited from the source"
    for given in (3, [3], (3,), torch.Size([3])):
        assert TensorDict({}, given).batch_size == torch.Size([3])
    assert type(TensorDict({}, [3]).batch_size) is torch.Size


def test_nested_dicts_follow_the_parent():
    td = TensorDict({"n": {"m": {"a": torch.zeros(3)}}}, [3], device="cpu", names=["x"])
    below = td["n", "m"]
    assert type(below) is TensorDict and below.batch_size == (3,)
    assert below.device == torch.device("cpu") and below.names == ["x"]


def test_nested_tensordicts():
    shorter = TensorDict({"a": torch.zeros(3, 4)})
    td = TensorDict({"n": shorter}, [3])
    assert td["n"].batch_size == (3,) and shorter.batch_size == () and td["n"] is not shorter
    for size in ([3], [3, 4]):
        fitting = TensorDict({"a": torch.zeros(3, 4)}, size)
        assert TensorDict({"n": fitting}, [3]).get("n") is fitting
    leaf = torch.zeros(3)
    assert TensorDict({"a": leaf}, [3])["a"] is leaf


def test_finding_the_batch_size():
    td = TensorDict({"a": torch.zeros(3, 4), "b": torch.zeros(3, 4, 5)})
    assert td.auto_batch_size_().batch_size == (3, 4)
    assert td.auto_batch_size_(batch_dims=1).batch_size == (3,)
    assert td.lock_().auto_batch_size_() is td


def test_setting_metadata_of_a_locked_tensordict():
    td = TensorDict({"a": torch.zeros(3, 4)}, [3, 4], lock=True)
    td.batch_size = [3]
    td.names = ["x"]
    assert td.batch_size == (3,) and td.names == ["x"] and td.is_locked
    td.names = None
    assert td.names == [None]


# --- values -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (1, torch.int64),
        (1.5, torch.float32),
        (True, torch.bool),
        (np.float64(2), torch.float64),
        (np.int16(2), torch.int16),
        (np.bool_(True), torch.bool),
    ],
)
def test_numbers_become_tensors(value, dtype):
    got = TensorDict(a=value)["a"]
    assert isinstance(got, torch.Tensor) and got.dtype is dtype and got.shape == () and got == value


def test_arrays_share_memory():
    array = np.zeros(3)
    td = TensorDict({"a": array}, [3])
    array[0] = 7
    assert td["a"][0] == 7 and td["a"].dtype is torch.float64


def test_lists():
    assert torch.equal(TensorDict(a=[1, 2])["a"], torch.tensor([1, 2]))
    assert torch.equal(TensorDict(a=(1.0, 2.0))["a"], torch.tensor([1.0, 2.0]))
    stacked = TensorDict(a=[torch.zeros(2), torch.ones(2)])["a"]
    assert stacked.shape == (2, 2)
    words = TensorDict(a=["x", "y"])
    assert isinstance(words.get("a"), NonTensorStack) and words.get("a").batch_size == (2,)
    assert isinstance(words["a"], list) and words["a"] == ["x", "y"]
    rows = TensorDict({"a": ["x", "y"]}, [2])
    assert rows.get("a").batch_size == (2,) and rows[1]["a"] == "y"


@pytest.mark.parametrize(
    "value",
    ["text", b"bytes", None, 1j, {1, 2}, len, int, object(), torch.float32, ...],
    ids=lambda v: type(v).__name__,
)
def test_other_values_are_kept(value):
    td = TensorDict({"a": value}, [2])
    assert td["a"] is value and type(td.get("a")) is NonTensorData
    assert td.get("a").batch_size == (2,) and td[0]["a"] is value
    assert next(iter(td.values())) is td.get("a"), "views give the wrapper"


def test_arrays_of_strings_are_values():
    array = np.array(["x", "y"])
    assert TensorDict(a=array)["a"] is array


# --- keys -----------------------------------------------------------------------------------------


def test_nested_keys_are_unravelled():
    td = TensorDict({("a", ("b",)): 1, ("c",): 2})
    assert td["a", "b"] == 1 and td["c"] == 2 and td[(("a",), "b")] == 1
    assert unravel_key(("a",)) == "a" and unravel_key(("a", ("b",))) == ("a", "b")
    assert unravel_key_to_tuple("a") == ("a",) and unravel_key((1,)) == ()
    assert unravel_key_list(["a", ("b", ("c",))]) == ["a", ("b", "c")]


def test_missing_keys():
    td = TensorDict(a=1, n={"b": 2})
    with pytest.raises(KeyError) as err:
        td["z"]
    assert str(err.value) == "key \"z\" not found in TensorDict with keys ['a', 'n']"
    assert td.get("z") is None and td.get(("n", "z")) is None and td.get(("z", "y")) is None
    assert td.get("z", 3) == 3 and td.pop("z", None) is None
    set_get_defaults_to_none(False)
    try:
        with pytest.raises(KeyError, match="z"):
            td.get("z")
    finally:
        set_get_defaults_to_none(True)


def test_order():
    td = TensorDict({"b": 1, "n": {"d": 2, "c": "x"}, "a": 3})
    assert list(td.keys()) == ["b", "n", "a"] and td.sorted_keys == ["a", "b", "n"]
    assert list(td.keys(sort=True)) == ["a", "b", "n"]
    assert list(td.keys(True)) == ["b", ("n", "d"), ("n", "c"), "n", "a"], "children before parents"
    assert list(td.keys(True, True)) == ["b", ("n", "d"), "a"]
    assert list(td.keys(True, True, is_leaf=is_leaf_nontensor)) == [
        "b",
        ("n", "d"),
        ("n", "c"),
        "a",
    ]
    assert ("n", "d") in td.keys(True) and ("n", "d") not in td.keys()
    assert td.popitem()[0] == "a"


def test_choosing():
    td = TensorDict(a=1, n={"b": 2, "c": 3})
    kept = td.select(("n", "z"), strict=False)
    assert list(kept.keys(True)) == ["n"], "a nested path keeps an empty parent"
    assert set(td.exclude("zz", ("n", "b")).keys(True, True)) == {"a", ("n", "c")}
    one, two, rest = td.split_keys(["a"], [("n", "b")])
    assert set(one.keys(True, True)) == {"a"} and set(rest.keys(True, True)) == {("n", "c")}
    *_, same = td.split_keys(["a"], inplace=True)
    assert same is td and "a" not in td and set(two.keys(True, True)) == {("n", "b")}
    assert set(td.split_keys(["q"], strict=False)[0].keys()) == set()


def test_updating():
    td = TensorDict(a=1, n={"b": 2})
    assert td.update({"n": {"c": 3}}) is td and set(td["n"].keys()) == {"b", "c"}
    assert td.update(None) is td
    with pytest.raises(RuntimeError):
        TensorDict({}, [2]).update(TensorDict({"a": torch.zeros(3)}, [3]))
    grown = TensorDict({}, [2]).update(
        TensorDict({"a": torch.zeros(3)}, [3]), update_batch_size=True
    )
    assert grown.batch_size == (3,)
    assert (
        td.set("z", 1) is td
        and td.setdefault("z", 5) == 1
        and td.rename_key_("z", ("n", "z")) is td
    )
    assert td["n", "z"] == 1


def test_comparisons_and_truth():
    td = TensorDict(a=1)
    assert (td == None) is False  # noqa: E711
    assert (td == {"a": 1})["a"] and bool((td == td).all())
    assert len(TensorDict()) == 0 and len(TensorDict({}, [4])) == 4
    for bad in (lambda: hash(td), lambda: iter(td).__next__()):
        with pytest.raises(TypeError):
            bad()
    with pytest.raises(KeyError, match="keys in tensordicts mismatch"):
        td + TensorDict(b=1)


# --- locks ----------------------------------------------------------------------------------------


def locked():
    td = TensorDict({"a": torch.zeros(3), "n": {"b": torch.zeros(3)}, "s": "x"}, [3], names=["t"])
    return td.lock_()


ALLOWED = {
    "set_": lambda td: td.set_("a", torch.ones(3)),
    "update_": lambda td: td.update_({"n": {"b": torch.ones(3)}}),
    "update_ of a value": lambda td: td.update_({"s": "y"}),
    "set_at_": lambda td: td.set_at_("a", 1.0, 0),
    "set in place": lambda td: td.set("a", torch.ones(3), inplace=True),
    "update in place": lambda td: td.update({"a": torch.ones(3)}, inplace=True),
    "rows": lambda td: td.__setitem__(0, {"a": 1.0, "n": {"b": 1.0}}),
    "apply_": lambda td: td.apply_(lambda x: x + 1),
    "add_": lambda td: td.add_(1),
    "fill_": lambda td: td.fill_("a", 1.0),
    "zero_": lambda td: td.zero_(),
    "copy_": lambda td: td.copy_(td.clone()),
    "masked_fill_": lambda td: td.masked_fill_(torch.ones(3, dtype=torch.bool), 1),
    "auto_device_": lambda td: td.auto_device_(),
    "clear_device_": lambda td: td.clear_device_(),
    "requires_grad_": lambda td: td.requires_grad_(),
    "zero_grad": lambda td: td.zero_grad(),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_what_a_lock_allows(name):
    td = locked()
    keys = list(td.keys(True))
    ALLOWED[name](td)
    assert td.is_locked and list(td.keys(True)) == keys


KEEPS = {
    "view": (lambda td: td.view(3, 1), True),
    "reshape": (lambda td: td.reshape(3, 1), True),
    "unsqueeze": (lambda td: td.unsqueeze(0), True),
    "squeeze": (lambda td: td.unsqueeze(0).squeeze(0), True),
    "expand": (lambda td: td.expand(2, 3), True),
    "split": (lambda td: td.split(1)[0], True),
    "detach": (lambda td: td.detach(), True),
    "data": (lambda td: td.data, True),
    "to dtype": (lambda td: td.to(torch.float64), True),
    "to device": (lambda td: td.to("meta"), True),
    "double": (lambda td: td.double(), True),
    "lazy_stack": (lambda td: lazy_stack([td, td]), True),
    "pickle": (lambda td: pickle.loads(pickle.dumps(td)), True),
    "clone": (lambda td: td.clone(), False),
    "copy": (lambda td: td.copy(), False),
    "deepcopy": (lambda td: copy.deepcopy(td), False),
    "index": (lambda td: td[0], False),
    "unbind": (lambda td: td.unbind(0)[0], False),
    "stack": (lambda td: torch.stack([td, td]), False),
    "cat": (lambda td: torch.cat([td, td]), False),
    "arithmetic": (lambda td: td + 1, False),
    "select": (lambda td: td.select("a"), False),
    "exclude": (lambda td: td.exclude("a"), False),
    "flatten_keys": (lambda td: td.flatten_keys(), False),
    "empty": (lambda td: td.empty(), False),
    "to_tensordict": (lambda td: td.to_tensordict(), False),
    "apply": (lambda td: td.apply(lambda x: x + 1), False),
    "apply with the lock": (lambda td: td.apply(lambda x: x + 1, propagate_lock=True), True),
}


@pytest.mark.parametrize("name", KEEPS)
def test_whether_results_are_locked(name):
    op, kept = KEEPS[name]
    assert op(locked()).is_locked is kept
    assert op(locked().unlock_()).is_locked is False


def test_locks_reach_below_and_are_shared():
    child = TensorDict(a=1)
    one, two = TensorDict(n=child).lock_(), TensorDict(n=child).lock_()
    assert child.is_locked
    with pytest.raises(RuntimeError, match="part of a locked graph"):
        child.unlock_()
    with pytest.raises(RuntimeError, match="part of a locked graph"):
        one.unlock_()
    assert one.is_locked and child.is_locked
    del two
    one.unlock_()
    assert not child.is_locked
    one.is_locked = True
    assert child.is_locked


def test_lock_blocks_restore_the_state():
    td = TensorDict(a=1)
    with td.lock_():
        assert td.is_locked
    assert not td.is_locked
    with pytest.raises(ValueError), td.lock_():
        raise ValueError
    assert not td.is_locked
    td.lock_()
    with td.unlock_():
        td["b"] = 2
    assert td.is_locked and "b" in td
    with td.lock_():
        pass
    assert td.is_locked, "already locked stays locked"


def test_everything_is_freed_without_the_collector():
    def made():
        td = TensorDict(
            {"a": torch.zeros(3), "n": {"b": torch.zeros(3)}, "s": ["x", "y", "z"]}, [3]
        )
        module = torch.nn.Linear(2, 2)
        with TensorDict.from_module(module).data.clone().to_module(module) as swap:
            pass
        td.lock_()
        out = [td, swap, td.view(3, 1), td.to(torch.float64), pickle.loads(pickle.dumps(td))]
        out += [TensorDict.from_dict(td.to_dict()), TensorDict.from_module(module, lock=True)]
        out += [torch.vmap(lambda t: t)(td), td.to_tensordict().load_state_dict(td.state_dict())]
        return [weakref.ref(x) for x in out]

    gc.collect()
    gc.disable()
    try:
        assert [ref() for ref in made()] == [None] * 9
    finally:
        gc.enable()
