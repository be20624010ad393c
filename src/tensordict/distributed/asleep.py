"""Which threads wait for a message, and since when.

gloo leaves asleep who waits for the rest of a message from a rank that died.  A thread that
waits on behalf of others can be left to itself then, by those others; but not while it works on
what has arrived.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Final

# Seconds in which a thread hears of what has arrived, once the connection has ended.
GRACE_S: Final = 1.0

_since: dict[int, float] = {}


def waiting(wait: Callable[[float | None], Any], timeout: float | None) -> None:
    """Call ``wait(timeout)``, and let other threads see that this one is in it."""
    me = threading.get_ident()
    _since[me] = time.monotonic()
    try:
        wait(timeout)
    finally:
        del _since[me]


def sleeps_on(thread: threading.Thread) -> bool:
    """Whether a thread still waits for the message for which it has waited for a second.

    To be asked about a thread whose messages cannot come any more.

    >>> sleeps_on(threading.current_thread())
    False
    """
    ident = thread.ident
    before = None if ident is None else _since.get(ident)
    if before is None:
        return False
    thread.join(GRACE_S)
    return thread.is_alive() and ident is not None and _since.get(ident) == before
