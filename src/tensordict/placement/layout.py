"""Which rank holds which part of a tensor.

A `Layout` is pure arithmetic: boxes of the global index space per rank.  It needs no process
group and no devices, prints, compares and goes through JSON.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import LayoutError


@dataclass(frozen=True, slots=True)
class Box:
    """A block of indices, from ``start`` up to, but not with, ``stop`` in each dimension.

    >>> a, b = Box((0, 0), (4, 4)), Box((2, 1), (6, 3))
    >>> a.intersect(b), a.intersect(Box((4, 0), (5, 4)))
    (Box(start=(2, 1), stop=(4, 3)), None)
    """

    start: tuple[int, ...]
    stop: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.start) != len(self.stop) or any(a > b for a, b in zip(self.start, self.stop)):
            raise LayoutError(
                f"Cannot make a box: expected start <= stop in every dimension, "
                f"got start {self.start} and stop {self.stop}."
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """The extent in each dimension."""
        return tuple(b - a for a, b in zip(self.start, self.stop))

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """An index of a global tensor that gives this block."""
        return tuple(slice(a, b) for a, b in zip(self.start, self.stop))

    def intersect(self, other: Box) -> Box | None:
        """The block common to both, ``None`` when they share no element."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        if any(a >= b for a, b in zip(start, stop)):
            return None
        return Box(start, stop)

    def contains(self, other: Box) -> bool:
        """Whether every element of ``other`` is in this box."""
        return other.numel == 0 or self.intersect(other) == other

    def relative_to(self, origin: Box) -> Box:
        """The same block in the indices of a tensor that holds ``origin`` alone."""
        return Box(
            tuple(a - o for a, o in zip(self.start, origin.start)),
            tuple(b - o for b, o in zip(self.stop, origin.start)),
        )

    def to_json(self) -> list[list[int]]:
        """``[start, stop]``."""
        return [list(self.start), list(self.stop)]

    @classmethod
    def from_json(cls, data: Any) -> Box:
        """The box of a `to_json` value."""
        start, stop = data
        return cls(tuple(map(int, start)), tuple(map(int, stop)))


@dataclass(frozen=True, slots=True)
class Placement:
    """What one mesh axis does to a tensor.

    Attributes:
        kind: ``"replicate"``, ``"shard"`` or ``"partial"``.
        dim: The tensor dimension that is split.
        split_factor: Above 1, the split of an axis that is applied after axes to its right
            (FSDP over tensor parallelism).
        reduce_op: How the parts of a partial tensor are combined.
    """

    kind: str
    dim: int | None = None
    split_factor: int = 1
    reduce_op: str | None = None

    @classmethod
    def of(cls, placement: Any) -> Placement:
        """From a placement of ``torch.distributed.tensor``, or one that is ours already."""
        if isinstance(placement, Placement):
            return placement
        if placement.is_replicate():
            return cls("replicate")
        if placement.is_partial():
            return cls("partial", reduce_op=str(placement.reduce_op))
        # `is_shard` does not say yes for a strided shard in every version.
        if hasattr(placement, "dim"):
            return cls("shard", int(placement.dim), int(getattr(placement, "split_factor", 1)))
        raise LayoutError(f"Cannot read the placement {placement!r}: it is of an unknown kind.")

    def to_json(self) -> dict[str, Any]:
        """Only what differs from the default."""
        out: dict[str, Any] = {"kind": self.kind}
        if self.dim is not None:
            out["dim"] = self.dim
        if self.split_factor != 1:
            out["split_factor"] = self.split_factor
        if self.reduce_op is not None:
            out["reduce_op"] = self.reduce_op
        return out

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Placement:
        """The placement of a `to_json` value."""
        dim = data.get("dim")
        return cls(
            str(data["kind"]),
            None if dim is None else int(dim),
            int(data.get("split_factor", 1)),
            data.get("reduce_op"),
        )


@dataclass(frozen=True, slots=True)
class Layout:
    """The boxes of one tensor that each rank holds.

    Attributes:
        shape: The global shape.
        boxes: Pairs of rank and boxes, by rank.  A rank may hold several boxes, or none.
        mesh_shape: Extent of each mesh axis, ``()`` for a layout made of boxes.
        placements: One per mesh axis.
        partial: The reduction that combines the copies of a partial tensor, or ``None``.
    """

    shape: tuple[int, ...]
    boxes: tuple[tuple[int, tuple[Box, ...]], ...]
    mesh_shape: tuple[int, ...] = ()
    placements: tuple[Placement, ...] = ()
    partial: str | None = None

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that take part."""
        return tuple(rank for rank, _ in self.boxes)

    def of_rank(self, rank: int) -> tuple[Box, ...]:
        """The boxes of one rank, ``()`` when it takes no part."""
        return dict(self.boxes).get(rank, ())

    @classmethod
    def from_boxes(
        cls, shape: Sequence[int], boxes: Mapping[int, Sequence[Box]], *, partial: str | None = None
    ) -> Layout:
        """A layout from boxes alone.

        Raises:
            LayoutError: when a box does not fit in ``shape``.

        >>> Layout.from_boxes([4], {0: [Box((0,), (1,))], 1: [Box((1,), (4,))]}).of_rank(1)
        (Box(start=(1,), stop=(4,)),)
        """
        shape = tuple(shape)
        whole = Box((0,) * len(shape), shape)
        for rank, held in boxes.items():
            for box in held:
                if len(box.start) != len(shape) or not whole.contains(box):
                    raise LayoutError(
                        f"Cannot make a layout: {box} of rank {rank} is not within shape {shape}."
                    )
        return cls(shape, tuple((r, tuple(boxes[r])) for r in sorted(boxes)), partial=partial)

    @classmethod
    def replicated(cls, shape: Sequence[int], ranks: Sequence[int]) -> Layout:
        """Every rank holds the whole tensor.

        >>> Layout.replicated([2, 3], range(2)).of_rank(1)
        (Box(start=(0, 0), stop=(2, 3)),)
        """
        return cls.from_placements(shape, [len(ranks)], [Placement("replicate")], ranks=ranks)

    @classmethod
    def from_placements(
        cls,
        shape: Sequence[int],
        mesh_shape: Sequence[int],
        placements: Sequence[Any],
        *,
        ranks: Sequence[int] | None = None,
    ) -> Layout:
        """The layout that DTensor placements on a mesh mean.

        Axes apply from left to right with the rule of ``torch.chunk``.  A strided shard is
        resolved by simulating its split, so FSDP over tensor parallelism is exact, uneven sizes
        too.

        Args:
            shape: The global shape.
            mesh_shape: Extent of each mesh axis.
            placements: One per axis: of ``torch.distributed.tensor``, or `Placement`.
            ranks: The ranks of the mesh in row-major order; ``0, 1, ...`` by default.

        Raises:
            LayoutError: when the numbers of axes, placements or ranks do not fit.

        >>> both = (Placement("shard", 0, split_factor=4), Placement("shard", 0))
        >>> Layout.from_placements([16], [2, 4], both).of_rank(5)   # mesh coordinate (1, 1)
        (Box(start=(6,), stop=(8,)),)
        """
        shape, mesh_shape = tuple(map(int, shape)), tuple(map(int, mesh_shape))
        own = tuple(Placement.of(placement) for placement in placements)
        size = math.prod(mesh_shape)
        ranks = tuple(range(size)) if ranks is None else tuple(ranks)
        if len(own) != len(mesh_shape) or len(ranks) != size:
            raise LayoutError(
                f"Cannot lay out a tensor of shape {shape}: expected one placement for each axis "
                f"of the mesh {mesh_shape} and {size} ranks, got {len(own)} placements and "
                f"{len(ranks)} ranks."
            )
        for placement in own:
            dim = placement.dim
            if placement.kind == "shard" and (dim is None or not -len(shape) <= dim < len(shape)):
                raise LayoutError(
                    f"Cannot lay out a tensor of shape {shape}: it has no dimension {dim} to split."
                )
        coordinates = itertools.product(*map(range, mesh_shape))
        boxes = {
            rank: _boxes_at(shape, mesh_shape, own, coordinate)
            for rank, coordinate in zip(ranks, coordinates)
        }
        partial = next((p.reduce_op for p in own if p.kind == "partial"), None)
        pairs = tuple((rank, boxes[rank]) for rank in sorted(boxes))
        return cls(shape, pairs, mesh_shape, own, partial)

    @classmethod
    def from_dtensor(cls, tensor: Any) -> Layout:
        """The layout of a DTensor; reads its mesh and placements, and communicates nothing."""
        mesh = tensor.device_mesh
        ranks = mesh.mesh.reshape(-1).tolist()
        return cls.from_placements(tensor.shape, mesh.mesh.shape, tensor.placements, ranks=ranks)

    def to_json(self) -> dict[str, Any]:
        """A JSON value that `from_json` reads."""
        return {
            "shape": list(self.shape),
            "boxes": [[rank, [box.to_json() for box in held]] for rank, held in self.boxes],
            "mesh_shape": list(self.mesh_shape),
            "placements": [placement.to_json() for placement in self.placements],
            "partial": self.partial,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Layout:
        """The layout of a `to_json` value.

        >>> layout = Layout.from_placements([5], [2], [Placement("shard", 0)])
        >>> Layout.from_json(layout.to_json()) == layout
        True
        """
        return cls(
            tuple(map(int, data["shape"])),
            tuple(
                (int(rank), tuple(Box.from_json(box) for box in held))
                for rank, held in data["boxes"]
            ),
            tuple(map(int, data["mesh_shape"])),
            tuple(Placement.from_json(item) for item in data["placements"]),
            data["partial"],
        )


Runs = list[tuple[int, int]]


def _boxes_at(
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    placements: tuple[Placement, ...],
    coordinate: tuple[int, ...],
) -> tuple[Box, ...]:
    """The boxes at one mesh coordinate: runs of indices per dimension, and their product."""
    runs: list[Runs] = [[(0, n)] for n in shape]
    for size, placement, at in zip(mesh_shape, placements, coordinate):
        if placement.kind == "shard":
            assert placement.dim is not None
            dim = placement.dim % len(shape)
            runs[dim] = _split(runs[dim], size, placement.split_factor, at)
    merged = [_merge(dim_runs) for dim_runs in runs]
    return tuple(
        Box(tuple(a for a, _ in corner), tuple(b for _, b in corner))
        for corner in itertools.product(*merged)
    )


def _split(runs: Runs, size: int, factor: int, at: int) -> Runs:
    """Part ``at`` of ``size``; with a factor, every ``size``-th of ``size * factor`` pieces."""
    length = sum(b - a for a, b in runs)
    piece = -(-length // (size * factor)) if length else 0
    out: Runs = []
    for j in range(factor):
        first = (at + j * size) * piece
        out += _take(runs, min(first, length), min(first + piece, length))
    return out


def _take(runs: Runs, start: int, stop: int) -> Runs:
    """Positions ``start`` to ``stop`` of the concatenated runs."""
    out: Runs = []
    offset = 0
    for a, b in runs:
        low, high = max(start - offset, 0), min(stop - offset, b - a)
        if low < high:
            out.append((a + low, a + high))
        offset += b - a
    return out


def _merge(runs: Runs) -> Runs:
    """Join runs that touch; one empty run when there is none, so that a box can say its place."""
    out: Runs = []
    for a, b in runs:
        if out and out[-1][1] == a:
            out[-1] = (out[-1][0], b)
        else:
            out.append((a, b))
    return out or [(0, 0)]
