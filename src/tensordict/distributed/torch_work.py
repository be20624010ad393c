"""Works of ``torch.distributed`` whose errors say which kind of trouble it is, and with whom."""

from __future__ import annotations

import ctypes
import math
import re
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor

from ..errors import PeerLost, TransferError, TransferTimeout

if TYPE_CHECKING:
    from .transport_protocol import Transport

# What follows from a timeout of one message.
CLOSES_ALL: Final = "whereupon gloo closed its connections to all ranks of the group"
# Seconds of a wait that has no end of its own: for threads that wait on behalf of others.
FOREVER: Final = 10 * 365 * 86400.0
# Seconds without news after which a rank looks whether the others are there; later less often.
LOOK_AFTER: Final = 0.25
LOOK_AT_LEAST_EVERY: Final = 2.0

_SILENT: Final = ("timed out", "timeout waiting", "watchdog")
_PLACE: Final = re.compile(r"^\[[^\]]*\.(cc|h):\d+\] ")
# gloo says so to whoever uses a connection that this rank closed by giving up another wait.
_GIVEN_UP: Final = "application timeout"
_GONE: Final = (
    "connection closed",
    "connection reset",
    "connection refused",
    "broken pipe",
    "pair closure",
    "socket closed",
    "state_ >= connected",
    "enforce fail",
    "remote process",
)


def translate(error: RuntimeError) -> Exception:
    """The error of this package for one that a process group raised."""
    text = str(error)
    low = text.lower()
    first = text.splitlines()[0] if text else type(error).__name__
    # gloo says where in its source it noticed, and gives advice after the reason.
    first = _PLACE.sub("", first).split(". This is typically")[0]
    if isinstance(error, TransferError):
        return error
    if _GIVEN_UP in low:
        return PeerLost(f"this rank gave up another exchange, {CLOSES_ALL}")
    if any(mark in low for mark in _GONE):
        return PeerLost(first)
    if any(mark in low for mark in _SILENT):
        return TransferTimeout(first)
    return error


def pause_after(quiet: float) -> float:
    """Seconds until the next look at the others, after some without news.

    >>> [pause_after(quiet) for quiet in (0.0, 4.0, 60.0)]
    [0.25, 1.0, 2.0]
    """
    return min(max(LOOK_AFTER, 0.25 * quiet), LOOK_AT_LEAST_EVERY)


class TorchWork:
    """A message under way.

    Args:
        work: what ``torch.distributed`` returned.
        keep: what must outlive the message: its bytes.
        gave_up: called after a wait that timed out, which closes connections.
        limit: seconds of a wait without a timeout; None is that of the group.
    """

    __slots__ = ("_gave_up", "_keep", "_limit", "_work")

    def __init__(
        self,
        work: Any,
        keep: Any = None,
        gave_up: Callable[[], None] | None = None,
        limit: float | None = None,
    ) -> None:
        self._limit = limit
        self._work = work
        self._keep = keep
        self._gave_up = gave_up

    def wait(self, timeout: float | None = None) -> None:
        if timeout is None:
            timeout = self._limit
        try:
            if timeout is None:
                self._work.wait()
            else:
                # gloo reads 0 as "no timeout"
                self._work.wait(timedelta(seconds=max(timeout, 1e-3)))
        except RuntimeError as error:
            raise self._failure(error) from None

    def _failure(self, error: RuntimeError) -> Exception:
        found = translate(error)
        if self._gave_up is not None and type(found) is TransferTimeout:
            self._gave_up()
        return found


# A rank that ends after its part of a collective looks like one that died within it.  Those who
# still wait then get as long again for each round of messages as it took so far, but no longer
# than the bytes need on a slow link.
_LEAST_HOPE: Final = 1.0
_SLOW_LINK: Final = 100e6  # bytes per second
_LONGEST_FIRST_SLICE: Final = timedelta(seconds=LOOK_AFTER)


class CollectiveWork:
    """A gloo collective: whoever waits for it learns when a rank of the group is gone.

    gloo itself wakes only the neighbours of that rank, and not those of them that wait for the
    rest of a message.  So the wait is cut into slices, and after each in vain `Transport.lost`
    is asked.

    Args:
        work: what ``torch.distributed`` returned.
        tensors: what it works on, this rank's own first.
        transport: what looks after the ranks.
        group: the process group; it is never destroyed once a collective was given up, because
            that would wait for gloo's thread, which nobody can wake.
        gave_up: called with the reason when it is given up.
    """

    __slots__ = ("_begun", "_gave_up", "_group", "_tensors", "_transport", "_work")

    def __init__(
        self,
        work: Any,
        tensors: tuple[Tensor, ...],
        *,
        transport: Transport,
        group: Any,
        gave_up: Callable[[str], None] | None = None,
    ) -> None:
        self._gave_up = gave_up
        self._work = work
        self._tensors = tensors
        self._transport = transport
        self._group = group
        self._begun = time.monotonic()

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's own tensor."""
        return self._tensors[0].nbytes

    def wait(self, timeout: float | None = None) -> None:
        """Return when it is through.

        Args:
            timeout: seconds; None is the timeout of the group.

        Raises:
            PeerLost: ranks are gone, named, within about 2 s.
            TransferTimeout: it is not through, although all ranks are there.
        """
        if self._over(_LONGEST_FIRST_SLICE if timeout is None or timeout > LOOK_AFTER else timeout):
            return
        start = time.monotonic()
        end = start + (FOREVER if timeout is None else timeout - LOOK_AFTER)
        hope = math.inf
        while True:
            now = time.monotonic()
            lost = self._transport.lost(range(self._transport.size))
            if lost and hope == math.inf:
                hope = now + self._hope(now - self._begun)
            if now >= min(hope, end):
                error = self._lost(lost) if lost else self._late(timeout)
                self._give_up(error)
                raise error
            pause = LOOK_AFTER if lost else pause_after(now - start)
            if self._over(min(pause, hope - now, end - now)):
                return

    def _over(self, seconds: float | timedelta) -> bool:
        """Wait for some time; whether it is through."""
        if not isinstance(seconds, timedelta):
            seconds = timedelta(seconds=max(seconds, 1e-3))
        try:
            self._work.wait(seconds)
        except RuntimeError:
            if not self._work.is_completed():
                return False
        else:
            return True
        try:  # it failed, or ended as the time did
            self._work.wait()
        except RuntimeError as error:
            found = translate(error)
            if isinstance(found, PeerLost):
                # gloo cuts what a rank that failed was sending: its neighbour may hear of that
                # before it hears of the rank that died.
                time.sleep(LOOK_AFTER)
                lost = self._transport.lost(range(self._transport.size))
                found = self._lost(lost) if lost else found
            raise found from None
        return True

    def _hope(self, took: float) -> float:
        rounds = math.ceil(math.log2(max(2, self._transport.size)))
        return max(_LEAST_HOPE, rounds * min(took, self.nbytes / _SLOW_LINK))

    def _lost(self, lost: dict[int, str]) -> PeerLost:
        names = [self._transport.name_of(rank) for rank in lost]
        rank, reason = next(iter(lost.items()))
        what = "is gone" if len(lost) == 1 else "are gone, or gave up"
        text = f"{', '.join(names)} {what} ({reason})"
        return PeerLost(text, peer=rank if len(lost) == 1 else None)

    def _late(self, timeout: float | None) -> TransferTimeout:
        name_of, n = self._transport.name_of, self._transport.size
        return TransferTimeout(
            f"{self.nbytes} bytes of this rank are not through after {timeout} s. {name_of(0)} to "
            f"{name_of(n - 1)} are all connected: one is late, stuck, or not in the call."
        )

    def _give_up(self, error: TransferError) -> None:
        if self._gave_up is not None:
            self._gave_up(str(error))
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))
