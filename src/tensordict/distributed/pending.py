"""A handle on an exchange that goes on in the background."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Generator
from typing import Any, Generic, TypeVar

from ..errors import PeerLost, TransferTimeout
from .asleep import sleeps_on
from .at_exit import in_background
from .torch_work import FOREVER, pause_after

T = TypeVar("T")


class Pending(Generic[T]):
    """An exchange under way, with its own thread to carry it forward.

    Some backends make progress only while somebody waits, and agreement takes several
    messages: the thread does the waiting, so `done` becomes true by itself.

    Args:
        run: what to do; its result is what `wait` returns.
        what: how errors call it, as in ``"send to rank 1"``.
        loss: says whether the peer is lost.  It is asked by those who wait while nothing happens,
            for the thread may be one that nobody wakes.

    >>> pending = Pending(lambda: 6 * 7, "example")
    >>> pending.wait(), pending.done()
    (42, True)
    """

    def __init__(
        self, run: Callable[[], T], what: str, *, loss: Callable[[], PeerLost | None] | None = None
    ) -> None:
        self._what = what
        self._over = threading.Event()
        self._result: Any = None
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[Pending[T]], Any]] = []
        self._lock = threading.Lock()
        self._loss = loss
        self._thread = in_background(lambda: self._drive(run), what)

    def _drive(self, run: Callable[[], T]) -> None:
        try:
            result = run()
        except BaseException as error:  # the waiter raises it
            self._end(error=error)
        else:
            self._end(result)

    def _end(self, result: Any = None, error: BaseException | None = None) -> None:
        with self._lock:
            if self._over.is_set():
                return
            self._result, self._error = result, error
            self._over.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(self)

    def _ends(self, timeout: float | None) -> bool:
        """Wait for the end; whether it has come."""
        if self._loss is None:
            return self._over.wait(timeout)
        start = time.monotonic()
        while True:
            quiet = time.monotonic() - start
            left = FOREVER if timeout is None else max(timeout - quiet, 0.0)
            pause = pause_after(quiet)
            if self._over.wait(min(left, pause)):
                return True
            if left <= pause:
                return False
            error = self._loss()
            if error is not None and sleeps_on(self._thread):
                self._end(error=error)

    def wait(self, timeout: float | None = None) -> T:
        """Return the result, or raise the error, of the exchange.

        Args:
            timeout: seconds to wait here.  Running out of them raises and leaves the
                exchange going on; the exchange has a timeout of its own.

        Raises:
            TransferTimeout: it is not over after ``timeout`` seconds.
        """
        if not self._ends(timeout):
            raise TransferTimeout(f"{self._what} is still under way after {timeout} s")
        if self._error is not None:
            raise self._error
        return self._result

    def done(self) -> bool:
        """Whether it is over, well or badly."""
        return self._over.is_set()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """The error with which it ended, ``None`` if it went well; waits for the end."""
        if not self._ends(timeout):
            raise TransferTimeout(f"{self._what} is still under way after {timeout} s")
        return self._error

    def add_done_callback(self, callback: Callable[[Pending[T]], Any]) -> None:
        """Call ``callback(self)`` at the end, at once if that is past."""
        with self._lock:
            if not self._over.is_set():
                self._callbacks.append(callback)
                return
        callback(self)

    def __await__(self) -> Generator[Any, None, T]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()

        def finish() -> None:
            if not future.done():  # it is when the task was cancelled
                future.set_result(None)

        self.add_done_callback(lambda _: loop.call_soon_threadsafe(finish))
        yield from future
        return self.wait()

    def __repr__(self) -> str:
        if not self.done():
            return f"Pending({self._what}, under way)"
        return f"Pending({self._what}, {'failed' if self._error is not None else 'done'})"
