"""All leaves of a tree in one buffer.

The tree is locked, and its lock records the buffer (`Origin`): a consolidated tree moves,
pickles and travels as one tensor.  Unlocking it ends that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from ..core.lock import Origin, origin_of, set_origin
from ..core.node import Node
from ..core.traverse import leaves, leaves_with_path, nodes_with_path, parts, rebuild
from ..errors import EntryTypeError, LockedError
from .buffer import (
    ACCELERATOR_ALIGNMENT,
    HOST_ALIGNMENT,
    NOT_CAST_TO,
    fill,
    layout_from,
    new_buffer,
    pack,
    views,
)
from .packing import Packing, plan_packing

N = TypeVar("N", bound=Node)

KIND = "consolidated"


def is_consolidated(node: Node) -> bool:
    """Whether a tree is locked over one buffer that holds all its leaves."""
    return buffer_of(node) is not None


def buffer_of(node: Node) -> Tensor | None:
    """The buffer of a consolidated tree, uint8 ``[n]``; None for any other."""
    origin = origin_of(node)
    return None if origin is None or origin.kind != KIND else origin.buffer


def packing_of(node: Node) -> Packing:
    """Where the leaves of a consolidated tree lie in its buffer."""
    origin = origin_of(node)
    assert origin is not None and isinstance(origin.detail, Packing)
    return origin.detail


def consolidate(
    node: N,
    *,
    device: torch.device | None = None,
    non_blocking: bool = False,
    share_memory: bool = False,
    pin_memory: bool = False,
) -> N:
    """A locked copy of a tree whose leaves are views of one buffer.

    Args:
        node: any tree; it is not changed.  A consolidated one is returned as it is, unless it
            has to go elsewhere.
        device: where the buffer goes; by default where the leaves are.
        non_blocking: passed to the copy that leads there.
        share_memory: whether the buffer is in shared memory (host only).
        pin_memory: whether the buffer is pinned (host only).

    Returns:
        A tree without grad history.  Tied leaves stay tied and are stored once; a jagged leaf
        stays jagged, a DTensor becomes a DTensor over its packed local shard.

    Raises:
        EntryTypeError: when leaves cannot be viewed as bytes, or lie on several devices and no
            device is given; nothing was touched then.
    """
    buffer = buffer_of(node)
    stays = not (share_memory or pin_memory)
    if buffer is not None and stays and (device is None or buffer.device == device):
        return node
    tensors = leaves(node)
    here = _device_of(node, tensors) if device is None else device
    if not stays and here.type != "cpu":
        raise EntryTypeError(
            f"Cannot share or pin a buffer on {here}: only host memory can be. Pass device='cpu'."
        )
    on_host = here.type in ("cpu", "meta")
    packing, pieces = plan_packing(
        tensors,
        HOST_ALIGNMENT if on_host else ACCELERATOR_ALIGNMENT,
        lambda: [path for path, _ in leaves_with_path(node)],
    )
    if here.type == "cpu" or not pieces or any(x.device.type != "cpu" for x in pieces):
        buffer = new_buffer(packing.layout, here, pin_memory=pin_memory, share_memory=share_memory)
        stored = views(buffer, packing.layout)
        fill(stored, pieces)
        return _assemble(node, packing, buffer, packing.join(stored), device)
    # From the host, one large copy beats one copy a leaf; for meta there is nothing to copy.
    if here.type == "meta":
        buffer = new_buffer(packing.layout, here)
    else:
        buffer = pack(pieces, packing.layout).to(here, non_blocking=non_blocking)
    return over_buffer(node, packing, buffer, device)


def over_buffer(node: N, packing: Packing, buffer: Tensor, device: torch.device | None = None) -> N:
    """The same tree, consolidated, over a buffer that holds its leaves as a packing says.

    With the packing of a consolidated tree and a moved copy of its buffer this moves the tree.

    Args:
        node: the tree to rebuild; it is not changed.
        packing: where its leaves lie.
        buffer: uint8 ``[>= packing.layout.total_nbytes]``.
        device: the device attribute of the nodes that have one.
    """
    return _assemble(node, packing, buffer, packing.leaves(buffer), device)


def castable(packing: Packing, dtypes: Sequence[torch.dtype]) -> bool:
    """Whether `recast` can do it: each leaf is one plain part, before and after."""
    return not packing.joins and not any(dtype in NOT_CAST_TO for dtype in dtypes)


def recast(node: N, dtypes: Sequence[torch.dtype]) -> N:
    """A consolidated tree with leaves of other dtypes: each is copied once, into a new buffer.

    Args:
        node: a consolidated tree; it is not changed.
        dtypes: one per leaf, `castable`.

    Returns:
        A consolidated tree without grad history; leaves tied before are, where they agree in dtype.
    """
    packing = packing_of(node)
    tensors = leaves(node)
    place: dict[tuple[int, torch.dtype], int] = {}
    pieces: list[Tensor] = []
    slots: list[int] = []
    for slot, dtype, x in zip(packing.slots or range(len(tensors)), dtypes, tensors):
        at = place.setdefault((slot, dtype), len(pieces))
        if at == len(pieces):
            pieces.append(x)
        slots.append(at)
    layout = layout_from(
        [dtype for _, dtype in place], [x.shape for x in pieces], packing.layout.alignment
    )
    buffer = new_buffer(layout, _device_of(node, pieces))
    fill(views(buffer, layout), pieces)
    tied = len(pieces) < len(tensors)
    return over_buffer(node, Packing(layout, tuple(slots) if tied else None), buffer)


def _assemble(
    node: N, packing: Packing, buffer: Tensor, tensors: list[Tensor], device: torch.device | None
) -> N:
    out = rebuild(node, tensors)
    if device is not None:
        for _, part in nodes_with_path(out):
            if part._device is not None:
                part._device = device
    set_origin(out, Origin(KIND, buffer, packing))
    return out


def consolidate_(
    node: N,
    *,
    device: torch.device | None = None,
    non_blocking: bool = False,
    share_memory: bool = False,
    pin_memory: bool = False,
) -> N:
    """As `consolidate`, but the entries of ``node`` itself are replaced; returns ``node``.

    Raises:
        LockedError: when the tree is locked and not consolidated already.
    """
    new = consolidate(
        node,
        device=device,
        non_blocking=non_blocking,
        share_memory=share_memory,
        pin_memory=pin_memory,
    )
    if new is node:
        return node
    if node._lock is not None:
        raise LockedError
    adopt(node, new)
    origin = origin_of(new)
    assert origin is not None
    set_origin(node, origin)
    return node


def adopt(node: Node, other: Node) -> None:
    """Replace the tensors of a tree by those of another one of the same structure."""
    for (_, mine), (_, theirs) in zip(list(nodes_with_path(node)), nodes_with_path(other)):
        mine._device = theirs._device
        for name, entry in parts(theirs):
            if isinstance(entry, Tensor):
                mine._store(name, entry)


def _device_of(node: Node, tensors: list[Tensor]) -> torch.device:
    devices = {x.device for x in tensors}
    if len(devices) > 1:
        raise EntryTypeError(
            f"Cannot consolidate leaves on several devices: "
            f"{', '.join(sorted(str(d) for d in devices))}. Pass device=."
        )
    if devices:
        return devices.pop()
    return node._device or torch.device("cpu")
