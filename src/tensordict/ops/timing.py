"""Times of named pieces of code, added up over a process."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

_log = logging.getLogger("tensordict")


class timeit:
    """Adds the time of a block or function to the account of a name.

    Args:
        name: the account.

    >>> with timeit("step"):
    ...     pass
    >>> timeit.todict()["step"] >= 0
    True
    >>> timeit.erase()
    """

    _accounts: ClassVar[dict[str, list[float]]] = {}

    def __init__(self, name: str) -> None:
        self.name = name
        self._begun: list[float] = []

    def __enter__(self) -> timeit:
        self._begun.append(time.perf_counter())
        return self

    def __exit__(self, *exc: object) -> None:
        self._accounts.setdefault(self.name, []).append(time.perf_counter() - self._begun.pop())

    def __call__(self, fn: F) -> F:
        @functools.wraps(fn)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with timeit(self.name):
                return fn(*args, **kwargs)

        return wrapped  # type: ignore[return-value]

    @classmethod
    def todict(cls) -> dict[str, float]:
        """Mean time of each name, in seconds."""
        return {name: sum(times) / len(times) for name, times in cls._accounts.items()}

    @classmethod
    def print(cls) -> None:
        """Log number of calls, mean and total time of each name (logger ``tensordict``)."""
        for name, times in sorted(cls._accounts.items()):
            mean = sum(times) / len(times) * 1e3
            _log.info(
                "%s took %.4g msec (calls = %d, total = %.4g sec)",
                name,
                mean,
                len(times),
                sum(times),
            )

    @classmethod
    def erase(cls) -> None:
        """Forget all times."""
        cls._accounts.clear()
