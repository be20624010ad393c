"""`LazyStackedTensorDict`: a stack that is kept as the list of its members.

The members may hold entries of different shapes and different keys.  Reading a key
stacks it; writing one writes each member's share of it; an operation on the whole
runs on each member.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Size, Tensor

from .._keys import path_of, short
from .._typing import NO_DEFAULT
from ..core import lock as locking
from ..core._torch import new_object
from ..core.leaf import Leaf, NonTensorDataBase, join
from ..core.lock import LockState
from ..core.node import KEEP, Entry, Node
from ..core.registry import register_node
from ..core.sizes import insert, wrap_dim
from ..core.structural import DimNames, StructuralOp
from ..errors import BatchSizeError, EntryTypeError, LockedError, ShapeError
from ..ops.dense_forms import densified
from ..ops.display_cards import NodeCard, field_cards
from ..ops.shape import Pick
from .base import TensorDictBase
from .dense import TensorDict
from .lazy_shape import restructure

if TYPE_CHECKING:
    from typing_extensions import Self


@register_node
class LazyStackedTensorDict(TensorDictBase):
    """Tensordicts stacked along a batch dimension without copying them.

    Args:
        *tensordicts: the members, of batch size ``[*B]``; sizes that differ between
            members read as -1.
        stack_dim: where the new dimension goes, in ``[-B-1, B]``.
        hook_out: called with the stacked tensor of each read by key, here and below; what it
            returns is read. Members, padded and listed forms, and operations do not call it.
        hook_in: called with each tensor that is set by key, here and below, before the members
            get their shares. In-place writes do not call it.
        names: one name (or None) per dimension of the result.
        stack_dim_name: name of the new dimension only.
        strict_shape: raise when the members' batch sizes differ.

    Raises:
        RuntimeError: no member.
        ValueError: members that are no tensordicts, or of different numbers of dimensions.

    >>> from tensordict import TensorDict
    >>> a, b = TensorDict(x=torch.zeros(2)), TensorDict(x=torch.ones(3))
    >>> lazy = LazyStackedTensorDict(a, b)
    >>> lazy.batch_size, lazy[0] is a, lazy.get("x", as_padded_tensor=True).shape
    (torch.Size([2]), True, torch.Size([2, 3]))
    """

    __slots__ = ("_own_lock", "_stack_dim", "_stacked", "hook_in", "hook_out")

    kind = "lazy_stack"

    _stacked: list[Any]
    _stack_dim: int
    hook_in: Callable[[Tensor], Any] | None
    hook_out: Callable[[Tensor], Any] | None

    def __init__(
        self,
        *tensordicts: Any,
        stack_dim: int = 0,
        hook_out: Callable[[Tensor], Any] | None = None,
        hook_in: Callable[[Tensor], Any] | None = None,
        names: Sequence[str | None] | None = None,
        stack_dim_name: str | None = None,
        strict_shape: bool = False,
    ) -> None:
        members = list(tensordicts)
        if not members:
            raise ShapeError("Cannot stack an empty list: expected one tensordict or more.")
        for member in members:
            if not isinstance(member, Node):
                raise EntryTypeError(
                    f"Cannot stack a {type(member).__name__}: expected tensordicts only."
                )
        ndim = len(members[0]._batch_size) + 1
        self._fill(members, wrap_dim(stack_dim, ndim, "stack_dim"))
        self.hook_in, self.hook_out = hook_in, hook_out
        if strict_shape and -1 in self._batch_size:
            raise BatchSizeError(
                "stacking tensordicts requires them to have congruent batch sizes, got "
                f"{[tuple(member._batch_size) for member in members]}."
            )
        if names is not None:
            self.names = list(names)
        elif stack_dim_name is not None:
            own = self._dim_names or [None] * ndim
            own[self._stack_dim] = stack_dim_name
            self._dim_names = own

    if not TYPE_CHECKING:

        @property
        def _lock(self) -> LockState | None:
            # A stack over locked members is locked, whoever locked them: a write would go there.
            if self._own_lock is not None:
                return self._own_lock
            for member in self._stacked:
                if member._lock is None:
                    return None
            return LockState()

        @_lock.setter
        def _lock(self, state: LockState | None) -> None:
            self._own_lock = state

    @classmethod
    def _new(cls, members: list[Any], stack_dim: int) -> Self:
        """Make one from a list of nodes (taken over) that is not empty."""
        out = new_object(cls)
        out._fill(members, stack_dim)
        return out

    def _fill(self, members: list[Any], stack_dim: int) -> None:
        first = members[0]
        batch, device, names = first._batch_size, first._device, first._dim_names
        for member in members:
            if member._batch_size != batch:
                batch = _common_batch(batch, member._batch_size)
        if device is not None and any(member._device != device for member in members):
            device = None
        if names is not None and any(member._dim_names != names for member in members):
            names = None
        self._stacked = members
        self._stack_dim = stack_dim
        self._batch_size = insert(batch, stack_dim, len(members))
        self._device = device
        self._dim_names = None if names is None else [*names[:stack_dim], None, *names[stack_dim:]]
        self._lock = None
        self._undo = None
        self.hook_in = self.hook_out = None

    @property
    def tensordicts(self) -> list[Any]:
        """The members, in order: a new list of the same objects."""
        return list(self._stacked)

    @property
    def stack_dim(self) -> int:
        """The batch dimension that numbers the members."""
        return self._stack_dim

    def __getitem__(self, index: Any) -> Any:
        # The commonest index needs no description of an index: it is a member.
        if type(index) is int and not self._stack_dim:
            stacked = self._stacked
            if -len(stacked) <= index < len(stacked):
                return stacked[index]
        return super().__getitem__(index)

    # --- printing ---------------------------------------------------------------------

    def _card(self) -> NodeCard:
        common = self._names()
        exclusive = {}
        for i, member in enumerate(self._stacked):
            names = [name for name in member._names() if name not in common]
            if names:
                exclusive[i] = field_cards(member, names)
        return NodeCard(
            type(self).__name__,
            field_cards(self, common),
            self,
            exclusive=exclusive,
            extra={"stack_dim": self._stack_dim},
        )

    # --- entries that not all members have, or not in one shape ---------------------------

    def valid_keys(
        self,
        include_nested: bool = False,
        leaves_only: bool = False,
        is_leaf: Any = None,
        *,
        sort: bool = False,
    ) -> list[Any]:
        """The keys that any member has, in the order in which the members have them.

        Args:
            include_nested, leaves_only, is_leaf, sort: as in `keys`.

        >>> from tensordict import TensorDict
        >>> LazyStackedTensorDict(TensorDict(a=1), TensorDict(b=1)).valid_keys()
        ['a', 'b']
        """
        found: dict[Any, None] = {}
        for member in self._stacked:
            found.update(dict.fromkeys(member.keys(include_nested, leaves_only, is_leaf)))
        return sorted(found, key=path_of) if sort else list(found)

    def get_nestedtensor(
        self, key: Any, default: Any = NO_DEFAULT, *, layout: torch.layout | None = None
    ) -> Any:
        """An entry as a nested tensor: ``get(key, as_nested_tensor=True)``."""
        return self.get(key, default, as_nested_tensor=True, layout=layout)

    # --- dense forms ------------------------------------------------------------------

    def contiguous(self, *, canonical: bool = False, inplace: bool = False) -> Any:
        """A dense tensordict where shapes agree, else a stack of contiguous members."""
        if not inplace:
            try:
                return densified(self).contiguous(canonical=canonical)
            except ShapeError:
                pass  # ragged
        return super().contiguous(canonical=canonical, inplace=inplace)

    # --- members ----------------------------------------------------------------------

    def append(self, tensordict: Any) -> None:
        """Add one member at the end.

        Raises:
            ValueError: its batch size is not that of the members.
            RuntimeError: the stack is locked.
        """
        self.insert(len(self._stacked), tensordict)

    def insert(self, index: int, tensordict: Any) -> None:
        """Add one member before position ``index``, as ``list.insert`` does."""
        self._add([tensordict], index)

    def extend(self, tensordict: Iterable[Any]) -> None:
        """Add several members at the end: those of a list, or the rows of a tensordict."""
        if isinstance(tensordict, Node):
            tensordict = self._rows_along(tensordict)
        self._add(list(tensordict), len(self._stacked))

    def _add(self, new: list[Any], index: int) -> None:
        if self._lock is not None:
            raise LockedError
        want = self._batch_size[: self._stack_dim] + self._batch_size[self._stack_dim + 1 :]
        for member in new:
            if not isinstance(member, Node):
                raise EntryTypeError(
                    f"Cannot add a {type(member).__name__} to a lazy stack: expected a tensordict."
                )
            if member._batch_size != want and -1 not in want:
                raise EntryTypeError(
                    f"Cannot add a tensordict to a lazy stack: expected batch size {list(want)}, "
                    f"got {list(member._batch_size)}."
                )
        members = list(self._stacked)
        members[index:index] = [member._bare() for member in new]
        names, hooks = self._dim_names, (self.hook_in, self.hook_out)
        self._fill(members, self._stack_dim)
        self._dim_names = names
        self.hook_in, self.hook_out = hooks

    def _rows_along(self, node: Any) -> list[Any]:
        return rows_along(node, self._stack_dim)

    # --- primitives: a stack of nodes -------------------------------------------------

    def _members(self) -> Sequence[Node]:
        return self._stacked

    def _regroup(self, members: list[Any]) -> Self:
        out = self._new(members, self._stack_dim)
        out._dim_names = self._dim_names
        return out

    def _shares(self, value: Any, ndim: int) -> list[Any]:
        n, dim = len(self._stacked), self._stack_dim
        if isinstance(value, Tensor):
            at = value.ndim - (ndim - dim)  # where the stack dimension is, shapes right-aligned
            if at < 0:
                return [value] * n
            size = value.shape[at]
            if size == n:
                return list(value.unbind(at))
            if size == 1:
                return [value.squeeze(at)] * n
        elif isinstance(value, Node):
            if len(value._batch_size) > dim and value._batch_size[dim] == n:
                return rows_along(value, dim)
            size = list(value._batch_size)  # type: ignore[assignment]
        elif isinstance(value, Leaf):
            if len(value._batch_size) <= dim:
                return [value] * n
            if value._batch_size[dim] == n:
                return [value._restructure(Pick(dim, i)) for i in range(n)]
            size = list(value._batch_size)  # type: ignore[assignment]
        else:
            return [value] * n
        raise ShapeError(
            f"Cannot write into a lazy stack of {n} along dimension {dim}: expected size {n} there, "
            f"got {size}."
        )

    # --- primitives: one level --------------------------------------------------------

    def _fetch(self, name: str) -> Entry | None:
        column: list[Any] = []
        for member in self._stacked:
            entry = member._fetch(name)
            if entry is None:
                return None
            column.append(entry)
        first = column[0]
        if isinstance(first, Tensor):
            try:
                stacked = torch.stack(column, self._stack_dim)
            except (RuntimeError, TypeError):
                raise _ragged(name, column) from None
            return stacked if self.hook_out is None else self.hook_out(stacked)
        if isinstance(first, Node):
            _same_kind(name, column, Node)
            bare = self._new([entry._bare() for entry in column], self._stack_dim)
            bare.hook_in, bare.hook_out = self.hook_in, self.hook_out
            own = self._dim_names
            if own is not None and own[self._stack_dim] is not None:
                names = bare._dim_names or [None] * len(bare._batch_size)
                bare._dim_names = [
                    own[self._stack_dim] if i == self._stack_dim else n for i, n in enumerate(names)
                ]
            return first._dress(bare)
        _same_kind(name, column, Leaf)
        return join(column, self._stack_dim, new_dim=True)

    def _class_of(self, name: str) -> type | None:
        classes = [member._class_of(name) for member in self._stacked]
        first = classes[0]
        if first is None or None in classes:
            return None
        if issubclass(first, TensorDictBase):
            return LazyStackedTensorDict
        if issubclass(first, NonTensorDataBase):
            return type(self._fetch(name))
        return first

    def _shape_of(self, name: str) -> Size:
        shapes = [member._shape_of(name) for member in self._stacked]
        shape = shapes[0]
        for other in shapes[1:]:
            shape = _common_shape(shape, other)
        return insert(shape, self._stack_dim, len(shapes))

    def _store(self, name: str, entry: Entry) -> None:
        if self.hook_in is not None and isinstance(entry, Tensor):
            entry = self.hook_in(entry)
        ndim = len(entry._batch_size) if isinstance(entry, Node) else entry.ndim
        for member, share in zip(self._stacked, self._shares(entry, ndim)):
            member._store(name, share)

    def _remove(self, name: str) -> None:
        for member in self._stacked:
            member._remove(name)

    def _items(self) -> Any:
        return [(name, self._fetch(name)) for name in self._names()]

    def _names(self) -> Any:
        first, *rest = self._stacked
        names = first._names()
        n = len(names)
        if all(
            len(other) == n and all(name in other for name in names) for other in map(_names, rest)
        ):
            return names
        return {
            name: None for name in names if all(name in member._names() for member in rest)
        }.keys()

    def _children(self) -> list[Node]:
        return list(self._stacked)

    def _like(
        self,
        entries: dict[str, Entry],
        batch_size: Size = KEEP,
        dim_names: DimNames | None = KEEP,
        device: torch.device | None = KEEP,
    ) -> Any:
        dim, n = self._stack_dim, len(self._stacked)
        if batch_size is not KEEP and (len(batch_size) <= dim or batch_size[dim] != n):
            # Not a stack of these members any more.
            names = None if dim_names is KEEP else dim_names
            where = self._device if device is KEEP else device
            return TensorDict._new(entries, batch_size, names, where)
        columns: list[dict[str, Entry]] = [{} for _ in range(n)]
        for name, entry in entries.items():
            ndim = len(entry._batch_size) if isinstance(entry, Node) else entry.ndim
            for column, share in zip(columns, self._shares(entry, ndim)):
                column[name] = share
        size = KEEP if batch_size is KEEP else batch_size[:dim] + batch_size[dim + 1 :]
        names = KEEP
        if dim_names is not KEEP:
            names = None if dim_names is None else _without(dim_names, dim)
        out = self._new(
            [member._like(c, size, names, device) for member, c in zip(self._stacked, columns)], dim
        )
        out._dim_names = self._dim_names if dim_names is KEEP else dim_names
        return out

    def _child(self) -> Node:
        return self._new([member._child() for member in self._stacked], self._stack_dim)

    # --- primitives: the whole tree ---------------------------------------------------

    def _collect(self, out: list[Tensor]) -> None:
        for member in self._stacked:
            member._collect(out)

    def _rebuild(self, leaves: Iterator[Tensor]) -> Self:
        return self._regroup([member._rebuild(leaves) for member in self._stacked])

    def _map(self, fn: Callable[[Tensor], Tensor]) -> Self:
        return self._regroup([member._map(fn) for member in self._stacked])

    def _restructure(self, op: StructuralOp) -> Any:
        out = restructure(self, op)
        if op.keeps_lock and self._lock is not None:
            locking.lock(out)
        return out

    @classmethod
    def _stack(cls, nodes: Sequence[Any], dim: int) -> Any:
        return LazyStackedTensorDict._new(list(nodes), dim)

    @classmethod
    def _cat(cls, nodes: Sequence[Any], dim: int) -> Any:
        first = nodes[0]
        along = first._stack_dim
        if dim == along:
            members = [row for node in nodes for row in rows_along(node, along)]
        else:
            columns = zip(*(rows_along(node, along) for node in nodes))
            inner = dim - (dim > along)
            members = [type(column[0])._cat(column, inner) for column in columns]
        out = first._new(members, along)
        if all(node._dim_names == first._dim_names for node in nodes):
            out._dim_names = first._dim_names
        return out

    # --- primitives: description ------------------------------------------------------

    def _header(self) -> dict[str, Any]:
        return {"stack_dim": self._stack_dim, "names": self._dim_names}

    @classmethod
    def _from_header(cls, header: dict[str, Any], entries: dict[str, Entry]) -> Any:
        members = [entries[name] for name in sorted(entries, key=int)]
        out = cls._new(members, header["stack_dim"])
        out._dim_names = header.get("names")
        return out


def rows_along(node: Any, dim: int) -> list[Any]:
    """The rows of a node along a batch dimension; the members themselves of a stack along it."""
    if isinstance(node._bare(), LazyStackedTensorDict) and node._bare()._stack_dim == dim:
        return list(node._bare()._stacked)
    return [node._restructure(Pick(dim, i)) for i in range(node._batch_size[dim])]


def _names(node: Any) -> Any:
    return node._names()


def _without(names: DimNames, dim: int) -> DimNames | None:
    out = [*names[:dim], *names[dim + 1 :]]
    return out if any(name is not None for name in out) else None


def _common_batch(a: Size, b: Size) -> Size:
    if len(a) != len(b):
        raise BatchSizeError(
            f"stacking tensordicts requires them to have the same number of batch dimensions, got "
            f"batch sizes {list(a)} and {list(b)}."
        )
    return _common_shape(a, b)


def _common_shape(a: Size, b: Size) -> Size:
    if len(a) != len(b):
        raise ShapeError(f"Cannot tell the shape of a stack of shapes {list(a)} and {list(b)}.")
    return a if a == b else Size([n if n == m else -1 for n, m in zip(a, b)])


def _same_kind(name: str, column: list[Any], kind: type) -> None:
    for entry in column:
        if not isinstance(entry, kind):
            raise ShapeError(
                f"Cannot stack the entries {name!r}: a {type(column[0]).__name__} and a "
                f"{type(entry).__name__}. Read them from the members, or pass as_list=True to get()."
            )


def _ragged(name: str, column: list[Any]) -> ShapeError:
    _same_kind(name, column, Tensor)
    return ShapeError(
        f"Failed to stack tensors within a tensordict under the key {short((name,))!r}: their shapes "
        f"are {[x.shape for x in column]}. To read them, pass as_padded_tensor=True, "
        f"as_nested_tensor=True or as_list=True to get()."
    )
