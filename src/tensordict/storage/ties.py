"""Which tensors are one memory under several names (tied weights)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..device.kinds import PLAIN_TENSORS


def memory_of(x: Tensor) -> Any:
    """What is equal for tensors that are the same memory seen the same way.

    Storage, offset, shape, strides and dtype; views that overlap in any other way are not equal,
    and a tensor without elements, or without a storage of its own, only equals itself.
    """
    try:
        if x.numel() == 0:
            return id(x)
        place = x.untyped_storage()._cdata, x.storage_offset()
        return place, x.shape, x.stride(), x.dtype, x.is_conj(), x.is_neg()
    except (RuntimeError, NotImplementedError, TypeError):
        return id(x)  # a wrapper subclass, vmap


def ties_of(
    tensors: Sequence[Tensor],
    identity: Callable[[Tensor], Any] = memory_of,
    plain: bool | None = None,
) -> dict[int, int] | None:
    """For each tensor that is a tie, the position of the first tensor with the same memory.

    Args:
        tensors: any tensors.
        identity: equal for those that are ties.
        plain: whether all are of plain types, where that is known.

    Returns:
        None when there are none.

    >>> w = torch.zeros(3)
    >>> ties_of([w, torch.zeros(3), w, w[1:]])
    {2: 0}
    >>> ties_of([w, w[1:]]) is None
    True
    """
    if torch.compiler.is_compiling():
        return None  # addresses do not trace; a graph copies each value by itself
    if plain is None:
        plain = PLAIN_TENSORS.issuperset(map(type, tensors))
    first: dict[Any, int] = {}
    ties: dict[int, int] = {}
    for index in _candidates(tensors) if plain else range(len(tensors)):
        seen = first.setdefault(identity(tensors[index]), index)
        if seen != index:
            ties[index] = seen
    return ties or None


def _candidates(tensors: Sequence[Tensor]) -> Sequence[int]:
    """Positions of tensors whose address is not theirs alone: in most trees there are none."""
    try:
        addresses = list(map(Tensor.data_ptr, tensors))
    except RuntimeError:  # they cannot be asked (vmap, sparse)
        return range(len(tensors))
    if len(set(addresses)) == len(addresses):
        return ()
    count = Counter(addresses)
    return [index for index, address in enumerate(addresses) if count[address] > 1]
