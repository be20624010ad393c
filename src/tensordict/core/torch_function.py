"""The table behind ``__torch_function__``: torch function -> our implementation.

``ops`` fills it; the classes that torch calls back only look up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

HANDLERS: dict[Callable[..., Any], Callable[..., Any]] = {}
# Operators that torch wrote in Python, by the name of the function (``Tensor.__rtruediv__``
# is ``"__rdiv__"``): torch.compile does not find these functions in a dict.
OPERATORS: dict[str, Callable[..., Any]] = {}


def implements(*functions: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Register the decorated function as our rule for some torch functions."""

    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        for function in functions:
            HANDLERS[function] = fn
        return fn

    return register


def implements_operator(name: str, fn: Callable[..., Any]) -> None:
    """Register our rule for an operator of ``torch.Tensor``, as ``"__rsub__"``."""
    method = getattr(Tensor, name)
    if isinstance(method, FunctionType):
        OPERATORS[method.__name__] = fn
    else:
        HANDLERS.setdefault(method, fn)


def dispatch(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> Any:
    """Run our rule for ``func``; ``NotImplemented`` (torch raises TypeError) without one."""
    handler = OPERATORS.get(func.__name__) if isinstance(func, FunctionType) else None
    if handler is None:
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
