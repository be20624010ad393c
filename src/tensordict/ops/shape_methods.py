"""Everything that acts on the batch as on the shape of one tensor."""

from __future__ import annotations

from .dense_forms import DenseFormMethods
from .fills import FillMethods
from .joining import JoiningMethods
from .masking import MaskingMethods
from .packing import PackingMethods
from .padding import PaddingMethods
from .pieces import PiecesMethods
from .reshaping import ReshapingMethods
from .row_methods import RowMethods
from .selection import SelectionMethods


class ShapeMethods(
    ReshapingMethods,
    PiecesMethods,
    SelectionMethods,
    RowMethods,
    MaskingMethods,
    JoiningMethods,
    FillMethods,
    PaddingMethods,
    PackingMethods,
    DenseFormMethods,
):
    """Reshaping, pieces, selection, masks, joining, fills, padding, packing."""

    __slots__ = ()
