"""A tensor beside the batch: indexing, stacking and reshaping leave it as it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Size, Tensor

from ..errors import EntryTypeError
from .leaf import Leaf, same
from .registry import register_leaf
from .sizes import as_size, insert
from .structural import StructuralOp


@register_leaf
class UnbatchedTensor(Leaf):
    """A tensor that belongs to the whole batch, of any shape.

    Args:
        data: the tensor.
        batch_size: the batch it is said to have, that of the tensordict it is written to.

    Reading ``td[key]`` gives the tensor, ``td.get(key)`` the wrapper.  Operations on the
    leaves of the tensordict (pointwise, ``to``) leave it as it is; written to a
    tensordict with a device, it moves there.

    >>> from tensordict import TensorDict
    >>> td = TensorDict({"x": torch.zeros(3), "table": UnbatchedTensor(torch.arange(5))}, [3])
    >>> td[0]["table"].shape, td.get("table").batch_size
    (torch.Size([5]), torch.Size([3]))
    """

    __slots__ = ("_data",)

    kind = "unbatched"

    _data: Tensor

    def __init__(self, data: Any, batch_size: Any = None) -> None:
        self._data = data._data if isinstance(data, UnbatchedTensor) else torch.as_tensor(data)
        self._batch_size = as_size(batch_size)
        self._device = self._data.device

    @classmethod
    def _new(cls, data: Tensor, batch_size: Size) -> UnbatchedTensor:
        out = object.__new__(cls)
        out._data = data
        out._batch_size = batch_size
        out._device = data.device
        return out

    @property
    def data(self) -> Tensor:
        """The tensor."""
        return self._data

    def _value(self) -> Tensor:
        return self._data

    def _restructure(self, op: StructuralOp) -> UnbatchedTensor:
        return self._new(self._data, op.size(self._batch_size))

    def _with(self, batch_size: Size, device: torch.device | None) -> UnbatchedTensor:
        moved = self._data if device is None else self._data.to(device)
        return self._new(moved, batch_size)

    @classmethod
    def _stack(cls, leaves: Sequence[Any], dim: int) -> UnbatchedTensor:
        first = _one(leaves)
        return cls._new(first._data, insert(first._batch_size, dim, len(leaves)))

    @classmethod
    def _cat(cls, leaves: Sequence[Any], dim: int) -> UnbatchedTensor:
        first = _one(leaves)
        size = list(first._batch_size)
        size[dim] = sum(leaf._batch_size[dim] for leaf in leaves)
        return cls._new(first._data, Size(size))

    def __repr__(self) -> str:
        x = self._data
        return f"UnbatchedTensor(shape={x.shape}, device={x.device}, dtype={x.dtype})"

    def __reduce__(self) -> Any:
        return UnbatchedTensor, (self._data, tuple(self._batch_size))


def _one(leaves: Sequence[Any]) -> Any:
    first = leaves[0]
    for leaf in leaves[1:]:
        if not same(leaf._data, first._data):
            raise EntryTypeError(
                "Cannot join UnbatchedTensor entries that differ: they stand for the whole batch. "
                "Make them tensors with a batch dimension."
            )
    return first
