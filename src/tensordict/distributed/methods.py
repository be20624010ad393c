"""`DistributedMethods`: the exchange as methods of a tensordict, with the names users know."""

from __future__ import annotations

import random
from typing import Any

from ..core.devices import as_device
from ..core.node import Node
from ..core.traverse import leaves
from . import fanout, p2p, protocol, reductions, spreading
from .pending import Pending
from .receive import New
from .transport import MAX_TAG, TorchTransport

# One message for everything, large leaves too: what `consolidated=True` asks for.
_ONE_MESSAGE = 1 << 60


def _tag(init_tag: int, pseudo_rand: bool) -> int:
    if not pseudo_rand:
        return init_tag
    return random.Random(init_tag).randint(0, MAX_TAG)


def _options(consolidated: bool) -> p2p.Options:
    return {"pack_below": _ONE_MESSAGE} if consolidated else {}


class DistributedMethods(Node):
    """Send, receive and reduce a tensordict.

    Both ranks agree on the structure before any payload travels: a mismatch raises the
    same `SchemaMismatch` on both, and changes nothing.
    """

    __slots__ = ()

    def send(
        self,
        dst: int | None = None,
        *,
        group: Any = None,
        group_dst: int | None = None,
        init_tag: int = 0,
        pseudo_rand: bool = False,
        consolidated: bool = False,
    ) -> None:
        """Send to a rank that receives; see `tensordict.distributed.send`.

        Args:
            dst: rank of the receiver in the world.
            group: a process group or a device mesh of one dimension.
            group_dst: rank of the receiver in the group, instead of ``dst``.
            init_tag: pairs this call with the receiver's.
            pseudo_rand: derive the tag from a generator seeded with ``init_tag``.
            consolidated: put everything in one message, large leaves too.
        """
        p2p.send(
            self,
            dst,
            group=group,
            group_dst=group_dst,
            init_tag=_tag(init_tag, pseudo_rand),
            **_options(consolidated),
        )

    def isend(
        self,
        dst: int | None = None,
        *,
        group: Any = None,
        group_dst: int | None = None,
        init_tag: int = 0,
        pseudo_rand: bool = False,
        return_early: bool = False,
        consolidated: bool = False,
    ) -> int | list[Pending[None]]:
        """Send to a rank that receives; ``return_early`` does not wait for it.

        Returns:
            The last tag, ``init_tag`` + number of leaves - 1; with ``return_early`` the list
            of handles to wait on.
        """
        tag = _tag(init_tag, pseudo_rand)
        start = p2p.isend if return_early else p2p.send
        pending = start(
            self, dst, group=group, group_dst=group_dst, init_tag=tag, **_options(consolidated)
        )
        if pending is not None:
            return [pending]
        return tag + len(leaves(self)) - 1

    def recv(
        self,
        src: int | None = None,
        *,
        group: Any = None,
        group_src: int | None = None,
        init_tag: int = 0,
        pseudo_rand: bool = False,
        consolidated: bool = False,
    ) -> int:
        """Receive into this tensordict, in place; see `tensordict.distributed.recv`.

        Returns:
            The last tag, ``init_tag`` + number of leaves - 1.
        """
        tag = _tag(init_tag, pseudo_rand)
        p2p.recv(
            src,
            out=self,
            group=group,
            group_src=group_src,
            init_tag=tag,
            **_options(consolidated),
        )
        return tag + len(leaves(self)) - 1

    def irecv(
        self,
        src: int | None = None,
        *,
        group: Any = None,
        group_src: int | None = None,
        return_premature: bool = False,
        init_tag: int = 0,
        pseudo_rand: bool = False,
        consolidated: bool = False,
    ) -> list[Pending[Any]] | None:
        """Receive into this tensordict; ``return_premature`` does not wait for it.

        Returns:
            None; with ``return_premature`` the list of handles to wait on.
        """
        start = p2p.irecv if return_premature else p2p.recv
        pending = start(
            src,
            out=self,
            group=group,
            group_src=group_src,
            init_tag=_tag(init_tag, pseudo_rand),
            **_options(consolidated),
        )
        return [pending] if return_premature else None

    def init_remote(
        self,
        dst: int | None = None,
        group: Any = None,
        device: Any = None,
        use_broadcast: bool = False,
        _tensorclass_type: Any = None,
    ) -> None:
        """Send structure and content to a rank that knows neither (`from_remote_init`).

        Args:
            dst: rank of the receiver in the world.
            group: a process group or a device mesh of one dimension.
            device: move the leaves there before they are sent.
            use_broadcast: give it to every rank of the group instead of one.
        """
        td = self if device is None else self.to(device)  # type: ignore[attr-defined]
        if use_broadcast:
            rank = TorchTransport.of(group).rank
            spreading.broadcast(td, group=group, group_src=rank)
        else:
            p2p.send(td, dst, group=group)

    @classmethod
    def from_remote_init(
        cls, src: int, group: Any = None, device: Any = None, use_broadcast: bool = False
    ) -> Any:
        """Receive what a rank sends by `init_remote`.

        Args:
            src: rank of the sender in the world.
            group: a process group or a device mesh of one dimension.
            device: where the leaves go.
            use_broadcast: as on the sender.

        Returns:
            A new, unlocked tensordict, not consolidated; its small leaves share one buffer.
        """
        if use_broadcast:
            return spreading.broadcast(None, src, group=group, device=device)
        request = p2p.request_of(group, src, None, 0, {})
        where = None if device is None else as_device(device)
        return protocol.run_recv(request, New(where, locks=False))

    def broadcast(
        self, src: int, *, group: Any = None, device: Any = None, _tensorclass_type: Any = None
    ) -> Any:
        """The tensordict of one rank, returned by every rank; see `tensordict.distributed.broadcast`.

        Args:
            src: rank of the source in the world; the others may hold an empty tensordict.
            group: a process group or a device mesh of one dimension.
            device: where the leaves of received tensordicts go.
        """
        return spreading.broadcast(self, src, group=group, device=device)

    def all_gather(self, *, group: Any = None) -> list[Any]:
        """The tensordicts of all ranks, in rank order; see `tensordict.distributed.all_gather`."""
        return spreading.all_gather(self, group=group)

    def scatter(
        self, src: int, tensordicts: Any = None, *, group: Any = None, device: Any = None
    ) -> Any:
        """The tensordict that the source has for this rank.

        Args:
            src: rank of the source in the world.
            tensordicts: on the source, one per rank.
            group: a process group or a device mesh of one dimension.
            device: where the leaves of received tensordicts go.
        """
        return fanout.scatter(tensordicts, src, group=group, device=device)

    def gather_and_stack(self, dst: int, group: Any = None) -> Any:
        """Write the tensordicts of the other ranks into the rows of this one on ``dst``.

        Returns:
            This tensordict on ``dst``, else None.
        """
        return fanout.gather_and_stack(self, dst, group=group)

    def all_reduce(
        self,
        op: Any = None,
        *,
        group: Any = None,
        async_op: bool = False,
        bucket_bytes: int | None = None,
    ) -> list[Pending[None]] | None:
        """Reduce every leaf in place on every rank; see `tensordict.distributed.all_reduce`.

        Returns:
            None; with ``async_op`` the list of handles to wait on.
        """
        pending = reductions.all_reduce(
            self, op, group=group, async_op=async_op, bucket_bytes=bucket_bytes
        )
        return None if pending is None else [pending]

    def reduce(
        self,
        dst: int,
        op: Any = None,
        async_op: bool = False,
        return_premature: bool = False,
        group: Any = None,
        *,
        bucket_bytes: int | None = None,
    ) -> list[Pending[None]] | None:
        """Reduce every leaf to one rank, in place there; see `tensordict.distributed.reduce`.

        Returns:
            None; with ``async_op`` or ``return_premature`` the list of handles to wait on.
        """
        pending = reductions.reduce(
            self,
            dst,
            op,
            group=group,
            async_op=async_op or return_premature,
            bucket_bytes=bucket_bytes,
        )
        return None if pending is None else [pending]

    async def asend(self, dst: Any) -> None:
        """Send over a pipe, an object with a coroutine method: ``await dst.asend(self)``."""
        await dst.asend(self)

    async def arecv(self, src: Any, *, device: Any = None) -> Any:
        """Receive over a pipe: ``await src.arecv(self, device=device)``.

        Args:
            src: an object with such a coroutine method.
            device: passed on to it.

        Returns:
            What the pipe returns.
        """
        return await src.arecv(self, device=device)
