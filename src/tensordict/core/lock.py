"""The lock of a node: who else holds it locked, and where its memory comes from.

``node._lock`` is ``None`` for an unlocked node, so that a write costs one test.
Parents are weak references: a tree is freed without the garbage collector.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import LockedError

if TYPE_CHECKING:
    from torch import Tensor

    from .node import Node

PART_OF_GRAPH = (
    "Cannot unlock a tensordict that is part of a locked graph. Unlock the tensordict at the root "
    "of the graph first, and every other locked tensordict that holds this one."
)


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the memory of a locked tree comes from, as a whole.

    Attributes:
        kind: ``"shared"``, ``"memmap"`` or ``"consolidated"``.
        buffer: the one buffer that holds every leaf, where there is one.
        detail: what the storage layer needs to find the parts (a layout, a folder).
        shared: whether the tree as a whole was moved to shared memory.
    """

    kind: str
    buffer: Tensor | None = None
    detail: Any = None
    shared: bool = False


class LockState:
    """State that only a locked node has; lists cached here live as long as the lock."""

    __slots__ = ("__weakref__", "leaves", "memo", "origin", "parents")

    def __init__(self) -> None:
        self.parents: list[weakref.ref[Node]] = []
        self.origin: Origin | None = None
        self.leaves: list[Tensor] | None = None
        # What layers above derive from the entries; forgotten with the list of leaves.
        self.memo: dict[Any, Any] | None = None


def lock(node: Node) -> None:
    """Lock a node and everything below it."""
    if node._lock is not None:
        return
    node._lock = LockState()
    children = node._children()
    if not children:
        return
    ref = weakref.ref(node._bare())  # a typed view may go before what it looks at
    for child in children:
        lock(child)
        child._lock.parents.append(ref)  # type: ignore[union-attr]


def unlock(node: Node) -> None:
    """Unlock a node and everything below it, or nothing at all.

    Raises:
        LockedError: a locked node outside this tree holds one inside it.
    """
    if node._lock is None:
        return
    tree = _tree(node)
    inside = {id(part._bare()) for part in tree}
    for part in tree:
        if part._lock is None:
            continue
        for ref in part._lock.parents:
            parent = ref()
            if parent is not None and parent._lock is not None and id(parent) not in inside:
                raise LockedError(PART_OF_GRAPH)
    for part in tree:
        part._lock = None


def _tree(node: Node) -> list[Node]:
    out = [node]
    for part in out:  # the list grows while it is walked: breadth first without recursion
        out.extend(part._children())
    return out


def set_origin(node: Node, origin: Origin) -> None:
    """Lock a tree and record where its memory comes from."""
    lock(node)
    for part in _tree(node):
        # The buffer belongs to the root; below it only the kind is true.
        part._lock.origin = Origin(origin.kind, shared=origin.shared)  # type: ignore[union-attr]
    node._lock.origin = origin  # type: ignore[union-attr]


def origin_of(node: Node) -> Origin | None:
    """The origin of a locked node, ``None`` when it has none."""
    return None if node._lock is None else node._lock.origin


def touched(node: Node) -> None:
    """Forget cached lists of a locked node whose entries changed all the same, and of its parents."""
    state = node._lock
    if state is None:
        return
    state.leaves = None
    state.memo = None
    for ref in state.parents:
        parent = ref()
        if parent is not None:
            touched(parent)
