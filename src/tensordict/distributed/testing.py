"""A kit for testing programs that exchange: real ranks, ranks in threads, faults, counts.

>>> import torch
>>> from tensordict import TensorDict
>>> from tensordict.distributed import recv, send
>>> from tensordict.distributed.testing import CountingTransport, LoopbackGroup
>>> def main(transport):
...     counting = CountingTransport(transport)
...     if transport.rank == 0:
...         send(TensorDict({"a": torch.zeros(3)}), 1, transport=counting)
...     else:
...         recv(0, transport=counting)
...     return counting.sent_messages
>>> LoopbackGroup(2).run(main)
[1, 1]
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .golden import golden_reshard, simulate_reshard
from .loopback import LoopbackGroup, LoopbackTransport
from .ranks import RankFailed, close_pools, run_ranks
from .transport_protocol import Capabilities, Transport, Work, reconnected

__all__ = [
    "CountingTransport",
    "Fault",
    "FaultyTransport",
    "LoopbackGroup",
    "LoopbackTransport",
    "Message",
    "RankFailed",
    "close_pools",
    "golden_reshard",
    "run_ranks",
    "simulate_reshard",
]


@dataclass(frozen=True, slots=True)
class Message:
    """One message that a transport was asked to send or receive.

    Attributes:
        verb: ``"send"``, ``"recv"`` or the name of a collective.
        peer: the other rank; the source of a broadcast, the destination of a reduce, else -1.
        tag: the tag, -1 for collectives.
        nbytes: bytes of the tensor given.
        control: whether it is a frame, an answer or a schema.
    """

    verb: str
    peer: int
    tag: int
    nbytes: int
    control: bool


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


class _Wrapper:
    """Passes everything on to another transport."""

    def __init__(self, inner: Transport) -> None:
        self.inner = inner

    @property
    def rank(self) -> int:
        return self.inner.rank

    @property
    def size(self) -> int:
        return self.inner.size

    @property
    def capabilities(self) -> Capabilities:
        return self.inner.capabilities

    def lost(self, ranks: Iterable[int]) -> dict[int, str]:
        return self.inner.lost(ranks)

    def name_of(self, rank: int) -> str:
        return self.inner.name_of(rank)

    def reconnect(self, peer: int, key: str, timeout: float | None = None) -> Transport:
        """New connections of the inner transport, wrapped alike."""
        again = copy.copy(self)
        again.inner = reconnected(self.inner, peer, key, timeout)
        return again

    def isend(self, tensor: Tensor, dst: int, tag: int, *, control: bool = False) -> Work:
        return self.inner.isend(tensor, dst, tag, control=control)

    def irecv(self, tensor: Tensor, src: int, tag: int, *, control: bool = False) -> Work:
        return self.inner.irecv(tensor, src, tag, control=control)

    def broadcast(self, tensor: Tensor, src: int, *, control: bool = False) -> Work:
        return self.inner.broadcast(tensor, src, control=control)

    def all_gather(self, out: Sequence[Tensor], tensor: Tensor, *, control: bool = False) -> Work:
        return self.inner.all_gather(out, tensor, control=control)

    def all_reduce(self, tensor: Tensor, op: Any) -> Work:
        return self.inner.all_reduce(tensor, op)

    def reduce(self, tensor: Tensor, dst: int, op: Any) -> Work:
        return self.inner.reduce(tensor, dst, op)


class CountingTransport(_Wrapper):
    """Writes down every message.

    Attributes:
        messages: what was asked for, in order.
    """

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self.messages: list[Message] = []

    @property
    def sent_messages(self) -> int:
        """Number of point-to-point messages sent."""
        return sum(m.verb == "send" for m in self.messages)

    @property
    def sent_nbytes(self) -> int:
        """Bytes of the point-to-point messages sent."""
        return sum(m.nbytes for m in self.messages if m.verb == "send")

    @property
    def n_collectives(self) -> int:
        """Number of collectives taken part in."""
        return sum(m.tag == -1 for m in self.messages)

    def reset(self) -> None:
        """Forget what was counted."""
        self.messages.clear()

    def _note(self, verb: str, peer: int, tag: int, tensor: Tensor, control: bool) -> None:
        self.messages.append(Message(verb, peer, tag, _nbytes(tensor), control))

    def isend(self, tensor: Tensor, dst: int, tag: int, *, control: bool = False) -> Work:
        self._note("send", dst, tag, tensor, control)
        return super().isend(tensor, dst, tag, control=control)

    def irecv(self, tensor: Tensor, src: int, tag: int, *, control: bool = False) -> Work:
        self._note("recv", src, tag, tensor, control)
        return super().irecv(tensor, src, tag, control=control)

    def broadcast(self, tensor: Tensor, src: int, *, control: bool = False) -> Work:
        self._note("broadcast", src, -1, tensor, control)
        return super().broadcast(tensor, src, control=control)

    def all_gather(self, out: Sequence[Tensor], tensor: Tensor, *, control: bool = False) -> Work:
        self._note("all_gather", -1, -1, tensor, control)
        return super().all_gather(out, tensor, control=control)

    def all_reduce(self, tensor: Tensor, op: Any) -> Work:
        self._note("all_reduce", -1, -1, tensor, False)
        return super().all_reduce(tensor, op)

    def reduce(self, tensor: Tensor, dst: int, op: Any) -> Work:
        self._note("reduce", dst, -1, tensor, False)
        return super().reduce(tensor, dst, op)


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong with the n-th message that a rank sends.

    Attributes:
        at: index of the message among those sent point to point, from 0.
        kind: ``"drop"`` (it never leaves), ``"delay"`` (it leaves ``seconds`` later),
            ``"change"`` (``change`` is applied to its bytes), or ``"call"`` (``call`` is
            called first: to kill the process, say).
        seconds: of a delay.
        change: gets the bytes as a uint8 tensor of its own, and returns others.
        call: what to call.
    """

    at: int
    kind: str
    seconds: float = 0.0
    change: Callable[[Tensor], Tensor] | None = None
    call: Callable[[], Any] | None = None


class _Dropped:
    """A message that never leaves looks, to its sender, as if it had."""

    def wait(self, timeout: float | None = None) -> None:
        return None


class FaultyTransport(_Wrapper):
    """Lets chosen messages go wrong on their way out.

    Args:
        inner: what carries the others.
        *faults: what goes wrong.

    >>> group = LoopbackGroup(2, timeout=0.1)
    >>> faulty = FaultyTransport(group.transport(0), Fault(at=0, kind="drop"))
    >>> faulty.isend(torch.zeros(2), 1, tag=0).wait()
    """

    def __init__(self, inner: Transport, *faults: Fault) -> None:
        super().__init__(inner)
        self.faults = {fault.at: fault for fault in faults}
        self.sent = 0
        self._lock = threading.Lock()

    def isend(self, tensor: Tensor, dst: int, tag: int, *, control: bool = False) -> Work:
        with self._lock:
            fault = self.faults.get(self.sent)
            self.sent += 1
        if fault is None:
            return super().isend(tensor, dst, tag, control=control)
        if fault.kind == "drop":
            return _Dropped()
        if fault.kind == "delay":
            time.sleep(fault.seconds)
        elif fault.kind == "call":
            assert fault.call is not None
            fault.call()
        elif fault.kind == "change":
            assert fault.change is not None
            raw = tensor.detach().reshape(-1).view(torch.uint8).clone()
            tensor = fault.change(raw)
        else:
            raise ValueError(f"There is no fault {fault.kind!r}.")
        return super().isend(tensor, dst, tag, control=control)
