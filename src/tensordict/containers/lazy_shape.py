"""What a shape or index operation does to a stack of nodes.

Where the operation leaves the stack dimension whole, or picks members along it, the
result is a stack of the members after their part of the operation.  Any other
operation moves rows between members: it is run once on numbers of members and rows,
and the result is put together from the rows that it names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Size, Tensor

from ..core.structural import Pick, StructuralOp
from ..errors import ShapeError
from ..ops.indexing import Index, Rows, Select

_FULL = slice(None)

# Operation class -> (stack, operation) -> result, or None to fall back on row numbers.
RULES: dict[type, Callable[[Any, Any], Any]] = {}


def rule(*ops: type) -> Callable[[Callable[[Any, Any], Any]], Any]:
    """Register how a stack does some classes of operations."""

    def register(fn: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        for op in ops:
            RULES[op] = fn
        return fn

    return register


def restructure(stack: Any, op: StructuralOp) -> Any:
    """The stack after an operation on its batch dimensions."""
    fn = RULES.get(type(op))
    out = None if fn is None else fn(stack, op)
    return by_rows(stack, op) if out is None else out


def named(out: Any, stack: Any, op: StructuralOp) -> Any:
    """Give a result the dimension names that the operation makes of the stack's."""
    names = stack._dim_names
    out._dim_names = None if names is None else op.names(names)
    return out


@rule(Select)
def _select(stack: Any, op: Select) -> Any:
    if stack._stack_dim == 0:
        return stack._stacked[op._i]
    members = [member._restructure(Select(op._i, member._batch_size)) for member in stack._stacked]
    return named(stack._new(members, stack._stack_dim - 1), stack, op)


@rule(Pick)
def _pick(stack: Any, op: Pick) -> Any:
    dim = stack._stack_dim
    if op.dim == dim:
        return stack._stacked[op.i]
    inner = Pick(op.dim - (op.dim > dim), op.i)
    members = [member._restructure(inner) for member in stack._stacked]
    return named(stack._new(members, dim - (op.dim < dim)), stack, op)


@rule(Rows)
def _rows(stack: Any, op: Rows) -> Any:
    if stack._stack_dim == 0:
        members = [stack._stacked[i] for i in op._rows.tolist()]
        if not members:
            return _nothing(stack, op)
        return named(stack._new(members, 0), stack, op)
    return _index(stack, op)


@rule(Index)
def _index(stack: Any, op: Index) -> Any:
    dim, n = stack._stack_dim, len(stack._stacked)
    at, consumed = _item_at(op.parts, dim)
    if at is None:  # a part of another kind, or a mask, covers the stack dimension
        return None
    rest = [*op.parts[:at], *op.parts[at + 1 :]] if at < len(op.parts) else list(op.parts)
    item = op.parts[at] if at < len(op.parts) else _FULL
    others = any(isinstance(part, (Tensor, bool)) for part in rest)
    if type(item) is int:
        if others:
            return None  # an int beside tensors is an advanced index: it may move dimensions
        return _sub(stack._stacked[item], rest)
    if isinstance(item, Tensor):
        if others or item.ndim != 1 or any(type(part) is int for part in rest):
            return None
        picked = item.nonzero()[:, 0] if item.dtype is torch.bool else item
        chosen = picked.tolist()
    else:
        chosen = list(range(n))[item]
    if not chosen:
        return _nothing(stack, op)
    probe: list[Any] = [None] * len(stack._batch_size)
    probe[dim] = "stack"
    where = op.names(probe)
    if where is None or "stack" not in where:
        return None
    members = [_sub(stack._stacked[i], rest) for i in chosen]
    return named(stack._new(members, where.index("stack")), stack, op)


def _item_at(parts: tuple[Any, ...], dim: int) -> tuple[int | None, int]:
    """Position of the index item that consumes a batch dimension (the end when none does)."""
    used = 0
    for at, part in enumerate(parts):
        if part is None or type(part) is bool:
            continue
        width = part.ndim if isinstance(part, Tensor) and part.dtype is torch.bool else 1
        if used <= dim < used + width:
            return (at if width == 1 else None), used
        used += width
    return len(parts), used


def _sub(member: Any, parts: list[Any]) -> Any:
    """A member's rows; the member itself when the index takes all of it."""
    while parts and type(parts[-1]) is slice and parts[-1] == _FULL:
        parts = parts[:-1]
    if not parts:
        return member
    return member._restructure(Index(tuple(parts), member._batch_size))


def _nothing(stack: Any, op: StructuralOp) -> Any:
    """The result of an operation that keeps no row: dense, with entries of no element."""
    if -1 in stack._batch_size:
        raise ShapeError(
            "Cannot take no row of a lazy stack whose members differ in batch size: the size of the "
            "result is not known. Make the members' batch sizes equal."
        )
    return stack.densify()._restructure(op)


# --- any other operation: by row numbers ---------------------------------------------------


def by_rows(stack: Any, op: StructuralOp) -> Any:
    """The result of an operation that moves rows about, put together row by row."""
    batch, dim = stack._batch_size, stack._stack_dim
    if -1 in batch:
        raise ShapeError(
            f"Cannot do this on a lazy stack of batch size {list(batch)}: its members differ in "
            f"batch size. Do it on the members, or make their batch sizes equal."
        )
    inner = batch[:dim] + batch[dim + 1 :]
    column = [1] * len(batch)
    column[dim] = batch[dim]
    member = op.leaf(torch.arange(batch[dim]).view(column).expand(batch).contiguous())
    row = op.leaf(torch.arange(inner.numel()).view(inner).unsqueeze(dim).expand(batch).contiguous())
    if not member.numel():
        return _nothing(stack, op)
    return named(_assemble(stack, member, row, inner), stack, op)


def _assemble(stack: Any, member: Tensor, row: Tensor, inner: Size) -> Any:
    first = int(member.reshape(-1)[0])
    if bool((member == first).all()):
        return _take(stack._stacked[first], row, inner)
    dims = [
        k for k in range(member.ndim) if bool((member == member.narrow(k, 0, 1)).all()) is False
    ]
    # Along the only dimension that changes the member, or along the first of several.
    k = dims[0]
    pairs = zip(member.unbind(k), row.unbind(k))
    return stack._new([_assemble(stack, m, r, inner) for m, r in pairs], k)


def _take(member: Any, row: Tensor, inner: Size) -> Any:
    """The rows of one member, by number, in the shape of ``row``."""
    if row.shape == inner and torch.equal(row.reshape(-1), torch.arange(inner.numel())):
        return member
    if not inner:
        return member._restructure(_Fill(row.shape))
    return member._restructure(Index(torch.unravel_index(row, inner), inner))


class _Fill:
    """A batch without dimensions expanded to a shape."""

    __slots__ = ("shape",)

    keeps_lock = False

    def __init__(self, shape: Size) -> None:
        self.shape = shape

    def size(self, batch: Size) -> Size:
        return self.shape + batch

    def names(self, names: Any) -> None:
        return None

    def leaf(self, x: Tensor) -> Tensor:
        return x.expand(self.shape + x.shape)
