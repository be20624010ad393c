"""Random trees through every conversion and back: values, structure and metadata survive."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

from strategies import FLOATS, gate, slow, trees
from tensordict import (
    TensorDict,
    TensorDictParams,
    assert_close,
    parse_tensor_dict_string,
    set_printoptions,
)

NUMPY = (*FLOATS, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool)


def same(a, b, names=True):
    assert a.batch_size == b.batch_size and (not names or a.names == b.names)
    assert set(a.keys(True)) == set(b.keys(True))
    for key in a.keys(True):
        x, y = a.get(key), b.get(key)
        if isinstance(x, torch.Tensor):
            assert x.dtype == y.dtype and x.shape == y.shape
            assert torch.equal(x, y) or bool((x.isnan() == y.isnan()).all()), key
        elif hasattr(x, "tolist") and not hasattr(x, "keys"):
            assert x.batch_size == y.batch_size and x.tolist() == y.tolist(), key
        else:
            assert x.batch_size == y.batch_size, key


def dict_round_trip(td):
    if any(
        0 in node.batch_size for node in (td, *(v for v in td.values(True) if hasattr(v, "keys")))
    ):
        return  # an empty list does not tell how many dimensions it has
    same(
        TensorDict.from_dict(td.to_dict(), batch_size=td.batch_size, names=td.names), nested_as(td)
    )


def nested_as(td):
    """The tree with every nested batch size cut to the root's, which dicts do not keep."""
    return TensorDict(td.to_dict(), batch_size=td.batch_size, names=td.names)


def dense_copy(td):
    out = td.lock_().to_tensordict()
    same(out, td)
    assert not out.is_locked
    for x, y in zip(out.values(True, True), td.values(True, True)):
        assert not x.numel() or x.data_ptr() != y.data_ptr()


def pytree_round_trip(td):
    leaves, spec = pytree.tree_flatten(td)
    assert len(leaves) == len(list(td.values(True, True)))
    same(pytree.tree_unflatten(leaves, spec), td)
    same(pytree.tree_map(lambda x: x.clone(), td), td)


def state_round_trip(td):
    file = io.BytesIO()
    torch.save(td.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    target = td._map(torch.zeros_like)
    same(target.load_state_dict(state), td)
    same(td.empty().load_state_dict(td.state_dict(flatten=False), strict=False), td)


def as_module(td):
    params = TensorDictParams(td)
    assert set(params.keys(True)) == set(td.keys(True)) and params.batch_size == td.batch_size
    for key, x in td.items(True, True):
        assert torch.equal(params[key], x)
        assert isinstance(params[key], torch.nn.Parameter) is (
            x.is_floating_point() or x.is_complex()
        )
    same(params.data, td)
    same(params.clone().data, td)


def close_to_itself(td):
    assert assert_close(td, td.clone())


ALL = {
    fn.__name__: fn
    for fn in (
        dict_round_trip,
        dense_copy,
        pytree_round_trip,
        state_round_trip,
        as_module,
        close_to_itself,
    )
}


@pytest.mark.parametrize("name", ALL)
@gate
@given(td=trees())
def test_round_trips(name, td):
    ALL[name](td)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
@slow
@given(td=trees())
def test_round_trips_at_length(name, td):
    ALL[name](td)


@gate
@given(td=trees(dtypes=NUMPY, names=False, min_side=1))
def test_structured_arrays(td):
    array = td.to_struct_array()
    assert array.shape == tuple(td.batch_size)
    out = TensorDict.from_struct_array(array) if array.dtype.names else td
    for key, x in td.items(True, True):
        assert torch.equal(out[key], x) and out[key].dtype is x.dtype
        column = array
        for name in key if isinstance(key, tuple) else (key,):
            column = column[name]
        assert np.array_equal(np.asarray(column), x.numpy())


@gate
@given(td=trees(names=False, non_tensor=False), compact=st.booleans())
def test_printed_forms_are_read_back(td, compact):
    with set_printoptions(compact=compact):
        out = parse_tensor_dict_string(repr(td))
    assert out.batch_size == td.batch_size and set(out.keys(True)) == set(td.keys(True))
    for key, x in td.items(True, True):
        assert out[key].shape == x.shape and out[key].dtype is x.dtype


@gate
@given(td=trees(min_dims=1, min_side=1, names=False), data=st.data())
def test_vmap_is_the_identity_over_every_batch_dimension(td, data):
    if not list(td.values(True, True)):
        return
    dim = data.draw(st.integers(0, td.ndim - 1))
    n = td.batch_size[dim]
    seen = []

    def fn(row):
        seen.append(row.batch_size)
        return row

    out = torch.vmap(fn, in_dims=dim, out_dims=dim)(td)
    assert seen == [torch.Size([*td.batch_size[:dim], *td.batch_size[dim + 1 :]])]
    assert out.batch_size == td.batch_size and n == out.batch_size[dim]
    for key, x in td.items(True, True):
        assert torch.equal(out[key], x)


@gate
@given(td=trees(min_dims=1, names=False))
def test_lists(td):
    rows = td.tolist(convert_nodes=False)
    flat = [rows]
    for _ in td.batch_size:
        flat = [row for part in flat for row in part]
    assert len(flat) == td.batch_size.numel()
    if flat:
        same(TensorDict.from_list(rows).to_tensordict()._map(lambda x: x), td)
