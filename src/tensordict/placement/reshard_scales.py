"""Plans of reshards that end in 8-bit floats with scales beside them.

A scale belongs to a block of a destination tensor, the whole of it by default.  Shards cut blocks, so
each source rank says what the largest value of its part of each block is, the largest of those is
found and told to all, and then values travel that are scaled and cast already.  Three plans, the
first two of a few bytes for each block.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from ..errors import LayoutError, PlanMismatch, table_of
from .layout import Box, Layout, Placement
from .names import dtype_name, parse_dtype
from .policy import CastPolicy
from .renames import renamer
from .reshard import Layouts, ReshardPlan, plan_reshard
from .reshard_program import Cut, Place
from .reshard_resolve import name_of
from .scaling import FP8, SUFFIX
from .views import Block, Resolved

# Ranks that look for the largest values: enough to share the work of many blocks.
_N_REDUCERS = 8
AMAX = "amax"


class Section(NamedTuple):
    """The blocks of one destination tensor.

    Attributes:
        offset: Where its scales begin among those of all tensors.
        grid: How many blocks there are in each dimension; ``()`` for one block in all.
        extents: The extent of a block in each dimension of the tensor.
    """

    offset: int
    grid: tuple[int, ...]
    extents: tuple[int, ...]


class Patch(NamedTuple):
    """A part of a local source tensor that goes into a scaled destination tensor.

    Attributes:
        src: The source tensor.
        box: Which of its boxes, for one that is held as flat boxes; else -1.
        cut: Where it lies there, in the dimensions of the destination.
        dst: The destination tensor.
        start: Where it begins there.
    """

    src: str
    box: int
    cut: Cut
    dst: str
    start: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class ScaledPlan:
    """How tensors become 8-bit ones in another layout; made by `plan_scaled_reshard`.

    Attributes:
        values: Moves the values, scaled and cast at the source.
        was: The dtype that each scaled source tensor has before.
        sections: The blocks of each scaled destination tensor.
        scales: The layout of each scale tensor.
        block: The extents of a block that were asked for.
    """

    values: ReshardPlan
    was: Mapping[str, torch.dtype]
    sections: Mapping[str, Section]
    scales: Mapping[str, Layout]
    block: tuple[int, ...] | None

    @property
    def dst(self) -> Mapping[str, Layout]:
        """Name and layout of each destination tensor, scales among them."""
        return {**self.values.dst, **self.scales}

    @property
    def aliases(self) -> Mapping[str, str]:
        """Destination tensors that equal another one, and which."""
        return self.values.aliases

    @cached_property
    def n_scales(self) -> int:
        """Scales of all tensors together."""
        return sum(math.prod(section.grid) for section in self.sections.values())

    @cached_property
    def amax(self) -> ReshardPlan:
        """The largest values of blocks, from every source rank to the few that compare them."""
        ranks = self._source_ranks
        src = Layout.from_boxes(
            (self.n_scales,),
            {rank: [self._all_scales] for rank in ranks},
            partial="max",
            dtype=torch.float32,
        )
        return plan_reshard({self.name: src}, {self.name: self._compared})

    @cached_property
    def spread(self) -> ReshardPlan:
        """The largest values, from those that compared them to all ranks."""
        everyone = Layout.replicated((self.n_scales,), self.values.ranks, dtype=torch.float32)
        return plan_reshard({self.name: self._compared}, {self.name: everyone})

    @property
    def _source_ranks(self) -> list[int]:
        holders = {rank for name in self.was for rank in self.values.src[name].ranks}
        return sorted(holders) or list(self.values.ranks[:1])

    @property
    def _all_scales(self) -> Box:
        return Box((0,), (self.n_scales,))

    @cached_property
    def _compared(self) -> Layout:
        few = self._source_ranks[:_N_REDUCERS]
        shard = [Placement("shard", 0)]
        split = Layout.from_placements((self.n_scales,), [len(few)], shard, ranks=few)
        # All ranks, so that all agree; most of them hold nothing.
        boxes = {rank: split.of_rank(rank) for rank in self.values.ranks}
        return Layout.from_boxes((self.n_scales,), boxes, dtype=torch.float32)

    @property
    def name(self) -> str:
        """A name that says what the blocks are, so that plans with other blocks differ."""
        return f"{AMAX}.{self.hash}"

    def base_of(self, scale: str) -> str:
        """The tensor in `sections` that a scale belongs to."""
        name = scale[: -len(SUFFIX)]
        return self.values.aliases.get(name, name)

    @cached_property
    def hash(self) -> str:
        """A digest of the plan of the values and of the blocks."""
        asked = {**self._asked(), "values": self.values.hash}
        return hashlib.blake2b(
            json.dumps(asked, sort_keys=True).encode(), digest_size=16
        ).hexdigest()

    @property
    def scale_bytes(self) -> int:
        """Bytes that cross between ranks for the scales."""
        return self.amax.total_bytes + self.spread.total_bytes

    def patches(self, rank: int) -> Iterator[Patch]:
        """The parts of the local tensors of a rank that are scaled."""
        for edge in self.values.edges:
            layout = self.values.src[edge.src]
            if edge.dst not in self.sections or not layout.has_rank(rank):
                continue
            place = Place(layout, rank)
            block = edge.block or Resolved.of(edge.src, layout.shape).blocks[0]
            for box in layout.of_rank(rank):
                found = _fed_by(box, block)
                if found is not None:
                    at, start, sizes, axes = found
                    which, starts = place.find(at)
                    yield Patch(edge.src, which, Cut(0, starts, sizes, axes), edge.dst, start)

    def summary(self) -> str:
        """That of the values, and what the scales add."""
        text = (
            f"{len(self.sections)} tensors with {self.n_scales} scales: {self.scale_bytes} B more"
        )
        return f"{self.values.summary()}\n{text}"

    def _asked(self) -> dict[str, Any]:
        return {
            "block": None if self.block is None else list(self.block),
            "was": {name: dtype_name(dtype) for name, dtype in sorted(self.was.items())},
            "scales": {name: layout.to_json() for name, layout in sorted(self.scales.items())},
        }

    def to_json(self) -> dict[str, Any]:
        """A JSON value that `from_json` reads."""
        return {**self._asked(), "values": self.values.to_json(), "hash": self.hash}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ScaledPlan:
        """The plan of a `to_json` value.

        Raises:
            PlanMismatch: when planning again gives another plan than the one written.
        """
        values = ReshardPlan.from_json(data["values"])
        block = None if data["block"] is None else tuple(map(int, data["block"]))
        was = {name: parse_dtype(dtype) for name, dtype in data["was"].items()}
        scales = {name: Layout.from_json(layout) for name, layout in data["scales"].items()}
        sections = _sections(values, scales, block, [])
        plan = cls(values, was, sections, scales, block)
        if plan.hash != data["hash"]:
            raise PlanMismatch(
                f"Cannot use the plan read: planning again gives {plan.hash}, it says "
                f"{data['hash']}."
            )
        return plan

    def __repr__(self) -> str:
        return f"ScaledPlan({self.values!r}, {self.n_scales} scales)"


def plan_scaled_reshard(
    src: Mapping[Any, Layout],
    dst: Mapping[Any, Layout],
    dtype: CastPolicy | torch.dtype | str,
    *,
    block: Sequence[int] | None = None,
    **options: Any,
) -> ScaledPlan:
    """Plan a reshard to 8-bit floats, with the scale of each tensor in a tensor beside it.

    As `plan_reshard` with a `CastPolicy` that asks for 8-bit floats, but values are divided by the
    scale of their block before they are cast, at the source.  The scales of ``w`` are in ``w_scale``
    (float32): whole on every rank of ``w``, or as ``dst`` says where it has a layout of that name.

    Args:
        src: As of `plan_reshard`.
        dst: As of `plan_reshard`.
        dtype: An 8-bit dtype, or a policy that asks for one.
        block: The extents of a block of the last dimensions that shares a scale, -1 for a whole
            dimension, as in ``(128, 128)`` or, one scale a row, ``(1, -1)``; dimensions before them
            have a block for each index.  By default a tensor has one scale, of shape ``()``.
        **options: As of `plan_reshard`: ``rename``, ``views``, ``only``, ``bucket_bytes``...

    Raises:
        LayoutError: lists everything that does not fit, partial sources among it.

    >>> rows = [Placement("shard", 0)]
    >>> src = {"w": Layout.from_placements([8, 4], [2], rows, dtype=torch.float32)}
    >>> dst = {"w": Layout.from_placements([8, 4], [2], rows, ranks=[2, 3])}
    >>> plan = plan_scaled_reshard(src, dst, torch.float8_e4m3fn)
    >>> plan.values.total_bytes, list(plan.scales), plan.scales["w_scale"].shape
    (32, ['w_scale'], ())
    """
    if not isinstance(dtype, CastPolicy):
        dtype = CastPolicy(default=dtype)
    if block is not None:
        block = tuple(map(int, block))
        if not block or any(extent < 1 and extent != -1 for extent in block):
            raise LayoutError(f"Cannot plan scales: expected extents of a block, got {block}.")
    wanted = {name_of(key): layout for key, layout in dst.items()}
    made_by_source = _names_at_source(src, options)
    # A scale that the source has is a tensor like any other.
    given = {n: x for n, x in wanted.items() if _base(n) in wanted and n not in made_by_source}
    wanted = {name: layout for name, layout in wanted.items() if name not in given}
    dtype = dtype.keeping([(tuple(n.split(".")), None) for n in wanted if _base(n) in wanted])
    first = plan_reshard(src, wanted, dtype=dtype._with(scale=None), **options)
    problems: list[tuple[str, str]] = []
    narrow = _scaled_sources(first, problems)
    names = {edge.dst for edge in first.edges if edge.src in narrow}
    names |= {name for name, other in first.aliases.items() if other in names}
    sections = _sections(first, [n + SUFFIX for n in names], block, problems)
    scales = _scale_layouts(first, names, sections, given, problems)
    problems += _mixed(first, narrow, sections)
    if problems:
        raise LayoutError(table_of("Cannot plan scales.", problems))
    ties: Mapping[str, str] = getattr(src, "ties", {})
    sources = Layouts(ties=ties)
    for key, layout in src.items():
        name = name_of(key)
        while name in ties:
            name = ties[name]
        sources[name_of(key)] = layout.as_dtype(narrow.get(name, layout.dtype))
    values = plan_reshard(sources, {**wanted, **first.dst}, **options)
    was = {name: first.src[name].dtype or torch.get_default_dtype() for name in narrow}
    return ScaledPlan(values, was, sections, scales, block)


def _base(name: str) -> str | None:
    return name[: -len(SUFFIX)] if name.endswith(SUFFIX) else None


def _names_at_source(src: Mapping[Any, Layout], options: Mapping[str, Any]) -> set[str]:
    """Names that tensors of the source have at the destination, or views of them."""
    new = renamer(options.get("rename"))
    return {new(name_of(key)) for key in src} | set(map(name_of, options.get("views") or ()))


def _scaled_sources(plan: ReshardPlan, problems: list[tuple[str, str]]) -> dict[str, torch.dtype]:
    """Source tensors that are scaled, and the 8-bit dtype that they get."""
    out: dict[str, torch.dtype] = {}
    for edge in plan.edges:
        src, dst = plan.src[edge.src], plan.dst[edge.dst]
        assert src.dtype is not None and dst.dtype is not None
        if dst.dtype not in FP8 or src.dtype in FP8:
            continue
        if not src.dtype.is_floating_point:
            text = (
                f"made of {edge.src!r} of {dtype_name(src.dtype)}: expected floating-point values"
            )
            problems.append((edge.dst, text))
        if src.partial is not None:
            text = f"made of {edge.src!r}, a partial {src.partial}: reduce it in its dtype first"
            problems.append((edge.dst, text))
        if dst.partial is not None:
            problems.append((edge.dst, "scaled and partial at the destination: name shards there"))
        out[edge.src] = dst.dtype
    return out


def _mixed(
    plan: ReshardPlan, narrow: Mapping[str, torch.dtype], sections: Mapping[str, Section]
) -> list[tuple[str, str]]:
    """Sources that would have to travel in several forms, and tensors made of several kinds."""
    out: list[tuple[str, str]] = []
    fed: dict[str, list[tuple[str, Block]]] = {}
    for edge in plan.edges:
        dst = plan.dst[edge.dst]
        if edge.src not in narrow:
            if edge.dst in sections:
                out.append((edge.dst, f"made of {edge.src!r}, which is an 8-bit tensor already"))
            continue
        if dst.dtype is not narrow[edge.src]:
            text = f"goes to {edge.dst!r} in another dtype than to others: reshard them one by one"
            out.append((edge.src, text))
            continue
        shape = plan.src[edge.src].shape
        block = edge.block or Resolved.of(edge.src, shape).blocks[0]
        for name, other in fed.setdefault(edge.src, []):
            one_scale = name == edge.dst and not sections[name].grid
            if not one_scale and _share(block, other):
                text = f"goes to {name!r} and {edge.dst!r} under scales of their own"
                out.append((edge.src, text))
                break
        fed[edge.src].append((edge.dst, block))
    return out


def _share(a: Block, b: Block) -> bool:
    """Whether two blocks take some element of their source both."""
    return all(
        max(x, y) < min(x + m, y + n)
        for x, m, y, n in zip(a.offset, _taken(a), b.offset, _taken(b))
    )


def _taken(block: Block) -> list[int]:
    """How much of each dimension of its source a block takes."""
    return [1 if dim < 0 else block.stop[dim] - block.start[dim] for dim in block.dims]


def _sections(
    plan: ReshardPlan,
    scales: Iterable[str],
    block: tuple[int, ...] | None,
    problems: list[tuple[str, str]],
) -> dict[str, Section]:
    """The blocks of the scaled tensors that are none of others again, by name."""
    out: dict[str, Section] = {}
    offset = 0
    for name in sorted(scale[: -len(SUFFIX)] for scale in scales):
        if name in plan.aliases:
            continue
        shape = plan.dst[name].shape
        grid: tuple[int, ...] = ()
        extents = tuple(max(n, 1) for n in shape) or (1,)
        if block is not None:
            before = len(shape) - len(block)
            if before < 0:
                problems.append((name, f"shape {list(shape)} has no blocks of {list(block)}"))
                continue
            asked = zip(shape[before:], block)
            extents = (*[1] * before, *(max(n, 1) if b < 0 else b for n, b in asked))
            grid = tuple(-(-n // extent) for n, extent in zip(shape, extents))
        out[name] = Section(offset, grid, extents)
        offset += math.prod(grid)
    return out


def _scale_layouts(
    plan: ReshardPlan,
    names: Iterable[str],
    sections: Mapping[str, Section],
    given: Mapping[str, Layout],
    problems: list[tuple[str, str]],
) -> dict[str, Layout]:
    """The layout of the scales of each tensor: the one given, else whole on all of its ranks."""
    out: dict[str, Layout] = {}
    for name in sorted(names):
        section = sections.get(plan.aliases.get(name, name))
        if section is None:  # said already
            continue
        scale = name + SUFFIX
        ranks = plan.dst[name].ranks
        layout = given.get(scale) or Layout.replicated(section.grid, ranks)
        if scale in plan.dst:
            problems.append((scale, f"at the source, and the scale of {name!r}"))
        if layout.shape != section.grid:
            text = f"shape {list(layout.shape)}, there are {list(section.grid)} blocks"
            problems.append((scale, text))
        if layout.dtype not in (None, torch.float32):
            problems.append((scale, f"{dtype_name(layout.dtype)}: scales are float32"))
        if layout.partial is not None or not set(layout.ranks) <= set(plan.ranks):
            problems.append((scale, "expected whole scales on ranks that take part"))
        out[scale] = layout.as_dtype(torch.float32)
    text = "missing at the source, and not the scale of an 8-bit tensor"
    problems += [(scale, text) for scale in sorted(set(given) - set(out))]
    return out


def _fed_by(box: Box, block: Block) -> Any:
    """The part of a block that a box of its source feeds.

    Returns:
        Where it begins in the source and in the destination, its sizes, and for each dimension of
        the destination that of the source; ``None`` when there is none.
    """
    start, stop = list(block.start), list(block.stop)
    for i, (dim, offset) in enumerate(zip(block.dims, block.offset)):
        if dim < 0:
            if not box.start[i] <= offset < box.stop[i]:
                return None
        else:
            shift = block.start[dim] - offset
            start[dim] = max(start[dim], box.start[i] + shift)
            stop[dim] = min(stop[dim], box.stop[i] + shift)
    if any(a >= b for a, b in zip(start, stop)):
        return None
    at = tuple(
        offset if dim < 0 else offset + start[dim] - block.start[dim]
        for dim, offset in zip(block.dims, block.offset)
    )
    dims = block.dims
    axes = tuple(dims.index(d) if d in dims else -1 for d in range(len(start))) or (-1,)
    sizes = tuple(b - a for a, b in zip(start, stop)) or (1,)
    return at, tuple(start) or (0,), sizes, axes
