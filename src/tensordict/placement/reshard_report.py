"""A plan in words: totals, one line a tensor, and where each box of one comes from."""

from __future__ import annotations

from typing import Any

import numpy as np

from .._keys import dotted, path_of
from ..errors import MissingKeyError
from .layout import Box, Layout
from .names import dtype_name
from .reshard import Edge, ReshardPlan
from .reshard_geometry import Geometry
from .reshard_program import count_messages


def summary(plan: ReshardPlan) -> str:
    """A few lines: tensors, ranks, bytes, messages."""
    src = sorted({rank for layout in plan.src.values() for rank in layout.ranks})
    dst = sorted({rank for layout in plan.dst.values() for rank in layout.ranks})
    busiest = max(plan.ranks, key=plan.sent_bytes, default=0)
    lines = [
        f"{len(plan.dst)} tensors from {len(src)} ranks ({span(src)}) "
        f"to {len(dst)} ranks ({span(dst)})",
        f"{size(plan.total_bytes)} cross between ranks, the least possible is "
        f"{size(plan.optimal_bytes)}; whole tensors for everyone would be "
        f"{size(plan.gathered_bytes)}",
        f"{count_messages(plan)} messages in buckets of {size(plan.options.bucket_bytes)}; rank "
        f"{busiest} sends most: {size(plan.sent_bytes(busiest))}",
    ]
    if plan.aliases:
        lines.append(f"{len(plan.aliases)} tensors are others again and move once")
    if plan.unused:
        lines.append(f"{len(plan.unused)} source tensors are not wanted: {_some(plan.unused)}")
    return "\n".join([*lines, f"plan {plan.hash}"])


def table(plan: ReshardPlan, limit: int) -> str:
    """One line for each destination tensor."""
    rows = [("tensor", "shape", "dtype", "from", "to", "moves", "boxes")]
    edges: dict[str, list[Edge]] = {}
    for edge in plan.edges:
        edges.setdefault(edge.dst, []).append(edge)
    for name, layout in list(plan.dst.items())[:limit]:
        shape = "x".join(map(str, layout.shape)) or "scalar"
        to = how(layout)
        if name in plan.aliases:
            rows.append((name, shape, _dtype(layout), f"= {plan.aliases[name]}", to, "-", "-"))
            continue
        feeding = edges.get(name, [])
        sources = list(dict.fromkeys(edge.src for edge in feeding))
        before = list(dict.fromkeys(_dtype(plan.src[source]) for source in sources))
        dtype = " ".join(before)
        if before != [_dtype(layout)]:
            dtype += f" -> {_dtype(layout)}"
        origin = ", ".join(dict.fromkeys(how(plan.src[source]) for source in sources)) or "constant"
        if sources != [name]:
            origin = f"{_clipped(sources)}: {origin}"
        moved = sum(_remote(edge.geometry) * edge.itemsize for edge in feeding)
        boxes = sum(int(edge.geometry.remote.sum()) for edge in feeding)
        rows.append((name, shape, dtype, origin, to, size(moved), str(boxes)))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths)).rstrip() for row in rows]
    if len(plan.dst) > limit:
        lines.append(f"... and {len(plan.dst) - limit} more")
    return "\n".join(lines)


def explain(plan: ReshardPlan, key: Any, rank: int | None) -> str:
    """Where each box of a tensor comes from, and why.

    Raises:
        MissingKeyError: (a ``KeyError``) for a tensor that the plan does not have.
    """
    name = key if type(key) is str else dotted(path_of(key))
    if name not in plan.dst:
        raise MissingKeyError(f"The plan moves no tensor {name!r}. It has {_some(plan.dst)}.")
    layout = plan.dst[name]
    lines = [f"{name}: {list(layout.shape)} {_dtype(layout)}, {how(layout)}"]
    if name in plan.aliases:
        return "\n".join([*lines, f"    is {plan.aliases[name]}, which moves once for both"])
    for edge in plan.edges:
        if edge.dst == name:
            lines += _explain_edge(plan, edge, rank)
    for block in plan.fills.get(name, ()):
        where = _box(Box(block.start, block.stop))
        lines.append(f"    {where} is filled with {block.fill:g} where it lies")
    neutral = [r for r in layout.ranks if layout.neutral(r) is not None and rank in (None, r)]
    if neutral:
        constant = f"{layout.neutral(neutral[0]):g}"
        lines.append(f"    {constant} on {span(neutral)}, so that the {layout.partial} is right")
    return "\n".join(lines)


def _explain_edge(plan: ReshardPlan, edge: Edge, rank: int | None) -> list[str]:
    geometry, src = edge.geometry, plan.src[edge.src]
    head = f"  from {edge.src}: {how(src)}, {_dtype(src)}, as {dtype_name(edge.wire)} on the way"
    lines = [head if edge.reduce is None else f"{head}, {edge.reduce} on arrival"]
    hosts = dict(plan.options.hosts)
    rows = range(len(geometry)) if rank is None else np.flatnonzero(geometry.dst == rank).tolist()
    for row in list(rows)[:200]:
        sender, receiver = int(geometry.src[row]), int(geometry.dst[row])
        at = geometry.box[row]
        start = tuple(geometry.start[at].tolist())[: len(plan.dst[edge.dst].shape)]
        box = Box(start, tuple(geometry.stop[at].tolist())[: len(start)])
        nbytes = size(int(geometry.numel[row]) * edge.itemsize)
        if sender == receiver:
            why = "has it already"
        elif geometry.stage[row]:
            why = f"from rank {sender} of the same host, which received it ({nbytes})"
        elif receiver in hosts and hosts.get(sender) == hosts[receiver]:
            why = f"from rank {sender} of the same host ({nbytes})"
        else:
            why = f"from rank {sender} ({nbytes})"
        lines.append(f"    rank {receiver} {_box(box)}: {why}")
    if len(rows) > 200:
        lines.append(f"    ... and {len(rows) - 200} more; name a rank")
    return lines


def how(layout: Layout) -> str:
    """A layout in a few words.

    >>> how(Layout.replicated([2], [0, 1]))
    'whole on 2 ranks'
    """
    if layout.held is not None:
        return f"{sum(map(len, layout.held))} boxes on {span(layout.ranks)}"
    words = []
    for extent, placement in zip(layout.mesh_shape, layout.placements):
        if placement.kind == "shard":
            strided = f", strided {placement.split_factor}" if placement.split_factor > 1 else ""
            words.append(f"dim {placement.dim} over {extent}{strided}")
        elif placement.kind == "partial" and extent > 1:
            words.append(f"{placement.reduce_op} of {extent}")
        elif extent > 1:
            words.append(f"{extent} copies")
    if len(words) == 1 and words[0].endswith("copies"):
        return f"whole on {len(layout.ranks)} ranks"
    return ", ".join(words) or f"whole on rank {layout.ranks[0]}"


def size(nbytes: int) -> str:
    """Bytes for people.

    >>> size(1536), size(12)
    ('1.5 KiB', '12 B')
    """
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            return f"{nbytes} B" if unit == "B" else f"{value:.4g} {unit}"
        value /= 1024
    raise AssertionError


def span(ranks: Any) -> str:
    """Ranks, a run as first and last.

    >>> span([0, 1, 2, 3]), span([1, 5])
    ('0-3', '1, 5')
    """
    ranks = list(ranks)
    if len(ranks) > 2 and ranks == list(range(ranks[0], ranks[0] + len(ranks))):
        return f"{ranks[0]}-{ranks[-1]}"
    return _some(ranks)


def _remote(geometry: Geometry) -> int:
    return int(geometry.numel[geometry.remote].sum())


def _some(values: Any) -> str:
    texts = list(map(str, values))
    return ", ".join(texts[:8]) + (f" and {len(texts) - 8} more" if len(texts) > 8 else "")


def _clipped(sources: list[str], width: int = 40) -> str:
    """Names in few letters: the first one, from its end, and how many more."""
    more = f" +{len(sources) - 1}" if len(sources) > 1 else ""
    first = sources[0]
    return (first if len(first) <= width else f"..{first[2 - width :]}") + more


def _box(box: Box) -> str:
    return "[" + ", ".join(f"{a}:{b}" for a, b in zip(box.start, box.stop)) + "]"


def _dtype(layout: Layout) -> str:
    return "?" if layout.dtype is None else dtype_name(layout.dtype)
