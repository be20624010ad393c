"""The values of a `NonTensorStack`: one Python object for each element of a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Size, Tensor
from torch.utils._python_dispatch import _disable_current_modes

from .structural import StructuralOp


class Rows:
    """A NumPy array of objects, or a note of how it is made.

    A compiled graph can neither make nor read such an array.  What is done to one there is noted,
    and done when the values are read afterwards.

    Attributes:
        noted: whether a note refers to the array, which must not be written to any more.
    """

    __slots__ = ("_array", "_note", "noted")

    def __init__(self, array: np.ndarray | None) -> None:
        self._array = array
        self._note: tuple[str, tuple[Rows, ...], Any] | None = None
        self.noted = False

    @classmethod
    def later(cls, how: str, sources: Sequence[Rows], argument: Any) -> Rows:
        """Note what is done: ``stack``, ``cat``, ``op``, ``extend`` or ``fill``."""
        out = cls(None)
        out._note = (how, tuple(sources), argument)
        for source in sources:
            source.noted = True
        return out

    def get(self) -> np.ndarray:
        """The array."""
        if self._note is not None:
            how, sources, argument = self._note
            self._array = _DO[how]([source.get() for source in sources], argument)
            self._note = None
        assert self._array is not None
        return self._array


def filled(value: Any, size: Size) -> np.ndarray:
    """One value everywhere."""
    out = np.empty(tuple(size), dtype=object)
    for i in np.ndindex(out.shape):  # not fill(): a list would be spread over the rows
        out[i] = value
    return out


def numbers_of(size: Size) -> Tensor:
    """Row numbers in the shape of a batch."""
    return torch.arange(size.numel()).view(size)


def taken(values: np.ndarray, rows: Tensor) -> np.ndarray:
    """The values of some rows, by number, in the shape of ``rows``; None for negative numbers."""
    index = rows.reshape(-1).numpy()
    flat = values.reshape(-1)
    if rows.numel() and int(rows.min()) < 0:  # rows that the operation made
        flat = np.append(flat, np.array([None], dtype=object))
    return flat[index].reshape(tuple(rows.shape))


def after(values: np.ndarray, op: StructuralOp) -> np.ndarray:
    """The values after an operation on batch dimensions."""
    if not op.moves_rows:
        return op.values(values)
    # Whatever the operation does to a tensor of row numbers, it does to the rows.
    if not torch._C._len_torch_dispatch_stack():
        return taken(values, op.rows(numbers_of(Size(values.shape))))
    with _disable_current_modes():  # a mode that fakes tensors would hide the numbers
        return taken(values, op.rows(numbers_of(Size(values.shape))))


def extended(values: np.ndarray, size: Size) -> np.ndarray:
    """The values in a longer batch: each one for all of its further dimensions."""
    tail = (1,) * (len(size) - values.ndim)
    return np.broadcast_to(values.reshape(values.shape + tail), tuple(size))


_DO: dict[str, Callable[[list[np.ndarray], Any], np.ndarray]] = {
    "stack": np.stack,
    "cat": np.concatenate,
    "op": lambda arrays, op: after(arrays[0], op),
    "extend": lambda arrays, size: extended(arrays[0], size),
    "fill": lambda arrays, pair: filled(*pair),
}
