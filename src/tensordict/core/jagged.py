"""Structural operations on jagged nested tensors, of which torch itself has few.

A jagged tensor has one batch dimension.  Whatever an operation does to a tensor of row
numbers, it does to the rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import ShapeError
from .structural import DividingOp, StructuralOp


def restructured(op: StructuralOp, x: Tensor) -> Tensor:
    """A jagged tensor after an operation on its first dimension.

    One that computes with the rows is left to torch, which has the reductions.

    Raises:
        ShapeError: the result would not have exactly one batch dimension (or none).
    """
    if not op.moves_rows:
        return op.leaf(x)
    return _taken(x, op.rows(torch.arange(x.shape[0])), op)


def divided(op: DividingOp, x: Tensor) -> list[Tensor]:
    """The pieces of a jagged tensor cut along its first dimension."""
    return [_taken(x, rows, op) for rows in op.leaf(torch.arange(x.shape[0]))]


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Jagged tensors one after the other along the first dimension."""
    rows = [row for x in parts for row in x.unbind(0)]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def _taken(x: Tensor, rows: Tensor, op: StructuralOp | DividingOp) -> Tensor:
    if rows.ndim == 0:
        return x[int(rows)]
    order = rows.tolist()
    if rows.ndim > 1 or -1 in order:
        raise ShapeError(
            f"Cannot apply {type(op).__name__} to a jagged tensor of {x.shape[0]} rows: expected "
            f"rows along one dimension, got shape {list(rows.shape)}."
        )
    first = order[0] if order else 0
    if order == list(range(first, first + len(order))) and _is_packed(x):
        return _span(x, first, first + len(order))
    pieces: Sequence[Tensor] = x.unbind(0)
    return torch.nested.as_nested_tensor([pieces[i] for i in order], layout=torch.jagged)


def _is_packed(x: Tensor) -> bool:
    return x.lengths() is None and x._ragged_idx == 1  # type: ignore[attr-defined]


def _span(x: Tensor, start: int, stop: int) -> Tensor:
    # Neighbouring rows are one stretch of the values: a view.
    offsets = x.offsets()  # type: ignore[attr-defined]
    ends = offsets[start : stop + 1]
    low = int(ends[0])
    values = x.values()[low : int(ends[-1])]
    return torch.nested.nested_tensor_from_jagged(values, ends - low)
