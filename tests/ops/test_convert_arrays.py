"""NumPy in and out, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tensordict import TensorDict

DTYPE = [
    ("i", "i4"),
    ("f", "f8", (2,)),
    ("n", [("z", "i8"), ("b", "?")]),
    ("s", "U4"),
    ("o", object),
]


def array():
    rows = [(1, (1.0, 2.0), (3, True), "ab", None), (4, (3.0, 4.0), (6, False), "cde", {"x": 1})]
    return np.array(rows, dtype=DTYPE)


def test_structured_arrays_round_trip():
    source = array()
    td = TensorDict.from_struct_array(source)
    assert td.batch_size == (2,) and td["n"].batch_size == (2,)
    assert td["i"].dtype is torch.int32 and td["f"].shape == (2, 2)
    assert td["s"] == ["ab", "cde"] and td["o"] == [None, {"x": 1}]
    back = td.to_struct_array()
    assert back.dtype.names == source.dtype.names
    for name in source.dtype.names:
        assert back[name].tolist() == source[name].tolist()
    assert np.array_equal(np.asarray(td)["n"]["z"], source["n"]["z"])


def test_scalars_strides_and_byte_orders():
    row = TensorDict.from_struct_array(array()[0])
    assert row.batch_size == () and row["n", "z"] == 3 and row["s"] == "ab"
    back = row.to_struct_array()
    assert back.shape == () and back["i"] == 1
    odd = TensorDict.from_struct_array(array()[::-1])
    assert odd["i"].tolist() == [4, 1]
    big = np.array([(1, 2.0)], dtype=[("a", ">i4"), ("b", ">f8")])
    assert TensorDict.from_struct_array(big)["b"].tolist() == [2.0]
    grid = np.zeros((2, 3), dtype=[("a", "f4", (5,))])
    td = TensorDict.from_struct_array(grid)
    assert td.batch_size == (2, 3) and td["a"].shape == (2, 3, 5)
    assert TensorDict.from_struct_array(grid, batch_dims=1).batch_size == (2,)
    assert TensorDict.from_struct_array(grid, auto_batch_size=True).batch_size == (2, 3, 5)
    assert TensorDict.from_struct_array(grid, batch_size=[2], device="meta").is_meta


def test_longer_nested_batches():
    td = TensorDict({"n": TensorDict({"a": torch.arange(6).view(2, 3)}, [2, 3])}, [2])
    out = td.to_struct_array()
    assert (
        out.shape == (2,)
        and out["n"].shape == (2, 3)
        and out["n"]["a"].tolist() == [[0, 1, 2], [3, 4, 5]]
    )


def test_what_is_no_structured_array():
    for bad in (np.zeros(3), [1, 2], 3):
        with pytest.raises(TypeError, match="fields"):
            TensorDict.from_struct_array(bad)
    with pytest.raises(TypeError, match="'a'"):
        TensorDict(a=torch.zeros(2, dtype=torch.bfloat16)).to_struct_array()


def test_grad_and_copies():
    td = TensorDict({"a": torch.ones(2, requires_grad=True)}, [2])
    assert td.to_struct_array()["a"].tolist() == [1.0, 1.0]
    with pytest.raises(RuntimeError, match="grad"):
        td.numpy()
    with pytest.raises(ValueError, match="copy"):
        np.array(td, copy=False)


def test_dicts_of_arrays_share_memory():
    td = TensorDict(
        {"a": torch.zeros(2), "n": {"b": torch.ones(2, 3)}, "s": "x", "r": ["p", "q"]}, [2]
    )
    out = td.numpy()
    out["a"][0] = 5
    assert td["a"][0] == 5 and out["n"]["b"].shape == (2, 3)
    assert out["s"] == "x" and out["r"] == ["p", "q"]


def test_numpy_numbers_leave_arithmetic_to_us():
    td = TensorDict({"a": torch.ones(2)}, [2])
    assert torch.equal((np.float64(2) * td)["a"], torch.full((2,), 2.0))
    assert torch.equal((np.array([1.0, 3.0], dtype=np.float32) * td)["a"], torch.tensor([1.0, 3.0]))


def test_leaves_exchange_memory_by_dlpack():
    td = TensorDict({"a": torch.arange(3)}, [3])
    array = np.from_dlpack(td["a"])
    td["a"][0] = 7
    assert array[0] == 7 and torch.from_dlpack(array).data_ptr() == td["a"].data_ptr()
