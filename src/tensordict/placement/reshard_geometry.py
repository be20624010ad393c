"""Which rank sends which box to which rank, for one tensor: arithmetic on arrays of boxes.

A `Geometry` depends on the layouts of both sides alone, so one serves every tensor that is laid
out the same.  All boxes are in the index space of the destination.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from .layout import BoxTable, Layout
from .views import Block

Array: TypeAlias = np.ndarray
# How many elements of candidate pairs are compared at a time.
_CHUNK = 1 << 21


@dataclass(frozen=True, slots=True)
class Request:
    """What a geometry is made from.

    Attributes:
        src: The layout of the source tensor.
        dst: The layout of the destination tensor.
        block: Where the source lies in the destination; ``None`` for all of it, as it is.
        hosts: Rank and number of its host, for the ranks where it is known.
        balanced: Whether holders of one box share the work; else the lowest rank does it.
        turn: Which holder comes first among equals.
    """

    src: Layout
    dst: Layout
    block: Block | None = None
    hosts: tuple[tuple[int, int], ...] = ()
    balanced: bool = True
    turn: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Geometry:
    """Boxes, and rows: which box goes from which rank to which.

    Attributes:
        start: ``[boxes, ndim]``, in the index space of the destination.
        stop: ``[boxes, ndim]``.
        part: ``[boxes]``, which contribution to a partial tensor; 0 elsewhere.
        box: ``[n]``, the box of each row.  Rows ascend by destination, then by place.
        src: ``[n]``, the rank that sends.  A row from a rank to itself is a local copy.
        dst: ``[n]``, the rank that receives.
        stage: ``[n]``, 1 for a row that is passed on by a rank that received it in stage 0.
        n_parts: How many contributions there are.
        needed: Elements that destination ranks do not hold, counted without regard to the rows.
        n_choices: How many different plans the holders allow.
        holes: Rank and number of elements that no source holds, for each destination rank.
    """

    start: Array
    stop: Array
    part: Array
    box: Array
    src: Array
    dst: Array
    stage: Array
    n_parts: int
    needed: int
    n_choices: int
    holes: tuple[tuple[int, int], ...]
    _memo: dict[str, Any] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        return len(self.src)

    @property
    def numel(self) -> Array:
        """``[n]``, elements of each row."""
        found = self._memo.get("numel")
        if found is None:
            found = self._memo["numel"] = np.prod(self.stop - self.start, axis=1)[self.box]
        return found

    @property
    def remote(self) -> Array:
        """``[n]``, whether a row crosses between ranks."""
        return self.src != self.dst

    def per_rank(self, which: str) -> dict[int, int]:
        """Elements that each rank sends (``"src"``) or receives (``"dst"``)."""
        found = self._memo.get(which)
        if found is None:
            mask = self.remote
            ranks, where = np.unique(getattr(self, which)[mask], return_inverse=True)
            sums = np.bincount(where, self.numel[mask], len(ranks)).astype(np.int64)
            found = self._memo[which] = dict(zip(ranks.tolist(), sums.tolist()))
        return found

    def rows_of(self, rank: int) -> Array:
        """Indices of the rows that a rank sends, receives or copies."""
        order = self._memo.get("order")
        if order is None:
            order = {
                name: (np.argsort(ranks, kind="stable"), np.sort(ranks))
                for name, ranks in (("src", self.src), ("dst", self.dst))
            }
            self._memo["order"] = order
        picked = []
        for by, ranks in order.values():
            low, high = np.searchsorted(ranks, [rank, rank + 1])
            picked.append(by[low:high])
        return np.unique(np.concatenate(picked))

    @property
    def digest(self) -> bytes:
        """A digest of the rows."""
        found = self._memo.get("digest")
        if found is None:
            hasher = hashlib.blake2b(digest_size=16)
            for name in ("start", "stop", "part", "box", "src", "dst", "stage"):
                hasher.update(np.ascontiguousarray(getattr(self, name)).data)
            found = self._memo["digest"] = hasher.digest()
        return bytes(found)


def make_geometry(request: Request) -> Geometry:
    """Plan one tensor: minimal boxes, balanced holders.

    >>> from .layout import Placement
    >>> a = Layout.from_placements([4, 4], [2], [Placement("shard", 0)])
    >>> b = Layout.from_placements([4, 4], [2], [Placement("shard", 1)])
    >>> g = make_geometry(Request(a, b))
    >>> [(int(s), int(d), int(n)) for s, d, n in zip(g.src, g.dst, g.numel)]
    [(0, 0, 4), (1, 0, 4), (0, 1, 4), (1, 1, 4)]
    """
    wanted = request.dst.wanted()
    held = request.src.table()
    if request.block is not None:
        low, high = request.block.start or (0,), request.block.stop or (1,)
        wanted = _clip(wanted, np.array(low), np.array(high))
        held = _in_block(held, request.block)
    n_parts = int(request.src.table().part.max(initial=0)) + 1
    atoms = _Groups.of(held, with_part=True)
    if request.src.held is not None and _overlaps(atoms.table):
        atoms = _Groups.of(_cut_apart(held), with_part=True)
    boxes = _Groups.of(wanted, with_part=False)
    i, j, start, stop = intersect(boxes.table, atoms.table)
    order = np.lexsort((atoms.table.part[j], *start.T[::-1], i))
    i, j, start, stop = i[order], j[order], start[order], stop[order]
    numel = np.prod(stop - start, axis=1)
    # One row for each rank of the replica group of a box.
    counts = boxes.counts[i]
    pair = np.repeat(np.arange(len(i)), counts)
    dst = boxes.members[np.repeat(boxes.first[i], counts) + _ramps(counts)]
    atom = j[pair]
    local = atoms.holds(atom, dst)
    needed = int(numel[pair][~local].sum())
    holes = _holes(wanted, dst, numel[pair], n_parts)
    src = dst.copy()
    stage = np.zeros(len(dst), np.int8)
    far = np.flatnonzero(~local)
    if len(far):
        src[far], stage[far] = _choose(request, atoms, pair[far], atom[far], dst[far], numel)
    n_choices = int(atoms.counts[atom[far]].max(initial=1)) if request.balanced else 1
    order = np.argsort(dst, kind="stable")
    return Geometry(
        start=start,
        stop=stop,
        part=atoms.table.part[j],
        box=pair[order].astype(np.int32),
        src=src[order],
        dst=dst[order],
        stage=stage[order],
        n_parts=n_parts,
        needed=needed,
        n_choices=n_choices,
        holes=holes,
    )


@dataclass(frozen=True, slots=True)
class _Groups:
    """Different boxes, and the ranks that hold each: ``members[first : first + count]``."""

    table: BoxTable
    members: Array
    first: Array
    counts: Array

    @staticmethod
    def of(table: BoxTable, *, with_part: bool) -> _Groups:
        n = len(table.rank)
        columns = [table.start, table.stop]
        if with_part:
            columns.append(table.part[:, None].astype(np.int64))
        keys = np.ascontiguousarray(np.concatenate(columns, axis=1))
        if not n:
            empty = np.zeros(0, np.int64)
            return _Groups(table, table.rank, empty, empty)
        order = np.lexsort((table.rank, *keys.T[::-1]))
        keys = keys[order]
        new = np.ones(n, bool)
        new[1:] = (keys[1:] != keys[:-1]).any(axis=1)
        first = np.flatnonzero(new)
        counts = np.diff(np.append(first, n))
        pick = order[first]
        unique = BoxTable(table.rank[pick], table.start[pick], table.stop[pick], table.part[pick])
        return _Groups(unique, table.rank[order], first, counts)

    def holds(self, group: Array, rank: Array) -> Array:
        """Whether a rank is a member of a group, row by row."""
        if not len(group):
            return np.zeros(0, bool)
        span = int(max(self.members.max(), rank.max())) + 1
        owner = np.repeat(np.arange(len(self.counts)), self.counts)
        known = owner * span + self.members  # ascending: ranks ascend within a group
        asked = group * span + rank
        at = np.minimum(np.searchsorted(known, asked), len(known) - 1)
        return known[at] == asked

    def of_group(self, group: int) -> Array:
        first = self.first[group]
        return self.members[first : first + self.counts[group]]


def intersect(a: BoxTable, b: BoxTable) -> tuple[Array, Array, Array, Array]:
    """All pairs of boxes that share elements, by a sweep along the dimension that tells most.

    Returns:
        Rows of ``a``, rows of ``b``, and start and stop of what they share; by row of ``a``.
    """
    ndim = a.start.shape[1]
    none = np.zeros(0, np.int64)
    if not len(a.rank) or not len(b.rank):
        return none, none, np.zeros((0, ndim), np.int64), np.zeros((0, ndim), np.int64)
    dim = max(range(ndim), key=lambda d: len(np.unique(b.start[:, d])))
    by_start = np.argsort(b.start[:, dim], kind="stable")
    starts = b.start[by_start, dim]
    # Ascending although stops need not be: the furthest stop so far.
    reach = np.maximum.accumulate(b.stop[by_start, dim])
    low = np.searchsorted(reach, a.start[:, dim], "right")
    high = np.maximum(np.searchsorted(starts, a.stop[:, dim], "left"), low)
    counts = high - low
    out: list[tuple[Array, Array, Array, Array]] = []
    for first, last in _chunks(counts):
        i = np.repeat(np.arange(first, last), counts[first:last])
        j = by_start[np.repeat(low[first:last], counts[first:last]) + _ramps(counts[first:last])]
        start = np.maximum(a.start[i], b.start[j])
        stop = np.minimum(a.stop[i], b.stop[j])
        keep = (start < stop).all(axis=1)
        out.append((i[keep], j[keep], start[keep], stop[keep]))
    i, j, start, stop = (np.concatenate(column) for column in zip(*out))
    return i, j, start, stop


def _chunks(counts: Array) -> list[tuple[int, int]]:
    """Stretches of rows with a bounded number of pairs each."""
    ends = np.cumsum(counts)
    out, first = [], 0
    while first < len(counts):
        done = int(ends[first - 1]) if first else 0
        last = max(int(np.searchsorted(ends, done + _CHUNK, "right")), first + 1)
        out.append((first, last))
        first = last
    return out


def _ramps(counts: Array) -> Array:
    """``0 .. count - 1`` for each count, one after the other."""
    total = int(counts.sum())
    begins = np.cumsum(counts) - counts
    return np.arange(total) - np.repeat(begins, counts)


def _clip(table: BoxTable, low: Array, high: Array) -> BoxTable:
    """The parts of boxes within one box."""
    start, stop = np.maximum(table.start, low), np.minimum(table.stop, high)
    keep = (start < stop).all(axis=1)
    return BoxTable(table.rank[keep], start[keep], stop[keep], table.part[keep])


def _in_block(table: BoxTable, block: Block) -> BoxTable:
    """Boxes of a source, as boxes of the destination that a block puts it in."""
    n, ndim = len(table.rank), len(block.start)
    start = np.tile(np.array(block.start, np.int64), (n, 1))
    stop = np.tile(np.array(block.stop, np.int64), (n, 1))
    keep = np.ones(n, bool)
    for i, (dim, offset) in enumerate(zip(block.dims, block.offset)):
        if dim < 0:
            keep &= (table.start[:, i] <= offset) & (offset < table.stop[:, i])
        else:
            shift = block.start[dim] - offset
            start[:, dim] = np.maximum(start[:, dim], table.start[:, i] + shift)
            stop[:, dim] = np.minimum(stop[:, dim], table.stop[:, i] + shift)
    if not ndim:
        start, stop = np.zeros((n, 1), np.int64), np.ones((n, 1), np.int64)
    keep &= (start < stop).all(axis=1)
    return BoxTable(table.rank[keep], start[keep], stop[keep], table.part[keep])


def _overlaps(table: BoxTable) -> bool:
    i, j, _, _ = intersect(table, table)
    return bool(((i != j) & (table.part[i] == table.part[j])).any())


def _cut_apart(table: BoxTable) -> BoxTable:
    """Boxes cut along every boundary, so that any two are equal or share nothing."""
    ndim = table.start.shape[1]
    for dim in range(ndim):
        cuts = np.unique(np.concatenate([table.start[:, dim], table.stop[:, dim]]))
        low = np.searchsorted(cuts, table.start[:, dim])
        counts = np.searchsorted(cuts, table.stop[:, dim]) - low
        row = np.repeat(np.arange(len(counts)), counts)
        at = np.repeat(low, counts) + _ramps(counts)
        start, stop = table.start[row], table.stop[row]
        start[:, dim], stop[:, dim] = cuts[at], cuts[at + 1]
        table = BoxTable(table.rank[row], start, stop, table.part[row])
    # A rank may list a box twice; it holds it once.
    keys = np.concatenate(
        [table.rank[:, None], table.part[:, None], table.start, table.stop], axis=1
    )
    _, pick = np.unique(keys, axis=0, return_index=True)
    return BoxTable(table.rank[pick], table.start[pick], table.stop[pick], table.part[pick])


def _holes(wanted: BoxTable, dst: Array, numel: Array, n_parts: int) -> tuple[tuple[int, int], ...]:
    """How many elements each rank wants and nobody holds."""
    if not len(wanted.rank):
        return ()
    size = int(wanted.rank.max()) + 1
    asked = np.bincount(wanted.rank, np.prod(wanted.stop - wanted.start, axis=1), size) * n_parts
    found = np.bincount(dst, numel, size) if len(dst) else np.zeros(size)
    missing = (asked - found).astype(np.int64)
    return tuple((int(rank), int(missing[rank])) for rank in np.flatnonzero(missing))


def _choose(
    request: Request, atoms: _Groups, pair: Array, atom: Array, dst: Array, numel: Array
) -> tuple[Array, Array]:
    """Who sends each row: the only holder, or the least loaded of the nearest ones."""
    src = atoms.members[atoms.first[atom]].copy()
    stage = np.zeros(len(src), np.int8)
    hosts = dict(request.hosts)
    sizes = numel[pair]
    if not request.balanced and not hosts:
        return src, stage
    loads: dict[int, int] = {}
    several = atoms.counts[atom] > 1
    if hosts and not request.src.partial:
        _relay(atoms, pair, atom, dst, hosts, src, stage)
    free = np.flatnonzero(several & (stage == 0))
    fixed = np.flatnonzero(~several | (stage == 1))
    ranks, where = np.unique(src[fixed], return_inverse=True)
    loads.update(zip(ranks.tolist(), np.bincount(where, sizes[fixed], len(ranks)).tolist()))
    # Large rows first; ties in the order of the rows, which is the same everywhere.
    for row in free[np.argsort(-sizes[free], kind="stable")].tolist():
        members = atoms.of_group(int(atom[row])).tolist()
        home = hosts.get(int(dst[row]))
        near = [rank for rank in members if home is not None and hosts.get(rank) == home]
        members = near or members
        if request.balanced:
            at = request.turn % len(members)
            members = members[at:] + members[:at]
            best = min(members, key=lambda rank: loads.get(rank, 0))
        else:
            best = members[0]
        loads[best] = loads.get(best, 0) + int(sizes[row])
        src[row] = best
    return src, stage


def _relay(
    atoms: _Groups,
    pair: Array,
    atom: Array,
    dst: Array,
    hosts: Mapping[int, int],
    src: Array,
    stage: Array,
) -> None:
    """Let a box enter each host once: one rank there receives it and passes it on."""
    entered: dict[tuple[int, int], list[int]] = {}
    for row in range(len(dst)):
        home = hosts.get(int(dst[row]))
        if home is None:
            continue
        if any(hosts.get(rank) == home for rank in atoms.of_group(int(atom[row])).tolist()):
            continue
        entered.setdefault((int(pair[row]), home), []).append(row)
    for number, rows in enumerate(entered.values()):
        # Boxes take turns, so that no rank of a host does all the passing on.
        door = rows[number % len(rows)]
        for row in rows:
            if row != door:
                src[row] = dst[door]
                stage[row] = 1
