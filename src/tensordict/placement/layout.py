"""Which rank holds which part of a tensor.

A `Layout` is pure arithmetic: boxes of the global index space per rank.  It needs no process
group and no devices, prints, compares and goes through JSON.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Final

import numpy as np
import torch

from ..errors import LayoutError
from .mesh import Runs, runs_on_mesh
from .names import dtype_name, parse_dtype

_KINDS = ("replicate", "shard")
# What does not change a reduction.
_NEUTRAL: Final[dict[str | None, float]] = {"sum": 0.0, "product": 1.0}


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
class BoxTable:
    """The boxes of a layout that are not empty, as arrays: one row each, by rank.

    Attributes:
        rank: ``[n]``.
        start: ``[n, ndim]``; a scalar counts as one dimension of one element.
        stop: ``[n, ndim]``.
        part: ``[n]``, which contribution to a partial tensor the row is; 0 elsewhere.
    """

    rank: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    part: np.ndarray


@dataclass(frozen=True, slots=True)
class Layout:
    """The boxes of one tensor that each rank holds.

    Made by `from_placements`, `from_boxes`, `replicated` or `from_dtensor`.  Boxes are worked
    out when asked for, so that a layout of a thousand ranks is cheap to make and compare.

    Attributes:
        shape: The global shape.
        ranks: The ranks that take part: of a mesh in row-major order, else ascending.
        mesh_shape: Extent of each mesh axis, ``()`` for a layout made of boxes.
        placements: One per mesh axis.
        order: The mesh axes in the order in which they split.
        held: The boxes of each of ``ranks``, for a layout made of boxes; else ``None``.
        partial: The reduction that combines the copies of a partial tensor, or ``None``.
        dtype: The dtype, where it is known.
    """

    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    mesh_shape: tuple[int, ...] = ()
    placements: tuple[Placement, ...] = ()
    order: tuple[int, ...] = ()
    held: tuple[tuple[Box, ...], ...] | None = None
    partial: str | None = None
    dtype: torch.dtype | None = None
    _memo: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def __hash__(self) -> int:
        found = self._memo.get("hash")
        if found is None:
            parts = (self.shape, self.ranks, self.mesh_shape, self.placements, self.order)
            found = self._memo["hash"] = hash((*parts, self.held, self.partial, self.dtype))
        return int(found)

    @property
    def boxes(self) -> tuple[tuple[int, tuple[Box, ...]], ...]:
        """Pairs of rank and boxes, by rank.  A rank may hold several boxes, or an empty one."""
        return tuple((rank, self.of_rank(rank)) for rank in sorted(self.ranks))

    def has_rank(self, rank: int) -> bool:
        """Whether a rank takes part."""
        return rank in self._positions()

    def of_rank(self, rank: int) -> tuple[Box, ...]:
        """The boxes of one rank, ``()`` when it takes no part."""
        at = self._positions().get(rank)
        if at is None:
            return ()
        if self.held is not None:
            return self.held[at]
        return tuple(
            Box(tuple(a for a, _ in corner), tuple(b for _, b in corner))
            for corner in itertools.product(*self._mesh_runs()[at])
        )

    def runs_of(self, rank: int) -> tuple[Runs, ...] | None:
        """The stretches of each dimension whose product a rank holds, in the local order.

        ``None`` when its boxes are no such product: its local tensor is then flat, the boxes one
        after the other.
        """
        at = self._positions().get(rank)
        if at is None:
            raise LayoutError(f"Cannot tell what rank {rank} holds: it is none of {self.ranks}.")
        return self._mesh_runs()[at] if self.held is None else _grid(self.held[at], self.shape)

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """The shape of the tensor that a rank holds, ``(0, ...)`` when it holds nothing.

        >>> Layout.from_placements([5, 2], [2], [Placement("shard", 0)]).local_shape(1)
        (2, 2)
        """
        known = self._memo.setdefault("local", {})
        found = known.get(rank)
        if found is None:
            runs = self.runs_of(rank)
            if runs is None:
                found = (sum(box.numel for box in self.of_rank(rank)),)
            else:
                found = tuple(sum(b - a for a, b in dim_runs) for dim_runs in runs)
            known[rank] = found
        return tuple(found)

    def table(self) -> BoxTable:
        """The boxes as arrays."""
        found = self._memo.get("table")
        if found is None:
            found = self._memo["table"] = _table_of(self)
        return found

    def neutral(self, rank: int) -> float | None:
        """What a rank holds all over as its contribution, where this is a destination.

        A value becomes a sum as itself on the first contribution and 0 on the others, a product
        with 1 instead: no rounding, and bytes for one of them alone.  ``None`` on a rank that
        holds values: the first one, and every one of an ``avg``, ``max`` or ``min``, which are
        copies.

        >>> sums = [Placement("partial", reduce_op="sum")]
        >>> layout = Layout.from_placements([4], [2], sums)
        >>> layout.neutral(0), layout.neutral(1)
        (None, 0.0)
        """
        constant = _NEUTRAL.get(self.partial)
        if constant is None:
            return None
        parts = self._memo.get("parts")
        if parts is None:
            parts = self._memo["parts"] = _parts(self)
        return constant if parts[rank] else None

    def wanted(self) -> BoxTable:
        """The boxes that values go to, where this is a destination."""
        table = self.table()
        if self.partial not in _NEUTRAL:
            return table
        first = table.part == 0
        return BoxTable(table.rank[first], table.start[first], table.stop[first], table.part[first])

    def as_copies(self) -> Layout:
        """The same boxes, those of partial axes taken for copies of one tensor."""
        copies = tuple(
            Placement("replicate") if p.kind == "partial" else p for p in self.placements
        )
        return replace(self, placements=copies, partial=None, _memo={})

    def as_dtype(self, dtype: torch.dtype | None) -> Layout:
        """The same layout for another dtype."""
        # One object for each dtype, so that going back and forth finds what was worked out.
        variants = self._memo.setdefault("variants", {self.dtype: self})
        found = variants.get(dtype)
        if found is None:
            parts = (self.shape, self.ranks, self.mesh_shape, self.placements, self.order)
            found = variants[dtype] = Layout(*parts, self.held, self.partial, dtype)
            found._memo["variants"] = variants
        return found

    def _positions(self) -> dict[int, int]:
        found = self._memo.get("positions")
        if found is None:
            found = self._memo["positions"] = {rank: i for i, rank in enumerate(self.ranks)}
        return found

    def _mesh_runs(self) -> list[tuple[Runs, ...]]:
        found = self._memo.get("runs")
        if found is None:
            splits = tuple(
                None if p.dim is None else (p.dim, p.split_factor) for p in self.placements
            )
            found = runs_on_mesh(self.shape, self.mesh_shape, splits, self.order)
            self._memo["runs"] = found
        return found

    @classmethod
    def from_boxes(
        cls,
        shape: Sequence[int],
        boxes: Mapping[int, Sequence[Box]],
        *,
        partial: str | None = None,
        dtype: torch.dtype | None = None,
    ) -> Layout:
        """A layout from boxes alone.

        Raises:
            LayoutError: when a box does not fit in ``shape``.

        >>> Layout.from_boxes([4], {0: [Box((0,), (1,))], 1: [Box((1,), (4,))]}).of_rank(1)
        (Box(start=(1,), stop=(4,)),)
        """
        shape = tuple(map(int, shape))
        whole = Box((0,) * len(shape), shape)
        for rank, held in boxes.items():
            for box in held:
                inside = len(box.start) == len(shape) and all(
                    a >= 0 and b <= n for a, b, n in zip(box.start, box.stop, shape)
                )
                if not inside:
                    raise LayoutError(
                        f"Cannot make a layout: {box} of rank {rank} is not within {whole}."
                    )
        ranks = tuple(sorted(boxes))
        held_boxes = tuple(tuple(boxes[rank]) for rank in ranks)
        return cls(shape, ranks, held=held_boxes, partial=partial, dtype=dtype)

    @classmethod
    def replicated(
        cls, shape: Sequence[int], ranks: Sequence[int], *, dtype: torch.dtype | None = None
    ) -> Layout:
        """Every rank holds the whole tensor.

        >>> Layout.replicated([2, 3], range(2)).of_rank(1)
        (Box(start=(0, 0), stop=(2, 3)),)
        """
        whole = [Placement("replicate")]
        return cls.from_placements(shape, [len(ranks)], whole, ranks=ranks, dtype=dtype)

    @classmethod
    def from_placements(
        cls,
        shape: Sequence[int],
        mesh_shape: Sequence[int],
        placements: Sequence[Any],
        *,
        ranks: Sequence[int] | None = None,
        order: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
    ) -> Layout:
        """The layout that DTensor placements on a mesh mean.

        Axes split one after the other by the rule of ``torch.chunk``.  A strided shard is
        resolved by simulating its split, so FSDP over tensor parallelism is exact, uneven sizes
        too.

        Args:
            shape: The global shape.
            mesh_shape: Extent of each mesh axis.
            placements: One per axis: of ``torch.distributed.tensor``, or `Placement`.
            ranks: The ranks of the mesh in row-major order; ``0, 1, ...`` by default.
            order: The axes in the order in which they split; left to right by default.  With an
                order, strided shards are plain ones: the order says what their factor says.
            dtype: The dtype of the tensor.

        Raises:
            LayoutError: when the numbers of axes, placements or ranks do not fit.

        >>> both = (Placement("shard", 0, split_factor=4), Placement("shard", 0))
        >>> Layout.from_placements([16], [2, 4], both).of_rank(5)   # mesh coordinate (1, 1)
        (Box(start=(6,), stop=(8,)),)
        """
        shape, mesh_shape = tuple(map(int, shape)), tuple(map(int, mesh_shape))
        own = tuple(Placement.of(placement) for placement in placements)
        members = tuple(range(math.prod(mesh_shape))) if ranks is None else tuple(map(int, ranks))
        axes = None if order is None else tuple(map(int, order))
        return _laid_out(shape, mesh_shape, own, members, axes).as_dtype(dtype)

    @classmethod
    def from_dtensor(cls, tensor: Any) -> Layout:
        """The layout of a DTensor; reads its mesh and placements, and communicates nothing.

        A strided shard of uneven size can mean two things: what ``distribute_tensor`` makes of
        it, or, under FSDP over tensor parallelism, a shard of a shard.  The local shape tells
        them apart on the ranks where it differs; `layouts_of` knows from the module.
        """
        mesh = tensor.device_mesh
        ranks = mesh.mesh.reshape(-1).tolist()
        order = _order_of(tensor._spec)
        mesh_shape = tuple(mesh.mesh.shape)
        out = cls.from_placements(
            tensor.shape, mesh_shape, tensor.placements, ranks=ranks, order=order
        )
        coordinate = mesh.get_coordinate()
        if coordinate is not None and any(p.split_factor > 1 for p in out.placements):
            rank = ranks[int(np.ravel_multi_index(coordinate, mesh_shape))]
            if out.local_shape(rank) != tuple(tensor._local_tensor.shape):
                out = out.innermost_first()
        return out.as_dtype(tensor.dtype)

    def innermost_first(self) -> Layout:
        """The layout whose axes split from right to left, as FSDP over tensor parallelism does.

        Differs from the strided shards that describe it only where sizes are uneven.
        """
        order = tuple(reversed(range(len(self.mesh_shape))))
        return Layout.from_placements(
            self.shape,
            self.mesh_shape,
            self.placements,
            ranks=self.ranks,
            order=order,
            dtype=self.dtype,
        )

    def to_json(self) -> dict[str, Any]:
        """A JSON value that `from_json` reads: the mesh and placements, or the boxes."""
        out: dict[str, Any] = {"shape": list(self.shape), "ranks": list(self.ranks)}
        if self.held is None:
            out["mesh_shape"] = list(self.mesh_shape)
            out["placements"] = [placement.to_json() for placement in self.placements]
            if self.order != tuple(range(len(self.mesh_shape))):
                out["order"] = list(self.order)
        else:
            out["held"] = [[box.to_json() for box in boxes] for boxes in self.held]
            out["partial"] = self.partial
        if self.dtype is not None:
            out["dtype"] = dtype_name(self.dtype)
        return out

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Layout:
        """The layout of a `to_json` value.

        Raises:
            LayoutError: when it does not fit together.

        >>> layout = Layout.from_placements([5], [2], [Placement("shard", 0)])
        >>> Layout.from_json(layout.to_json()) == layout
        True
        """
        try:
            return cls._read(data)
        except (KeyError, TypeError, AttributeError) as error:
            raise LayoutError(
                f"Cannot read a layout: {type(error).__name__} {error}. Expected what to_json gives."
            ) from None

    @classmethod
    def _read(cls, data: Mapping[str, Any]) -> Layout:
        name = data.get("dtype")
        dtype = None if name is None else parse_dtype(name)
        if "held" not in data:
            return cls.from_placements(
                data["shape"],
                data["mesh_shape"],
                [Placement.from_json(item) for item in data["placements"]],
                ranks=data["ranks"],
                order=data.get("order"),
                dtype=dtype,
            )
        if len(data["ranks"]) != len(data["held"]):
            raise LayoutError(
                f"Cannot read a layout: {len(data['ranks'])} ranks, {len(data['held'])} lists of boxes."
            )
        boxes = {
            int(rank): [Box.from_json(box) for box in held]
            for rank, held in zip(data["ranks"], data["held"])
        }
        return cls.from_boxes(data["shape"], boxes, partial=data.get("partial"), dtype=dtype)


@lru_cache(maxsize=8192)
def _laid_out(
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    placements: tuple[Placement, ...],
    ranks: tuple[int, ...],
    order: tuple[int, ...] | None,
) -> Layout:
    """One object for equal layouts, so that their boxes are worked out once."""
    size = math.prod(mesh_shape)
    if min((*shape, *mesh_shape, *ranks), default=0) < 0:
        raise LayoutError(
            f"Cannot lay out a tensor of shape {shape} on a mesh {mesh_shape} of ranks {ranks}: "
            f"expected no negative numbers."
        )
    if len(placements) != len(mesh_shape) or len(ranks) != size or len(set(ranks)) != size:
        raise LayoutError(
            f"Cannot lay out a tensor of shape {shape}: expected one placement for each axis "
            f"of the mesh {mesh_shape} and {size} different ranks, got {len(placements)} "
            f"placements and {len(ranks)} ranks."
        )
    left_to_right = tuple(range(len(mesh_shape)))
    if order is not None and tuple(sorted(order)) != left_to_right:
        raise LayoutError(
            f"Cannot lay out a tensor of shape {shape}: expected each axis of the mesh "
            f"{mesh_shape} once in the order, got {order}."
        )
    own: list[Placement] = []
    for placement in placements:
        dim = placement.dim
        partial_op = placement.kind == "partial" and placement.reduce_op is not None
        if placement.split_factor < 1 or not (partial_op or placement.kind in _KINDS):
            raise LayoutError(
                f"Cannot lay out a tensor of shape {shape} by {placement}: expected 'replicate', "
                f"'shard' with a split factor of 1 or more, or 'partial' with a reduction."
            )
        if placement.kind == "shard":
            if dim is None or not -len(shape) <= dim < len(shape):
                raise LayoutError(
                    f"Cannot lay out a tensor of shape {shape}: it has no dimension {dim} to split."
                )
            factor = placement.split_factor if order is None else 1
            placement = Placement("shard", dim % len(shape), factor)
        own.append(placement)
    ops = {p.reduce_op for p in own if p.kind == "partial"}
    if len(ops) > 1:
        raise LayoutError(
            f"Cannot lay out a tensor of shape {shape}: expected one reduction for its partial "
            f"axes, got {sorted(map(str, ops))}."
        )
    partial = next(iter(ops), None)
    return Layout(shape, ranks, mesh_shape, tuple(own), order or left_to_right, partial=partial)


def _order_of(spec: Any) -> tuple[int, ...] | None:
    """The order of the axes that a DTensor spec names, ``None`` for left to right."""
    entries = getattr(spec, "shard_order", None) or ()
    named = [int(axis) for entry in entries for axis in entry.mesh_dims]
    if all(list(entry.mesh_dims) == sorted(entry.mesh_dims) for entry in entries):
        return None
    return (*named, *(axis for axis in range(len(spec.placements)) if axis not in named))


def _grid(boxes: tuple[Box, ...], shape: tuple[int, ...]) -> tuple[Runs, ...] | None:
    """The ascending runs whose product the boxes are, in order; ``None`` when there are none."""
    if not boxes:
        return tuple(((0, 0),) for _ in shape)
    runs = tuple(
        tuple(dict.fromkeys((box.start[dim], box.stop[dim]) for box in boxes))
        for dim in range(len(shape))
    )
    if any(a[1] > b[0] for dim_runs in runs for a, b in itertools.pairwise(dim_runs)):
        return None
    corners = [tuple(zip(box.start, box.stop)) for box in boxes]
    return runs if corners == list(itertools.product(*runs)) else None


def _table_of(layout: Layout) -> BoxTable:
    ranks: list[int] = []
    boxes: list[Box] = []
    parts: list[int] = []
    part_of = _parts(layout)
    for rank in sorted(layout.ranks):
        for box in layout.of_rank(rank):
            if box.numel:
                ranks.append(rank)
                boxes.append(box)
                parts.append(part_of[rank])
    ndim = len(layout.shape)
    start = np.array([box.start for box in boxes], np.int64).reshape(len(boxes), ndim)
    stop = np.array([box.stop for box in boxes], np.int64).reshape(len(boxes), ndim)
    if not ndim:
        start = np.zeros((len(boxes), 1), np.int64)
        stop = start + 1
    return BoxTable(np.array(ranks, np.int32), start, stop, np.array(parts, np.int32))


def _parts(layout: Layout) -> dict[int, int]:
    """Which contribution to a partial tensor each rank holds; 0 where there is one alone."""
    if layout.partial is None:
        return dict.fromkeys(layout.ranks, 0)
    if layout.held is not None:
        some = [rank for rank in layout.ranks if any(box.numel for box in layout.of_rank(rank))]
        return {rank: some.index(rank) if rank in some else 0 for rank in layout.ranks}
    axes = [i for i, placement in enumerate(layout.placements) if placement.kind == "partial"]
    sizes = [layout.mesh_shape[axis] for axis in axes]
    out = {}
    for rank, coordinate in zip(layout.ranks, itertools.product(*map(range, layout.mesh_shape))):
        out[rank] = int(np.ravel_multi_index([coordinate[axis] for axis in axes], sizes))
    return out
