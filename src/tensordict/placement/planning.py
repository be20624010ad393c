"""`plan_moves`: from what is wanted for each leaf to a `MovePlan`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal

from torch import Tensor

from .._keys import short
from .._typing import Path
from ..core.leaf import NonTensorDataBase
from ..core.node import Node
from ..core.traverse import Outline, entries_with_path, leaves, outline_of, paths_in
from ..device.kinds import PLAIN_TENSORS, MoveKind
from ..device.staging import StagingPool
from ..errors import EntryTypeError, SchemaMismatch, table_of
from .attrs import TensorAttrs
from .cache import keep_plan, kept_plan, plan_key
from .coalesce import PACK_BELOW
from .hidden import HiddenTensor, find_hidden
from .plan import MovePlan
from .policy import CastPolicy
from .routes import Route, distinct, ties_of
from .rules import Unmatched
from .wanted import Wanted

Answer = Literal["ignore", "warn", "error"]


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
    non_tensors: Literal["report", "move"] = "report",
    materialize: Callable[[Path, TensorAttrs], Tensor] | None = None,
) -> MovePlan:
    """Decide how each leaf of a tree gets to its target; nothing is copied.

    The plan of a locked tree is kept and returned again as long as no entry is replaced.

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
        non_tensors: Whether tensors inside of non-tensor values (a dict kept as one value) are only
            reported (``plan.hidden``), or moved too.
        materialize: Makes the values of meta leaves that go to a real device, from the path and
            the attributes wanted.

    Raises:
        LayoutError: for a target of another sharding: ``to`` never communicates.
        MissingKeyError, SchemaMismatch: as asked by ``on_missing``, ``on_unused``, ``on_shape``.
        NotImplementedError: for meta leaves without ``materialize``.

    >>> import torch
    >>> from tensordict import TensorDict
    >>> td = TensorDict({"w": torch.zeros(4), "norm": torch.zeros(4)})
    >>> plan = plan_moves(td, policy=CastPolicy.mixed())
    >>> plan["w"].route.dtype, plan["norm"].kind
    (torch.bfloat16, MoveKind.ALIAS)
    >>> plan.run(td)["w"].dtype
    torch.bfloat16
    """
    if not isinstance(td, Node):
        raise EntryTypeError(
            f"Cannot plan moves of a {type(td).__name__}: expected a tensordict. Make one of it."
        )
    key = None
    if max_staging_bytes is not None:
        staging = StagingPool(max_staging_bytes)
    elif staging is None and materialize is None:
        options = (non_blocking, pack_below, on_missing, on_unused, on_shape, non_tensors)
        key = plan_key(td, target, policy, *options)
        kept: MovePlan | None = kept_plan(td, key)
        if kept is not None:
            return kept
    tensors = leaves(td)
    shapes = [x.shape for x in tensors]
    outline = outline_of(td)
    wanted = Wanted(td, outline, target, policy)
    routes = wanted.routes(tensors)
    if on_shape != "ignore":
        rows = wanted.misshapen(shapes)
        _answer(on_shape, "Cannot plan: {n} leaves have another shape than the spec.", rows)
    if on_missing != "ignore":
        rows = [(short(path), "not in the spec") for path in wanted.missing()]
        _answer(on_missing, "Cannot plan: the spec says nothing about {n} leaves.", rows)
    # `to` asks for nothing and has no patterns: it does not pay for the answer.
    asked = on_unused != "ignore" or policy is not None
    unmatched = wanted.unmatched() if asked else []
    if unmatched and on_unused != "ignore":
        rows = [(item.pattern, _near_text(item)) for item in unmatched]
        _answer(on_unused, "{n} entries of the spec or policy match no leaf.", rows)
    hidden: tuple[HiddenTensor, ...] = ()
    if _has_values(outline):
        hidden = find_hidden(
            entries_with_path(td), wanted.route_of if non_tensors == "move" else None
        )
    kinds = {route.kind for route in distinct(routes)}
    if materialize is None and MoveKind.FROM_META in kinds:
        raise _no_values(paths_in(outline), routes)
    plan = MovePlan(
        None,
        shapes,
        routes,
        _moving_ties(tensors, routes) if kinds - {MoveKind.ALIAS} else None,
        non_blocking=non_blocking,
        target_device=wanted.device,
        unmatched=unmatched,
        hidden=hidden,
        outline=outline,
        staging=staging,
        pack_below=pack_below,
        materialize=materialize,
        numels=_numels(tensors),
    )
    keep_plan(td, key, plan, target, getattr(target, "_lock", None), policy)
    return plan


def _near_text(item: Unmatched) -> str:
    return f"near: {', '.join(item.near)}" if item.near else "nothing is near"


def _answer(how: Answer, headline: str, rows: Sequence[tuple[Any, str]]) -> None:
    if not rows or how == "ignore":
        return
    error = SchemaMismatch(headline.format(n=len(rows)), rows)
    if how == "error":
        raise error
    warnings.warn(str(error), stacklevel=3)


def _has_values(outline: Outline) -> bool:
    """Whether a tree holds anything but tensors and nodes."""
    for part in outline:
        kinds = () if isinstance(part, int) else set(part[1])
        if any(issubclass(kind, NonTensorDataBase) for kind in kinds):
            return True
    return False


def _moving_ties(tensors: Sequence[Tensor], routes: Sequence[Route]) -> dict[int, int]:
    """Leaves that move the same way as an earlier one with the same memory."""
    moving = [i for i, route in enumerate(routes) if route.kind is not MoveKind.ALIAS]
    found = ties_of([tensors[i] for i in moving]) or {}
    return {
        moving[i]: moving[first]
        for i, first in found.items()
        if routes[moving[i]] == routes[moving[first]]
    }


def _numels(tensors: Sequence[Tensor]) -> list[int] | None:
    """The elements of each leaf when the shape of some leaf does not tell, as of ragged ones."""
    if PLAIN_TENSORS.issuperset(map(type, tensors)):
        return None
    return [x.numel() for x in tensors] if any(x.is_nested for x in tensors) else None


def _no_values(paths: Sequence[Path], routes: Sequence[Route]) -> NotImplementedError:
    rows = [
        (short(path), f"meta -> {route.device}")
        for path, route in zip(paths, routes)
        if route.kind is MoveKind.FROM_META
    ]
    headline = (
        f"Cannot copy out of meta tensor; no data! {len(rows)} leaves are on meta. "
        f"Pass materialize= to plan_moves."
    )
    return NotImplementedError(table_of(headline, rows))
