"""The container, under the import path that users type: ``tensordict.tensordict``."""

from __future__ import annotations

from .containers.base import TensorDictBase
from .containers.dense import TensorDict

__all__ = ["TensorDict", "TensorDictBase"]
