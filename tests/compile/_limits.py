"""What the Dynamo of this torch cannot trace of torch itself; no graph of ours can contain it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch


def needs_traced(what: str, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Skip the test unless this torch traces ``fn``, which has nothing of ours in it."""
    torch._dynamo.reset()
    try:
        torch.compile(fn, backend="eager", fullgraph=True)(torch.ones(3))
    except torch._dynamo.exc.Unsupported:
        pytest.skip(f"torch {torch.__version__} cannot trace {what}")
