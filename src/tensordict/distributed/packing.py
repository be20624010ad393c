"""What of a payload goes into one packed message, and where: pure arithmetic, then buffers.

Parts below a threshold are packed, those above travel in place, one message each: packing
large tensors costs a copy, sending small ones costs a message.  Parts of equal dtype and
shape lie side by side, so that a whole group is filled by one ``stack`` and taken apart by
one ``split``.  Both ends derive the same `Packing` from the schema alone.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Size, Tensor

from ..storage.buffer import contiguous_strides, fill
from ..storage.values import dtype_name
from .one_buffer import OneBuffer, plan_one_buffer
from .schema import FORMATS, Schema

# Measured over gloo: up to here a copy, or one on either side, costs less than a message.
PACK_BELOW: Final = 192 << 10
# Dtypes of less than a byte that torch stores one a byte, and cannot copy as they are.
_SHELL: Final = re.compile("u?int[1-7]")
# From here on, one call per group is cheaper than one call per part.
_GROUP: Final = 4


@dataclass(frozen=True, slots=True)
class Group:
    """Parts of one dtype and shape, side by side.

    Attributes:
        offset: first byte in the packed message.
        dtype, shape: of each part.
        parts: indices of the parts, in order.
        nbytes: of the whole group.
    """

    offset: int
    dtype: torch.dtype
    shape: Size
    parts: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Packing:
    """How the payload of a schema travels.

    Attributes:
        groups: what the packed message holds.
        large: indices of the parts that travel alone, in order.
        packed_nbytes: bytes of the packed message, without non-tensor values.
        large_nbytes: bytes of the messages of ``large``, each.
        alignment: of each group.
        one_buffer: instead of groups, where the parts lie in the buffer of a consolidated tree,
            which then is the packed message.
    """

    groups: tuple[Group, ...]
    large: tuple[int, ...]
    packed_nbytes: int
    large_nbytes: tuple[int, ...]
    alignment: int
    one_buffer: OneBuffer | None = None

    def messages(self, packed: Tensor) -> list[Tensor]:
        """What is sent of a packed message with values at its end: they follow a buffer alone."""
        if self.one_buffer is None:
            return [packed] if packed.numel() else []
        at = self.packed_nbytes
        return [x for x in (packed[:at], packed[at:]) if x.numel()]

    def spans(self) -> list[tuple[torch.dtype, int, int]]:
        """The first byte and the end of each dtype in the packed message."""
        out: dict[torch.dtype, tuple[int, int]] = {}
        for group in self.groups:
            start, _ = out.get(group.dtype, (group.offset, 0))
            out[group.dtype] = start, group.offset + group.nbytes
        return [(dtype, start, stop) for dtype, (start, stop) in out.items() if stop > start]

    @property
    def nbytes(self) -> int:
        """Bytes of all messages, without non-tensor values."""
        return self.packed_nbytes + self.large_total

    @property
    def large_total(self) -> int:
        """Bytes of the parts that travel alone."""
        return sum(self.large_nbytes)

    def apart(self, n: int) -> tuple[int, ...]:
        """Those of ``n`` parts that do not lie in a group which one call fills."""
        blocks = [group.parts for group in self.groups if _is_block(group)]
        if sum(map(len, blocks)) == n:
            return ()
        return tuple(sorted(set(range(n)).difference(*blocks)))


def _is_block(group: Group) -> bool:
    return len(group.parts) >= _GROUP and group.nbytes > 0


def plan_packing(schema: Schema) -> Packing:
    """The packing of a schema; tied parts travel once.

    Groups come by item size (widest first), dtype, shape; parts within one in schema order.
    """
    found: dict[tuple[torch.dtype, Size], list[int]] = {}
    for i, key in enumerate(zip(schema.dtypes, schema.shapes)):
        if i not in schema.ties:
            found.setdefault(key, []).append(i)
    small: list[tuple[torch.dtype, Size, list[int], int]] = []
    large: list[tuple[int, int]] = []
    for (dtype, shape), parts in found.items():
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < schema.pack_below:
            small.append((dtype, shape, parts, nbytes * len(parts)))
        else:
            large += [(i, nbytes) for i in parts]
    small.sort(key=lambda g: (-g[0].itemsize, dtype_name(g[0]), tuple(g[1])))
    groups, at = [], 0
    mask = max(schema.alignment, 16) - 1
    for dtype, shape, parts, nbytes in small:
        groups.append(Group(at, dtype, shape, tuple(parts), nbytes))
        at = (at + nbytes + mask) & ~mask
    large.sort()
    return Packing(
        tuple(groups),
        tuple(i for i, _ in large),
        at,
        tuple(nbytes for _, nbytes in large),
        schema.alignment,
    )


def plan_whole(schema: Schema) -> Packing:
    """The packing of a consolidated tree: its buffer as it is.

    Raises:
        EntryTypeError: a part of a dtype that cannot lie in a buffer.
    """
    plan = plan_one_buffer(schema)
    return Packing((), (), plan.nbytes, (), schema.alignment, plan)


def _take(indices: Sequence[int]) -> Callable[[Sequence[Tensor]], Any]:
    if len(indices) < 2:
        return lambda parts: [parts[i] for i in indices]
    first, stop = indices[0], indices[-1] + 1
    if tuple(indices) == tuple(range(first, stop)):
        return lambda parts: parts[first:stop]
    return operator.itemgetter(*indices)


class Stage:
    """A buffer for one packed message and the views to fill or to read it; reusable.

    Args:
        packing: what lies in it.
    """

    __slots__ = ("_copy", "_groups", "_order", "_room", "_singles", "_views", "large", "packing")

    def __init__(self, packing: Packing) -> None:
        self.packing = packing
        # Parts that travel alone land here before they are written (see `large_buffers`).
        self.large: list[Tensor] | None = None
        self._allocate(0)

    def _allocate(self, extra: int) -> None:
        packing, at = self.packing, 0
        with torch.inference_mode(False):  # it outlives the mode of this caller
            room = torch.empty(packing.packed_nbytes + extra, dtype=torch.uint8)
        if packing.one_buffer is None:  # else it is received into, and never sent
            for group in packing.groups:  # memory between groups must not leave the process
                room[at : group.offset].zero_()
                at = group.offset + group.nbytes
            room[at : packing.packed_nbytes].zero_()
        self._room = room
        self._groups: list[tuple[Any, Tensor]] | None = None
        self._singles: tuple[Any, list[Tensor]] = (_take(()), [])
        self._views: list[Tensor] | None = None

    def message(self, values_nbytes: int = 0) -> Tensor:
        """The packed message with room for encoded values at its end, uint8."""
        need = self.packing.packed_nbytes + values_nbytes
        if need > self._room.numel():
            self._allocate(values_nbytes)
        return self._room if need == self._room.numel() else self._room[:need]

    def large_buffers(self) -> list[Tensor]:
        """One uint8 buffer for each part that travels alone."""
        if self.large is None:
            self.large = [torch.empty(n, dtype=torch.uint8) for n in self.packing.large_nbytes]
        return self.large

    @property
    def nbytes(self) -> int:
        """Bytes that keeping this stage costs."""
        return self._room.numel() + (self.packing.large_total if self.large else 0)

    def pack(self, parts: Sequence[Tensor]) -> None:
        """Copy the packed ones of ``parts`` in."""
        with torch.no_grad():
            for take, block in self._blocks():
                leaves = take(parts)
                try:
                    torch.stack(leaves, out=block)
                except RuntimeError:  # leaves of other devices: one copy each
                    fill(list(block.unbind()), leaves)
        self._pack_singles(parts)

    def pack_alike(self, parts: Sequence[Tensor], *, plain: bool) -> bool:
        """`pack`, if the parts of each larger group have its shape.

        torch looks at that while it copies: it stacks tensors of one shape only.  Parts that do
        not lie in such a group (`Packing.apart`) are copied as they are.

        Args:
            parts: all parts of the schema.
            plain: refuse parts of larger groups that require grad, as torch does for a stack
                into a buffer in grad mode.

        Returns:
            Whether everything was packed.
        """
        if plain and torch.is_inference_mode_enabled():  # there is no grad mode to ask
            return False
        with torch.set_grad_enabled(plain):
            for take, block in self._blocks():
                leaves = take(parts)
                if leaves[0].shape != block.shape[1:]:
                    return False
                try:
                    torch.stack(leaves, out=block)
                except RuntimeError:
                    return False
        self._pack_singles(parts)
        return True

    def _pack_singles(self, parts: Sequence[Tensor]) -> None:
        take, targets = self._singles
        if targets:
            fill(targets, take(parts))

    def _blocks(self) -> list[tuple[Any, Tensor]]:
        """What fills each group: who takes its parts, and a tensor ``[n, *shape]``."""
        if self._groups is None:
            with torch.inference_mode(False):
                self._groups = self._prepare()
        return self._groups

    def _prepare(self) -> list[tuple[Any, Tensor]]:
        groups: list[tuple[Any, Tensor]] = []
        singles: list[int] = []
        targets: list[Tensor] = []
        for group in self.packing.groups:
            if _is_block(group):
                groups.append((_take(group.parts), _typed(self._room, group)))
            else:
                singles += group.parts
                targets += _views_of(self._room, group)
        self._singles = _take(singles), targets
        return groups

    def unpack_into(self, parts: Sequence[Tensor]) -> None:
        """Copy the message into the packed ones of ``parts``."""
        # Copies cost a quarter less than under no_grad; versions of the targets still grow.
        with torch.inference_mode():
            if self._views is None:
                indices, self._views = _all_views(self._room, self.packing)
                self._order = _take(indices)
                dtypes = {v.dtype for v in self._views}
                shells = any(_SHELL.fullmatch(dtype_name(d)) for d in dtypes)
                self._copy = fill if shells else torch._foreach_copy_
            if self._views:
                try:
                    self._copy(self._order(parts), self._views)
                except RuntimeError:  # some are conjugate or negative views
                    fill(self._order(parts), self._views)


def _typed(buffer: Tensor, group: Group) -> Tensor:
    raw = buffer[group.offset : group.offset + group.nbytes].view(group.dtype)
    return raw.view(len(group.parts), *group.shape)


def _views_of(buffer: Tensor, group: Group) -> list[Tensor]:
    raw = buffer[group.offset : group.offset + group.nbytes].view(group.dtype)
    shape = group.shape
    stride, step = contiguous_strides(tuple(shape)), math.prod(shape)
    base = raw.storage_offset()
    return [raw.as_strided(shape, stride, int(base) + k * step) for k in range(len(group.parts))]


def _all_views(buffer: Tensor, packing: Packing) -> tuple[Sequence[int], list[Tensor]]:
    """The packed parts in the order of their memory, and a view of the message for each."""
    if packing.one_buffer is not None:
        return packing.one_buffer.views(buffer)
    groups = packing.groups
    parts = [i for group in groups for i in group.parts]
    return parts, [view for group in groups for view in _views_of(buffer, group)]


def take_apart(buffer: Tensor, packing: Packing, parts: list[Any]) -> None:
    """Put the packed parts of a fresh message into ``parts``, as tensors that share its memory.

    They are not views of each other for autograd (``unsafe_split``): each can be written and
    differentiated by itself.
    """
    if packing.one_buffer is not None:
        packing.one_buffer.take_apart(buffer[: packing.packed_nbytes], parts)
    for group in packing.groups:
        n, shape = len(group.parts), group.shape
        if n >= _GROUP and group.nbytes and shape:
            block = _typed(buffer, group).view(n * shape[0], *shape[1:])
            pieces: Sequence[Tensor] = torch.unsafe_split(block, shape[0])
        else:
            pieces = _views_of(buffer, group)
        for i, piece in zip(group.parts, pieces):
            parts[i] = piece


def sendable(part: Tensor, devices: frozenset[str]) -> Tensor:
    """A contiguous tensor of a device that can be sent: the part itself where it is one."""
    if part.is_conj() or part.is_neg():
        part = part.resolve_conj().resolve_neg()
    if part.device.type not in devices:
        part = part.cpu()
    if part.numel() == 1:  # contiguous, whatever its strides; its bytes need to be so, too
        part = part.reshape(()).reshape(part.shape)
    return part.detach().contiguous()


def formatted(part: Tensor, name: str) -> Tensor:
    """A received part in the memory format it had at the sender."""
    return part.contiguous(memory_format=FORMATS[name])
