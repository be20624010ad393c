"""What a shape or index operation does to a stack of nodes.

Where the operation leaves the stack dimension whole, or picks members along it, the
result is a stack of the members after their part of the operation.  Any other
operation moves rows between members: it is run once on numbers of members and rows,
and the result is put together from the rows that it names.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Size, Tensor

from ..core.leaf import NonTensorData
from ..core.registry import node_class
from ..core.structural import StructuralOp
from ..core.traverse import holders, map_entries, refuse_exclusive
from ..errors import ShapeError
from ..ops.dense_forms import densified
from ..ops.indexing import Index, Rows, Select, Span
from ..ops.reductions import Along, Reduce
from ..ops.shape import (
    Broadcast,
    Expand,
    Flatten,
    Narrow,
    Pad,
    Permute,
    Pick,
    Reshape,
    Squeeze,
    Transpose,
    Unflatten,
    Unsqueeze,
    View,
)

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
    if out is not None:
        return out
    if isinstance(op, StructuralOp) and op.moves_rows:
        return by_rows(stack, op)
    return densified(stack)._restructure(op)


def named(out: Any, stack: Any, op: StructuralOp) -> Any:
    """Give a result the dimension names that the operation makes of the stack's."""
    names = stack._dim_names
    out._dim_names = None if names is None else op.names(names)
    return out


@rule(Select)
def _select(stack: Any, op: Select) -> Any:
    if stack._stack_dim == 0:
        return stack._stacked[op.row]
    members = [member._restructure(Select(op.row, member._batch_size)) for member in stack._stacked]
    return named(stack._new(members, stack._stack_dim - 1), stack, op)


@rule(Pick)
def _pick(stack: Any, op: Pick) -> Any:
    dim = stack._stack_dim
    if op.dim == dim:
        return stack._stacked[op.row]
    return _each(stack, op, Pick(op.dim - (op.dim > dim), op.row), dim - (op.dim < dim))


def _each(stack: Any, op: StructuralOp, inner: StructuralOp, dim: int) -> Any:
    """Every member after ``inner``, stacked along ``dim``."""
    members = [member._restructure(inner) for member in stack._stacked]
    return named(stack._new(members, dim), stack, op)


@rule(Rows)
def _rows(stack: Any, op: Rows) -> Any:
    dim = stack._stack_dim
    if op.dim == dim and op.index.ndim == 1:
        members = [stack._stacked[i] for i in op.index.tolist()]
        if not members:
            return _nothing(stack, op)
        return named(stack._new(members, dim), stack, op)
    return _index(stack, op)


@rule(Index, Span)
def _index(stack: Any, op: Index) -> Any:
    dim, n = stack._stack_dim, len(stack._stacked)
    at = _item_at(op.parts, dim)
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


def _item_at(parts: tuple[Any, ...], dim: int) -> int | None:
    """Position of the index item that consumes a batch dimension; the end when none does.

    None when the item is a mask over that dimension and others.
    """
    used = 0
    for at, part in enumerate(parts):
        if part is None or type(part) is bool:
            continue
        width = part.ndim if isinstance(part, Tensor) and part.dtype is torch.bool else 1
        if used <= dim < used + width:
            return at if width == 1 else None
        used += width
    return len(parts)


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
    if len(stack._batch_size) > 1:
        return densified(stack)._restructure(op)
    # No row has a size: entries that are ragged get that of the first member.
    first = densified(stack._new(stack._stacked[:1], 0))
    return named(first._restructure(Narrow(0, 0, 0)), stack, op)


# --- another shape -------------------------------------------------------------------------


@rule(View, Reshape)
def _view(stack: Any, op: View) -> Any:
    batch, dim = stack._batch_size, stack._stack_dim
    if op.ndim < len(batch):
        return None
    at = _kept_at(batch, dim, op.shape)
    if at is None:
        return None
    inner = type(op)(op.shape[:at] + op.shape[at + 1 :], op.ndim - 1)
    return _each(stack, op, inner, at)


def _kept_at(batch: Size, dim: int, shape: Size) -> int | None:
    """Where a dimension is after a change of shape that leaves it whole, None if it does not."""
    before = math.prod(batch[:dim])
    for at, n in enumerate(shape):
        if n == batch[dim] and math.prod(shape[:at]) == before:
            return at
    return None


@rule(Flatten)
def _flatten(stack: Any, op: Flatten) -> Any:
    dim = stack._stack_dim
    if op.start <= dim <= op.end:
        return None
    after = op.start > dim
    n = op.end - op.start
    inner = Flatten(op.start - after, op.end - after, op.n)
    return _each(stack, op, inner, dim if after else dim - n)


@rule(Unflatten)
def _unflatten(stack: Any, op: Unflatten) -> Any:
    dim = stack._stack_dim
    if op.dim == dim:
        return None
    after = op.dim > dim
    inner = Unflatten(op.dim - after, op.sizes)
    return _each(stack, op, inner, dim if after else dim + len(op.sizes) - 1)


@rule(Unsqueeze)
def _unsqueeze(stack: Any, op: Unsqueeze) -> Any:
    dim = stack._stack_dim
    after = op.dim > dim
    return _each(stack, op, Unsqueeze(op.dim - after), dim if after else dim + 1)


@rule(Squeeze)
def _squeeze(stack: Any, op: Squeeze) -> Any:
    dim = stack._stack_dim
    dims = tuple([d - (d > dim) for d in op.dims if d != dim])
    if dim in op.dims:
        member = stack._stacked[0]
        return member._restructure(Squeeze(dims)) if dims else member
    return _each(stack, op, Squeeze(dims), dim - sum(d < dim for d in op.dims))


@rule(Permute)
def _permute(stack: Any, op: Permute) -> Any:
    dim = stack._stack_dim
    if dim >= len(op.dims):
        return _each(stack, op, op, dim)
    inner = Permute(tuple([d - (d > dim) for d in op.dims if d != dim]))
    return _each(stack, op, inner, op.dims.index(dim))


@rule(Transpose)
def _transpose(stack: Any, op: Transpose) -> Any:
    dims = list(range(len(stack._batch_size)))
    dims[op.dim0], dims[op.dim1] = dims[op.dim1], dims[op.dim0]
    return _permute(stack, Permute(tuple(dims)))


@rule(Expand, Broadcast)
def _expand(stack: Any, op: Expand) -> Any:
    dim = stack._stack_dim
    if dim >= op.ndim:
        return _each(stack, op, op, dim + len(op.shape) - op.ndim)
    at = dim + len(op.shape) - op.ndim
    inner = type(op)(op.shape[:at] + op.shape[at + 1 :], op.ndim - 1)
    members = [member._restructure(inner) for member in stack._stacked]
    if op.shape[at] != len(members):
        members *= op.shape[at]
    return named(stack._new(members, at), stack, op) if members else None


@rule(Narrow)
def _narrow(stack: Any, op: Narrow) -> Any:
    dim = stack._stack_dim
    if op.dim != dim:
        return _each(stack, op, Narrow(op.dim - (op.dim > dim), op.start, op.length), dim)
    members = stack._stacked[op.start : op.start + op.length]
    return named(stack._new(members, dim), stack, op) if members else _nothing(stack, op)


@rule(Pad)
def _pad(stack: Any, op: Pad) -> Any:
    dim = stack._stack_dim
    if dim >= len(op.pads):
        return _each(stack, op, op, dim)
    before, after = op.pads[dim]
    inner = Pad(op.pads[:dim] + op.pads[dim + 1 :], op.value)
    members = [member._restructure(inner) for member in stack._stacked]
    head = [_filled(members[0], op.value) for _ in range(before)]
    tail = [_filled(members[-1], op.value) for _ in range(after)]
    return named(stack._new([*head, *members, *tail], dim), stack, op)


def _filled(node: Any, value: float) -> Any:
    """A node of the same structure with one value everywhere, None in non-tensor entries."""

    def fill(_: Any, entry: Any) -> Any:
        if isinstance(entry, Tensor):
            return torch.full_like(entry, value)
        return NonTensorData._new(None, entry._batch_size, entry._device)

    return map_entries(node, fill)


# --- operations that compute: along other dimensions on each member --------------------------


@rule(Reduce)
def _reduce(stack: Any, op: Reduce) -> Any:
    dim = stack._stack_dim
    if op.dims is None:
        return _reduce_whole(stack, op)
    if dim in op.dims:
        try:
            dense = densified(stack)
        except ShapeError as error:
            raise ShapeError(
                f"Cannot reduce along the stack dimension {dim} of a ragged lazy stack. {error} To "
                f"reduce all values pass no dim, or pad the rows first: to_padded_tensor()."
            ) from None
        return dense._restructure(op)
    inner = Reduce(op.fold, tuple([d - (d > dim) for d in op.dims]), op.keepdim)
    return _each(stack, op, inner, dim if op.keepdim else dim - sum(d < dim for d in op.dims))


def _reduce_whole(stack: Any, op: Reduce) -> Any:
    """Every entry reduced to one value, be its rows of one shape or not."""
    refuse_exclusive(stack)
    entries: dict[str, Any] = {}
    for name in stack._names():
        try:
            entry = stack._fetch(name)
        except ShapeError:
            rows: list[Any] = [holder._fetch(name) for holder in holders(stack)]
            if not all(isinstance(x, Tensor) for x in rows):
                raise
            value = op.fold(torch.cat([x.reshape(-1) for x in rows]), (0,), False)
            ndim = len(stack._shape_of(name))
            entries[name] = value.reshape([1] * ndim) if op.keepdim else value
            continue
        entries[name] = op.leaf(entry) if isinstance(entry, Tensor) else entry._restructure(op)
    size = op.size(stack._batch_size)
    return named(node_class("dense")._new(entries, size, None, stack._device), stack, op)


@rule(Along)
def _along(stack: Any, op: Along) -> Any:
    dim = stack._stack_dim
    if op.dim == dim:
        return None
    return _each(stack, op, Along(op.fn, op.dim - (op.dim > dim)), dim)


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
    member = op.rows(torch.arange(batch[dim]).view(column).expand(batch).contiguous())
    row = op.rows(torch.arange(inner.numel()).view(inner).unsqueeze(dim).expand(batch).contiguous())
    if not member.numel():
        return _nothing(stack, op)
    out = _assemble(stack, member, row, inner)
    if out._members() is None and out._batch_size and not isinstance(op, Index):
        # All rows are of one member, by chance: the result is a stack all the same.
        out = stack._new(list(out.unbind(0)), 0)
    return named(out, stack, op)


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
        return member._restructure(Expand(row.shape, 0))
    place = torch.unravel_index(row, inner)
    if not row.ndim:  # one row: numbers, which give views
        return member._restructure(Index(tuple([int(i) for i in place]), inner))
    return member._restructure(Index(place, inner))
