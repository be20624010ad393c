"""What a cast can lose, and what it did lose.

Three grades: *rounding* (fewer digits: counted, never refused), *range* (overflow, underflow to
zero, saturation, integer wrap) and *kind* (complex to real, float to integer).  `can_lose` knows
the pair of dtypes alone; `measure_cast` looks at values.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Flag
from functools import cache
from typing import Any, NamedTuple

import torch

CHECK_CHUNK = 1 << 20
SAMPLE = 1 << 16


class Loss(Flag):
    """What a cast can lose."""

    NOTHING = 0
    ROUNDING = 1
    RANGE = 2
    KIND = 4

    def __str__(self) -> str:
        if not self:
            return "exact"
        return "+".join(part.name.lower() for part in Loss if part and part in self and part.name)


class _Numbers(NamedTuple):
    """The numbers a real dtype holds: kind, digits in bits, exponents, smallest and largest."""

    kind: str
    digits: int
    low_exponent: int
    high_exponent: int
    low: float
    high: float


@cache
def _numbers(dtype: torch.dtype) -> _Numbers:
    if dtype is torch.bool:
        return _Numbers("bool", 1, 0, 0, 0, 1)
    if dtype.is_floating_point:
        info = torch.finfo(dtype)
        digits = round(-_log2(info.eps)) + 1
        low, high = _log2(info.smallest_normal), _log2(info.max)
        return _Numbers("float", digits, low, high, info.min, info.max)
    limits = torch.iinfo(dtype)
    digits = int(limits.max).bit_length()
    return _Numbers("int", digits, 0, digits, limits.min, limits.max)


def _log2(value: float) -> int:
    import math

    return math.frexp(value)[1] - 1


_PARTS = {
    torch.complex32: torch.float16,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}


@cache
def can_lose(src: torch.dtype, dst: torch.dtype) -> Loss:
    """What casting from ``src`` to ``dst`` can lose, whatever the values.

    Range is compared by exponents: float32 to bfloat16 counts as rounding alone, since both reach
    equally far (a value within half a step of the largest float32 still overflows, and
    `measure_cast` counts it).

    >>> str(can_lose(torch.float32, torch.bfloat16)), str(can_lose(torch.float32, torch.float16))
    ('rounding', 'rounding+range')
    >>> str(can_lose(torch.complex64, torch.float64)), str(can_lose(torch.float16, torch.float32))
    ('kind', 'exact')
    """
    if src is dst:
        return Loss.NOTHING
    if src.is_complex:
        part = can_lose(_PARTS[src], _PARTS.get(dst, dst))
        return part if dst.is_complex else part | Loss.KIND
    try:
        a, b = _numbers(src), _numbers(_PARTS.get(dst, dst))
    except (TypeError, RuntimeError):
        # Packed and quantised dtypes describe their numbers elsewhere: assume the worst.
        return Loss.ROUNDING | Loss.RANGE
    if b.kind in ("int", "bool"):
        lost = Loss.KIND if a.kind == "float" else Loss.NOTHING
        return lost if b.low <= a.low and a.high <= b.high else lost | Loss.RANGE
    lost = Loss.ROUNDING if a.digits > b.digits else Loss.NOTHING
    if a.high_exponent > b.high_exponent or a.low_exponent < b.low_exponent or a.low < 0 <= b.low:
        lost |= Loss.RANGE
    return lost


def is_exact(src: torch.dtype, dst: torch.dtype) -> bool:
    """Whether every value of ``src`` is a value of ``dst``, so that a cast back restores it.

    >>> is_exact(torch.bfloat16, torch.float32), is_exact(torch.float32, torch.bfloat16)
    (True, False)
    """
    return not can_lose(src, dst)


@dataclass(frozen=True, slots=True)
class CastCounts:
    """What happened to the values of one leaf.

    Attributes:
        n_checked: Elements looked at.
        n_rounded: Elements that came back as another value, within range.
        n_overflow: Elements beyond the largest value: now inf, NaN or saturated.
        n_underflow: Non-zero elements that became zero.
        n_nan: Elements that became NaN (infinities, where there is none, among them).
        n_wrapped: Integers outside of the range of the new dtype.
        n_kind: Elements that lost an imaginary part or a fraction.
        max_rel_error: Largest relative error of the rounded elements.
    """

    n_checked: int = 0
    n_rounded: int = 0
    n_overflow: int = 0
    n_underflow: int = 0
    n_nan: int = 0
    n_wrapped: int = 0
    n_kind: int = 0
    max_rel_error: float = 0.0

    @property
    def lost(self) -> Loss:
        """The grades of loss that occurred."""
        out = Loss.ROUNDING if self.n_rounded else Loss.NOTHING
        if self.n_overflow or self.n_underflow or self.n_nan or self.n_wrapped:
            out |= Loss.RANGE
        return out | Loss.KIND if self.n_kind else out

    def __add__(self, other: CastCounts) -> CastCounts:
        summed = {
            f.name: getattr(self, f.name) + getattr(other, f.name)
            for f in fields(self)
            if f.name != "max_rel_error"
        }
        return CastCounts(**summed, max_rel_error=max(self.max_rel_error, other.max_rel_error))

    def describe(self) -> str:
        """The counts that are not zero, as text.

        >>> CastCounts(n_checked=8, n_overflow=2).describe()
        '2 of 8 overflow'
        """
        names = {
            "n_overflow": "overflow",
            "n_underflow": "underflow to 0",
            "n_nan": "become NaN",
            "n_wrapped": "wrap around",
            "n_kind": "lose their fraction or imaginary part",
            "n_rounded": "rounded",
        }
        parts = [
            f"{getattr(self, key)} {text}" for key, text in names.items() if getattr(self, key)
        ]
        if not parts:
            return f"{self.n_checked} exact"
        first, *rest = parts
        count, text = first.split(" ", 1)
        out = ", ".join([f"{count} of {self.n_checked} {text}", *rest])
        return f"{out}, relative error up to {self.max_rel_error:.1e}" if self.n_rounded else out


def measure_cast(tensor: torch.Tensor, dtype: torch.dtype, *, sample: bool = False) -> CastCounts:
    """Count what a cast loses on the values of ``tensor``.

    Works through the values in pieces of at most 2**20 elements, so that the extra memory is
    bounded.

    Args:
        tensor: Any strided tensor with values (not meta).
        dtype: The dtype it would be cast to.
        sample: Look at up to 2**16 evenly spaced elements alone.

    >>> measure_cast(torch.tensor([1e6, 1e-9, 0.1, 2.0]), torch.float16).describe()
    '1 of 4 overflow, 1 underflow to 0, 1 rounded, relative error up to 2.4e-04'
    """
    flat = tensor.detach().reshape(-1)
    if sample and flat.shape[0] > SAMPLE:
        flat = flat[:: -(-flat.shape[0] // SAMPLE)]
    total = CastCounts()
    for piece in flat.split(CHECK_CHUNK):
        total += _measure(piece, dtype)
    return total


def _measure(x: torch.Tensor, dtype: torch.dtype) -> CastCounts:
    if x.dtype.is_complex:
        return _measure_complex(x, dtype)
    if dtype.is_complex:
        dtype = _PARTS[dtype]
    kind = "int" if not x.dtype.is_floating_point else "float"
    to_float = dtype.is_floating_point
    if kind == "int":
        return _int_to_float(x, dtype) if to_float else _int_to_int(x, dtype)
    return _float_to_float(x, dtype) if to_float else _float_to_int(x, dtype)


def _measure_complex(x: torch.Tensor, dtype: torch.dtype) -> CastCounts:
    if dtype.is_complex:
        return _measure(torch.view_as_real(x.resolve_conj()).reshape(-1), _PARTS[dtype])
    imaginary = int((x.imag != 0).sum())
    return _measure(x.real, dtype) + CastCounts(n_kind=imaginary)


def _int_to_int(x: torch.Tensor, dtype: torch.dtype) -> CastCounts:
    changed = int((x.to(dtype).to(x.dtype) != x).sum())
    if dtype is not torch.bool and _signed(x.dtype) != _signed(dtype):
        # A wrap between signed and unsigned of one width comes back unchanged: ask the sign.
        changed = max(changed, int(_negative(x if _signed(x.dtype) else x.to(dtype)).sum()))
    return CastCounts(n_checked=x.shape[0], n_wrapped=changed)


def _signed(dtype: torch.dtype) -> bool:
    return dtype is not torch.bool and dtype.is_signed


def _negative(x: torch.Tensor) -> Any:
    return x < 0


def _int_to_float(x: torch.Tensor, dtype: torch.dtype) -> CastCounts:
    wide = x.to(torch.float64)
    return _compare(wide, x.to(dtype).to(torch.float64), dtype)


def _float_to_float(x: torch.Tensor, dtype: torch.dtype) -> CastCounts:
    wide = torch.float64 if x.dtype is torch.float64 or dtype is torch.float64 else torch.float32
    return _compare(x.to(wide), x.to(dtype).to(wide), dtype)


def _float_to_int(x: torch.Tensor, dtype: torch.dtype) -> CastCounts:
    wide = x.to(torch.float64)
    whole = wide.trunc()
    numbers = _numbers(dtype)
    # The largest int64 is no float64; values from 2**63 on are outside.
    outside = (whole < numbers.low) | (whole >= float(numbers.high) + 1) | ~wide.isfinite()
    return CastCounts(
        n_checked=x.shape[0],
        n_wrapped=int(outside.sum()),
        n_kind=int((~outside & (whole != wide)).sum()),
    )


def _compare(x: torch.Tensor, back: torch.Tensor, dtype: torch.dtype) -> CastCounts:
    """Counts from the values before and after, both in a dtype that holds them all."""
    numbers = _numbers(dtype)
    # Beyond this the nearest value would be the next power of two.
    limit = numbers.high * (1 + 2.0 ** -(numbers.digits + 1))
    finite = x.isfinite()
    overflow = finite & (~back.isfinite() | (x.abs() > limit))
    if numbers.low >= 0:
        overflow |= finite & (x < 0)
    nan = back.isnan() & ~x.isnan() & ~overflow
    underflow = (back == 0) & (x != 0) & ~overflow
    other = finite & (x != back) & ~overflow & ~underflow & ~nan
    error = ((x - back).abs() / x.abs())[other]
    return CastCounts(
        n_checked=x.shape[0],
        n_rounded=int(other.sum()),
        n_overflow=int(overflow.sum()),
        n_underflow=int(underflow.sum()),
        n_nan=int(nan.sum()),
        max_rel_error=float(error.max()) if error.numel() else 0.0,
    )
