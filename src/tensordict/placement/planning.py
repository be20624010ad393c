"""`plan_moves`: from what is wanted for each leaf to a `MovePlan`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from .._keys import short
from .._typing import Path
from ..core.node import Node
from ..core.traverse import entries_with_path, leaves_with_path
from ..device.kinds import MoveKind
from ..device.staging import StagingPool
from ..errors import LayoutError, SchemaMismatch, table_of
from .attrs import TensorAttrs
from .coalesce import PACK_BELOW
from .layout import Layout
from .plan import MovePlan
from .policy import CastPolicy, PolicyMatcher
from .request import is_spec
from .routes import Route, make_route, ties_of
from .rules import RuleSet, Spec, Target, Unmatched, near_misses

Answer = Literal["ignore", "warn", "error"]
_NOTHING = Target()


def plan_moves(
    td: Node,
    target: Any = None,
    *,
    policy: CastPolicy | None = None,
    non_blocking: bool | None = None,
    staging: StagingPool | None = None,
    pack_below: int = PACK_BELOW,
    max_staging_bytes: int | None = None,
    on_missing: Answer = "ignore",
    on_unused: Answer = "warn",
    on_shape: Answer = "error",
    materialize: Callable[[Path, TensorAttrs], Tensor] | None = None,
) -> MovePlan:
    """Decide how each leaf of a tree gets to its target; nothing is copied.

    Args:
        td: Any tree; meta tensors are enough.
        target: A device, a dtype, a `Target`, an ``attrs()`` tree, a `Spec`, or ``None`` for
            the policy alone.
        policy: Dtypes by pattern; a spec entry is stronger.
        non_blocking: As of ``to()``.
        staging: Host buffers for copies that small leaves share; by default those of the process.
        pack_below: Leaves of fewer bytes share a copy; 0 copies each by itself.
        max_staging_bytes: A bound for host buffers, of a pool that belongs to the plan.
        on_missing: What to do about leaves that the spec says nothing about.
        on_unused: What to do about keys and patterns that meet no leaf.
        on_shape: What to do about leaves whose shape is not the one that the spec recorded.
        materialize: Makes the values of meta leaves that go to a real device, from the path and
            the attributes wanted.

    Raises:
        LayoutError: for a target of another sharding: ``to`` never communicates.
        MissingKeyError, SchemaMismatch: as asked by ``on_missing``, ``on_unused``, ``on_shape``.
        NotImplementedError: for meta leaves without ``materialize``.

    >>> from tensordict import TensorDict
    >>> td = TensorDict({"w": torch.zeros(4), "norm": torch.zeros(4)})
    >>> plan = plan_moves(td, policy=CastPolicy.mixed())
    >>> plan["w"].route.dtype, plan["norm"].kind
    (torch.bfloat16, MoveKind.ALIAS)
    >>> plan.run(td)["w"].dtype
    torch.bfloat16
    """
    if max_staging_bytes is not None:
        staging = StagingPool(max_staging_bytes)
    pairs = leaves_with_path(td)
    paths = [path for path, _ in pairs]
    tensors = [x for _, x in pairs]
    wanted = _Wanted(target, policy)
    routes = wanted.routes(pairs)
    _answer(on_shape, "Cannot plan: {n} leaves have another shape than the spec.", wanted.misshapen)
    if on_missing != "ignore":
        rows = [(short(path), "not in the spec") for path in wanted.missing(paths)]
        _answer(on_missing, "Cannot plan: the spec says nothing about {n} leaves.", rows)
    unmatched = wanted.unmatched(paths)
    if unmatched and on_unused != "ignore":
        rows = [(item.pattern, _near_text(item)) for item in unmatched]
        _answer(on_unused, "{n} entries of the spec or policy match no leaf.", rows)
    if materialize is None:
        _refuse_meta(paths, routes)
    moving = [i for i, route in enumerate(routes) if route.kind is not MoveKind.ALIAS]
    found = ties_of([tensors[i] for i in moving]) if len(moving) > 1 else None
    ties = {
        moving[i]: moving[first]
        for i, first in (found or {}).items()
        if routes[moving[i]] == routes[moving[first]]
    }
    return MovePlan(
        paths,
        [x.shape for x in tensors],
        routes,
        ties,
        non_blocking=non_blocking,
        target_device=wanted.device,
        unmatched=unmatched,
        staging=staging,
        pack_below=pack_below,
        materialize=materialize,
    )


def _near_text(item: Unmatched) -> str:
    return f"near: {', '.join(item.near)}" if item.near else "nothing is near"


def _answer(how: Answer, headline: str, rows: Sequence[tuple[Any, str]]) -> None:
    if not rows or how == "ignore":
        return
    error = SchemaMismatch(headline.format(n=len(rows)), rows)
    if how == "error":
        raise error
    warnings.warn(str(error), stacklevel=3)


def _refuse_meta(paths: Sequence[Path], routes: Sequence[Route]) -> None:
    rows = [
        (short(path), f"meta -> {route.device}")
        for path, route in zip(paths, routes)
        if route.kind is MoveKind.FROM_META
    ]
    if rows:
        raise NotImplementedError(
            table_of(
                f"Cannot copy out of meta tensor; no data! {len(rows)} leaves are on meta. "
                f"Pass materialize= to plan_moves.",
                rows,
            )
        )


class _Wanted:
    """What was asked for, read once: a target for each path, and what met no leaf."""

    def __init__(self, target: Any, policy: CastPolicy | None) -> None:
        self.device: torch.device | None = None
        self._entries: dict[Path, Any] = {}
        self._rules = RuleSet(())
        self._default = _NOTHING
        self._matcher = None if policy is None else PolicyMatcher(policy)
        self._by_rule = False
        self.misshapen: list[tuple[Any, str]] = []
        if isinstance(target, Spec):
            self._entries = dict(target.entries)
            self._rules = RuleSet(target.rules)
            self._by_rule = bool(target.rules)
            self._default = target.default
        elif isinstance(target, Node) and is_spec(target):
            self._entries = {
                path: entry
                for path, entry in entries_with_path(target)
                if type(entry) is TensorAttrs
            }
        elif isinstance(target, Node):
            self._default = Target(target._device)
        else:
            self._default = Target.of(target)
            self.device = self._default.device

    def routes(self, pairs: Sequence[tuple[Path, Tensor]]) -> list[Route]:
        """The route of each leaf."""
        known: dict[Any, Route] = {}
        entries, default = self._entries, self._default
        uniform = self._matcher is None and not self._by_rule
        plain = default.memory_format is None and default.pin is None
        out: list[Route] = []
        for path, x in pairs:
            entry = entries.get(path) if entries else None
            if uniform and plain and (entry is None or type(entry) is TensorAttrs):
                if entry is not None and (entry.tgt_shape != x.shape or entry.tgt_layout):
                    self._check(path, x, entry)
                key = (x.dtype, x.device, id(entry))
                route = known.get(key)
                if route is None:
                    device, dtype = default.device, default.dtype
                    if entry is not None:
                        device = device if entry.tgt_device is None else entry.tgt_device
                        dtype = dtype if entry.tgt_dtype is None else entry.tgt_dtype
                    route = known[key] = make_route(x, device, dtype)
                out.append(route)
            else:
                target = self._target(path, x, entry)
                form = target.memory_format
                made = make_route(x, target.device, target.dtype, form, target.pin)
                out.append(known.setdefault(made, made))
        return out

    def _target(self, path: Path, x: Tensor, entry: Any) -> Target:
        target = _NOTHING
        if type(entry) is TensorAttrs:
            self._check(path, x, entry)
            target = Target(entry.tgt_device, entry.tgt_dtype)
        elif entry is not None:
            target = entry
        if self._by_rule:
            target = target | self._rules.target(path)
        if self._matcher is not None:
            dtype = self._matcher.dtype_for(path, x.dtype)
            if dtype is not None:
                target = target | Target(dtype=dtype)
        target = target | self._default
        if target.layout is not None:
            _same_layout(path, x, target.layout)
        return target

    def _check(self, path: Path, x: Tensor, entry: TensorAttrs) -> None:
        if entry.tgt_shape is not None and entry.tgt_shape != x.shape:
            text = f"shape {list(x.shape)}, the spec recorded {list(entry.tgt_shape)}"
            self.misshapen.append((short(path), text))
        if entry.tgt_layout is not None:
            _same_layout(path, x, entry.tgt_layout)

    def missing(self, paths: Sequence[Path]) -> list[Path]:
        """Leaves that no entry and no rule speaks of."""
        if self._default != _NOTHING:
            return []
        return [
            path for path in paths if path not in self._entries and not self._rules.matching(path)
        ]

    def unmatched(self, paths: list[Path]) -> list[Unmatched]:
        """Entries and rules that met no leaf."""
        present = set(paths)
        out = [
            Unmatched(path, near_misses(path, paths))
            for path in self._entries
            if path not in present
        ]
        out += self._rules.unmatched(paths)
        if self._matcher is not None:
            out += self._matcher.unmatched(paths)
        return out


def _same_layout(path: Path, x: Tensor, layout: Any) -> None:
    present = Layout.from_dtensor(x) if hasattr(x, "placements") else None
    if present != layout:
        raise LayoutError(
            f"Cannot move {short(path)!r}: the target has another sharding, and to() never "
            f"communicates. Use reshard."
        )
