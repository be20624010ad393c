"""Merging, grouping, row sets, right expansion, dtype tests: against plain Python."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tensordict import (
    TensorDict,
    dense_stack_tds,
    group_by,
    is_bool,
    is_floating,
    is_inexact,
    is_integer,
    lazy_stack,
    merge_tensordicts,
)
from tensordict.utils import expand_as_right, expand_right, isin, remove_duplicates

keys = st.lists(st.integers(-3, 3), min_size=1, max_size=12)


def keyed(values, **more):
    return TensorDict(
        {"k": torch.tensor(values), "v": torch.arange(len(values)), **more}, [len(values)]
    )


def test_merging_takes_the_first():
    a = TensorDict({"a": torch.zeros(2), "n": {"b": torch.zeros(2)}, "s": "x"}, [2])
    b = TensorDict({"a": torch.ones(2), "n": {"b": torch.ones(2), "c": torch.ones(2)}}, [2])
    c = TensorDict({"d": {"e": torch.ones(2)}, "s": "y"}, [2])
    out = merge_tensordicts(a, b, c)
    assert out.batch_size == (2,) and list(out.keys()) == ["a", "n", "s", "d"]
    assert out["a"] is a["a"] and out["n", "b"] is a["n", "b"] and out["n", "c"] is b["n", "c"]
    assert out["s"] == "x" and out["d"] is c["d"]
    assert "c" not in a["n"] and list(b.keys()) == ["a", "n"], "the sources do not change"


def test_merging_with_a_callback():
    seen = []

    def total(*values):
        seen.append(len(values))
        return sum(values)

    a, b = TensorDict(a=1, n={"b": 1}, x=5), TensorDict(a=2, n={"b": 3}, y=7)
    out = merge_tensordicts(a, b, callback_exist=total)
    assert (
        out["a"] == 3 and out["n", "b"] == 4 and out["x"] == 5 and out["y"] == 7 and seen == [2, 2]
    )
    three = merge_tensordicts(a, b, TensorDict(a=4, x=1), callback_exist=total)
    assert three["a"] == 7 and three["x"] == 5 and three["n", "b"] == 1, "only keys that all have"


def test_what_cannot_be_merged():
    for bad in ((), (TensorDict(),)):
        with pytest.raises(RuntimeError, match="at least 2"):
            merge_tensordicts(*bad)
    with pytest.raises(TypeError, match="dict"):
        merge_tensordicts(TensorDict(), {})
    with pytest.raises(RuntimeError, match="'b'"):
        merge_tensordicts(
            TensorDict({"a": torch.zeros(3)}, [3]), TensorDict({"b": torch.zeros(4)}, [4])
        )


@settings(max_examples=50, deadline=None)
@given(keys)
def test_groups(values):
    distinct, groups = group_by(keyed(values), "k")
    assert distinct.tolist() == sorted(set(values))
    for value, group in zip(distinct.tolist(), groups):
        assert group["v"].tolist() == [i for i, x in enumerate(values) if x == value]
        assert set(group["k"].tolist()) == {value}


def test_groups_by_other_entries():
    td = keyed([0, 1, 2], s=["b", "a", "b"], pair=torch.tensor([[1, 2], [1, 2], [0, 2]]))
    words, groups = group_by(td, "s")
    assert words == ["b", "a"] and [g["v"].tolist() for g in groups] == [[0, 2], [1]]
    pairs, groups = group_by(td, "pair")
    assert pairs.tolist() == [[0, 2], [1, 2]] and [g["v"].tolist() for g in groups] == [[2], [0, 1]]
    nested = TensorDict({"n": {"k": torch.tensor([1, 0])}}, [2])
    assert group_by(nested, ("n", "k"))[0].tolist() == [0, 1]
    for bad, error in (("zz", KeyError), ("n", TypeError)):
        with pytest.raises(error, match=bad):
            group_by(nested, bad)
    with pytest.raises(ValueError, match="none"):
        group_by(TensorDict(a=1), "a")


@settings(max_examples=50, deadline=None)
@given(keys)
def test_duplicates(values):
    out, which = remove_duplicates(keyed(values), "k", return_indices=True)
    assert out["k"].tolist() == sorted(set(values))
    assert out["v"].tolist() == [values.index(x) for x in sorted(set(values))]
    assert out["k"][which].tolist() == values
    assert torch.equal(remove_duplicates(keyed(values), "k")["v"], out["v"])


@settings(max_examples=50, deadline=None)
@given(keys, keys)
def test_membership(values, reference):
    got = isin(keyed(values), keyed(reference), "k")
    assert got.tolist() == [x in reference for x in values]


def test_rows_along_another_dimension():
    td = TensorDict(
        {"k": torch.tensor([[3, 1, 3], [3, 1, 3]]), "v": torch.arange(6).view(2, 3)}, [2, 3]
    )
    assert remove_duplicates(td, "k", dim=1)["v"].tolist() == [[1, 0], [4, 3]]
    assert remove_duplicates(td, "k", dim=-2)["v"].tolist() == [[0, 1, 2]]
    assert isin(td, td[:, :1], "k", dim=1).tolist() == [True, False, True]
    with pytest.raises(ValueError, match="'3'"):
        remove_duplicates(td, "k", dim=3)
    with pytest.raises(KeyError, match="zz"):
        remove_duplicates(td, "zz")
    with pytest.raises(ValueError, match="number of dimensions"):
        isin(td, td[0], "k")
    with pytest.raises(ValueError, match="rows of 'k'"):
        isin(td, td[:, :1], "k", dim=0)


def test_dense_stacks():
    tds = [TensorDict(a=torch.full((2,), float(i)), n={"b": i}) for i in range(3)]
    for out in (dense_stack_tds(tds, 0), dense_stack_tds(lazy_stack(tds, 0))):
        assert (
            type(out) is TensorDict
            and out.batch_size == (3,)
            and out["n", "b"].tolist() == [0, 1, 2]
        )
    for bad, kwargs in ((tds, {}), (TensorDict(), {}), (lazy_stack(tds, 0), {"dim": 1})):
        with pytest.raises(ValueError, match=r"stack"):
            dense_stack_tds(bad, **kwargs)


def test_expanding_on_the_right():
    x = torch.arange(3.0)
    assert torch.equal(expand_right(x, (3, 4)), x.unsqueeze(-1).expand(3, 4))
    assert expand_right(x, (3,)).shape == (3,) and expand_as_right(
        x, torch.zeros(3, 2, 2)
    ).shape == (3, 2, 2)
    td = expand_as_right(TensorDict({"a": x}, [3]), TensorDict({"a": torch.zeros(3, 4)}, [3, 4]))
    assert td.batch_size == (3, 4) and td["a"].shape == (3, 4)
    for bad in (
        lambda: expand_right(x, (4, 3)),
        lambda: expand_right(torch.zeros(2, 2), (2,)),
        lambda: expand_as_right(torch.zeros(2, 2), x),
        lambda: expand_as_right(x, torch.zeros(4, 3)),
    ):
        with pytest.raises(RuntimeError):
            bad()


def test_dtypes():
    td = TensorDict(a=1.0, n={"b": torch.zeros(1, dtype=torch.float16)})
    assert is_floating(td) and is_floating(td, torch.zeros(1), torch.float32) and is_inexact(td)
    assert (
        not is_floating(td, torch.tensor(1))
        and is_inexact(torch.complex64)
        and not is_floating(torch.complex64)
    )
    assert (
        is_integer(TensorDict(a=1), torch.uint8)
        and not is_integer(torch.bool)
        and not is_integer(td)
    )
    assert is_bool(TensorDict(a=True)) and not is_bool(TensorDict(a=True, b=1))
    with pytest.raises(TypeError, match="int"):
        is_integer(3)
