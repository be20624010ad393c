"""Names that older code imports from ``tensordict.prototype``."""

from __future__ import annotations

from .typed.tensorclass import TensorClass, tensorclass

__all__ = ["TensorClass", "tensorclass"]
