"""Running a `ScaledPlan`: find the largest values of blocks, scale and cast, move the rest.

The largest values go round in two reshards of their own, so that every rank hears of trouble before
values move.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..placement.layout import Layout
from ..placement.models import tensors_of
from ..placement.reshard_program import Slot
from ..placement.reshard_scales import Patch, ScaledPlan
from ..placement.scaling import scale_from
from ..storage.named import tree_of
from .exchange import Held, Run, begin, fitting
from .pending import Pending
from .resharding import in_box, view_of


def reshard_scaled(
    td: Any, plan: ScaledPlan, *, group: Any = None, out: Any = None, **options: Any
) -> Pending[Any]:
    """Move tensors as `reshard` does, and make 8-bit floats with scales of them on the way.

    The values and the scales are those of ``convert`` on whole tensors, bit for bit.  Source ranks
    need memory for an 8-bit copy of what they hold.

    Args:
        td: As of `reshard`.
        plan: The same plan on every rank.
        group: As of `reshard`.
        out: As of `reshard`, with the scales.
        **options: As of `reshard`.

    Returns:
        A handle; its result holds the scales too.

    Raises:
        PlanMismatch, PeerLost, TransferTimeout: as of `reshard`.

    >>> from tensordict.distributed.testing import LoopbackGroup
    >>> from tensordict.placement import Placement, plan_scaled_reshard
    >>> rows = Layout.from_placements([4], [2], [Placement("shard", 0)])
    >>> whole = {"w": Layout.replicated([4], [0, 1])}
    >>> plan = plan_scaled_reshard({"w": rows}, whole, torch.float8_e4m3fn)
    >>> def main(transport):
    ...     mine = {"w": torch.full((2,), 7.0 * transport.rank)}
    ...     out = reshard_scaled(mine, plan, transport=transport).wait()
    ...     return (out["w"].float() * out["w_scale"]).tolist()
    >>> LoopbackGroup(2).run(main)[1]
    [0.0, 0.0, 7.0, 7.0]
    """
    small = {k: v for k, v in options.items() if k not in ("partial", "loader", "device")}
    runs = [begin(plan.values, group, options)]
    runs += [begin(few, group, small) for few in (plan.amax, plan.spread)]
    values, amax, spread = runs
    if values is None or amax is None or spread is None:  # the ranks of the three are the same
        return Pending(lambda: None, "reshard of other ranks")
    held = Held.of(td, out)
    run = _ScaledRun(plan, values, amax, spread)
    return Pending(lambda: run.do(held, out), f"reshard on rank {values.rank}")


class _ScaledRun:
    """One rank's part."""

    def __init__(self, plan: ScaledPlan, values: Run, amax: Run, spread: Run) -> None:
        self._plan = plan
        self._values, self._amax, self._spread = values, amax, spread
        self._rank = values.rank
        self._patches = list(plan.patches(self._rank))

    def do(self, held: Held, out: Any) -> Any:
        """Run the three plans; the result of the handle."""
        largest = self._largest(held, out is not None)
        scales = self._scales(largest)
        result = self._values.do(self._scaled(held, scales), out)
        return self._with_scales(result, held, out, scales)

    def _largest(self, held: Held, writes: bool) -> Tensor:
        """The largest value of each block, over all ranks."""
        name = self._plan.name
        mine = Held(error=held.error)
        if held.error is None:
            try:
                if held.queued is not None:
                    held.queued.wait()
                mine.problems = self._misfits(held, writes)
                if not mine.problems:
                    mine.sources = {name: self._own_largest(held.sources)}
            except Exception as error:  # the others must hear of it
                mine.error = error
        compared = tensors_of(self._amax.do(mine, None))
        return tensors_of(self._spread.do(Held(sources=compared), None))[name]

    def _misfits(self, held: Held, writes: bool) -> list[tuple[str, str]]:
        """What this rank has and the plan does not expect."""
        plan, rank = self._plan, self._rank
        problems: list[tuple[str, str]] = []
        needed = {n: x for n, x in plan.values.src.items() if x.has_rank(rank)}
        needed = {n: x.as_dtype(plan.was.get(n, x.dtype)) for n, x in needed.items()}
        held.sources = fitting(rank, held.sources, needed, "the source", problems)
        if writes:
            wanted = {n: x for n, x in plan.dst.items() if x.has_rank(rank)}
            held.targets = fitting(rank, held.targets, wanted, "out", problems)
        return problems

    def _own_largest(self, sources: Mapping[str, Tensor]) -> Tensor:
        found = torch.zeros(self._plan.n_scales, dtype=torch.float32)
        for patch in self._patches:
            section = self._plan.sections[patch.dst]
            parts = _blocks_of(patch, section.extents)
            grid = _grid(found, section)[tuple(slice(a, b) for a, b in parts)]
            here = view_of(self._in_box(sources[patch.src], patch), patch.cut)
            grid.copy_(torch.maximum(grid, block_amax(here, patch.start, section.extents).cpu()))
        return found

    def _scales(self, largest: Tensor) -> Tensor:
        out = torch.empty_like(largest)
        for name, section in self._plan.sections.items():
            dtype = self._plan.values.dst[name].dtype
            assert dtype is not None
            _grid(out, section).copy_(scale_from(_grid(largest, section), dtype))
        return out

    def _scaled(self, held: Held, scales: Tensor) -> Held:
        """What travels: scaled tensors instead of those that there were."""
        done = Held(dict(held.sources), held.targets)
        try:
            for patch in self._patches:
                source = held.sources[patch.src]
                layout = self._plan.values.src[patch.src]
                narrow = done.sources[patch.src]
                if narrow is source:
                    narrow = torch.empty(source.shape, dtype=layout.dtype, device=source.device)
                    done.sources[patch.src] = narrow
                section = self._plan.sections[patch.dst]
                wide = _grid(scales, section).to(source.device)
                for dim, (at, extent) in enumerate(zip(patch.start, section.extents)):
                    index = torch.arange(at, at + patch.cut.sizes[dim], device=source.device)
                    wide = wide.index_select(dim, index // extent)
                here = view_of(self._in_box(source, patch), patch.cut)
                there = view_of(self._in_box(narrow, patch), patch.cut)
                there.copy_((here.to(torch.float32) / wide).to(narrow.dtype))
            for name in self._plan.was:  # of which nothing is wanted from this rank
                if name in held.sources and done.sources[name] is held.sources[name]:
                    dtype = self._plan.values.src[name].dtype
                    done.sources[name] = torch.empty_like(held.sources[name], dtype=dtype)
        except Exception as error:  # the others must hear of it
            done.error = error
        return done

    def _in_box(self, tensor: Tensor, patch: Patch) -> Tensor:
        layout = self._plan.values.src[patch.src]
        return in_box(tensor, layout, self._rank, Slot(patch.src, patch.box))

    def _with_scales(self, result: Any, held: Held, out: Any, scales: Tensor) -> Any:
        plan, rank = self._plan, self._rank
        found: dict[str, Tensor] = {} if out is not None else dict(tensors_of(result))
        loader = self._values.options.get("loader")
        for name, layout in plan.scales.items():
            if not layout.has_rank(rank):
                continue
            base = plan.base_of(name)
            section = plan.sections[base]
            part = local_part(layout, rank, _grid(scales, section).reshape(section.grid))
            if out is not None:
                with torch.inference_mode():  # as some engines make their weights
                    part = held.targets[name].copy_(part)
            else:
                near = found.get(base)
                part = found[name] = part.to("cpu" if near is None else near.device)
            if loader is not None:
                loader(name, part)
        if out is not None:
            return out
        return tree_of(found) if found else None


def _grid(flat: Tensor, section: Any) -> Tensor:
    """The numbers of a section of all, with the dimensions of its tensor."""
    shape = section.grid or (1,) * len(section.extents)
    return flat[section.offset : section.offset + torch.Size(shape).numel()].view(shape)


def _blocks_of(patch: Patch, extents: tuple[int, ...]) -> list[tuple[int, int]]:
    """First and last block (exclusive) of a patch in each dimension."""
    return [
        (at // extent, (at + size - 1) // extent + 1)
        for at, size, extent in zip(patch.start, patch.cut.sizes, extents)
    ]


def block_amax(x: Tensor, start: tuple[int, ...], extents: tuple[int, ...]) -> Tensor:
    """The largest finite absolute value in each block that a part of a tensor touches.

    >>> block_amax(torch.tensor([1.0, -5.0, 2.0]), (3,), (4,))
    tensor([1., 5.])
    """
    x = x.detach().to(torch.float32).abs()
    x = torch.where(x.isfinite(), x, 0)
    for dim, (at, extent) in enumerate(zip(start, extents)):
        before = at % extent
        count = -(-(before + x.shape[dim]) // extent)
        after = count * extent - before - x.shape[dim]
        if count > 1:
            x = pad(x, [0, 0] * (x.ndim - 1 - dim) + [before, after])
            x = x.unflatten(dim, (count, extent)).amax(dim + 1)
        else:
            x = x.amax(dim, keepdim=True)
    return x


def local_part(layout: Layout, rank: int, whole: Tensor) -> Tensor:
    """The local tensor of a rank, copied out of the whole one.

    >>> local_part(Layout.replicated([2], [0]), 0, torch.ones(2))
    tensor([1., 1.])
    """
    runs = layout.runs_of(rank)
    if runs is None:
        return torch.cat([whole[box.slices].reshape(-1) for box in layout.of_rank(rank)])
    for dim, stretches in enumerate(runs):
        whole = torch.cat([whole.narrow(dim, a, b - a) for a, b in stretches], dim)
    return whole.clone()
