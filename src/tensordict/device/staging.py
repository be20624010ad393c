"""Reused host buffers for copies to and from accelerators.

Pinning memory costs far more than copying it, so pinned buffers are kept and handed out again.
A buffer that an unfinished copy still reads is not handed out.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch

from ..errors import StagingExhausted
from .ops import accelerator_ops, ops_for
from .sync import Barrier


@dataclass(frozen=True)
class StagingStats:
    """Counters of a `StagingPool`; sizes in bytes.

    Attributes:
        n_allocated: Buffers made.
        n_reused: Requests served by a buffer that was there.
        n_waits: Requests that had to wait for a copy to end.
        held_nbytes: Bytes of all buffers the pool owns now.
        used_nbytes: Bytes of those handed out or still read by a copy.
        peak_nbytes: The largest ``held_nbytes`` so far.
    """

    n_allocated: int
    n_reused: int
    n_waits: int
    held_nbytes: int
    used_nbytes: int
    peak_nbytes: int


class StagingBlock:
    """One buffer of a pool, in use until `release`.

    Attributes:
        data: The bytes, ``uint8`` of shape ``[n]``, with ``n`` at least what was asked for.
    """

    __slots__ = ("_barrier", "_pool", "data")

    def __init__(self, pool: StagingPool, data: torch.Tensor) -> None:
        self._pool = pool
        self._barrier: Barrier | None = None
        self.data = data

    def release(self, barrier: Barrier | None = None) -> None:
        """Give the buffer back; it is handed out again once ``barrier`` is passed."""
        self._pool._give_back(self, barrier)

    def __enter__(self) -> StagingBlock:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()


class StagingPool:
    """A bounded pool of host buffers that are pinned once and used many times.

    Args:
        max_bytes: The most bytes the pool owns at any time.
        pin: Whether the buffers are pinned.  Without an accelerator they are plain memory.
        alignment: Sizes are rounded up to a multiple of this, in bytes.

    Raises:
        ValueError: when ``max_bytes`` or ``alignment`` is not positive.

    >>> pool = StagingPool(1 << 20, pin=False)
    >>> with pool.take(1000) as block:
    ...     block.data.shape[0]
    1024
    >>> with pool.take(900):
    ...     pool.stats().n_reused
    1
    >>> pool.trim()
    1024
    """

    def __init__(
        self, max_bytes: int, *, pin: bool = True, alignment: int = 256, device: str | None = None
    ) -> None:
        if max_bytes <= 0 or alignment <= 0:
            raise ValueError(
                f"Cannot make a staging pool: expected a positive size and alignment, "
                f"got max_bytes={max_bytes} and alignment={alignment}."
            )
        self.max_bytes = max_bytes
        self.pin = pin
        self.alignment = alignment
        self._device = device
        self._idle: list[StagingBlock] = []
        self._busy: list[StagingBlock] = []
        self._out: set[int] = set()
        self._lock = threading.Lock()
        self._held = self._peak = self._used = 0
        self._allocated = self._reused = self._waits = 0

    def take(self, nbytes: int) -> StagingBlock:
        """A buffer of at least ``nbytes`` bytes.

        Waits for copies that still read older buffers if that is what it takes.

        Raises:
            StagingExhausted: when the pool may not own that much, or all of it is handed out.
        """
        size = self._rounded(nbytes)
        with self._lock:
            self._reap()
            block = self._find(size)
            while block is None and self._busy and self._held + size > self.max_bytes:
                self._waits += 1
                self._wait_for_first()
                block = self._find(size)
            if block is None:
                block = self._make(size)
            else:
                self._reused += 1
            self._out.add(id(block))
            self._used += block.data.shape[0]
            return block

    def trim(self, keep_nbytes: int = 0) -> int:
        """Drop idle buffers until the pool owns at most ``keep_nbytes``; return the bytes dropped."""
        dropped = 0
        with self._lock:
            self._reap()
            self._idle.sort(key=lambda block: block.data.shape[0])
            while self._idle and self._held > keep_nbytes:
                nbytes = self._idle.pop().data.shape[0]
                self._held -= nbytes
                dropped += nbytes
        return dropped

    def stats(self) -> StagingStats:
        """The counters at this moment."""
        with self._lock:
            self._reap()
            return StagingStats(
                self._allocated, self._reused, self._waits, self._held, self._used, self._peak
            )

    def _rounded(self, nbytes: int) -> int:
        """The next power of two (few sizes are reused more often), at least the alignment."""
        size = max(nbytes, 1)
        size = -(-size // self.alignment) * self.alignment
        return min(1 << (size - 1).bit_length(), max(size, self.max_bytes))

    def _find(self, size: int) -> StagingBlock | None:
        best: StagingBlock | None = None
        for block in self._idle:
            have = block.data.shape[0]
            if have >= size and (best is None or have < best.data.shape[0]):
                best = block
        if best is not None:
            self._idle.remove(best)
        return best

    def _make(self, size: int) -> StagingBlock:
        while self._idle and self._held + size > self.max_bytes:
            self._held -= self._idle.pop().data.shape[0]
        if self._held + size > self.max_bytes:
            raise StagingExhausted(
                f"Cannot stage {size} bytes: the pool may own {self.max_bytes} bytes and "
                f"{self._held} of them are in use. Release blocks, or make the pool larger."
            )
        data = self._memory(size)
        self._allocated += 1
        self._held += size
        self._peak = max(self._peak, self._held)
        return StagingBlock(self, data)

    def _memory(self, size: int) -> torch.Tensor:
        if self.pin:
            try:
                ops = accelerator_ops() if self._device is None else ops_for(self._device)
                return ops.empty_pinned(size)
            except RuntimeError:
                pass  # no accelerator: plain memory serves
        return torch.empty(size, dtype=torch.uint8)

    def _give_back(self, block: StagingBlock, barrier: Barrier | None) -> None:
        with self._lock:
            if id(block) not in self._out:
                return
            self._out.discard(id(block))
            if barrier is None or barrier.done():
                self._idle.append(block)
                self._used -= block.data.shape[0]
            else:
                block._barrier = barrier
                self._busy.append(block)

    def _reap(self) -> None:
        still: list[StagingBlock] = []
        for block in self._busy:
            assert block._barrier is not None
            if block._barrier.done():
                self._retire(block)
            else:
                still.append(block)
        self._busy = still

    def _wait_for_first(self) -> None:
        block = self._busy.pop(0)
        assert block._barrier is not None
        block._barrier.wait()
        self._retire(block)

    def _retire(self, block: StagingBlock) -> None:
        block._barrier = None
        self._used -= block.data.shape[0]
        self._idle.append(block)
