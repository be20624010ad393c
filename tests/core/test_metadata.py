"""Names and devices of a tree, and of what is put into it."""

import pytest
import torch

from tensordict import TensorDict, lazy_stack


def nested(names=None):
    return TensorDict(
        {"y": torch.zeros(3, 4), "m": TensorDict({"z": torch.zeros(3, 4)}, [3, 4])},
        [3, 4],
        names=names,
    )


def by_constructor(value):
    return TensorDict({"n": value}, [3], names=["t"])


def by_set(value):
    td = TensorDict({}, [3], names=["t"])
    td["n"] = value
    return td


@pytest.mark.parametrize("put", [by_constructor, by_set])
@pytest.mark.parametrize(
    ("own", "read"),
    [
        (None, ["t", None]),
        (["t", None], ["t", None]),
        (["t", "z"], ["t", "z"]),
        ([None, "z"], ["t", "z"]),
    ],
)
def test_a_longer_nested_batch_gets_the_names_of_the_parent(put, own, read):
    value = nested(own)
    td = put(value)
    assert td["n"].names == read and td["n", "m"].names[0] in ("t", None)
    assert value.names == (own or [None, None])  # the value given is not changed
    assert (td["n"] is value) is (own == read) and td["n", "y"] is value["y"]


@pytest.mark.parametrize("put", [by_constructor, by_set])
def test_names_reach_every_level(put):
    assert put(nested())["n", "m"].names == ["t", None]
    td = put(lazy_stack([TensorDict({"y": torch.zeros(4)}, [4])] * 3))
    assert td["n"].names == ["t", None]
    assert put(TensorDict({"y": torch.zeros(3, 4)}))["n"].names == ["t"]


@pytest.mark.parametrize("put", [by_constructor, by_set])
def test_other_names_are_refused(put):
    with pytest.raises(RuntimeError, match="Cannot set 'n' in a TensorDict of dimension names"):
        put(nested(["q", "z"]))
    with pytest.raises(ValueError, match="non-unique"):
        put(nested([None, "t"]))


def test_a_name_given_twice_below_is_refused_before_anything_is_set():
    td = TensorDict({"n": nested([None, "t"])}, [3])
    with pytest.raises(ValueError, match="non-unique"):
        td.names = ["t"]
    assert td.names == [None] and td["n"].names == [None, "t"]
    td.names = ["u"]
    assert td["n"].names == ["u", "t"] and td["n", "m"].names == ["u", "t"]


def test_the_device_attribute_of_values_follows():
    td = TensorDict(
        {"x": torch.zeros(3), "s": "text", "n": {"t": ["a", "b", "c"]}}, [3], device="cpu"
    )
    assert td.get("s").device == torch.device("cpu")
    td.clear_device_()
    assert td.get("s").device is None and td["n"].get("t").device is None and td["n"].device is None
    td.auto_device_()
    assert td.get("s").device == torch.device("cpu") == td["n"].get("t").device
    locked = TensorDict({"s": "text"}, device="cpu").lock_()
    assert locked.clear_device_().get("s").device is None
