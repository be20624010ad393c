"""Nested dicts in and out, dense copies."""

from __future__ import annotations

import pytest
import torch

from tensordict import (
    MetaData,
    NonTensorData,
    TensorDict,
    TensorDictBase,
    is_tensor_collection,
    tensorclass,
)


def source():
    return {
        "a": torch.arange(12.0).view(3, 4),
        "n": {"b": torch.ones(3), "s": "hi", ("x", "y"): torch.zeros(3)},
        "rows": ["u", "v", "w"],
        "none": None,
    }


def test_dicts_round_trip():
    td = TensorDict.from_dict(source(), batch_size=[3], names=["t"])
    assert td.batch_size == (3,) and td.names == ["t"] and td["n"].batch_size == (3,)
    out = td.to_dict()
    assert type(out["n"]) is dict and set(out["n"]) == {"b", "s", "x"}
    assert out["a"] is td["a"] and out["n"]["s"] == "hi" and out["rows"] == ["u", "v", "w"]
    assert out["none"] is None and "none" not in td.to_dict(retain_none=False)


def test_tensors_as_lists():
    td = TensorDict.from_dict(source(), batch_size=[3])
    out = td.to_dict(convert_tensors=True)
    assert out["a"] == source()["a"].tolist() and out["n"]["b"] == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("kwargs", "batch", "below"),
    [
        ({}, (), ()),
        ({"batch_size": [3]}, (3,), (3,)),
        ({"auto_batch_size": True}, (3, 4), (3, 4, 5)),
        ({"batch_dims": 1}, (3,), (3,)),
        ({"auto_batch_size": True, "batch_dims": 1}, (3,), (3,)),
        ({"auto_batch_size": False}, (), ()),
    ],
)
def test_batch_sizes(kwargs, batch, below):
    data = {"a": torch.zeros(3, 4), "b": {"c": torch.zeros(3, 4, 5)}}
    td = TensorDict.from_dict(data, **kwargs)
    assert td.batch_size == batch and td["b"].batch_size == below


def test_names_of_a_batch_size_that_is_found_out():
    td = TensorDict.from_dict({"a": torch.zeros(3, 4)}, auto_batch_size=True, names=["x", "y"])
    assert td.names == ["x", "y"]


def test_device_and_class():
    td = TensorDict.from_dict({"a": torch.zeros(3)}, device="meta")
    assert td["a"].device.type == "meta" and td.device.type == "meta"

    class Mine(TensorDict):
        pass

    assert type(Mine.from_dict({"a": 1})) is Mine
    assert type(Mine(a=1).from_dict_instance({"a": 1})) is Mine


def test_a_bad_entry_is_named():
    with pytest.raises(RuntimeError, match="'b'"):
        TensorDict.from_dict({"a": torch.zeros(3), "n": {"b": torch.zeros(4)}}, batch_size=[3])
    with pytest.raises(KeyError, match="NestedKeys"):
        TensorDict.from_dict({1: torch.zeros(3)})


def test_dense_copies():
    class Mine(TensorDict):
        pass

    td = Mine(
        {"a": torch.zeros(3), "n": Mine({"s": "x", "none": None}, [3])}, [3], names=["t"]
    ).lock_()
    out = td.to_tensordict()
    assert type(out) is TensorDict and type(out["n"]) is TensorDict
    assert out["a"] is not td["a"] and out["a"].data_ptr() != td["a"].data_ptr()
    assert out.names == ["t"] and out["n", "s"] == "x" and not out.is_locked and "none" in out["n"]
    assert "none" not in td.to_tensordict(retain_none=False)["n"]


def test_what_is_a_tensor_collection():
    for yes in (TensorDict, TensorDict(), TensorDictBase, NonTensorData("x"), MetaData):
        assert is_tensor_collection(yes)
    for no in (torch.zeros(1), torch.Tensor, dict, {}, "x", None, type):
        assert not is_tensor_collection(no)


@tensorclass
class Typed:
    x: torch.Tensor
    n: torch.Tensor = None


def test_fields_that_hold_nothing():
    td = TensorDict(t=Typed(x=torch.zeros(2)))
    assert list(td.to_dict()["t"]) == ["x", "n"] and td.to_dict()["t"]["n"] is None
    assert td.to_dict(convert_tensors=True) == {"t": {"x": [0.0, 0.0], "n": None}}
    assert list(td.to_dict(retain_none=False)["t"]) == ["x"]
