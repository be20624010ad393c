"""Ranks that are threads of one process: a transport that needs no process group.

Sends are rendezvous (they are through when the peer has received), and a receive of
another size than the message is an error, so a program that works here relies on no
buffering and on no backend's leniency.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import PeerLost, TransferError, TransferTimeout
from .transport_protocol import Capabilities

_REDUCE: dict[Any, Callable[[Tensor, int], Tensor]] = {
    dist.ReduceOp.SUM: lambda x, n: x.sum(0),
    dist.ReduceOp.AVG: lambda x, n: x.sum(0) / n,
    dist.ReduceOp.PRODUCT: lambda x, n: x.prod(0),
    dist.ReduceOp.MIN: lambda x, n: x.amin(0),
    dist.ReduceOp.MAX: lambda x, n: x.amax(0),
}


class _Half:
    """One end of a message: it waits for the other."""

    __slots__ = ("_group", "_rank", "done", "error", "peer", "tensor")

    def __init__(self, group: LoopbackGroup, tensor: Tensor, rank: int, peer: int) -> None:
        self._group = group
        self._rank = rank
        self.tensor = tensor
        self.peer = peer
        self.done = False
        self.error: Exception | None = None

    def wait(self, timeout: float | None = None) -> None:
        group = self._group
        end = time.monotonic() + (group.timeout if timeout is None else timeout)
        with group.changed:
            while not self.done:
                group.check(self._rank, self.peer)
                left = end - time.monotonic()
                if left <= 0:
                    group.given_up.add(self._rank)
                    group.changed.notify_all()
                    raise TransferTimeout(f"nothing from rank {self.peer}")
                group.changed.wait(left)
        if self.error is not None:
            raise self.error


class LoopbackGroup:
    """A group whose ranks are threads.

    As with gloo, a rank whose wait for a message times out loses its connections to all others.

    Args:
        size: number of ranks.
        timeout: seconds after which a wait without its own timeout gives up.

    >>> group = LoopbackGroup(2)
    >>> def main(transport):
    ...     x = torch.full((2,), float(transport.rank))
    ...     if transport.rank == 0:
    ...         transport.isend(x, 1, tag=0).wait()
    ...     else:
    ...         transport.irecv(x, 0, tag=0).wait()
    ...     return x.tolist()
    >>> group.run(main)
    [[0.0, 0.0], [0.0, 0.0]]
    """

    def __init__(self, size: int, timeout: float = 30.0) -> None:
        self.size = size
        self.timeout = timeout
        self.changed = threading.Condition()
        self.lost: set[int] = set()
        self.given_up: set[int] = set()
        self._sends: dict[tuple[int, int, int], deque[_Half]] = {}
        self._recvs: dict[tuple[int, int, int], deque[_Half]] = {}
        self._meetings: dict[tuple[str, frozenset[int]], list[LoopbackGroup]] = {}
        self._rounds: dict[int, dict[int, Tensor]] = {}
        self._turn = [0] * size

    def transport(self, rank: int) -> LoopbackTransport:
        """The transport of one rank."""
        return LoopbackTransport(self, rank)

    def run(self, main: Callable[..., Any], *args: Any) -> list[Any]:
        """Call ``main(transport, *args)`` on every rank, each in its thread.

        Returns:
            What each rank returned, by rank.

        Raises:
            Exception: that of a failing rank; one that waited in vain for another comes last.
        """
        with ThreadPoolExecutor(self.size) as pool:
            futures = [pool.submit(main, self.transport(r), *args) for r in range(self.size)]
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            raise min(errors, key=lambda error: isinstance(error, (PeerLost, TransferTimeout)))
        return [future.result() for future in futures]

    def lose(self, rank: int) -> None:
        """Let a rank die: whoever waits for it gets `PeerLost`."""
        with self.changed:
            self.lost.add(rank)
            self.changed.notify_all()

    def rejoin(self, key: str, rank: int, peer: int, timeout: float) -> LoopbackGroup:
        """Wait for the peer to call it too; returns a new group, the same on both ends."""
        meeting = key, frozenset((rank, peer))
        end = time.monotonic() + timeout
        with self.changed:
            found = self._meetings.pop(meeting, None)
            if found is not None:
                fresh = LoopbackGroup(self.size, self.timeout)
                fresh.changed, fresh.lost = self.changed, self.lost
                found.append(fresh)
                self.changed.notify_all()
                return fresh
            found = self._meetings[meeting] = []
            while not found:
                left = end - time.monotonic()
                if peer in self.lost or left <= 0:
                    del self._meetings[meeting]
                    if left > 0:
                        raise PeerLost(f"rank {peer} is gone")
                    raise TransferTimeout("the other end has not called it")
                self.changed.wait(left)
            return found[0]

    def why_apart(self, rank: int, peer: int) -> str:
        """Why two ranks are not connected any more, empty if they are."""
        if peer in self.lost:
            return "is gone"
        gave_up = [one for one in (rank, peer) if one in self.given_up and rank != peer]
        return f"is cut off: rank {gave_up[0]} gave up a message" if gave_up else ""

    def check(self, rank: int, peer: int) -> None:
        """Raise PeerLost if two ranks are not connected any more."""
        reason = self.why_apart(rank, peer)
        if reason:
            raise PeerLost(f"rank {peer} {reason}")

    def meet(self, key: tuple[int, int, int], half: _Half, *, sending: bool) -> None:
        """Bring one half of a message together with the other, if that is there."""
        mine, theirs = (self._sends, self._recvs) if sending else (self._recvs, self._sends)
        with self.changed:
            self.check(*(key[:2] if sending else key[1::-1]))
            waiting = theirs.get(key)
            if not waiting:
                mine.setdefault(key, deque()).append(half)
                return
            other = waiting.popleft()
            src, dst = (half, other) if sending else (other, half)
            a, b = src.tensor.detach(), dst.tensor.detach()
            if a.numel() * a.element_size() != b.numel() * b.element_size():
                error = TransferError(
                    f"a message of {a.numel() * a.element_size()} bytes met a receive of "
                    f"{b.numel() * b.element_size()}"
                )
                src.error = dst.error = error
            elif a.numel():
                with torch.inference_mode():  # memory of the user may have been made in it
                    b.view(-1).view(torch.uint8).copy_(a.view(-1).view(torch.uint8))
            src.done = dst.done = True
            self.changed.notify_all()

    def gather(self, rank: int, tensor: Tensor) -> list[Tensor]:
        """The tensors of all ranks for their next collective."""
        with self.changed:
            turn = self._turn[rank]
            self._turn[rank] += 1
            round_ = self._rounds.setdefault(turn, {})
            round_[rank] = tensor.detach().clone()
            self.changed.notify_all()
            end = time.monotonic() + self.timeout
            while len(round_) < self.size:
                missing = set(range(self.size)) - round_.keys()
                if missing & self.lost:
                    raise PeerLost(f"rank {min(missing & self.lost)} is gone")
                left = end - time.monotonic()
                if left <= 0:
                    raise TransferTimeout(f"nothing from ranks {sorted(missing)}")
                self.changed.wait(left)
            return [round_[r] for r in range(self.size)]


class _Done:
    """A collective of the loop-back group is through when it was started."""

    def wait(self, timeout: float | None = None) -> None:
        return None


class LoopbackTransport:
    """The view that one rank has of a `LoopbackGroup`."""

    def __init__(self, group: LoopbackGroup, rank: int) -> None:
        self._group = group
        self._rank = rank

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._group.size

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(exact_counts=True)

    def isend(self, tensor: Tensor, dst: int, tag: int, *, control: bool = False) -> _Half:
        half = _Half(self._group, tensor, self._rank, dst)
        self._group.meet((self._rank, dst, tag), half, sending=True)
        return half

    def irecv(self, tensor: Tensor, src: int, tag: int, *, control: bool = False) -> _Half:
        half = _Half(self._group, tensor, self._rank, src)
        self._group.meet((src, self._rank, tag), half, sending=False)
        return half

    def broadcast(self, tensor: Tensor, src: int, *, control: bool = False) -> _Done:
        sent = self._group.gather(self._rank, tensor)[src]
        if src != self._rank:  # what is sent is not written
            tensor.detach().copy_(sent)
        return _Done()

    def all_gather(self, out: Sequence[Tensor], tensor: Tensor, *, control: bool = False) -> _Done:
        for target, value in zip(out, self._group.gather(self._rank, tensor)):
            target.detach().copy_(value)
        return _Done()

    def all_reduce(self, tensor: Tensor, op: Any) -> _Done:
        values = torch.stack(self._group.gather(self._rank, tensor))
        tensor.detach().copy_(_REDUCE[op](values, self.size))
        return _Done()

    def reduce(self, tensor: Tensor, dst: int, op: Any) -> _Done:
        values = torch.stack(self._group.gather(self._rank, tensor))
        if self._rank == dst:
            tensor.detach().copy_(_REDUCE[op](values, self.size))
        return _Done()

    def lost(self, ranks: Iterable[int]) -> dict[int, str]:
        """The ranks that `LoopbackGroup.lose` was called with, and those of a wait given up."""
        reasons = {rank: self._group.why_apart(self._rank, rank) for rank in ranks}
        return {rank: reason for rank, reason in reasons.items() if reason}

    def reconnect(self, peer: int, key: str, timeout: float | None = None) -> LoopbackTransport:
        """New connections to a rank that calls it too, see `TorchTransport.reconnect`."""
        group = self._group
        limit = group.timeout if timeout is None else timeout
        return LoopbackTransport(group.rejoin(key, self._rank, peer, limit), self._rank)

    def name_of(self, rank: int) -> str:
        """``rank n``."""
        return f"rank {rank}"
