"""Exchanges of host memory over a backend that carries tensors of a device only (nccl)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from .transport_protocol import Capabilities, Transport, Work, reconnected


class _CopyBack:
    """A message that lands on the device, and is copied to where it belongs when it is there."""

    __slots__ = ("_pairs", "_work")

    def __init__(self, work: Work, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        self._work = work
        self._pairs = list(pairs)

    def wait(self, timeout: float | None = None) -> None:
        self._work.wait(timeout)
        with torch.no_grad():
            for target, source in self._pairs:
                target.copy_(source)
        self._pairs.clear()


class StagedTransport:
    """A transport that moves tensors of other devices to its own and back (for nccl).

    Frames and answers are not concerned: the inner transport has a side channel for them.

    Args:
        inner: carries tensors of ``device``, and control messages of the host.
        device: the device of this rank.
        to_device: copies a tensor to the device; ``tensor.to(device)`` by default.
        is_there: whether a tensor can be carried as it is; by default, whether it is on a
            device of that type.
    """

    def __init__(
        self,
        inner: Transport,
        device: torch.device,
        *,
        to_device: Callable[[Tensor], Tensor] | None = None,
        is_there: Callable[[Tensor], bool] | None = None,
    ) -> None:
        self._inner = inner
        self._to = (lambda x: x.to(device)) if to_device is None else to_device
        self._is_there = (lambda x: x.device.type == device.type) if is_there is None else is_there

    @property
    def rank(self) -> int:
        return self._inner.rank

    @property
    def size(self) -> int:
        return self._inner.size

    @property
    def capabilities(self) -> Capabilities:
        inner = self._inner.capabilities
        return Capabilities(
            devices=inner.devices | {"cpu"},
            exact_counts=inner.exact_counts,
            side_channel=inner.side_channel,
            tags=inner.tags,
        )

    def lost(self, ranks: Iterable[int]) -> dict[int, str]:
        """As the inner transport."""
        return self._inner.lost(ranks)

    def reconnect(self, peer: int, key: str, timeout: float | None = None) -> Transport:
        """As the inner transport; what is sent goes over host memory."""
        return reconnected(self._inner, peer, key, timeout)

    def name_of(self, rank: int) -> str:
        """As the inner transport."""
        return self._inner.name_of(rank)

    def _there(self, tensor: Tensor) -> Tensor:
        return tensor if self._is_there(tensor) else self._to(tensor)

    def _landing(self, work: Work, pairs: Sequence[tuple[Tensor, Tensor]]) -> Work:
        moved = [(target, source) for target, source in pairs if target is not source]
        return _CopyBack(work, moved) if moved else work

    def isend(self, tensor: Tensor, dst: int, tag: int, *, control: bool = False) -> Work:
        if not control:
            tensor = self._there(tensor)
        return self._inner.isend(tensor, dst, tag, control=control)

    def irecv(self, tensor: Tensor, src: int, tag: int, *, control: bool = False) -> Work:
        if control:
            return self._inner.irecv(tensor, src, tag, control=True)
        there = self._there(tensor)
        return self._landing(self._inner.irecv(there, src, tag), [(tensor, there)])

    def broadcast(self, tensor: Tensor, src: int, *, control: bool = False) -> Work:
        if control:
            return self._inner.broadcast(tensor, src, control=True)
        there = self._there(tensor)
        work = self._inner.broadcast(there, src)
        return work if src == self.rank else self._landing(work, [(tensor, there)])

    def all_gather(self, out: Sequence[Tensor], tensor: Tensor, *, control: bool = False) -> Work:
        if control:
            return self._inner.all_gather(out, tensor, control=True)
        there = [self._there(x) for x in out]
        work = self._inner.all_gather(there, self._there(tensor))
        return self._landing(work, list(zip(out, there)))

    def all_reduce(self, tensor: Tensor, op: Any) -> Work:
        there = self._there(tensor)
        return self._landing(self._inner.all_reduce(there, op), [(tensor, there)])

    def reduce(self, tensor: Tensor, dst: int, op: Any) -> Work:
        there = self._there(tensor)
        work = self._inner.reduce(there, dst, op)
        return self._landing(work, [(tensor, there)]) if dst == self.rank else work
