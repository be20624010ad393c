"""``with td.to(...) as moved:`` what the block changed goes back into ``td``.

Entries keep their device and dtype, and their memory where the shape allows.  A leaf that the
block did not touch is not written, so that a cast there and back loses nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._typing import Path
from ..core.node import Node
from ..core.traverse import entries_with_path, nodes_with_path
from ..core.write import commit, prepare


class WriteBack:
    """Compares a result with what it was when the block began, and writes what differs."""

    __slots__ = ("_before",)

    def __init__(self) -> None:
        self._before: dict[Path, tuple[Any, int]] = {}

    def begin(self, result: Any) -> None:
        """Remember the entries of ``result`` and how often each tensor was written to."""
        self._before = {path: (entry, _version(entry)) for path, entry in entries_with_path(result)}

    def __call__(self, source: Any, result: Any) -> None:
        """Write the changes back; checks everything before it writes anything."""
        replaced: list[tuple[Node, Path, Any]] = []
        written: list[tuple[Tensor, Tensor]] = []
        present = dict(entries_with_path(source))
        below = dict(nodes_with_path(source))
        for path, entry in entries_with_path(result):
            if self._untouched(path, entry):
                continue
            old = present.get(path)
            if old is entry:
                continue  # the very same object: it was written to where it is
            if isinstance(entry, Tensor) and isinstance(old, Tensor):
                if _can_write(old, entry):
                    written.append((old, entry))
                    continue
                entry = entry.to(old.device, old.dtype)
            elif isinstance(entry, Tensor) and source._device is not None:
                entry = entry.to(source._device)
            replaced.append(_prepared(below, path, entry))
        with torch.no_grad():
            for old, new in written:
                old.copy_(new)
        for node, path, entry in replaced:
            commit(node, path, entry)

    def _untouched(self, path: Path, entry: Any) -> bool:
        before = self._before.get(path)
        if before is None or before[0] is not entry or before[1] != _version(entry):
            return False
        # Writes to inference tensors are not counted: they may have been written to.
        return not (isinstance(entry, Tensor) and entry.is_inference())


def _prepared(nodes: dict[Path, Node], path: Path, entry: Any) -> tuple[Node, Path, Any]:
    """A checked write below the deepest node of the source on the way to ``path``."""
    depth = len(path) - 1
    while path[:depth] not in nodes:
        depth -= 1
    return prepare(nodes[path[:depth]]._bare(), path[depth:], entry)


def _can_write(old: Tensor, new: Tensor) -> bool:
    return old.shape == new.shape and not old.requires_grad and not new.requires_grad


def _version(entry: Any) -> int:
    """The number of in-place writes; -1 where it is not counted."""
    if not isinstance(entry, Tensor) or entry.is_inference():
        return -1
    return entry._version
