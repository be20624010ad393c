"""The memory side of a reshard: tensors of a rank, views of boxes, packing, reductions.

No communication happens here: `exchange` sends and receives what `Workspace` packs and unpacks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..placement.reshard import ReshardPlan
from ..placement.reshard_program import Cut, Message, RankProgram, Slot, program_of
from ..placement.views import Block


class Workspace:
    """The tensors of one rank while a plan runs.

    Args:
        plan: The plan.
        rank: This rank.
        sources: Local source tensors by name.
        targets: Local destination tensors by name, written as bytes arrive.  Those that are
            missing are made, on ``device``.
        device: Where new tensors and message buffers are.
    """

    def __init__(
        self,
        plan: ReshardPlan,
        rank: int,
        sources: Mapping[str, Tensor],
        targets: Mapping[str, Tensor],
        device: torch.device,
    ) -> None:
        self.plan = plan
        self.program: RankProgram = program_of(plan, rank)
        self.device = device
        self.results: dict[str, Tensor] = {}
        self._fill(rank, targets)
        src, dst = plan.src, plan.dst
        self._sources = [
            _in_box(_plain(sources[slot.name]), src[slot.name].of_rank(rank), slot)
            for slot in self.program.sources
        ]
        self._targets = []
        self._parts: list[Tensor] = []
        for slot in self.program.targets:
            tensor = self.results[slot.name]
            if slot.part >= 0:
                tensor = torch.empty(tensor.shape, dtype=slot.wire, device=tensor.device)
                self._parts.append(tensor)
            self._targets.append(_in_box(tensor, dst[slot.name].of_rank(rank), slot))

    def _fill(self, rank: int, targets: Mapping[str, Tensor]) -> None:
        """Destination tensors, with their constant blocks in place."""
        for name, layout in self.plan.dst.items():
            if rank not in layout.ranks or name in self.plan.aliases:
                continue
            tensor = targets.get(name)
            if tensor is None:
                shape = layout.local_shape(rank)
                tensor = torch.empty(shape, dtype=layout.dtype, device=self.device)
            tensor = self.results[name] = tensor.detach()
            for block in self.plan.fills.get(name, ()):
                fill_block(tensor, layout.of_rank(rank), layout.runs_of(rank), block)

    def copy_local(self) -> None:
        """Move the boxes that this rank holds already."""
        copies = self.program.copies
        if copies:
            to = [view_of(self._targets[cut.slot], cut) for _, cut in copies]
            _copy_all(to, [view_of(self._sources[cut.slot], cut) for cut, _ in copies])

    def outgoing(self, message: Message) -> Tensor:
        """The bytes of a message to send: in place where they are in one run, else packed."""
        tensors = self._targets if message.stage else self._sources
        views = [view_of(tensors[piece.cut.slot], piece.cut) for piece in message.pieces]
        if len(views) == 1:
            view, wire = views[0], message.pieces[0].wire
            if view.dtype is wire and view.is_contiguous() and view.device == self.device:
                return _flat_bytes(view)
        buffer = torch.empty(message.nbytes, dtype=torch.uint8, device=self.device)
        _copy_all(_buffer_views(buffer, message), views)
        return buffer

    def incoming(self, message: Message) -> tuple[Tensor, Callable[[], None] | None]:
        """Where to receive a message, and what to do when it is there."""
        views = [view_of(self._targets[piece.cut.slot], piece.cut) for piece in message.pieces]
        if len(views) == 1:
            view, wire = views[0], message.pieces[0].wire
            if view.dtype is wire and view.is_contiguous() and view.device == self.device:
                return _flat_bytes(view), None
        buffer = torch.empty(message.nbytes, dtype=torch.uint8, device=self.device)
        return buffer, lambda: _copy_all(views, _buffer_views(buffer, message))

    def reduce(self) -> None:
        """Combine the contributions to partial tensors, in their order."""
        for reduction in self.program.reductions:
            parts = [view_of(self._targets[cut.slot], cut) for cut in reduction.parts]
            cut = reduction.target
            view_of(self._targets[cut.slot], cut).copy_(combine(parts, reduction.op))
        self._parts.clear()


def view_of(tensor: Tensor, cut: Cut) -> Tensor:
    """The box of a tensor that a cut names, in the dimensions of the destination.

    >>> view_of(torch.arange(6).view(2, 3), Cut(0, (1, 0), (2, 1), (1, 0))).tolist()
    [[3], [4]]
    """
    strides = tensor.stride()
    offset = tensor.storage_offset()
    for at, stride in zip(cut.starts, strides):
        offset += at * stride
    along = [strides[axis] if axis >= 0 else 1 for axis in cut.axes]
    return tensor.as_strided(cut.sizes, along, offset)


def combine(parts: Sequence[Tensor], op: str) -> Tensor:
    """Contributions reduced one after the other.

    >>> combine([torch.tensor([1.0, 4.0]), torch.tensor([3.0, 2.0])], "avg")
    tensor([2., 3.])
    """
    out = parts[0].clone()
    for part in parts[1:]:
        if op in ("sum", "avg"):
            out += part
        elif op == "product":
            out *= part
        elif op == "max":
            out = torch.maximum(out, part)
        else:
            out = torch.minimum(out, part)
    return out / len(parts) if op == "avg" else out


def fill_block(tensor: Tensor, boxes: Any, runs: Any, block: Block) -> None:
    """Write the constant of a block into the part of it that a local tensor holds."""
    if runs is None:
        offset = 0
        for box in boxes:
            flat = tensor.narrow(0, offset, box.numel).view(box.shape)
            _fill_runs(flat, [((a, b),) for a, b in zip(box.start, box.stop)], block)
            offset += box.numel
    else:
        _fill_runs(tensor, runs, block)


def _fill_runs(tensor: Tensor, runs: Any, block: Block) -> None:
    stretches = []
    for dim_runs, low, high in zip(runs, block.start, block.stop):
        found, offset = [], 0
        for a, b in dim_runs:
            first, last = max(a, low), min(b, high)
            if first < last:
                found.append((offset + first - a, offset + last - a))
            offset += b - a
        stretches.append(found)
    for corner in itertools.product(*stretches):
        tensor[tuple(slice(a, b) for a, b in corner)] = block.fill


def _flat_bytes(view: Tensor) -> Tensor:
    """The bytes of a contiguous view; dimensions of one element may have any stride."""
    return view.as_strided((view.numel(),), (1,)).view(torch.uint8)


def _plain(tensor: Tensor) -> Tensor:
    """Without grad history and lazy conjugation, so that strides say all."""
    return tensor.detach().resolve_conj().resolve_neg()


def _in_box(tensor: Tensor, boxes: Any, slot: Slot) -> Tensor:
    """The tensor, or one of the boxes that it holds one after the other."""
    if slot.box < 0:
        return tensor
    offset = sum(box.numel for box in boxes[: slot.box])
    box = boxes[slot.box]
    return tensor.narrow(0, offset, box.numel).view(box.shape)


@lru_cache(maxsize=4096)
def _dense(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    out, step = [], 1
    for size in reversed(sizes):
        out.append(step)
        step *= size
    return tuple(reversed(out))


def _buffer_views(buffer: Tensor, message: Message) -> list[Tensor]:
    typed: dict[torch.dtype, Tensor] = {}
    out = []
    for cut, wire, offset in message.pieces:
        whole = typed.get(wire)
        if whole is None:
            # Wider elements come first, so every offset is a multiple of its element size; the
            # length of the buffer need not be.
            usable = message.nbytes // wire.itemsize * wire.itemsize
            whole = typed[wire] = buffer[:usable].view(wire)
        out.append(whole.as_strided(cut.sizes, _dense(cut.sizes), offset // wire.itemsize))
    return out


def _copy_all(to: list[Tensor], values: list[Tensor]) -> None:
    if len(to) > 2:
        torch._foreach_copy_(to, values)
    else:
        for target, value in zip(to, values):
            target.copy_(value)
