"""Process-wide options, each a context manager, a decorator, and (``.set()``) lasting."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

_DEFAULTS: dict[str, Any] = {
    "get_defaults_to_none": True,
    "list_to_stack": True,
    "capture_non_tensor_stack": False,
    "lazy_legacy": False,
}
_values: dict[str, Any] = dict(_DEFAULTS)


def option(name: str) -> Any:
    """The present value of an option."""
    return _values[name]


class set_option:
    """Sets one option for a ``with`` block or a function, or for good with ``.set()``.

    >>> with set_option("list_to_stack", False):
    ...     option("list_to_stack")
    False
    >>> option("list_to_stack")
    True
    """

    def __init__(self, name: str, value: Any) -> None:
        if name not in _values:
            raise KeyError(f"There is no option {name!r}. Expected one of {sorted(_values)}.")
        self._name = name
        self._value = value
        self._before: list[Any] = []

    def set(self) -> None:
        """Make the value last."""
        _values[self._name] = self._value

    def __enter__(self) -> set_option:
        self._before.append(_values[self._name])
        self.set()
        return self

    def __exit__(self, *exc: object) -> None:
        _values[self._name] = self._before.pop()

    def __call__(self, fn: F) -> F:
        @functools.wraps(fn)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with type(self)(self._name, self._value):
                return fn(*args, **kwargs)

        return wrapped  # type: ignore[return-value]
