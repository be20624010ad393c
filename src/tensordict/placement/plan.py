"""`MovePlan`: what happens to each leaf when a tree moves.

A plan is columnar: a path, a shape and a `Route` for each leaf.  It holds no tensors, so it
prints, compares, and runs on any tree of the same structure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Size, Tensor

from .._keys import path_of, short
from .._typing import NestedKey, Path
from ..core.metadata import set_device
from ..core.node import Node
from ..core.traverse import leaves, leaves_with_path, outline_of, paths_in
from ..device.kinds import MoveKind, is_accelerator
from ..device.staging import StagingPool
from ..errors import (
    EntryTypeError,
    LockedError,
    MissingKeyError,
    PlanMismatch,
    SchemaMismatch,
    table_of,
)
from .attrs import TensorAttrs
from .coalesce import PACK_BELOW
from .execute import (
    RunOptions,
    asynchronous,
    copy_along,
    devices_to_wait_for,
    options_for,
    run_routes,
)
from .hidden import HiddenTensor, move_hidden
from .memory import CHECKED_NBYTES, check_free_memory
from .names import dtype_name
from .pending import PendingMoves
from .placing import cast_in_place, place, write_out
from .report import PlanReport, read_plan
from .routes import TRANSFERS, Move, Route, distinct
from .rules import Unmatched, near_misses


class MovePlan(PlanReport):
    """What happens to each leaf when a tree moves.

    Made by `plan_moves`.  Leaves are in the order of the tree.

    Attributes:
        shapes: Their shapes.
        routes: From where to where each goes; many leaves share one route.
        distinct_routes: The different ones among them.
        ties: For a leaf that shares memory with an earlier one, the position of that one.
        non_blocking: As of ``to()``: ``None`` waits where the host could read too early.
        target_device: The one device of all leaves, ``None`` when they differ.
        unmatched: Patterns and keys of the spec or policy that met no leaf.
        hidden: Tensors inside of non-tensor values; those with a route are moved too.
        outline: What `outline_of` the tree was: tells paths when they are asked for, and a tree
            again fast.  ``None`` for a plan that was read or turned round.
        staging: Host buffers for copies that leaves share.
        pack_below: Leaves of fewer bytes share a copy.
        numels: The number of elements of each leaf, where the shapes do not tell (ragged leaves).
    """

    __slots__ = (
        "hidden",
        "materialize",
        "outline",
        "non_blocking",
        "numels",
        "pack_below",
        "_paths",
        "routes",
        "shapes",
        "staging",
        "target_device",
        "distinct_routes",
        "ties",
        "unmatched",
    )

    def __init__(
        self,
        paths: Sequence[Path] | None,
        shapes: Sequence[Size],
        routes: Sequence[Route],
        ties: Mapping[int, int] | None = None,
        *,
        non_blocking: bool | None = None,
        target_device: torch.device | None = None,
        unmatched: Sequence[Unmatched] = (),
        hidden: Sequence[HiddenTensor] = (),
        outline: list[Any] | None = None,
        staging: StagingPool | None = None,
        pack_below: int = PACK_BELOW,
        materialize: Callable[[Path, TensorAttrs], Tensor] | None = None,
        numels: Sequence[int] | None = None,
    ) -> None:
        self._paths = None if paths is None else list(paths)
        self.shapes = list(shapes)
        self.numels = numels
        self.routes = list(routes)
        self.distinct_routes = distinct(self.routes)
        self.ties = dict(ties or {})
        self.non_blocking = non_blocking
        self.target_device = target_device
        self.unmatched = tuple(unmatched)
        self.materialize = materialize
        self.hidden = tuple(hidden)
        self.outline = outline
        self.staging = staging
        self.pack_below = pack_below

    @property
    def paths(self) -> list[Path]:  # type: ignore[override]
        """Where the leaves are."""
        if self._paths is None:
            assert self.outline is not None
            self._paths = paths_in(self.outline)
        return self._paths

    def __len__(self) -> int:
        return len(self.routes)

    def __iter__(self) -> Iterator[Move]:
        return (self.move(index) for index in range(len(self.routes)))

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
        return devices_to_wait_for(self.distinct_routes, self.target_device)

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
            MemoryBudgetError: when a target device has too little free memory; says how much is
                missing, and nothing is moved.
            LockedError: for ``inplace=True`` on a locked tree.
        """
        tensors = self._checked(td)
        if inplace and td._lock is not None:
            raise LockedError
        if inplace and all(route.kind in _STAYS for route in self.distinct_routes):
            del tensors
            return self._cast_in_place(td)
        moved = tensors
        if any(route.moves for route in self.distinct_routes):
            self._check_memory()
            moved, _ = run_routes(tensors, self.routes, self._options(self.non_blocking))
        if out is not None:
            return write_out(out, self.paths, moved)
        return self._place(td, moved, inplace)

    def _cast_in_place(self, td: Any) -> Any:
        moving = [index for index, route in enumerate(self.routes) if route.moves]
        place_of = {index: position for position, index in enumerate(moving)}
        ties = {place_of[i]: place_of[first] for i, first in self.ties.items()}
        cast_in_place(
            td,
            [self.paths[index] for index in moving],
            lambda position, x: copy_along(x, self.routes[moving[position]], False),
            ties,
        )
        if self.target_device is not None:
            set_device(td, self.target_device)
        self._move_hidden(td)
        return td

    def start(self, td: Any, *, inplace: bool = False) -> PendingMoves:
        """Begin the moves of `run` without waiting for any copy.

        Returns:
            A handle: ``wait()`` gives the moved tree, and tells which devices were waited for.
            Sources must not be written to before that.
        """
        tensors = self._checked(td)
        if inplace and td._lock is not None:
            raise LockedError
        self._check_memory()
        moved, _ = run_routes(tensors, self.routes, self._options(asynchronous(True)))
        devices: dict[torch.device, None] = {}
        for route in self.distinct_routes:
            if route.kind in TRANSFERS:
                for device in (route.src_device, route.device):
                    if is_accelerator(device):
                        devices[device] = None
        return PendingMoves(self._place(td, moved, inplace), list(devices), tensors)

    def _options(self, non_blocking: bool | None) -> RunOptions:
        return replace(
            options_for(non_blocking, self.target_device),
            pack_below=self.pack_below,
            staging=self.staging,
            materialize=self._materializer(),
        )

    def _place(self, td: Any, moved: list[Tensor], inplace: bool) -> Any:
        # Casts alone leave the device attribute as it was.
        keep = self.target_device is None and all(
            route.src_device == route.device for route in self.distinct_routes
        )
        out = place(td, moved, self.target_device, inplace=inplace, keep_device=keep)
        self._move_hidden(out)
        return out

    def _move_hidden(self, out: Any) -> None:
        moving = [item for item in self.hidden if item.route is not None and item.route.moves]
        if moving:
            # Few and apart from the leaves: blocking copies, which nobody has to wait for.
            move_hidden(out, moving, lambda x, route: copy_along(x, route, False))

    def _check_memory(self) -> None:
        for device in dict.fromkeys(route.device for route in self.distinct_routes if route.moves):
            need = self.peak_bytes(device)
            if need >= CHECKED_NBYTES:
                check_free_memory(device, need)

    def inverse(self) -> MovePlan:
        """The plan that takes the results back to where and what the sources were.

        Ties are kept.  A cast that is not exact (see ``can_lose``) does not bring the values back.

        Raises:
            NotImplementedError: when leaves went to the meta device, which has no values.

        >>> from tensordict import TensorDict
        >>> from tensordict.placement import plan_moves
        >>> td = TensorDict({"a": torch.ones(2, dtype=torch.bfloat16)})
        >>> plan = plan_moves(td, torch.float32)
        >>> plan.inverse().run(plan.run(td))["a"].dtype
        torch.bfloat16
        """
        rows = [
            (short(path), "its values are gone")
            for path, route in zip(self.paths, self.routes)
            if route.kind is MoveKind.TO_META
        ]
        if rows:
            raise NotImplementedError(
                table_of(f"Cannot copy out of meta tensor; no data! {len(rows)} leaves.", rows)
            )
        back = {route: _reversed(route) for route in self.distinct_routes}
        return MovePlan(
            self.paths,
            self.shapes,
            [back[route] for route in self.routes],
            self.ties,
            non_blocking=self.non_blocking,
            numels=self.numels,
        )

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> MovePlan:
        """The plan of a `to_json` value.

        Raises:
            FileFormatError: when the value is no plan.

        >>> from tensordict import TensorDict
        >>> from tensordict.placement import plan_moves
        >>> plan = plan_moves(TensorDict({"a": torch.ones(2)}), torch.float16)
        >>> MovePlan.from_json(plan.to_json()).hash == plan.hash
        True
        """
        return cls(**read_plan(data))

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
        if not isinstance(td, Node):
            raise EntryTypeError(
                f"Cannot run a plan on a {type(td).__name__}: expected a tensordict."
            )
        if self.outline is not None and outline_of(td) == self.outline:
            tensors = leaves(td)
            same = [
                x.dtype is route.src_dtype and x.device == route.src_device
                for x, route in zip(tensors, self.routes)
            ]
            if all(same) and [x.shape for x in tensors] == self.shapes:
                return tensors
        pairs = leaves_with_path(td)
        tensors = [x for _, x in pairs]
        if len(pairs) == len(self.routes):
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


def _reversed(route: Route) -> Route:
    kind = _BACK.get(route.kind, route.kind)
    if kind in (MoveKind.H2H, MoveKind.RELAYOUT):
        # Strides and pinning stay; what is left to undo is the cast.
        kind = MoveKind.CAST if route.casts else MoveKind.ALIAS
    return Route(kind, route.device, route.dtype, route.src_device, route.src_dtype)


# Kinds without a transfer: done leaf by leaf in place, each source is freed at once.
_STAYS = (MoveKind.ALIAS, MoveKind.CAST, MoveKind.RELAYOUT)

_BACK = {
    MoveKind.H2D: MoveKind.D2H,
    MoveKind.D2H: MoveKind.H2D,
    MoveKind.FROM_META: MoveKind.TO_META,
}
