"""What an exchange needs from the world: numbered ranks, tagged messages, collectives.

`Transport` is the protocol.  Ranks are ranks *in the group*.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from ..errors import TransferError


@runtime_checkable
class Work(Protocol):
    """A message under way."""

    def wait(self, timeout: float | None = None) -> None:
        """Return when the message is through.

        Args:
            timeout: seconds; ``None`` is the transport's own timeout.

        Raises:
            TransferTimeout: nothing happened for that long.
            PeerLost: the peer is gone.
        """
        ...


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a transport can carry.

    Attributes:
        devices: device types whose tensors it can send as they are.
        exact_counts: whether both ends of a payload message must have equal sizes.
        side_channel: whether frames and answers travel apart from payloads.
        tags: whether payloads of one pair of ranks are told apart by tags; without them one
            exchange at a time is under way.
    """

    devices: frozenset[str] = frozenset({"cpu"})
    exact_counts: bool = False
    side_channel: bool = False
    tags: bool = True


class Transport(Protocol):
    """Point-to-point messages and the collectives that are built on here.

    Tensors are contiguous.  Messages of one (source, destination, tag) arrive in order.
    ``control`` marks frames, answers and schemas (always CPU bytes), which a transport
    may carry on another channel than payloads.  One that can connect two ranks anew has a method
    ``reconnect`` besides, as `TorchTransport` has: `Channel.reset` needs it.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def capabilities(self) -> Capabilities: ...

    def isend(self, tensor: Tensor, dst: int, tag: int, *, control: bool = False) -> Work: ...

    def irecv(self, tensor: Tensor, src: int, tag: int, *, control: bool = False) -> Work: ...

    def broadcast(self, tensor: Tensor, src: int, *, control: bool = False) -> Work: ...

    def all_gather(
        self, out: Sequence[Tensor], tensor: Tensor, *, control: bool = False
    ) -> Work: ...

    def all_reduce(self, tensor: Tensor, op: Any) -> Work: ...

    def reduce(self, tensor: Tensor, dst: int, op: Any) -> Work: ...

    def lost(self, ranks: Iterable[int]) -> dict[int, str]:
        """Those of some ranks whose connection is known to have ended, with the reason.

        Does not wait.  It is asked while a message takes long, since a backend may leave those
        who wait for the rest of a message asleep.
        """
        ...

    def name_of(self, rank: int) -> str:
        """How errors call a rank of this group."""
        ...


def reconnected(
    transport: Transport, peer: int, key: str, timeout: float | None = None
) -> Transport:
    """New connections to one rank, by a transport that can make them: see `TorchTransport`."""
    make = getattr(transport, "reconnect", None)
    if make is None:
        raise TransferError(
            f"Cannot make new connections: {type(transport).__name__} has no method reconnect. "
            "Make a new transport."
        )
    found: Transport = make(peer, key, timeout)
    return found
