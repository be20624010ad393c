"""Writing several entries at once: everything is checked before the first write."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .._keys import path_of, unravel_key_to_tuple
from .._typing import Path
from ..core import write
from ..core.leaf import Leaf
from ..core.node import Entry, Node
from ..errors import BatchSizeError, LockedError, ShapeError, StructureError
from .inplace import copy_each
from .operands import transforms

# A write that was checked: into a node, or into the memory of a tensor.  Without a path there
# are entries by name, for a node that is not locked.
Store: TypeAlias = tuple[Node, "Path | None", Any]
Copy: TypeAlias = tuple[Tensor, Tensor]
_STRIDED = torch.strided
# The keys to update, name by name; None below a name for everything under it.
Keep: TypeAlias = "dict[str, Keep | None]"


class Writes:
    """Checked writes waiting to be run together."""

    __slots__ = ("copies", "deep", "ignore_lock", "non_blocking", "stores")

    def __init__(self, non_blocking: bool = False, ignore_lock: bool = False) -> None:
        self.stores: list[Store] = []
        self.copies: list[Copy] = []
        self.deep = False  # whether a store leads through other entries
        self.non_blocking = non_blocking
        self.ignore_lock = ignore_lock

    def run(self) -> None:
        """Do the writes. Nothing here can fail for a reason that a check could have found."""
        if self.deep:
            self.follow()
        if self.copies:
            targets, values = zip(*self.copies)
            copy_each(targets, values, self.non_blocking)
        for node, path, entry in self.stores:
            if path is None:
                node._store_all(entry)
            else:
                write.commit(node, path, entry)

    def replace(self, node: Node, path: Path, value: Any) -> None:
        """Plan to put ``value`` under ``path``, whatever is there."""
        _, _, entry = write.prepare(node, path, value, self.non_blocking, self.ignore_lock)
        self.stores.append((node, path, entry))
        self.deep = self.deep or len(path) > 1

    def follow(self) -> None:
        """Go the way of every store as it will be then: an earlier one may put a leaf on it.

        Raises:
            NotANodeError: (a ``KeyError``) the way leads through a leaf.
        """
        placed: set[str] = set()
        for _, path, entry in self.stores:
            placed.update(entry if path is None else path[-1:])
        ways = [path[:-1] for _, path, _ in self.stores if path is not None]
        if all(map(placed.isdisjoint, ways)):
            return  # no name on a way is written
        planned: dict[tuple[int, str], Any] = {}
        alive: list[Node] = []  # nobody else may get the id of a node that was asked for
        for node, path, entry in self.stores:
            if path is None:
                planned.update(((id(node), name), leaf) for name, leaf in entry.items())
                continue
            for i, name in enumerate(path[:-1]):
                below = planned.get((id(node), name))
                if below is None:
                    below = node._fetch(name)
                if below is None:
                    below = planned[id(node), name] = node._child()
                if not isinstance(below, Node):
                    raise write.not_a_node(path, i, below)
                alive.append(below)
                node = below
            planned[id(node), path[-1]] = entry

    def into(self, node: Node, path: Path, value: Any) -> None:
        """Plan to write ``value`` into the entry that exists under ``path``."""
        holder, rest = write.resolve(node, path)
        if len(rest) == 1 and holder._members() is not None:
            self.into_members(holder, rest, value)
            return
        entry = write.require(node, path)
        if isinstance(entry, Tensor):
            self.copies.append((entry, write.write_into(entry, value, path)))
        elif isinstance(entry, Node):
            if not isinstance(value, (Mapping, Node)):
                raise ShapeError(
                    f"Cannot write into the nested tensordict {path!r}: expected a mapping or a "
                    f"tensordict, got {type(value).__name__}."
                )
            self.into_all(entry, value, None)
        else:
            parent = node if len(path) == 1 else write.require(node, path[:-1])
            # A value has no memory to write into: the entry is replaced, also when locked.
            assert isinstance(parent, Node)
            self.stores.append((parent, path[-1:], write.entry_of(parent, value, path)))

    def into_all(self, node: Node, source: Any, keep: Keep | None) -> None:
        """Plan to write every item of ``source`` into the entry of its key."""
        members = node._members()
        if members is not None and isinstance(source, Node):
            for member, share in zip(members, node._shares(source, len(source._batch_size))):
                self.into_all(member, share, keep)
            return
        for key, value in items_of(source):
            if type(key) is str and keep is None and members is None and type(value) is Tensor:
                # The common item: a tensor of the same shape under a name.
                entry = node._fetch(key)
                if isinstance(entry, Tensor) and entry.shape == value.shape:
                    self.copies.append((entry, value))
                    continue
            path = path_of(key)
            below = _below(keep, path)
            if below is _NONE:
                continue
            if below is None:
                self.into(node, path, value)
            elif isinstance(value, (Mapping, Node)):
                entry = write.require(node, path)
                if not isinstance(entry, Node):
                    raise write.not_a_node((*path, next(iter(below))), len(path) - 1, entry)
                self.into_all(entry, value, below)

    def into_members(self, stack: Node, path: Path, value: Any) -> None:
        """Plan to write each member's share of ``value`` into the members of a stack."""
        members = stack._members() or ()
        ndim = 1
        for member in members:
            entry = write.require(member, path)
            own = entry._batch_size if isinstance(entry, Node) else entry.shape
            ndim = max(ndim, len(own) + 1)
            if isinstance(entry, Tensor) and not isinstance(value, (Tensor, Node, Leaf)):
                value = write.as_values(value, entry, path)
        for member, share in zip(members, stack._shares(value, ndim)):
            self.into(member, path, share)

    def merge(
        self, node: Node, source: Any, inplace: bool = False, keep: Keep | None = None
    ) -> None:
        """Plan to merge a mapping into a node, recursing where both sides are nested."""
        members = node._members()
        if members is not None and isinstance(source, Node):
            shares = node._shares(source, len(source._batch_size))
            for member, share in zip(members, shares):
                self.merge(member, share, inplace, keep)
            return
        if inplace and keep is None and members is None:
            self.merge_into(node, source)
            return
        batch, device = node._batch_size, node._device
        ndim = len(batch)
        # A tensor under a name needs no look at what it replaces; such items wait together.
        plain = (
            keep is None
            and not inplace
            and node._lock is None
            and members is None
            and node._bare() is node  # a typed view takes some names only
        )
        if plain and isinstance(source, Node) and source._batch_size == batch:
            ndim = 0  # checked when it was written to the source
        group: dict[str, Tensor] = {}
        shape = seen = None
        for key, value in items_of(source):
            if (
                plain
                and type(value) is Tensor
                and type(key) is str
                and (not ndim or (shape := value.shape) == seen or shape[:ndim] == batch)
                and (device is None or value.device == device)
            ):
                group[key] = value
                seen = shape
                continue
            if plain and type(value) is dict and type(key) is str:
                entry = node._fetch(key)
                if isinstance(entry, Node):
                    self.merge(entry, value)  # nothing is stored here
                    continue
            if group:  # keys keep the order of the source
                self.stores.append((node, None, group))
                group = {}
            self.merge_item(node, key, value, inplace, keep)
        if group:
            self.stores.append((node, None, group))

    def merge_into(self, node: Node, source: Any) -> None:
        """`merge` that writes into the entries that exist."""
        for key, value in items_of(source):
            if type(value) is Tensor and type(key) is str:
                entry = node._fetch(key)
                if isinstance(entry, Tensor) and entry.shape == value.shape:
                    self.copies.append((entry, value))
                    continue
            self.merge_item(node, key, value, True, None)

    def merge_item(
        self, node: Node, key: Any, value: Any, inplace: bool, keep: Keep | None
    ) -> None:
        """Plan to merge one item of a mapping, whatever it is and wherever it goes."""
        path = path_of(key)
        below = None if keep is None else _below(keep, path)
        if below is _NONE:
            return
        entry: Any = write.fetch(node, path) if node._members() is None else _seen(node, path)
        # Asking for a Mapping is dear.
        nested = not isinstance(value, Tensor) and isinstance(value, (Node, Mapping))
        if below is not None and not nested:
            return  # the source has nothing under the keys asked for
        if below is not None and not isinstance(entry, Node):
            self.replace(node, path, _kept(value, below))
        elif nested and isinstance(entry, Node):
            if isinstance(value, Node) and value._batch_size != entry._batch_size:
                _same_batch(entry, value, path)
            self.merge(entry, value, inplace, below)
        elif inplace and entry is not None:
            self.into(node, path, value)
        else:
            self.replace(node, path, value)


_NONE: Any = object()


def _seen(stack: Node, path: Path) -> Any:
    """A nested node of a stack, True for another entry (which may be ragged), None for none."""
    if not write.contains(stack, path):
        return None
    holder, rest = write.resolve(stack, path)
    cls = holder._class_of(rest[0])
    return holder._fetch(rest[0]) if cls is not None and issubclass(cls, Node) else True


def _below(keep: Keep | None, path: Path) -> Any:
    """What of ``keep`` applies below ``path``: None for all of it, `_NONE` for nothing."""
    for name in path:
        if keep is None:
            return None
        keep = keep.get(name, _NONE)
        if keep is _NONE:
            return _NONE
    return keep


def _kept(source: Any, keep: Keep) -> Any:
    """What of a nested source is to be written where nothing nested is yet."""
    out = {}
    for key, value in items_of(source):
        below = _below(keep, path_of(key))
        if below is None:
            out[key] = value
        elif below is not _NONE and isinstance(value, (Mapping, Node)):
            out[key] = _kept(value, below)
    dense = isinstance(source, Node) and source._members() is None
    return source._like(out) if dense else out


def _same_batch(entry: Node, value: Node, path: Path) -> None:
    batch = entry._batch_size
    if value._batch_size[: len(batch)] != batch:
        raise ShapeError(
            f"Cannot update {path!r}: its batch size is {list(batch)}, the source's is "
            f"{list(value._batch_size)}. Pass update_batch_size=True to take the source's."
        )


def items_of(source: Any) -> Iterable[tuple[Any, Any]]:
    """The items of a tensordict or a mapping."""
    return source._items() if isinstance(source, Node) else source.items()


def merge(
    node: Node,
    source: Any,
    *,
    inplace: bool = False,
    clone: bool = False,
    non_blocking: bool = False,
    keys_to_update: Iterable[Any] | None = None,
    ignore_lock: bool = False,
) -> None:
    """Merge ``source`` into ``node``: nested mappings merge, leaves are replaced."""
    writes = Writes(non_blocking, ignore_lock)
    writes.merge(node, source, inplace, _keep(keys_to_update))
    if clone:
        writes.stores = [(n, p, cloned(e)) for n, p, e in writes.stores]
    writes.run()


def adopt_batch(node: Any, source: Node) -> list[tuple[Any, Any, Any]]:
    """Set the batch sizes of ``source`` on ``node``, here and below, after checking that they fit.

    Returns:
        each node changed, with its batch size and names before.
    """
    pairs: list[tuple[Any, Any]] = [(node, source)]
    changed: list[tuple[Any, Any, Any]] = []
    for target, like in pairs:
        if target._lock is not None:
            raise LockedError
        names = like._names()
        for name, entry in target._items():
            if name not in names:
                write.entry_of(like, entry, (name,))
            elif isinstance(entry, Node):
                below = like._fetch(name)
                if isinstance(below, Node) and below._batch_size != entry._batch_size:
                    pairs.append((entry, below))
        changed.append((target, target._batch_size, target._dim_names))
    for target, like in pairs:
        if len(target._batch_size) != len(like._batch_size):
            target._dim_names = None
        target._batch_size = like._batch_size
    return changed


def write_all(
    node: Node,
    source: Any,
    *,
    non_blocking: bool = False,
    keys_to_update: Iterable[Any] | None = None,
) -> None:
    """Write ``source`` into the entries of ``node``, all of which must exist.

    Raises:
        KeyError: a key of ``source`` is not in ``node``.
    """
    if keys_to_update is None and isinstance(source, Node) and _copied(node, source, non_blocking):
        return
    writes = Writes(non_blocking)
    writes.into_all(node, source, _keep(keys_to_update))
    writes.run()


def _copied(node: Any, source: Any, non_blocking: bool) -> bool:
    """Copy leaf by leaf between trees of tensors that agree; False, and nothing done, for others."""
    if node._members() is not None:
        return False
    xs, ys = [*node._contents()], [*source._contents()]
    names, others = [*node._names()], [*source._names()]
    nested = False
    for x, y in zip(xs, ys):  # the lists grow while they are walked
        if type(x) is Tensor and type(y) is Tensor:
            # Nothing that torch would refuse after the first leaf, or that foreach would record.
            if (
                x.shape != y.shape
                or x.requires_grad
                or y.requires_grad
                or y.layout is not _STRIDED
                or y.is_meta
                or y.is_quantized
                or not x.is_contiguous()
            ):
                return False
        elif isinstance(x, Node) and isinstance(y, Node) and x._members() is None:
            xs += x._contents()
            ys += y._contents()
            names += x._names()
            others += y._names()
            nested = True
            if len(xs) != len(ys):
                return False
        else:
            return False
    if names != others or transforms() is not None:
        return False
    if nested:
        xs = [x for x in xs if type(x) is Tensor]
        ys = [y for y in ys if type(y) is Tensor]
    if xs:
        torch._foreach_copy_(xs, ys, non_blocking)
    return True


def _keep(keys: Iterable[Any] | None) -> Keep | None:
    """The tree of the keys to update."""
    if keys is None:
        return None
    out: Keep = {}
    for key in [keys] if isinstance(keys, str) else keys:
        level: Keep | None = out
        *parents, last = unravel_key_to_tuple(key)
        for name in parents:
            level = None if level is None else level.setdefault(name, {})
        if level is not None:  # else a parent is kept whole
            level[last] = None
    return out


def cloned(entry: Any) -> Any:
    """A copy that shares no memory with an entry, or with each of a dict of entries."""
    if isinstance(entry, Tensor):
        return entry.clone()
    if type(entry) is dict:
        return {name: cloned(part) for name, part in entry.items()}
    if isinstance(entry, Node):
        return entry._map(lambda x: x.clone())
    return entry


def restore(source: Node, pairs: Iterable[tuple[Path, Entry]]) -> None:
    """Write entries back into the tensordict they came from (end of a ``with`` block).

    An entry that is still the source's own object needs nothing; others replace it, or
    are written into it when the source is locked.
    """
    writes = Writes()
    for path, entry in pairs:
        present = write.fetch(source, path)
        if present is entry:
            continue
        if isinstance(entry, Leaf) and present is not None and not isinstance(present, Leaf):
            raise StructureError(
                f"Cannot write back {path!r}: a {type(present).__name__} became non-tensor data."
            )
        holder, _ = write.resolve(source, path)
        if holder._lock is not None and present is not None:
            writes.into(source, path, entry)
        else:
            writes.replace(source, path, entry)
    writes.run()


def fill_out(out: Any, result: Node) -> None:
    """Copy a result into the entries of ``out``, which stays as it is when one does not fit.

    Raises:
        BatchSizeError: another batch size.
    """
    if out._batch_size != result._batch_size:
        raise BatchSizeError(
            f"Cannot write into out: expected batch size {list(result._batch_size)}, got "
            f"{list(out._batch_size)}."
        )
    writes = Writes()
    writes.merge(out, result, inplace=True)
    writes.run()
