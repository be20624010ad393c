"""Nested keys: what is one, and its flat forms.

A *name* is one level (``str``), a *path* a tuple of names from the root, a *key*
either of them or a nested tuple of names.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ._typing import NestedKey, Path
from .errors import MissingKeyError

# What joins the names of a nested key in one text, unless something else is asked for.
KEY_SEPARATOR = "."


_STR = frozenset({str})


def path_of(key: Any) -> Path:
    """The path of a key.

    Raises:
        MissingKeyError: (a ``KeyError``) when ``key`` is not a str or a non-empty
            nested tuple of str.

    >>> path_of("a"), path_of(("a", ("b", ("c",))))
    (('a',), ('a', 'b', 'c'))
    """
    if type(key) is str:
        return (key,)
    if type(key) is tuple and key:
        for part in key:
            if type(part) is not str:
                break
        else:
            return key
    path = unravel_key_to_tuple(key)
    if not path:
        raise MissingKeyError(
            f"Only NestedKeys are supported: expected a str or a non-empty tuple of str, "
            f"got {key!r} of type {type(key).__name__}."
        )
    return path


def is_key(index: Any) -> bool:
    """Whether an index names an entry (str, or a tuple in which every part is a key).

    >>> is_key(("a", ("b",))), is_key((0, "a")), is_key(())
    (True, False, False)
    """
    if not isinstance(index, tuple):
        return isinstance(index, str)
    for part in index:
        if type(part) is not str and not is_key(part):
            return False
    return bool(index)


def unravel_key_to_tuple(key: Any) -> Path:
    """The path of a key, ``()`` when it is not a key.

    >>> unravel_key_to_tuple("a"), unravel_key_to_tuple((("a",), "b")), unravel_key_to_tuple((1,))
    (('a',), ('a', 'b'), ())
    """
    if isinstance(key, str):
        return (str(key),)
    if not isinstance(key, tuple):
        return ()
    if type(key) is tuple and _STR.issuperset(map(type, key)):
        return key  # flat already
    out: list[str] = []
    for part in key:
        inner = unravel_key_to_tuple(part)
        if not inner:
            return ()
        out.extend(inner)
    return tuple(out)


def unravel_key(key: Any) -> NestedKey:
    """The shortest form of a key: a str for one level, else a flat tuple.

    >>> unravel_key(("a",)), unravel_key(("a", ("b",)))
    ('a', ('a', 'b'))
    """
    path = unravel_key_to_tuple(key)
    return path[0] if len(path) == 1 else path


def unravel_key_list(keys: Iterable[Any]) -> list[NestedKey]:
    """`unravel_key` of each key of a list.

    >>> unravel_key_list(["a", ("b", ("c",))])
    ['a', ('b', 'c')]
    """
    return [unravel_key(key) for key in keys]


def short(path: Path) -> NestedKey:
    """The form in which a path is shown to users: a str at the top level."""
    return path[0] if len(path) == 1 else path


def dotted(path: Path) -> str:
    """The dotted form of a path, on which patterns match."""
    return ".".join(path)
