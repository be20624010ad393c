"""`TensorDict`: a dict of entries under one batch size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Size, Tensor

from .._typing import Path
from ..core import jagged, write
from ..core import lock as locking
from ..core._torch import new_object
from ..core.devices import as_device
from ..core.node import KEEP, Entry, Node
from ..core.registry import register_node
from ..core.sizes import EMPTY, as_size
from ..core.structural import DimNames, DividingOp, StructuralOp
from ..core.torch_function import dispatch
from ..errors import EntryTypeError
from ..ops.combine import cat_entries, stack_entries
from ..ops.metadata import check_names
from .base import TensorDictBase

if TYPE_CHECKING:
    from typing_extensions import Self

_ONLY_TENSORS = {Tensor}


@register_node
class TensorDict(TensorDictBase):
    """A dict of tensors that behaves like one tensor of shape ``batch_size``.

    Args:
        source: a mapping or another tensordict; exclusive with keyword entries.
        batch_size: leading shape of every entry, ``[*B]``; ``[]`` by default.
        device: where entries are moved when written; None leaves them where they are.
        names: one name (or None) per batch dimension.
        non_blocking: how entries are copied to ``device``.
        lock: whether the result is locked.
        **kwargs: entries.

    Raises:
        ValueError: both a source and keyword entries, or a source that is no mapping.
        RuntimeError: an entry whose shape does not start with ``batch_size``.

    >>> td = TensorDict({"a": torch.zeros(3, 4)}, batch_size=[3])
    >>> td["a"].shape, td[0].batch_size
    (torch.Size([3, 4]), torch.Size([]))
    """

    __slots__ = ("_entries",)

    kind = "dense"

    _entries: dict[str, Entry]

    def __init__(
        self,
        source: Mapping[Any, Any] | TensorDictBase | None = None,
        batch_size: Any = None,
        device: Any = None,
        names: Sequence[str | None] | None = None,
        non_blocking: bool | None = None,
        lock: bool = False,
        **kwargs: Any,
    ) -> None:
        if source is None:
            source = kwargs
        elif kwargs:
            raise EntryTypeError(
                "Either a dictionary or a sequence of kwargs must be provided, not both."
            )
        batch = self._batch_size = EMPTY if batch_size is None else as_size(batch_size)
        self._device = None if device is None else as_device(device)
        self._dim_names = None if names is None else check_names(names, batch)
        self._lock = None
        self._undo = None
        self._entries = {}
        if isinstance(source, Node):
            items: Any = source._items()
        elif isinstance(source, Mapping):
            items = source.items()
        else:
            raise EntryTypeError(
                "A TensorDict source is expected to be a TensorDictBase instance or a mapping, "
                f"got {type(source).__name__}."
            )
        _fill(self, items, (), bool(non_blocking))
        if lock:
            locking.lock(self)

    @classmethod
    def _new(
        cls,
        entries: dict[str, Entry],
        batch_size: Size,
        dim_names: DimNames | None,
        device: torch.device | None,
    ) -> Self:
        """Make one from parts that are known to fit: no check, no copy."""
        out = new_object(cls)
        out._entries = entries
        out._batch_size = batch_size
        out._dim_names = dim_names
        out._device = device
        out._lock = None
        out._undo = None
        return out

    # Here, and not only in a base: torch looks it up along all bases, for each argument.
    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return dispatch(func, args, kwargs)

    # --- primitives --------------------------------------------------------------

    def _fetch(self, name: str) -> Entry | None:
        return self._entries.get(name)

    def _store(self, name: str, entry: Entry) -> None:
        self._entries[name] = entry

    def _store_all(self, entries: dict[str, Entry]) -> None:
        self._entries.update(entries)

    def _remove(self, name: str) -> None:
        del self._entries[name]

    def _remove_last(self) -> tuple[str, Entry]:
        return self._entries.popitem()

    def _items(self) -> Any:
        return self._entries.items()

    def _contents(self) -> Any:
        return self._entries.values()

    def _flat_tensors(self) -> dict[str, Tensor] | None:
        entries: Any = self._entries.copy()  # one step: no other thread writes in between
        return entries if set(map(type, entries.values())) == _ONLY_TENSORS else None

    def _names(self) -> Any:
        return self._entries.keys()

    def _children(self) -> list[Node]:
        return [
            entry
            for entry in self._entries.values()
            if type(entry) is not Tensor and isinstance(entry, Node)
        ]

    def _like(
        self,
        entries: dict[str, Entry],
        batch_size: Size = KEEP,
        dim_names: DimNames | None = KEEP,
        device: torch.device | None = KEEP,
    ) -> Self:
        out = new_object(type(self))
        out._entries = entries
        out._batch_size = self._batch_size if batch_size is KEEP else batch_size
        out._dim_names = self._dim_names if dim_names is KEEP else dim_names
        out._device = self._device if device is KEEP else device
        out._lock = None
        out._undo = None
        return out

    def _child(self) -> Node:
        return TensorDict._new({}, self._batch_size, self._dim_names, self._device)

    def _collect(self, out: list[Tensor]) -> None:
        for entry in self._entries.values():
            if isinstance(entry, Tensor):
                out.append(entry)
            elif isinstance(entry, Node):
                entry._collect(out)

    def _rebuild(self, leaves: Iterator[Tensor]) -> Self:
        entries: dict[str, Entry] = {}
        for name, entry in self._entries.items():
            if isinstance(entry, Tensor):
                entries[name] = next(leaves)
            elif isinstance(entry, Node):
                entries[name] = entry._rebuild(leaves)
            else:
                entries[name] = entry
        return self._new(entries, self._batch_size, self._dim_names, self._device)

    def _map(self, fn: Callable[[Tensor], Tensor]) -> Self:
        entries: dict[str, Entry] = {
            name: fn(entry)
            if isinstance(entry, Tensor)
            else (entry._map(fn) if isinstance(entry, Node) else entry)
            for name, entry in self._entries.items()
        }
        return self._new(entries, self._batch_size, self._dim_names, self._device)

    def _restructure(self, op: StructuralOp) -> Self:
        entries = self._entries.copy()
        xs: list[Any] = [entry for entry in entries.values() if type(entry) is Tensor]
        if len(xs) == len(entries):
            entries = dict(zip(entries, op.leaves(xs)))
        else:
            done = iter(op.leaves(xs))
            for name, entry in entries.items():
                entries[name] = next(done) if type(entry) is Tensor else _restructured(op, entry)
        names = self._dim_names
        if names is not None:
            names = op.names(names)
        out = self._new(entries, op.size(self._batch_size), names, self._device)
        if op.keeps_lock and self._lock is not None:
            locking.lock(out)
        return out

    def _divide(self, op: DividingOp) -> list[Self]:
        columns: list[Any] = []
        for entry in self._entries.values():
            if isinstance(entry, Tensor):
                columns.append(op.leaf(entry) if not entry.is_nested else jagged.divided(op, entry))
            else:
                columns.append(entry._divide(op))
        sizes = op.sizes(self._batch_size)
        names = None if self._dim_names is None else op.names(self._dim_names)
        keys = self._entries.keys()
        rows = zip(*columns) if columns else ((),) * len(sizes)
        device = self._device
        out = [
            self._new(dict(zip(keys, row)), size, names, device) for row, size in zip(rows, sizes)
        ]
        if op.keeps_lock and self._lock is not None:
            for piece in out:
                locking.lock(piece)
        return out

    @classmethod
    def _stack(cls, nodes: Sequence[Any], dim: int) -> Any:
        return stack_entries(nodes, dim)

    @classmethod
    def _cat(cls, nodes: Sequence[Any], dim: int) -> Any:
        return cat_entries(nodes, dim)

    def _header(self) -> dict[str, Any]:
        return {
            "batch_size": list(self._batch_size),
            "device": None if self._device is None else str(self._device),
            "names": self._dim_names,
        }

    @classmethod
    def _from_header(cls, header: dict[str, Any], entries: dict[str, Entry]) -> TensorDict:
        device = header.get("device")
        return cls._new(
            entries,
            Size(header["batch_size"]),
            header.get("names"),
            None if device is None else torch.device(device),
        )


def _restructured(op: StructuralOp, entry: Entry) -> Entry:
    """An operation on an entry that need not be a plain tensor."""
    if not isinstance(entry, Tensor):
        return entry._restructure(op)
    return jagged.restructured(op, entry) if entry.is_nested else op.leaf(entry)


def _fill(node: TensorDict, items: Any, path: Path, non_blocking: bool) -> None:
    """Write the items of a mapping into a fresh node; the common ones are checked without a call.

    Those are tensors under a str, and dicts of them, where no device moves them.
    """
    entries, batch, ndim = node._entries, node._batch_size, len(node._batch_size)
    plain = node._device is None
    seen: Size | None = None  # a shape that fits: leaves of one shape follow each other often
    for name, value in items:
        if type(name) is not str:
            write.fill(node, {name: value}, path, non_blocking)
            continue
        kind = type(value)
        if plain and kind is Tensor:
            if ndim:
                shape = value.shape
                if shape == seen or shape[:ndim] == batch:
                    seen = shape
                    entries[name] = value
                    continue
            else:
                entries[name] = value
                continue
        elif plain and kind is dict:
            child = TensorDict._new({}, batch, node._dim_names, None)
            _fill(child, value.items(), (*path, name), non_blocking)
            entries[name] = child
            continue
        entries[name] = write.entry_of(node, value, (*path, name), non_blocking)
