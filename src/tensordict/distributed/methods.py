"""`DistributedMethods`: the exchange as methods of a tensordict, with the names users know."""

from __future__ import annotations

import random
from typing import Any

from ..core.node import Node
from ..core.traverse import leaves
from . import p2p
from .pending import Pending
from .transport import MAX_TAG

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
