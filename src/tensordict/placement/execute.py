"""Running moves: copies in order, ties once, and one wait where the host could read too early."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from ..device.kinds import PLAIN_TENSORS, MoveKind
from ..device.ops import accelerator_ops, ops_for
from ..device.staging import StagingPool
from ..device.sync import wait_for
from .coalesce import MIN_GROUP, PACK_BELOW, groups_of, move_group
from .routes import Route, distinct, make_route, ties_of


def move_all(
    tensors: Sequence[Tensor],
    device: torch.device | None,
    dtype: torch.dtype | None,
    memory_format: torch.memory_format | None = None,
    non_blocking: bool | None = None,
) -> list[Tensor]:
    """Every tensor to one target: the loop over ``x.to(...)``, ties moved once.

    With ``non_blocking=None`` copies are asynchronous, and the host waits once at the end unless
    the target is a CUDA device.  A leaf that has nothing to do is the very same object.
    """
    if not tensors:
        return []
    if memory_format is None and (device is None or device.type == "cpu") and on_host(tensors):
        return cast_on_host(tensors, [dtype])
    routes = routes_to(tensors, device, dtype, memory_format)
    return run_routes(tensors, routes, options_for(non_blocking, device))[0]


def routes_to(
    tensors: Iterable[Tensor],
    device: torch.device | None,
    dtype: torch.dtype | None,
    memory_format: torch.memory_format | None = None,
) -> list[Route]:
    """The route of each tensor to one target, few of them distinct."""
    known: dict[Any, Route] = {}
    out: list[Route] = []
    for x in tensors:
        if memory_format is not None:
            out.append(make_route(x, device, dtype, memory_format))
            continue
        key = (x.dtype, x.device)
        route = known.get(key)
        if route is None:
            route = known[key] = make_route(x, device, dtype)
        out.append(route)
    return out


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How routes are run.

    Attributes:
        non_blocking: Whether copies between devices are asynchronous.
        waits: Whether the run waits for copies that the host could read too early.
        target: The one device of ``to(device)``; see `devices_to_wait_for`.
        pack_below: Leaves of fewer bytes share a copy; 0 copies each by itself.
        staging: Host buffers for shared copies.
        materialize: Makes the values of leaves that come from the meta device.
    """

    non_blocking: bool = True
    waits: bool = True
    target: torch.device | None = None
    pack_below: int = PACK_BELOW
    staging: StagingPool | None = None
    materialize: Callable[[int, Tensor, Route], Tensor] | None = None


def options_for(non_blocking: bool | None, target: torch.device | None = None) -> RunOptions:
    """The options that the ``non_blocking`` argument of ``to()`` means."""
    flag = asynchronous(non_blocking)
    return RunOptions(flag, flag and non_blocking is None, target)


def run_routes(
    tensors: Sequence[Tensor], routes: Sequence[Route], options: RunOptions
) -> tuple[list[Tensor], tuple[torch.device, ...]]:
    """Copy each tensor along its route.

    Returns:
        The results in order, and the devices that were waited for.
    """
    moving = [index for index, route in enumerate(routes) if route.kind is not MoveKind.ALIAS]
    out = list(tensors)
    ties = ties_of([tensors[index] for index in moving]) if len(moving) > 1 else None
    tied = {
        moving[i]: moving[first]
        for i, first in (ties or {}).items()
        if routes[moving[i]] == routes[moving[first]]
    }
    todo = [index for index in moving if index not in tied] if tied else moving
    if options.pack_below and len(todo) >= MIN_GROUP:
        for group in groups_of(tensors, routes, todo, options.pack_below):
            parts = [tensors[index] for index in group]
            route = routes[group[0]]
            made = move_group(parts, route, options.non_blocking, options.staging)
            for index, x in zip(group, made):
                out[index] = x
            todo = _without(todo, group)
    late: list[int] = []
    for index in todo:
        x, route = tensors[index], routes[index]
        if route.kind is MoveKind.FROM_META and options.materialize is not None:
            out[index] = options.materialize(index, x, route)
        elif options.waits and route.kind is MoveKind.D2H and route.cast_side == "target":
            # Fewer bytes cross, and the host casts once they have arrived.
            out[index] = x.to(route.device, non_blocking=options.non_blocking)
            late.append(index)
        else:
            out[index] = copy_along(x, route, options.non_blocking)
    waited = wait_for(devices_to_wait_for(routes, options.target)) if options.waits else ()
    for index in late:
        out[index] = out[index].to(routes[index].device, routes[index].dtype)
    for index, first in tied.items():
        out[index] = same_memory(tensors[index], tensors[first], out[first])
    return out, waited


def _without(todo: list[int], group: list[int]) -> list[int]:
    gone = set(group)
    return [index for index in todo if index not in gone]


def copy_along(x: Tensor, route: Route, non_blocking: bool) -> Tensor:
    """One copy; the cast happens on the side that sends fewer bytes."""
    device, dtype = route.device, route.dtype
    if route.pin and not route.pinned:
        return _copy_pinned(x, route, non_blocking)
    if route.memory_format is not None:
        return x.to(device, dtype, non_blocking, memory_format=route.memory_format)
    if route.cast_side == "target" and (route.kind is not MoveKind.D2H or not non_blocking):
        # In one call torch casts at the source, and sends the wider values.
        return x.to(device, non_blocking=non_blocking).to(device, dtype)
    return x.to(device, dtype, non_blocking)


def _copy_pinned(x: Tensor, route: Route, non_blocking: bool) -> Tensor:
    """A copy into pinned host memory, which a copy from a device can reach without the host."""
    ops = accelerator_ops() if route.kind is not MoveKind.D2H else ops_for(route.src_device)
    form = route.memory_format or torch.preserve_format
    like = torch.empty_like(x, dtype=route.dtype, device="meta", memory_format=form)
    n = like.untyped_storage().nbytes()
    memory = ops.empty_pinned(n).view(route.dtype) if n else torch.empty(0, dtype=route.dtype)
    return memory.as_strided(like.shape, like.stride()).copy_(x, non_blocking)


def same_memory(x: Tensor, first: Tensor, moved: Tensor) -> Tensor:
    """The result for a tie of ``first``, which became ``moved``."""
    return moved if x is first else moved.detach()


def devices_to_wait_for(
    routes: Iterable[Route], target: torch.device | None = None
) -> tuple[torch.device, ...]:
    """The devices one barrier has to cover after asynchronous copies.

    Args:
        routes: What was copied.
        target: The one device of ``to(device)``, which waits for every target that is not CUDA;
            ``None`` for moves that differ by leaf, which wait for copies to the host alone.
    """
    out: dict[torch.device, None] = {}
    for route in distinct(routes):
        kind = route.kind
        if kind is MoveKind.D2H:
            out[route.src_device] = None
        elif target is not None and target.type != "cuda":
            if kind is MoveKind.D2D:
                out[route.src_device] = None
            if kind in (MoveKind.D2D, MoveKind.H2D):
                out[route.device] = None
    return tuple(out)


def on_host(tensors: Sequence[Tensor]) -> bool:
    """Whether all tensors are in host memory."""
    return all([x.is_cpu for x in tensors])  # noqa: C419  (a generator is twice as slow)


def cast_on_host(
    tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype | None], plain: bool | None = None
) -> list[Tensor]:
    """Cast host tensors, each to its dtype; nothing is asynchronous.

    Args:
        tensors: Tensors in host memory.
        dtypes: As many; or a single one, for all of them.
        plain: Whether all are of plain types, where that is known.
    """
    if plain is None:
        plain = PLAIN_TENSORS.issuperset(map(type, tensors))
    caster = _CASTERS.get(dtypes[0]) if len(set(dtypes)) == 1 else None
    if not plain:
        out = [x.to(_HOST, dtype) for x, dtype in zip(tensors, _one_each(dtypes, tensors))]
    elif caster is not None:
        out = list(map(caster, tensors))
    else:
        # torch is faster when it is told the device too.
        out = list(map(Tensor.to, tensors, repeat(_HOST), _one_each(dtypes, tensors)))
    ties = ties_of(tensors, plain)
    if ties is not None:
        for index, first in ties.items():
            same_target = out[index].dtype is out[first].dtype
            if same_target and out[first] is not tensors[first]:
                out[index] = same_memory(tensors[index], tensors[first], out[first])
    return out


def _one_each(
    dtypes: Sequence[torch.dtype | None], tensors: Sequence[Tensor]
) -> Iterable[torch.dtype | None]:
    return dtypes if len(dtypes) == len(tensors) else repeat(dtypes[0])


# The methods have fewer arguments to parse than `Tensor.to`.
_CASTERS: dict[torch.dtype | None, Callable[[Tensor], Tensor]] = {
    torch.float16: Tensor.half,
    torch.bfloat16: Tensor.bfloat16,
    torch.float32: Tensor.float,
    torch.float64: Tensor.double,
    torch.int32: Tensor.int,
    torch.int64: Tensor.long,
    torch.bool: Tensor.bool,
}
_HOST = torch.device("cpu")


def asynchronous(non_blocking: bool | None) -> bool:
    """Whether copies are asynchronous: by default yes, but for a compiled graph.

    A graph has no events, so that its default copies have to be blocking.
    """
    return not torch.compiler.is_compiling() if non_blocking is None else non_blocking
