"""The typed classes, under the import path that users type: ``tensordict.tensorclass``.

As an attribute of the package this name is the decorator.
"""

from __future__ import annotations

from .core.leaf import MetaData, NonTensorData, NonTensorDataBase, NonTensorStack
from .typed.tensorclass import TensorClass, is_tensorclass, tensorclass

__all__ = [
    "MetaData",
    "NonTensorData",
    "NonTensorDataBase",
    "NonTensorStack",
    "TensorClass",
    "is_tensorclass",
    "tensorclass",
]
