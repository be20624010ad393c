"""Reading rows: the index acts on the batch as on a tensor of that shape.

An index is put in normal form once for the whole tree (lists to tensors, masks to
positions, ``...`` to slices; bounds checked), so that each leaf does one torch call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Size, Tensor

from ..core import jagged
from ..core.node import Entry, Node
from ..core.structural import DimNames, StructuralOp, named
from ..core.undo import itself
from ..errors import DimError, EntryTypeError
from .bits import AS_INTEGERS, bits
from .shape import rows_of

_FULL = slice(None)
_TRUTH = (bool, np.bool_)
_MASKS = (torch.bool, torch.uint8)
_ONLY_INTS = {int}
_FEW = 64  # so many positions Python compares faster than torch


class Index(StructuralOp):
    """Any index in normal form.

    Attributes:
        parts: one item per batch dimension that is consumed, and ``None`` or a bool where a
            dimension is made: ints, slices, tensors of positions, ``None``, booleans (and
            masks, where values cannot be read).
        ndim: number of batch dimensions of the root.
        out: the root's batch size afterwards.
        is_view: whether the rows of a tensor are a view of it.
    """

    __slots__ = ("is_view", "key", "ndim", "out", "parts")

    keeps_lock = False

    parts: tuple[Any, ...]
    key: Any
    ndim: int
    out: Size
    is_view: bool

    def __init__(self, parts: tuple[Any, ...], batch: Size) -> None:
        self.parts = parts
        self.key = parts[0] if len(parts) == 1 else parts  # torch reads a bare item faster
        self.ndim = len(batch)
        self.out, self.is_view = _size_after(parts, batch)

    def size(self, batch: Size) -> Size:
        return self.out if len(batch) == self.ndim else self.out + batch[self.ndim :]

    def names(self, names: DimNames) -> DimNames | None:
        return named([*_result_names(self.parts, names[: self.ndim]), *names[self.ndim :]])

    def leaf(self, x: Tensor) -> Tensor:
        out: Tensor = x[self.key]
        return out

    def leaves(self, xs: list[Tensor]) -> Sequence[Tensor]:
        key = self.key
        return [x[key] for x in xs]

    def write(self, target: Tensor, value: Tensor) -> None:
        """Write a value of its dtype and device that broadcasts to the rows of one tensor."""
        if target.dtype in AS_INTEGERS:
            target, value = bits(target), bits(value)
        target[self.parts] = value

    def copy(self, target: Tensor, value: Tensor) -> None:
        """Write a value of exactly the shape, dtype and device of the rows of one tensor."""
        self.write(target, value)

    def fill(self, target: Tensor, number: Any) -> None:
        """Write a number that was checked into the rows of one tensor."""
        if self.is_view:
            self.leaf(target).fill_(number)
        else:
            self.write(target, torch.full((), number, dtype=target.dtype, device=target.device))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.parts})"


class Select(Index):
    """One row of the first batch dimension."""

    __slots__ = ("row",)

    def __init__(self, row: int, batch: Size) -> None:
        self.parts = (row,)
        self.key = self.row = row
        self.ndim = len(batch)
        self.out = batch[1:]
        self.is_view = True


class Span(Index):
    """A slice of the first batch dimension."""

    __slots__ = ()

    def __init__(self, span: slice, batch: Size) -> None:
        self.parts = (span,)
        self.key = span
        self.ndim = len(batch)
        self.out = Size([_length(span, batch[0]), *batch[1:]])
        self.is_view = True


class Rows(Index):
    """Rows of one batch dimension by a tensor of positions that were checked."""

    __slots__ = ("dim", "flat", "index", "on_cpu")

    def __init__(self, index: Tensor, dim: int, batch: Size) -> None:
        self.parts = (*[_FULL] * dim, index)
        self.key = self.parts if dim else index
        self.index = index
        self.flat = index if index.ndim == 1 else index.reshape(-1)
        self.on_cpu = index.is_cpu  # comparing devices costs more
        self.dim = dim
        self.ndim = len(batch)
        self.out = batch[:dim] + index.shape + batch[dim + 1 :]
        self.is_view = False

    def leaf(self, x: Tensor) -> Tensor:
        return self.leaves([x])[0]

    def leaves(self, xs: list[Tensor]) -> Sequence[Tensor]:
        dim, flat, index = self.dim, self.flat, self.index
        out = rows_of(xs, dim, flat)  # several times faster than x[rows]
        if index.ndim == 1:
            return out
        shape = index.shape
        return [y.view(*x.shape[:dim], *shape, *x.shape[dim + 1 :]) for x, y in zip(xs, out)]

    def copy(self, target: Tensor, value: Tensor) -> None:
        if target.dtype in AS_INTEGERS:
            target, value = bits(target), bits(value)
        if self.flat is self.index and self.flat.device == target.device:
            target.index_copy_(self.dim, self.flat, value)
        else:
            target[self.parts] = value

    def fill(self, target: Tensor, number: Any) -> None:
        if self.flat.device == target.device and target.dtype not in AS_INTEGERS:
            target.index_fill_(self.dim, self.flat, number)
        else:
            super().fill(target, number)


def normal(index: Any, batch: Size) -> Index:
    """The normal form of an index on a batch shape.

    Raises:
        IndexError: too many dimensions, out of range, or not an index.
        ValueError: a slice whose step is not positive.
    """
    kind = type(index)
    if kind is int and batch:
        n = batch[0]
        if not -n <= index < n:
            raise _out_of_range(index, 0, batch)
        return Select(index, batch)
    if kind is slice and batch:
        return Span(index, batch)
    if (kind is Tensor or kind is list) and batch:
        rows = _simple_rows(index, batch[0])
        if rows is not None:
            return Rows(rows, 0, batch)
    parts, tensors = _expanded(index, batch)
    if tensors:
        parts = _checked(parts, batch)
        op = _one_tensor(parts, batch)
        if op is not None:
            return op
    try:
        return Index(parts, batch)
    except (IndexError, TypeError, RuntimeError) as err:
        if isinstance(err, (DimError, EntryTypeError)):
            raise
        raise DimError(
            f"Cannot index a batch of size {list(batch)} with {index!r}: {err}"
        ) from None


def read_rows(node: Any, index: Any) -> Any:
    """The rows of every entry that ``index`` selects: views for ints and slices, else copies."""
    if index is Ellipsis or (type(index) is tuple and not index):
        return itself(node)
    return node._restructure(normal(index, node._batch_size))


def index_entry(node: Node, entry: Entry, index: Any) -> Any:
    """The rows of one entry of ``node``."""
    if index is Ellipsis or (type(index) is tuple and not index):
        return entry
    if type(entry) is Tensor and type(index) is int and node._batch_size:
        if not -node._batch_size[0] <= index < node._batch_size[0]:
            raise _out_of_range(index, 0, node._batch_size)
        return entry[index]
    op = normal(index, node._batch_size)
    if isinstance(entry, Tensor):
        return op.leaf(entry) if not entry.is_nested else jagged.restructured(op, entry)
    return entry._restructure(op)


def positions(rows: Tensor, n: int) -> Tensor:
    """Positions counted from the front, checked against ``n`` once for the whole tree.

    Raises:
        DimError: (an ``IndexError``) for a position that is out of range.
    """
    if traced(rows):  # its values cannot be read: torch itself checks, per leaf
        return rows
    return _within(rows if rows.dtype is torch.int64 else rows.long(), n)


def _within(rows: Tensor, n: int) -> Tensor:
    """`positions` of int64 whose values can be read."""
    count = rows.numel()
    if not count:
        return rows
    if not rows.is_cpu:  # looking would wait for the device; its kernels check
        return torch.where(rows < 0, rows + n, rows)
    if count <= _FEW:
        numbers = rows.tolist() if rows.ndim == 1 else rows.reshape(-1).tolist()
        return _wrapped(rows, min(numbers), max(numbers), n)
    low, high = torch.aminmax(rows)
    return _wrapped(rows, int(low), int(high), n)


def _wrapped(rows: Tensor, first: int, last: int, n: int) -> Tensor:
    """Positions of which ``first`` and ``last`` are the smallest and the largest."""
    if first < -n or last >= n:
        raise DimError(
            f"index {first if first < -n else last} is out of range for a batch dimension of size "
            f"{n}."
        )
    return torch.where(rows < 0, rows + n, rows) if first < 0 else rows


def traced(x: Tensor) -> bool:
    """Whether values cannot be read: traced, faked, or under a function transform."""
    return (
        torch.compiler.is_compiling()
        or type(x) is not Tensor
        or x.is_meta
        or torch._C._len_torch_dispatch_stack() > 0  # a mode that fakes results
        or torch._C._functorch.is_functorch_wrapped_tensor(x)
    )


# --- normal form -----------------------------------------------------------------------


def _simple_rows(index: Any, n: int) -> Tensor | None:
    """The rows of the common indices of one dimension, checked: ints in a list or a tensor, a mask.

    None for every other list or tensor.
    """
    if type(index) is list:
        if set(map(type, index)) != _ONLY_INTS:
            return None
        try:
            rows = torch.tensor(index)
        except RuntimeError:  # beyond 64 bits
            return None
        return _wrapped(rows, min(index), max(index), n)
    if index.ndim != 1 or traced(index):
        return None
    if index.dtype is torch.int64:
        return _within(index, n)
    if index.dtype is torch.bool and index.shape[0] == n:
        return index.nonzero(as_tuple=True)[0]
    return None


def _one_tensor(parts: tuple[Any, ...], batch: Size) -> Rows | None:
    """The faster form of an index of which all but one part are full slices."""
    at = -1
    for i, part in enumerate(parts):
        if isinstance(part, Tensor):
            if at >= 0:
                return None
            at = i
        elif type(part) is not slice or part != _FULL:
            return None
    if at < 0:
        return None
    rows = parts[at]
    if rows.dtype is torch.bool or not rows.ndim or traced(rows):
        return None
    return Rows(rows, at, batch)


def _expanded(index: Any, batch: Size) -> tuple[tuple[Any, ...], bool]:
    """The index as a tuple without ``...``, lists as tensors; whether there are tensors in it."""
    items = index if type(index) is tuple else (index,)
    parts: list[Any] = []
    used = 0
    hole = -1
    tensors = False
    for item in items:
        kind = type(item)
        if kind is int or kind is slice:
            parts.append(item)
            used += 1
            continue
        if item is Ellipsis:
            if hole >= 0:
                raise DimError("an index can only have a single ellipsis ('...').")
            hole = len(parts)
            continue
        part, n = _part(item)
        parts.append(part)
        used += n
        tensors = tensors or isinstance(part, Tensor)
    if used > len(batch):
        if not batch:
            raise DimError(
                "indexing a tensordict with td.batch_dims==0 is not permitted. "
                f"Got index {index!r} on batch size []."
            )
        raise DimError(
            f"too many indices for tensordict of batch dimension {len(batch)}: {index!r} indexes "
            f"{used} dimensions of batch size {list(batch)}."
        )
    if hole >= 0:
        parts[hole:hole] = [_FULL] * (len(batch) - used)
    return tuple(parts), tensors


def _part(item: Any) -> tuple[Any, int]:
    """One item as a bool, int, slice or tensor, and the number of batch dimensions it consumes."""
    if item is None or isinstance(item, _TRUTH):
        return (item if item is None else bool(item)), 0
    if isinstance(item, slice):
        return item, 1
    if isinstance(item, Tensor):
        return _tensor_part(item)
    if isinstance(item, range):
        return torch.arange(item.start, item.stop, item.step), 1
    if isinstance(item, (list, np.ndarray, tuple)):
        return _tensor_part(_array(item))
    if not isinstance(item, float) and hasattr(item, "__index__"):
        return item.__index__(), 1
    raise DimError(
        f"Cannot index with {item!r} of type {type(item).__name__}: expected a key, an int, a "
        f"slice, a list, an array, a tensor, None or '...'."
    )


def _tensor_part(item: Tensor) -> tuple[Any, int]:
    if item.dtype is torch.int64 and item.ndim:
        return item, 1
    if item.dtype in _MASKS:
        mask = item.bool()
        if not item.ndim and not traced(mask):
            return bool(mask), 0
        return mask, item.ndim
    if item.is_floating_point() or item.is_complex():
        raise DimError(f"Cannot index with a tensor of dtype {item.dtype}: expected integers.")
    if not item.ndim and not traced(item):
        return int(item), 1
    return item.long(), 1


def _array(item: Any) -> Tensor:
    try:
        tensor = torch.as_tensor(item if isinstance(item, np.ndarray) else list(item))
    except (TypeError, ValueError, RuntimeError) as err:
        raise DimError(
            f"Cannot index with {item!r}: expected integers or booleans ({err})."
        ) from None
    # torch reads an empty list as floats.
    return tensor.long() if not tensor.numel() and tensor.dtype is torch.float32 else tensor


def _checked(parts: tuple[Any, ...], batch: Size) -> tuple[Any, ...]:
    """Masks as positions, and positions checked, where their values can be read."""
    out: list[Any] = []
    dim = 0
    for part in parts:
        if not isinstance(part, Tensor):
            out.append(part)
            dim += part is not None and type(part) is not bool
        elif part.dtype is torch.bool:
            shape = batch[dim : dim + part.ndim]
            if part.shape != shape:
                raise DimError(
                    f"The shape of the mask {list(part.shape)} at dim {dim} does not match the "
                    f"batch size {list(batch)}."
                )
            dim += part.ndim
            if traced(part):
                out.append(part)
            else:  # looked for once, not once for each leaf
                out.extend(part.nonzero(as_tuple=True))
        else:
            out.append(positions(part, batch[dim]))
            dim += 1
    return tuple(out)


def _size_after(parts: Sequence[Any], batch: Size) -> tuple[Size, bool]:
    """The batch size after an index, and whether what it gives are views."""
    out: list[int] = []
    picked: list[Size] = []
    places: set[int] = set()  # where in ``out`` the tensors stand
    dim = 0
    for part in parts:
        if part is None:
            out.append(1)
        elif type(part) is slice:
            out.append(_length(part, batch[dim]))
            dim += 1
        elif type(part) is int:
            if not -batch[dim] <= part < batch[dim]:
                raise _out_of_range(part, dim, batch)
            dim += 1
        elif isinstance(part, Tensor) and part.dtype is not torch.bool:
            picked.append(part.shape)
            places.add(len(out))
            dim += 1
        else:
            return _proxy_size(parts, batch), False
    if picked:
        same = all(shape == picked[0] for shape in picked)
        # Tensors side by side: their dimensions stand there, else in front.
        at = places.pop() if len(places) == 1 else 0
        out[at:at] = picked[0] if same else torch.broadcast_shapes(*picked)
    return Size([*out, *batch[dim:]]), not picked


def _length(part: slice, n: int) -> int:
    if part.step is not None and part.step <= 0:
        raise EntryTypeError(
            f"Cannot index with {part}: step must be greater than zero. Use flip() to reverse."
        )
    try:
        return len(range(n)[part])
    except TypeError as err:
        raise DimError(f"Cannot index with {part}: {err}.") from None


def _proxy_size(parts: Sequence[Any], batch: Size) -> Size:
    # torch itself answers on a tensor of the batch shape that has one element of memory.
    device = next((p.device for p in parts if isinstance(p, Tensor)), None)
    proxy = torch.zeros((), dtype=torch.bool, device=device).expand(batch)
    return proxy[tuple(parts)].shape


def _out_of_range(i: int, dim: int, batch: Size) -> DimError:
    return DimError(
        f"index {i} is out of range for the batch dimension {dim} of size {batch[dim]} "
        f"(batch size {list(batch)})."
    )


def _result_names(parts: Sequence[Any], names: DimNames) -> DimNames:
    out: DimNames = []
    advanced: list[int] = []  # positions in ``out`` where an advanced index stands
    width = 0
    single: Any = None
    dim = 0
    for part in parts:
        if part is None:
            out.append(None)
        elif type(part) is slice:
            out.append(names[dim])
            dim += 1
        elif type(part) is int:
            dim += 1
        elif type(part) is bool:
            advanced.append(len(out))
            width = max(width, 1)
        else:
            advanced.append(len(out))
            mask = part.dtype is torch.bool
            width = max(width, 1 if mask else part.ndim)
            single = names[dim] if part.ndim == 1 else None
            dim += part.ndim if mask else 1
    if advanced:
        new: DimNames = [single] if len(advanced) == 1 and width == 1 else [None] * width
        at = advanced[0] if len(set(advanced)) == 1 else 0
        out[at:at] = new
    return [*out, *names[dim:]]
