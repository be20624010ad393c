"""A line from one rank to another for many tensordicts of one structure.

The first publication of a structure is agreed on, as every exchange is.  After it the two
ends know the structure, and a publication is frame and payload: no schema, no answer.  The
receiver listens all the time and keeps the newest publication, so that neither end waits for
the other to be done with the last one.
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
    SchemaMismatch,
    StagingExhausted,
    TransferError,
    TransferTimeout,
    UnsupportedLeaf,
)
from . import protocol
from .at_exit import in_background
from .link import Agreed, Request
from .p2p import Options, request_of
from .receive import New
from .torch_work import FOREVER
from .transport import TorchTransport, group_rank

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack


class Channel:
    """Numbered publications from one rank to another; the newest wins.

    Every rank of the group may make one, the two ends have to.  A publication that the receiver
    has not taken is replaced by the next one.  The receiver listens from the start, on a thread
    of its own; the publisher ends the channel, by `close` or the end of a ``with`` block.

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
        self._name = (
            f"the channel from {transport.name_of(ends[0])} to {transport.name_of(ends[1])}"
        )
        self._publishes = transport.rank == ends[0]
        self._receives = transport.rank == ends[1]
        self._timeout = options.get("timeout")
        self._version = 0
        self._closed = False
        self._request: Request | None = None
        self._inbox = _Inbox()
        self._listener: threading.Thread | None = None
        if self._publishes or self._receives:
            peer = dst if self._publishes else src
            request = request_of(group, peer, None, init_tag, options)
            self._request = replace(request, agreed=Agreed())
        if self._receives:
            where = None if device is None else as_device(device)
            self._listener = in_background(lambda: self._listen(where), f"listener of {self._name}")
        if self._request is not None:
            _open.add(self)

    @property
    def version(self) -> int:
        """The number of the last publication that was published or taken here, 0 before any."""
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
        protocol.run_send(replace(self._request, version=number), td)
        self._version = number
        return number

    def close(self) -> None:
        """End the channel: the receiver keeps what has arrived, and hears that no more will come.

        Does nothing on other ranks than the publisher, nor the second time.
        """
        if self._publishes and not self._closed and self._request is not None:
            self._closed = True
            _open.discard(self)
            protocol.run_error(self._request, ChannelClosed(f"{self._name} was closed."))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    # --- the receiver -------------------------------------------------------------------

    def recv(self, version: int | None = None, timeout: float | None = None) -> Any:
        """Wait for the newest publication that was not taken yet, and take it.

        Args:
            version: wait for this number or a later one.
            timeout: seconds to wait; that of the channel by default, without end if it has none.

        Raises:
            ChannelClosed: no such publication will come.
            TransferTimeout: it did not come in time; the channel goes on.
            PeerLost: the publisher is gone.
            ValueError: this number, or a later one, was taken already.
        """
        self._only_receiver()
        if version is not None and version <= self._version:
            raise ValueError(
                f"Cannot receive version {version}: version {self._version} was taken already."
            )
        limit = self._timeout if timeout is None else timeout
        found = self._inbox.take(1 if version is None else version, limit)
        if found is None:
            raise TransferTimeout(
                f"{self._name} brought no {'newer' if version is None else f'version {version}'} "
                f"publication within {limit} s"
            )
        self._version, td = found
        return td

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

    def _listen(self, device: Any) -> None:
        assert self._request is not None
        request = replace(self._request, timeout=FOREVER, policy=None)
        while True:
            target = New(device)
            try:
                td = protocol.run_recv(request, target)
            except Exception as error:
                goes_on = isinstance(error, _OF_ONE)
                self._inbox.fail(error, last=not goes_on)
                if not goes_on:
                    _open.discard(self)
                    return
            else:
                self._inbox.put(target.version, td)


# Errors of one publication, of which both ends know or all of which has arrived: the next one
# may be fine.
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
    """The newest publication, and what went wrong after it."""

    def __init__(self) -> None:
        self._news = threading.Condition()
        self._held: tuple[int, Any] | None = None
        self._error: Exception | None = None
        self._over = False

    def put(self, version: int, td: Any) -> None:
        """Keep a publication instead of the one before; an error of that one is past."""
        with self._news:
            self._held, self._error = (version, td), None
            self._news.notify_all()

    def fail(self, error: Exception, *, last: bool) -> None:
        """Keep an error; after the last one nothing comes."""
        with self._news:
            self._error, self._over = error, last
            self._news.notify_all()

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
