"""Row writes into lazy stacks, nested ones too, against the same writes into a dense tensordict."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from contract.kinds import check_same, content
from strategies import gate, slow, trees
from tensordict import LazyStackedTensorDict, lazy_stack

ITEMS = st.one_of(
    st.integers(-3, 2),
    st.builds(slice, st.integers(-3, 3), st.integers(-3, 3)),
    st.lists(st.integers(0, 2), min_size=1, max_size=3, unique=True),
    st.just(None),
    st.just(...),
    st.lists(st.booleans(), min_size=3, max_size=3),
)


def stacked(dense, dim, inner):
    """The rows of a tree as a lazy stack, whose members are stacks too when ``inner`` says so."""
    rows = [row.clone() for row in dense.unbind(dim)]
    if inner is not None:
        rows = [lazy_stack([x.clone() for x in row.unbind(inner)], inner) for row in rows]
    return LazyStackedTensorDict(*rows, stack_dim=dim)


def value_for(rows, dense, how):
    if how == "tensordict":
        return rows.clone().apply(lambda x: x + 1)
    if how == "number":
        return 1
    if how == "one row":
        return dense.flatten()[5].clone()
    return {key: x + 2 for key, x in rows.items() if isinstance(x, torch.Tensor)}


def check(dense, dim, inner, index, how):
    if sum(item is ... for item in index) > 1:
        return
    dense = dense.clone()
    lazy = stacked(dense, dim, inner)
    try:
        rows = dense[index]
    except IndexError:
        with pytest.raises(IndexError):
            lazy[index] = 1
        return
    value = value_for(rows, dense, how)
    if value is None:  # no leaf to write
        return
    dense[index] = value
    lazy[index] = value
    check_same(content(lazy), content(dense))


CASES = given(
    trees(batch=(3, 3, 3), depth=1, min_leaves=1, names=False, dtypes=(torch.float32, torch.int64)),
    st.integers(0, 2),
    st.sampled_from([None, 0, 1]),
    st.lists(ITEMS, min_size=1, max_size=3).map(tuple),
    st.sampled_from(["tensordict", "number", "one row", "dict"]),
)


@gate
@CASES
def test_row_writes(dense, dim, inner, index, how):
    check(dense, dim, inner, index, how)


@pytest.mark.slow
@slow
@CASES
def test_row_writes_long(dense, dim, inner, index, how):
    check(dense, dim, inner, index, how)
