"""`all_reduce`, `reduce`, `reduce_scatter`: agree on the structure, then one message per dtype.

Small leaves travel in one packed buffer, large ones in place.  Whatever is asynchronous is
*started* on the calling thread, so collectives of one group keep their order; only waiting
and writing back go on in the background.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from ..core.node import Node
from ..errors import UnsupportedLeaf
from ..storage.buffer import fill
from ..storage.values import dtype_name
from . import composite
from .agreement import Round, agree, round_of, taken_in
from .describe import Described
from .endpoint import Known
from .packing import Stage
from .pending import Pending
from .transport import Transport, Work, group_rank

_OPS: Final = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "mean": dist.ReduceOp.AVG,
    "product": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}

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
    """
    if op is None:
        op = dist.ReduceOp.SUM
    if isinstance(op, str):
        if op.lower() not in _OPS:
            raise ValueError(f"Cannot reduce with {op!r}. Expected one of {sorted(_OPS)}.")
        op = _OPS[op.lower()]
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

    A storage that several leaves share is reduced once; leaves of any strides are written
    through them; bools are reduced as ``or`` (sum) and ``and`` (product).

    Args:
        td: this rank's; all have one structure.
        op: a ``ReduceOp`` or its name: sum (default), avg, product, min, max.
        group: a process group or a device mesh of one dimension; the default group if None.
        async_op: return a handle at once; the leaves are written when it is done.
        bucket_bytes: split packed messages into pieces of about so many bytes.
        scale: multiply by this before a sum.
        accumulate_dtype: reduce floating leaves in this dtype.
        timeout: seconds for the whole; the group's own by default.
        transport: what to send with instead of a process group.

    Returns:
        None; with ``async_op`` a handle.

    Raises:
        SchemaMismatch: structures differ; on every rank, before anything is written.
    """
    round_ = round_of("all_reduce", group, transport, timeout)
    how = reduction_of(op, scale, accumulate_dtype)
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
        raise ValueError(
            f"Cannot reduce_scatter {len(tds)} tensordicts. "
            f"Expected one for each of the {round_.transport.size} ranks."
        )
    finishes = []
    for rank, td in enumerate(tds):
        begin = partial(_reduce_to, round_.transport, rank)
        keep = rank == round_.transport.rank
        finishes.append(_start(round_, td, how, begin, None, keep=keep))
    for finish in finishes:
        finish()
    return tds[round_.transport.rank]


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
) -> Callable[[], None]:
    """Agree and start a reduction; returns what waits for it and writes the result."""
    taken, error = taken_in(round_, td)
    if taken is not None:
        error = _irreducible(taken.entry, how)
    ours = None if taken is None or error is not None else taken.entry
    described, entry, _ = agree(round_, None if taken is None else taken.described, ours, error)
    assert taken is not None
    stage, packed = taken.stage, taken.packed
    if entry is not taken.entry:
        taken.entry.give_back(stage)
        stage, packed = entry.stage(), False
    running = _Running()
    _begin(round_, running, _large_lumps(entry, described, how, keep), how, begin, bucket_bytes)
    if not packed:  # while the large ones are under way
        stage.pack(described.parts)
    _begin(round_, running, _packed_lumps(stage, how), how, begin, bucket_bytes)

    def finish() -> None:
        for work in running.works:
            round_.wait(work, "payload")
        if keep:
            with torch.no_grad():
                for lump in running.lumps:
                    x = lump.tensor
                    if how.average:
                        n = round_.transport.size
                        exact = x.dtype.is_floating_point or x.dtype.is_complex
                        x = x.div_(n) if exact else x.div_(n, rounding_mode="trunc")
                    lump.back(x)
                stage.unpack_into(described.parts)
        entry.give_back(stage)

    return finish


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
            lump.tensor.mul_(how.scale)
        op = how.op_for(lump.dtype)
        for piece in _pieces(lump.tensor, bucket_bytes):
            running.works.append(round_.start(partial(begin, piece, op), "payload"))
    running.lumps += lumps


def _irreducible(entry: Known, how: _Reduction) -> Exception | None:
    for c in entry.schema.composites:
        if c.kind != composite.DTENSOR:
            return UnsupportedLeaf((), f"a {c.kind} leaf in a reduction")
    ordered = how.op in (dist.ReduceOp.MIN, dist.ReduceOp.MAX)
    for dtype in set(entry.schema.dtypes):
        if dtype.is_complex and how.op != dist.ReduceOp.SUM:
            return UnsupportedLeaf((), f"a leaf of dtype {dtype_name(dtype)} in {how.op}")
        if dtype.itemsize == 8 and dtype is torch.uint64 and ordered:
            return UnsupportedLeaf((), f"a leaf of dtype {dtype_name(dtype)} in {how.op}")
    return None


def _packed_lumps(stage: Stage, how: _Reduction) -> list[_Lump]:
    """One lump per dtype of the packed message."""
    buffer = stage.message()
    out = []
    for dtype, start, stop in stage.packing.spans():
        typed = buffer[start:stop].view(dtype)
        via = how.via(dtype)
        if via is dtype:
            out.append(_Lump(_real(typed), dtype, lambda x: None))
        else:
            out.append(_Lump(_real(typed.to(via)), dtype, _copier(typed, via)))
    return out


def _large_lumps(entry: Known, described: Described, how: _Reduction, keep: bool) -> list[_Lump]:
    out = []
    for i in entry.packing.large:
        part = described.parts[i].detach()
        via = how.via(part.dtype)
        plain = part.is_contiguous() and not part.is_conj() and not part.is_neg()
        if via is part.dtype and plain and keep:
            out.append(_Lump(_real(part.view(-1)), part.dtype, lambda x: None))
            continue
        # A copy: of other strides or dtype, or on a rank where nothing may change.
        copy = part.to(via, copy=True, memory_format=torch.contiguous_format)
        flat = copy.resolve_conj().resolve_neg().view(-1)
        out.append(_Lump(_real(flat), part.dtype, _copier(part, via)))
    return out


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
