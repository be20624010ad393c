"""Waiting for devices: the only place that synchronises.

One *barrier point* waits for several devices at once: an event is recorded on the stream in use
of every device first, then each is waited for, so the waits overlap.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import torch

from .ops import DeviceEvent, ops_for


class Barrier:
    """Marks on the queues of some devices, to be waited for once.

    Attributes:
        devices: The devices covered.
    """

    __slots__ = ("_events", "_full", "devices")

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self.devices = tuple(dict.fromkeys(devices))
        self._events: list[DeviceEvent] = []
        self._full: list[torch.device] = []
        for device in self.devices:
            if device.type in ("cpu", "meta"):
                continue
            event = ops_for(device).record(device)
            if event is None:
                self._full.append(device)
            else:
                self._events.append(event)

    def wait(self, timeout: float | None = None) -> bool:
        """Block until everything queued before this barrier is done.

        Args:
            timeout: Seconds to wait at most; ``None`` waits for good.  A backend without events
                cannot be asked whether it is done, and is waited for without a limit.

        Returns:
            Whether everything is done.
        """
        if timeout is not None:
            end = time.monotonic() + timeout
            while not all(event.done() for event in self._events):
                if time.monotonic() >= end:
                    return False
                time.sleep(2e-4)
        for event in self._events:
            event.wait()
        for device in self._full:
            ops_for(device).synchronize(device)
        self._events, self._full = [], []
        return True

    def done(self) -> bool:
        """Whether everything queued before this barrier is known to be done."""
        return not self._full and all(event.done() for event in self._events)


def wait_for(devices: Iterable[torch.device]) -> tuple[torch.device, ...]:
    """Wait once for the present work of each of ``devices``; return those waited for.

    >>> wait_for([torch.device("cpu")])
    ()
    """
    barrier = Barrier(device for device in devices if device.type not in ("cpu", "meta"))
    barrier.wait()
    return barrier.devices
