"""Tuples, named tuples, dataclasses, lists and pytrees against plain Python."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tensordict import NonTensorStack, TensorDict

Pair = namedtuple("Pair", "a b")


@dataclasses.dataclass
class Record:
    x: torch.Tensor
    s: str = "text"
    none: Any = None


def plain(value):
    """Tensors as lists, everything else as it is: comparable with ==."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    return [plain(v) for v in value] if isinstance(value, list) else value


def test_anything():
    obj = {
        "tuple": (1, {"deep": 2.5}),
        "pair": Pair(1, True),
        "record": Record(torch.zeros(2)),
        "numbers": [[1, 2], [3, 4]],
        "words": ["u", "v"],
        "array": np.arange(3),
        "fields": np.array([(1, 2.0)], dtype=[("i", "i4"), ("f", "f8")]),
        "none": None,
        "ordered": OrderedDict(z=1),
        "td": TensorDict(a=1),
    }
    td = TensorDict.from_any(obj)
    got = plain(td.to_dict())
    assert got["tuple"] == {"0": 1, "1": {"deep": 2.5}} and got["pair"] == {"a": 1, "b": True}
    assert got["record"] == {"x": [0.0, 0.0], "s": "text", "none": None}
    assert got["numbers"] == [[1, 2], [3, 4]] and got["words"] == ["u", "v"]
    assert got["array"] == [0, 1, 2] and got["fields"] == {"i": [1], "f": [2.0]}
    assert got["none"] is None and got["ordered"] == {"z": 1} and got["td"] == {"a": 1}
    assert td["fields"].batch_size == (1,)


def test_what_is_no_container_comes_back():
    for obj in (3, "x", None, np.zeros(2), torch.zeros(2)):
        assert TensorDict.from_any(obj) is obj
    assert torch.equal(TensorDict.from_any([1, 2]), torch.tensor([1, 2]))
    for obj in ([1, "a"], [torch.zeros(2), torch.zeros(3)], [{"a": 1}], [[1], [1, 2]], []):
        out = TensorDict.from_any(obj)
        assert isinstance(out, NonTensorStack) and out.batch_size == (len(obj),)


@pytest.mark.parametrize(
    ("kwargs", "batch"),
    [
        ({}, ()),
        ({"batch_size": [3]}, (3,)),
        ({"auto_batch_size": True}, (3, 4)),
        ({"batch_dims": 1}, (3,)),
    ],
)
def test_batch_sizes_and_devices(kwargs, batch):
    data = Pair(torch.zeros(3, 4), {"c": torch.zeros(3, 4, 5)})
    for td in (
        TensorDict.from_any(data, **kwargs),
        TensorDict.from_namedtuple(data, **kwargs),
        TensorDict.from_tuple(tuple(data), **kwargs),
        TensorDict.from_any(TensorDict.from_any(data), **kwargs),
    ):
        assert td.batch_size == batch
    assert TensorDict.from_any(data, device="meta")["a"].is_meta
    assert TensorDict.from_any(TensorDict(a=1), device="meta")["a"].is_meta


def test_each_reader_takes_its_own_kind_only():
    for fn, bad in (
        (TensorDict.from_tuple, [1, 2]),
        (TensorDict.from_namedtuple, (1, 2)),
        (TensorDict.from_dataclass, Record),
        (TensorDict.from_dataclass, {"x": 1}),
        (TensorDict.from_pytree, 3),
        (TensorDict.from_list, [1, 2]),
    ):
        with pytest.raises(TypeError, match="expected"):
            fn(bad)


def test_dataclasses():
    td = TensorDict.from_dataclass(Record(torch.zeros(2, 3)), auto_batch_size=True)
    assert td.batch_size == (2, 3) and td["s"] == "text" and td["none"] is None

    class Dest:
        from_tensordict = staticmethod(lambda td: ("dest", td["s"]))

    assert TensorDict.from_dataclass(Record(torch.zeros(1)), dest_cls=Dest) == ("dest", "text")


def test_named_tuples():
    td = TensorDict({"a": torch.arange(2), "b": {"c": "x"}}, [])
    out = td.to_namedtuple()
    assert type(out).__name__ == "GenericDict" and out.b.c == "x" and out.a is td["a"]
    mine = td.to_namedtuple(Pair)
    assert type(mine) is Pair and mine.b.c == "x"
    back = TensorDict.from_namedtuple(out)
    assert set(back.keys(True)) == set(td.keys(True))
    with pytest.raises(ValueError, match="a b"):
        TensorDict({"a b": 1}).to_namedtuple()


trees = st.recursive(
    st.one_of(st.integers(-5, 5), st.text(max_size=2), st.none(), st.booleans()),
    lambda below: st.one_of(
        st.lists(below, max_size=3),
        st.tuples(below, below),
        st.builds(Pair, below, below),
        st.dictionaries(st.one_of(st.text(max_size=2), st.integers(0, 3)), below, max_size=3),
    ),
    max_leaves=8,
)


def same(a, b):
    if isinstance(b, torch.Tensor):
        return not isinstance(a, str) and bool(b == a) and b.ndim == 0
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b))
    return a == b


@settings(max_examples=80, deadline=None)
@given(st.one_of(st.lists(trees), st.tuples(trees), st.dictionaries(st.text(max_size=2), trees)))
def test_pytrees_round_trip(tree):
    assert same(tree, TensorDict.from_pytree(tree).to_pytree())


def test_pytrees_batch_and_other_tensordicts():
    td = TensorDict.from_pytree([torch.zeros(3, 2), {"a": torch.zeros(3)}], auto_batch_size=True)
    assert td.batch_size == (3,)
    plain_td = TensorDict({"a": torch.zeros(2), "n": {"b": torch.zeros(2)}}, [2])
    out = plain_td.to_pytree()
    assert out is not plain_td and out["n", "b"] is plain_td["n", "b"]
    tree = {1: 0, "1": 1, ("a", "b"): 2, "_pytree": 3}
    assert same(tree, TensorDict.from_pytree(tree).to_pytree())


def test_lists_stack():
    td = TensorDict.from_list([{"a": 1, "n": {"s": "x"}}, {"a": 2, "n": {"s": "y"}}])
    assert td.batch_size == (2,) and td["n", "s"] == ["x", "y"]
    nested = TensorDict.from_list([[{"a": 1}, {"a": 3}], [{"a": 2}, {"a": 4}]], names=["x", "y"])
    assert nested["a"].tolist() == [[1, 3], [2, 4]] and nested.names == ["x", "y"]
    rows = [{"a": torch.zeros(2)}, {"a": torch.ones(2)}]
    assert TensorDict.from_list(rows, batch_size=[2, 2]).batch_size == (2, 2)
    assert TensorDict.from_list(rows, auto_batch_size=True).batch_size == (2, 2)
    assert TensorDict.from_list(rows, batch_dims=1, device="meta").is_meta
    assert TensorDict.from_list([TensorDict(a=1), {"a": 2}])["a"].tolist() == [1, 2]
    for bad in ([], [[]], [[{"a": 1}], []]):
        with pytest.raises(RuntimeError, match="empty list"):
            TensorDict.from_list(bad)
    with pytest.raises(RuntimeError, match="for key a"):
        TensorDict.from_list([{"a": torch.zeros(2)}, {"a": torch.zeros(3)}], lazy=False)


def test_to_lists():
    td = TensorDict({"a": torch.arange(4).view(2, 2), "n": {"s": "x"}, "r": ["p", "q"]}, [2])
    rows = td.tolist()
    assert plain(rows) == [
        {"a": [0, 1], "n": {"s": "x"}, "r": "p"},
        {"a": [2, 3], "n": {"s": "x"}, "r": "q"},
    ]
    assert td.tolist(convert_tensors=True)[1]["a"] == [2, 3]
    assert all(type(row) is TensorDict for row in td.tolist(convert_nodes=False))
    two = TensorDict({"a": torch.arange(4).view(2, 2)}, [2, 2]).tolist(convert_tensors=True)
    assert two == [[{"a": 0}, {"a": 1}], [{"a": 2}, {"a": 3}]]
    assert plain(TensorDict(a=1).tolist()) == {"a": 1}
    assert plain(TensorDict.from_list(td.tolist()).tolist()) == plain(rows)


def test_nested_batches_first():
    td = TensorDict({"n": TensorDict({"a": torch.arange(2)}, [2]), "e": {}})
    assert td.to_dict(tolist_first=True, convert_tensors=True) == {
        "n": [{"a": 0}, {"a": 1}],
        "e": {},
    }


def test_one_value_under_each_key():
    td = TensorDict.fromkeys(["a", ("n", "b")], 1.5)
    assert td["n", "b"] == 1.5 and set(td.keys(True, True)) == {"a", ("n", "b")}


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_lists_of_flat_and_of_nested_trees_agree(rows):
    flat = TensorDict({"a": torch.rand(rows, 2), "b": torch.arange(rows)}, [rows])
    nested = TensorDict({"n": flat, "s": "x"}, [rows])
    for options in ({}, {"convert_tensors": True}):
        expected = [row["n"] for row in nested.tolist(**options)]
        found = flat.tolist(**options)
        assert len(found) == rows
        for mine, theirs in zip(found, expected):
            assert list(mine) == list(theirs) == ["a", "b"]
            assert all(
                torch.equal(torch.as_tensor(mine[k]), torch.as_tensor(theirs[k])) for k in mine
            )
