"""What is wanted for each leaf of a tree: one goal per leaf, and what met no leaf."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Size, Tensor

from .._keys import short
from .._typing import Path
from ..core.node import Node
from ..core.traverse import (
    Outline,
    entries_beside,
    entries_with_path,
    nodes,
    nodes_with_path,
    paths_in,
)
from ..errors import LayoutError
from .attrs import TensorAttrs
from .layout import Layout
from .policy import CastPolicy, PolicyMatcher
from .request import is_spec
from .routes import Route, make_route
from .rules import RuleSet, Spec, Target, Unmatched, near_misses

_NOTHING = Target()


class Wanted:
    """Goals for the leaves of one tree.

    A goal is a `Target` or a `TensorAttrs`, the same object for leaves that want the same, so that
    leaves with one goal find their route by identity.

    Attributes:
        device: The one device of all leaves, ``None`` when they differ.
    """

    def __init__(self, td: Node, outline: Outline, target: Any, policy: CastPolicy | None) -> None:
        self.device: torch.device | None = None
        self._td, self._outline = td, outline
        self._made_paths: list[Path] | None = None
        self._entries: dict[Path, Target] = {}
        self._rules: RuleSet | None = None
        self._default = _NOTHING
        self._matcher = None if policy is None else PolicyMatcher(policy)
        self._records: Node | None = None
        self._beside: list[Any] | None = None
        self._only_records = False
        if isinstance(target, Spec):
            self._entries = dict(target.entries)
            self._rules = RuleSet(target.rules) if target.rules else None
            self._default = target.default
        elif isinstance(target, Node) and is_spec(target):
            self._records = target
            self._beside = entries_beside(td, target)
            self._only_records = set(map(type, self._beside)) == {TensorAttrs}
        elif isinstance(target, Node):
            self._default = Target(target._device)
        else:
            self._default = Target.of(target)
            self.device = self._default.device

    @property
    def _paths(self) -> list[Path]:
        """The paths that patterns see, made when they are first needed."""
        if self._made_paths is None:
            self._made_paths = key_paths(self._td, paths_in(self._outline))
        return self._made_paths

    def routes(self, tensors: Sequence[Tensor]) -> list[Route]:
        """The route of each leaf.

        Raises:
            LayoutError: when a goal is another sharding.
        """
        known: dict[Any, Route] = {}
        out: list[Route] = []
        route: Route | None = None
        last: Any = None
        for index, (x, goal) in enumerate(zip(tensors, self._goals(tensors))):
            dtype, device = x.dtype, x.device
            # Neighbours often go the same way: they need no look-up.
            if (
                goal is not last
                or route is None
                or dtype is not route.src_dtype
                or device != route.src_device
            ):
                key = (dtype, device, id(goal))
                route = known.get(key)
                if route is None:
                    route = self._route(index, x, goal)
                    if _by_dtype_and_device(goal):
                        known[key] = route
                last = goal if key in known else None
            out.append(route)
        return out

    def _route(self, index: int, x: Tensor, goal: Any) -> Route:
        layout = _layout_of(goal)
        if layout is not None:
            check_layout(self._paths[index], x, layout)
        if type(goal) is Target:
            return make_route(x, goal.device, goal.dtype, goal.memory_format, goal.pin)
        if type(goal) is TensorAttrs:
            return make_route(x, goal.tgt_device, goal.tgt_dtype)
        return make_route(x, None, None)

    def route_of(self, path: Path, x: Tensor) -> Route:
        """The route of a tensor that is no leaf, by rules, policy and default."""
        target = self._entries.get(path, _NOTHING)
        if self._rules is not None:
            target = target | self._rules.target(path)
        if self._matcher is not None:
            target = target | Target(dtype=self._matcher.dtype_for(path, x.dtype))
        target = target | self._default
        return make_route(x, target.device, target.dtype, target.memory_format, target.pin)

    def _goals(self, tensors: Sequence[Tensor]) -> Sequence[Any]:
        if self._beside is not None and self._matcher is None:
            return self._beside
        plain = not self._entries and self._rules is None and self._beside is None
        if plain and self._matcher is None:
            return [self._default] * len(tensors)
        known: dict[Target, Target] = {}
        by_dtype: dict[torch.dtype | None, Target] = {}
        matcher, default = self._matcher, self._default
        out: list[Target] = []
        for index, (path, x) in enumerate(zip(self._paths, tensors)):
            dtype = None if matcher is None else matcher.dtype_for(path, x.dtype)
            low = by_dtype.get(dtype)
            if low is None:
                low = by_dtype[dtype] = Target(dtype=dtype) | default
            if not plain:
                low = self._stated(index, path) | low
                low = known.setdefault(low, low)
            out.append(low)
        return out

    def _stated(self, index: int, path: Path) -> Target:
        """What the spec says about one leaf: its entry, else the rules."""
        stated = self._entries.get(path, _NOTHING)
        if self._beside is not None:
            record = self._beside[index]
            if type(record) is TensorAttrs:
                stated = Target(record.tgt_device, record.tgt_dtype, record.tgt_layout)
        return stated if self._rules is None else stated | self._rules.target(path)

    def misshapen(self, shapes: Sequence[Size]) -> list[tuple[Any, str]]:
        """Leaves of another shape than a record says."""
        if self._beside is None:
            return []
        if self._only_records and [record.tgt_shape for record in self._beside] == shapes:
            return []
        rows: list[tuple[Any, str]] = []
        for path, shape, record in zip(self._paths, shapes, self._beside):
            wanted = record.tgt_shape if type(record) is TensorAttrs else None
            if wanted is not None and wanted != shape:
                text = f"shape {list(shape)}, the spec recorded {list(wanted)}"
                rows.append((short(path), text))
        return rows

    def missing(self) -> list[Path]:
        """Leaves that no entry, rule or default speaks of."""
        if self._default != _NOTHING:
            return []
        if self._beside is not None:
            pairs = zip(self._paths, self._beside)
            return [path for path, record in pairs if type(record) is not TensorAttrs]
        rules = self._rules
        return [
            path
            for path in self._paths
            if path not in self._entries and (rules is None or not rules.matching(path))
        ]

    def unmatched(self) -> list[Unmatched]:
        """Entries and rules that met no leaf, with what is near."""
        stated: list[Path] = list(self._entries)
        if self._records is not None and not self._all_records_met():
            entries = entries_with_path(self._records)
            stated = [path for path, entry in entries if type(entry) is TensorAttrs]
        out: list[Unmatched] = []
        if stated:
            present = set(self._paths)
            out = [
                Unmatched(path, near_misses(path, self._paths))
                for path in stated
                if path not in present
            ]
        if self._rules is not None:
            out += self._rules.unmatched(self._paths)
        if self._matcher is not None:
            out += self._matcher.unmatched(self._paths)
        return out

    def _all_records_met(self) -> bool:
        # As many entries as leaves that have a record: none is left over.
        assert self._records is not None and self._beside is not None
        parts = nodes(self._records)
        total = sum(len(part._names()) for part in parts) - (len(parts) - 1)
        return total == len(self._beside) and self._only_records


def key_paths(td: Node, paths: Sequence[Path]) -> list[Path]:
    """Paths as users write them: through a lazy stack by key alone, without the member's number."""
    if all(part._members() is None for part in nodes(td)):
        return list(paths)
    stacks = {path for path, node in nodes_with_path(td) if node._members() is not None}
    return [tuple(name for i, name in enumerate(path) if path[:i] not in stacks) for path in paths]


def _by_dtype_and_device(goal: Any) -> bool:
    """Whether leaves of one dtype and device have one route to a goal."""
    if type(goal) is Target:
        return goal.memory_format is None and goal.pin is None and goal.layout is None
    return type(goal) is not TensorAttrs or goal.tgt_layout is None


def _layout_of(goal: Any) -> Layout | None:
    if type(goal) is Target:
        return goal.layout
    return goal.tgt_layout if type(goal) is TensorAttrs else None


def check_layout(path: Path, x: Tensor, layout: Layout) -> None:
    """Refuse a target of another sharding than a leaf has.

    Raises:
        LayoutError: naming the leaf.
    """
    present = Layout.from_dtensor(x).as_dtype(None) if hasattr(x, "placements") else None
    if present != layout.as_dtype(None):
        raise LayoutError(
            f"Cannot move {short(path)!r}: the target has another sharding, and to() never "
            f"communicates. Use reshard."
        )
