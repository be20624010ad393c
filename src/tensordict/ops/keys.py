"""Views of keys, values and items: nested or flat, sorted or in insertion order.

A view holds no list: membership looks the key up, iteration walks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from typing import Any

from torch import Tensor

from .._keys import unravel_key_to_tuple
from .._typing import NestedKey, Path
from ..core.leaf import NonTensorDataBase
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


class KeysView(Set):
    """The names of one level; compares and combines like a set, iterates in order."""

    __slots__ = ("_node",)

    def __init__(self, node: Node) -> None:
        self._node = node

    def __contains__(self, key: object) -> bool:
        if type(key) is str:
            return key in self._node._names()
        path = unravel_key_to_tuple(key)
        return len(path) == 1 and contains(self._node, path)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._node._names())

    def __len__(self) -> int:
        return len(self._node._names())

    @classmethod
    def _from_iterable(cls, it: Any) -> Any:
        return set(it)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self)})"


class ValuesView:
    """The entries of one level."""

    __slots__ = ("_node",)

    def __init__(self, node: Node) -> None:
        self._node = node

    def __iter__(self) -> Iterator[Any]:
        return iter([entry for _, entry in self._node._items()])

    def __len__(self) -> int:
        return len(self._node._names())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self)})"


class ItemsView(ValuesView):
    """Pairs of name and entry of one level."""

    __slots__ = ()

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        return iter(self._node._items())


class _Chosen:
    """What a view of several levels, of leaves alone, or in sorted order covers."""

    _node: Node
    _include_nested: bool
    _leaves_only: bool
    _is_leaf: IsLeaf | None  # None for `default_is_leaf`
    _sort: bool

    def __init__(
        self,
        node: Node,
        include_nested: bool,
        leaves_only: bool,
        is_leaf: IsLeaf | None,
        sort: bool,
    ) -> None:
        self._node = node
        self._include_nested = include_nested
        self._leaves_only = leaves_only
        self._is_leaf = is_leaf
        self._sort = sort

    def _pairs(self) -> list[tuple[NestedKey, Entry]]:
        pairs: list[tuple[NestedKey, Entry]] = []
        if self._include_nested:
            _nested(self._node, (), self._leaves_only, self._is_leaf, pairs)
        elif self._leaves_only:
            is_leaf = self._is_leaf or default_is_leaf
            pairs += [(k, e) for k, e in self._node._items() if is_leaf(type(e))]
        else:
            pairs += self._node._items()
        if self._sort:
            pairs.sort(key=lambda pair: _sort_key(pair[0]))
        return pairs

    def _keys(self) -> list[NestedKey]:
        # By class: an entry of a stack is not read (it may be ragged) to be named.
        node = self._node
        keys: list[NestedKey] = []
        if self._include_nested:
            _nested_keys(node, (), self._leaves_only, self._is_leaf, keys)
        elif self._leaves_only:
            is_leaf = self._is_leaf or default_is_leaf
            keys += [name for name in node._names() if is_leaf(_class(node, name))]
        else:
            keys += node._names()
        if self._sort:
            keys.sort(key=_sort_key)
        return keys

    def __len__(self) -> int:
        if not self._include_nested or self._is_leaf is not None:
            return len(self._keys())
        # ``list(view)`` asks for the length first: it must not cost a second list of keys.
        n = 0
        todo = [self._node]
        for node in todo:
            if node._members() is not None:
                return len(self._keys())
            for entry in node._contents():
                if isinstance(entry, Tensor):
                    n += 1
                elif isinstance(entry, Node):
                    todo.append(entry)
                    n += not self._leaves_only
                elif not self._leaves_only or not isinstance(entry, NonTensorDataBase):
                    n += 1
        return n


class ChosenKeysView(_Chosen, KeysView):
    """The keys of several levels, of leaves alone, or in sorted order."""

    def __contains__(self, key: object) -> bool:
        if type(key) is str and not self._leaves_only:
            return key in self._node._names()
        path = unravel_key_to_tuple(key)
        if not path or (len(path) > 1 and not self._include_nested):
            return False
        if not contains(self._node, path):
            return False
        if not self._leaves_only:
            return True
        holder, rest = resolve(self._node, path)
        return (self._is_leaf or default_is_leaf)(_class(holder, rest[0]))

    def __iter__(self) -> Iterator[Any]:
        return iter(self._keys())


class ChosenValuesView(_Chosen, ValuesView):
    """The entries of several levels, of leaves alone, or in sorted order of their keys."""

    def __iter__(self) -> Iterator[Any]:
        return iter([entry for _, entry in self._pairs()])


class ChosenItemsView(_Chosen, ItemsView):
    """Pairs of key and entry of several levels, of leaves alone, or in sorted order."""

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        return iter(self._pairs())


def _class(node: Node, name: str) -> type:
    cls = node._class_of(name)
    assert cls is not None
    return cls


def _nested_keys(
    node: Node, prefix: Path, leaves_only: bool, is_leaf: IsLeaf | None, out: list[NestedKey]
) -> None:
    """Append the keys below a node in the form shown to users, children before their parent."""
    # Entries of a stack are asked for their class alone: reading one builds it, or fails.
    ragged = node._members() is not None
    pairs: Any = ((name, None) for name in node._names()) if ragged else node._items()
    for name, entry in pairs:
        key: NestedKey = (*prefix, name) if prefix else name
        if is_leaf is None and isinstance(entry, Tensor):
            out.append(key)
            continue
        cls = _class(node, name) if entry is None else type(entry)
        leaf = (is_leaf or default_is_leaf)(cls)
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
    is_leaf: IsLeaf | None,
    out: list[tuple[NestedKey, Entry]],
) -> None:
    """Append keys and entries in the order of `_nested_keys`."""
    for name, entry in node._items():
        key: NestedKey = (*prefix, name) if prefix else name
        if is_leaf is not None:
            leaf = is_leaf(type(entry))
        elif isinstance(entry, Tensor):
            out.append((key, entry))
            continue
        else:  # what `default_is_leaf` says, without the call
            leaf = not isinstance(entry, (Node, NonTensorDataBase))
        if not leaf and isinstance(entry, Node):
            _nested(entry, (*prefix, name), leaves_only, is_leaf, out)
        if leaf or not leaves_only:
            out.append((key, entry))


def _sort_key(key: NestedKey) -> Path:
    return (key,) if isinstance(key, str) else key
