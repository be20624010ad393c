"""What a shape or index operation tells each part of a tree.

One record describes the operation once; every kind of entry applies it in its own
way: a tensor through `leaf`, a batch size through `size`, names through `names`.
A kind of node that is not a dict of tensors (a lazy stack) reads the record's fields.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Size, Tensor

DimNames = list[Any]


class StructuralOp(Protocol):
    """An operation on batch dimensions, arguments already normalised against the root."""

    keeps_lock: bool

    def size(self, batch: Size) -> Size:
        """The batch size that ``batch`` (the root's, or a nested longer one) becomes."""
        ...

    def names(self, names: DimNames) -> DimNames | None:
        """The dimension names that ``names`` become, None when none is left."""
        ...

    def leaf(self, x: Tensor) -> Tensor:
        """The operation on one tensor of shape ``[*B, *F]``."""
        ...
