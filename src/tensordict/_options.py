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


def set_capture_non_tensor_stack(mode: bool) -> set_option:
    """Whether a stack of equal non-tensor values is one value (by default one per row).

    Acts as a context manager, as a decorator, or for good with ``.set()``.
    """
    return set_option("capture_non_tensor_stack", bool(mode))


def capture_non_tensor_stack(allow_none: bool = False) -> bool:
    """The present mode of `set_capture_non_tensor_stack`."""
    return bool(option("capture_non_tensor_stack"))


def set_list_to_stack(mode: bool) -> set_option:
    """Whether a list that is written becomes one value per row (the default), or one value.

    Acts as a context manager, as a decorator, or for good with ``.set()``.

    >>> from tensordict import TensorDict
    >>> with set_list_to_stack(False):
    ...     TensorDict(a=["x", "y"]).get("a")
    NonTensorData(data=['x', 'y'], batch_size=torch.Size([]), device=None)
    """
    return set_option("list_to_stack", bool(mode))


def list_to_stack(allow_none: bool = False) -> bool:
    """The present mode of `set_list_to_stack`."""
    return bool(option("list_to_stack"))


def set_lazy_legacy(mode: bool) -> set_option:
    """Accepted for compatibility of calls; only False, the present behaviour, exists here.

    Raises:
        NotImplementedError: for True.
    """
    if mode:
        raise NotImplementedError(
            "Shape operations that stay lazy until they are read do not exist here: every operation "
            "gives its result. Use set_lazy_legacy(False)."
        )
    return set_option("lazy_legacy", False)


def lazy_legacy(allow_none: bool = False) -> bool:
    """The present mode of `set_lazy_legacy`: False."""
    return bool(option("lazy_legacy"))


def set_get_defaults_to_none(set_to_none: bool = True) -> None:
    """Whether ``get()`` of a missing key without a default is None (the default) or an error."""
    set_option("get_defaults_to_none", bool(set_to_none)).set()


def get_defaults_to_none(set_to_none: bool = True) -> bool:
    """The present mode of `set_get_defaults_to_none`."""
    return bool(option("get_defaults_to_none"))
