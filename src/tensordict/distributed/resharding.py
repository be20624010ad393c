"""The memory side of a reshard: tensors of a rank, views of boxes, packing, reductions.

No communication happens here: `exchange` sends and receives what `Workspace` packs and unpacks.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from ..placement.layout import Layout
from ..placement.reshard import ReshardPlan
from ..placement.reshard_program import Cut, Message, RankProgram, Slot, program_of
from ..placement.views import Block

_MAX_KEPT_NBYTES: Final = 64 << 20
_FOREACH_BELOW: Final = 32 << 10


class _Bound(NamedTuple):
    """Tensors of a side, whether each is dense, and where it begins in its storage."""

    tensors: list[Tensor]
    dense: list[bool]
    begins: list[int]

    @staticmethod
    def of(tensors: list[Tensor]) -> _Bound:
        dense = [tensor.is_contiguous() for tensor in tensors]
        return _Bound(tensors, dense, [int(tensor.storage_offset()) for tensor in tensors])


class Workspace:
    """The tensors of one rank while a plan runs.

    Args:
        plan: The plan.
        rank: This rank.
        sources: Local source tensors by name.
        targets: Local destination tensors by name, written as bytes arrive.  Those that are
            missing are made, on ``device``.
        device: Where new tensors are made.
        buffers: Where messages are packed: what the transport can carry.
    """

    def __init__(
        self,
        plan: ReshardPlan,
        rank: int,
        sources: Mapping[str, Tensor],
        targets: Mapping[str, Tensor],
        *,
        device: torch.device,
        buffers: torch.device,
    ) -> None:
        self.plan = plan
        self.program: RankProgram = program_of(plan, rank)
        self.device = device
        self.copied = False
        self._buffers = buffers
        self._rank = rank
        self.results: dict[str, Tensor] = {}
        self.constant: list[str] = []
        self._stages: Stages = self.program.memo.setdefault("stages", Stages())
        self._fill(rank, targets)
        self._sources = _Bound.of(
            [
                in_box(_plain(sources[slot.name]), plan.src[slot.name], rank, slot)
                for slot in self.program.sources
            ]
        )
        bound = []
        for slot in self.program.targets:
            tensor = self.results[slot.name]
            if slot.part >= 0:
                tensor = torch.empty(tensor.shape, dtype=slot.wire, device=tensor.device)
            bound.append(in_box(tensor, plan.dst[slot.name], rank, slot))
        self._targets = _Bound.of(bound)

    def _fill(self, rank: int, targets: Mapping[str, Tensor]) -> None:
        """Destination tensors, and which of them have constant blocks."""
        for name, layout in self.plan.dst.items():
            if name in self.plan.aliases or not layout.has_rank(rank):
                continue
            tensor = targets.get(name)
            if tensor is None:
                shape = layout.local_shape(rank)
                tensor = torch.empty(shape, dtype=layout.dtype, device=self.device)
            self.results[name] = tensor
            if layout.neutral(rank) is not None or name in self.plan.fills:
                self.constant.append(name)

    @torch.inference_mode()
    def copy_local(self) -> None:
        """Move the boxes that this rank holds already, and write what is constant; once."""
        if self.copied:
            return
        for name in self.constant:
            layout, tensor = self.plan.dst[name], self.results[name]
            neutral = layout.neutral(self._rank)
            if neutral is not None:
                tensor.fill_(neutral)
                continue
            for block in self.plan.fills[name]:
                boxes, runs = layout.of_rank(self._rank), layout.runs_of(self._rank)
                fill_block(tensor, boxes, runs, block)
        copies = self.program.copies
        if copies:
            to = self._views("copied to", self._targets, lambda: [cut for _, cut in copies])
            source = self._views("copied from", self._sources, lambda: [cut for cut, _ in copies])
            small = [i for i, x in enumerate(to) if x.nbytes < _FOREACH_BELOW]
            large = [i for i, x in enumerate(to) if x.nbytes >= _FOREACH_BELOW]
            for some in (small, large):
                _copy_all([to[i] for i in some], [source[i] for i in some])
        self.copied = True

    def outgoing(self, message: Message) -> tuple[Tensor, Stage | None]:
        """The bytes of a message to send, and the buffer that they were packed in.

        In place, without a buffer, where they are in one run already.
        """
        views = self._of_message(message, self._targets if message.stage else self._sources)
        if self._in_place(message, views):
            return _flat_bytes(views[0]), None
        stage = self._stages.take(message, self._buffers)
        _copy_all(stage.views, views)
        return stage.data, stage

    def incoming(self, message: Message) -> tuple[Tensor, Stage | None]:
        """Where to receive a message, and the buffer to `unpack` then; ``None`` for in place."""
        views = self._of_message(message, self._targets)
        if self._in_place(message, views):
            return _flat_bytes(views[0]), None
        stage = self._stages.take(message, self._buffers)
        return stage.data, stage

    def unpack(self, message: Message, stage: Stage) -> None:
        """Move the boxes of a message that has arrived to their places."""
        _copy_all(self._of_message(message, self._targets), stage.views)

    def give_back(self, message: Message, stage: Stage) -> None:
        """Keep a buffer that nothing reads any more for another message."""
        self._stages.keep(message, stage)

    @torch.inference_mode()
    def reduce(self) -> None:
        """Combine the contributions to partial tensors, in their order."""
        tensors = self._targets.tensors
        for reduction in self.program.reductions:
            parts = [view_of(tensors[cut.slot], cut) for cut in reduction.parts]
            cut = reduction.target
            view_of(tensors[cut.slot], cut).copy_(combine(parts, reduction.op))

    def _in_place(self, message: Message, views: list[Tensor]) -> bool:
        if len(views) != 1:
            return False
        view = views[0]
        fits = view.dtype is message.pieces[0].wire and view.is_contiguous()
        return fits and view.device == self._buffers

    def _of_message(self, message: Message, bound: _Bound) -> list[Tensor]:
        return self._views(message.key, bound, lambda: [piece.cut for piece in message.pieces])

    def _views(self, key: Any, bound: _Bound, cuts: Callable[[], list[Cut]]) -> list[Tensor]:
        """The boxes of some cuts; strides of dense tensors are worked out once for a plan."""
        tensors, dense, begins = bound
        known = self.program.memo.get(key)
        if known is None:
            known = [(cut, *_place_in(tensors[cut.slot].shape, cut)) for cut in cuts()]
            self.program.memo[key] = known
        return [
            tensors[cut.slot].as_strided(cut.sizes, strides, begins[cut.slot] + offset)
            if dense[cut.slot]
            else view_of(tensors[cut.slot], cut)
            for cut, strides, offset in known
        ]


class Stage(NamedTuple):
    """A buffer for a message, and the boxes in it."""

    data: Tensor
    views: list[Tensor]


class Stages:
    """Buffers kept from message to message and from run to run, up to a bound.

    Fresh pages cost more than the copy that fills them.  A buffer is handed out to one message at
    a time.
    """

    def __init__(self) -> None:
        self._idle: dict[Any, list[Stage]] = {}
        self._nbytes = 0
        self._lock = threading.Lock()

    def take(self, message: Message, device: torch.device) -> Stage:
        """A buffer for a message."""
        with self._lock:
            idle = self._idle.get(self._key(message, device))
            if idle:
                self._nbytes -= message.nbytes
                return idle.pop()
        data = torch.empty(message.nbytes, dtype=torch.uint8, device=device)
        return Stage(data, _buffer_views(data, message))

    def keep(self, message: Message, stage: Stage) -> None:
        """Take a buffer back."""
        with self._lock:
            if self._nbytes + message.nbytes <= _MAX_KEPT_NBYTES:
                self._nbytes += message.nbytes
                key = self._key(message, stage.data.device)
                self._idle.setdefault(key, []).append(stage)

    @staticmethod
    def _key(message: Message, device: torch.device) -> Any:
        # A box that travels alone fits in any buffer for the same extents.
        if len(message.pieces) == 1:
            return (message.pieces[0].cut.sizes, message.pieces[0].wire, device)
        return (message.key, device)


def _place_in(shape: Sequence[int], cut: Cut) -> tuple[tuple[int, ...], int]:
    """Strides and offset of a box in a dense tensor of a shape."""
    dense = _dense(tuple(shape))
    offset = sum(at * stride for at, stride in zip(cut.starts, dense))
    return tuple(dense[axis] if axis >= 0 else 1 for axis in cut.axes), offset


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
    """Without lazy conjugation, so that strides say all."""
    return tensor.resolve_conj().resolve_neg()


def in_box(tensor: Tensor, layout: Layout, rank: int, slot: Slot) -> Tensor:
    """The tensor, or one of the boxes that it holds one after the other."""
    if slot.box < 0:
        return tensor
    boxes = layout.of_rank(rank)
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


@torch.inference_mode()
def _copy_all(to: list[Tensor], values: list[Tensor]) -> None:
    # The targets of an engine may be inference tensors, which nothing else may write; versions of
    # others grow all the same.
    # Many small boxes gain by one call; for large strided ones it is several times slower.
    if len(to) > 2 and to[0].nbytes < _FOREACH_BELOW:
        torch._foreach_copy_(to, values)
    else:
        for target, value in zip(to, values):
            target.copy_(value)
