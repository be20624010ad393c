"""narrow, roll, flip, rot90, repeat, tile, repeat_interleave, gather: against torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from strategies import check_batch_op, gate, slow, trees
from tensordict import TensorDict


def a_dim(td, draw):
    return draw(st.integers(0, td.ndim - 1))


def case_narrow(td, draw):
    dim = a_dim(td, draw)
    start = draw(st.integers(0, td.batch_size[dim]))
    length = draw(st.integers(0, td.batch_size[dim] - start))
    given_start = start - td.batch_size[dim] if start < td.batch_size[dim] else start
    return td.narrow(dim - td.ndim, given_start, length), (
        lambda x, tail: x.narrow(dim, start, length)
    )


def case_roll(td, draw):
    dims = draw(st.lists(st.integers(-td.ndim, td.ndim - 1), min_size=1, max_size=2))
    shifts = [draw(st.integers(-3, 3)) for _ in dims]
    at = [dim % td.ndim for dim in dims]
    return td.roll(shifts, dims), lambda x, tail: x.roll(shifts, at)


def case_roll_flat(td, draw):
    shift = draw(st.integers(-3, 3))
    return td.roll(shift), (
        lambda x, tail: x.reshape(td.batch_size.numel(), *tail).roll(shift, 0).reshape(x.shape)
    )


def case_flip(td, draw):
    dims = draw(st.lists(st.integers(0, td.ndim - 1), unique=True))
    return td.flip([dim - td.ndim for dim in dims]), lambda x, tail: x.flip(dims)


def case_flipud(td, draw):
    return td.flipud(), lambda x, tail: x.flip(0)


def case_fliplr(td, draw):
    td = td if td.ndim > 1 else td.unsqueeze(1)
    return td.fliplr(), lambda x, tail: x.flip(1), td


def case_rot90(td, draw):
    td = td if td.ndim > 1 else td.unsqueeze(1)
    k = draw(st.integers(-5, 5))
    dims = draw(st.permutations(range(td.ndim)))[:2]
    return td.rot90(k, dims), lambda x, tail: x.rot90(k, dims), td


def case_repeat(td, draw):
    factors = [draw(st.integers(0, 3)) for _ in td.batch_size]
    return td.repeat(*factors), lambda x, tail: x.repeat(*factors, *[1] * len(tail))


def case_tile(td, draw):
    factors = draw(st.lists(st.integers(0, 2), min_size=1, max_size=4))
    head = [1] * (td.ndim - len(factors)) + factors
    return td.tile(factors), lambda x, tail: x.repeat(*head, *[1] * len(tail))


def case_repeat_interleave(td, draw):
    dim = a_dim(td, draw)
    n = td.batch_size[dim]
    one = draw(st.booleans())
    repeats = (
        draw(st.integers(0, 3))
        if one
        else torch.tensor([draw(st.integers(0, 3)) for _ in range(n)], dtype=torch.int64)
    )
    return td.repeat_interleave(repeats, dim), lambda x, tail: x.repeat_interleave(repeats, dim)


def case_repeat_interleave_flat(td, draw):
    repeats = draw(st.integers(0, 3))
    return td.repeat_interleave(repeats), (
        lambda x, tail: x.reshape(td.batch_size.numel(), *tail).repeat_interleave(repeats, 0)
    )


def case_gather(td, draw):
    dim = a_dim(td, draw)
    n = td.batch_size[dim]
    shape = [draw(st.integers(0, size)) for size in td.batch_size]
    shape[dim] = draw(st.integers(0, 4)) if n else 0
    seed = draw(st.integers(0, 100))
    index = torch.randint(max(n, 1), shape, generator=torch.Generator().manual_seed(seed))

    def op(x, tail):
        wide = index.view(*index.shape, *[1] * len(tail)).expand(*index.shape, *tail)
        return x.gather(dim, wide)

    return td.gather(dim - td.ndim, index), op


CASES = [fn for name, fn in list(globals().items()) if name.startswith("case_")]
FOLLOWED = {"narrow", "roll", "flip", "flipud", "repeat", "repeat_interleave", "gather"}


def check(case, td, data):
    result, op, *changed = case(td, data.draw)
    td = changed[0] if changed else td
    names = td.names if case.__name__[5:] in FOLLOWED else None
    check_batch_op(td, result, op, names)


@pytest.mark.parametrize("case", CASES, ids=lambda fn: fn.__name__[5:])
@given(td=trees(min_dims=1), data=st.data())
@gate
def test_agrees_with_torch_on_each_leaf(case, td, data):
    check(case, td, data)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda fn: fn.__name__[5:])
@given(td=trees(min_dims=1), data=st.data())
@slow
def test_agrees_with_torch_on_each_leaf_long(case, td, data):
    check(case, td, data)


def make():
    nested = TensorDict({"b": torch.arange(24).view(2, 3, 4)}, [2, 3, 4])
    return TensorDict({"a": torch.arange(6).view(2, 3), "n": nested}, [2, 3], names=["x", "y"])


def test_names_of_results():
    td = make()
    assert td.rot90().names == ["y", "x"] and td.rot90(2).names == ["x", "y"]
    assert td.tile((2,)).names == [None, None]
    assert td.tile((2, 1, 1)).names == [None, None, None]
    assert td.repeat_interleave(2).names == [None]
    assert td.repeat_interleave(2, dim=0).names == ["x", "y"]
    assert td.repeat(1, 2)["n"].names == td["n"].names


def test_in_place_forms_change_self():
    for call in (
        lambda td: td.repeat(2, 1, inplace=True),
        lambda td: td.repeat_interleave(2, 0, inplace=True),
        lambda td: td.gather(0, torch.zeros(4, 3, dtype=torch.int64), inplace=True),
    ):
        td = make()
        assert call(td) is td
        assert td.batch_size == (4, 3) and td["a"].shape == (4, 3) and td["n"].shape == (4, 3, 4)
    td = make()
    assert td.roll(1, 0, inplace=True) is td and td["a"][0].tolist() == [3, 4, 5]


def test_gather_into_out():
    td = make()
    index = torch.zeros(1, 3, dtype=torch.int64)
    out = td[:1].clone().zero_()
    kept = out["a"]
    assert td.gather(0, index, out=out) is out
    assert out["a"] is kept and torch.equal(kept, td["a"][:1])


def test_torch_functions():
    td = make()
    index = torch.zeros(2, 1, dtype=torch.int64)
    for got, want in [
        (torch.narrow(td, 1, 0, 2), td["a"].narrow(1, 0, 2)),
        (torch.roll(td, 1, 0), td["a"].roll(1, 0)),
        (torch.flip(td, (0,)), td["a"].flip(0)),
        (torch.flipud(td), td["a"].flipud()),
        (torch.fliplr(td), td["a"].fliplr()),
        (torch.rot90(td), td["a"].rot90()),
        (torch.repeat_interleave(td, 2, dim=1), td["a"].repeat_interleave(2, 1)),
        (torch.tile(td, (2, 1)), td["a"].tile((2, 1))),
        (torch.gather(td, 1, index), td["a"].gather(1, index)),
    ]:
        assert torch.equal(got["a"], want) and got.batch_size == want.shape


LONG = torch.int64
MALFORMED = {
    "narrow range": (lambda td: td.narrow(1, 2, 2), RuntimeError, "exceeds dimension"),
    "narrow start": (lambda td: td.narrow(1, -4, 1), RuntimeError, "exceeds dimension"),
    "narrow length": (lambda td: td.narrow(1, 0, -1), RuntimeError, "-1"),
    "narrow dim": (lambda td: td.narrow(2, 0, 1), IndexError, "got 2"),
    "roll dims": (lambda td: td.roll(1, 2), IndexError, "got 2"),
    "roll lengths": (lambda td: td.roll((1, 2), (0,)), IndexError, "one dim per shift"),
    "roll shifts": (lambda td: td.roll((1, 2)), IndexError, "one shift"),
    "flip dim": (lambda td: td.flip(2), IndexError, "got 2"),
    "flip twice": (lambda td: td.flip((0, 0)), IndexError, "twice"),
    "fliplr": (lambda td: td[0].fliplr(), IndexError, "2 batch dimensions"),
    "flipud": (lambda td: td[0, 0].flipud(), IndexError, "1 batch dimensions"),
    "rot90 dims": (lambda td: td.rot90(1, (0,)), IndexError, "two dims"),
    "rot90 same": (lambda td: td.rot90(1, (0, 0)), IndexError, "twice"),
    "repeat few": (lambda td: td.repeat(2), ValueError, "Got 1 but ndim=2"),
    "repeat negative": (lambda td: td.repeat(2, -1), IndexError, "not negative"),
    "repeat text": (lambda td: td.repeat("a", "b"), IndexError, "not negative"),
    "tile negative": (lambda td: td.tile((-1,)), IndexError, "not negative"),
    "interleave count": (
        lambda td: td.repeat_interleave(torch.ones(3, dtype=LONG), 0),
        RuntimeError,
        "2 repeats",
    ),
    "interleave negative": (
        lambda td: td.repeat_interleave(torch.tensor([1, -1]), 0),
        IndexError,
        "negative",
    ),
    "interleave total": (
        lambda td: td.repeat_interleave(2, 0, output_size=3),
        RuntimeError,
        "output_size is 3",
    ),
    "gather rank": (
        lambda td: td.gather(0, torch.zeros(2, dtype=LONG)),
        RuntimeError,
        "2 dimensions",
    ),
    "gather size": (
        lambda td: td.gather(0, torch.zeros(1, 4, dtype=LONG)),
        RuntimeError,
        "no larger",
    ),
    "gather dtype": (lambda td: td.gather(0, torch.zeros(2, 3)), TypeError, "float32"),
    "gather list": (lambda td: td.gather(0, [0]), TypeError, "list"),
    "gather range": (lambda td: td.gather(0, torch.full((2, 3), 2)), IndexError, "out of bounds"),
    "gather dim": (lambda td: td.gather(2, torch.zeros(2, 3, dtype=LONG)), IndexError, "got 2"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_calls_say_what_is_wrong(name):
    call, error, text = MALFORMED[name]
    td = make()
    before = td["a"].clone()
    with pytest.raises(error, match=text):
        call(td)
    assert td.batch_size == (2, 3) and torch.equal(td["a"], before)
