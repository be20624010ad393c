"""One byte buffer for many tensors: where each leaf lies, and how to fill and read it.

`BufferLayout` is pure arithmetic and serves consolidation, files and the wire alike: both
ends that know the dtypes, the shapes and the alignment derive the same offsets.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import EntryTypeError

HOST_ALIGNMENT = 64  # a cache line
ACCELERATOR_ALIGNMENT = 256  # the transaction size that accelerators like best

_QUANTIZED = frozenset({torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4})
# Bit-width shells: torch stores one a byte and has no copy kernel for them.
_SHELLS = frozenset(
    getattr(torch, f"{sign}int{bits}")
    for sign in ("u", "")
    for bits in range(1, 8)
    if hasattr(torch, f"{sign}int{bits}")
)
# Dtypes that a copy does not convert to.
NOT_CAST_TO = _QUANTIZED | _SHELLS
# Up to here, zeroing all of a buffer costs less than zeroing its gaps one by one.
_ZERO_ALL_BELOW = 64 << 10


@dataclass(frozen=True, slots=True)
class BufferLayout:
    """Where each of n leaves lies in one byte buffer: columns of equal length.

    Attributes:
        dtypes: one dtype per leaf.
        shapes: one shape per leaf.
        offsets: the first byte of each leaf, in order, each a multiple of `alignment` and of
            the leaf's item size.
        nbytes: the bytes of each leaf, without padding.
        alignment: a power of two.
        total_nbytes: the bytes of the buffer, a multiple of `alignment`.
    """

    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]
    nbytes: tuple[int, ...]
    alignment: int
    total_nbytes: int

    def __len__(self) -> int:
        return len(self.dtypes)

    @property
    def padding_nbytes(self) -> int:
        """The bytes that belong to no leaf."""
        return self.total_nbytes - sum(self.nbytes)

    def gaps(self) -> Iterator[tuple[int, int]]:
        """The ranges ``[start, stop)`` of bytes that belong to no leaf."""
        at = 0
        for offset, size in zip(self.offsets, self.nbytes):
            if offset > at:
                yield at, offset
            at = offset + size
        if at < self.total_nbytes:
            yield at, self.total_nbytes


def layout_of(leaves: Iterable[Tensor], alignment: int = HOST_ALIGNMENT) -> BufferLayout:
    """The layout of a buffer that holds these tensors, in this order.

    >>> import torch
    >>> layout_of([torch.zeros(3), torch.zeros(2, 2, dtype=torch.int8)]).offsets
    (0, 64)
    """
    leaves = list(leaves)
    return layout_from([x.dtype for x in leaves], [x.shape for x in leaves], alignment)


def layout_from(
    dtypes: Sequence[torch.dtype],
    shapes: Sequence[tuple[int, ...]],
    alignment: int = HOST_ALIGNMENT,
) -> BufferLayout:
    """The layout of a buffer that holds leaves of these dtypes and shapes, in this order.

    Args:
        dtypes: one per leaf.
        shapes: one per leaf; ``()`` and shapes without elements are fine.
        alignment: of the first byte of each leaf; a power of two.

    Raises:
        ValueError: on an alignment that is not a power of two, a negative size, or columns of
            unequal length.
        EntryTypeError: on a quantized dtype, whose bytes mean nothing without its scale.

    >>> layout_from([torch.float32, torch.bool], [(3,), ()], 8).total_nbytes
    24
    """
    if alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"Cannot align to {alignment} bytes. Expected a power of two.")
    if len(dtypes) != len(shapes):
        raise ValueError(f"Cannot lay out {len(dtypes)} dtypes and {len(shapes)} shapes.")
    sizes: dict[Any, tuple[int, int]] = {}
    offsets: list[int] = []
    nbytes: list[int] = []
    at = 0
    for key in zip(dtypes, shapes):
        found = sizes.get(key)
        if found is None:
            found = sizes[key] = _sizes_of(*key, alignment)
        size, mask = found
        at = (at + mask) & ~mask
        offsets.append(at)
        nbytes.append(size)
        at += size
    # The whole buffer has to be viewable as every one of its dtypes.
    mask = max((mask for _, mask in sizes.values()), default=0)
    total = (at + mask) & ~mask
    return BufferLayout(
        tuple(dtypes), tuple(shapes), tuple(offsets), tuple(nbytes), alignment, total
    )


def _sizes_of(dtype: torch.dtype, shape: tuple[int, ...], alignment: int) -> tuple[int, int]:
    """The bytes of a leaf, and its alignment less one."""
    if dtype in _QUANTIZED:
        raise EntryTypeError(f"Cannot lay out a leaf of dtype {dtype} as bytes. Dequantize it.")
    if any(size < 0 for size in shape):
        raise ValueError(f"Cannot lay out a leaf of shape {list(shape)}: a size is negative.")
    return math.prod(shape) * dtype.itemsize, max(alignment, dtype.itemsize) - 1


def why_not_bytes(leaf: Tensor) -> str:
    """Why the elements of a tensor cannot lie in a byte buffer; empty when they can.

    >>> why_not_bytes(torch.zeros(2)), why_not_bytes(torch.zeros(2).to_sparse())
    ('', 'a tensor of layout sparse_coo')
    """
    if leaf.layout is not torch.strided:
        return f"a tensor of layout {str(leaf.layout).removeprefix('torch.')}"
    if leaf.dtype in _QUANTIZED:
        return f"a quantized tensor ({str(leaf.dtype).removeprefix('torch.')})"
    if leaf.is_nested:
        return "a nested tensor of strided layout"
    return ""


def new_buffer(
    layout: BufferLayout,
    device: torch.device | str | None = None,
    *,
    pin_memory: bool = False,
    share_memory: bool = False,
) -> Tensor:
    """A fresh buffer for a layout, uint8 ``[total_nbytes]``; bytes between leaves are zero.

    Args:
        layout: what it has to hold.
        device: where it is made; the host by default.
        pin_memory: whether it is pinned (host only).
        share_memory: whether other processes can map it (host only).

    >>> new_buffer(layout_from([torch.int8], [(3,)]))[3:].sum().item()
    0
    """
    if share_memory:
        # Fresh shared memory is zero.
        storage = torch.UntypedStorage._new_shared(layout.total_nbytes)
        return torch.empty(0, dtype=torch.uint8).set_(storage)
    make: Any = torch.empty
    gaps = layout.padding_nbytes > 0
    if gaps and layout.total_nbytes <= _ZERO_ALL_BELOW * len(layout):
        make, gaps = torch.zeros, False
    buf = make(layout.total_nbytes, dtype=torch.uint8, device=device, pin_memory=pin_memory)
    if gaps:
        # Uninitialised memory must not reach a file or another process.
        torch._foreach_zero_([buf[start:stop] for start, stop in layout.gaps()])
    return buf


def views(buf: Tensor, layout: BufferLayout) -> list[Tensor]:
    """One tensor per leaf, each a view of its part of the buffer.

    Args:
        buf: contiguous uint8 ``[n]`` with ``n >= layout.total_nbytes``.
        layout: where the leaves lie.

    Raises:
        ValueError: when the buffer is too small or is not a flat buffer of bytes.

    >>> layout = layout_from([torch.int16, torch.float32], [(2,), ()])
    >>> [tuple(v.shape) for v in views(new_buffer(layout), layout)]
    [(2,), ()]
    """
    total = layout.total_nbytes
    if buf.dtype is not torch.uint8 or buf.dim() != 1 or not buf.is_contiguous():
        raise ValueError(
            f"Cannot use a {buf.dtype} tensor of shape {list(buf.shape)} as a buffer. "
            f"Expected a contiguous one-dimensional uint8 tensor."
        )
    if buf.numel() < total:
        raise ValueError(
            f"Cannot place {len(layout)} leaves in a buffer of {buf.numel()} bytes. "
            f"Expected at least {total}."
        )
    if buf.numel() > total:
        buf = buf[:total]
    # One typed view per dtype; an `as_strided` bound to it is the cheapest way to a leaf.
    makers: dict[torch.dtype, tuple[Any, int, int]] = {}
    strides: dict[tuple[int, ...], tuple[int, ...]] = {}
    out: list[Tensor] = []
    for dtype, shape, offset in zip(layout.dtypes, layout.shapes, layout.offsets):
        maker = makers.get(dtype)
        if maker is None:
            typed = buf if dtype is torch.uint8 else buf.view(dtype)
            maker = (typed.as_strided, dtype.itemsize, int(typed.storage_offset()))
            makers[dtype] = maker
        as_strided, itemsize, base = maker
        stride = strides.get(shape)
        if stride is None:
            stride = strides[shape] = contiguous_strides(shape)
        out.append(as_strided(shape, stride, base + offset // itemsize))
    return out


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor of a shape.

    >>> contiguous_strides((2, 0, 3)), contiguous_strides(())
    ((3, 3, 1), ())
    """
    out: list[int] = []
    step = 1
    for size in reversed(shape):
        out.append(step)
        step *= max(size, 1)
    return tuple(reversed(out))


def fill(targets: Sequence[Tensor], leaves: Sequence[Tensor]) -> None:
    """Copy each leaf into the target of its position, without recording gradients.

    The targets may be views kept from an earlier call: that makes repeated packing one
    call into torch.
    """
    if not targets:
        return
    if any(target.dtype in _SHELLS for target in targets):
        targets = [_as_bytes(target) for target in targets]
        leaves = [_as_bytes(leaf) for leaf in leaves]
    with torch.no_grad():
        try:
            torch._foreach_copy_(list(targets), list(leaves))
        except RuntimeError:  # not into conjugate or negative views
            for target, leaf in zip(targets, leaves):
                target.copy_(leaf)


def _as_bytes(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.dtype in _SHELLS else x


def pack(
    leaves: Sequence[Tensor],
    layout: BufferLayout,
    out: Tensor | None = None,
    *,
    device: torch.device | str | None = None,
) -> Tensor:
    """Copy leaves into one buffer and return it.

    Args:
        leaves: tensors of the dtypes and shapes of the layout, of any strides.
        layout: where they go.
        out: the buffer to write into, uint8 ``[>= total_nbytes]``; a fresh one by default.
        device: of the fresh buffer; by default that of the first leaf.

    Returns:
        uint8 ``[total_nbytes]``, or ``out``.

    >>> leaves = [torch.arange(3), torch.ones(2)]
    >>> layout = layout_of(leaves)
    >>> views(pack(leaves, layout), layout)[0]
    tensor([0, 1, 2])
    """
    if len(leaves) != len(layout):
        raise ValueError(f"Cannot pack {len(leaves)} leaves into a layout of {len(layout)}.")
    if out is None:
        if device is None and leaves:
            device = leaves[0].device
        out = new_buffer(layout, device)
    fill(views(out, layout), leaves)
    return out
