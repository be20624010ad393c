"""What a reshard must give, worked out the slow and plain way, for tests of plans and layouts.

`golden_reshard` builds whole tensors, evaluates views with torch itself and slices;
`simulate_reshard` runs the programs of all ranks in one process, message by message.  The two
share nothing but the layouts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..placement.layout import Layout
from ..placement.reshard import ReshardPlan
from ..placement.views import View
from .resharding import Workspace, combine

Locals = dict[int, dict[str, Tensor]]


def shard(layout: Layout, full: Tensor) -> dict[int, Tensor]:
    """The local tensor of each rank of a layout, cut from the whole one.

    >>> from tensordict.placement.layout import Placement
    >>> layout = Layout.from_placements([5], [2], [Placement("shard", 0)])
    >>> [part.tolist() for part in shard(layout, torch.arange(5)).values()]
    [[0, 1, 2], [3, 4]]
    """
    out = {}
    for rank in layout.ranks:
        runs = layout.runs_of(rank)
        if runs is None:
            boxes = [full[box.slices].reshape(-1) for box in layout.of_rank(rank)]
            out[rank] = torch.cat(boxes)
            continue
        local = full
        for dim, dim_runs in enumerate(runs):
            index = torch.cat([torch.arange(a, b) for a, b in dim_runs])
            local = local.index_select(dim, index)
        out[rank] = local.clone()
    return out


def contributions(layout: Layout, full: Tensor) -> tuple[dict[int, Tensor], Tensor]:
    """Local tensors of a partial layout and the whole that they amount to.

    Contribution ``i`` is ``full + i``, so that every one matters whatever the reduction.
    """
    table = layout.table()
    part_of = dict(zip(table.rank.tolist(), table.part.tolist()))
    parts = [(full + i).to(full.dtype) for i in range(max(part_of.values(), default=0) + 1)]
    local = {r: shard(layout, parts[part_of.get(r, 0)])[r] for r in layout.ranks}
    return local, combine(parts, layout.partial or "sum")


def evaluate(view: View, tensors: Mapping[str, Tensor]) -> Tensor:
    """The tensor that a view means, made with torch.

    >>> from tensordict.placement.views import concat
    >>> evaluate(concat(["a", "a"]), {"a": torch.ones(2)}).tolist()
    [1.0, 1.0, 1.0, 1.0]
    """
    if view.op == "leaf":
        return tensors[view.name]
    parts = [evaluate(part, tensors) for part in view.parts]
    return _EVALUATE[view.op](parts, *view.args)


def _pad(parts: list[Tensor], size: int, dim: int, fill: float) -> Tensor:
    shape = list(parts[0].shape)
    shape[dim] = size - shape[dim]
    return torch.cat([parts[0], parts[0].new_full(shape, fill)], dim)


def _interleave(parts: list[Tensor], groups: int, dim: int) -> Tensor:
    pieces = [part.chunk(groups, dim) for part in parts]
    return torch.cat([piece for group in zip(*pieces) for piece in group], dim)


def _deinterleave(
    parts: list[Tensor], index: int, sizes: tuple[int, ...], groups: int, dim: int
) -> Tensor:
    each = [size // groups for size in sizes]
    return torch.cat([g.split(each, dim)[index] for g in parts[0].chunk(groups, dim)], dim)


_EVALUATE: dict[str, Any] = {
    "concat": torch.cat,
    "narrow": lambda parts, start, length, dim: parts[0].narrow(dim, start, length),
    "piece": lambda parts, index, count, dim: parts[0].chunk(count, dim)[index],
    "transpose": lambda parts, a, b: parts[0].transpose(a, b),
    "stack": torch.stack,
    "select": lambda parts, index, dim: parts[0].select(dim, index),
    "pad": _pad,
    "interleave": _interleave,
    "deinterleave": _deinterleave,
    "repeat": lambda parts, groups, times, dim: torch.cat(
        [piece for piece in parts[0].chunk(groups, dim) for _ in range(times)], dim
    ),
}


def golden_reshard(plan: ReshardPlan, full: Mapping[str, Tensor]) -> Locals:
    """Every destination tensor of every rank: whole tensors, views, casts, slices.

    Args:
        plan: The plan.
        full: The whole source tensors by the names that the source has; of partial ones what
            they amount to.

    A partial tensor whose layout stays the same keeps its contributions; here it is as if it had
    been reduced and taken apart again.
    """
    draft = plan._draft
    renamed = {new: full[old] for new, old in draft.names.items() if old in full}
    out: Locals = {rank: {} for layout in plan.dst.values() for rank in layout.ranks}
    for name, layout in plan.dst.items():
        view = draft.views.get(name)
        whole = renamed[name] if view is None else evaluate(view, renamed)
        for rank, local in shard(layout, whole.to(layout.dtype)).items():
            neutral = layout.neutral(rank)
            out[rank][name] = local if neutral is None else torch.full_like(local, neutral)
    return out


@dataclass(slots=True)
class Traffic:
    """What crossed in a simulation.

    Attributes:
        sent: Bytes that each rank sent.
        received: Bytes that each rank received.
        n_messages: How many messages.
    """

    sent: dict[int, int] = field(default_factory=dict)
    received: dict[int, int] = field(default_factory=dict)
    n_messages: int = 0


def simulate_reshard(
    plan: ReshardPlan, sources: Mapping[int, Mapping[str, Tensor]]
) -> tuple[Locals, Traffic]:
    """Run the programs of all ranks in this process.

    Args:
        plan: The plan.
        sources: For each rank its local source tensors by name.

    Returns:
        For each destination rank its tensors by name, and what crossed.
    """
    device = torch.device("cpu")
    spaces = {
        rank: Workspace(plan, rank, sources.get(rank, {}), {}, device=device, buffers=device)
        for rank in plan.ranks
    }
    traffic = Traffic()
    for space in spaces.values():
        space.copy_local()
    for stage in (0, 1):
        under_way: dict[Any, Tensor] = {}
        for rank, space in spaces.items():
            for message in space.program.messages:
                if message.stage == stage and message.src == rank:
                    data = under_way[message.key] = space.outgoing(message)[0].clone()
                    traffic.sent[rank] = traffic.sent.get(rank, 0) + data.numel()
                    traffic.n_messages += 1
        for rank, space in spaces.items():
            for message in space.program.messages:
                if message.stage == stage and message.dst == rank:
                    buffer, stage_buffer = space.incoming(message)
                    buffer.copy_(under_way.pop(message.key))
                    traffic.received[rank] = traffic.received.get(rank, 0) + buffer.numel()
                    if stage_buffer is not None:
                        space.unpack(message, stage_buffer)
        if under_way:
            raise AssertionError(f"messages that nobody receives: {list(under_way)}")
    out: Locals = {}
    for rank, space in spaces.items():
        space.reduce()
        out[rank] = space.results
        for name, other in plan.aliases.items():
            if other in space.results:
                out[rank][name] = space.results[other]
    return {rank: tensors for rank, tensors in out.items() if tensors}, traffic
