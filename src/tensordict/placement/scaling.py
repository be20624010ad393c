"""8-bit floats with a scale: values divided by one factor, kept in a leaf beside them."""

from __future__ import annotations

import torch
from torch import Size, Tensor

from .._typing import Path

FP8 = tuple(
    getattr(torch, name)
    for name in ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")
    if hasattr(torch, name)
)
SUFFIX = "_scale"


def scale_path(path: Path) -> Path:
    """Where the scale of a leaf is kept.

    >>> scale_path(("layer", "weight"))
    ('layer', 'weight_scale')
    """
    return (*path[:-1], path[-1] + SUFFIX)


def scale_of(x: Tensor, dtype: torch.dtype, batch_size: Size) -> Tensor:
    """The factor that makes the largest value of ``x`` the largest of ``dtype``.

    Args:
        x: Shape ``[*B, *F]``.
        dtype: The 8-bit dtype.
        batch_size: ``[*B]``; each element of the batch has a factor of its own.

    Returns:
        float32 of shape ``[*B]``; 1 where all values are 0 or none is finite.

    >>> scale_of(torch.tensor([1.0, -896.0]), torch.float8_e4m3fn, torch.Size([]))
    tensor(2.)
    """
    flat = x.detach().reshape(*batch_size, -1).to(torch.float32).abs()
    flat = torch.where(flat.isfinite(), flat, 0)
    largest = flat.amax(-1) if flat.shape[-1] else flat.sum(-1)
    return scale_from(largest, dtype)


def scale_from(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """The factors that make these values the largest of ``dtype``; 1 for 0.

    >>> scale_from(torch.tensor([896.0, 0.0]), torch.float8_e4m3fn)
    tensor([2., 1.])
    """
    scale = largest / torch.finfo(dtype).max
    return torch.where(scale > 0, scale, 1)


def scaled(x: Tensor, scale: Tensor) -> Tensor:
    """``x`` divided by its scale, in float32."""
    return x.detach().to(torch.float32) / _wide(scale, x)


def unscaled(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The values of an 8-bit leaf in another dtype.

    >>> unscaled(torch.tensor([1.0, -448.0]).to(torch.float8_e4m3fn), torch.tensor(2.0), torch.float32)
    tensor([   2., -896.])
    """
    return (x.to(torch.float32) * _wide(scale, x)).to(dtype)


def _wide(scale: Tensor, x: Tensor) -> Tensor:
    return scale.reshape(*scale.shape, *[1] * (x.ndim - scale.ndim))
