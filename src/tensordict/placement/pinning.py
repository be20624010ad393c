"""Pinned host memory: leaves that an accelerator can read on its own."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .._keys import short
from ..core.traverse import leaves, leaves_with_path
from ..device.ops import DeviceOps, accelerator_ops
from ..device.sync import wait_for
from ..errors import EntryTypeError, LockedError, table_of
from .execute import devices_to_wait_for, same_memory
from .placing import place
from .routes import make_route, ties_of


def pin_tree(td: Any, num_threads: int | None, inplace: bool) -> Any:
    """The tree with every leaf in pinned memory; a leaf that is there already is the same object.

    Args:
        td: A tree of host leaves.
        num_threads: Threads that pin; ``None`` is one per core, 0 the calling thread.
        inplace: Replace the leaves of ``td``.

    Raises:
        RuntimeError: where there is no accelerator.
        EntryTypeError: when leaves are not in host memory; names each, and pins none.
        LockedError: for ``inplace=True`` on a locked tree.
    """
    ops = accelerator_ops()
    if inplace and td._lock is not None:
        raise LockedError
    rows = [
        (short(path), f"on {x.device}")
        for path, x in leaves_with_path(td)
        if x.device.type != "cpu"
    ]
    if rows:
        raise EntryTypeError(
            table_of(f"Cannot pin {len(rows)} leaves: only host memory can be pinned.", rows)
        )
    tensors = leaves(td)
    ties = ties_of(tensors) or {}
    todo = [index for index in range(len(tensors)) if index not in ties]
    if num_threads is None:
        num_threads = min(32, os.cpu_count() or 1, len(todo))
    out = list(tensors)
    pinned = pinned_one_by_one([tensors[index] for index in todo], ops, num_threads)
    for index, x in zip(todo, pinned):
        out[index] = x
    for index, first in ties.items():
        if out[first] is not tensors[first]:
            out[index] = same_memory(tensors[index], tensors[first], out[first])
    return place(td, out, td._device, inplace=inplace, keep_device=True)


def pinned_one_by_one(
    tensors: Sequence[Tensor], ops: DeviceOps, num_threads: int
) -> Iterator[Tensor]:
    """The pinned tensors in order, each as soon as it is there, so that copies can begin."""

    def pin(x: Tensor) -> Tensor:
        return x if x.device.type != "cpu" or ops.is_pinned(x) else ops.pin(x)

    if num_threads <= 0 or len(tensors) < 2:
        yield from map(pin, tensors)
        return
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(num_threads) as pool:
        yield from pool.map(pin, tensors)


def move_pinned(
    tensors: Sequence[Tensor],
    device: torch.device | None,
    dtype: torch.dtype | None,
    non_blocking: bool | None,
    num_threads: int,
) -> list[Tensor]:
    """Pin each leaf and copy it on while the next ones are pinned.

    Raises:
        RuntimeError: where there is no accelerator.
    """
    ops = accelerator_ops()
    routes = [make_route(x, device, dtype) for x in tensors]
    ties = ties_of(tensors) or {}
    out = list(tensors)
    todo = [index for index, route in enumerate(routes) if route.moves and index not in ties]
    pinned = pinned_one_by_one([tensors[index] for index in todo], ops, num_threads)
    for index, x in zip(todo, pinned):
        route = routes[index]
        out[index] = x.to(route.device, route.dtype, non_blocking is not False)
    for index, first in ties.items():
        if out[first] is not tensors[first]:
            out[index] = same_memory(tensors[index], tensors[first], out[first])
    if non_blocking is None:
        wait_for(devices_to_wait_for(routes, device))
    return out
