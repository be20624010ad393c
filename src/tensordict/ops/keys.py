"""Views of keys, values and items: nested or flat, sorted or in insertion order.

A view holds no list: membership looks the key up, iteration walks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from typing import Any

from torch import Tensor

from .._keys import short, unravel_key_to_tuple
from .._typing import NestedKey, Path
from ..core.leaf import Leaf, NonTensorDataBase
from ..core.node import Entry, Node
from ..errors import NotANodeError

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
            pairs = (
                (short(path), entry)
                for path, entry in _nested(
                    self._node, (), self._leaves_only, self._is_leaf or default_is_leaf
                )
            )
        if self._sort:
            return iter(sorted(pairs, key=lambda pair: _sort_key(pair[0])))
        return iter(pairs)

    def __len__(self) -> int:
        if not self._include_nested and not self._leaves_only:
            return len(self._node._names())
        return sum(1 for _ in self._walk())

    def _find(self, key: Any) -> Entry | None:
        path = unravel_key_to_tuple(key)
        if not path or (len(path) > 1 and not self._include_nested):
            return None
        from ..core.write import fetch

        try:
            entry = fetch(self._node, path)
        except NotANodeError:
            return None
        if entry is None or not self._leaves_only:
            return entry
        return entry if (self._is_leaf or default_is_leaf)(type(entry)) else None


class KeysView(_View, Set):
    """The keys of a tensordict; compares and combines like a set, iterates in order."""

    __slots__ = ()

    def __contains__(self, key: object) -> bool:
        if type(key) is str and not self._leaves_only:
            return key in self._node._names()
        return self._find(key) is not None

    def __iter__(self) -> Iterator[Any]:
        if not self._include_nested and not self._leaves_only and not self._sort:
            return iter(self._node._names())
        return (key for key, _ in self._walk())

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


def _nested(
    node: Node, prefix: Path, leaves_only: bool, is_leaf: IsLeaf
) -> Iterator[tuple[Path, Entry]]:
    for name, entry in node._items():
        path = (*prefix, name)
        if isinstance(entry, Tensor):
            yield path, entry
            continue
        leaf = is_leaf(type(entry))
        if isinstance(entry, Node) and not leaf:
            yield from _nested(entry, path, leaves_only, is_leaf)
        if leaf or not leaves_only:
            yield path, entry


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
