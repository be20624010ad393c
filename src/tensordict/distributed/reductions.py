"""`all_reduce`, `reduce`, `reduce_scatter`: agree on the structure, then one message per dtype.

Small leaves travel in one packed buffer, large ones in place; when every rank has a consolidated
tree, their buffers are reduced as they are.  Whatever is asynchronous is
*started* on the calling thread, so collectives of one group keep their order; only waiting
and writing back go on in the background.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Buffer, Parameter

from ..core.node import Node
from ..core.traverse import leaves
from ..errors import SchemaMismatch, UnsupportedLeaf
from ..storage.buffer import fill
from ..storage.values import dtype_name
from . import composite
from .agreement import Round, agree, confirm, round_of, taken_in
from .describe import Described
from .endpoint import Known, Taken
from .one_buffer import written
from .packing import Stage
from .pending import Pending
from .receive import unwritable
from .schema import places
from .transport import group_rank
from .transport_protocol import Transport, Work

_OPS: Final = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "mean": dist.ReduceOp.AVG,
    "product": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}

# dtypes with which torch does not calculate.
_NO_NUMBERS: Final = re.compile("u?int[1-7]|bits.*|float4.*")

# dtypes that a backend reduces as they are; the others go through a wider one and back.
_DIRECT: Final = {
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
}


# With more runs of one dtype in a buffer than this, packing by dtype beats one message a run.
_MAX_RUNS: Final = 4


@dataclass(slots=True)
class _Reduction:
    """What is done to each element, in terms that every backend has."""

    op: Any
    scale: float | None  # before the sum
    average: bool
    accumulate: torch.dtype | None

    def via(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which a leaf is reduced."""
        if self.accumulate is not None and dtype.is_floating_point:
            return self.accumulate
        if dtype in _DIRECT:
            return dtype
        if dtype is torch.bool:
            return torch.uint8
        if dtype.is_complex:
            return torch.complex128 if dtype is torch.complex128 else torch.complex64
        return torch.float32 if dtype.is_floating_point else torch.int64

    @property
    def name(self) -> str:
        """The operation, for people."""
        name = "avg" if self.average else str(self.op).rpartition(".")[2].lower()
        return name if self.scale is None else f"{name} with the scale {self.scale}"

    def options(self, bucket_bytes: int | None) -> str:
        """What has to be the same on every rank; scales may differ."""
        if bucket_bytes is not None and bucket_bytes < 1:
            raise ValueError(f"Cannot use buckets of {bucket_bytes} bytes. Expected 1 or more.")
        name = "avg" if self.average else str(self.op).rpartition(".")[2].lower()
        return f"op={name}, accumulate_dtype={self.accumulate}, bucket_bytes={bucket_bytes}"

    def refuses(self, dtype: torch.dtype) -> bool:
        """Whether leaves of a dtype have no such result."""
        if _NO_NUMBERS.fullmatch(dtype_name(dtype)):
            return True
        if dtype.is_complex:
            return bool(self.op != dist.ReduceOp.SUM)
        if type(self.scale) is float and not dtype.is_floating_point:
            return True
        return dtype is torch.uint64 and self.op in (dist.ReduceOp.MIN, dist.ReduceOp.MAX)

    def op_for(self, dtype: torch.dtype) -> Any:
        """The operation on a leaf of a dtype: sums of bools are ``or``."""
        if dtype is torch.bool:
            return {
                dist.ReduceOp.SUM: dist.ReduceOp.MAX,
                dist.ReduceOp.PRODUCT: dist.ReduceOp.MIN,
            }.get(self.op, self.op)
        return self.op


def reduction_of(op: Any, scale: float | None, accumulate: torch.dtype | None) -> _Reduction:
    """The reduction that the arguments of a call stand for.

    Raises:
        ValueError: an operation that does not exist for tensordicts.
        TypeError: a scale that is no number.
    """
    if accumulate is not None and not isinstance(accumulate, torch.dtype):
        raise TypeError(f"Cannot accumulate in {accumulate!r}. Expected a torch.dtype.")
    if accumulate is not None and not (accumulate.is_floating_point and accumulate in _DIRECT):
        raise ValueError(
            f"Cannot accumulate floating leaves in {accumulate}. Expected a floating dtype of 16 "
            "bits or more."
        )
    scale = _factor(scale)
    if op is None:
        op = dist.ReduceOp.SUM
    if isinstance(op, str):
        if op.lower() not in _OPS:
            raise ValueError(f"Cannot reduce with {op!r}. Expected one of {sorted(_OPS)}.")
        op = _OPS[op.lower()]
    if type(op) not in (dist.ReduceOp, type(dist.ReduceOp.SUM)):
        raise TypeError(
            f"Cannot reduce with {op!r}. Expected a ReduceOp, or one of {sorted(_OPS)}."
        )
    if op == dist.ReduceOp.PREMUL_SUM:
        # Made by torch.distributed._make_nccl_premul_sum: the factor is part of the op.
        factor = op.__getstate__()[1]
        return _Reduction(dist.ReduceOp.SUM, float(factor), False, accumulate)
    if op == dist.ReduceOp.AVG:
        return _Reduction(dist.ReduceOp.SUM, scale, True, accumulate)
    if op not in (
        dist.ReduceOp.SUM,
        dist.ReduceOp.PRODUCT,
        dist.ReduceOp.MIN,
        dist.ReduceOp.MAX,
    ):
        raise ValueError(f"Cannot reduce with {op}. Expected one of {sorted(_OPS)}.")
    return _Reduction(op, scale, False, accumulate)


def _factor(scale: Any) -> float | None:
    """A scale as one of Python's numbers: torch treats those alike, for every dtype."""
    if isinstance(scale, (Tensor, np.generic)):
        scale = scale.item()
    if scale is None or type(scale) is bool:
        return scale
    if not isinstance(scale, (int, float)):
        raise TypeError(f"Cannot scale by a {type(scale).__name__}. Expected a number.")
    if isinstance(scale, float) or not -(1 << 63) <= scale < 1 << 63:
        return float(scale)
    return scale


@dataclass(slots=True)
class _Lump:
    """Some leaves that are reduced as one tensor.

    Attributes:
        tensor: what the collective works on.
        back: writes the result to the leaves.
    """

    tensor: Tensor
    dtype: torch.dtype
    back: Callable[[Tensor], None]


@dataclass(slots=True)
class _Running:
    """A reduction that was started."""

    works: list[Work] = field(default_factory=list)
    lumps: list[_Lump] = field(default_factory=list)


def all_reduce(
    td: Node,
    op: Any = None,
    *,
    group: Any = None,
    async_op: bool = False,
    bucket_bytes: int | None = None,
    scale: float | None = None,
    accumulate_dtype: torch.dtype | None = None,
    timeout: float | None = None,
    transport: Transport | None = None,
) -> Pending[None] | None:
    """Reduce every leaf over all ranks, in place.

    Memory that several leaves share, in whole or in part, is reduced once; leaves of any strides
    are written through them; bools are reduced as ``or`` (sum, avg, max) and ``and``
    (product, min), and the average of integers is cut towards zero.

    Args:
        td: this rank's; all have one structure.
        op: a ``ReduceOp`` or its name: sum (default), avg or mean, product, min, max.
        group: a process group or a device mesh of one dimension; the default group if None.
        async_op: return a handle at once; the leaves are written when it is done.
        bucket_bytes: split packed messages into pieces of about so many bytes.
        scale: multiply by this before a sum; it may differ from rank to rank.
        accumulate_dtype: reduce floating leaves in this floating dtype.
        timeout: seconds for the whole; the group's own by default.
        transport: what to send with instead of a process group.

    Returns:
        None; with ``async_op`` a handle.

    Raises:
        SchemaMismatch: structures differ, or a leaf is expanded and cannot be written; on every
            rank, before anything is written.
        UnsupportedLeaf: a leaf that cannot be reduced (ragged, sparse, complex by other than a
            sum, integer with a fraction as scale); on every rank.
    """
    round_ = round_of("all_reduce", group, transport, timeout)
    how = reduction_of(op, scale, accumulate_dtype)
    round_.options = how.options(bucket_bytes)
    begin = round_.transport.all_reduce
    finish = _start(round_, td, how, begin, bucket_bytes, keep=True)
    if async_op:
        return Pending(finish, "all_reduce")
    finish()
    return None


def reduce(
    td: Node,
    dst: int | None = None,
    op: Any = None,
    *,
    group: Any = None,
    group_dst: int | None = None,
    async_op: bool = False,
    bucket_bytes: int | None = None,
    scale: float | None = None,
    accumulate_dtype: torch.dtype | None = None,
    timeout: float | None = None,
    transport: Transport | None = None,
) -> Pending[None] | None:
    """Reduce every leaf to one rank, in place there; nothing changes on the others.

    Args:
        td: this rank's; all have one structure.
        dst: the rank in the world that gets the result.
        group_dst: that rank in the group, instead of ``dst``.
        op, group, async_op, bucket_bytes, scale, accumulate_dtype, timeout, transport: see
            `all_reduce`.

    Returns:
        None; with ``async_op`` a handle.
    """
    round_ = round_of("reduce", group, transport, timeout)
    target = group_rank(round_.transport, group, dst, group_dst)
    how = reduction_of(op, scale, accumulate_dtype)
    round_.options = f"to {target}, {how.options(bucket_bytes)}"
    begin = partial(_reduce_to, round_.transport, target)
    finish = _start(round_, td, how, begin, bucket_bytes, keep=round_.transport.rank == target)
    if async_op:
        return Pending(finish, "reduce")
    finish()
    return None


def reduce_scatter(
    tds: Sequence[Node],
    op: Any = None,
    *,
    group: Any = None,
    scale: float | None = None,
    accumulate_dtype: torch.dtype | None = None,
    timeout: float | None = None,
    transport: Transport | None = None,
) -> Any:
    """Reduce the k-th tensordict of every rank to rank k, in place there.

    Args:
        tds: one per rank of the group.
        op, group, scale, accumulate_dtype, timeout, transport: see `all_reduce`.

    Returns:
        The tensordict of this rank.
    """
    round_ = round_of("reduce_scatter", group, transport, timeout)
    how = reduction_of(op, scale, accumulate_dtype)
    if len(tds) != round_.transport.size:
        round_.options = f"to 0, {how.options(None)}"
        error = ValueError(
            f"Cannot reduce_scatter {len(tds)} tensordicts. "
            f"Expected one for each of the {round_.transport.size} ranks."
        )
        confirm(round_, None, error)  # raises it, and something like it on the others
    finishes = []
    apart = _is_apart(tds, round_.transport.rank)
    for rank, td in enumerate(tds):
        round_.options = f"to {rank}, {how.options(None)}"
        begin = partial(_reduce_to, round_.transport, rank)
        keep = rank == round_.transport.rank
        finishes.append(_start(round_, td, how, begin, None, keep=keep, in_place=apart))
    for finish in finishes:
        finish()
    return tds[round_.transport.rank]


def _is_apart(tds: Sequence[Any], k: int) -> bool:
    """Whether the memory of one tensordict is that of no other, as far as can be told."""
    storages: list[set[int]] = []
    for td in tds:
        tensors = leaves(td) if isinstance(td, Node) else []
        if not {Tensor, Parameter, Buffer}.issuperset(map(type, tensors)):
            return False
        if any(x.layout is not torch.strided for x in tensors):
            return False
        storages.append({x.untyped_storage().data_ptr() for x in tensors})
    mine = storages.pop(k)
    return all(mine.isdisjoint(theirs) for theirs in storages)


def _reduce_to(transport: Transport, dst: int, x: Tensor, op: Any) -> Work:
    return transport.reduce(x, dst, op)


def _start(
    round_: Round,
    td: Node,
    how: _Reduction,
    begin: Callable[[Tensor, Any], Work],
    bucket_bytes: int | None,
    *,
    keep: bool,
    in_place: bool = True,
) -> Callable[[], None]:
    """Agree and start a reduction; returns what waits for it and writes the result.

    Args:
        keep: whether this rank gets the result.
        in_place: whether the memory of large leaves may change before all is through.
    """
    taken, error = taken_in(round_, td)
    if taken is not None:
        error = _irreducible(taken, how, keep)
    ours = None if taken is None or error is not None else taken.entry
    buffer = None if ours is None or taken is None else _writable_buffer(taken)
    mine = None if taken is None else taken.described
    agreed = agree(round_, mine, ours, error, one_buffer=buffer is not None)
    assert taken is not None
    described, entry = agreed.described, agreed.entry
    running = _Running()
    runs = _runs(entry) if agreed.one_buffer else []
    if runs and buffer is not None and len(runs) <= _MAX_RUNS:
        lumps = _buffer_lumps(buffer, runs, how, keep and in_place)
        _begin(round_, running, lumps, how, begin, bucket_bytes)
        return lambda: _finish(round_, running, how, keep, lambda: written(described.parts))
    stage, packed = taken.stage, taken.packed
    if entry is not taken.entry or stage is None:
        if stage is not None:
            taken.entry.give_back(stage)
        stage, packed = entry.stage(), False
    large = _large_lumps(entry, described, how, keep and in_place)
    _begin(round_, running, large, how, begin, bucket_bytes)
    if not packed:  # while the large ones are under way
        stage.pack(described.parts)
    _begin(round_, running, _packed_lumps(stage, how), how, begin, bucket_bytes)

    def finish() -> None:
        _finish(round_, running, how, keep, lambda: stage.unpack_into(described.parts))
        entry.give_back(stage)

    return finish


def _finish(
    round_: Round, running: _Running, how: _Reduction, keep: bool, unpack: Callable[[], None]
) -> None:
    """Wait for a reduction, and write the result where it is kept."""
    for work in running.works:
        round_.wait(work, "payload")
    if not keep:
        return
    with torch.inference_mode():  # memory of the user may have been made in it
        for lump in running.lumps:
            x = lump.tensor
            if how.average and lump.dtype is not torch.bool:
                n = round_.transport.size
                exact = x.dtype.is_floating_point or x.dtype.is_complex
                x = x.div_(n) if exact else x.div_(n, rounding_mode="trunc")
            lump.back(x)
        unpack()


def _begin(
    round_: Round,
    running: _Running,
    lumps: list[_Lump],
    how: _Reduction,
    begin: Callable[[Tensor, Any], Work],
    bucket_bytes: int | None,
) -> None:
    for lump in lumps:
        if how.scale is not None:
            with torch.inference_mode():  # memory of the user may have been made in it
                lump.tensor.mul_(how.scale if lump.dtype is not torch.bool else bool(how.scale))
        op = how.op_for(lump.dtype)
        for piece in _pieces(lump.tensor, bucket_bytes):
            running.works.append(round_.start(partial(begin, piece, op), "payload"))
    running.lumps += lumps


def _irreducible(taken: Taken, how: _Reduction, keep: bool) -> Exception | None:
    """Why a tensordict cannot be reduced, or the result not be written to it."""
    schema = taken.entry.schema
    reasons = {
        c.first: (f"a {c.kind} leaf", "cannot be reduced")
        for c in schema.composites
        if c.kind != composite.DTENSOR
    }
    for dtype in set(schema.dtypes):
        if how.refuses(dtype):
            what = f"a leaf of dtype {dtype_name(dtype)}"
            reasons[schema.dtypes.index(dtype)] = what, f"cannot be reduced by {how.name}"
    if reasons:
        first = min(reasons)
        paths = {place.first: path for path, place in places(schema) if place.letter in "tc"}
        what, why = reasons[first]
        return UnsupportedLeaf(paths[first], what, "Take it out, or convert it, first.", why)
    rows = unwritable(taken.described) if keep else []
    if rows:
        return SchemaMismatch("Cannot write the result of a reduction:", rows)
    return None


def _packed_lumps(stage: Stage, how: _Reduction) -> list[_Lump]:
    """One lump per dtype of the packed message."""
    buffer = stage.message()
    spans = stage.packing.spans()
    return [_lump(buffer[start:stop].view(dtype), how) for dtype, start, stop in spans]


def _writable_buffer(taken: Taken) -> Tensor | None:
    """The buffer of a consolidated tree, unless torch would not write there."""
    if taken.buffer is None or taken.buffer.is_inference():
        return None
    return taken.buffer


def _runs(entry: Known) -> list[tuple[torch.dtype, int, int]]:
    plan = entry.whole().packing.one_buffer
    assert plan is not None
    return plan.runs


def _buffer_lumps(
    buffer: Tensor, runs: list[tuple[torch.dtype, int, int]], how: _Reduction, in_place: bool
) -> list[_Lump]:
    """One lump per run of a dtype: the tree's own memory, or a copy where that must not change.

    What lies between leaves is reduced with them; nobody reads it.
    """
    return [_lump(buffer[start:stop].view(dtype), how, in_place) for dtype, start, stop in runs]


def _lump(typed: Tensor, how: _Reduction, in_place: bool = True) -> _Lump:
    dtype = typed.dtype
    via = how.via(dtype)
    if via is dtype and in_place:
        return _Lump(_real(typed), dtype, lambda x: None)
    return _Lump(_real(typed.to(via, copy=True)), dtype, _copier(typed, via))


def _large_lumps(
    entry: Known, described: Described, how: _Reduction, in_place: bool
) -> list[_Lump]:
    out = []
    shared = _shared(described.parts, entry) if in_place and entry.packing.large else frozenset()
    for i in entry.packing.large:
        part = described.parts[i].detach()
        via = how.via(part.dtype)
        plain = part.is_contiguous() and not part.is_conj() and not part.is_neg()
        if via is part.dtype and plain and in_place and i not in shared:
            flat = _real(part.view(-1))
            out.append(_Lump(flat, part.dtype, partial(_note_written, described.parts[i])))
            continue
        # A copy: of other strides or dtype, of memory that another leaf has, too, or on a rank
        # where nothing may change.
        copy = part.to(via, copy=True, memory_format=torch.contiguous_format)
        flat = copy.resolve_conj().resolve_neg().view(-1)
        out.append(_Lump(_real(flat), part.dtype, _copier(part, via)))
    return out


def _note_written(part: Tensor, x: Tensor) -> None:
    written([part])


def _shared(parts: Sequence[Tensor], entry: Known) -> frozenset[int]:
    """The parts that overlap others: in place, what they share would be reduced twice."""
    own = [i for i in range(len(parts)) if i not in entry.schema.ties]
    start = np.array([parts[i].data_ptr() for i in own], dtype=np.uint64)
    stop = start + np.array([_extent(parts[i]) for i in own], dtype=np.uint64)
    order = np.argsort(start, kind="stable")
    reach = np.maximum.accumulate(stop[order])
    meets = reach[:-1] > start[order][1:]  # each from the second on, with those before it
    both = np.append(meets, False) | np.append(False, meets)
    return frozenset(own[k] for k in order[both])


def _extent(x: Tensor) -> int:
    """Bytes from the first to the last element."""
    if x.is_contiguous() or not x.numel():
        return x.nbytes
    return (sum((n - 1) * s for n, s in zip(x.shape, x.stride())) + 1) * x.element_size()


def _real(x: Tensor) -> Tensor:
    return torch.view_as_real(x).view(-1) if x.dtype.is_complex else x


def _copier(target: Tensor, via: torch.dtype) -> Callable[[Tensor], None]:
    def back(x: Tensor) -> None:
        whole = torch.view_as_complex(x.view(-1, 2)) if via.is_complex else x
        fill([target], [whole.view(target.shape)])

    return back


def _pieces(x: Tensor, bucket_bytes: int | None) -> Sequence[Tensor]:
    if bucket_bytes is None or x.numel() * x.element_size() <= bucket_bytes:
        return (x,)
    return x.split(max(1, bucket_bytes // x.element_size()))
