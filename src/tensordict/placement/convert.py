"""Mixed-precision conversion: by a policy, with a report of what was lost."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from .._keys import dotted
from .._typing import Path
from ..core.lock import lock, unlock
from ..core.traverse import leaves, leaves_with_path, slots
from ..errors import LockedError, LossyCast, table_of
from .casts import CastCounts, Loss, measure_cast
from .execute import copy_along
from .names import dtype_name, size_text
from .placing import cast_in_place, place
from .plan import MovePlan
from .planning import Answer, plan_moves
from .policy import CastPolicy, acts_on
from .scaling import FP8, scale_of, scale_path, scaled, unscaled


@dataclass(frozen=True, slots=True)
class LeafLoss:
    """What the cast of one leaf loses.

    Attributes:
        path: Where the leaf is.
        src, dst: The dtypes.
        numel: Its number of elements.
        possible: What the pair of dtypes can lose.
        counts: What the values did lose; ``None`` when they were not looked at.
    """

    path: Path
    src: torch.dtype
    dst: torch.dtype
    numel: int
    possible: Loss
    counts: CastCounts | None = None

    @property
    def lost(self) -> Loss:
        """What was lost, or can be where it was not looked at."""
        return self.possible if self.counts is None else self.counts.lost

    def __str__(self) -> str:
        cast = f"{dtype_name(self.src)} -> {dtype_name(self.dst)}"
        if self.counts is None:
            return f"{cast}: can lose {self.possible} (values not checked)"
        return f"{cast}: {self.counts.describe()}"


class ConversionReport:
    """What a conversion did to each leaf.

    Attributes:
        leaves: The leaves whose cast can lose something, in the order of the tree.
        n_leaves: All leaves of the tree.
        n_cast: Those that were cast.
        nbytes_before, nbytes_after: Bytes of all leaves, ties once.
    """

    __slots__ = ("leaves", "n_cast", "n_leaves", "nbytes_after", "nbytes_before")

    def __init__(self, plan: MovePlan, losses: Sequence[LeafLoss]) -> None:
        self.leaves = tuple(losses)
        self.n_leaves = len(plan)
        self.n_cast = sum(route.casts for route in plan.routes)
        self.nbytes_before = plan.nbytes(after=False)
        self.nbytes_after = plan.nbytes(after=True)

    @property
    def lossy(self) -> tuple[LeafLoss, ...]:
        """The leaves that lost anything, or can have where values were not checked."""
        return tuple(leaf for leaf in self.leaves if leaf.lost)

    def beyond_rounding(self) -> tuple[LeafLoss, ...]:
        """The leaves that lost range or kind, or can have."""
        return tuple(leaf for leaf in self.leaves if leaf.lost & (Loss.RANGE | Loss.KIND))

    def summary(self) -> str:
        """One line."""
        return (
            f"{self.n_cast} of {self.n_leaves} leaves cast, {len(self.lossy)} of them lossy, "
            f"{len(self.beyond_rounding())} beyond rounding; "
            f"{size_text(self.nbytes_before)} -> {size_text(self.nbytes_after)}"
        )

    def table(self) -> str:
        """The summary, and one line for every lossy leaf."""
        rows = [(dotted(leaf.path), str(leaf)) for leaf in self.lossy]
        return table_of(self.summary(), rows, limit=max(50, len(rows)))

    def __repr__(self) -> str:
        return f"ConversionReport({self.summary()})"

    def to_json(self) -> dict[str, Any]:
        """The report as a JSON value."""
        return {
            "n_leaves": self.n_leaves,
            "n_cast": self.n_cast,
            "nbytes": {"before": self.nbytes_before, "after": self.nbytes_after},
            "leaves": [
                {
                    "path": list(leaf.path),
                    "src": dtype_name(leaf.src),
                    "dst": dtype_name(leaf.dst),
                    "numel": leaf.numel,
                    "lost": str(leaf.lost),
                    "counts": None if leaf.counts is None else asdict(leaf.counts),
                }
                for leaf in self.leaves
            ],
        }


def convert(
    td: Any,
    policy: CastPolicy | torch.dtype | str,
    *,
    report: bool = False,
    inplace: bool = False,
    on_unused: Answer = "warn",
) -> Any:
    """Cast the leaves of a tree by a policy.

    Every check is done before the first cast: a conversion that is refused changes nothing.  The
    result has no gradient history.

    Args:
        td: Any tree; non-tensor values stay.
        policy: Which dtype for which leaf, what to check and what to refuse; or one dtype.
        report: Return ``(result, ConversionReport)``.
        inplace: Replace the leaves of ``td``, each source freed before the next is cast.
        on_unused: What to do about patterns that match no leaf.

    Raises:
        LossyCast: with ``on_lossy="error"`` when a leaf loses range or kind (or, where the policy
            checks no values, can lose it); names every such leaf.
        LockedError: for ``inplace=True`` on a locked tree.

    >>> from tensordict import TensorDict
    >>> td = TensorDict({"w": torch.tensor([1.0, 1e6]), "norm": torch.ones(2)})
    >>> policy = CastPolicy({"norm": None}, default="fp16", on_lossy="allow", check="full")
    >>> low, report = convert(td, policy, report=True)
    >>> low["w"].dtype, low["norm"].dtype, report.lossy[0].counts.n_overflow
    (torch.float16, torch.float32, 1)
    """
    policy = CastPolicy.of(policy)
    if inplace and td._lock is not None:
        raise LockedError
    plan = plan_moves(td, policy=policy, on_unused=on_unused)
    scales = _scales(td, plan) if policy.scale else _Scales({}, {})
    losses = _losses(td, plan, policy, scales)
    found = ConversionReport(plan, losses)
    judge(found, policy)
    with torch.no_grad():
        out = _run(td, plan, scales, inplace)
    return (out, found) if report else out


def judge(report: ConversionReport, policy: CastPolicy) -> None:
    """Raise or warn about what a policy does not allow to lose.

    Raises:
        LossyCast: with ``on_lossy="error"``; names every leaf.
    """
    bad = [leaf for leaf in report.beyond_rounding() if acts_on(policy, leaf.lost)]
    if not bad:
        return
    rows = [(dotted(leaf.path), str(leaf)) for leaf in bad]
    if policy.on_lossy == "error":
        hint = "" if policy.check != "none" else " check='full' decides by values."
        text = f"Cannot convert: {len(bad)} leaves lose more than digits.{hint}"
        raise LossyCast(table_of(text, rows), report)
    warnings.warn(
        table_of(f"{len(bad)} leaves lose more than digits in the conversion.", rows), stacklevel=3
    )


@dataclass(frozen=True, slots=True)
class _Scales:
    """Scales to make, and scales to multiply back, by path of the 8-bit leaf."""

    make: dict[Path, Tensor]
    apply: dict[Path, Tensor]


def _scales(td: Any, plan: MovePlan) -> _Scales:
    make: dict[Path, Tensor] = {}
    apply: dict[Path, Tensor] = {}
    present = dict(leaves_with_path(td))
    holder_of = {path: holder for path, holder, _ in slots(td)}
    for path, route in zip(plan.paths, plan.routes):
        if not route.casts:
            continue
        if route.dtype in FP8 and route.src_dtype not in FP8:
            make[path] = scale_of(present[path], route.dtype, holder_of[path]._batch_size)
        elif route.src_dtype in FP8 and scale_path(path) in present:
            apply[path] = present[scale_path(path)]
    return _Scales(make, apply)


def _losses(td: Any, plan: MovePlan, policy: CastPolicy, scales: _Scales) -> list[LeafLoss]:
    measured: list[LeafLoss] = []
    present = dict(leaves_with_path(td)) if policy.check != "none" else {}
    for index, (path, route) in enumerate(zip(plan.paths, plan.routes)):
        possible = route.loss
        if not possible or path in scales.apply:
            continue
        counts = None
        if policy.check != "none" and route.src_device.type != "meta":
            x = present[path]
            if path in scales.make:
                x = scaled(x, scales.make[path])
            counts = measure_cast(x, route.dtype, sample=policy.check == "sample")
        elif path in scales.make:
            possible = Loss.ROUNDING  # the scale takes care of the range
        numel = plan.numel(index)
        measured.append(LeafLoss(path, route.src_dtype, route.dtype, numel, possible, counts))
    return measured


def _run(td: Any, plan: MovePlan, scales: _Scales, inplace: bool) -> Any:
    if not scales.make and not scales.apply:
        return plan.run(td, inplace=inplace)
    cast = _caster(plan, scales)
    if inplace:
        moving = [index for index, route in enumerate(plan.routes) if route.moves]
        at = {index: position for position, index in enumerate(moving)}
        ties = {at[i]: at[first] for i, first in plan.ties.items()}
        paths = [plan.paths[index] for index in moving]
        out = cast_in_place(td, paths, lambda k, x: cast(moving[k], x), ties)
    else:
        tensors = leaves(td)
        moved = [
            cast(index, x) if plan.routes[index].moves and index not in plan.ties else x
            for index, x in enumerate(tensors)
        ]
        for index, first in plan.ties.items():
            moved[index] = moved[first]
        out = place(td, moved, None, keep_device=True)
    locked = out._lock is not None
    if locked:
        unlock(out)
    holder_of = {path: holder for path, holder, _ in slots(out)}
    for path, scale in scales.make.items():
        holder_of[path]._store(scale_path(path)[-1], scale)
    for path in scales.apply:
        holder_of[path]._remove(scale_path(path)[-1])
    if locked:
        lock(out)
    return out


def _caster(plan: MovePlan, scales: _Scales) -> Callable[[int, Tensor], Tensor]:
    def cast(index: int, x: Tensor) -> Tensor:
        path, route = plan.paths[index], plan.routes[index]
        if path in scales.make:
            return scaled(x, scales.make[path]).to(route.dtype)
        if path in scales.apply:
            return unscaled(x, scales.apply[path], route.dtype)
        return copy_along(x, route, False)

    return cast
