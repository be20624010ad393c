"""``to()``: a request run on a tree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..core.lock import set_origin
from ..core.metadata import set_device
from ..core.node import Node
from ..core.traverse import entries_beside, keyed_leaves, leaves, leaves_with_path
from ..core.undo import remember
from ..device.kinds import PLAIN_TENSORS, MoveKind
from ..errors import LockedError
from ..storage.consolidate import (
    buffer_of,
    castable,
    consolidate,
    over_buffer,
    packing_of,
    recast,
)
from .attrs import TensorAttrs, host_dtypes
from .execute import cast_on_host, move_all, on_host, options_for, run_routes
from .pinning import move_pinned
from .placing import place, replace_leaves
from .planning import plan_moves
from .request import MoveRequest, is_spec, parse_to
from .routes import Route, make_route
from .rules import Spec, Target
from .wanted import check_layout
from .writeback import WriteBack


def move(td: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``td.to(*args, **kwargs)``."""
    if len(args) == 1 and not kwargs:
        # The commonest calls, without a request.
        target = args[0]
        if type(target) is torch.dtype:
            return cast_leaves(td, target)
        if isinstance(target, Node) and is_spec(target):
            return remember(_to_records(td, target, None), td, WriteBack())
    return run_request(td, parse_to(*args, **kwargs))


def cast_leaves(
    td: Any, dtype: torch.dtype, cast_filter: Callable[[Any, Tensor], Any] | None = None
) -> Any:
    """``td.to(dtype)``, of the leaves alone for which ``cast_filter(path, leaf)`` is true."""
    tensors = leaves(td)
    wanted = cast_filter or td._cast_filter
    consolidated = td._lock is not None and buffer_of(td) is not None
    if wanted is None and not consolidated:
        out = place(td, move_all(tensors, None, dtype), None, keep_device=True)
    else:
        dtypes = _dtypes_after(td, tensors, dtype, wanted)
        if consolidated:
            out = _cast_consolidated(td, tensors, dtypes)
        else:
            out = place(td, _cast_each(tensors, dtypes), None, keep_device=True)
    return remember(out, td, WriteBack())


def _dtypes_after(
    td: Any,
    tensors: list[Tensor],
    dtype: torch.dtype,
    wanted: Callable[[Any, Tensor], Any] | None,
) -> list[torch.dtype]:
    if wanted is None:
        return [dtype] * len(tensors)
    return [dtype if wanted(path, x) else x.dtype for path, x in keyed_leaves(td)]


def _cast_each(tensors: list[Tensor], dtypes: list[torch.dtype]) -> list[Tensor]:
    if on_host(tensors):
        return cast_on_host(tensors, dtypes) if tensors else []
    routes = [make_route(x, None, dtype) for x, dtype in zip(tensors, dtypes)]
    return run_routes(tensors, routes, options_for(None))[0]


def _cast_consolidated(td: Any, tensors: list[Tensor], dtypes: list[torch.dtype]) -> Any:
    """A cast of a consolidated tree, in one buffer too, unless gradients have to flow through it."""
    if all(x.dtype is dtype for x, dtype in zip(tensors, dtypes)):
        out = place(td, tensors, None, keep_device=True)
        set_origin(out, td._lock.origin)
        return out
    grad = any(x.requires_grad for x in tensors)
    if not grad and castable(packing_of(td), dtypes):
        return recast(td, dtypes)
    out = place(td, _cast_each(tensors, dtypes), None, keep_device=True)
    return out if grad else consolidate(out)


def run_request(td: Any, request: MoveRequest) -> Any:
    """What ``td.to(...)`` returns.

    Raises:
        LockedError: for ``inplace=True`` on a locked tensordict.
        LayoutError: when a spec asks for another sharding.
        NotImplementedError: for values on the meta device that should go to a real one.
    """
    if request.inplace and td._lock is not None:
        raise LockedError
    if request.moves_nothing or _is_there(td, request):
        out = td
    elif request.inplace and not request.non_blocking_pin:
        out = _in_place(td, request)
    elif request.spec is not None:
        out = _to_spec(td, request)
    else:
        out = _to_one(td, request)
    if request.batch_size is not None:
        out.batch_size = request.batch_size
    if out is not td:
        remember(out, td, WriteBack())
    return out


def _is_there(td: Any, request: MoveRequest) -> bool:
    device = request.device
    return (
        device is not None
        and td._device == device
        and request.dtype is None
        and request.memory_format is None
        and request.spec is None
    )


def _to_one(td: Any, request: MoveRequest) -> Any:
    """Every leaf to one target."""
    device = request.device
    buffer = buffer_of(td)
    if request.dtype is not None and (buffer is not None or td._cast_filter is not None):
        return _cast_and_move(td, request)
    if buffer is not None and device is not None and request.memory_format is None:  # noqa: SIM102
        if buffer.device != device:
            return _move_buffer(td, buffer, device, request.non_blocking)
    tensors = leaves(td)
    if request.non_blocking_pin:
        threads = request.num_threads
        moved = move_pinned(tensors, device, request.dtype, request.non_blocking, threads)
    else:
        moved = move_all(
            tensors, device, request.dtype, request.memory_format, request.non_blocking
        )
    out = place(td, moved, device, keep_device=device is None)
    if buffer is None:
        return out
    if all(x is y for x, y in zip(tensors, moved)):
        set_origin(out, td._lock.origin)
        return out
    return consolidate(out)


def _cast_and_move(td: Any, request: MoveRequest) -> Any:
    """Two steps, of which the one that leaves fewer bytes to move comes first."""
    dtype, rest = request.dtype, replace(request, dtype=None)
    assert dtype is not None
    if rest.moves_nothing:
        return cast_leaves(td, dtype)
    widens = all(x.dtype.itemsize < dtype.itemsize for x in leaves(td))
    if widens and not request.non_blocking:  # the host must not cast what has yet to arrive
        return cast_leaves(_to_one(td, rest), dtype)
    return _to_one(cast_leaves(td, dtype), rest)


def _in_place(td: Any, request: MoveRequest) -> Any:
    """Through a plan, which frees each source before the next is cast where nothing is copied."""
    if request.dtype is not None and td._cast_filter is not None:
        cast = leaves(cast_leaves(td, request.dtype))
        replace_leaves(td, cast, td._device)
        request = replace(request, dtype=None)
        if request.moves_nothing:
            return td
    target = request.spec
    if target is None:
        target = Spec(default=Target(request.device, request.dtype, None, request.memory_format))
    plan = plan_moves(
        td, target, non_blocking=request.non_blocking, on_unused="ignore", on_shape="ignore"
    )
    if request.device is not None:
        plan.target_device = request.device  # waits as to(device) does
    plan.run(td, inplace=True)
    if request.spec is not None:
        set_device(td, None)
    return td


def _move_buffer(td: Any, buffer: Tensor, device: torch.device, non_blocking: bool | None) -> Any:
    """A consolidated tree to a device: one copy, and the result is consolidated too."""
    (moved,) = move_all([buffer], device, None, None, non_blocking)
    out = over_buffer(td, packing_of(td), moved)
    set_device(out, device)
    return out


def _to_spec(td: Any, request: MoveRequest) -> Any:
    """Each leaf to its own target."""
    spec, non_blocking = request.spec, request.non_blocking
    if not isinstance(spec, Spec):
        assert spec is not None
        return _to_records(td, spec, non_blocking)
    plan = plan_moves(td, spec, non_blocking=non_blocking, on_unused="ignore", on_shape="ignore")
    moved, _ = run_routes(leaves(td), plan.routes, options_for(non_blocking))
    return place(td, moved, None)


def _to_records(td: Any, records: Node, non_blocking: bool | None) -> Any:
    """Each leaf to the device and dtype of the record beside it."""
    flat = _flat_on_host(td, records)
    if flat is not None:
        return flat
    tensors = leaves(td)
    beside = entries_beside(td, records)
    dtypes = host_dtypes(beside)
    if dtypes is not None and on_host(tensors):
        moved = cast_on_host(tensors, dtypes) if _differ(tensors, dtypes) else tensors
        return place(td, moved, None)
    routes = _routes_beside(td, tensors, beside)
    if routes is None:
        return place(td, tensors, None)
    moved, _ = run_routes(tensors, routes, options_for(non_blocking))
    return place(td, moved, None)


def _flat_on_host(td: Any, records: Node) -> Any:
    """`_to_records` of one level of host tensors with a record each; ``None`` for any other tree.

    The common state dict, seen in one pass: names, tensors and records stand side by side.
    """
    if td._members() is not None or records._members() is not None:
        return None
    if list(td._names()) != list(records._names()):
        return None
    tensors = list(td._contents())
    if not PLAIN_TENSORS.issuperset(map(type, tensors)):
        return None
    dtypes = host_dtypes(records._contents())
    if dtypes is None or not on_host(tensors):
        return None
    moved = cast_on_host(tensors, dtypes, True) if _differ(tensors, dtypes) else tensors
    return place(td, moved, None)


def _differ(tensors: list[Tensor], dtypes: list[torch.dtype | None]) -> bool:
    """Whether any tensor is of another dtype than asked for."""
    if not tensors or tensors[0].dtype is not dtypes[0]:
        return len(tensors) > 0  # usually the first one tells
    return any([x.dtype is not dtype for x, dtype in zip(tensors, dtypes)])  # noqa: C419


def _routes_beside(td: Any, tensors: list[Tensor], beside: list[Any]) -> list[Route] | None:
    """The route of each leaf to the record beside it; ``None`` when nothing moves."""
    known: dict[Any, Route] = {}
    out: list[Route] = []
    moves = False
    sharded: list[int] = []
    for index, (x, record) in enumerate(zip(tensors, beside)):
        if type(record) is TensorAttrs and record.tgt_layout is not None:
            sharded.append(index)
        key = (x.dtype, x.device, None if record is None else id(record))
        route = known.get(key)
        if route is None:
            route = known[key] = _route_to(x, record)
            moves = moves or route.kind is not MoveKind.ALIAS
        out.append(route)
    paths = leaves_with_path(td) if sharded else []
    for index in sharded:
        check_layout(paths[index][0], tensors[index], beside[index].tgt_layout)
    return out if moves else None


def _route_to(x: Tensor, record: Any) -> Route:
    if type(record) is not TensorAttrs:
        return make_route(x, None, None)
    return make_route(x, record.tgt_device, record.tgt_dtype)
