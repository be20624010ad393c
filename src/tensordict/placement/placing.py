"""Putting moved leaves into a tree: a new one, the same one, or one that is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .._keys import short
from .._typing import Path
from ..core.lock import lock
from ..core.metadata import set_device
from ..core.traverse import leaves_with_path, rebuild, slots
from ..errors import LockedError, SchemaMismatch


def place(
    td: Any,
    tensors: Sequence[Tensor],
    device: torch.device | None,
    *,
    inplace: bool = False,
    keep_device: bool = False,
) -> Any:
    """A tree like ``td`` over other tensors, or ``td`` itself with them.

    Args:
        td: The source; a locked one gives a locked result.
        tensors: In the order of its leaves.
        device: The device attribute of the result, unless ``keep_device``.
        inplace: Write into ``td``.
        keep_device: Leave the device attribute as it is.
    """
    if inplace:
        return replace_leaves(td, tensors, td._device if keep_device else device)
    out = rebuild(td, tensors)
    if not keep_device and (device is not None or td._device is not None):
        set_device(out, device)
    if td._lock is not None:
        lock(out)
    return out


def cast_in_place(
    td: Any,
    paths: Sequence[Path],
    cast: Callable[[int, Tensor], Tensor],
    ties: Mapping[int, int],
) -> Any:
    """Replace leaves one after the other, so that each source is freed before the next is cast.

    Args:
        td: An unlocked tree.
        paths: The leaves to replace.
        cast: The new tensor for the leaf at a position.
        ties: For a tie, the position of the leaf that it shares memory with.

    Raises:
        LockedError: when ``td`` is locked; nothing is replaced.
    """
    if td._lock is not None:
        raise LockedError
    heads = set(ties.values())
    made: dict[int, Tensor] = {}
    place_of = {path: (holder, name) for path, holder, name in slots(td)}
    for index, path in enumerate(paths):
        holder, name = place_of[path]
        if index in ties:
            holder._store(name, made[ties[index]])
            continue
        entry = holder._fetch(name)
        assert isinstance(entry, Tensor)
        new = cast(index, entry)
        del entry  # the tree alone holds the source now
        holder._store(name, new)
        if index in heads:
            made[index] = new
    return td


def replace_leaves(td: Any, tensors: Sequence[Tensor], device: torch.device | None) -> Any:
    """Put other tensors into the entries of ``td``.

    Raises:
        LockedError: when it is locked; nothing is replaced.
    """
    if td._lock is not None:
        raise LockedError
    for (_, holder, name), x in zip(list(slots(td)), tensors):
        holder._store(name, x)
    set_device(td, device)
    return td


def write_out(out: Any, paths: Sequence[Path], tensors: Sequence[Tensor]) -> Any:
    """Copy values into the leaves of ``out``, matched by path; nothing is written on a mismatch.

    Raises:
        SchemaMismatch: when keys or shapes differ; lists every one.
    """
    receivers = dict(leaves_with_path(out))
    present = dict(receivers)
    rows: list[tuple[Any, str]] = []
    for path, x in zip(paths, tensors):
        there = present.pop(path, None)
        if there is None:
            rows.append((short(path), "not in out"))
        elif there.shape != x.shape:
            rows.append((short(path), f"shape {list(there.shape)} in out, {list(x.shape)} moved"))
    rows += [(short(path), "only in out") for path in present]
    if rows:
        raise SchemaMismatch(f"Cannot write into out: {len(rows)} leaves differ.", rows)
    with torch.no_grad():
        for path, x in zip(paths, tensors):
            receivers[path].copy_(x)
    return out
