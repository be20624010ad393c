"""Leaf-wise operations: methods made from the op table.

Type checkers read ``pointwise.pyi``, which ``tools/gen_stubs.py`` writes from the table.
"""

from __future__ import annotations

from ..core.node import Node
from . import losses  # noqa: F401  (registers rules)
from .build import install
from .table import TABLE


class PointwiseMethods(Node):
    """Arithmetic, comparisons, elementary functions and reductions of every leaf."""

    __slots__ = ()

    __hash__ = None  # type: ignore[assignment]
    __array_ufunc__ = None  # so that ``array + td`` asks the tensordict


install(PointwiseMethods, TABLE)
