"""Writing rows: all checks, allocations and conversions before the first write."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Size, Tensor

from .._keys import path_of, short
from .._typing import Path
from ..core import write
from ..core.leaf import Leaf, NonTensorData, NonTensorDataBase, NonTensorStack, same
from ..core.node import Entry, Node
from ..errors import BatchSizeError, EntryTypeError, LockedError, ShapeError
from .bits import AS_INTEGERS
from .indexing import Index, Rows, Select, normal
from .inplace import is_odd, rehearse, try_odd_copies
from .operands import transforms
from .shape import Expand

if TYPE_CHECKING:
    from typing_extensions import Self

_NUMBERS = (bool, int, float, complex, np.number, np.bool_)


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
    op = rows_of(node, index)
    writes = RowWrites(op)
    if isinstance(value, Node):
        writes.tree(node, _broadcast(op, value), ())
    elif isinstance(value, Mapping):
        writes.tree(node, value, ())
    else:
        writes.everywhere(node, value, ())
    writes.run()


def update_rows(node: Node, index: Any, value: Any, non_blocking: bool = False) -> None:
    """As `write_rows` of a tensordict or mapping, all keys of which must be there.

    Raises:
        KeyError: a key is not there.
    """
    op = rows_of(node, index)
    if not isinstance(value, (Node, Mapping)):
        raise EntryTypeError(
            f"Cannot update rows from a {type(value).__name__}: expected a tensordict or a mapping."
        )
    writes = ExistingRowWrites(op, non_blocking=non_blocking)
    writes.tree(node, _broadcast(op, value) if isinstance(value, Node) else value, ())
    writes.run()


class RowWrites:
    """Checked row writes waiting to be run together.

    Attributes:
        op: the rows of the node that is written to.
        out: shape of the whole write, to which values are broadcast.
        take: which part of such a value goes here, None for all of it.
        non_blocking: how values are copied to the device of their target.
        views: rows that are views of their tensors, and (``values``) what goes there.
        picked: (tensor, rows of one dimension, value) of equal dtype and exactly the shape of
            the rows, all on the CPU.
        exact: (tensor, rows, value) of equal dtype and exactly the shape of the rows.
        scattered: (tensor, rows, value) for all others.
        fills: (tensor, rows, number).
        stores: (node, name, entry) to put in its place.
        stacked: whether members of a stack are written, whose rows are the members themselves.
    """

    __slots__ = (
        "dtypes",
        "exact",
        "fills",
        "non_blocking",
        "op",
        "out",
        "picked",
        "scattered",
        "shapes",
        "stacked",
        "stores",
        "take",
        "values",
        "views",
    )

    def __init__(
        self,
        op: Index,
        out: Size | None = None,
        take: Any = None,
        non_blocking: bool = False,
    ) -> None:
        self.op = op
        self.out = op.out if out is None else out
        self.take = take
        self.non_blocking = non_blocking
        self.views: list[Tensor] = []
        self.values: list[Tensor] = []
        self.picked: list[tuple[Tensor, Any, Tensor]] = []
        self.exact: list[tuple[Tensor, Index, Tensor]] = []
        self.scattered: list[tuple[Tensor, Index, Tensor]] = []
        self.fills: list[tuple[Tensor, Index, Any]] = []
        self.stores: list[tuple[Node, str, Entry]] = []
        self.stacked = False
        self.dtypes: set[torch.dtype] = set()  # those that were seen to hold the number
        self.shapes: dict[Size, Size] = {}

    def run(self) -> None:
        """Do the writes. Nothing here can fail for a reason that a check could have found."""
        if self.stacked:
            self.keep_values()
        try_odd_copies(self.views, self.values)
        for target, _, value in self.scattered:
            if is_odd(value):
                torch.empty(value.shape, dtype=target.dtype, device=target.device).copy_(value)
        # None of these requires grad: the foreach form has no derivative.
        if len(self.views) > 2 and transforms() is None:
            torch._foreach_copy_(self.views, self.values, self.non_blocking)
        else:
            for view, value in zip(self.views, self.values):
                view.copy_(value, self.non_blocking)
        for target, rows, value in self.picked:
            target.index_copy_(rows.dim, rows.flat, value)
        for target, op, value in self.exact:
            op.copy(target, value)
        for target, op, value in self.scattered:
            op.write(target, value)
        for target, op, number in self.fills:
            op.fill(target, number)
        for node, name, entry in self.stores:
            node._store(name, entry)

    def keep_values(self) -> None:
        """Copy the values that another write would change first: ``stack[[0, 1]] = stack[[1, 0]]``."""
        rows = (self.picked, self.exact, self.scattered)
        targets = [*self.views, *[target for writes in rows for target, _, _ in writes]]
        written = {id(x): x for x in map(_owner, targets)}

        def kept(value: Tensor) -> Tensor:
            return value.clone() if id(_owner(value)) in written else value

        self.values = list(map(kept, self.values))
        for writes in rows:
            writes[:] = [(target, op, kept(value)) for target, op, value in writes]

    def share(self, op: Index, out: Size | None = None, take: Any = None) -> Self:
        """Writes of the same kind into other rows."""
        return type(self)(op, out, take, self.non_blocking)

    def tree(self, node: Node, value: Any, path: Path) -> None:
        if node._members() is not None:
            self.members(node, value, path, RowWrites.tree)
            return
        if isinstance(value, Node):
            if self.take is not None:
                value = value._restructure(_positions(self.take, value._batch_size))
            writes = self if self.take is None else self.share(self.op)
            writes.rows(node, value, path)
            self.absorb(writes)
        else:
            for key, item in value.items():
                self.entry(node, path_of(key), item, path)

    def rows(self, node: Node, value: Node, path: Path) -> None:
        """Plan to write a tensordict that has one row for each row here."""
        if self.op.is_view:
            self.view_rows(node, value, path)
            return
        op, n, out, fetch = self.op, self.op.ndim, self.out, node._fetch
        picked, exact = self.picked.append, self.exact.append
        direct = type(op) is Rows and op.flat is op.index and op.on_cpu
        seen: Size | None = None
        want: Size | None = None
        movable: torch.dtype | None = None  # a dtype that torch can scatter
        for name, item in value._items():
            present = fetch(name)
            if type(present) is not Tensor or type(item) is not Tensor:
                self.entry(node, (name,), item, path)
                continue
            dtype = present.dtype
            if (
                item.dtype is dtype
                and item.layout is torch.strided
                and present.is_contiguous()
                and not present.requires_grad
            ):
                near = present.is_cpu and item.is_cpu
                if near or present.device == item.device:
                    shape = present.shape
                    if shape != seen:
                        seen, want = shape, out + shape[n:]
                    if item.shape == want:
                        if direct and near and (dtype is movable or dtype not in AS_INTEGERS):
                            movable = dtype
                            picked((present, op, item))
                        else:
                            exact((present, op, item))
                        continue
            self.scattered.append((present, op, self.fitted(present, item, path, name)))

    def view_rows(self, node: Node, value: Node, path: Path) -> None:
        """`rows` where they are views of their tensors."""
        op, key, fetch = self.op, self.op.key, node._fetch
        for name, item in value._items():
            present = fetch(name)
            if type(present) is not Tensor or type(item) is not Tensor:
                self.entry(node, (name,), item, path)
                continue
            if not (present.requires_grad or item.requires_grad):
                view = present[key]
                if item.shape == view.shape and (present.is_contiguous() or view.is_contiguous()):
                    self.views.append(view)
                    self.values.append(item)
                    continue
            self.scattered.append((present, op, self.fitted(present, item, path, name)))

    def members(self, node: Any, value: Any, path: Path, write: Any) -> None:
        """Write the rows of a stack: into each member that holds some of them."""
        stack = node._members()
        self.stacked = True
        if isinstance(value, Node) and self.take is not None:
            value = value._restructure(_positions(self.take, value._batch_size))
            whole = self.share(self.op)
        else:
            whole = self
        out = whole.out + node._batch_size[self.op.ndim :]
        for i, part, take in member_rows(self.op, node._batch_size, node.stack_dim):
            if whole.take is not None:
                take = whole.take if take is None else tuple(t[take] for t in whole.take)
            share = self.share(part, out, take)
            write(share, stack[i], value, path)
            self.absorb(share)

    def absorb(self, writes: RowWrites) -> None:
        if writes is not self:
            self.views += writes.views
            self.values += writes.values
            self.picked += writes.picked
            self.exact += writes.exact
            self.scattered += writes.scattered
            self.fills += writes.fills
            self.stores += writes.stores
            self.stacked = self.stacked or writes.stacked

    def entry(self, node: Node, names: Path, item: Any, path: Path) -> None:
        name = names[0]
        present = node._fetch(name)
        if len(names) > 1:
            item = {names[1:]: item}
        if isinstance(present, Tensor):
            self.tensor(present, item, path, name)
        elif present is None:
            self.allocate(node, name, item, (*path, name))
        elif isinstance(present, Node):
            if isinstance(item, (Node, Mapping)):
                self.tree(present, item, (*path, name))
            else:
                self.everywhere(present, item, (*path, name))
        else:
            self.value(node, name, present, item)

    def everywhere(self, node: Node, value: Any, path: Path) -> None:
        if node._members() is not None:
            self.members(node, value, path, RowWrites.everywhere)
            return
        for name, entry in node._items():
            if isinstance(entry, Tensor):
                self.tensor(entry, value, path, name)
            elif isinstance(entry, Node):
                self.everywhere(entry, value, (*path, name))

    def tensor(self, target: Tensor, value: Any, path: Path, name: str) -> None:
        """Plan to write into the rows of one tensor."""
        op = self.op
        if type(value) is not Tensor:
            if isinstance(value, _NUMBERS):
                _check_target(op, target, path, name)
                self.check_number(target, value, path, name)
                self.fills.append((target, op, value))
                return
        elif type(target) is Tensor and self.take is None and op.is_view:
            view = op.leaf(target)
            plain = not (target.requires_grad or value.requires_grad)
            if plain and value.shape == view.shape and view.is_contiguous():
                self.views.append(view)
                self.values.append(value)
                return
        self.scattered.append((target, op, self.fitted(target, value, path, name)))

    def shape_for(self, target: Size) -> Size:
        """The shape of the rows of a tensor of some shape; many leaves share theirs."""
        shape = self.shapes.get(target)
        if shape is None:
            shape = self.shapes[target] = self.out + target[self.op.ndim :]
        return shape

    def check_number(self, target: Tensor, value: Any, path: Path, name: str) -> None:
        """Raise what would be raised when a number is written into a tensor of some dtype."""
        if target.dtype not in self.dtypes:
            try:
                torch.full((), value, dtype=target.dtype)
            except (RuntimeError, TypeError) as err:
                raise ShapeError(
                    f"Cannot write {value!r} into rows of {short((*path, name))!r}: {err}"
                ) from None
            self.dtypes.add(target.dtype)

    def fitted(self, target: Tensor, value: Any, path: Path, name: str) -> Tensor:
        """The tensor to write into the rows of ``target``; everything is checked."""
        where = short((*path, name))
        if not isinstance(value, Tensor):
            if isinstance(value, (Leaf, Node, Mapping, str)):
                raise ShapeError(
                    f"Cannot write a {type(value).__name__} into rows of the tensor {where!r}."
                )
            try:
                value = torch.as_tensor(value, dtype=target.dtype, device=target.device)
            except (TypeError, ValueError, RuntimeError) as err:
                raise EntryTypeError(
                    f"Cannot write a {type(value).__name__} into rows of the tensor {where!r}: {err}."
                ) from None
        _check_target(self.op, target, path, name)
        shape = self.shape_for(target.shape)
        if value.shape != shape or self.take is not None:
            try:
                whole = value.expand(shape)
            except RuntimeError:
                raise ShapeError(
                    f"Cannot write into rows of {where!r}: expected a value that broadcasts to "
                    f"{list(shape)}, got shape {list(value.shape)}."
                ) from None
            if self.take is not None:
                value = whole[self.take]
        if value.dtype is not target.dtype or value.device != target.device:
            value = value.to(target.device, target.dtype, non_blocking=self.non_blocking)
        return value

    def allocate(self, node: Node, name: str, item: Any, path: Path) -> None:
        if node._lock is not None:
            raise LockedError
        node._admit(name)
        batch, op = node._batch_size, self.op
        rows = op.size(batch)
        if isinstance(item, (Node, Mapping)):
            child = node._child()
            if isinstance(item, Node) and len(item._batch_size) > len(rows):
                child = child._like({}, batch + item._batch_size[len(rows) :], None)
            self.tree(child, item, path)
            self.stores.append((node, name, child))
            return
        n = op.ndim
        part = node._child()._like({}, self.out + batch[n:], None)
        entry = write.entry_of(part, item, path)
        if isinstance(entry, Tensor):
            whole = entry.new_zeros(batch[:n] + entry.shape[len(self.out) :])
            value = entry if self.take is None else entry[self.take]
            self.scattered.append((whole, op, value))
            self.stores.append((node, name, whole))
        elif isinstance(entry, Leaf):
            blank = NonTensorData._new(None, batch, node._device)
            self.value(node, name, blank, entry)

    def value(self, node: Node, name: str, present: Entry, item: Any) -> None:
        if not isinstance(present, NonTensorDataBase):
            raise EntryTypeError(
                f"Cannot write into rows of {name!r}: a {type(present).__name__} has no rows."
            )
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


class ExistingRowWrites(RowWrites):
    """Row writes that add no entry."""

    def allocate(self, node: Node, name: str, item: Any, path: Path) -> None:
        raise write.missing(node, (name,))


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
        return [(op.row % batch[0], Index((), inner), None)]
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


def rows_of(node: Node, index: Any) -> Index:
    whole = index is Ellipsis or (type(index) is tuple and not index)
    return Index((), node._batch_size) if whole else normal(index, node._batch_size)


def _broadcast(op: Index, value: Any) -> Any:
    """The value, its batch size expanded to the rows that are written."""
    want, got = op.out, value._batch_size
    if got == want:
        return value
    head = got[: len(want)]
    if head == want:
        return value
    try:
        fits = torch.broadcast_shapes(want, head) == want
    except RuntimeError:
        fits = False
    if not fits:
        raise BatchSizeError(
            f"indexed destination TensorDict batch size is {want}, which differs from the source "
            f"batch size {got}."
        )
    return value._restructure(Expand(want, len(head)))


def _check_target(op: Index, target: Tensor, path: Path, name: str) -> None:
    """Raise before the first write what torch would raise in it."""
    recorded = target.requires_grad and torch.is_grad_enabled()
    if recorded and target.is_leaf:
        why = "it is a leaf that requires grad. Write under torch.no_grad()"
    elif target.is_nested:
        why = "it is a nested tensor. Replace it"
    elif not target.is_contiguous() and _overlaps(op, target):
        why = "it is expanded, several rows share their memory. clone() it first"
    else:
        if recorded and target._is_view():
            rehearse([target], Tensor.zero_)  # torch says why, if it refuses
        return
    raise ShapeError(f"Cannot write into rows of {short((*path, name))!r}: {why}.")


def _owner(x: Tensor) -> Tensor:
    """The tensor that a view is of, else the tensor itself."""
    base = x._base
    return x if base is None else base


def _overlaps(op: Index, target: Tensor) -> bool:
    """Whether rows of an expanded tensor hold one element at several places."""
    if 0 not in target.stride():
        return False
    view = op.leaf(target) if op.is_view else target
    return any(stride == 0 and n > 1 for n, stride in zip(view.shape, view.stride()))
