"""How much memory a device can still give."""

from __future__ import annotations

import torch

from ..device.ops import ops_for
from ..errors import MemoryBudgetError
from .names import size_text

# Asking costs some 50 microseconds: smaller plans are not worth the question.
CHECKED_NBYTES = 16 << 20


def free_memory(device: torch.device) -> int | None:
    """Free bytes of a device, by its backend or (host) by psutil; ``None`` where it is not told.

    >>> free_memory(torch.device("cpu")) > 0, free_memory(torch.device("meta"))
    (True, None)
    """
    if device.type == "meta":
        return None
    ops = ops_for(device)
    return (ops.free_memory(device) or None) if ops.is_available() else None


def check_free_memory(device: torch.device, need: int) -> None:
    """Refuse what does not fit.

    Raises:
        MemoryBudgetError: saying how many bytes are missing.
    """
    free = free_memory(device)
    if free is not None and need > free:
        raise MemoryBudgetError(
            f"Cannot move to {device}: the plan needs {size_text(need)} there, and "
            f"{size_text(free)} are free; {size_text(need - free)} are missing. "
            f"Nothing was moved. Use fit() to spread the tree over devices."
        )
