"""`TorchTransport`: messages and collectives over a ``torch.distributed`` process group.

`loopback` has a transport for threads of a single process, `staged` one for backends that carry
tensors of a device only, and `testing` has those that count messages or fail on purpose.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from numbers import Real
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import PeerLost, TransferError
from .pair import connect_pair
from .staged import StagedTransport
from .torch_work import CLOSES_ALL, CollectiveWork, TorchWork, translate
from .transport_protocol import Capabilities, Transport, Work, reconnected

MAX_TAG: Final = (1 << 28) - 1
# Nobody sends on this tag, which lies beyond all bands of tags that users' tags have.
_PROBE_TAG: Final = 3 << 28


class TorchTransport:
    """Messages over a process group; one for each group, made by `of`, the default one too.

    Args:
        group: a process group; not None (see `of`).  With a backend that has no tags or cannot send bytes of
            the host (nccl), frames and answers go over ``side``.
        side: a gloo group with the same ranks, for frames and answers.
    """

    def __init__(self, group: Any, side: Any = None) -> None:
        group = resolve_group(group)
        # Weak: a group that is destroyed must close its connections, whatever we remember.
        self._group_ref = weakref.ref(group)
        self._side_ref = weakref.ref(group if side is None else side)
        self._rank = dist.get_rank(group)
        self._size = dist.get_world_size(group)
        devices = frozenset(d.type for d in group._device_types)
        self._capabilities = Capabilities(
            devices=devices,
            exact_counts=side is not None,
            side_channel=side is not None,
            tags=side is None,
        )
        self._lost: dict[int, str] = {}
        self._given_up: tuple[int, int, float] | None = None
        self._left_behind = ""  # the collective that was given up, and why
        self._limit: float | None = None  # of a wait, if not that of the group

    @staticmethod
    def of(group: Any = None) -> Transport:
        """The transport of a group, a `DeviceMesh` of one dimension, or the default group.

        A group that carries tensors of a device only is wrapped in a `StagedTransport`.

        Raises:
            TransferError: ``torch.distributed`` is not initialised, this rank is not part of
                the group, or the group carries no host memory and has no side group.
        """
        group = resolve_group(group)
        found = _transports.get(group)
        if found is None:
            found = _transports[group] = _transport_for(group)
        return found

    def _channel(self, control: bool) -> Any:
        group = self._side_ref() if control else self._group_ref()
        if group is None:
            raise TransferError("Cannot exchange over a process group that was destroyed.")
        if self._given_up is not None:
            raise PeerLost(self._why())
        return group

    def _give_up(self, peer: int, tag: int) -> None:
        """Note that a wait timed out: gloo has closed the connections to all ranks."""
        if self._given_up is None:
            self._given_up = peer, tag % (MAX_TAG + 1), time.monotonic()

    def _why(self) -> str:
        assert self._given_up is not None
        peer, tag, then = self._given_up
        return (
            f"{self.name_of(self.rank)} gave up waiting for {self.name_of(peer)} on tag {tag} "
            f"{time.monotonic() - then:.1f} s ago, {CLOSES_ALL}"
        )

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    def isend(self, tensor: Tensor, dst: int, tag: int, *, control: bool = False) -> TorchWork:
        group = self._channel(control)
        try:
            work = group.send([tensor], dst, tag)
        except RuntimeError as error:
            raise translate(error) from None
        return TorchWork(work, tensor, partial(self._give_up, dst, tag), self._limit)

    def irecv(self, tensor: Tensor, src: int, tag: int, *, control: bool = False) -> TorchWork:
        group = self._channel(control)
        try:
            work = group.recv([tensor], src, tag)
        except RuntimeError as error:
            raise translate(error) from None
        return TorchWork(work, tensor, partial(self._give_up, src, tag), self._limit)

    def broadcast(self, tensor: Tensor, src: int, *, control: bool = False) -> Work:
        group = self._channel(control)
        return self._started(
            lambda: dist.broadcast(tensor, group=group, group_src=src, async_op=True),
            group,
            tensor,
        )

    def all_gather(self, out: Sequence[Tensor], tensor: Tensor, *, control: bool = False) -> Work:
        group = self._channel(control)
        # As in isend, without what torch.distributed checks again for each message.
        options = torch._C._distributed_c10d.AllgatherOptions()
        options.asyncOp = True
        return self._started(
            lambda: group.allgather([list(out)], [tensor], options), group, tensor, *out
        )

    def all_reduce(self, tensor: Tensor, op: Any) -> Work:
        group = self._channel(False)
        options = dist.AllreduceOptions()
        options.reduceOp = op
        options.asyncOp = True
        return self._started(lambda: group.allreduce([tensor], options), group, tensor)

    def reduce(self, tensor: Tensor, dst: int, op: Any) -> Work:
        group = self._channel(False)
        return self._started(
            lambda: dist.reduce(tensor, group_dst=dst, op=op, group=group, async_op=True),
            group,
            tensor,
        )

    def _started(self, start: Callable[[], Any], group: Any, *tensors: Tensor) -> Work:
        if self._left_behind:
            # What it still sends could meet the messages of this one, which are of other sizes:
            # gloo ends the process of whoever receives them.
            raise PeerLost(
                f"{self.name_of(self._rank)} gave up a collective of this group before "
                f"({self._left_behind}), and its messages may still come. Make a new group for "
                "further collectives."
            )
        try:
            work = start()
        except RuntimeError as error:
            raise translate(error) from None
        if tensors[0].device.type == "cpu":
            return CollectiveWork(
                work, tensors, transport=self, group=group, gave_up=self._leave_behind
            )
        return TorchWork(work, tensors)

    def _leave_behind(self, reason: str) -> None:
        """Note that a collective was given up, which goes on in gloo's thread."""
        self._left_behind = reason

    def lost(self, ranks: Iterable[int]) -> dict[int, str]:
        """The ranks whose connection to this one was closed.

        gloo notices that at once, and tells those whose message has not begun, but not those
        who wait for the rest of one.  It also tells whoever posts the next message: a receive of
        what nobody sends costs some 10 us, and 70 bytes that gloo keeps.
        """
        ranks = [rank for rank in ranks if rank != self._rank]
        if self._given_up is not None:
            return dict.fromkeys(ranks, self._why())
        group = self._channel(True)
        for rank in ranks:
            if rank not in self._lost:
                try:
                    group.recv([torch.empty(1, dtype=torch.uint8)], rank, _PROBE_TAG)
                except RuntimeError as error:
                    self._lost[rank] = str(translate(error))
        return {rank: self._lost[rank] for rank in ranks if rank in self._lost}

    def reconnect(self, peer: int, key: str, timeout: float | None = None) -> Transport:
        """New connections to one rank, which calls it too; no other rank takes part.

        Args:
            peer: the rank.
            key: what they are for; the same on both ends.
            timeout: seconds; that of the group by default.

        Returns:
            A transport to that rank alone, with the numbers of this one and over host memory.
            Its connections are closed when nobody holds it any more.

        Raises:
            TransferTimeout: the peer did not call it in time.
            PeerLost: the process that keeps the group's store is gone.
        """
        group = self._side_ref()
        if group is None:
            raise TransferError("Cannot connect ranks of a process group that was destroyed.")
        store = group.get_group_store()
        limit: float = store.timeout.total_seconds()
        pair = connect_pair(
            store, f"tensordict/{key}", self.rank, peer, limit if timeout is None else timeout
        )
        return PairTransport(self, pair, peer, limit)

    def name_of(self, rank: int) -> str:
        """The rank in the world, and in the group where the two differ."""
        group = self._group_ref()
        if group is None or group is dist.group.WORLD:
            return f"rank {rank}"
        world = dist.get_global_rank(group, rank)
        return f"rank {world}" if world == rank else f"rank {world} (rank {rank} of the group)"


class _Pair:
    """A process group of two, in which the peer is asked for by another number."""

    __slots__ = ("_group", "_peer", "_place")

    def __init__(self, group: Any, peer: int, place: int) -> None:
        self._group = group
        self._peer = peer
        self._place = place

    def _check(self, rank: int) -> None:
        if rank != self._peer:
            raise TransferError(
                f"Cannot exchange with rank {rank} of the group over connections to rank "
                f"{self._peer} alone."
            )

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> Any:
        self._check(dst)
        return self._group.send(tensors, self._place, tag)

    def recv(self, tensors: list[Tensor], src: int, tag: int) -> Any:
        self._check(src)
        return self._group.recv(tensors, self._place, tag)


class PairTransport(TorchTransport):
    """Connections of two ranks of a group beside those of the group; see `reconnect`.

    Args:
        base: the transport of the group, whose numbers and names hold here.
        pair: a gloo group of this rank and the peer, in their order; kept by nobody else.
        peer: the other rank.
        limit: seconds of a wait without a timeout.
    """

    def __init__(self, base: Transport, pair: Any, peer: int, limit: float) -> None:
        self._base = base
        self._pair = _Pair(pair, peer, int(peer > base.rank))
        self._rank = base.rank
        self._size = base.size
        self._capabilities = Capabilities()
        self._lost: dict[int, str] = {}
        self._given_up: tuple[int, int, float] | None = None
        self._limit: float | None = limit

    def _channel(self, control: bool) -> Any:
        if self._given_up is not None:
            raise PeerLost(self._why())
        return self._pair

    def _started(self, start: Callable[[], Any], group: Any, *tensors: Tensor) -> Work:
        raise TransferError("Cannot run a collective over the connections of two ranks.")

    def reconnect(self, peer: int, key: str, timeout: float | None = None) -> Transport:
        """As the transport of the group."""
        return reconnected(self._base, peer, key, timeout)

    def name_of(self, rank: int) -> str:
        """As the transport of the group."""
        return self._base.name_of(rank)


def _transport_for(group: Any) -> Transport:
    side = _sides.get(group)
    transport = TorchTransport(group, side)
    devices = transport.capabilities.devices
    if "cpu" in devices:
        return transport
    if side is None:
        raise TransferError(
            f"Cannot exchange over a group for {sorted(devices)} tensors only: frames and answers "
            "need a group that carries host memory. Make a gloo group of the same ranks, and call "
            "use_side_group(group, gloo_group) on every rank."
        )
    kind = min(devices)
    return StagedTransport(transport, torch.device(kind, getattr(torch, kind).current_device()))


_transports: weakref.WeakKeyDictionary[Any, Transport] = weakref.WeakKeyDictionary()
_sides: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def resolve_group(group: Any = None) -> Any:
    """The process group that an argument called ``group`` means.

    Args:
        group: ``None`` (the default group), a process group, or a `DeviceMesh` with one
            dimension (take an axis of a larger one with ``mesh["axis"]``).
    """
    if not dist.is_available() or not dist.is_initialized():
        raise TransferError(
            "Cannot exchange between ranks: torch.distributed is not initialised. "
            "Call torch.distributed.init_process_group first."
        )
    if group is None:
        return dist.group.WORLD
    if hasattr(group, "get_group") and hasattr(group, "mesh_dim_names"):
        if group.ndim != 1:
            raise TransferError(
                f"Cannot exchange over a mesh of {group.ndim} dimensions. Expected one: "
                'name an axis, as in mesh["axis"].'
            )
        return group.get_group()
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise TransferError("Cannot exchange over a group that this rank is not part of.")
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"Cannot exchange over a {type(group).__name__}. Expected a process group, a device "
            "mesh of one dimension, or None."
        )
    return group


def use_side_group(group: Any, side: Any) -> None:
    """Send the frames and answers of ``group`` over the gloo group ``side``.

    Both groups have the same ranks in the same order.  Needed for nccl, which carries
    device tensors only; every rank calls it, once, before the first exchange.
    """
    group = resolve_group(group)
    _sides[group] = resolve_group(side)
    _transports.pop(group, None)


def group_rank(transport: Transport, group: Any, world: int | None, local: int | None) -> int:
    """The rank in the group of a peer named by its world rank or its group rank.

    Raises:
        ValueError: when both or neither are given, or the rank is not in the group.
    """
    if (world is None) == (local is None):
        raise ValueError(
            "Cannot tell the peer. Expected either a rank of the world (src, dst) or a rank "
            "of the group (group_src, group_dst), and not both."
        )
    for rank in (world, local):
        if rank is not None and not hasattr(rank, "__index__"):
            raise TypeError(f"Cannot exchange with rank {rank!r}. Expected an int.")
    if local is None:
        assert world is not None
        local = world
        if group is not None:
            try:
                local = dist.get_group_rank(resolve_group(group), world)
            except (ValueError, RuntimeError):
                local = -1
    if not 0 <= local < transport.size:
        raise ValueError(
            f"Cannot exchange with rank {world if world is not None else local}: it is not one "
            f"of the {transport.size} ranks of the group."
        )
    return local


def check_timeout(timeout: Any) -> None:
    """Refuse what is no number of seconds.

    Raises:
        TypeError: it is no number, and not None.
        ValueError: it is negative, or not a number in the sense of IEEE.
    """
    if timeout is None:
        return
    if isinstance(timeout, bool) or not isinstance(timeout, Real):
        raise TypeError(f"Cannot wait for timeout={timeout!r}. Expected seconds, or None.")
    if not float(timeout) >= 0:
        raise ValueError(f"Cannot wait for timeout={timeout!r} seconds. Expected 0 or more.")


def bytes_tensor(data: bytearray) -> Tensor:
    """The bytes as a uint8 tensor that shares their memory."""
    if not data:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(data, dtype=torch.uint8)
