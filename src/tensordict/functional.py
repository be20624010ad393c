"""Functions over tensordicts, under the import path that users type: ``tensordict.functional``."""

from __future__ import annotations

from .containers.factories import make_tensordict
from .ops.functions import dense_stack_tds, merge_tensordicts
from .ops.padding import pad, pad_sequence

__all__ = ["dense_stack_tds", "make_tensordict", "merge_tensordicts", "pad", "pad_sequence"]
