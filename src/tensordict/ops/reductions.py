"""Reductions over batch dimensions, over feature dimensions, or of everything."""

from __future__ import annotations

from typing import Any

from torch import Size, Tensor

from ..core.node import Node
from ..core.sizes import wrap_dim
from ..core.structural import DimNames, StructuralOp
from ..core.traverse import leaves


class ReductionMethods(Node):
    """`all`, `any`."""

    __slots__ = ()

    def all(self, dim: int | None = None) -> Any:
        """Whether every element of every leaf is true: a bool; with ``dim``, a tensordict.

        >>> from tensordict import TensorDict
        >>> (TensorDict(a=1, b=1) == 1).all()
        True
        """
        if dim is None:
            return all(bool(x.all()) for x in leaves(self))
        return self._restructure(Reduce(lambda x, d: x.all(d), dim, len(self._batch_size)))

    def any(self, dim: int | None = None) -> Any:
        """Whether some element of some leaf is true: a bool; with ``dim``, a tensordict."""
        if dim is None:
            return any(bool(x.any()) for x in leaves(self))
        return self._restructure(Reduce(lambda x, d: x.any(d), dim, len(self._batch_size)))


class Reduce(StructuralOp):
    """One batch dimension reduced away."""

    __slots__ = ("_dim", "_fn")

    keeps_lock = False

    def __init__(self, fn: Any, dim: int, ndim: int) -> None:
        self._fn = fn
        self._dim = wrap_dim(dim, ndim)

    def size(self, batch: Size) -> Size:
        return batch[: self._dim] + batch[self._dim + 1 :]

    def names(self, names: DimNames) -> DimNames:
        return [*names[: self._dim], *names[self._dim + 1 :]]

    def leaf(self, x: Tensor) -> Tensor:
        return self._fn(x, self._dim)
