"""masked_select, masked_fill and where: against torch on each leaf."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from strategies import check_batch_op, flat, gate, slow, trees
from tensordict import NonTensorStack, TensorDict

MASK = torch.tensor([[True, False, True], [False, False, True]])
ROW = torch.tensor([True, False])


def a_mask(td, draw):
    k = draw(st.integers(0, td.ndim))
    shape = td.batch_size[:k]
    return torch.tensor([draw(st.booleans()) for _ in range(shape.numel())]).bool().view(shape)


def right(mask, x):
    return mask.view(mask.shape + (1,) * (x.ndim - mask.ndim))


def case_masked_select(td, draw):
    mask = a_mask(td, draw)
    td = td if td.ndim else td.unsqueeze(0)
    return td, td.masked_select(mask), lambda x, tail: x[mask]


def case_masked_fill(td, draw):
    mask = a_mask(td, draw)
    return td, td.masked_fill(mask, 1), lambda x, tail: x.masked_fill(right(mask, x), 1)


def case_masked_fill_(td, draw):
    mask = a_mask(td, draw)
    before = td.clone()
    assert td.masked_fill_(mask, 1) is td
    return before, td, lambda x, tail: x.masked_fill(right(mask, x), 1)


def case_where_number(td, draw):
    mask = a_mask(td, draw)
    return td, td.where(mask, 1), lambda x, tail: torch.where(right(mask, x), x, 1)


def case_where_tensor(td, draw):
    mask = a_mask(td, draw)
    other = torch.arange(float(td.batch_size.numel())).view(td.batch_size)
    return (
        td,
        td.where(mask, other),
        (lambda x, tail: torch.where(right(mask, x), x, right(other, x) if other.ndim else other)),
    )


CASES = [fn for name, fn in list(globals().items()) if name.startswith("case_")]


def check(case, td, data):
    source, result, op = case(td, data.draw)
    check_batch_op(source, result, op)


@pytest.mark.parametrize("case", CASES, ids=lambda fn: fn.__name__[5:])
@given(td=trees(non_tensor=False), data=st.data())
@gate
def test_agrees_with_torch_on_each_leaf(case, td, data):
    check(case, td, data)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda fn: fn.__name__[5:])
@given(td=trees(non_tensor=False), data=st.data())
@slow
def test_agrees_with_torch_on_each_leaf_long(case, td, data):
    check(case, td, data)


def choose(td, data):
    other = td._map(lambda x: x.logical_not().to(x.dtype))
    mask = a_mask(td, data.draw)
    result = td.where(mask, other)
    theirs = flat(other)
    for path, x in flat(td).items():
        if isinstance(x, Tensor):
            assert torch.equal(flat(result)[path], torch.where(right(mask, x), x, theirs[path]))
    assert result.batch_size == td.batch_size and result.names == td.names


@given(td=trees(), data=st.data())
@gate
def test_where_of_two_trees_agrees_with_torch(td, data):
    choose(td, data)


@pytest.mark.slow
@given(td=trees(), data=st.data())
@slow
def test_where_of_two_trees_agrees_with_torch_long(td, data):
    choose(td, data)


def make(value=0.0):
    nested = TensorDict({"b": torch.full((2, 3, 4), value)}, [2, 3])
    return TensorDict({"a": torch.full((2, 3), value), "n": nested}, [2, 3], names=["x", "y"])


def test_names_and_locks():
    td = make()
    assert td.masked_select(MASK).names == [None] and td.masked_select(ROW).names == ["x", "y"]
    assert td.masked_fill(ROW, 1).names == td.where(MASK, 1).names == ["x", "y"]
    td.lock_()
    assert not td.masked_fill(ROW, 1).is_locked and not td.where(ROW, td).is_locked
    assert td.masked_fill_(ROW, 2).is_locked and td["a"][0, 0] == 2


def test_masked_select_in_place():
    td = make()
    assert td.masked_select(MASK, inplace=True) is td
    assert td.batch_size == (3,) and td["n", "b"].shape == (3, 4)


def test_torch_functions():
    td, other = make(1), make(2)
    assert torch.equal(torch.where(MASK, td, other)["a"], torch.where(MASK, 1.0, 2.0))
    assert torch.equal(torch.where(MASK, td, 5.0)["a"], torch.where(MASK, 1.0, 5.0))
    assert torch.equal(torch.where(MASK, 5.0, td)["a"], torch.where(MASK, 5.0, 1.0))
    assert torch.masked_select(td, MASK)["a"].shape == (3,)
    assert torch.masked_fill(td, MASK, 3)["a"][0, 0] == 3


def test_where_pads_entries_of_one_side():
    td, other = make(1), make(2)
    other["extra"] = torch.full((2, 3), 7.0)
    with pytest.raises(KeyError, match="'extra' not found in this tensordict and no pad"):
        td.where(MASK, other)
    with pytest.raises(KeyError, match="'n' not found in the other"):
        td.where(MASK, other.select("a", "extra"))
    out = td.where(MASK, other.select("a", "extra"), pad=-1)
    assert torch.equal(out["extra"], torch.where(MASK, -1.0, 7.0))
    assert torch.equal(out["n", "b"][..., 0], torch.where(MASK, 1.0, -1.0))


def test_where_into_out():
    td, other = make(1), make(2)
    out = make()
    a = out["a"]
    assert td.where(MASK, other, out=out) is out and out["a"] is a
    assert torch.equal(a, torch.where(MASK, 1.0, 2.0))
    wide = TensorDict({"a": torch.zeros(2, 3), "n": {"b": torch.zeros(2, 3, 4)}}, [2])
    with pytest.raises(RuntimeError, match="batch size"):
        td.where(MASK, other, out=wide)
    assert td.where(MASK, other, out=wide, update_batch_size=True).batch_size == (2, 3)


def test_where_of_non_tensor_entries():
    one = TensorDict({"s": NonTensorStack("p", "q"), "t": "same"}, [2])
    two = TensorDict({"s": "r", "t": "same"}, [2])
    out = one.where(ROW, two)
    assert out.get("s").tolist() == ["p", "r"] and out["t"] == "same"


BAD = {
    "select shape": (lambda td: td.masked_select(ROW[:1]), IndexError, r"starts with, got \[1\]"),
    "select dtype": (lambda td: td.masked_select(torch.zeros(2)), TypeError, "float32"),
    "fill shape": (lambda td: td.masked_fill(MASK.T, 1), RuntimeError, r"got \[3, 2\]"),
    "fill dtype": (lambda td: td.masked_fill([True], 1), TypeError, "list"),
    "fill_ shape": (lambda td: td.masked_fill_(MASK[0], 1), RuntimeError, r"got \[3\]"),
    "fill_ value": (lambda td: td.masked_fill_(ROW, "x"), TypeError, "a str"),
    "fill value": (lambda td: td.masked_fill(ROW, torch.ones(2)), TypeError, "a Tensor"),
    "where shape": (lambda td: td.where(torch.ones(4).bool(), td), RuntimeError, r"got \[4\]"),
    "where batch": (lambda td: td.where(ROW, td[0]), RuntimeError, r"batch size \[2, 3\]"),
    "where text": (lambda td: td.where(ROW, "x"), TypeError, "a str"),
    "where kinds": (
        lambda td: td.where(ROW, TensorDict({"a": {}, "n": {}}, [2, 3])),
        KeyError,
        "'a'",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_malformed_calls_say_what_is_wrong(name):
    call, error, text = BAD[name]
    td = make()
    with pytest.raises(error, match=text):
        call(td)
    assert all((x == 0).all() for x in td.values(True, True))


def test_a_value_that_one_leaf_cannot_hold_fills_none():
    td = TensorDict({"a": torch.zeros(2), "b": torch.zeros(2, dtype=torch.int64)}, [2])
    with pytest.raises(RuntimeError):
        td.masked_fill_(ROW, float("nan"))
    assert (td["a"] == 0).all() and (td["b"] == 0).all()
