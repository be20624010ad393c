"""The table behind ``__torch_function__``: torch function -> our implementation.

``ops`` fills it; the classes that torch calls back only look up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

HANDLERS: dict[Callable[..., Any], Callable[..., Any]] = {}


def implements(*functions: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Register the decorated function as our rule for some torch functions."""

    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        for function in functions:
            HANDLERS[function] = fn
        return fn

    return register


def dispatch(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> Any:
    """Run our rule for ``func``; ``NotImplemented`` (torch raises TypeError) without one."""
    handler = HANDLERS.get(func)
    if handler is None:
        return NotImplemented
    return handler(*args, **(kwargs or {}))


def as_methods(*names: str) -> None:
    """Register functions of ``torch`` as calls of the method of the same name."""
    for name in names:
        HANDLERS[getattr(torch, name)] = _method(name)


def _method(name: str) -> Callable[..., Any]:
    def call(input: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(input, name)(*args, **kwargs)

    return call
