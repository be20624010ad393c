"""Shape operations that keep every element: against torch on each leaf, metadata included."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from strategies import check_batch_op, gate, slow, trees
from tensordict import TensorDict


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
    check_batch_op(td, result, op, names)
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


def test_operations_without_effect_return_self():
    td = TensorDict({"a": torch.zeros(2, 3)}, [2, 3], names=["x", "y"])
    same = [
        td.view(2, 3),
        td.view(-1, 3),
        td.view(size=(2, 3)),
        td.reshape(2, -1),
        td.permute(0, 1),
        td.permute(dims=(0, -1)),
        td.transpose(1, -1),
        td.movedim(0, 0),
        td.squeeze(),
        td.squeeze(0),
        td.atleast_1d(),
        td.atleast_2d(),
    ]
    assert all(x is td for x in same)


def test_views_share_memory():
    td = TensorDict({"a": torch.zeros(2, 3, 4)}, [2, 3])
    ops = [
        td.view(6),
        td.reshape(3, 2),
        td.flatten(),
        td.unflatten(0, (1, 2)),
        td.unsqueeze(0),
        td.unsqueeze(0).squeeze(0),
        td.permute(1, 0),
        td.transpose(0, 1),
        td.expand(5, 2, 3),
    ]
    assert all(x["a"].data_ptr() == td["a"].data_ptr() for x in ops)


@pytest.mark.parametrize(
    "op",
    [
        lambda td: td.view(-1),
        lambda td: td.reshape(-1),
        lambda td: td.flatten(),
        lambda td: td.permute(1, 0),
        lambda td: td.unsqueeze(0),
        lambda td: td.squeeze(1),
        lambda td: td.expand(2, 3),
        lambda td: td.split(1)[0],
    ],
)
def test_the_lock_follows_views(op):
    td = TensorDict({"a": torch.zeros(2, 1), "n": {"b": torch.zeros(2, 1)}}, [2, 1])
    assert not op(td).is_locked
    out = op(td.lock_())
    assert out.is_locked and out["n"].is_locked


def test_nested_batch_sizes_and_names_follow():
    inner = TensorDict({"b": torch.zeros(2, 3, 4, 5)}, [2, 3, 4], names=["x", "y", "z"])
    td = TensorDict({"n": inner}, [2, 3], names=["x", "y"])
    assert td.permute(1, 0)["n"].batch_size == (3, 2, 4)
    assert td.permute(1, 0)["n"].names == ["y", "x", "z"]
    assert td.view(-1)["n"].batch_size == (6, 4) and td.view(-1)["n"].names == [None, "z"]
    assert td.unsqueeze(-1)["n"].names == ["x", "y", None, "z"]


def test_view_of_another_dtype():
    td = TensorDict({"a": torch.zeros(2, 4)}, [2])
    assert td.view(torch.int32)["a"].dtype == torch.int32


def test_flatten_and_unflatten_in_place():
    td = TensorDict({"a": torch.zeros(2, 3, 4), "n": {"b": torch.zeros(2, 3)}}, [2, 3])
    assert td.flatten(inplace=True) is td
    assert td.batch_size == (6,) and td["n"].batch_size == (6,) and td["a"].shape == (6, 4)
    assert td.unflatten(0, (3, 2), inplace=True) is td and td["a"].shape == (3, 2, 4)
    with pytest.raises(RuntimeError, match="Cannot modify locked"):
        td.lock_().flatten(inplace=True)
    assert td.batch_size == (3, 2)


def test_torch_functions_take_tensordicts():
    td = TensorDict({"a": torch.arange(6).view(2, 3)}, [2, 3])
    pairs = [
        (torch.reshape(td, (6,)), td.reshape(6)),
        (torch.flatten(td), td.flatten()),
        (torch.unflatten(td, 1, (3, 1)), td.unflatten(1, (3, 1))),
        (torch.unsqueeze(td, 0), td.unsqueeze(0)),
        (torch.squeeze(td.unsqueeze(0)), td),
        (torch.squeeze(td.unsqueeze(0), 0), td),
        (torch.permute(td, (1, 0)), td.permute(1, 0)),
        (torch.transpose(td, 0, 1), td.transpose(0, 1)),
        (torch.swapaxes(td, 0, 1), td.transpose(0, 1)),
        (torch.swapdims(td, 0, 1), td.transpose(0, 1)),
        (torch.movedim(td, 0, 1), td.transpose(0, 1)),
        (torch.moveaxis(td, 0, 1), td.transpose(0, 1)),
        (torch.broadcast_to(td, (4, 2, 3)), td.expand(4, 2, 3)),
        (torch.atleast_1d(td), td),
        (torch.atleast_2d(td), td),
        (torch.atleast_3d(td), td.unsqueeze(0)),
    ]
    for got, want in pairs:
        assert got.batch_size == want.batch_size and torch.equal(got["a"], want["a"])
    one, two = torch.atleast_1d(td, td)
    assert one is td and two is td


TD = TensorDict({"a": torch.zeros(2, 3, 4), "n": {"b": torch.zeros(2, 3)}}, [2, 3])
MALFORMED = {
    "view too many": (lambda td: td.view(7), RuntimeError, "7 elements"),
    "view two holes": (lambda td: td.view(-1, -1), RuntimeError, "only one size may be -1"),
    "view negative": (lambda td: td.view(-2, 3), RuntimeError, "-2 is not a size"),
    "view text": (lambda td: td.view("x"), ValueError, "'x'"),
    "view not divisible": (lambda td: td.view(4, -1), RuntimeError, "6 elements"),
    "reshape too few": (lambda td: td.reshape(2), RuntimeError, "2 elements"),
    "reshape keyword": (lambda td: td.reshape(sizes=3), TypeError, "sizes"),
    "view of strides": (lambda td: td.permute(1, 0).view(-1), RuntimeError, "reshape"),
    "flatten range": (lambda td: td.flatten(0, 2), IndexError, "end_dim.*got 2"),
    "flatten order": (lambda td: td.flatten(1, 0), IndexError, "start_dim <= end_dim"),
    "unflatten dim": (lambda td: td.unflatten(2, (2, 2)), IndexError, "got 2"),
    "unflatten sizes": (lambda td: td.unflatten(1, (2, 2)), RuntimeError, "unflatten dim 1"),
    "unflatten text": (lambda td: td.unflatten(1, "ab"), ValueError, "'ab'"),
    "unsqueeze range": (lambda td: td.unsqueeze(3), RuntimeError, "got 3"),
    "unsqueeze low": (lambda td: td.unsqueeze(-4), RuntimeError, "got -4"),
    "unsqueeze nothing": (lambda td: td.unsqueeze(), TypeError, "one dim"),
    "unsqueeze name": (lambda td: td.unsqueeze("x"), TypeError, "'x'"),
    "squeeze range": (lambda td: td.squeeze(2), IndexError, "got 2"),
    "squeeze twice": (lambda td: td.squeeze((0, -2)), IndexError, "twice"),
    "squeeze keyword": (lambda td: td.squeeze(axis=0), TypeError, "axis"),
    "permute few": (lambda td: td.permute(0), IndexError, "each of the 2"),
    "permute twice": (lambda td: td.permute(0, 0), IndexError, "twice"),
    "permute range": (lambda td: td.permute(0, 2), IndexError, "got 2"),
    "permute names": (lambda td: td.permute("y", "x"), TypeError, "'y'"),
    "transpose range": (lambda td: td.transpose(0, 2), IndexError, "dim1.*got 2"),
    "transpose names": (lambda td: td.transpose("x", "y"), TypeError, "'x'"),
    "movedim length": (lambda td: td.movedim((0, 1), 0), IndexError, "length"),
    "movedim range": (lambda td: td.movedim(0, 5), IndexError, "destination.*got 5"),
    "expand size": (lambda td: td.expand(2, 4), RuntimeError, "Incompatible expanded shape"),
    "expand few": (lambda td: td.expand(3), RuntimeError, "Incompatible expanded shape"),
    "expand hole": (lambda td: td.expand(-1, 2, 3), RuntimeError, "Incompatible expanded shape"),
    "broadcast size": (lambda td: td.broadcast_to((3, 3)), RuntimeError, "Incompatible"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_calls_say_what_is_wrong(name):
    call, error, text = MALFORMED[name]
    before = dict(TD.items(True))
    with pytest.raises(error, match=text):
        call(TD)
    assert list(TD.items(True)) == list(before.items()) and TD.batch_size == (2, 3)


def test_a_view_as_a_dtype_of_another_size_keeps_the_batch():
    td = TensorDict({"a": torch.zeros(3, 4), "n": {"b": torch.zeros(3, 4)}}, [3])
    assert td.view(torch.float16)["n", "b"].shape == (3, 8)
    td["n"].batch_size = [3, 4]
    with pytest.raises(RuntimeError, match=r"\('n', 'b'\).*belongs to the batch"):
        td.view(torch.float16)
    assert td.view(torch.int32)["n", "b"].shape == (3, 4)
