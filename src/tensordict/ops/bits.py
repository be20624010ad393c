"""Dtypes that torch stores and copies but cannot scatter or gather: done on their bits.

Moving rows needs no arithmetic, so an integer of the same size will do.
"""

from __future__ import annotations

import torch
from torch import Tensor

_NAMES = {
    "int8": (
        "float8_e4m3fn",
        "float8_e4m3fnuz",
        "float8_e5m2",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
        "float4_e2m1fn_x2",
    ),
    "int16": ("uint16",),
    "int32": ("uint32", "complex32"),
    "int64": ("uint64",),
}

# Dtype -> the integer dtype that stands for it; some names are younger than the oldest torch.
AS_INTEGERS: dict[torch.dtype, torch.dtype] = {
    getattr(torch, name): getattr(torch, integer)
    for integer, names in _NAMES.items()
    for name in names
    if hasattr(torch, name)
}


def bits(x: Tensor) -> Tensor:
    """A view of ``x`` as integers where its dtype has no kernels to move rows, else ``x``."""
    integer = AS_INTEGERS.get(x.dtype)
    return x if integer is None else x.view(integer)
