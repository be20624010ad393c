"""Methods that a ``DataLoader`` calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..core.node import Node
from ..ops.indexing import read_rows
from . import loading as loading  # registers nodes with torch's data loading

if TYPE_CHECKING:
    from typing_extensions import Self


class DataMethods(Node):
    """``__getitems__``."""

    __slots__ = ()

    def __getitems__(self, index: Sequence[int]) -> Self:
        """The rows of a list of positions, read with one index operation."""
        out: Any = read_rows(self, list(index))
        return out
