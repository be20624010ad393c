"""Ways from a source to a target, and which leaves share memory.

Leaves that go the same way share one `Route`, so that a plan of many leaves has few of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._typing import Path
from ..device.kinds import MoveKind, classify, is_accelerator
from ..device.ops import ops_for
from ..storage import ties
from .casts import Loss, can_lose
from .names import dtype_name


@dataclass(frozen=True, slots=True)
class Route:
    """One way from a source to a target.

    Attributes:
        kind: The transport.
        src_device, src_dtype: Where leaves come from.
        device, dtype: Where they go.
        memory_format: Strides asked for, ``None`` to keep them.
        pin: Whether the result is pinned host memory.
        pinned: Whether the source is pinned host memory.
    """

    kind: MoveKind
    src_device: torch.device
    src_dtype: torch.dtype
    device: torch.device
    dtype: torch.dtype
    memory_format: torch.memory_format | None = None
    pin: bool = False
    pinned: bool = False

    @property
    def casts(self) -> bool:
        """Whether the dtype changes."""
        return self.src_dtype is not self.dtype

    @property
    def cast_side(self) -> str | None:
        """``"source"`` when narrowing before the transfer, ``"target"`` when widening after it."""
        if not self.casts:
            return None
        if self.kind not in TRANSFERS:
            return "source"
        return "source" if self.dtype.itemsize <= self.src_dtype.itemsize else "target"

    @property
    def loss(self) -> Loss:
        """What the pair of dtypes can lose."""
        return can_lose(self.src_dtype, self.dtype)

    @property
    def moves(self) -> bool:
        """Whether there is anything to do."""
        return self.kind is not MoveKind.ALIAS


TRANSFERS = (MoveKind.H2D, MoveKind.D2H, MoveKind.D2D)


def make_route(
    x: Tensor,
    device: torch.device | None,
    dtype: torch.dtype | None,
    memory_format: torch.memory_format | None = None,
    pin: bool | None = None,
) -> Route:
    """The route of one tensor to a target; ``None`` keeps what it has.

    A channels-last format is for tensors of 4 (or 5) dimensions; others keep their strides.
    """
    if memory_format is not None and x.ndim != _DIMS.get(memory_format, x.ndim):
        memory_format = None
    src_device, src_dtype = x.device, x.dtype
    to_device = src_device if device is None else device
    to_dtype = src_dtype if dtype is None else dtype
    kind = MoveKind.ALIAS if src_device == to_device else classify(src_device, to_device)
    pinned = False
    if src_device.type == "cpu" and (kind is MoveKind.H2D or pin):
        pinned = ops_for(to_device if kind is MoveKind.H2D else src_device).is_pinned(x)
    pin_result = bool(pin) and to_device.type == "cpu"
    relayout = memory_format is not None and not _has_format(x, memory_format)
    if kind is MoveKind.ALIAS:
        if relayout:
            kind = MoveKind.RELAYOUT if is_accelerator(src_device) else MoveKind.H2H
        elif pin_result and not pinned:
            kind = MoveKind.H2H
        elif to_dtype is not src_dtype:
            kind = MoveKind.CAST
    form = memory_format if kind is not MoveKind.ALIAS else None
    return Route(kind, src_device, src_dtype, to_device, to_dtype, form, pin_result, pinned)


_DIMS = {torch.channels_last: 4, torch.channels_last_3d: 5}


def _has_format(x: Tensor, memory_format: torch.memory_format) -> bool:
    if memory_format is torch.preserve_format:
        return True
    return x.is_contiguous(memory_format=memory_format)


def distinct(routes: Iterable[Route]) -> list[Route]:
    """The different routes of many, by identity first: few are ever hashed."""
    return list(dict.fromkeys({id(route): route for route in routes}.values()))


@dataclass(frozen=True, slots=True)
class Move:
    """What a plan does with one leaf.

    Attributes:
        path: Where the leaf is.
        route: From where to where.
        shape: Its shape.
        tied_to: The path of the leaf that it shares memory with and that is moved for both.
    """

    path: Path
    route: Route
    shape: tuple[int, ...]
    tied_to: Path | None = None

    @property
    def kind(self) -> MoveKind:
        """The transport."""
        return self.route.kind

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def src_nbytes(self) -> int:
        """Bytes at the source."""
        return self.numel * self.route.src_dtype.itemsize

    @property
    def dst_nbytes(self) -> int:
        """Bytes at the target."""
        return self.numel * self.route.dtype.itemsize

    @property
    def wire_nbytes(self) -> int:
        """Bytes that cross between devices; 0 for a tie and for moves within one device."""
        if self.tied_to is not None or self.route.kind not in TRANSFERS:
            return 0
        return min(self.src_nbytes, self.dst_nbytes)


def ties_of(tensors: Sequence[Tensor], plain: bool | None = None) -> dict[int, int] | None:
    """For each tensor that is a tie, the position of the first tensor with the same memory.

    Different tensors that require gradients are no ties: each keeps a history of its own.

    Args:
        tensors: Any tensors.
        plain: Whether all are of plain types, where that is known.

    Returns:
        ``None`` when there are none.
    """
    return ties.ties_of(tensors, _memory_and_history, plain)


def _memory_and_history(x: Tensor) -> Any:
    return id(x) if x.requires_grad else ties.memory_of(x)


def route_text(route: Route) -> str:
    """``float32 cpu -> bfloat16 cuda:0``, with the parts that stay left out.

    >>> route_text(make_route(torch.zeros(1), torch.device("cpu"), torch.float16))
    'float32 -> float16'
    """
    left, right = [], []
    if route.casts:
        left.append(dtype_name(route.src_dtype))
        right.append(dtype_name(route.dtype))
    if route.src_device != route.device:
        left.append(str(route.src_device))
        right.append(str(route.device))
    if not left:
        extra = " pinned" if route.pin and not route.pinned else ""
        return f"{dtype_name(route.dtype)} {route.device}{extra}"
    return f"{' '.join(left)} -> {' '.join(right)}"
