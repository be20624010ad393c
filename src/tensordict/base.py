"""The abstract base, under the import path that users type: ``tensordict.base``."""

from __future__ import annotations

from ._typing import NO_DEFAULT, NestedKey
from .containers.base import TensorDictBase
from .ops.convert import is_tensor_collection
from .ops.keys import default_is_leaf, is_leaf_nontensor

__all__ = [
    "NO_DEFAULT",
    "NestedKey",
    "TensorDictBase",
    "default_is_leaf",
    "is_leaf_nontensor",
    "is_tensor_collection",
]
