"""What one rank does in a reshard: messages in a common order, local copies, reductions.

Both ends derive a message from the plan alone, so they agree on its bytes without a word.
Messages of a pair are cut from a common order of boxes: element size, then tensor, then place.
Boxes below ``pack_below`` share messages; larger ones travel alone, cut where they exceed
``bucket_bytes``.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from .layout import Layout
from .reshard import Edge, ReshardPlan
from .reshard_geometry import Geometry


class Cut(NamedTuple):
    """A box of one of the tensors of a rank, with the dimensions of the destination.

    Attributes:
        slot: Which tensor of the rank's sources or destinations.
        starts: Where the box begins, in each dimension of that tensor.
        sizes: Its extents, in the dimensions of the destination.
        axes: For each dimension of the destination that of the tensor, -1 where it has none.
    """

    slot: int
    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    axes: tuple[int, ...]


class Piece(NamedTuple):
    """A box within a message."""

    cut: Cut
    wire: torch.dtype
    offset: int  # bytes


@dataclass(slots=True)
class Message:
    """Bytes that go from one rank to another at once.

    Attributes:
        stage: 1 for what is passed on after it was received.
        round: Rank pairs of a round do not share a rank as sender, nor as receiver.
        src: The rank that sends.
        dst: The rank that receives.
        number: Position among the messages of the pair in this stage.
        nbytes: Size.
        pieces: The boxes, on this rank's side.
    """

    stage: int
    round: int
    src: int
    dst: int
    number: int
    nbytes: int = 0
    pieces: list[Piece] = field(default_factory=list)

    @property
    def key(self) -> tuple[int, int, int, int, int]:
        """The common order of all messages."""
        return (self.stage, self.round, self.src, self.dst, self.number)

    def add(self, cut: Cut, wire: torch.dtype, nbytes: int) -> None:
        """Append a box."""
        self.pieces.append(Piece(cut, wire, self.nbytes))
        self.nbytes += nbytes


class Slot(NamedTuple):
    """A tensor that a rank reads or writes.

    Attributes:
        name: The tensor.
        box: Which box of it, for a tensor held as flat boxes; else -1.
        part: Which contribution to a partial tensor is collected here; else -1.
        wire: The dtype of a collected contribution.
    """

    name: str
    box: int = -1
    part: int = -1
    wire: torch.dtype | None = None


class Reduction(NamedTuple):
    """Contributions that become a box of a destination."""

    op: str
    parts: tuple[Cut, ...]
    target: Cut


@dataclass(frozen=True, slots=True)
class RankProgram:
    """The part of a plan that one rank carries out.

    Attributes:
        rank: The rank.
        sources: The tensors it reads.
        targets: The tensors it writes.
        messages: What it sends and receives, in the common order.
        copies: Boxes it has already: from a source to a target.
        reductions: What to do when all contributions are there.
        memo: What the executor keeps from run to run.
    """

    rank: int
    sources: tuple[Slot, ...]
    targets: tuple[Slot, ...]
    messages: tuple[Message, ...]
    copies: tuple[tuple[Cut, Cut], ...]
    reductions: tuple[Reduction, ...]
    memo: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    def peak_staging(self, limit: int | None) -> int:
        """Most bytes of messages under way when the oldest one is waited for to make room."""
        peak = 0
        for stage in (0, 1):
            under_way: list[int] = []
            for message in self.messages:
                if message.stage == stage:
                    while under_way and limit and sum(under_way) + message.nbytes > limit:
                        del under_way[0]
                    under_way.append(message.nbytes)
                    peak = max(peak, sum(under_way))
        return peak


def program_of(plan: ReshardPlan, rank: int) -> RankProgram:
    """The program of one rank; kept with the plan.

    >>> from .layout import Layout
    >>> from .reshard import plan_reshard
    >>> a, b = Layout.replicated([8], [0]), Layout.replicated([8], [1])
    >>> [m.nbytes for m in program_of(plan_reshard({"w": a}, {"w": b}), 1).messages]
    [32]
    """
    programs = plan._memo.setdefault("programs", {})
    found = programs.get(rank)
    if found is None:
        found = programs[rank] = _Compiler(plan, rank).run()
    return found


class _Row(NamedTuple):
    """A row of a geometry as one rank sees it; ``read`` and ``write`` are box and starts."""

    src: int
    dst: int
    stage: int
    part: int
    sizes: tuple[int, ...]
    axes: tuple[int, ...]
    read: tuple[int, tuple[int, ...]] | None
    write: tuple[int, tuple[int, ...]] | None


class Place:
    """Where boxes of a layout lie in the local tensor of a rank."""

    def __init__(self, layout: Layout, rank: int) -> None:
        self._boxes = layout.of_rank(rank)
        runs = layout.runs_of(rank)
        self._grid: list[tuple[list[int], list[int]]] | None = None
        if runs is not None:
            self._grid = []
            for dim_runs in runs:
                lengths = [b - a for a, b in dim_runs]
                offsets = np.cumsum([0, *lengths[:-1]]).tolist()
                self._grid.append(([a for a, _ in dim_runs], offsets))

    def find(self, start: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
        """Which flat box (-1 for a product of runs), and the local start."""
        if self._grid is not None:
            local = []
            for at, (begins, offsets) in zip(start, self._grid):
                run = bisect_right(begins, at) - 1
                local.append(offsets[run] + at - begins[run])
            return -1, tuple(local)
        for i, box in enumerate(self._boxes):
            if all(a <= at < b for a, at, b in zip(box.start, start, box.stop)):
                return i, tuple(at - a for at, a in zip(start, box.start))
        raise AssertionError(f"{start} is in none of {self._boxes}")


class _Compiler:
    def __init__(self, plan: ReshardPlan, rank: int) -> None:
        self._plan, self._rank = plan, rank
        self._sources: dict[Slot, int] = {}
        self._targets: dict[Slot, int] = {}
        self._small: dict[tuple[int, int, int], list[tuple[int, Cut, torch.dtype]]] = {}
        self._large: dict[tuple[int, int, int], list[tuple[int, Cut, torch.dtype]]] = {}
        self._copies: list[tuple[Cut, Cut]] = []
        self._reductions: list[Reduction] = []
        self._rows: dict[int, list[_Row]] = {}
        self._places: dict[int, Place] = {}

    def run(self) -> RankProgram:
        edges = sorted(self._plan.edges, key=lambda edge: -edge.itemsize)
        for edge in edges:
            rows = self._rows.get(id(edge.geometry))
            if rows is None:
                rows = self._rows[id(edge.geometry)] = list(self._rows_of(edge))
            for row in rows:
                self._take(edge, row)
            if edge.reduce is not None:
                self._reduce(edge, rows)
        return RankProgram(
            rank=self._rank,
            sources=tuple(self._sources),
            targets=tuple(self._targets),
            messages=tuple(sorted(self._messages(), key=lambda message: message.key)),
            copies=tuple(self._copies),
            reductions=tuple(self._reductions),
        )

    def _place(self, layout: Layout) -> Place:
        found = self._places.get(id(layout))
        if found is None:
            found = self._places[id(layout)] = Place(layout, self._rank)
        return found

    def _rows_of(self, edge: Edge) -> Iterator[_Row]:
        geometry, rank = edge.geometry, self._rank
        src, dst = self._plan.src[edge.src], self._plan.dst[edge.dst]
        ndim, block = len(dst.shape), edge.block
        dims = tuple(range(ndim)) if block is None else block.dims
        axes = tuple(dims.index(d) if d in dims else -1 for d in range(ndim)) or (-1,)
        for row in _as_tuples(geometry, geometry.rows_of(rank)):
            sender, receiver, stage, part, start, stop = row
            sizes = tuple(b - a for a, b in zip(start, stop))
            start = start if ndim else ()
            read = write = None
            if sender == rank and not stage:
                at = start
                if block is not None:
                    at = tuple(
                        offset if dim < 0 else offset + start[dim] - block.start[dim]
                        for dim, offset in zip(dims, block.offset)
                    )
                read = self._place(src).find(at)
            if receiver == rank or (sender == rank and stage):
                write = self._place(dst).find(start)
            yield _Row(sender, receiver, stage, part, sizes, axes, read, write)

    def _source(self, edge: Edge, row: _Row) -> Cut:
        assert row.read is not None
        box, starts = row.read
        slot = self._sources.setdefault(Slot(edge.src, box), len(self._sources))
        return Cut(slot, starts, row.sizes, row.axes)

    def _target(self, edge: Edge, row: _Row, part: int = -1) -> Cut:
        assert row.write is not None
        box, starts = row.write
        wire = None if part < 0 else edge.wire
        slot = self._targets.setdefault(Slot(edge.dst, box, part, wire), len(self._targets))
        # A destination has its own dimensions; a scalar is one element without any.
        axes = tuple(range(len(starts))) or (-1,)
        return Cut(slot, starts, row.sizes, axes)

    def _take(self, edge: Edge, row: _Row) -> None:
        part = row.part if edge.reduce is not None else -1
        if row.src == row.dst:
            self._copies.append((self._source(edge, row), self._target(edge, row, part)))
            return
        if row.src == self._rank:
            cut = self._target(edge, row) if row.stage else self._source(edge, row)
        else:
            cut = self._target(edge, row, part)
        key = (row.stage, row.src, row.dst)
        nbytes = _numel(row.sizes) * edge.itemsize
        if nbytes < self._plan.options.pack_below:
            self._small.setdefault(key, []).append((nbytes, cut, edge.wire))
            return
        limit = self._plan.options.bucket_bytes
        for piece in _split(cut, edge.itemsize, limit):
            size = _numel(piece.sizes) * edge.itemsize
            self._large.setdefault(key, []).append((size, piece, edge.wire))

    def _reduce(self, edge: Edge, rows: list[_Row]) -> None:
        for row in rows:
            if row.dst == self._rank and row.part == 0:
                parts = tuple(
                    self._target(edge, row, part) for part in range(edge.geometry.n_parts)
                )
                assert edge.reduce is not None
                self._reductions.append(Reduction(edge.reduce, parts, self._target(edge, row)))

    def _messages(self) -> Iterator[Message]:
        options = self._plan.options
        # A small box belongs to the message in which it ends, so it may begin before.
        bucket = options.bucket_bytes - options.pack_below
        for key in dict.fromkeys([*self._small, *self._large]):
            stage, src, dst = key
            turn = self._plan.round_of(src, dst)
            numbers: dict[int, Message] = {}
            end = 0
            for nbytes, cut, wire in self._small.get(key, ()):
                end += nbytes
                number = (end - 1) // bucket
                message = numbers.get(number)
                if message is None:
                    message = numbers[number] = Message(stage, turn, src, dst, number)
                message.add(cut, wire, nbytes)
            yield from numbers.values()
            for number, (nbytes, cut, wire) in enumerate(self._large.get(key, ()), len(numbers)):
                message = Message(stage, turn, src, dst, number)
                message.add(cut, wire, nbytes)
                yield message


def _as_tuples(geometry: Geometry, rows: np.ndarray) -> Iterator[Any]:
    box = geometry.box[rows]
    return zip(
        geometry.src[rows].tolist(),
        geometry.dst[rows].tolist(),
        geometry.stage[rows].tolist(),
        geometry.part[box].tolist(),
        map(tuple, geometry.start[box].tolist()),
        map(tuple, geometry.stop[box].tolist()),
    )


def _numel(sizes: tuple[int, ...]) -> int:
    out = 1
    for size in sizes:
        out *= size
    return out


def _split(cut: Cut, itemsize: int, limit: int) -> Iterator[Cut]:
    """The box in pieces of at most ``limit`` bytes, along its first dimensions."""
    nbytes = _numel(cut.sizes) * itemsize
    if nbytes <= limit:
        yield cut
        return
    dim = next(d for d, size in enumerate(cut.sizes) if size > 1)
    size, axis = cut.sizes[dim], cut.axes[dim]
    step = max(1, limit * size // nbytes)
    for first in range(0, size, step):
        starts, sizes = list(cut.starts), list(cut.sizes)
        sizes[dim] = min(step, size - first)
        starts[axis] += first
        yield from _split(cut._replace(starts=tuple(starts), sizes=tuple(sizes)), itemsize, limit)


def count_messages(plan: ReshardPlan) -> int:
    """How many messages all ranks send, without their programs."""
    found = plan._memo.get("n_messages")
    if found is None:
        found = plan._memo["n_messages"] = _count(plan)
    return int(found)


def _count(plan: ReshardPlan) -> int:
    options = plan.options
    bucket = options.bucket_bytes - options.pack_below
    width = max(plan.ranks, default=0) + 1
    # Bytes of small boxes of each (stage, sender, receiver), as one number.
    pairs: np.ndarray = np.zeros(0, np.int64)
    totals: np.ndarray = np.zeros(0)
    out = 0
    for geometry, itemsize, times in plan._kinds():
        nbytes = geometry.numel * itemsize
        large = geometry.remote & (nbytes >= options.pack_below)
        boxes, counts = np.unique(geometry.box[large], return_counts=True)
        for box, count in zip(boxes.tolist(), counts.tolist()):
            sizes = tuple((geometry.stop[box] - geometry.start[box]).tolist())
            whole = Cut(0, (0,) * len(sizes), sizes, tuple(range(len(sizes))))
            out += times * count * sum(1 for _ in _split(whole, itemsize, options.bucket_bytes))
        rest = geometry.remote & ~large
        if rest.any():
            stage = geometry.stage[rest].astype(np.int64)
            keys = (stage * width + geometry.src[rest]) * width + geometry.dst[rest]
            keys = np.concatenate([pairs, keys])
            sums = np.concatenate([totals, nbytes[rest] * float(times)])
            pairs, where = np.unique(keys, return_inverse=True)
            totals = np.bincount(where, sums)
    return out + int(np.ceil(totals / bucket).sum())
