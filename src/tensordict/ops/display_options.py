"""What printing shows: one table of options, a context manager and decorator to set them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from ..errors import EntryTypeError

F = TypeVar("F", bound=Callable[..., Any])

_values: dict[str, Any] = {
    "show_batch_size": True,
    "show_device": True,
    "show_is_shared": True,
    "show_shape": True,
    "show_field_device": True,
    "show_dtype": True,
    "show_field_is_shared": True,
    "show_grad": False,
    "show_is_contiguous": False,
    "show_is_view": False,
    "show_storage_size": False,
    "plain": False,
    "sort_keys": "alphabetical",
    "compact": False,
    "html": True,
}
_TERSE = dict.fromkeys(
    ("show_device", "show_is_shared", "show_field_device", "show_dtype", "show_field_is_shared"),
    False,
)


def get_printoptions() -> dict[str, Any]:
    """The present print options; changing the result changes nothing.

    >>> get_printoptions()["compact"]
    False
    """
    return dict(_values)


class set_printoptions:
    """Sets print options for a ``with`` block or a function, or for good with ``.set()``.

    Args:
        verbose: False hides devices, dtypes and sharing, unless they are asked for.
        **kwargs: ``show_batch_size``, ``show_device``, ``show_is_shared`` (of nodes);
            ``show_shape``, ``show_field_device``, ``show_dtype``, ``show_field_is_shared``,
            ``show_grad``, ``show_is_contiguous``, ``show_is_view``, ``show_storage_size``
            (of leaves); ``plain``: mean and standard deviation of numeric leaves;
            ``sort_keys``: ``"alphabetical"`` or None for insertion order; ``compact``: the
            short form; ``html``: whether notebooks get a foldable tree.

    Raises:
        TypeError: an unknown option.

    >>> from tensordict import TensorDict
    >>> with set_printoptions(compact=True):
    ...     print(TensorDict(a=0, n={"b": 1.0}))
    TensorDict(batch_size=[], fields={a: i64[], n: {b: f32[]}})
    """

    def __init__(self, *, verbose: bool = True, **kwargs: Any) -> None:
        unknown = kwargs.keys() - _values.keys()
        if unknown:
            raise EntryTypeError(
                f"Unknown printoptions: {unknown}. Valid options: {sorted(_values)}."
            )
        self._changes = {**({} if verbose else _TERSE), **kwargs}
        self._before: list[dict[str, Any]] = []

    def set(self) -> None:
        """Make the options last."""
        _values.update(self._changes)

    def __enter__(self) -> set_printoptions:
        self._before.append(dict(_values))
        self.set()
        return self

    def __exit__(self, *exc: object) -> None:
        _values.update(self._before.pop())

    def __call__(self, fn: F) -> F:
        @functools.wraps(fn)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with type(self)(**self._changes):
                return fn(*args, **kwargs)

        return wrapped  # type: ignore[return-value]
