"""Views of keys, values and items: nested or flat, sorted or in insertion order.

A view holds no list: membership looks the key up, iteration walks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from typing import Any

from torch import Tensor

from .._keys import unravel_key_to_tuple
from .._typing import NestedKey, Path
from ..core.leaf import Leaf, NonTensorDataBase
from ..core.node import Entry, Node
from ..core.write import contains, resolve

IsLeaf = Callable[[type], bool]


def default_is_leaf(cls: type) -> bool:
    """The default leaf test: everything but nodes and non-tensor data.

    >>> default_is_leaf(Tensor)
    True
    """
    return not issubclass(cls, (Node, NonTensorDataBase))


def is_leaf_nontensor(cls: type) -> bool:
    """A leaf test that counts non-tensor data as leaves.

    >>> from tensordict import NonTensorData
    >>> is_leaf_nontensor(NonTensorData)
    True
    """
    return not issubclass(cls, Node)


class _View:
    """What the three views share: which entries they cover, and in which order."""

    __slots__ = ("_include_nested", "_is_leaf", "_leaves_only", "_node", "_sort")

    def __init__(
        self,
        node: Node,
        include_nested: bool = False,
        leaves_only: bool = False,
        is_leaf: IsLeaf | None = None,
        sort: bool = False,
    ) -> None:
        self._node = node
        self._include_nested = include_nested
        self._leaves_only = leaves_only
        self._is_leaf = is_leaf
        self._sort = sort

    def _walk(self) -> Iterator[tuple[NestedKey, Entry]]:
        if not self._include_nested and not self._leaves_only:
            pairs: Any = self._node._items()
        elif not self._include_nested:
            is_leaf = self._is_leaf or default_is_leaf
            pairs = ((k, e) for k, e in self._node._items() if is_leaf(type(e)))
        else:
            pairs = []
            is_leaf = self._is_leaf or default_is_leaf
            _nested(self._node, (), self._leaves_only, is_leaf, pairs)
        if self._sort:
            return iter(sorted(pairs, key=lambda pair: _sort_key(pair[0])))
        return iter(pairs)

    def __len__(self) -> int:
        if not self._include_nested and not self._leaves_only:
            return len(self._node._names())
        return sum(1 for _ in self._walk())


class KeysView(_View, Set):
    """The keys of a tensordict; compares and combines like a set, iterates in order."""

    __slots__ = ()

    def __contains__(self, key: object) -> bool:
        if type(key) is str and not self._leaves_only:
            return key in self._node._names()
        path = unravel_key_to_tuple(key)
        if not path or (len(path) > 1 and not self._include_nested):
            return False
        if not self._leaves_only:
            return contains(self._node, path)
        if not contains(self._node, path):
            return False
        holder, rest = resolve(self._node, path)
        return (self._is_leaf or default_is_leaf)(_class(holder, rest[0]))

    def __iter__(self) -> Iterator[Any]:
        if not self._include_nested and not self._leaves_only:
            names = self._node._names()
            return iter(sorted(names) if self._sort else names)
        # By class: an entry of a stack is not read (it may be ragged) to be named.
        is_leaf = self._is_leaf or default_is_leaf
        if not self._include_nested:
            node = self._node
            keys: Any = [name for name in node._names() if is_leaf(_class(node, name))]
        else:
            keys = []
            _nested_keys(self._node, (), self._leaves_only, is_leaf, keys)
        return iter(sorted(keys, key=_sort_key) if self._sort else keys)

    def __len__(self) -> int:
        if not self._include_nested and not self._leaves_only:
            return len(self._node._names())
        return sum(1 for _ in self)

    @classmethod
    def _from_iterable(cls, it: Any) -> Any:
        return set(it)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self)})"


class ValuesView(_View):
    """The entries of a tensordict."""

    __slots__ = ()

    def __iter__(self) -> Iterator[Any]:
        return (entry for _, entry in self._walk())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self)})"


class ItemsView(_View):
    """Pairs of key and entry."""

    __slots__ = ()

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        return self._walk()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self)})"


def _class(node: Node, name: str) -> type:
    cls = node._class_of(name)
    assert cls is not None
    return cls


def _nested_keys(
    node: Node, prefix: Path, leaves_only: bool, is_leaf: IsLeaf, out: list[NestedKey]
) -> None:
    """Append the keys below a node in the form shown to users, children before their parent."""
    # Entries of a stack are asked for their class alone: reading one builds it, or fails.
    ragged = node._members() is not None
    pairs: Any = ((name, None) for name in node._names()) if ragged else node._items()
    for name, entry in pairs:
        key: NestedKey = (*prefix, name) if prefix else name
        if isinstance(entry, Tensor):
            out.append(key)
            continue
        cls = _class(node, name) if entry is None else type(entry)
        leaf = is_leaf(cls)
        if not leaf and issubclass(cls, Node):
            below = node._fetch(name)
            assert isinstance(below, Node)
            _nested_keys(below, (*prefix, name), leaves_only, is_leaf, out)
        if leaf or not leaves_only:
            out.append(key)


def _nested(
    node: Node,
    prefix: Path,
    leaves_only: bool,
    is_leaf: IsLeaf,
    out: list[tuple[NestedKey, Entry]],
) -> None:
    """Append keys and entries in the order of `_nested_keys`."""
    for name, entry in node._items():
        key: NestedKey = (*prefix, name) if prefix else name
        if isinstance(entry, Tensor):
            out.append((key, entry))
            continue
        leaf = is_leaf(type(entry))
        if isinstance(entry, Node) and not leaf:
            _nested(entry, (*prefix, name), leaves_only, is_leaf, out)
        if leaf or not leaves_only:
            out.append((key, entry))


def _sort_key(key: NestedKey) -> Path:
    return (key,) if isinstance(key, str) else key


__all__ = [
    "ItemsView",
    "KeysView",
    "Leaf",
    "ValuesView",
    "default_is_leaf",
    "is_leaf_nontensor",
]
