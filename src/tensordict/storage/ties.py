"""Which tensors are one memory under several names (tied weights)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor


def tied_to(tensors: Sequence[Tensor]) -> list[int] | None:
    """For each tensor the index of the first one that is the same memory seen the same way.

    Two tensors are tied when storage, offset, shape, strides and dtype are equal; views that
    overlap in any other way are not.

    Returns:
        One index per tensor, ``None`` when no two tensors are tied.

    >>> import torch
    >>> w = torch.zeros(3)
    >>> tied_to([w, torch.zeros(3), w, w[1:]])
    [0, 1, 0, 3]
    >>> tied_to([w, w[1:]]) is None
    True
    """
    addresses = [x.data_ptr() for x in tensors]
    if len(set(addresses)) == len(addresses):
        return None
    seen_once: set[int] = set()
    again: set[int] = set()
    for address in addresses:
        (again if address in seen_once else seen_once).add(address)
    first: dict[Any, int] = {}
    out: list[int] = []
    for i, (x, address) in enumerate(zip(tensors, addresses)):
        out.append(first.setdefault(_identity(x), i) if address in again else i)
    return out if len(set(out)) < len(out) else None


def _identity(x: Tensor) -> Any:
    # The address does not tell tensors without data apart (meta, empty); their storages do.
    return (
        x.untyped_storage()._cdata,
        x.storage_offset(),
        x.shape,
        x.stride(),
        x.dtype,
        x.is_conj(),
        x.is_neg(),
    )
