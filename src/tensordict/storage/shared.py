"""Trees in memory that other processes can map."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from ..core.lock import Origin, origin_of, set_origin
from ..core.node import Node
from ..core.traverse import leaves
from .packing import split_leaf

N = TypeVar("N", bound=Node)

KIND = "shared"


def is_shared(node: Node) -> bool:
    """Whether a tree as a whole was moved to shared memory and is locked since."""
    origin = origin_of(node)
    return origin is not None and origin.shared


def share_memory_(node: N) -> N:
    """Move the memory of every host leaf to shared memory and lock the tree; returns it.

    The leaves stay the same objects, and whatever else looks at their memory (a module's
    parameters, a tied leaf, a view) sees the move too.  Leaves on accelerators and on the meta
    device stay where they are.

    Raises:
        RuntimeError: when the tree is memory-mapped.
    """
    origin = origin_of(node)
    if origin is not None and origin.kind == "memmap":
        raise RuntimeError(
            "Cannot share a memory-mapped tensordict: its files are shared already. "
            "Clone it first to have a copy in shared memory."
        )
    if origin is not None and origin.shared:
        return node
    for leaf in leaves(node):
        parts, _ = split_leaf(leaf)  # the parts of jagged and sparse leaves are what has memory
        for part in parts:
            if part.device.type == "cpu":
                part.untyped_storage().share_memory_()
    if origin is None:
        origin = Origin(KIND)
    set_origin(node, replace(origin, shared=True))
    return node
