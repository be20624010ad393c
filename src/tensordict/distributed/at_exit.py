"""Let gloo's threads drop what they hold before the interpreter closes.

A gloo thread that ran a collective drops its reference to the tensors *after* it has reported
the end, and needs the interpreter lock for the Python side of them. A rank that exits in between
is killed: the closing interpreter ends the thread from inside a C++ destructor, which is
``terminate called without an active exception`` and exit status -6 of a rank that had done all
its work (seen with torch 2.13, about one exit in a hundred after ``DTensor.full_tensor()``, where
the device mesh keeps the group and its threads alive beyond ``destroy_process_group``). So the
last thing before the close is to hand out the lock for a moment, if there are such threads.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Final

GLOO_THREAD: Final = "pt_gloo_runloop"
TASKS: Final = "/proc/self/task"
GRACE_S: Final = 0.05  # a waiting thread needs microseconds; on a crowded machine, its turn first

_ours: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def in_background(run: Callable[[], Any], name: str) -> threading.Thread:
    """Start a thread that does not keep the process, but that its end waits for a moment."""
    thread = threading.Thread(target=run, name=name, daemon=True)
    _ours.add(thread)
    thread.start()
    return thread


def has_gloo_threads() -> bool:
    """Say whether this process has threads that run gloo collectives (Linux; elsewhere False)."""
    try:
        tasks = os.listdir(TASKS)
    except OSError:
        return False
    return any(_name(task) == GLOO_THREAD for task in tasks)


def _name(task: str) -> str:
    try:
        with open(f"{TASKS}/{task}/comm") as file:
            return file.read().strip()
    except OSError:  # ended since
        return ""


@atexit.register
def let_threads_finish() -> None:
    """Release the interpreter lock for up to 50 ms if threads may be waiting for it."""
    if has_gloo_threads():
        time.sleep(GRACE_S)
        return
    end = time.monotonic() + GRACE_S
    for thread in list(_ours):
        thread.join(max(0.0, end - time.monotonic()))
