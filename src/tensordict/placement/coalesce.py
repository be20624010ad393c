"""Many small leaves in one copy.

Below some hundred kilobytes a copy between devices costs what its launch costs.  Leaves that go
the same way are packed into one buffer of at most 1 MiB, which crosses once.  Each result has a
storage of its own over its part, so that saving one leaf does not write the group; the memory of
a group is freed with its last leaf.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ..device.kinds import PLAIN_TENSORS, MoveKind
from ..device.ops import ops_for
from ..device.staging import StagingPool
from ..device.sync import Barrier
from .routes import Route

PACK_BELOW = 256 << 10
MIN_GROUP = 8
GROUP_NBYTES = 1 << 20
POOL_NBYTES = 64 << 20
_ALIGNMENT = 256
_SHARED = (MoveKind.H2D, MoveKind.D2H)


def groups_of(
    tensors: Sequence[Tensor], routes: Sequence[Route], todo: Sequence[int], pack_below: int
) -> list[list[int]]:
    """The positions of leaves that should share a copy, in groups.

    Leaves in a group have one route, no gradient history and contiguous memory.
    """
    by_route: dict[Route, list[int]] = {}
    for index in todo:
        route = routes[index]
        if route.kind in _SHARED and _can_share(tensors[index], route, pack_below):
            by_route.setdefault(route, []).append(index)
    groups: list[list[int]] = []
    for indices in by_route.values():
        current: list[int] = []
        size = 0
        for index in indices:
            nbytes = _padded(tensors[index].nbytes)
            if current and size + nbytes > GROUP_NBYTES:
                groups.append(current)
                current, size = [], 0
            current.append(index)
            size += nbytes
        groups.append(current)
    return [group for group in groups if len(group) >= MIN_GROUP]


def _can_share(x: Tensor, route: Route, pack_below: int) -> bool:
    if route.memory_format is not None or route.pin or x.requires_grad:
        return False
    # A cast on the host after the transfer would have to wait for the group.
    if route.kind is MoveKind.D2H and route.cast_side == "target":
        return False
    if type(x) not in PLAIN_TENSORS or x.layout is not torch.strided:
        return False
    return 0 < x.nbytes < pack_below and x.is_contiguous()


def move_group(
    tensors: Sequence[Tensor], route: Route, non_blocking: bool, staging: StagingPool | None
) -> list[Tensor]:
    """Copy leaves of one route together."""
    wire = route.dtype if route.cast_side == "source" else route.src_dtype
    step = _ALIGNMENT // wire.itemsize
    starts: list[int] = []
    total = 0
    for x in tensors:
        starts.append(total)
        total += -(-x.numel() // step) * step
    with torch.no_grad():
        if route.kind is MoveKind.H2D:
            pool = staging or shared_pool(route.device)
            block = pool.take(total * wire.itemsize)
            packed = block.data[: total * wire.itemsize].view(wire)
            torch._foreach_copy_(_views(packed, tensors, starts), list(tensors))
            moved = packed.to(route.device, non_blocking=non_blocking)
            block.release(Barrier([route.device]) if non_blocking else None)
        else:
            packed = torch.empty(total, dtype=wire, device=route.src_device)
            torch._foreach_copy_(_views(packed, tensors, starts), list(tensors))
            moved = packed.to(route.device, non_blocking=non_blocking)
        moved = moved.to(route.device, route.dtype)
        return _own_storages(moved, tensors, starts)


def _views(flat: Tensor, tensors: Sequence[Tensor], starts: Sequence[int]) -> list[Tensor]:
    return [flat.narrow(0, start, x.numel()).view(x.shape) for x, start in zip(tensors, starts)]


def _own_storages(flat: Tensor, tensors: Sequence[Tensor], starts: Sequence[int]) -> list[Tensor]:
    """One tensor per leaf, over its part of ``flat`` alone."""
    if type(flat) is not Tensor:
        return _views(flat, tensors, starts)
    storage, size = flat.untyped_storage(), flat.dtype.itemsize
    out = []
    for x, start in zip(tensors, starts):
        part = storage[start * size : (start + x.numel()) * size]
        made = torch.empty(0, dtype=flat.dtype, device=flat.device)
        out.append(made.set_(part, 0, x.shape, x.stride()))
    return out


_pools: WeakKeyDictionary[Any, StagingPool] = WeakKeyDictionary()


def shared_pool(device: torch.device) -> StagingPool:
    """The staging buffers of this process for the accelerators of one type."""
    ops = ops_for(device)
    pool = _pools.get(ops)
    if pool is None:
        pool = _pools[ops] = StagingPool(POOL_NBYTES, device=device.type)
    return pool


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
