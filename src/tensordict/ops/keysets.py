"""Choosing, dropping, splitting, renaming, flattening keys."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from .._keys import path_of, short
from .._typing import NO_DEFAULT, Path
from ..core import write
from ..core.leaf import Leaf
from ..core.node import Entry, Node
from ..core.traverse import holders, rekey
from ..errors import LockedError, MissingKeyError

# A selection: name -> None (the whole entry) or a selection below it.
Selection = dict[str, Any]


def selection_of(keys: Iterable[Any]) -> Selection:
    """The tree of names that a list of keys describes; a key covers the keys below it."""
    out: Selection = {}
    for key in keys:
        if type(key) is str:
            out[key] = None
            continue
        path = path_of(key)
        level = out
        for name in path[:-1]:
            below = level.setdefault(name, {})
            if below is None:
                break
            level = below
        else:
            level[path[-1]] = None
    return out


def pick(node: Node, chosen: Selection, strict: bool, path: Path = ()) -> dict[str, Entry]:
    """The chosen entries of a node, in the order of the selection.

    Raises:
        MissingKeyError: with ``strict``, for a chosen key that is not there.
    """
    out: dict[str, Entry] = {}
    for name, below in chosen.items():
        entry = node._fetch(name)
        if entry is None:
            if strict:
                raise write.missing(node, (name,))
            continue
        if below is None:
            out[name] = entry
        elif isinstance(entry, Node):
            out[name] = rekey(entry, partial(pick, chosen=below, strict=strict, path=(*path, name)))
        elif strict:
            raise write.not_a_node((name, next(iter(below))), 0, entry)
    return out


def drop(node: Node, dropped: Selection) -> dict[str, Entry]:
    """The entries of a node but the dropped ones; keys that are not there are ignored."""
    out: dict[str, Entry] = {}
    for name, entry in node._items():
        if name not in dropped:
            out[name] = entry
            continue
        below = dropped[name]
        if below is not None:
            out[name] = (
                rekey(entry, partial(drop, dropped=below)) if isinstance(entry, Node) else entry
            )
    return out


def replace_all(node: Node, fn: Callable[[Node], dict[str, Entry]]) -> None:
    """Make ``fn(holder)`` the entries of each holder of ``node``, in their order.

    Raises:
        LockedError: the node is locked.
    """
    if node._lock is not None:
        raise LockedError
    for holder, entries in [(holder, fn(holder)) for holder in holders(node)]:
        for name in list(holder._names()):
            holder._remove(name)
        holder._store_all(entries)


def split(
    node: Node, key_sets: Sequence[Iterable[Any]], strict: bool, default: Any
) -> tuple[list[dict[str, Entry]], dict[str, Entry]]:
    """One set of entries for each key set, and the rest.

    Raises:
        MissingKeyError: a key in two sets, or (``strict`` without a default) not there.
    """
    seen: set[Path] = set()
    for keys in key_sets:
        for key in keys:
            path = path_of(key)
            if path in seen:
                raise MissingKeyError(
                    f"Cannot split: the key {short(path)!r} is in two key sets. Name it once."
                )
            seen.add(path)
    parts = []
    for keys in key_sets:
        part = node._like({})
        for key in keys:
            path = path_of(key)
            entry = write.fetch(node, path)
            if entry is None:
                if default is not NO_DEFAULT:
                    write.assign(part, path, default)
                elif strict:
                    raise write.missing(node, path)
                continue
            write.commit(part, path, entry)
        parts.append(dict(part._items()))
    return parts, drop(node, selection_of(seen))


def flatten(
    node: Node, separator: str, is_leaf: Callable[[type], bool] | None
) -> dict[str, tuple[Path, Entry]]:
    """Flat name -> (path, entry); empty nodes vanish.

    Raises:
        MissingKeyError: two entries would get the same name.
    """
    out: dict[str, tuple[Path, Entry]] = {}
    _flatten(node, (), separator, is_leaf, out)
    return out


def _flatten(
    node: Node,
    prefix: Path,
    separator: str,
    is_leaf: Callable[[type], bool] | None,
    out: dict[str, tuple[Path, Entry]],
) -> None:
    for name, entry in node._items():
        path = (*prefix, name)
        if isinstance(entry, (Tensor, Leaf)) or (is_leaf is not None and is_leaf(type(entry))):
            flat = separator.join(path)
            if flat in out:
                raise MissingKeyError(
                    f"Cannot flatten keys with separator {separator!r}: {out[flat][0]!r} and "
                    f"{path!r} would both be {flat!r}. Use another separator."
                )
            out[flat] = (path, entry)
        else:
            _flatten(entry, path, separator, is_leaf, out)


def unflatten(node: Node, separator: str) -> dict[str, Entry]:
    """Entries with each name split at the separator into nested nodes.

    Raises:
        MissingKeyError: a name clashes with an entry that is not nested.
    """
    out = node._like({})
    for name, entry in node._items():
        path = tuple(name.split(separator))
        holder: Node = out
        for i, part in enumerate(path[:-1]):
            below = holder._fetch(part)
            if below is None:
                below = holder._child()
                holder._store(part, below)
            elif not isinstance(below, Node):
                raise MissingKeyError(
                    f"Cannot unflatten {name!r}: {write.not_a_node(path, i, below)}"
                )
            holder = below
        if path[-1] in holder._names():
            raise MissingKeyError(
                f"Cannot unflatten {name!r}: there is already an entry {short(path)!r}."
            )
        if isinstance(entry, Node):
            entry = rekey(entry, partial(unflatten, separator=separator))
        holder._store(path[-1], entry)
    return dict(out._items())


def rename(node: Node, old: Path, new: Path, safe: bool) -> None:
    """Move the entry ``old`` to ``new``.

    Raises:
        MissingKeyError: ``old`` is not there, or (``safe``) ``new`` is.
    """
    if node._lock is not None:
        raise LockedError
    if node._members() is not None:
        for holder in holders(node):
            check_rename(holder, old, new, safe)
        for holder in holders(node):
            rename(holder, old, new, safe)
        return
    entry = check_rename(node, old, new, safe)
    if old == new:
        return
    if len(old) == len(new) == 1:  # the entry fits the node, since it is in it
        node._admit(new[0])
        node._remove(old[0])
        node._store(new[0], entry)
        return
    target, rest, checked = write.prepare(node, new, entry)
    remove(node, old)
    write.commit(target, rest, checked)


def check_rename(node: Node, old: Path, new: Path, safe: bool) -> Entry:
    """The entry ``old``, if `rename` can move it."""
    entry = write.require(node, old)
    if old != new and safe and write.fetch(node, new) is not None:
        raise MissingKeyError(
            f"key {short(new)!r} already present in TensorDict: cannot rename {short(old)!r} to it "
            f"with safe=True."
        )
    return entry


def remove(node: Node, path: Path) -> Entry:
    """Drop the entry under ``path`` and return it.

    Raises:
        MissingKeyError: it is not there.
        LockedError: the node that holds it is locked.
    """
    entry = write.require(node, path)
    discard(node, path)
    return entry


def discard(node: Node, path: Path) -> None:
    """Drop the entry under ``path`` without reading it, in a stack from each member that has it.

    Raises as `remove`.
    """
    holder, rest = write.resolve(node, path)
    held = [part for part in holders(holder) if rest[0] in part._names()]
    if len(rest) > 1 or not held:
        raise write.missing(node, path)
    if holder._lock is not None:
        raise LockedError
    for part in held:
        part._remove(rest[0])
