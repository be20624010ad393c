"""Destination tensors twice, so that a rank can serve the old ones while new ones arrive."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..placement.reshard import ReshardPlan
from ..placement.reshard_scales import ScaledPlan
from ..storage.named import tree_of


class DoubleBuffer:
    """Two sets of a rank's destination tensors: one in use, one to be written.

    A rank that keeps serving reads ``front`` while ``reshard(..., out=buffer.back,
    partial=True)`` runs, then calls `swap`.

    Args:
        plan: The plan.
        rank: This rank.
        device: Where the tensors are.

    >>> from tensordict.placement import Layout, plan_reshard
    >>> whole = Layout.replicated([2], [0])
    >>> buffer = DoubleBuffer(plan_reshard({"w": whole}, {"w": whole}), 0)
    >>> back = buffer.back
    >>> buffer.swap() is back
    True
    """

    def __init__(self, plan: ReshardPlan | ScaledPlan, rank: int, device: Any = "cpu") -> None:
        def fresh() -> Any:
            tensors: dict[str, Tensor] = {}
            for name, layout in plan.dst.items():
                if rank in layout.ranks and name not in plan.aliases:
                    shape = layout.local_shape(rank)
                    tensors[name] = torch.zeros(shape, dtype=layout.dtype, device=device)
            for name, other in plan.aliases.items():
                if other in tensors:
                    tensors[name] = tensors[other]
            return tree_of(tensors)

        self.front, self.back = fresh(), fresh()

    def swap(self) -> Any:
        """Exchange the two; returns the one now in front."""
        self.front, self.back = self.back, self.front
        return self.front
