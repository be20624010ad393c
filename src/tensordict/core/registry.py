"""Node and leaf kinds by name.

Code that must make a node of a kind it cannot import (load a folder, receive a
message) asks here.  A name that came from outside is looked up, never imported.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from ..errors import EntryTypeError

if TYPE_CHECKING:
    from .leaf import Leaf
    from .node import Node

C = TypeVar("C", bound=type)

_nodes: dict[str, type[Node]] = {}
_leaves: dict[str, type[Leaf]] = {}
_classes: weakref.WeakSet[type[Node]] = weakref.WeakSet()
_watchers: list[Callable[[type[Node]], None]] = []


def register_node(cls: C) -> C:
    """Make a node class known under its ``kind``, and to ``torch.load(weights_only=True)``."""
    _nodes[cls.kind] = cls  # type: ignore[attr-defined]
    torch.serialization.add_safe_globals([cls])
    return cls


def register_leaf(cls: C) -> C:
    """Make a leaf class known under its ``kind``, and to ``torch.load(weights_only=True)``."""
    _leaves[cls.kind] = cls  # type: ignore[attr-defined]
    torch.serialization.add_safe_globals([cls])
    return cls


def node_class(kind: str) -> Any:
    """The node class of a kind.

    Raises:
        EntryTypeError: for a kind that nothing registered.
    """
    return _find(_nodes, kind, "node")


def known_node(kind: str) -> type[Node] | None:
    """The node class of a kind, None when nothing registered it."""
    return _nodes.get(kind)


def leaf_class(kind: str) -> Any:
    """The leaf class of a kind.

    Raises:
        EntryTypeError: for a kind that nothing registered.
    """
    return _find(_leaves, kind, "leaf")


def node_kinds() -> tuple[str, ...]:
    """The names of all node kinds."""
    return tuple(_nodes)


def watch_nodes(fn: Callable[[type[Node]], None]) -> None:
    """Call ``fn`` with every node class that is registered or subclassed, now and later."""
    _watchers.append(fn)
    for cls in list(_classes):
        fn(cls)


def announce(cls: type[Node]) -> None:
    """Tell the watchers of a new node class (called by ``Node.__init_subclass__``)."""
    _classes.add(cls)
    for fn in _watchers:
        fn(cls)


def _find(table: dict[str, Any], kind: str, what: str) -> Any:
    try:
        return table[kind]
    except KeyError:
        raise EntryTypeError(
            f"Cannot make a {what} of kind {kind!r}: expected one of {sorted(table)}. "
            f"Import the module that defines it first."
        ) from None
