"""Reading and writing rows: the index acts on the batch as on a tensor of that shape.

An index is put in normal form once for the whole tree (lists to tensors, ``...`` to
slices, masks to positions), so that each leaf does one torch call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Size, Tensor

from .._keys import path_of, short
from .._typing import Path
from ..core import write
from ..core.leaf import Leaf, NonTensorData, NonTensorDataBase, NonTensorStack, same
from ..core.node import Entry, Node
from ..core.structural import DimNames, StructuralOp
from ..errors import BatchSizeError, DimError, LockedError, ShapeError

_FULL = slice(None)
_TRUTH = (bool, np.bool_)
_INT_DTYPES = frozenset({torch.int64, torch.int32, torch.int16, torch.int8})


class Index(StructuralOp):
    """One index in normal form: a structural operation that does not keep the lock.

    Attributes:
        parts: one item per consumed batch dimension or ``None``/bool; ints, slices,
            tensors of integers, booleans.
    """

    __slots__ = ("_names", "_ndim", "_out", "parts")

    keeps_lock = False

    def __init__(self, parts: tuple[Any, ...], batch: Size) -> None:
        self.parts = parts
        self._ndim = len(batch)
        self._out = _result_size(parts, batch)
        self._names: list[Any] | None = None

    def size(self, batch: Size) -> Size:
        return self._out if len(batch) == self._ndim else self._out + batch[self._ndim :]

    def names(self, names: DimNames) -> DimNames | None:
        head = _result_names(self.parts, names[: self._ndim])
        out = [*head, *names[self._ndim :]]
        return out if any(name is not None for name in out) else None

    def leaf(self, x: Tensor) -> Tensor:
        return x[self.parts]


class Select(Index):
    """An int on the first batch dimension."""

    __slots__ = ("_i",)

    def __init__(self, i: int, batch: Size) -> None:
        self.parts = (i,)
        self._i = i
        self._ndim = len(batch)
        self._out = batch[1:]

    def leaf(self, x: Tensor) -> Tensor:
        return x[self._i]


class Rows(Index):
    """A 1-D tensor of non-negative positions on the first batch dimension."""

    __slots__ = ("_rows",)

    def __init__(self, rows: Tensor, batch: Size) -> None:
        self.parts = (rows,)
        self._rows = rows
        self._ndim = len(batch)
        self._out = Size([rows.shape[0], *batch[1:]])

    def leaf(self, x: Tensor) -> Tensor:
        if x.device != self._rows.device and self._rows.device.type == "cpu":
            return x[self._rows]
        return x.index_select(0, self._rows)


def normal(index: Any, batch: Size) -> Index:
    """The normal form of an index on a batch shape.

    Raises:
        IndexError: too many dimensions, out of range, or not an index.
    """
    kind = type(index)
    if kind is int and batch:
        n = batch[0]
        if not -n <= index < n:
            raise DimError(
                f"index {index} is out of range for the batch dimension 0 of size {n} "
                f"(batch size {list(batch)})."
            )
        return Select(index, batch)
    parts = _expanded(index, batch)
    if len(parts) == 1 and isinstance(parts[0], Tensor) and parts[0].ndim == 1:
        rows = parts[0]
        if rows.dtype in _INT_DTYPES and not _traced(rows):
            return Rows(positions(rows, batch[0]), batch)
    try:
        return Index(parts, batch)
    except (IndexError, TypeError) as err:
        raise DimError(
            f"Cannot index a batch of size {list(batch)} with {index!r}: {err}"
        ) from None


def read_rows(node: Any, index: Any) -> Any:
    """The rows of every entry that ``index`` selects: views for ints and slices, else copies."""
    if index is Ellipsis or (type(index) is tuple and not index):
        return node._restructure(Index((), node._batch_size))
    return node._restructure(normal(index, node._batch_size))


def index_entry(node: Node, entry: Entry, index: Any) -> Any:
    """The rows of one entry of ``node``."""
    op = normal(index, node._batch_size)
    if isinstance(entry, Tensor):
        return op.leaf(entry)
    return entry._restructure(op)


def write_rows(node: Node, index: Any, value: Any) -> None:
    """Write into the rows that ``index`` selects; all or nothing.

    Args:
        node: destination.
        index: rows.
        value: tensordict or mapping (entries that are missing here are allocated, zeros
            elsewhere), or a number or tensor that goes into every leaf.

    Raises:
        RuntimeError: sizes that do not broadcast, or a new key in a locked tensordict.
    """
    op = normal(index, node._batch_size) if index is not Ellipsis else Index((), node._batch_size)
    writes = _RowWrites(op)
    if isinstance(value, (Node, Mapping)):
        if isinstance(value, Node):
            _check_rows(op, node, value)
        writes.tree(node, value, ())
    else:
        writes.everywhere(node, value, ())
    writes.run()


class _RowWrites:
    """Checked row writes waiting to be run together.

    Attributes:
        op: the rows of the node that is written to.
        out: shape of the whole write, to which values are broadcast.
        take: which part of such a value goes here, None for all of it.
    """

    def __init__(self, op: Index, out: Size | None = None, take: Any = None) -> None:
        self.op = op
        self.out = op._out if out is None else out
        self.take = take
        self.copies: list[tuple[Tensor, Any, Tensor]] = []
        self.stores: list[tuple[Node, str, Entry]] = []

    def run(self) -> None:
        for target, parts, value in self.copies:
            if value.requires_grad or target.requires_grad or value.dtype != target.dtype:
                target[parts] = value.to(target.dtype)
            else:
                target[parts] = value
        for node, name, entry in self.stores:
            node._store(name, entry)

    def tree(self, node: Node, value: Any, path: Path) -> None:
        if node._members() is not None:
            self.members(node, value, path, _RowWrites.tree)
            return
        if isinstance(value, Node):
            if self.take is not None:
                value = value._restructure(_positions(self.take, value._batch_size))
            writes = self if self.take is None else _RowWrites(self.op)
            for name, item in value._items():
                writes.entry(node, (name,), item, path)
            self.absorb(writes)
        else:
            for key, item in value.items():
                self.entry(node, path_of(key), item, path)

    def members(self, node: Any, value: Any, path: Path, write: Any) -> None:
        """Write the rows of a stack: into each member that holds some of them."""
        stack = node._members()
        if isinstance(value, Node) and self.take is not None:
            value = value._restructure(_positions(self.take, value._batch_size))
            whole = _RowWrites(self.op)
        else:
            whole = self
        out = whole.out + node._batch_size[self.op._ndim :]
        for i, part, take in member_rows(self.op, node._batch_size, node.stack_dim):
            if whole.take is not None:
                take = whole.take if take is None else tuple(t[take] for t in whole.take)
            share = _RowWrites(part, out, take)
            write(share, stack[i], value, path)
            self.absorb(share)

    def absorb(self, writes: _RowWrites) -> None:
        if writes is not self:
            self.copies += writes.copies
            self.stores += writes.stores

    def entry(self, node: Node, names: Path, item: Any, path: Path) -> None:
        here = (*path, names[0])
        present = node._fetch(names[0])
        if len(names) > 1:
            item, names = {names[1:]: item}, names[:1]
        if present is None:
            self.allocate(node, names[0], item, here)
        elif isinstance(present, Tensor):
            self.copies.append((present, self.op.parts, self.fitted(present, item, here)))
        elif isinstance(present, Node):
            if isinstance(item, (Node, Mapping)):
                self.tree(present, item, here)
            else:
                self.everywhere(present, item, here)
        else:
            self.value(node, names[0], present, item)

    def everywhere(self, node: Node, value: Any, path: Path) -> None:
        if node._members() is not None:
            self.members(node, value, path, _RowWrites.everywhere)
            return
        for name, entry in node._items():
            here = (*path, name)
            if isinstance(entry, Tensor):
                self.copies.append((entry, self.op.parts, self.fitted(entry, value, here)))
            elif isinstance(entry, Node):
                self.everywhere(entry, value, here)

    def fitted(self, target: Tensor, value: Any, path: Path) -> Tensor:
        n = self.op._ndim
        shape = self.out + target.shape[n:]
        if not isinstance(value, Tensor):
            if isinstance(value, (Leaf, Node, Mapping, str)):
                raise ShapeError(
                    f"Cannot write a {type(value).__name__} into rows of the tensor {short(path)!r}."
                )
            value = torch.as_tensor(value, device=target.device)
        try:
            whole = value.expand(shape)
        except RuntimeError:
            raise ShapeError(
                f"Cannot write into rows of {short(path)!r}: expected a value that broadcasts to "
                f"{list(shape)}, got shape {list(value.shape)}."
            ) from None
        return (value if self.take is None else whole[self.take]).to(target.device)

    def allocate(self, node: Node, name: str, item: Any, path: Path) -> None:
        if node._lock is not None:
            raise LockedError
        batch, op = node._batch_size, self.op
        rows = op.size(batch)
        if isinstance(item, (Node, Mapping)):
            child = node._child()
            if isinstance(item, Node) and len(item._batch_size) > len(rows):
                child = child._like({}, batch + item._batch_size[len(rows) :], None)
            self.tree(child, item, path)
            self.stores.append((node, name, child))
            return
        part = node._child()._like({}, self.out, None)
        entry = write.entry_of(part, item, path)
        if isinstance(entry, Tensor):
            whole = entry.new_zeros(batch + entry.shape[len(self.out) :])
            value = entry if self.take is None else entry[self.take]
            self.copies.append((whole, op.parts, value))
            self.stores.append((node, name, whole))
        elif isinstance(entry, Leaf):
            blank = NonTensorData._new(None, batch, node._device)
            self.value(node, name, blank, entry)

    def value(self, node: Node, name: str, present: Entry, item: Any) -> None:
        assert isinstance(present, NonTensorDataBase)
        batch = present._batch_size
        if isinstance(item, NonTensorData):
            item = item._data
        if isinstance(present, NonTensorData) and same(present._data, item):
            return
        rows = self.op.leaf(torch.arange(batch.numel()).view(batch))
        values = present._rows().copy().reshape(-1)
        flat = rows.reshape(-1).tolist()
        if isinstance(item, (NonTensorStack, list)):
            new = (
                item._rows()
                if isinstance(item, NonTensorStack)
                else _object_rows(item, len(self.out))
            )
            if self.take is not None:
                new = np.broadcast_to(new, tuple(self.out))[tuple(t.numpy() for t in self.take)]
                new = new if isinstance(new, np.ndarray) else _object_scalar(new)
            new = np.broadcast_to(new, tuple(rows.shape)).reshape(-1)
            for i, v in zip(flat, new):
                values[i] = v
        else:
            for i in flat:
                values[i] = item
        stack = NonTensorStack._new(values.reshape(tuple(batch)), present._device)
        entry: Entry = (
            stack if batch else NonTensorData._new(stack._values[()], batch, stack._device)
        )
        self.stores.append((node, name, entry))


def _object_scalar(value: Any) -> np.ndarray:
    out = np.empty((), dtype=object)
    out[()] = value
    return out


def member_rows(op: Index, batch: Size, dim: int) -> list[tuple[int, Index, Any]]:
    """The members that rows of a stack fall in: (number, rows of the member, their place).

    The place is an index into the shape of the result, None for all of it.  A row that
    is named twice goes to the last place it is named at.
    """
    inner = batch[:dim] + batch[dim + 1 :]
    if type(op) is Select and dim == 0:
        return [(op._i % batch[0], Index((), inner), None)]
    column = [1] * len(batch)
    column[dim] = batch[dim]
    member = op.leaf(torch.arange(batch[dim]).view(column).expand(batch))
    within = op.leaf(torch.arange(inner.numel()).view(inner).unsqueeze(dim).expand(batch))
    out: list[tuple[int, Index, Any]] = []
    for i in member.unique().tolist():
        place = (member == i).nonzero(as_tuple=True) if member.ndim else ()
        if not inner:
            out.append((i, Index((), inner), tuple(p[-1] for p in place)))
        else:
            rows = torch.unravel_index(within[place], inner)
            out.append((i, Index(tuple(rows), inner), place))
    return out


def _positions(take: tuple[Tensor, ...], batch: Size) -> Index:
    """Places in a broadcast shape as an index into ``batch``, which broadcasts to it."""
    own = take[len(take) - len(batch) :] if batch else ()
    return Index(tuple(t if n != 1 else torch.zeros_like(t) for t, n in zip(own, batch)), batch)


def _object_rows(value: list[Any], ndim: int) -> np.ndarray:
    return NonTensorStack.from_list(value, max(1, ndim))._values


def _check_rows(op: Index, node: Node, value: Node) -> None:
    want, got = op._out, value._batch_size
    if len(got) > len(want):
        got = got[: len(want)]
    try:
        fits = torch.broadcast_shapes(want, got) == want
    except RuntimeError:
        fits = False
    if not fits:
        raise BatchSizeError(
            f"indexed destination TensorDict batch size is {want}, which differs from the source "
            f"batch size {value._batch_size}."
        )


# --- normal form -----------------------------------------------------------------------


def _expanded(index: Any, batch: Size) -> tuple[Any, ...]:
    """The index as a tuple without ``...``, lists and arrays as tensors, masks as they are."""
    items = index if type(index) is tuple else (index,)
    parts: list[Any] = []
    used = 0
    hole = -1
    for item in items:
        if item is Ellipsis:
            if hole >= 0:
                raise DimError("an index can only have a single ellipsis ('...').")
            hole = len(parts)
            continue
        part, n = _part(item)
        parts.append(part)
        used += n
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
    return tuple(parts)


def _part(item: Any) -> tuple[Any, int]:
    """One item in normal form, and the number of batch dimensions it consumes."""
    if item is None or isinstance(item, _TRUTH):
        return (item if item is None else bool(item)), 0
    if isinstance(item, slice):
        if item.step is not None and item.step < 0:
            raise DimError(
                f"Cannot index with {item}: a negative step is not supported. Use flip()."
            )
        return item, 1
    if isinstance(item, Tensor):
        if item.dtype in (torch.bool, torch.uint8):
            return item.bool(), item.ndim
        if item.is_floating_point() or item.is_complex():
            raise DimError(f"Cannot index with a tensor of dtype {item.dtype}: expected integers.")
        return item, 1
    if isinstance(item, (list, range, np.ndarray, tuple)):
        tensor = torch.as_tensor(list(item) if isinstance(item, (range, tuple)) else item)
        if not tensor.numel() and tensor.dtype is torch.float32:
            tensor = tensor.long()
        return _part(tensor)
    if isinstance(item, float):
        raise DimError(
            f"Cannot index with {item!r}: expected an int, a slice, a tensor, None or '...'."
        )
    try:
        return item.__index__(), 1
    except AttributeError:
        raise DimError(
            f"Cannot index with {item!r} of type {type(item).__name__}: expected a key, an int, a "
            f"slice, a list, an array, a tensor, None or '...'."
        ) from None


def positions(rows: Tensor, n: int) -> Tensor:
    """Positions counted from the front, checked against ``n`` once for the whole tree."""
    if _traced(rows):  # its values cannot be read: torch itself checks, per leaf
        return rows
    if not rows.numel():
        return rows.long()
    low, high = (int(v) for v in torch.aminmax(rows))
    if low < -n or high >= n:
        raise DimError(
            f"index {low if low < -n else high} is out of range for a batch dimension of size {n}."
        )
    if low < 0:
        rows = torch.where(rows < 0, rows + n, rows)
    return rows if rows.dtype in (torch.int64, torch.int32) else rows.long()


def _traced(x: Tensor) -> bool:
    """Whether values cannot be read: traced, faked, or under a function transform."""
    return (
        torch.compiler.is_compiling()
        or type(x) is not Tensor
        or x.device.type == "meta"
        or torch._C._functorch.is_functorch_wrapped_tensor(x)
    )


def _result_size(parts: Sequence[Any], batch: Size) -> Size:
    out: list[int] = []
    dim = 0
    for part in parts:
        if part is None:
            out.append(1)
        elif type(part) is slice:
            out.append(len(range(*part.indices(batch[dim]))))
            dim += 1
        elif type(part) is int:
            n = batch[dim]
            if not -n <= part < n:
                raise DimError(
                    f"index {part} is out of range for the batch dimension {dim} of size {n}."
                )
            dim += 1
        else:
            return _proxy_size(parts, batch)
    return Size([*out, *batch[dim:]])


def _proxy_size(parts: Sequence[Any], batch: Size) -> Size:
    # torch itself answers on a tensor of the batch shape that has one element of memory.
    device = next((p.device for p in parts if isinstance(p, Tensor)), None)
    proxy = torch.zeros((), dtype=torch.bool, device=device).expand(batch)
    return proxy[tuple(parts)].shape


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
