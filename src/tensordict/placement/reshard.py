"""Planning how tensors get from one layout to another: the fewest bytes, decided once.

`plan_reshard` is pure: it needs no process group and no tensors, and gives every rank the same
`ReshardPlan`.  ``tensordict.distributed.reshard`` runs it.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..errors import LayoutError, PlanMismatch, table_of
from .layout import Layout
from .renames import Rename, renamer
from .reshard_geometry import Geometry, intersect
from .reshard_options import ReshardOptions
from .reshard_resolve import Draft, name_of, resolve
from .views import Block, View

if TYPE_CHECKING:
    from .reshard_program import RankProgram

PLAN_VERSION = 1


@dataclass(frozen=True, slots=True, eq=False)
class Edge:
    """One source tensor feeding one destination tensor, or a block of it.

    Attributes:
        src: Name of the source tensor, as the source has it.
        dst: Name of the destination tensor.
        block: Where the source lies in the destination; ``None`` for all of it, as it is.
        wire: The dtype on the way: the narrower one, so that a narrowing cast happens before
            sending and a widening one after.
        reduce: How contributions to a partial source are combined, or ``None``.
        geometry: The rows.
    """

    src: str
    dst: str
    block: Block | None
    wire: torch.dtype
    reduce: str | None
    geometry: Geometry

    @property
    def itemsize(self) -> int:
        """Bytes of one element on the way."""
        return self.wire.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class ReshardPlan:
    """Who sends what to whom; made by `plan_reshard`, the same on every rank.

    Attributes:
        src: Name and layout of each source tensor that is used.
        dst: Name and layout of each destination tensor.
        edges: What feeds what.
        fills: Constant blocks of destination tensors, by name.
        aliases: Destination tensors that equal another one, and which: they move once.
        unused: Source tensors that no destination wants.
        options: How the exchange is cut up.
    """

    src: Mapping[str, Layout]
    dst: Mapping[str, Layout]
    edges: tuple[Edge, ...]
    fills: Mapping[str, tuple[Block, ...]]
    aliases: Mapping[str, str]
    unused: tuple[str, ...]
    options: ReshardOptions
    _draft: Draft = field(repr=False)
    _memo: dict[str, Any] = field(default_factory=dict, repr=False)

    # --- who takes part ------------------------------------------------------------

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of both sides, ascending."""
        found = self._memo.get("ranks")
        if found is None:
            both = {rank for layout in _distinct(self.src) for rank in layout.ranks}
            both |= {rank for layout in _distinct(self.dst) for rank in layout.ranks}
            found = self._memo["ranks"] = tuple(sorted(both))
        return tuple(found)

    def round_of(self, src: int, dst: int) -> int:
        """The round in which a pair talks: in one round no rank sends or receives twice."""
        positions = self._memo.get("positions")
        if positions is None:
            positions = self._memo["positions"] = {r: i for i, r in enumerate(self.ranks)}
        return int((positions[dst] - positions[src]) % len(positions))

    # --- bytes ----------------------------------------------------------------------

    def sent_bytes(self, rank: int) -> int:
        """Bytes that a rank sends to others.

        >>> a, b = Layout.replicated([8], [0]), Layout.replicated([8], [0, 1])
        >>> plan_reshard({"w": a}, {"w": b}).sent_bytes(0)
        32
        """
        return self._per_rank("src").get(rank, 0)

    def recv_bytes(self, rank: int) -> int:
        """Bytes that a rank receives from others."""
        return self._per_rank("dst").get(rank, 0)

    @property
    def total_bytes(self) -> int:
        """Bytes that cross between ranks."""
        return sum(self._per_rank("dst").values())

    @property
    def optimal_bytes(self) -> int:
        """The least that must cross: what each destination rank wants and does not hold."""
        return sum(edge.geometry.needed * edge.itemsize for edge in self.edges)

    @property
    def efficiency(self) -> float:
        """`optimal_bytes` over `total_bytes`; 1.0 is the best there is."""
        total = self.total_bytes
        return 1.0 if total == 0 else self.optimal_bytes / total

    @property
    def n_messages(self) -> int:
        """Messages that all ranks send together."""
        from .reshard_program import count_messages

        return count_messages(self)

    def for_rank(self, rank: int) -> RankProgram:
        """What one rank sends, receives and copies, in order."""
        from .reshard_program import program_of

        return program_of(self, rank)

    def peak_bytes(self, rank: int) -> int:
        """Most bytes of message buffers that a rank has under way, by simulation.

        Messages whose memory is in one run travel without a buffer and count all the same.
        """
        return self.for_rank(rank).peak_staging(self.options.max_staging_bytes)

    @property
    def gathered_bytes(self) -> int:
        """Bytes that would cross if every destination rank were sent whole tensors."""
        out = 0
        for name, layout in self.dst.items():
            if name not in self.aliases:
                item = _itemsize(layout)
                out += item * int(np.prod(layout.shape, dtype=np.int64)) * len(layout.ranks)
        return out

    def _per_rank(self, which: str) -> dict[int, int]:
        found = self._memo.get(which)
        if found is None:
            sums: Counter[int] = Counter()
            for geometry, item, times in self._kinds():
                for rank, numel in geometry.per_rank(which).items():
                    sums[rank] += numel * item * times
            found = self._memo[which] = dict(sums)
        return dict(found)

    def _kinds(self) -> list[tuple[Geometry, int, int]]:
        """Geometry, bytes of an element, and how many edges are of that kind."""
        found = self._memo.get("kinds")
        if found is None:
            counts: Counter[tuple[int, int]] = Counter()
            by_id: dict[int, Geometry] = {}
            for edge in self.edges:
                by_id[id(edge.geometry)] = edge.geometry
                counts[id(edge.geometry), edge.itemsize] += 1
            found = [(by_id[which], item, n) for (which, item), n in counts.items()]
            self._memo["kinds"] = found
        return list(found)

    # --- rows -----------------------------------------------------------------------

    @property
    def n_transfers(self) -> int:
        """Boxes that cross between ranks."""
        return sum(int(g.remote.sum()) * n for g, _, n in self._kinds())

    @property
    def transfers(self) -> np.ndarray:
        """Every box that moves: a structured array of edge, row, src, dst, stage and nbytes.

        A row from a rank to itself is a local copy.  Built when asked for: a wide plan has
        millions of them, while the plan itself keeps one geometry for all tensors laid out alike.
        """
        columns = [("edge", "i4"), ("row", "i4"), ("src", "i4"), ("dst", "i4")]
        kind = np.dtype([*columns, ("stage", "i1"), ("nbytes", "i8")])
        parts = []
        for number, edge in enumerate(self.edges):
            geometry = edge.geometry
            part = np.empty(len(geometry), kind)
            part["edge"], part["row"] = number, np.arange(len(geometry))
            part["src"], part["dst"] = geometry.src, geometry.dst
            part["stage"], part["nbytes"] = geometry.stage, geometry.numel * edge.itemsize
            parts.append(part)
        return np.concatenate(parts) if parts else np.empty(0, kind)

    def check_coverage(self) -> None:
        """Check by itself that every destination element arrives exactly once.

        Looks at the rows alone, not at how they were made.

        Raises:
            LayoutError: lists each tensor and rank with missing or doubled elements.
        """
        problems: list[tuple[str, str]] = []
        seen: dict[int, list[str]] = {}
        wanted: Counter[tuple[str, int]] = Counter()
        found: Counter[tuple[str, int]] = Counter()
        for edge in self.edges:
            geometry = edge.geometry
            if id(geometry) not in seen:
                seen[id(geometry)] = _doubled(geometry)
            problems += [(edge.dst, text) for text in seen[id(geometry)]]
            sums = np.bincount(geometry.dst, geometry.numel) if len(geometry) else np.zeros(0)
            for rank in np.flatnonzero(sums).tolist():
                found[edge.dst, rank] += int(sums[rank]) // geometry.n_parts
        for name, layout in self.dst.items():
            if name in self.aliases:
                continue
            for rank, boxes in layout.boxes:
                if layout.neutral(rank) is not None:
                    continue
                wanted[name, rank] += sum(box.numel for box in boxes)
                for block in self.fills.get(name, ()):
                    found[name, rank] += sum(_shared(box.start, box.stop, block) for box in boxes)
        for (name, rank), numel in wanted.items():
            if found[name, rank] != numel:
                text = f"rank {rank} wants {numel} elements, {found[name, rank]} arrive"
                problems.append((name, text))
        if problems:
            raise LayoutError(table_of("Cannot use the plan: it does not cover.", problems))

    # --- identity -------------------------------------------------------------------

    @property
    def hash(self) -> str:
        """A digest of what was asked and of every row; equal plans have equal hashes."""
        found = self._memo.get("hash")
        if found is None:
            hasher = hashlib.blake2b(digest_size=16)
            hasher.update(json.dumps(self._asked(in_order=False), sort_keys=True).encode())
            for edge in self.edges:
                hasher.update(edge.geometry.digest)
            found = self._memo["hash"] = hasher.hexdigest()
        return str(found)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ReshardPlan):
            return NotImplemented
        return self is other or self.hash == other.hash

    def __hash__(self) -> int:
        return hash(self.hash)

    def to_json(self) -> dict[str, Any]:
        """What the plan was made of, and its hash; `from_json` plans again and compares."""
        return {**self._asked(), "hash": self.hash}

    def _asked(self, *, in_order: bool = True) -> dict[str, Any]:
        """What was asked; the order of tensors does not matter to the exchange."""
        layouts: dict[Layout, int] = {}

        def leaves(side: Mapping[str, Layout]) -> list[Any]:
            items = side.items() if in_order else sorted(side.items())
            return [[n, layouts.setdefault(layout, len(layouts))] for n, layout in items]

        names = self._draft.names
        src = leaves({names[new]: layout for new, layout in self._draft.src.items()})
        dst = leaves(self.dst)
        return {
            "version": PLAN_VERSION,
            "src": src,
            "dst": dst,
            "layouts": [layout.to_json() for layout in layouts],
            "renames": sorted([old, new] for new, old in names.items() if old != new),
            "views": {name: view.to_json() for name, view in self._draft.views.items()},
            "ties": {names[a]: names[b] for a, b in sorted(self._draft.ties.items())},
            "options": asdict(self.options),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ReshardPlan:
        """The plan of a `to_json` value.

        Raises:
            PlanMismatch: when planning again gives another plan than the one written.
            LayoutError: when it is no such value.
        """
        try:
            return cls._read(data)
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise LayoutError(
                f"Cannot read a plan: {type(error).__name__} {error}. Expected what to_json gives."
            ) from None

    @classmethod
    def _read(cls, data: Mapping[str, Any]) -> ReshardPlan:
        if data.get("version") != PLAN_VERSION:
            raise PlanMismatch(
                f"Cannot read a plan of version {data.get('version')}: expected {PLAN_VERSION}."
            )
        layouts = [Layout.from_json(item) for item in data["layouts"]]
        options = dict(data["options"])
        options["hosts"] = {int(rank): int(host) for rank, host in options["hosts"]}
        src = Layouts({name: layouts[i] for name, i in data["src"]}, ties=data["ties"])
        renames = dict(map(tuple, data["renames"]))
        plan = plan_reshard(
            src,
            {name: layouts[i] for name, i in data["dst"]},
            rename=lambda name: renames.get(name, name),  # each name by itself
            views={name: View.from_json(view) for name, view in data["views"].items()},
            **options,
        )
        if plan.hash != data["hash"]:
            raise PlanMismatch(
                f"Cannot use the plan read: planning again gives {plan.hash}, it says "
                f"{data['hash']}."
            )
        return plan

    # --- for people -----------------------------------------------------------------

    def summary(self) -> str:
        """A few lines: tensors, ranks, bytes, messages."""
        from .reshard_report import summary

        return summary(self)

    def table(self, limit: int = 40) -> str:
        """One line for each destination tensor: shape, dtypes, what moves."""
        from .reshard_report import table

        return table(self, limit)

    def explain(self, name: Any, rank: int | None = None) -> str:
        """Where each box of a tensor comes from, and why; for one rank or all."""
        from .reshard_report import explain

        return explain(self, name, rank)

    def __repr__(self) -> str:
        return (
            f"ReshardPlan({len(self.dst)} tensors, {len(self.ranks)} ranks, "
            f"{self.total_bytes} bytes, hash={self.hash[:8]})"
        )


class Layouts(dict[str, Layout]):
    """Layouts by name, with the tensors that are one and the same.

    Args:
        layouts: Name and layout.
        ties: A name and the name of the tensor that it shares its memory with.
    """

    def __init__(
        self, layouts: Mapping[str, Layout] | None = None, *, ties: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(layouts or {})
        self.ties: dict[str, str] = dict(ties or {})


def plan_reshard(
    src: Mapping[Any, Layout],
    dst: Mapping[Any, Layout],
    *,
    dtype: Any = None,
    rename: Rename = None,
    views: Mapping[str, View] | None = None,
    only: Any = None,
    **options: Any,
) -> ReshardPlan:
    """Plan how the tensors of one side become those of the other.

    Args:
        src: Name and layout of each source tensor, over all ranks that hold parts of it.
        dst: Name and layout of each destination tensor.  Every one needs a source; source
            tensors that nobody wants are listed in ``plan.unused``.
        dtype: The dtype at the destination, of floating-point tensors, where the layout does not
            name one: a dtype or a `CastPolicy`.  By default as at the source.
        rename: Old to new names of source tensors: a function, a mapping (a name stands for all
            below it, ``{fields}`` for one part of a name), or a sequence of these.
        views: Destination tensors that are made of others, by name (with ``{fields}``); see
            `tensordict.placement.views`.  Their sources go by the new names.
        only: Patterns of the destination tensors to move: all by default.
        **options: Fields of `ReshardOptions`: ``bucket_bytes``, ``pack_below``,
            ``max_staging_bytes``, ``sources``, ``hosts``.

    Raises:
        LayoutError: lists everything that does not fit: missing tensors, other shapes or dtypes,
            elements that no source holds, boxes that overlap.

    >>> from tensordict.placement.layout import Placement
    >>> shard = [Placement("shard", 0)]
    >>> src = {"w": Layout.from_placements([8, 4], [4], shard)}
    >>> dst = {"w": Layout.from_placements([8, 4], [2], shard, ranks=[4, 5])}
    >>> plan = plan_reshard(src, dst, dtype=torch.bfloat16)
    >>> plan.total_bytes, plan.efficiency, plan.recv_bytes(4)
    (64, 1.0, 32)
    """
    for side in (src, dst):
        if not isinstance(side, Mapping):
            raise LayoutError(
                f"Cannot plan: expected names and layouts, got {type(side).__name__!r}."
            )
    if isinstance(options.get("hosts"), int):
        options["hosts"] = _hosts_of((*src.values(), *dst.values()), options["hosts"])
    chosen = ReshardOptions.of(**options)
    ties = getattr(src, "ties", {})
    views = views or {}
    renamed = None if rename is None else tuple(map(renamer(rename), map(name_of, src)))
    patterns = only if only is None or isinstance(only, str) else tuple(only)
    sides = (tuple(src.items()), tuple(dst.items()))
    key = (*sides, dtype, renamed, tuple(views.items()), patterns, tuple(ties.items()), chosen)
    try:
        plan = _plans.pop(key, None)
    except TypeError:  # something that is no layout, no dtype, no view: said by name below
        plan = None
    if plan is None:
        draft = resolve(src, dst, dtype=dtype, rename=rename, views=views, only=only, ties=ties)
        plan = _assemble(draft, chosen)
    _plans[key] = plan  # the latest last
    while len(_plans) > _MAX_PLANS:
        del _plans[next(iter(_plans))]
    return plan


def _hosts_of(layouts: Iterable[Any], each: int) -> dict[int, int]:
    """The host of each rank where every one has as many ranks."""
    if each < 1:
        raise LayoutError(f"Cannot plan with {each} ranks on each host: expected 1 or more.")
    known = {id(layout): layout for layout in layouts if isinstance(layout, Layout)}
    return {rank: rank // each for layout in known.values() for rank in layout.ranks}


_MAX_PLANS = 8
_plans: dict[Any, ReshardPlan] = {}


def _assemble(draft: Draft, options: ReshardOptions) -> ReshardPlan:
    from .reshard_choice import Chooser

    chooser = Chooser(draft.ranks, options)
    edges: list[Edge] = []
    problems: list[tuple[str, str]] = []
    for wish in draft.wishes:
        src, dst = draft.src[wish.src], draft.dst[wish.dst]
        assert src.dtype is not None and dst.dtype is not None
        # A partial tensor is reduced in its own dtype, so its parts travel as they are.
        widens = src.dtype.itemsize <= dst.dtype.itemsize
        wire = src.dtype if widens or src.partial else dst.dtype
        stays = src.partial is not None and wish.block is None and src == dst
        if stays:  # each rank keeps its contribution
            src = dst = src.as_copies()
        geometry = chooser.geometry(src, dst, wish.block, wire.itemsize)
        problems += [
            (wish.dst, f"rank {rank}: no source holds {numel} of its elements")
            if numel > 0
            else (wish.dst, f"rank {rank}: {-numel} elements are in more than one of its boxes")
            for rank, numel in geometry.holes
        ]
        name = draft.names[wish.src]
        edges.append(Edge(name, wish.dst, wish.block, wire, src.partial, geometry))
    if problems:
        raise LayoutError(table_of("Cannot plan: the layouts do not cover.", problems))
    return ReshardPlan(
        src={draft.names[name]: draft.src[name] for name in draft.used},
        dst=draft.dst,
        edges=tuple(edges),
        fills=draft.fills,
        aliases=draft.aliases,
        unused=tuple(draft.names[name] for name in draft.src if name not in draft.used),
        options=options,
        _draft=draft,
    )


def _distinct(side: Mapping[str, Layout]) -> list[Layout]:
    return list({id(layout): layout for layout in side.values()}.values())


def _itemsize(layout: Layout) -> int:
    assert layout.dtype is not None
    return layout.dtype.itemsize


def _shared(start: tuple[int, ...], stop: tuple[int, ...], block: Block) -> int:
    sides = zip(start, stop, block.start, block.stop)
    return int(np.prod([max(0, min(b, d) - max(a, c)) for a, b, c, d in sides], dtype=np.int64))


def _doubled(geometry: Geometry) -> list[str]:
    """Ranks that receive an element twice."""
    from .layout import BoxTable

    # Rank and part are two more dimensions, so that only equal ones can share elements.
    extra = np.stack([geometry.dst, geometry.part[geometry.box]], axis=1).astype(np.int64)
    start = np.concatenate([extra, geometry.start[geometry.box]], axis=1)
    stop = np.concatenate([extra + 1, geometry.stop[geometry.box]], axis=1)
    table = BoxTable(geometry.dst, start, stop, geometry.src)
    i, j, low, high = intersect(table, table)
    twice = i < j
    numel = np.prod(high - low, axis=1)[twice]
    ranks = geometry.dst[i[twice]]
    return [
        f"rank {rank}: {int(numel[ranks == rank].sum())} elements arrive twice"
        for rank in np.unique(ranks).tolist()
    ]
