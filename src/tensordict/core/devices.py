"""Devices in normal form: ``cuda`` and ``cuda:0`` compare unequal in torch, here they do not."""

from __future__ import annotations

from typing import Any

import torch

# Device types of which there is one: an index on them means nothing.
_SINGLE = frozenset({"cpu", "meta"})


def as_device(device: Any) -> torch.device:
    """A device with its index filled in for kinds that have several.

    The index that ``"cuda"`` stands for is asked of a runtime that is already
    initialised, and is 0 otherwise: naming a device never initialises it.

    >>> as_device("cpu"), as_device("cuda:1")
    (device(type='cpu'), device(type='cuda', index=1))
    """
    out = device if type(device) is torch.device else torch.device(device)
    if out.type in _SINGLE:
        return out if out.index is None else torch.device(out.type)
    if out.index is not None:
        return out
    return torch.device(out.type, _current_index(out.type))


def _current_index(kind: str) -> int:
    module = getattr(torch, kind, None)
    ready = getattr(module, "is_initialized", None)
    if ready is not None and ready():
        return int(module.current_device())  # type: ignore[union-attr]
    return 0
