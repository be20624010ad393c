"""`plan_moves`: every decision about a move, before anything is copied.

A `MovePlan` is columnar: a path, a shape and a `Route` for each leaf.  It holds no tensors, so it
prints, compares, and runs on any tree of the same structure.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Size, Tensor

from .._keys import path_of, short
from .._typing import NestedKey, Path
from ..core.lock import lock
from ..core.node import Node
from ..core.traverse import entries_with_path, leaves_with_path, nodes, rebuild
from ..device.kinds import MoveKind
from ..errors import (
    LayoutError,
    LockedError,
    MissingKeyError,
    PlanMismatch,
    SchemaMismatch,
    table_of,
)
from .attrs import TensorAttrs
from .execute import asynchronous, devices_to_wait_for, run_routes, waiter
from .layout import Layout
from .names import dtype_name
from .policy import CastPolicy, PolicyMatcher
from .report import PlanReport
from .request import is_spec
from .routes import Move, Route, make_route, ties_of
from .rules import RuleSet, Spec, Target, Unmatched, near_misses

Answer = Literal["ignore", "warn", "error"]
_NOTHING = Target()


class MovePlan(PlanReport):
    """What happens to each leaf when a tree moves.

    Made by `plan_moves`.  Leaves are in the order of the tree.

    Attributes:
        paths: Where the leaves are.
        shapes: Their shapes.
        routes: From where to where each goes; many leaves share one route.
        ties: For a leaf that shares memory with an earlier one, the position of that one.
        non_blocking: As of ``to()``: ``None`` waits where the host could read too early.
        target_device: The one device of all leaves, ``None`` when they differ.
        unmatched: Patterns and keys of the spec or policy that met no leaf.
    """

    __slots__ = (
        "materialize",
        "non_blocking",
        "paths",
        "routes",
        "shapes",
        "target_device",
        "ties",
        "unmatched",
    )

    def __init__(
        self,
        paths: Sequence[Path],
        shapes: Sequence[Size],
        routes: Sequence[Route],
        ties: Mapping[int, int] | None = None,
        *,
        non_blocking: bool | None = None,
        target_device: torch.device | None = None,
        unmatched: Sequence[Unmatched] = (),
        materialize: Callable[[Path, TensorAttrs], Tensor] | None = None,
    ) -> None:
        self.paths = list(paths)
        self.shapes = list(shapes)
        self.routes = list(routes)
        self.ties = dict(ties or {})
        self.non_blocking = non_blocking
        self.target_device = target_device
        self.unmatched = tuple(unmatched)
        self.materialize = materialize

    def __len__(self) -> int:
        return len(self.paths)

    def __iter__(self) -> Iterator[Move]:
        return (self.move(index) for index in range(len(self.paths)))

    def move(self, index: int) -> Move:
        """What happens to the leaf at one position."""
        tied = self.ties.get(index)
        return Move(
            self.paths[index],
            self.routes[index],
            self.shapes[index],
            None if tied is None else self.paths[tied],
        )

    def __getitem__(self, key: NestedKey) -> Move:
        """What happens to the leaf of one key.

        Raises:
            MissingKeyError: (a ``KeyError``) when the plan has no such leaf.
        """
        path = path_of(key)
        if path not in self.paths:
            near = near_misses(path, self.paths)
            hint = f" Near: {', '.join(near)}." if near else ""
            raise MissingKeyError(f"The plan has no leaf {short(path)!r}.{hint}")
        return self.move(self.paths.index(path))

    @property
    def sync_devices(self) -> tuple[torch.device, ...]:
        """The devices that `run` waits for, once, at the end."""
        if self.non_blocking is not None:
            return ()
        return devices_to_wait_for(self.routes, self.target_device)

    @property
    def n_syncs(self) -> int:
        """The number of times that `run` waits: 0 or 1."""
        return int(bool(self.sync_devices))

    def run(self, td: Any, *, inplace: bool = False, out: Any = None) -> Any:
        """Move the leaves of ``td``.

        Args:
            td: A tree of the structure that the plan was made for.
            inplace: Write the moved leaves into ``td`` and return it.
            out: A tree of the same keys whose leaves receive the values in place.

        Raises:
            PlanMismatch: when ``td`` is not of that structure; lists every difference, and
                nothing is moved.
            LockedError: for ``inplace=True`` on a locked tree.
        """
        tensors = self._checked(td)
        flag = asynchronous(self.non_blocking)
        wait = None
        if flag and self.non_blocking is None:
            wait = waiter(self.routes, self.target_device)
        moved = run_routes(tensors, self.routes, flag, wait, self._materializer())
        if out is not None:
            return write_out(out, self.paths, moved)
        return place(td, moved, self.target_device, inplace=inplace, keep_device=self._keeps_device)

    @property
    def _keeps_device(self) -> bool:
        # Casts alone leave the device attribute as it was.
        return all(route.src_device == route.device for route in dict.fromkeys(self.routes))

    def _materializer(self) -> Callable[[int, Tensor, Route], Tensor] | None:
        make = self.materialize
        if make is None:
            return None

        def materialize(index: int, x: Tensor, route: Route) -> Tensor:
            made = make(self.paths[index], TensorAttrs(route.device, route.dtype, x.shape))
            if made.shape != x.shape:
                raise PlanMismatch(
                    f"Cannot materialize {short(self.paths[index])!r}: expected shape "
                    f"{list(x.shape)}, got {list(made.shape)}."
                )
            return made.to(route.device, route.dtype)

        return materialize

    def _checked(self, td: Any) -> list[Tensor]:
        """The leaves of ``td`` if it is what the plan was made for."""
        pairs = leaves_with_path(td)
        tensors = [x for _, x in pairs]
        if len(pairs) == len(self.paths):
            for (path, x), mine, shape, route in zip(pairs, self.paths, self.shapes, self.routes):
                if (
                    path != mine
                    or x.shape != shape
                    or x.dtype is not route.src_dtype
                    or x.device != route.src_device
                ):
                    break
            else:
                return tensors
        raise SchemaPlanMismatch(self._differences(dict(pairs)))

    def _differences(self, present: dict[Path, Tensor]) -> list[tuple[Any, str]]:
        rows: list[tuple[Any, str]] = []
        for path, shape, route in zip(self.paths, self.shapes, self.routes):
            x = present.pop(path, None)
            planned = f"{dtype_name(route.src_dtype)} {list(shape)} on {route.src_device}"
            if x is None:
                rows.append((short(path), f"missing; planned {planned}"))
                continue
            found = f"{dtype_name(x.dtype)} {list(x.shape)} on {x.device}"
            if found != planned:
                rows.append((short(path), f"{found}; planned {planned}"))
        rows += [(short(path), "not in the plan") for path in present]
        return rows or [((), "the leaves are in another order")]


class SchemaPlanMismatch(PlanMismatch, SchemaMismatch):
    """A plan was run on a tree of another structure: lists every difference."""

    def __init__(self, differences: Sequence[tuple[Any, str]]) -> None:
        SchemaMismatch.__init__(
            self,
            f"Cannot run the plan on this tensordict: {len(differences)} leaves differ. "
            f"Make a plan for it.",
            differences,
        )

    def __reduce__(self) -> Any:
        return type(self), (self.differences,)


def plan_moves(
    td: Node,
    target: Any = None,
    *,
    policy: CastPolicy | None = None,
    non_blocking: bool | None = None,
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


def place(
    td: Any,
    tensors: Sequence[Tensor],
    device: torch.device | None,
    *,
    inplace: bool = False,
    keep_device: bool = False,
) -> Any:
    """A tree like ``td`` over other tensors, or ``td`` itself with them.

    Args:
        td: The source; a locked one gives a locked result.
        tensors: In the order of its leaves.
        device: The device attribute of the result, unless ``keep_device``.
        inplace: Write into ``td``.
        keep_device: Leave the device attribute as it is.
    """
    if inplace:
        return replace_leaves(td, tensors, td._device if keep_device else device)
    out = rebuild(td, tensors)
    if not keep_device and (device is not None or td._device is not None):
        for part in nodes(out):
            part._device = device
    if td._lock is not None:
        lock(out)
    return out


def replace_leaves(td: Any, tensors: Sequence[Tensor], device: torch.device | None) -> Any:
    """Put other tensors into the entries of ``td``.

    Raises:
        LockedError: when it is locked; nothing is replaced.
    """
    if td._lock is not None:
        raise LockedError
    for node, moved in zip(nodes(td), nodes(rebuild(td, tensors))):
        node._device = device
        for name, entry in list(moved._items()):
            if isinstance(entry, Tensor):
                node._store(name, entry)
    return td


def write_out(out: Any, paths: Sequence[Path], tensors: Sequence[Tensor]) -> Any:
    """Copy values into the leaves of ``out``, matched by path; nothing is written on a mismatch.

    Raises:
        SchemaMismatch: when keys or shapes differ; lists every one.
    """
    receivers = dict(leaves_with_path(out))
    present = dict(receivers)
    rows: list[tuple[Any, str]] = []
    for path, x in zip(paths, tensors):
        there = present.pop(path, None)
        if there is None:
            rows.append((short(path), "not in out"))
        elif there.shape != x.shape:
            rows.append((short(path), f"shape {list(there.shape)} in out, {list(x.shape)} moved"))
    rows += [(short(path), "only in out") for path in present]
    if rows:
        raise SchemaMismatch(f"Cannot write into out: {len(rows)} leaves differ.", rows)
    with torch.no_grad():
        for path, x in zip(paths, tensors):
            receivers[path].copy_(x)
    return out
