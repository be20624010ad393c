"""New gloo connections between two ranks of a group, beside those that a timeout has closed.

The two find each other through the store of the group; no other rank takes part.  Each attempt
has a name of its own, and an end goes on only when it knows the name of the other's attempt and
the other knows its own: what is left of an attempt that came to nothing is never taken for one.
"""

from __future__ import annotations

import secrets
import time
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

from ..errors import PeerLost, TransferTimeout

_LONGEST_PAUSE: Final = 0.05
# Seconds for the connections, once both ends are known to be there.
_LEAST_S: Final = 0.1
_LONGEST_TRY: Final = 5.0


def connect_pair(store: Any, key: str, me: int, peer: int, timeout: float) -> Any:
    """A gloo group of two ranks, of which the one with the lower number is its rank 0.

    Args:
        store: of the group that both are in.
        key: what the connections are for; the same on both ends.
        me, peer: numbers of the two ranks in the group.
        timeout: seconds.

    Raises:
        TransferTimeout: the peer did not ask for it in time.
        PeerLost: the process that keeps the store is gone.
    """
    end = time.monotonic() + timeout
    while True:
        mine = secrets.token_hex(8)
        try:
            theirs = _meet(store, key, me, peer, mine, end)
        except TransferTimeout:
            raise
        except RuntimeError as error:
            text = f"the store of the process group is gone: {str(error).splitlines()[0]}"
            raise PeerLost(text) from None
        left = max(end - time.monotonic(), _LEAST_S)
        names = (mine, theirs) if me < peer else (theirs, mine)
        prefix = torch._C._distributed_c10d.PrefixStore(f"{key}/{'.'.join(names)}", store)
        try:
            limit = timedelta(seconds=min(left, _LONGEST_TRY))
            return dist.ProcessGroupGloo(prefix, int(me > peer), 2, limit)
        except RuntimeError as error:  # the peer gave up in between: it may come again
            if time.monotonic() >= end:
                text = f"the connections were not made in time: {str(error).splitlines()[0]}"
                raise TransferTimeout(text) from None


def _meet(store: Any, key: str, me: int, peer: int, mine: str, end: float) -> str:
    """Wait until both ends know of each other's attempt; returns the name of the peer's."""
    seen, pause = "", 1e-3
    store.set(f"{key}/{me}", f"{mine} ")
    while True:
        if store.check([f"{key}/{peer}"]):
            theirs, _, known = store.get(f"{key}/{peer}").decode().partition(" ")
            if theirs != seen:
                seen = theirs
                store.set(f"{key}/{me}", f"{mine} {seen}")
            if known == mine:
                return seen
        left = end - time.monotonic()
        if left <= 0:
            raise TransferTimeout("the other end has not called it")
        time.sleep(min(pause, left))
        pause = min(1.5 * pause, _LONGEST_PAUSE)
