"""Shape operations that keep every element: against torch on each leaf, metadata included."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from strategies import check_per_leaf, gate, slow, trees


def same_everywhere(td, result, op, names=None):
    """``op`` on a batch-shaped tensor tells the batch size; on a leaf, its trailing dims follow."""
    n = td.ndim
    proxy = torch.zeros(td.batch_size)
    assert result.batch_size == op(proxy, ()).shape
    assert result.device == td.device
    if names is not None:
        assert result.names == names
    check_per_leaf(td, result, lambda x: op(x, x.shape[n:]))


def case_view(td, draw):
    shape = draw(st.permutations(list(td.batch_size)))
    return td.reshape(shape), lambda x, tail: x.reshape((*shape, *tail)), None


def case_flat_view(td, draw):
    names = [None] if td.ndim != 1 else None
    return (
        td.view(td.batch_size.numel()),
        (lambda x, tail: x.reshape(td.batch_size.numel(), *tail)),
        names,
    )


def case_flatten(td, draw):
    if not td.ndim:
        return td.flatten(), lambda x, tail: x.reshape(1, *tail), [None]
    start = draw(st.integers(0, td.ndim - 1))
    end = draw(st.integers(start, td.ndim - 1))
    names = [*td.names[:start], None, *td.names[end + 1 :]]
    return td.flatten(start, end - td.ndim), lambda x, tail: x.flatten(start, end), names


def case_unflatten(td, draw):
    if not td.ndim:
        return td.unsqueeze(0).unflatten(0, (1, 1)), lambda x, tail: x[None, None], [None, None]
    dim = draw(st.integers(0, td.ndim - 1))
    sizes = draw(st.sampled_from([(td.batch_size[dim], 1), (1, td.batch_size[dim])]))
    names = [*td.names[:dim], None, *td.names[dim:]]
    return td.unflatten(dim, sizes), lambda x, tail: x.unflatten(dim, sizes), names


def case_unsqueeze(td, draw):
    dim = draw(st.integers(-td.ndim - 1, td.ndim))
    at = dim % (td.ndim + 1)
    return (
        td.unsqueeze(dim),
        lambda x, tail: x.unsqueeze(at),
        [*td.names[:at], None, *td.names[at:]],
    )


def case_squeeze(td, draw):
    dims = [i for i, n in enumerate(td.batch_size) if n == 1]
    names = [name for i, name in enumerate(td.names) if i not in dims]
    return td.squeeze(), lambda x, tail: x.squeeze(dims), names


def case_squeeze_dim(td, draw):
    if not td.ndim:
        return td, lambda x, tail: x, []
    dim = draw(st.integers(-td.ndim, td.ndim - 1))
    at = dim % td.ndim
    return td.squeeze(dim), lambda x, tail: x.squeeze(at), None


def case_permute(td, draw):
    dims = draw(st.permutations(range(td.ndim)))
    names = [td.names[i] for i in dims]
    return (
        td.permute(*dims),
        (lambda x, tail: x.permute((*dims, *range(td.ndim, td.ndim + len(tail))))),
        names,
    )


def case_transpose(td, draw):
    if not td.ndim:
        return td, lambda x, tail: x, []
    i, j = draw(st.integers(0, td.ndim - 1)), draw(st.integers(-td.ndim, -1))
    names = list(td.names)
    names[i], names[j] = names[j], names[i]
    call = draw(st.sampled_from(["transpose", "swapdims", "swapaxes"]))
    return getattr(td, call)(i, j), lambda x, tail: x.transpose(i, j % td.ndim), names


def case_movedim(td, draw):
    dims = list(range(td.ndim))
    n = draw(st.integers(0, td.ndim))
    src, dst = draw(st.permutations(dims))[:n], draw(st.permutations(dims))[:n]
    order = torch.zeros([1] * td.ndim).movedim(tuple(src), tuple(dst)).ndim  # torch accepts it
    assert order == td.ndim
    call = draw(st.sampled_from(["movedim", "moveaxis"]))
    return getattr(td, call)(src, dst), lambda x, tail: x.movedim(tuple(src), tuple(dst)), None


def case_expand(td, draw):
    head = draw(st.lists(st.integers(0, 2), max_size=2))
    body = [draw(st.sampled_from([-1, n if n != 1 else 4])) for n in td.batch_size]
    names = [*[None] * len(head), *td.names]
    sizes = [td.batch_size[i] if n == -1 else n for i, n in enumerate(body)]
    return td.expand(*head, *body), lambda x, tail: x.expand((*head, *sizes, *tail)), names


def case_broadcast_to(td, draw):
    head = draw(st.lists(st.integers(1, 2), max_size=2))
    shape = (*head, *td.batch_size)
    return td.broadcast_to(shape), lambda x, tail: x.expand((*shape, *tail)), [None] * len(shape)


def case_at_least(td, draw):
    n = draw(st.integers(1, 3))
    missing = max(0, n - td.ndim)
    shape = (*[1] * missing, *td.batch_size)
    return (
        getattr(td, f"atleast_{n}d")(),
        (lambda x, tail: x.reshape(*shape, *tail)),
        [
            *[None] * missing,
            *td.names,
        ],
    )


CASES = [fn for name, fn in list(globals().items()) if name.startswith("case_")]


def check(case, td, data):
    before = dict(td.items(True, True))
    result, op, names = case(td, data.draw)
    same_everywhere(td, result, op, names)
    for path, x in td.items(True, True):
        assert before[path] is x


@pytest.mark.parametrize("case", CASES, ids=lambda fn: fn.__name__[5:])
@given(td=trees(), data=st.data())
@gate
def test_agrees_with_torch_on_each_leaf(case, td, data):
    check(case, td, data)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda fn: fn.__name__[5:])
@given(td=trees(), data=st.data())
@slow
def test_agrees_with_torch_on_each_leaf_long(case, td, data):
    check(case, td, data)
