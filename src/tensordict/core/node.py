"""The node contract: what every kind of tree node is made of and must be able to do.

A node holds named *entries*: tensors, other leaf kinds, or nodes.  Everything a user
can do is defined once, above, over the primitives of this class.  `Node` uses a plain
metaclass (``isinstance`` on it is in hot loops); ``tests/contract`` checks that each
kind implements the primitives.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import torch
from torch import Size, Tensor

from .leaf import Leaf
from .registry import announce
from .structural import DimNames, DividingOp, StructuralOp

if TYPE_CHECKING:
    from typing_extensions import Self

    from .lock import LockState
    from .undo import Undo

Entry: TypeAlias = "Tensor | Leaf | Node"

# Marks "keep what the node has" in `Node._like`.
KEEP: Any = object()


class Node:
    """An inner node of a tree: named entries under one batch size.

    Attributes (all private to the package):
        _batch_size: leading shape that every entry has.
        _device: device that entries are moved to when written; None moves nothing.
        _dim_names: one name or None per batch dimension; None when there is no name.
        _lock: None when unlocked.
        _undo: how a ``with`` block on this result is written back; None for most.
    """

    __slots__ = ("__weakref__", "_batch_size", "_device", "_dim_names", "_lock", "_undo")

    kind: ClassVar[str]
    # Whether a node of this kind may lack entries that it names (`_absent`).
    _may_lack: ClassVar[bool] = False
    # Of a class that casts only some leaves, which: called with the key and the tensor.
    _cast_filter: ClassVar[Callable[[Any, Tensor], Any] | None] = None

    _batch_size: Size
    _device: torch.device | None
    _dim_names: DimNames | None
    _lock: LockState | None
    _undo: Undo | None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        announce(cls)

    # --- primitives: one level ---------------------------------------------------

    @abstractmethod
    def _fetch(self, name: str) -> Entry | None:
        """The entry of a name, None when there is none."""

    @abstractmethod
    def _store(self, name: str, entry: Entry) -> None:
        """Put an entry that was checked before (`core.write`)."""

    def _store_all(self, entries: dict[str, Entry]) -> None:
        """`_store` of several entries, in their order."""
        for name, entry in entries.items():
            self._store(name, entry)

    @abstractmethod
    def _remove(self, name: str) -> None:
        """Drop a name that is there."""

    def _remove_last(self) -> tuple[str, Entry]:
        """Drop the name that was put last, which is there; the name and its entry."""
        name = list(self._names())[-1]
        entry = self._fetch(name)
        assert entry is not None
        self._remove(name)
        return name, entry

    @abstractmethod
    def _items(self) -> Collection[tuple[str, Entry]]:
        """Names and entries in insertion order; sized."""

    def _contents(self) -> Collection[Entry]:
        """Entries in insertion order; sized."""
        return [entry for _, entry in self._items()]

    def _flat_tensors(self) -> dict[str, Tensor] | None:
        """A copy of the entries, when every one is a `Tensor` and no subclass of it; else None.

        Saying None is always right: the fast ways through `core.traverse.taken_apart` are
        not for that node then.
        """
        return None

    @abstractmethod
    def _names(self) -> Collection[str]:
        """Names in insertion order; sized, with a fast ``in``."""

    def _absent(self) -> Collection[str]:
        """Names of fields that hold nothing, for kinds that have such."""
        return ()

    @abstractmethod
    def _children(self) -> list[Node]:
        """The entries that are nodes."""

    @abstractmethod
    def _like(
        self,
        entries: dict[str, Entry],
        batch_size: Size = KEEP,
        dim_names: DimNames | None = KEEP,
        device: torch.device | None = KEEP,
    ) -> Self:
        """An unlocked node of this kind over other entries (taken over, not copied)."""

    @abstractmethod
    def _child(self) -> Node:
        """An empty node to be stored in this one, of its batch size, device and names."""

    # --- an entry without reading it ------------------------------------------------

    def _class_of(self, name: str) -> type | None:
        """The class of an entry, None when there is none."""
        entry = self._fetch(name)
        return None if entry is None else type(entry)

    def _shape_of(self, name: str) -> Size:
        """The shape of an entry that is there; -1 for a size that differs between rows."""
        entry = self._fetch(name)
        return entry._batch_size if isinstance(entry, Node) else entry.shape  # type: ignore[union-attr]

    def _admit(self, name: str) -> None:
        """Raise when an entry of this name can not be stored; asked before the first write."""

    # --- a node that is a stack of nodes ---------------------------------------------

    def _members(self) -> Sequence[Node] | None:
        """The nodes that this one is a stack of; None for a node that holds its own entries.

        Of a stack, `core.traverse` walks the members; names and `_fetch` are the view
        of it by key.
        """
        return None

    def _regroup(self, members: list[Any]) -> Any:
        """The same stack, unlocked, over other members of the same batch sizes."""
        raise NotImplementedError(f"{type(self).__name__} is not a stack")

    def _shares(self, value: Any, ndim: int) -> list[Any]:
        """The share of each member of a value to be written into an entry of ``ndim`` dimensions."""
        raise NotImplementedError(f"{type(self).__name__} is not a stack")

    # --- a node that is a typed view of a node ----------------------------------------

    def _bare(self) -> Node:
        """The node that holds the entries: itself, or the one that a typed view looks at."""
        return self

    def _dress(self, node: Any) -> Any:
        """``node`` seen as this one is seen: as it is, or through the same typed view."""
        return node

    # --- primitives: the whole tree ----------------------------------------------

    @abstractmethod
    def _collect(self, out: list[Tensor]) -> None:
        """Append the tensors in insertion order, depth first."""

    @abstractmethod
    def _rebuild(self, leaves: Iterator[Tensor]) -> Self:
        """The same tree, unlocked, over other tensors in the order of `_collect`."""

    @abstractmethod
    def _map(self, fn: Callable[[Tensor], Tensor]) -> Self:
        """The same tree, unlocked, over ``fn(tensor)``; shapes keep their batch size."""

    @abstractmethod
    def _restructure(self, op: StructuralOp) -> Self:
        """The tree after a shape or index operation on its batch dimensions."""

    def _divide(self, op: DividingOp) -> list[Self]:
        """The trees that this one is cut into; kinds that can do it at once override this."""
        return [self._restructure(part) for part in op.parts()]

    @classmethod
    @abstractmethod
    def _stack(cls, nodes: Sequence[Any], dim: int) -> Any:
        """Nodes of this kind, equal in structure, stacked along a new batch dimension."""

    @classmethod
    @abstractmethod
    def _cat(cls, nodes: Sequence[Any], dim: int) -> Any:
        """Nodes of this kind, equal in structure, concatenated along a batch dimension."""

    # --- primitives: description, for files, wire and pickle -----------------------

    @abstractmethod
    def _header(self) -> dict[str, Any]:
        """What `_from_header` needs beside the entries: plain values only."""

    @classmethod
    @abstractmethod
    def _from_header(cls, header: dict[str, Any], entries: dict[str, Entry]) -> Any:
        """An unlocked node from `_header` and its entries."""
