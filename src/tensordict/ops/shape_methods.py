"""Everything that acts on the batch as on the shape of one tensor."""

from __future__ import annotations

from .pieces import PiecesMethods
from .reshaping import ReshapingMethods
from .selection import SelectionMethods


class ShapeMethods(ReshapingMethods, PiecesMethods, SelectionMethods):
    """Reshaping, pieces, selection."""

    __slots__ = ()
