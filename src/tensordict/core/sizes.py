"""Batch-size and dimension arithmetic. Nothing here touches a tensor's data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import index
from typing import Any

import torch

from ..errors import DimError, EntryTypeError, ShapeError

Size = torch.Size
EMPTY = torch.Size([])


def as_size(value: Any, where: str = "batch_size") -> Size:
    """A ``torch.Size`` from an int, a sequence of ints, a Size or None (no batch dimension).

    Raises:
        EntryTypeError: (a ``ValueError``) for anything else.

    >>> as_size(3), as_size([2, 3]), as_size(None)
    (torch.Size([3]), torch.Size([2, 3]), torch.Size([]))
    """
    kind = type(value)
    if kind is Size:
        return value
    if value is None:
        return EMPTY
    if isinstance(value, int) and not isinstance(value, bool):
        return Size([value])
    if kind is not list and (isinstance(value, (str, bytes)) or not isinstance(value, Iterable)):
        raise EntryTypeError(
            f"Cannot read {where}: expected an int, a sequence of ints or a torch.Size, "
            f"got {value!r} of type {type(value).__name__}."
        )
    try:
        return Size(value)
    except TypeError:
        raise EntryTypeError(
            f"Cannot read {where}: expected a sequence of ints, got {value!r}."
        ) from None


def shape_args(args: Sequence[Any], where: str) -> Size:
    """The shape given as ``f(2, 3)``, ``f([2, 3])`` or ``f(torch.Size([2, 3]))``."""
    if len(args) == 1 and not isinstance(args[0], int):
        return as_size(args[0], where)
    return as_size(args, where)


def as_int(value: Any, what: str) -> int:
    """An int from anything that is one (a NumPy int, a tensor of one integer).

    Raises:
        EntryTypeError: (``TypeError`` and ``ValueError``) for anything else.
    """
    try:
        return index(value)
    except TypeError:
        raise EntryTypeError(f"Cannot use {value!r} as {what}: expected an int.") from None


def wrap_dim(dim: int, ndim: int, what: str = "dim") -> int:
    """A dimension counted from the front.

    Raises:
        DimError: (``IndexError`` and ``RuntimeError``) when out of range.
        EntryTypeError: (``TypeError`` and ``ValueError``) when not an integer.
    """
    if type(dim) is not int:
        dim = as_int(dim, what)
    if 0 <= dim < ndim:
        return dim
    if -ndim <= dim < 0:
        return dim + ndim
    raise DimError(
        f"{what} is out of range: got {dim}. Expected a batch dimension in "
        f"[{-ndim}, {ndim - 1}] of a tensordict with {ndim} batch dimensions."
        if ndim
        else f"{what} is out of range: got {dim}, but the tensordict has no batch dimension."
    )


def wrap_dims(dims: Iterable[int], ndim: int, what: str = "dim") -> tuple[int, ...]:
    """Several dimensions, counted from the front, each at most once."""
    out = tuple([wrap_dim(dim, ndim, what) for dim in dims])
    if len(out) > 1 and len(set(out)) != len(out):
        raise DimError(f"{what} names a dimension twice: got {tuple(dims)}.")
    return out


def infer(shape: Sequence[int], numel: int, where: str) -> Size:
    """``shape`` with its one ``-1`` filled in so that it holds ``numel`` elements.

    >>> infer([2, -1], 6, "view")
    torch.Size([2, 3])
    """
    known = 1
    hole = -1
    for i, n in enumerate(shape):
        if n == -1:
            if hole >= 0:
                raise ShapeError(f"Cannot {where} to {list(shape)}: only one size may be -1.")
            hole = i
        elif n < 0:
            raise ShapeError(f"Cannot {where} to {list(shape)}: {n} is not a size.")
        else:
            known *= n
    if hole < 0:
        if known != numel:
            raise ShapeError(
                f"Cannot {where}: shape {list(shape)} holds {known} elements, "
                f"the batch holds {numel}."
            )
        return Size(shape)
    if known == 0 or numel % known:
        raise ShapeError(
            f"Cannot {where}: shape {list(shape)} is invalid for a batch of {numel} elements."
        )
    return Size([*shape[:hole], numel // known, *shape[hole + 1 :]])


def insert(size: Sequence[int], dim: int, n: int) -> Size:
    """``size`` with ``n`` inserted before ``dim``."""
    return Size([*size[:dim], n, *size[dim:]])


def common_prefix(shapes: Iterable[Sequence[int]], limit: int | None = None) -> Size:
    """The longest run of leading sizes that all shapes share.

    >>> common_prefix([(3, 4), (3, 4, 5)])
    torch.Size([3, 4])
    """
    prefix: list[int] | None = None
    for shape in shapes:
        if prefix is None:
            prefix = list(shape)
            continue
        keep = 0
        for a, b in zip(prefix, shape):
            if a != b:
                break
            keep += 1
        del prefix[keep:]
    out = prefix or []
    return Size(out if limit is None else out[:limit])
