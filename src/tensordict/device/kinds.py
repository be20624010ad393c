"""What kind of move leads from one device to another.

A *kind* is the transport alone: whether a move also casts is a flag of the move.
Devices are compared in their normal form: ``cuda`` and ``cuda:0`` are one device when
0 is the current one, ``cpu:0`` is ``cpu``.
"""

from __future__ import annotations

from enum import Enum

import torch

from .._typing import DeviceLike
from ..core.devices import as_device


class MoveKind(Enum):
    """The transport of one move.

    Attributes:
        ALIAS: Nothing to do: the very same tensor object is used.
        CAST: Another dtype on the same device.
        H2D: Host to accelerator.
        D2H: Accelerator to host.
        D2D: Between two accelerator devices.
        H2H: A copy on the host: pinned, shared or of another memory format.
        TO_META: Only shape and dtype are kept.
        FROM_META: There are no values to move.
        RELAYOUT: Other strides on one accelerator device.
    """

    ALIAS = "alias"
    CAST = "cast"
    H2D = "h2d"
    D2H = "d2h"
    D2D = "d2d"
    H2H = "h2h"
    TO_META = "to_meta"
    FROM_META = "from_meta"
    RELAYOUT = "relayout"

    def __repr__(self) -> str:
        return f"MoveKind.{self.name}"

    def __lt__(self, other: object) -> bool:
        if not isinstance(other, MoveKind):
            return NotImplemented
        return _ORDER[self] < _ORDER[other]


_ORDER = {kind: index for index, kind in enumerate(MoveKind)}


# Tensors whose memory is what it seems: no subclass with data elsewhere.  Fake devices add theirs.
PLAIN_TENSORS: set[type] = {torch.Tensor, torch.nn.Parameter}


def normal_device(device: DeviceLike | None) -> torch.device | None:
    """The one form of a device in which devices are compared; ``None`` stays ``None``.

    An accelerator without an index gets the index of the current device (0 where no runtime is
    up); ``cpu`` and ``meta`` lose theirs.

    Raises:
        RuntimeError: (from torch) when the text names no device.

    >>> normal_device("cpu:0"), normal_device("cuda:1"), normal_device(None)
    (device(type='cpu'), device(type='cuda', index=1), None)
    """
    return None if device is None else as_device(device)


def classify(src: DeviceLike, dst: DeviceLike) -> MoveKind:
    """The transport between two devices.

    `MoveKind.CAST`, `MoveKind.H2H` and `MoveKind.RELAYOUT` stay on one device; a plan chooses
    them by dtype, pinning and strides.  Here one device on both sides is `MoveKind.ALIAS`.

    >>> classify("cpu", "cuda:0"), classify("cuda:0", "cuda:1"), classify("cpu", "cpu:0")
    (MoveKind.H2D, MoveKind.D2D, MoveKind.ALIAS)
    """
    here, there = normal_device(src), normal_device(dst)
    assert here is not None and there is not None
    if here == there:
        return MoveKind.ALIAS
    if there.type == "meta":
        return MoveKind.TO_META
    if here.type == "meta":
        return MoveKind.FROM_META
    if here.type == "cpu":
        return MoveKind.H2D
    if there.type == "cpu":
        return MoveKind.D2H
    return MoveKind.D2D


def is_accelerator(device: torch.device) -> bool:
    """Whether a device has memory and queues of its own.

    >>> is_accelerator(torch.device("cuda:0")), is_accelerator(torch.device("meta"))
    (True, False)
    """
    return device.type not in ("cpu", "meta")
