"""Indexing reads: as a tensor of the batch shape, on every leaf, metadata included."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from strategies import check_batch_op, gate, indices, slow, trees
from tensordict import NonTensorStack, TensorDict


def check(td, data):
    index, plain = data.draw(indices(td.batch_size))
    if isinstance(index, (tuple, list)) and not isinstance(plain, tuple):
        index = (index,) if isinstance(index, tuple) else index
    check_batch_op(td, td[index], lambda x, tail: x[plain])


@given(td=trees(min_dims=1), data=st.data())
@gate
def test_agrees_with_torch_on_each_leaf(td, data):
    check(td, data)


@pytest.mark.slow
@given(td=trees(min_dims=1), data=st.data())
@slow
def test_agrees_with_torch_on_each_leaf_long(td, data):
    check(td, data)


def make(**kwargs):
    nested = TensorDict({"b": torch.arange(24).view(3, 4, 2)}, [3, 4, 2])
    entries = {
        "a": torch.arange(12).view(3, 4),
        "n": nested,
        "v": "text",
        "s": [["r0"] * 4, ["r1"] * 4, ["r2"] * 4],
    }
    return TensorDict(entries, [3, 4], names=["x", "y"], **kwargs)


MASK = torch.tensor([True, False, True])
TABLE = [
    (0, [4], ["y"]),
    (-1, [4], ["y"]),
    (torch.tensor(1), [4], ["y"]),
    (np.int64(1), [4], ["y"]),
    (slice(1, None), [2, 4], ["x", "y"]),
    (slice(None, None, 2), [2, 4], ["x", "y"]),
    ([0, 2], [2, 4], ["x", "y"]),
    ([], [0, 4], ["x", "y"]),
    (range(2), [2, 4], ["x", "y"]),
    (range(0), [0, 4], ["x", "y"]),
    (range(2, -1, -1), [3, 4], ["x", "y"]),
    (torch.tensor([0, 0, 1]), [3, 4], ["x", "y"]),
    (torch.tensor([0, 1], dtype=torch.int8), [2, 4], ["x", "y"]),
    (np.array([0, 2]), [2, 4], ["x", "y"]),
    (MASK, [2, 4], ["x", "y"]),
    (MASK.to(torch.uint8), [2, 4], ["x", "y"]),
    ([True, False, True], [2, 4], ["x", "y"]),
    (MASK.numpy(), [2, 4], ["x", "y"]),
    ((slice(None), 1), [3], ["x"]),
    ((..., 0), [3], ["x"]),
    ((slice(None), [0, 1]), [3, 2], ["x", "y"]),
    ((0, [0, 1]), [2], ["y"]),
    (None, [1, 3, 4], [None, "x", "y"]),
    ((slice(None), None), [3, 1, 4], ["x", None, "y"]),
    ((..., None), [3, 4, 1], ["x", "y", None]),
    (True, [1, 3, 4], [None, "x", "y"]),
    (False, [0, 3, 4], [None, "x", "y"]),
    (np.bool_(True), [1, 3, 4], [None, "x", "y"]),
    (torch.tensor(True), [1, 3, 4], [None, "x", "y"]),
    (torch.zeros(2, 2, dtype=torch.int64), [2, 2, 4], [None, None, "y"]),
    ([[0, 1], [1, 2]], [2, 2, 4], [None, None, "y"]),
    ((slice(None), torch.zeros(2, 2, dtype=torch.int64)), [3, 2, 2], ["x", None, None]),
    (torch.ones(3, 4, dtype=torch.bool), [12], [None]),
    (([0, 1], [1, 2]), [2], [None]),
    ((torch.tensor([[0], [1]]), [1, 2]), [2, 2], [None, None]),
    (([0, 1], None), [2, 1, 4], ["x", None, "y"]),
    ((None, [0, 1]), [1, 2, 4], [None, "x", "y"]),
    (([0, 1], None, [0, 1]), [2, 1], [None, None]),
    ((), [3, 4], ["x", "y"]),
    (..., [3, 4], ["x", "y"]),
]


@pytest.mark.parametrize(("index", "batch", "names"), TABLE, ids=lambda x: str(x)[:24])
def test_batch_size_and_names(index, batch, names):
    td = make()
    out = td[index]
    assert list(out.batch_size) == batch and out.names == names
    assert out["n"].batch_size == (*batch, 2)
    assert out.get("v").batch_size == out.batch_size and out["v"] == "text"
    assert out.get("s").batch_size == out.batch_size


def test_all_of_it_is_itself():
    td = make()
    assert td[...] is td and td[()] is td
    assert TensorDict(a=0)[...].batch_size == ()


def test_device_is_kept_and_the_lock_is_not():
    td = make(device="cpu", lock=True)
    for index in (0, slice(1), [0], None, MASK):
        out = td[index]
        assert out.device == torch.device("cpu") and out["n"].device == torch.device("cpu")
        assert not out.is_locked and not out["n"].is_locked


def test_views_and_copies():
    td = make()
    place = td["a"].untyped_storage().data_ptr()
    for index in (0, slice(1, None), (slice(None), 1), None, (..., None)):
        assert td[index]["a"].untyped_storage().data_ptr() == place
    for index in ([0, 1], torch.tensor([0]), MASK, range(2)):
        assert td[index]["a"].untyped_storage().data_ptr() != place


def test_an_index_is_read_once_for_the_whole_tree(monkeypatch):
    calls = []
    for name in ("nonzero", "__getitem__", "index_select"):
        real = getattr(torch.Tensor, name)

        def counted(self, *args, _name=name, _real=real, **kwargs):
            calls.append(_name)
            return _real(self, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, counted)
    td = TensorDict({str(i): torch.arange(3) for i in range(5)}, [3])
    td[MASK]
    assert calls == ["nonzero"] + ["index_select"] * 5
    calls.clear()
    td[torch.tensor([0, 1])]
    assert calls == ["index_select"] * 5


def test_rows_of_non_tensor_entries():
    td = TensorDict({"s": NonTensorStack("p", "q", "r"), "v": "same"}, [3])
    assert td[1]["s"] == "q" and list(td[[2, 0]]["s"]) == ["r", "p"]
    assert list(td[MASK]["s"]) == ["p", "r"] and td[1]["v"] == "same"
    assert td[None].get("s").batch_size == (1, 3)


def test_get_at_reads_one_entry():
    td = make()
    assert torch.equal(td.get_at("a", 1), td["a"][1])
    assert torch.equal(td.get_at(("n", "b"), (slice(None), [0, 1])), td["n", "b"][:, [0, 1]])
    assert td.get_at("n", 0).batch_size == (4, 2)
    assert td.get_at("missing", 0) is None and td.get_at("missing", 0, 5) == 5
    assert td.get_at("a", ...) is td["a"]


def test_getitems_is_one_operation():
    td = make()
    assert torch.equal(td.__getitems__([2, 0])["a"], td["a"][[2, 0]])
    loader = torch.utils.data.DataLoader(td, batch_size=2, collate_fn=lambda x: x)
    assert [x.batch_size[0] for x in loader] == [2, 1]


def test_gradients_flow_through():
    x = torch.ones(3, 2, requires_grad=True)
    td = TensorDict({"a": x}, [3])
    for index in (0, slice(1, None), [0, 2], MASK, (None, [1])):
        x.grad = None
        td[index]["a"].sum().backward()
        expected = torch.zeros(3, 2)
        expected[index[1] if isinstance(index, tuple) else index] = 1
        assert torch.equal(x.grad, expected)


LONG = torch.int64
MALFORMED = {
    "too many": (make, (0, 0, 0), IndexError, "3 dimensions"),
    "too many with a mask": (make, (torch.ones(3, 4, dtype=torch.bool), 0), IndexError, "3 dim"),
    "out of range": (make, 3, IndexError, "index 3 is out of range.*size 3"),
    "out of range below": (make, -4, IndexError, "index -4"),
    "second out of range": (make, (0, 4), IndexError, "index 4.*dimension 1 of size 4"),
    "tensor out of range": (make, torch.tensor([0, 3]), IndexError, "index 3"),
    "tensor below range": (make, torch.tensor([-4]), IndexError, "index -4"),
    "list out of range": (make, [5], IndexError, "index 5"),
    "second list out of range": (make, (slice(None), [0, 4]), IndexError, "index 4"),
    "two tensors out of range": (make, ([0], [9]), IndexError, "index 9"),
    "two tensors of several sizes": (make, ([0, 1, 2], [0, 1]), IndexError, "Cannot index"),
    "float": (make, 0.5, IndexError, "0.5"),
    "list of floats": (make, [0.5], IndexError, "float32"),
    "tensor of floats": (make, torch.zeros(2), IndexError, "float32"),
    "complex": (make, torch.zeros(1, dtype=torch.complex64), IndexError, "complex64"),
    "object": (make, object(), IndexError, "of type object"),
    "dict": (make, {}, IndexError, "of type dict"),
    "set": (make, {1}, IndexError, "of type set"),
    "list of objects": (make, [object()], IndexError, "expected integers or booleans"),
    "ragged list": (make, [[0, 1], [0]], IndexError, "expected integers or booleans"),
    "array of text": (make, np.array(["a"]), IndexError, "expected integers or booleans"),
    "row and key": (make, (0, "a"), IndexError, "'a' of type str"),
    "two ellipses": (make, (..., ...), IndexError, "single ellipsis"),
    "negative step": (make, slice(None, None, -1), ValueError, "greater than zero"),
    "step of zero": (make, slice(None, None, 0), ValueError, "greater than zero"),
    "inner negative step": (make, (0, slice(None, None, -2)), ValueError, "greater than zero"),
    "slice of floats": (make, slice(0.5, 2), IndexError, "slice"),
    "short mask": (make, torch.ones(2, dtype=torch.bool), IndexError, r"mask \[2\].*\[3, 4\]"),
    "long mask": (make, [True] * 4, IndexError, r"mask \[4\]"),
    "mask of another shape": (make, torch.ones(4, 3, dtype=torch.bool), IndexError, r"\[4, 3\]"),
    "second mask": (make, (0, torch.ones(3, dtype=torch.bool)), IndexError, "at dim 1"),
    "no batch, int": (lambda: TensorDict(a=0), 0, RuntimeError, "batch_dims==0"),
    "no batch, slice": (lambda: TensorDict(a=0), slice(None), RuntimeError, "batch_dims==0"),
    "no batch, list": (lambda: TensorDict(a=0), [0], RuntimeError, "batch_dims==0"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_indices_say_what_is_wrong(name):
    build, index, error, text = MALFORMED[name]
    td = build()
    with pytest.raises(error, match=text):
        td[index]
    before = {path: x.clone() for path, x in td.items(True, True)}
    with pytest.raises(error, match=text):
        td[index] = td
    assert all(torch.equal(td.get(path), x) for path, x in before.items())
