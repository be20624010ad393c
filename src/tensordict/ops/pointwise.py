"""Leaf-wise operations: methods made from the op table.

Type checkers read ``pointwise.pyi``, which ``tools/gen_stubs.py`` writes from the table.
"""

from __future__ import annotations

from ..core.node import Node
from .build import install
from .table import POINTWISE


class PointwiseMethods(Node):
    """Arithmetic, comparisons and elementary functions of every leaf."""

    __slots__ = ()


install(PointwiseMethods, POINTWISE)
