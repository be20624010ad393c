"""Shape operations as records: what each does to a tensor, a batch size and its names.

Sizes are handed to torch one by one (``x.view(*sizes)``): it reads ints in less than half
the time that a ``torch.Size`` takes.

The arguments are normal (dimensions counted from the front, sizes filled in) and refer
to the root's batch dimensions.  A nested tensordict may have more of them: those follow
unchanged, like the trailing dimensions of a leaf.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Size, Tensor

from ..core.structural import DimNames, StructuralOp, named
from .bits import AS_INTEGERS, bits

Dims = tuple[int, ...]


@dataclass(slots=True)
class View(StructuralOp):
    """Another shape over the same memory.

    Attributes:
        shape: the new batch shape.
        ndim: number of batch dimensions it replaces.
    """

    shape: Size
    ndim: int
    # Leaves of one shape follow each other often: the sizes of the last one are kept.
    _seen: Size | None = field(default=None, init=False, repr=False, compare=False)
    _sizes: Dims = field(default=(), init=False, repr=False, compare=False)

    def size(self, batch: Size) -> Size:
        return self.shape + batch[self.ndim :]

    def names(self, names: DimNames) -> DimNames | None:
        return named([*[None] * len(self.shape), *names[self.ndim :]])

    def leaf(self, x: Tensor) -> Tensor:
        sizes = self._sizes if x.shape == self._seen else self._full(x.shape)
        return x.view(*sizes) if sizes else x.view(sizes)

    def _full(self, shape: Size) -> Dims:
        self._seen = shape
        self._sizes = sizes = (*self.shape, *shape[self.ndim :])
        return sizes

    def inverse(self, batch: Size) -> StructuralOp:
        return Reshape(batch, len(self.shape))


@dataclass(slots=True)
class Reshape(View):
    """Another shape, a view where the memory allows it."""

    def leaf(self, x: Tensor) -> Tensor:
        sizes = self._sizes if x.shape == self._seen else self._full(x.shape)
        return x.reshape(*sizes) if sizes else x.reshape(sizes)


@dataclass(slots=True)
class Flatten(StructuralOp):
    """The dimensions from ``start`` to ``end`` (included) merged into one of ``n`` elements."""

    start: int
    end: int
    n: int

    def size(self, batch: Size) -> Size:
        return Size([*batch[: self.start], self.n, *batch[self.end + 1 :]])

    def names(self, names: DimNames) -> DimNames | None:
        return named([*names[: self.start], None, *names[self.end + 1 :]])

    def leaf(self, x: Tensor) -> Tensor:
        return x.flatten(self.start, self.end)

    def inverse(self, batch: Size) -> StructuralOp:
        return Unflatten(self.start, batch[self.start : self.end + 1])


@dataclass(slots=True)
class Unflatten(StructuralOp):
    """One dimension cut into several; its name goes to the last of them."""

    dim: int
    sizes: Size
    _seen: Size | None = field(default=None, init=False, repr=False, compare=False)
    _full: Dims = field(default=(), init=False, repr=False, compare=False)

    def size(self, batch: Size) -> Size:
        return batch[: self.dim] + self.sizes + batch[self.dim + 1 :]

    def names(self, names: DimNames) -> DimNames | None:
        new = [None] * (len(self.sizes) - 1)
        return named([*names[: self.dim], *new, *names[self.dim :]])

    def leaf(self, x: Tensor) -> Tensor:
        shape, dim = x.shape, self.dim
        if shape != self._seen:
            self._seen = shape
            self._full = (*shape[:dim], *self.sizes, *shape[dim + 1 :])
        return x.view(*self._full)

    def inverse(self, batch: Size) -> StructuralOp:
        return Flatten(self.dim, self.dim + len(self.sizes) - 1, batch[self.dim])


@dataclass(slots=True)
class Unsqueeze(StructuralOp):
    """A dimension of size 1 inserted before ``dim``."""

    dim: int

    def size(self, batch: Size) -> Size:
        return Size([*batch[: self.dim], 1, *batch[self.dim :]])

    def names(self, names: DimNames) -> DimNames | None:
        return [*names[: self.dim], None, *names[self.dim :]]

    def leaf(self, x: Tensor) -> Tensor:
        return x.unsqueeze(self.dim) if self.dim else x[None]  # which is faster

    def inverse(self, batch: Size) -> StructuralOp:
        return Squeeze((self.dim,))


@dataclass(slots=True)
class Squeeze(StructuralOp):
    """Dimensions of size 1 removed; ``dims`` in increasing order."""

    dims: Dims

    def size(self, batch: Size) -> Size:
        return Size([n for i, n in enumerate(batch) if i not in self.dims])

    def names(self, names: DimNames) -> DimNames | None:
        return named([name for i, name in enumerate(names) if i not in self.dims])

    def leaf(self, x: Tensor) -> Tensor:
        dims = self.dims
        return x.squeeze(dims[0]) if len(dims) == 1 else x.squeeze(dims)

    def inverse(self, batch: Size) -> StructuralOp:
        shape = Size([n for i, n in enumerate(batch) if i not in self.dims])
        return Reshape(batch, len(shape)) if len(self.dims) != 1 else Unsqueeze(self.dims[0])


@dataclass(slots=True)
class Permute(StructuralOp):
    """The batch dimensions in another order: dimension ``i`` of the result was ``dims[i]``."""

    dims: Dims

    def size(self, batch: Size) -> Size:
        return Size([batch[i] for i in self.dims]) + batch[len(self.dims) :]

    def names(self, names: DimNames) -> DimNames | None:
        return [*[names[i] for i in self.dims], *names[len(self.dims) :]]

    def leaf(self, x: Tensor) -> Tensor:
        if not x.ndim:
            return x  # torch takes no empty list of dimensions one by one
        return x.permute(*self.dims, *range(len(self.dims), x.ndim))

    def inverse(self, batch: Size) -> StructuralOp:
        back = [0] * len(self.dims)
        for i, dim in enumerate(self.dims):
            back[dim] = i
        return Permute(tuple(back))


@dataclass(slots=True)
class Transpose(StructuralOp):
    """Two batch dimensions swapped."""

    dim0: int
    dim1: int

    def size(self, batch: Size) -> Size:
        return Size(_swapped(batch, self.dim0, self.dim1))

    def names(self, names: DimNames) -> DimNames | None:
        return _swapped(names, self.dim0, self.dim1)

    def leaf(self, x: Tensor) -> Tensor:
        return x.transpose(self.dim0, self.dim1)

    def inverse(self, batch: Size) -> StructuralOp:
        return self


@dataclass(slots=True)
class Expand(StructuralOp):
    """Dimensions of size 1 repeated, and new ones in front, without a copy.

    Attributes:
        shape: the new batch shape, without -1.
        ndim: number of batch dimensions before.
    """

    shape: Size
    ndim: int

    def size(self, batch: Size) -> Size:
        return self.shape + batch[self.ndim :]

    def names(self, names: DimNames) -> DimNames | None:
        return [*[None] * (len(self.shape) - self.ndim), *names]

    def leaf(self, x: Tensor) -> Tensor:
        sizes = (*self.shape, *(-1,) * (x.ndim - self.ndim))
        return x.expand(*sizes) if sizes else x.expand(sizes)


@dataclass(slots=True)
class Broadcast(Expand):
    """`Expand` that drops the names of the batch dimensions."""

    def names(self, names: DimNames) -> DimNames | None:
        return named([*[None] * len(self.shape), *names[self.ndim :]])


@dataclass(slots=True)
class Narrow(StructuralOp):
    """``length`` rows of a dimension from ``start`` on."""

    dim: int
    start: int
    length: int

    def size(self, batch: Size) -> Size:
        return Size([*batch[: self.dim], self.length, *batch[self.dim + 1 :]])

    def names(self, names: DimNames) -> DimNames | None:
        return names

    def leaf(self, x: Tensor) -> Tensor:
        return x.narrow(self.dim, self.start, self.length)


@dataclass(slots=True)
class Pick(StructuralOp):
    """One row of a dimension, which goes."""

    keeps_lock = False

    dim: int
    row: int

    def size(self, batch: Size) -> Size:
        return batch[: self.dim] + batch[self.dim + 1 :]

    def names(self, names: DimNames) -> DimNames | None:
        return named([*names[: self.dim], *names[self.dim + 1 :]])

    def leaf(self, x: Tensor) -> Tensor:
        return x.select(self.dim, self.row)


@dataclass(slots=True)
class Roll(StructuralOp):
    """Rows shifted around along dimensions."""

    shifts: Dims
    dims: Dims

    def size(self, batch: Size) -> Size:
        return batch

    def names(self, names: DimNames) -> DimNames | None:
        return names

    def leaf(self, x: Tensor) -> Tensor:
        shifts, dims = self.shifts, self.dims
        # torch reads ints faster than tuples, here and in flip.
        return x.roll(shifts[0], dims[0]) if len(dims) == 1 else x.roll(shifts, dims)


@dataclass(slots=True)
class RollFlat(StructuralOp):
    """Rows shifted around in the flattened batch of ``ndim`` dimensions."""

    shift: int
    ndim: int

    def size(self, batch: Size) -> Size:
        return batch

    def names(self, names: DimNames) -> DimNames | None:
        return names

    def leaf(self, x: Tensor) -> Tensor:
        if self.ndim < 2:
            return x.roll(self.shift, 0) if self.ndim else x.clone()
        return x.flatten(0, self.ndim - 1).roll(self.shift, 0).view(x.shape)


@dataclass(slots=True)
class Flip(StructuralOp):
    """Reversed along dimensions."""

    dims: Dims

    def size(self, batch: Size) -> Size:
        return batch

    def names(self, names: DimNames) -> DimNames | None:
        return names

    def leaf(self, x: Tensor) -> Tensor:
        dims = self.dims
        return x.flip(dims[0]) if len(dims) == 1 else x.flip(dims)


@dataclass(slots=True)
class Rot90(StructuralOp):
    """Rotated ``k`` quarter turns in the plane of two dimensions."""

    k: int
    dims: Dims

    def size(self, batch: Size) -> Size:
        return Size(_swapped(batch, *self.dims)) if self.k % 2 else batch

    def names(self, names: DimNames) -> DimNames | None:
        return _swapped(names, *self.dims) if self.k % 2 else names

    def leaf(self, x: Tensor) -> Tensor:
        return x.rot90(self.k, self.dims)


@dataclass(slots=True)
class Repeat(StructuralOp):
    """Each batch dimension tiled ``repeats[i]`` times."""

    repeats: Dims

    def size(self, batch: Size) -> Size:
        n = len(self.repeats)
        return Size([a * b for a, b in zip(batch, self.repeats)]) + batch[n:]

    def names(self, names: DimNames) -> DimNames | None:
        return names

    def leaf(self, x: Tensor) -> Tensor:
        return _tiled(x, self.repeats, len(self.repeats))


@dataclass(slots=True)
class Tile(StructuralOp):
    """As `Repeat`, with new dimensions in front where ``repeats`` is longer than the batch.

    Attributes:
        repeats: one factor per dimension of the result, at least ``ndim`` of them.
        ndim: number of batch dimensions before.
    """

    repeats: Dims
    ndim: int

    def size(self, batch: Size) -> Size:
        new = len(self.repeats) - self.ndim
        head = [1] * new + list(batch[: self.ndim])
        return Size([a * b for a, b in zip(head, self.repeats)]) + batch[self.ndim :]

    def names(self, names: DimNames) -> DimNames | None:
        return named([*[None] * len(self.repeats), *names[self.ndim :]])

    def leaf(self, x: Tensor) -> Tensor:
        return _tiled(x, self.repeats, self.ndim)


@dataclass(slots=True, eq=False)
class RepeatInterleave(StructuralOp):
    """Each row of a dimension repeated: ``index`` names the row that each row of the result was.

    The index is made once for the whole tree, and `index_select` is several times faster
    than ``repeat_interleave`` of each leaf.
    """

    index: Tensor
    dim: int

    def size(self, batch: Size) -> Size:
        return Size([*batch[: self.dim], self.index.shape[0], *batch[self.dim + 1 :]])

    def names(self, names: DimNames) -> DimNames | None:
        return names

    def leaf(self, x: Tensor) -> Tensor:
        index = self.index
        return x.index_select(self.dim, index if index.device == x.device else index.to(x.device))


@dataclass(slots=True, eq=False)
class Gather(StructuralOp):
    """``torch.gather`` along a dimension by an index of the batch's rank."""

    keeps_lock = False

    dim: int
    index: Tensor
    _seen: Any = field(default=None, init=False, repr=False)
    _wide: Any = field(default=None, init=False, repr=False)

    def size(self, batch: Size) -> Size:
        return self.index.shape + batch[self.index.ndim :]

    def names(self, names: DimNames) -> DimNames | None:
        return names

    def leaf(self, x: Tensor) -> Tensor:
        # The index as leaves of the last shape and device needed it: most leaves share both.
        if x.shape != self._seen or x.device != self._wide.device:
            index, tail = self.index.to(x.device), x.shape[self.index.ndim :]
            self._seen = x.shape
            self._wide = index.view(index.shape + (1,) * len(tail)).expand(index.shape + tail)
        if x.dtype in AS_INTEGERS:
            return bits(x).gather(self.dim, self._wide).view(x.dtype)
        return x.gather(self.dim, self._wide)


@dataclass(slots=True)
class Pad(StructuralOp):
    """Rows of ``value`` before and after each batch dimension.

    Attributes:
        pads: (before, after) for the leading dimensions.
        value: what the new rows hold; None in non-tensor entries.
    """

    keeps_lock = False

    pads: tuple[tuple[int, int], ...]
    value: float

    @property
    def adds_rows(self) -> bool:  # type: ignore[override]
        return any(n > 0 for pair in self.pads for n in pair)

    def size(self, batch: Size) -> Size:
        head = [a + n + b for n, (a, b) in zip(batch, self.pads)]
        return Size(head) + batch[len(head) :]

    def names(self, names: DimNames) -> DimNames | None:
        return names

    def leaf(self, x: Tensor) -> Tensor:
        return self._padded(x, self.value)

    def rows(self, x: Tensor) -> Tensor:
        return self._padded(x, -1)

    def _padded(self, x: Tensor, value: float) -> Tensor:
        widths = [0, 0] * (x.ndim - len(self.pads))
        for before, after in reversed(self.pads):
            widths += (before, after)
        return torch.nn.functional.pad(x, widths, value=value)


def _tiled(x: Tensor, repeats: Dims, ndim: int) -> Tensor:
    """``x.repeat`` of the leading dimensions; by ``cat``, which is faster, where one is repeated."""
    if len(repeats) == ndim and x.is_contiguous():
        dims = [i for i, n in enumerate(repeats) if n != 1]
        if len(dims) == 1 and 1 < repeats[dims[0]] <= 64:
            return torch.cat([x] * repeats[dims[0]], dims[0])
    return x.repeat(*repeats, *(1,) * (x.ndim - ndim))


def _swapped(items: Sequence, i: int, j: int) -> list:
    out = list(items)
    out[i], out[j] = out[j], out[i]
    return out
