"""A line from one rank to another for many tensordicts of one structure.

The first publication of a structure is agreed on, as every exchange is.  After it the two
ends know the structure, and a publication is frame and payload: no schema, no answer.  The
receiver listens all the time and keeps the newest publication, so that neither end waits for
the other to be done with the last one.

After a timeout the two ends make connections of their own, and a new listener hears them.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .._typing import DeviceLike
from ..core.devices import as_device
from ..core.node import Node
from ..errors import (
    ChannelClosed,
    ChecksumMismatch,
    LossyCast,
    PeerLost,
    SchemaMismatch,
    StagingExhausted,
    TransferError,
    TransferTimeout,
    UnsupportedLeaf,
    WireError,
)
from . import protocol
from .asleep import sleeps_on
from .at_exit import in_background
from .endpoint import endpoint_of
from .link import Agreed, Request, loss_of_peer, release
from .p2p import Options, request_of
from .receive import New
from .torch_work import FOREVER, pause_after
from .transport import TorchTransport, group_rank
from .transport_protocol import reconnected

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack


class Channel:
    """Numbered publications from one rank to another; the newest wins.

    Every rank of the group may make one, the two ends have to.  A publication that the receiver
    has not taken is replaced by the next one.  The receiver listens from the start, on a thread
    of its own; the publisher ends the channel, by `close` or the end of a ``with`` block.  After a
    `TransferTimeout` or a `PeerLost` whose process is still there, both ends call `reset`.

    Args:
        src: the rank that publishes, in the world.
        dst: the rank that receives, in the world.
        group: a process group or a device mesh of one dimension; the default group if None.
        init_tag: of all messages of the channel; no other exchange of the two ranks may use it.
        device: where the receiver's leaves go; the CPU by default.
        **options: see `Options`; ``timeout`` is that of one `publish` or `recv`.  A ``policy``
            casts at the publisher; ``strict=False`` leaves out the first agreement, too.

    >>> import torch
    >>> from tensordict import TensorDict
    >>> from tensordict.distributed.testing import LoopbackGroup
    >>> def main(transport):
    ...     with Channel(0, 1, transport=transport) as channel:
    ...         if transport.rank == 0:
    ...             return [channel.publish(TensorDict({"w": torch.full((2,), i)})) for i in range(3)]
    ...         return channel.recv(version=3)["w"].tolist(), channel.version
    >>> LoopbackGroup(2).run(main)
    [[1, 2, 3], ([2, 2], 3)]
    """

    def __init__(
        self,
        src: int,
        dst: int,
        *,
        group: Any = None,
        init_tag: int = 0,
        device: DeviceLike | None = None,
        **options: Unpack[Options],
    ) -> None:
        transport = options.get("transport") or TorchTransport.of(group)
        ends = [group_rank(transport, group, rank, None) for rank in (src, dst)]
        self._key = f"channel/{ends[0]}/{ends[1]}/{init_tag}"
        self._name = (
            f"the channel from {transport.name_of(ends[0])} to {transport.name_of(ends[1])}"
        )
        self._publishes = transport.rank == ends[0]
        self._receives = transport.rank == ends[1]
        self._timeout = options.get("timeout")
        self._version = 0
        self._closed = False
        self._turn = threading.Lock()  # of whoever publishes, or resets
        self._request: Request | None = None
        self._device = None if device is None else as_device(device)
        self._inbox = _Inbox()
        self._listener: threading.Thread | None = None
        if self._publishes or self._receives:
            peer = dst if self._publishes else src
            request = request_of(group, peer, None, init_tag, options)
            self._first = replace(request, agreed=Agreed())  # over the connections of the group
            self._start(self._first)

    def _start(self, request: Request) -> None:
        """Begin to use some connections, instead of those before."""
        self._use(request)
        if self._receives:
            turn = self._inbox.reopen()
            listen = lambda: self._listen(request, turn)  # noqa: E731
            self._listener = in_background(listen, f"listener of {self._name}")
        _open.add(self)

    def _stop(self) -> None:
        """Use nothing any more."""
        self._use(self._first)
        _open.discard(self)

    def _use(self, request: Request) -> None:
        old, self._request = self._request, request
        if old is not None and old.transport is not self._first.transport:
            release(old.transport)  # connections of the channel's own are closed

    @property
    def version(self) -> int:
        """The number of the last publication that was published or taken here, 0 before any.

        That of a publication that timed out counts, too: it may have arrived.
        """
        return self._version

    # --- the publisher ------------------------------------------------------------------

    def publish(self, td: Node, version: int | None = None) -> int:
        """Send a tensordict; returns its number.

        Returns when the tensordict may change again, not when the receiver has taken it.

        Args:
            td: the tensordict; of the structure of the last one, or of another.
            version: its number, above the last one; one more than that by default.

        Raises:
            ValueError: a number that is not above the last one.
            TransferError: this rank is not the publisher, or the receiver refuses the structure.
            TransferTimeout, PeerLost: nothing can be published before a `reset`.
            ChannelClosed: after `close`.
        """
        if not self._publishes or self._request is None:
            raise TransferError(f"Cannot publish here: this rank is not the start of {self._name}.")
        if self._closed:
            raise ChannelClosed(f"Cannot publish: {self._name} is closed.")
        number = self._version + 1 if version is None else version
        if number <= self._version:
            raise ValueError(
                f"Cannot publish version {number}: {self._name} is at version {self._version} already."
            )
        if not self._turn.acquire(blocking=False):
            raise TransferError(
                f"Cannot publish: an earlier publication, or a reset, of {self._name} is still "
                "under way."
            )
        try:
            protocol.run_send(replace(self._request, version=number), td)
        except (TransferTimeout, PeerLost):
            self._version = number
            raise
        finally:
            self._turn.release()
        self._version = number
        return number

    def close(self) -> None:
        """End the channel: the receiver keeps what has arrived, and hears that no more will come.

        Does nothing on other ranks than the publisher, nor the second time.
        """
        if self._publishes and not self._closed and self._request is not None:
            self._closed = True
            try:
                protocol.run_error(self._request, ChannelClosed(f"{self._name} was closed."))
            finally:
                self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        if kind is None:
            self.close()
            return
        with suppress(TransferError):  # what went wrong before matters more
            self.close()

    # --- both ends ----------------------------------------------------------------------

    def reset(self, timeout: float | None = None) -> None:
        """Make new connections between the two ends, after a timeout has closed the old ones.

        Both ends call it; on other ranks it does nothing.  Numbers go on, what has arrived and
        was not taken is kept, and structures are agreed on anew.  The new connections belong to
        the channel, and end with it; they go over host memory, whatever the group uses.  The
        connections of the group itself stay closed.  Where a reset fails everything is as before,
        and both may call it again.

        Args:
            timeout: seconds; that of the channel by default, or else that of the group.

        Raises:
            TransferTimeout: the other end did not call it in time, or a publication is under way.
            PeerLost: the other end, or the store of the process group, is known to be gone.
            ChannelClosed: the publisher has closed the channel.

        >>> import torch
        >>> from tensordict import TensorDict
        >>> from tensordict.distributed.testing import LoopbackGroup
        >>> def main(transport):
        ...     channel = Channel(0, 1, transport=transport)
        ...     channel.reset(timeout=10)
        ...     if transport.rank == 0:
        ...         return channel.publish(TensorDict({"w": torch.zeros(2)}))
        ...     return channel.recv()["w"].tolist()
        >>> LoopbackGroup(2).run(main)
        [1, [0.0, 0.0]]
        """
        old = self._request
        if old is None:
            return
        if self._closed:
            raise ChannelClosed(f"Cannot reset: {self._name} is closed.")
        limit = self._timeout if timeout is None else timeout
        end = None if limit is None else time.monotonic() + limit

        def left() -> float | None:
            return None if end is None else max(end - time.monotonic(), 0.0)

        if not self._turn.acquire(timeout=-1 if limit is None else limit):
            raise self._no_reset(TransferTimeout("a publication is still under way"))
        try:
            transport = reconnected(self._first.transport, old.peer, self._key, left())
            self._leave(old, left())
            endpoint = endpoint_of(transport)
            agreed = Agreed()
            self._start(replace(self._first, transport=transport, endpoint=endpoint, agreed=agreed))
        except (PeerLost, TransferTimeout) as error:
            raise self._no_reset(error) from None
        finally:
            self._turn.release()

    def _no_reset(self, error: PeerLost | TransferTimeout) -> TransferError:
        text = f"Cannot reset {self._name}: {error}. Both ends call Channel.reset."
        return type(error)(text, peer=self._first.peer, stage="connect")

    def _leave(self, old: Request, timeout: float | None) -> None:
        """Let the listener of the old connections end, and what has arrived on them be kept."""
        cut = loss_of_peer(old) is not None
        if self._publishes and not cut:
            with suppress(TransferError):
                protocol.post_error(old, TransferError(f"{self._name} was reset."))
        if self._listener is not None:  # one that gloo does not wake is left to itself
            self._listener.join(_GRACE_S if cut else timeout)

    # --- the receiver -------------------------------------------------------------------

    def recv(self, version: int | None = None, timeout: float | None = None) -> Any:
        """Wait for the newest publication that was not taken yet, and take it.

        Args:
            version: wait for this number or a later one.
            timeout: seconds to wait; that of the channel by default, without end if it has none.

        Raises:
            ChannelClosed: no such publication will come.
            TransferTimeout: it did not come in time; the channel goes on.
            PeerLost: the publisher is gone, or the connection to it: see `reset`.
            ValueError: this number, or a later one, was taken already.
        """
        self._only_receiver()
        if version is not None and version <= self._version:
            raise ValueError(
                f"Cannot receive version {version}: version {self._version} was taken already."
            )
        limit = self._timeout if timeout is None else timeout
        found = self._take(1 if version is None else version, limit)
        if found is None:
            raise TransferTimeout(
                f"{self._name} brought no {'newer' if version is None else f'version {version}'} "
                f"publication within {limit} s"
            )
        self._version, td = found
        return td

    def _take(self, version: int, limit: float | None) -> tuple[int, Any] | None:
        """Wait for a publication; while none comes, look whether one can come."""
        start = time.monotonic()
        while True:
            quiet = time.monotonic() - start
            pause = pause_after(quiet)
            left = FOREVER if limit is None else max(limit - quiet, 0.0)
            found = self._inbox.take(version, min(left, pause))
            if found is not None or left <= pause:
                return found
            self._look()

    def _look(self) -> None:
        """Notice that the publisher is gone, where gloo does not tell the listener."""
        request, listener, turn = self._request, self._listener, self._inbox.turn
        assert request is not None and listener is not None
        loss = loss_of_peer(request)
        if loss is not None and sleeps_on(listener):
            self._inbox.fail(loss, turn, last=True)

    def latest(self) -> Any:
        """The newest publication that has arrived and was not taken yet, None without one.

        Raises:
            ChannelClosed, PeerLost: as `recv`, when nothing is left to take.
        """
        self._only_receiver()
        found = self._inbox.take(1, 0)
        if found is None:
            return None
        self._version, td = found
        return td

    def __iter__(self) -> Iterator[Any]:
        """Publications until the channel is closed: those that are the newest when asked for."""
        while True:
            try:
                td = self.recv()
            except ChannelClosed:
                return
            yield td

    def _only_receiver(self) -> None:
        if not self._receives:
            raise TransferError(f"Cannot receive here: this rank is not the end of {self._name}.")

    def _listen(self, request: Request, turn: int) -> None:
        request = replace(request, timeout=FOREVER, policy=None)
        while True:
            target = New(self._device)
            try:
                td = protocol.run_recv(request, target)
            except Exception as error:
                arrived = isinstance(error, WireError) and target.version > 0
                goes_on = arrived or isinstance(error, _OF_ONE)
                heard = self._inbox.fail(error, turn, last=not goes_on)
                if heard and not goes_on:
                    self._closed = isinstance(error, ChannelClosed)
                    self._stop()
                if not (heard and goes_on):
                    return
            else:
                if not self._inbox.put(target.version, td, turn):
                    return


# Errors of one publication, of which both ends know or all of which has arrived (as has one whose
# values cannot be read here): the next one may be fine.
_OF_ONE = (SchemaMismatch, UnsupportedLeaf, LossyCast, StagingExhausted, ChecksumMismatch)


_open: set[Channel] = set()
_GRACE_S = 1.0


@atexit.register
def _close_all() -> None:
    """End the channels that were left open: a thread that listens must not outlive the interpreter.

    A receiver gives its publisher, which may be at its end as well, a moment to do so.
    """
    left = list(_open)
    for channel in left:
        if channel._request is not None and channel._publishes:
            channel._request = replace(channel._request, timeout=_GRACE_S)
            with suppress(Exception):  # the receiver, or the group, is gone
                channel.close()
    for channel in left:
        if channel._listener is not None:
            channel._listener.join(_GRACE_S)


class _Inbox:
    """The newest publication, and what went wrong after it.

    Attributes:
        turn: of the listener that may write; what another one brings is dropped.
    """

    def __init__(self) -> None:
        self.turn = 0
        self._news = threading.Condition()
        self._held: tuple[int, Any] | None = None
        self._error: Exception | None = None
        self._over = False

    def reopen(self) -> int:
        """Forget what went wrong; returns the turn of the next listener."""
        with self._news:
            self._error, self._over = None, False
            self.turn += 1
            return self.turn

    def put(self, version: int, td: Any, turn: int) -> bool:
        """Keep a publication instead of the one before; an error of that one is past.

        Returns:
            Whether the listener should go on.
        """
        with self._news:
            if turn != self.turn or self._over:
                return False
            self._held, self._error = (version, td), None
            self._news.notify_all()
            return True

    def fail(self, error: Exception, turn: int, *, last: bool) -> bool:
        """Keep an error; after the last one nothing comes.

        Returns:
            Whether anybody will hear of it.
        """
        error.__traceback__ = error.__context__ = None  # they hold the connections
        with self._news:
            if turn != self.turn or self._over:
                return False
            self._error, self._over = error, last
            self._news.notify_all()
            return True

    def take(self, version: int, timeout: float | None) -> tuple[int, Any] | None:
        """The publication held, if its number is high enough; None when none came in time.

        Raises:
            The error kept, when there is nothing to take; one that is not the last one once.
        """
        end = None if timeout is None else time.monotonic() + timeout
        with self._news:
            while True:
                held = self._held
                if held is not None and held[0] >= version:
                    self._held = None
                    return held
                if self._error is not None:
                    error = self._error
                    if not self._over:
                        self._error = None
                    raise error
                left = None if end is None else end - time.monotonic()
                if left is not None and left <= 0:
                    return None
                self._news.wait(left)
