"""Layouts that ranks tell each other, so that each can plan for all.

A rank knows the layouts of what it holds itself.  A trainer and an engine on other ranks, or the
stages of a pipeline, do not know each other's: `share_layouts` collects them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from ..errors import LayoutError, table_of
from ..placement.layout import Box, Layout
from ..placement.reshard import Layouts
from .transport import TorchTransport
from .transport_protocol import Transport


def share_layouts(
    mine: Mapping[str, Mapping[str, Layout]],
    *,
    group: Any = None,
    transport: Transport | None = None,
) -> dict[str, Layouts]:
    """The layouts of every rank, merged by side and name.

    A collective: every rank of the group calls it.

    Args:
        mine: For each side (``"src"``, ``"dst"``, or any name) the layouts that this rank knows;
            sides that it has no part in may be left out.
        group: A process group.
        transport: What to send with instead of a process group.

    Returns:
        For each side the layouts of all tensors, the same on every rank.  Layouts of one tensor
        that cover different ranks become one; the order of tensors is that of the lowest rank
        that names them.

    Raises:
        LayoutError: when ranks disagree about a tensor; lists every disagreement.

    >>> from tensordict.distributed.testing import LoopbackGroup
    >>> def main(transport):
    ...     me = Layout.replicated([2], [transport.rank], dtype=torch.float32)
    ...     side = "src" if transport.rank == 0 else "dst"
    ...     return share_layouts({side: {"w": me}}, transport=transport)
    >>> both = LoopbackGroup(2).run(main)[0]
    >>> both["src"]["w"].ranks, both["dst"]["w"].ranks
    ((0,), (1,))
    """
    carrier = transport or TorchTransport.of(group)
    said = [json.loads(text) for text in _all_texts(carrier, json.dumps(_to_json(mine)).encode())]
    problems: list[tuple[str, str]] = []
    sides: dict[str, dict[str, list[Layout]]] = {}
    ties: dict[str, dict[str, str]] = {}
    for each in said:
        layouts = [Layout.from_json(item) for item in each["layouts"]]
        for side, leaves in each["sides"].items():
            known = sides.setdefault(side, {})
            for name, at in leaves:
                found = known.setdefault(name, [])
                if layouts[at] not in found:
                    found.append(layouts[at])
        for side, pairs in each["ties"].items():
            ties.setdefault(side, {}).update(pairs)
    out = {}
    for side, known in sides.items():
        merged = {name: _merge(name, found, problems) for name, found in known.items()}
        out[side] = Layouts(merged, ties=ties.get(side))
    if problems:
        raise LayoutError(table_of("Cannot share layouts: ranks disagree.", problems))
    return out


def _to_json(mine: Mapping[str, Mapping[str, Layout]]) -> dict[str, Any]:
    numbers: dict[Layout, int] = {}
    sides = {
        side: [[name, numbers.setdefault(x, len(numbers))] for name, x in layouts.items()]
        for side, layouts in mine.items()
    }
    ties = {side: dict(getattr(layouts, "ties", {})) for side, layouts in mine.items()}
    return {"sides": sides, "ties": ties, "layouts": [layout.to_json() for layout in numbers]}


def _merge(name: str, found: list[Layout], problems: list[tuple[str, str]]) -> Layout:
    first = found[0]
    if len(found) == 1:
        return first
    for attribute in ("shape", "dtype", "partial"):
        values = list(dict.fromkeys(getattr(layout, attribute) for layout in found))
        if len(values) > 1:
            problems.append((name, f"{attribute} {' and '.join(map(str, values))}"))
            return first
    boxes: dict[int, tuple[Box, ...]] = {}
    for layout in found:
        for rank, held in layout.boxes:
            if boxes.setdefault(rank, held) != held:
                problems.append((name, f"rank {rank} holds {boxes[rank]} and {held}"))
    return Layout.from_boxes(first.shape, boxes, partial=first.partial, dtype=first.dtype)


def _all_texts(transport: Transport, text: bytes) -> list[bytes]:
    """The bytes of every rank, by rank."""
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(transport.size)]
    transport.all_gather(sizes, torch.tensor([len(text)]), control=True).wait()
    width = int(torch.stack(sizes).max())
    mine = torch.zeros(width, dtype=torch.uint8)
    mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    texts = [torch.zeros(width, dtype=torch.uint8) for _ in range(transport.size)]
    transport.all_gather(texts, mine, control=True).wait()
    return [x[: int(n)].numpy().tobytes() for x, n in zip(texts, sizes)]
