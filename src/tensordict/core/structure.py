"""How two trees differ in structure: keys, kinds, shapes, dtypes."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .._keys import short
from .leaf import Leaf
from .node import Node
from .traverse import entries_with_path


def describe(entry: Tensor | Leaf) -> str:
    """``float32 [3, 4]`` for a tensor, the class name for another leaf."""
    if isinstance(entry, Tensor):
        return f"{str(entry.dtype).removeprefix('torch.')} {list(entry.shape)}"
    return f"{type(entry).__name__} {list(entry._batch_size)}"


def mismatches(
    a: Node, b: Node, left: str = "first", right: str = "second"
) -> list[tuple[Any, str]]:
    """Every path at which two trees differ in presence, kind, shape or dtype.

    Args:
        a, b: the trees.
        left, right: what to call them in the texts.

    Returns:
        Pairs of key and text, in the order of ``a``, then what only ``b`` has.
    """
    mine = dict(entries_with_path(a))
    theirs = dict(entries_with_path(b))
    out: list[tuple[Any, str]] = []
    for path, x in mine.items():
        y = theirs.get(path)
        if y is None:
            out.append((short(path), f"only in the {left}: {describe(x)}"))
            continue
        dx, dy = describe(x), describe(y)
        if dx != dy:
            out.append((short(path), f"{dx} in the {left}, {dy} in the {right}"))
    out += [
        (short(path), f"only in the {right}: {describe(y)}")
        for path, y in theirs.items()
        if path not in mine
    ]
    return out
