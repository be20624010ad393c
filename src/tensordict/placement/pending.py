"""Moves under way: what `MovePlan.start` returns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..device.sync import Barrier
from ..errors import TransferTimeout


class PendingMoves:
    """Asynchronous moves and the way to wait for them.

    Sources stay alive, and must not be written to, until the moves are done.

    Attributes:
        synced: The devices that were waited for, a receipt; empty until then.
    """

    __slots__ = ("_barrier", "_held", "_result", "synced")

    def __init__(self, result: Any, devices: Sequence[torch.device], held: Any) -> None:
        self._result = result
        self._held = held
        self._barrier: Barrier | None = Barrier(devices)
        self.synced: tuple[torch.device, ...] = ()

    @property
    def result(self) -> Any:
        """The moved tree; its values may be read on the host after `wait`."""
        return self._result

    def wait(self, timeout: float | None = None) -> Any:
        """Wait until every copy is done, and return the moved tree.

        Args:
            timeout: Seconds to wait at most.

        Raises:
            TransferTimeout: when the copies are not done by then; waiting again is possible.
        """
        if self._barrier is not None:
            if not self._barrier.wait(timeout):
                devices = ", ".join(str(device) for device in self._barrier.devices)
                raise TransferTimeout(
                    f"The copies on {devices} are not done after {timeout} s. Wait again."
                )
            self.synced = self._barrier.devices
            self._barrier = self._held = None
        return self._result

    def done(self) -> bool:
        """Whether every copy is known to be done."""
        return self._barrier is None or self._barrier.done()
