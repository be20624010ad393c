"""What casts lose, against numbers counted one by one."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tensordict.placement.casts import Loss, can_lose, is_exact, measure_cast

REAL = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)


def all_values(dtype):
    """Every value of a dtype of at most 16 bits."""
    if dtype is torch.bool:
        return torch.tensor([False, True])
    width = dtype.itemsize * 8
    ints = torch.arange(2**width, dtype=torch.int32)
    raw = ints.to(torch.uint8) if width == 8 else (ints - 2**15).to(torch.int16)
    values = raw.view(dtype)
    if dtype.is_floating_point:
        return values[values.to(torch.float64).isfinite()]
    return values


@pytest.mark.parametrize(
    ("src", "dst"),
    [pair for pair in itertools.product(REAL, REAL) if pair[0].itemsize <= 2],
)
def test_exact_means_that_every_value_comes_back(src, dst):
    values = all_values(src)
    back = values.to(dst).to(torch.float64)
    same = torch.equal(back, values.to(torch.float64))
    assert is_exact(src, dst) == same, (src, dst, can_lose(src, dst))


@pytest.mark.parametrize(
    ("src", "dst", "lost"),
    [
        (torch.float32, torch.float16, Loss.ROUNDING | Loss.RANGE),
        (torch.float32, torch.bfloat16, Loss.ROUNDING),
        (torch.float64, torch.float32, Loss.ROUNDING | Loss.RANGE),
        (torch.int64, torch.int8, Loss.RANGE),
        (torch.int8, torch.uint8, Loss.RANGE),
        (torch.int64, torch.float32, Loss.ROUNDING),
        (torch.float32, torch.int32, Loss.KIND | Loss.RANGE),
        (torch.complex64, torch.float32, Loss.KIND),
        (torch.complex128, torch.complex64, Loss.ROUNDING | Loss.RANGE),
        (torch.float32, torch.complex64, Loss.NOTHING),
        (torch.bool, torch.int8, Loss.NOTHING),
        (torch.bfloat16, torch.float8_e4m3fn, Loss.ROUNDING | Loss.RANGE),
    ],
)
def test_known_pairs(src, dst, lost):
    assert can_lose(src, dst) == lost


def test_counts_of_float16_by_hand():
    x = torch.tensor([1e6, -7e4, math.inf, math.nan, 1e-9, -1e-12, 0.0, 1.0, 0.1])
    counts = measure_cast(x, torch.float16)
    assert counts.n_checked == 9
    assert counts.n_overflow == 2
    assert counts.n_underflow == 2
    assert counts.n_nan == 0
    assert counts.n_rounded == 1
    assert counts.max_rel_error == pytest.approx(
        abs(0.1 - float(torch.tensor(0.1).half())) / 0.1, rel=1e-3
    )
    assert counts.lost == Loss.ROUNDING | Loss.RANGE


def test_the_largest_values_that_still_round_down_do_not_count_as_overflow():
    assert measure_cast(torch.tensor([65519.0]), torch.float16).n_overflow == 0
    assert measure_cast(torch.tensor([65520.0]), torch.float16).n_overflow == 1
    top = torch.tensor([torch.finfo(torch.float32).max])
    assert measure_cast(top, torch.bfloat16).n_overflow == 1


def test_integers_wrap():
    assert measure_cast(torch.tensor([300, -1, 5]), torch.int8).n_wrapped == 1
    assert measure_cast(torch.tensor([-1, 5], dtype=torch.int8), torch.uint8).n_wrapped == 1
    assert measure_cast(torch.tensor([200, 5], dtype=torch.uint8), torch.int8).n_wrapped == 1
    assert measure_cast(torch.tensor([2, 1, 0]), torch.bool).n_wrapped == 1


def test_fractions_and_imaginary_parts_are_lost_kinds():
    assert measure_cast(torch.tensor([1.5, 2.0, -3.25]), torch.int64).n_kind == 2
    assert measure_cast(torch.tensor([1e30, math.nan]), torch.int64).n_wrapped == 2
    assert measure_cast(torch.tensor([1 + 2j, 3 + 0j]), torch.float32).n_kind == 1


def test_complex_to_complex_counts_parts():
    assert measure_cast(torch.tensor([1e6 + 1j, 2 - 1e6j]), torch.complex32).n_overflow == 2


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_counts_what_is_beyond_its_largest_value(dtype):
    top = torch.finfo(dtype).max
    counts = measure_cast(torch.tensor([top, top * 2, -top * 4, 0.5, 1e-9]), dtype)
    assert (counts.n_overflow, counts.n_underflow, counts.n_rounded) == (2, 1, 0)


def test_many_pieces_add_up_to_the_whole(monkeypatch):
    x = torch.randn(10_000) * 1e5
    whole = measure_cast(x, torch.float16)
    monkeypatch.setattr("tensordict.placement.casts.CHECK_CHUNK", 777)
    assert measure_cast(x, torch.float16) == whole


def test_a_sample_looks_at_few_elements():
    assert measure_cast(torch.zeros(1_000_000), torch.float16, sample=True).n_checked <= 1 << 16


def test_empty_and_scalar_tensors():
    assert measure_cast(torch.zeros(0), torch.float16).n_checked == 0
    assert measure_cast(torch.tensor(1e9), torch.float16).n_overflow == 1


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=20),
    st.sampled_from([torch.float16, torch.bfloat16, torch.float8_e5m2, torch.float8_e4m3fn]),
)
def test_every_value_has_exactly_one_fate(values, dtype):
    x = torch.tensor(values, dtype=torch.float32)
    counts = measure_cast(x, dtype)
    back = x.to(dtype).to(torch.float32)
    kept = int((back == x).sum())
    fates = counts.n_rounded + counts.n_overflow + counts.n_underflow + counts.n_nan
    assert kept + fates == len(values)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=20),
    st.sampled_from([torch.int8, torch.uint8, torch.int16, torch.int32]),
)
def test_wrapped_integers_are_those_outside_of_the_range(values, dtype):
    info = torch.iinfo(dtype)
    outside = sum(not info.min <= value <= info.max for value in values)
    assert measure_cast(torch.tensor(values), dtype).n_wrapped == outside
