"""What a shape or index operation tells each part of a tree.

One record describes the operation once; every kind of entry applies it in its own
way: a tensor through `leaf`, a batch size through `size`, names through `names`.
A kind of node that is not a dict of tensors (a lazy stack) reads the record's fields.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Size, Tensor

DimNames = list[Any]


class StructuralOp:
    """An operation on batch dimensions, arguments already normalised against the root.

    Attributes:
        keeps_lock: whether the result of a locked tree is locked.
        moves_rows: whether the result holds rows of the tree, as they are (and new ones);
            False when it computes with them, as a reduction does.
        adds_rows: whether the result has rows that hold nothing of the tree.
    """

    __slots__ = ()

    keeps_lock: bool = True
    moves_rows: bool = True
    adds_rows: bool = False

    def size(self, batch: Size) -> Size:
        """The batch size that ``batch`` (the root's, or a nested longer one) becomes."""
        raise NotImplementedError

    def names(self, names: DimNames) -> DimNames | None:
        """The dimension names that ``names`` become, None when none is left."""
        raise NotImplementedError

    def leaf(self, x: Tensor) -> Tensor:
        """The operation on one tensor of shape ``[*B, *F]``."""
        return self.leaves([x])[0]

    def leaves(self, xs: list[Tensor]) -> Sequence[Tensor]:
        """The operation on several; an operation defines this, which costs less a tensor, or `leaf`."""
        return [self.leaf(x) for x in xs]

    def rows(self, x: Tensor) -> Tensor:
        """The operation on a tensor of row numbers; -1 where the result has a row of its own."""
        return self.leaf(x)

    def values(self, rows: np.ndarray) -> np.ndarray:
        """One Python value for each element of the result, when the operation moves no rows."""
        raise NotImplementedError

    def inverse(self, batch: Size) -> StructuralOp:
        """What undoes the operation on a tree whose batch size was ``batch``."""
        raise NotImplementedError


class DividingOp:
    """An operation that cuts a tree into several along one batch dimension.

    Attributes:
        keeps_lock: whether the pieces of a locked tree are locked.
    """

    __slots__ = ()

    keeps_lock: bool = True

    def parts(self) -> Sequence[StructuralOp]:
        """One operation per piece, for kinds of entries that are not cut in one call."""
        raise NotImplementedError

    def sizes(self, batch: Size) -> Sequence[Size]:
        """The batch size of each piece."""
        raise NotImplementedError

    def names(self, names: DimNames) -> DimNames | None:
        """The dimension names of every piece."""
        raise NotImplementedError

    def leaf(self, x: Tensor) -> Sequence[Tensor]:
        """The pieces of one tensor."""
        raise NotImplementedError


def named(names: DimNames) -> DimNames | None:
    """``names``, or None when there is no name among them."""
    for name in names:
        if name is not None:
            return names
    return None
