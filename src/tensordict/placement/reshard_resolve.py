"""From what a user asks for to which source feeds which destination: names, views, dtypes.

Everything that does not fit is collected and raised at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import Any, NamedTuple

import torch

from .._keys import dotted, path_of
from ..errors import LayoutError, table_of
from .layout import Layout
from .names import dtype_name, parse_dtype
from .policy import CastPolicy
from .renames import Rename, renamer
from .reshard_geometry import intersect
from .scaling import FP8
from .views import Block, View, leaf, template

REDUCTIONS = ("sum", "avg", "product", "max", "min")


class Wish(NamedTuple):
    """A source tensor (by its new name) that feeds a destination tensor."""

    src: str
    dst: str
    block: Block | None


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """What a plan is made of, checked.

    Attributes:
        src: Source layouts with their dtypes, by new name.
        dst: Destination layouts with their dtypes.
        names: New and old name of each source tensor.
        views: How destination tensors are made of others, where they are.
        ties: Source tensors that are others, by new names.
        wishes: What feeds what, in the order of the destination.
        fills: Constant blocks of destination tensors.
        aliases: Destination tensors that equal another one.
    """

    src: dict[str, Layout]
    dst: dict[str, Layout]
    names: dict[str, str]
    views: dict[str, View]
    ties: dict[str, str]
    wishes: list[Wish] = field(default_factory=list)
    fills: dict[str, tuple[Block, ...]] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)

    @property
    def used(self) -> list[str]:
        """The source tensors that feed something, by new name, in order."""
        wanted = {wish.src for wish in self.wishes}
        return [name for name in self.src if name in wanted]

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks of both sides, ascending."""
        layouts = {id(layout): layout for layout in (*self.src.values(), *self.dst.values())}
        return tuple(sorted({rank for layout in layouts.values() for rank in layout.ranks}))


def resolve(
    src: Mapping[Any, Layout],
    dst: Mapping[Any, Layout],
    *,
    dtype: Any,
    rename: Rename,
    views: Mapping[str, View],
    only: Any,
    ties: Mapping[str, str],
) -> Draft:
    """Check and connect both sides.

    Raises:
        LayoutError: lists everything that does not fit.
    """
    problems: list[tuple[str, str]] = []
    sources, names = _renamed(src, rename, problems)
    every = _by_name(dst, problems)
    wanted = _selected(every, only, problems)
    tied = _tied(ties, sources, names, problems)
    sources = {name: layout.as_dtype(_dtype(layout)) for name, layout in sources.items()}
    shapes = {name: layout.shape for name, layout in sources.items()}
    finder = _Finder({name_of(key): leaf(view) for key, view in views.items()})
    draft = Draft(sources, {}, names, {}, tied)
    first: dict[Any, str] = {}
    # By name: ranks that list tensors in other orders must cut the same messages.
    for name, layout in sorted(wanted.items()):
        view = finder.view_of(name)
        if view is None:
            if name not in sources:
                problems.append((name, "missing at the source"))
                continue
            view = leaf(name)
        else:
            draft.views[name] = view
        blocks = _blocks(name, view, shapes, layout, problems)
        if blocks is None:
            continue
        parts = [sources[block.source] for block in blocks if block.source is not None]
        layout = layout.as_dtype(_target_dtype(name, layout, parts, dtype, problems))
        draft.dst[name] = layout
        problems += [(name, text) for text in _refused(layout, parts)]
        key = (_canonical(blocks, tied), layout)
        if key in first:
            draft.aliases[name] = first[key]
            continue
        first[key] = name
        _connect(draft, name, blocks, whole=view.op == "leaf")
    problems += finder.unmatched(every.keys() - wanted.keys())
    ordered = {name: draft.dst[name] for name in wanted if name in draft.dst}
    draft.dst.clear()
    draft.dst.update(ordered)
    if problems:
        many = f"{len(problems)} problems" if len(problems) > 1 else "a problem"
        raise LayoutError(table_of(f"Cannot plan: {many}.", problems))
    return draft


def name_of(key: Any) -> str:
    """The dotted name of a nested key."""
    return key if type(key) is str else dotted(path_of(key))


def _by_name(side: Mapping[Any, Layout], problems: list[tuple[str, str]]) -> dict[str, Layout]:
    out: dict[str, Layout] = {}
    for key, layout in side.items():
        name = name_of(key)
        if not isinstance(layout, Layout):
            problems.append((name, f"expected a Layout, got {type(layout).__name__}"))
        elif name in out:
            problems.append((name, "named twice"))
        else:
            out[name] = layout
    return out


def _renamed(
    src: Mapping[Any, Layout], rename: Rename, problems: list[tuple[str, str]]
) -> tuple[dict[str, Layout], dict[str, str]]:
    """Source layouts by new name, and the old name of each."""
    function = renamer(rename)
    out: dict[str, Layout] = {}
    names: dict[str, str] = {}
    for old, layout in _by_name(src, problems).items():
        new = function(old)
        if new in out:
            problems.append((new, f"two source tensors of this name: {names[new]!r} and {old!r}"))
            continue
        out[new], names[new] = layout, old
    return out, names


def _tied(
    ties: Mapping[str, str],
    sources: Mapping[str, Layout],
    names: Mapping[str, str],
    problems: list[tuple[str, str]],
) -> dict[str, str]:
    """New name of a source tensor and of the one that it is, which is none of others again."""
    new = {old: name for name, old in names.items()}
    out: dict[str, str] = {}
    for old in ties:
        other, seen = ties[old], {old}
        while other in ties and other not in seen:
            seen.add(other)
            other = ties[other]
        if old not in new or other not in new or other in seen:
            continue
        out[new[old]] = new[other]
        if sources[new[old]] != sources[new[other]]:
            problems.append((old, f"tied to {other!r}, which is laid out otherwise"))
    return out


def _selected(
    dst: dict[str, Layout], only: Any, problems: list[tuple[str, str]]
) -> dict[str, Layout]:
    if only is None:
        return dst
    patterns = [only] if isinstance(only, str) else list(only)
    problems += [
        (pattern, "asked for, and no tensor of the destination has such a name")
        for pattern in patterns
        if not any(fnmatch(name, pattern) for name in dst)
    ]
    return {n: v for n, v in dst.items() if any(fnmatch(n, pattern) for pattern in patterns)}


class _Finder:
    """Which view makes a destination tensor: its own, else the first pattern that matches."""

    def __init__(self, views: Mapping[str, View]) -> None:
        self._exact = {name: view for name, view in views.items() if "{" not in name}
        self._patterns = [(n, template(n), view) for n, view in views.items() if "{" in n]
        self._met: set[str] = set()

    def view_of(self, name: str) -> View | None:
        view = self._exact.get(name)
        if view is not None:
            self._met.add(name)
            return view
        for text, pattern, view in self._patterns:
            match = pattern.fullmatch(name)
            if match:
                self._met.add(text)
                return view.bind(match.groupdict())
        return None

    def unmatched(self, others: Iterable[str]) -> list[tuple[str, str]]:
        """Views that make none of the tensors asked for, nor of the others."""
        for name in others:
            self.view_of(name)
        every = [*self._exact, *(text for text, _, _ in self._patterns)]
        return [
            (n, "a view of a tensor that is not at the destination")
            for n in every
            if n not in self._met
        ]


def _blocks(
    name: str,
    view: View,
    shapes: Mapping[str, Sequence[int]],
    layout: Layout,
    problems: list[tuple[str, str]],
) -> tuple[Block, ...] | None:
    missing = [source for source in view.names if source not in shapes]
    if missing:
        problems += [(name, f"made of {source!r}, missing at the source") for source in missing]
        return None
    try:
        made = view.resolve(shapes)
    except LayoutError as error:
        problems.append((name, str(error)))
        return None
    if made.shape != layout.shape:
        text = f"shape {list(made.shape)} at the source, {list(layout.shape)} at the destination"
        problems.append((name, text))
        return None
    return made.blocks


def _dtype(layout: Layout) -> torch.dtype:
    return torch.get_default_dtype() if layout.dtype is None else layout.dtype


def _target_dtype(
    name: str, layout: Layout, parts: list[Layout], dtype: Any, problems: list[tuple[str, str]]
) -> torch.dtype:
    """The dtype of a destination tensor: its own, else the one asked for, else the source's."""
    present = {_dtype(part) for part in parts} or {_dtype(layout)}
    asked: torch.dtype | None = None
    source = next(iter(present))
    if isinstance(dtype, CastPolicy):
        asked = dtype.dtype_for(tuple(name.split(".")), source)
        if dtype.scale is not None:
            problems += [(name, text) for text in _unscaled(source, layout.dtype or asked)]
    elif dtype is not None and source.is_floating_point:
        if not isinstance(dtype, (str, torch.dtype)):
            raise LayoutError(f"Cannot plan with {dtype=}: expected a dtype or a CastPolicy.")
        asked = parse_dtype(dtype)
    if layout.dtype is not None:
        if asked is not None and asked is not layout.dtype:
            text = f"{dtype_name(layout.dtype)} at the destination, {dtype_name(asked)} asked for"
            problems.append((name, text))
        return layout.dtype
    if asked is None and len(present) > 1:
        listed = sorted(map(dtype_name, present))
        problems.append((name, f"made of tensors of dtypes {listed}: name one for it"))
    return source if asked is None else asked


def _unscaled(source: torch.dtype, target: torch.dtype | None) -> list[str]:
    """What a policy with scales asks for and a plan without them cannot do."""
    if target is None or (source in FP8) == (target in FP8):
        return []
    if target in FP8:
        return [f"{dtype_name(target)} with a scale: plan it with plan_scaled_reshard"]
    return [
        f"{dtype_name(source)} whose scale is to be multiplied in: reshard values and scales as they "
        "are, and convert what arrives"
    ]


def _refused(layout: Layout, parts: list[Layout]) -> list[str]:
    """What the planner cannot do."""
    out = []
    out += [
        f"a partial {side} of reduction {both.partial!r}: expected one of {REDUCTIONS}"
        for side, both in (("destination", layout), *(("source", part) for part in parts))
        if both.partial is not None and both.partial not in REDUCTIONS
    ]
    if layout.partial is not None and layout.held is not None and len(set(layout.held)) > 1:
        out.append("a partial destination of other boxes on each rank: expected the same on all")
    for both in (layout, *parts):
        if both.held is not None:
            table = both.table()
            if both is layout:
                i, j, _, _ = intersect(table, table)
                twice = (i < j) & (table.rank[i] == table.rank[j])
                out += [f"rank {r}: boxes that overlap" for r in set(table.rank[i[twice]].tolist())]
    return out


def _canonical(blocks: tuple[Block, ...], ties: Mapping[str, str]) -> Any:
    """Blocks with one name for tensors that are one."""
    return tuple(
        (
            b.start,
            b.stop,
            ties.get(b.source, b.source) if b.source else None,
            b.offset,
            b.dims,
            b.fill,
        )
        for b in blocks
    )


def _connect(draft: Draft, name: str, blocks: tuple[Block, ...], *, whole: bool) -> None:
    for block in blocks:
        if block.source is not None:
            source = draft.ties.get(block.source, block.source)
            draft.wishes.append(Wish(source, name, None if whole else block))
    fills = tuple(block for block in blocks if block.source is None)
    if fills:
        draft.fills[name] = fills
