"""What every node of a tree says about itself, set on all of them: names and device."""

from __future__ import annotations

from typing import Any

import torch

from .._keys import short
from .._typing import Path
from ..errors import EntryTypeError, StateError
from .leaf import Leaf
from .structural import DimNames
from .traverse import map_leaves, nodes


def set_names(node: Any, names: DimNames | None) -> None:
    """Set the names of the leading dimensions, here and below.

    Raises:
        EntryTypeError: (a ``ValueError``) a node below has one of the names on a later dimension;
            nothing is set.
    """
    if names is not None:
        _check_below(node, names)
    _set_names(node, names)


def _check_below(node: Any, names: DimNames) -> None:
    given = {name for name in names if name is not None}
    for part in nodes(node):
        tail = (part._dim_names or [])[len(names) :]
        if given.intersection(tail) and len(part._batch_size) > len(names):
            raise EntryTypeError(
                f"Some dimension names are non-unique: {[*names, *tail]} for a nested tensordict of "
                f"names {part._dim_names}. Rename one of them."
            )


def _set_names(node: Any, names: DimNames | None) -> None:
    if names is None:
        whole = None
    else:
        tail = node._dim_names or [None] * len(node._batch_size)
        whole = [*names, *tail[len(names) :]]
    node._dim_names = whole
    members = node._members()
    if members is None:
        for child in node._children():
            _set_names(child, names)
        return
    dim = node.stack_dim
    for member in members:
        _set_names(member, None if whole is None else [*whole[:dim], *whole[dim + 1 :]])


def with_names(node: Any, names: DimNames, path: Path) -> Any:
    """A node with the names of the one that it goes into, where it has none of its own.

    Args:
        node: a node whose batch size starts with that of the other; it is not changed.
        names: of the other.
        path: where the node goes, for errors.

    Returns:
        The node itself when there is nothing to fill in, else a copy of its containers.

    Raises:
        StateError: (a ``RuntimeError``) it has another name for a dimension.
    """
    own = node._dim_names or [None] * len(node._batch_size)
    head = [mine if name is None else name for mine, name in zip(own, names)]
    if head == own[: len(head)]:
        return node
    if any(mine is not None and mine != name for mine, name in zip(own, head)):
        raise StateError(
            f"Cannot set {short(path)!r} in a TensorDict of dimension names {names}: the tensordict "
            f"has names {own}. Rename its dimensions, or clear them (names = None)."
        )
    out = map_leaves(node, lambda x: x)
    set_names(out, head)
    return out


def set_device(node: Any, device: torch.device | None) -> None:
    """Set the device attribute of every node, and what non-tensor values say it is."""
    for part in nodes(node):
        part._device = device
        if part._members() is not None:
            continue
        if any(issubclass(kind, Leaf) for kind in set(map(type, part._contents()))):
            holder = part._bare()
            for name, entry in list(holder._items()):
                if isinstance(entry, Leaf):
                    holder._store(name, entry._with(entry._batch_size, device))
