"""Names of dtypes, devices and memory formats, as texts and back.

A name that came from outside is looked up in a fixed table, never imported.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..errors import CastError, FileFormatError

_SHORT = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
    "f16": torch.float16,
    "f32": torch.float32,
    "f64": torch.float64,
    "half": torch.float16,
    "float": torch.float32,
    "double": torch.float64,
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "i8": torch.int8,
    "i16": torch.int16,
    "i32": torch.int32,
    "i64": torch.int64,
    "u8": torch.uint8,
    "int": torch.int32,
    "long": torch.int64,
}
_NAMES = (
    "bfloat16 bool complex32 complex64 complex128 float16 float32 float64 float8_e4m3fn "
    "float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2 "
    "int8 int16 int32 int64 uint8 uint16 uint32 uint64 qint8 qint32 quint8 quint4x2 quint2x4"
)
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in _NAMES.split() if hasattr(torch, name)
}
FORMATS: dict[str, torch.memory_format] = {
    "contiguous": torch.contiguous_format,
    "channels_last": torch.channels_last,
    "channels_last_3d": torch.channels_last_3d,
    "preserve": torch.preserve_format,
}
_FORMAT_NAMES = {value: name for name, value in FORMATS.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype without ``torch.``.

    >>> dtype_name(torch.bfloat16)
    'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


def parse_dtype(text: str | torch.dtype) -> torch.dtype:
    """The dtype of a name, in torch's form or in one of the usual short ones.

    Raises:
        CastError: (a ``ValueError``) for a text that names no dtype, with the nearest names.

    >>> parse_dtype("bf16"), parse_dtype("torch.int64")
    (torch.bfloat16, torch.int64)
    """
    if isinstance(text, torch.dtype):
        return text
    name = text.strip().lower().removeprefix("torch.")
    found = DTYPES.get(name) or _SHORT.get(name)
    if found is None:
        near = difflib.get_close_matches(name, [*_SHORT, *DTYPES], n=3, cutoff=0.5)
        hint = f"Did you mean {' or '.join(near)}?" if near else "Use a torch name like bfloat16."
        raise CastError(f"Cannot use {text!r} as a dtype: it names none. {hint}")
    return found


def format_name(memory_format: torch.memory_format) -> str:
    """The short name of a memory format.

    >>> format_name(torch.channels_last)
    'channels_last'
    """
    return _FORMAT_NAMES[memory_format]


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Turn whatever malformed JSON values raise into one error.

    Raises:
        FileFormatError: saying what could not be read.
    """
    try:
        yield
    except FileFormatError:
        raise
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise FileFormatError(f"Cannot read {what}: {type(error).__name__}: {error}.") from None


def size_text(nbytes: int) -> str:
    """A size for people.

    >>> size_text(512), size_text(90 << 20), size_text(-1536)
    ('512 B', '90.0 MiB', '-1.5 KiB')
    """
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
