"""Shape operations as records: what each does to a tensor, a batch size and its names.

Sizes are handed to torch one by one (``x.view(*sizes)``): it reads ints in less than half
the time that a ``torch.Size`` takes.

The arguments are normal (dimensions counted from the front, sizes filled in) and refer
to the root's batch dimensions.  A nested tensordict may have more of them: those follow
unchanged, like the trailing dimensions of a leaf.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
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

    def size(self, batch: Size) -> Size:
        return self.shape + batch[self.ndim :]

    def names(self, names: DimNames) -> DimNames | None:
        return named([*[None] * len(self.shape), *names[self.ndim :]])

    def leaves(self, xs: list[Tensor]) -> Sequence[Tensor]:
        return [x.view(*sizes) if sizes else x.view(sizes) for x, sizes in self._sizes(xs)]

    def _sizes(self, xs: list[Tensor]) -> Iterable[tuple[Tensor, Dims]]:
        """Each tensor with its new shape."""
        shapes = [x.shape for x in xs]
        head, n = self.shape, self.ndim
        if shapes and shapes.count(shapes[0]) == len(shapes):  # the common tree
            return zip(xs, repeat((*head, *shapes[0][n:])))
        return [(x, (*head, *shape[n:])) for x, shape in zip(xs, shapes)]

    def inverse(self, batch: Size) -> StructuralOp:
        return Reshape(batch, len(self.shape))


@dataclass(slots=True)
class Reshape(View):
    """Another shape, a view where the memory allows it."""

    def leaves(self, xs: list[Tensor]) -> Sequence[Tensor]:
        return [x.reshape(*sizes) if sizes else x.reshape(sizes) for x, sizes in self._sizes(xs)]


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

    def leaves(self, xs: list[Tensor]) -> Sequence[Tensor]:
        start, end = self.start, self.end
        return [x.flatten(start, end) for x in xs]

    def inverse(self, batch: Size) -> StructuralOp:
        return Unflatten(self.start, batch[self.start : self.end + 1])


@dataclass(slots=True)
class Unflatten(StructuralOp):
    """One dimension cut into several; its name goes to the last of them."""

    dim: int
    sizes: Size

    def size(self, batch: Size) -> Size:
        return batch[: self.dim] + self.sizes + batch[self.dim + 1 :]

    def names(self, names: DimNames) -> DimNames | None:
        new = [None] * (len(self.sizes) - 1)
        return named([*names[: self.dim], *new, *names[self.dim :]])

    def leaves(self, xs: list[Tensor]) -> Sequence[Tensor]:
        dim, sizes = self.dim, self.sizes
        out = []
        seen: Size | None = None  # leaves of one shape follow each other often
        full: Dims = ()
        for x in xs:
            shape = x.shape
            if shape != seen:
                seen = shape
                full = (*shape[:dim], *sizes, *shape[dim + 1 :])
            out.append(x.view(*full))
        return out

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

    def leaves(self, xs: list[Tensor]) -> Sequence[Tensor]:
        dim = self.dim
        return [x.unsqueeze(dim) for x in xs] if dim else [x[None] for x in xs]  # faster

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

    def leaves(self, xs: list[Tensor]) -> Sequence[Tensor]:
        dims: Any = self.dims[0] if len(self.dims) == 1 else self.dims
        return [x.squeeze(dims) for x in xs]

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

    def leaves(self, xs: list[Tensor]) -> Sequence[Tensor]:
        dims, n = self.dims, len(self.dims)
        ranks = {x.ndim for x in xs}
        if len(ranks) == 1 and 0 not in ranks:  # the common tree
            order = (*dims, *range(n, ranks.pop()))
            return [x.permute(*order) for x in xs]
        return [x.permute((*dims, *range(n, x.ndim))) for x in xs]

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

    def leaves(self, xs: list[Tensor]) -> Sequence[Tensor]:
        dim0, dim1 = self.dim0, self.dim1
        return [x.transpose(dim0, dim1) for x in xs]

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

    def leaves(self, xs: list[Tensor]) -> Sequence[Tensor]:
        shape, n = self.shape, self.ndim
        ranks = {x.ndim for x in xs}
        if len(ranks) == 1 and shape:  # the common tree
            sizes = (*shape, *(-1,) * (ranks.pop() - n))
            return [x.expand(*sizes) for x in xs]
        return [x.expand((*shape, *(-1,) * (x.ndim - n))) for x in xs]


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

    def leaves(self, xs: list[Tensor]) -> Sequence[Tensor]:
        dim, start, length = self.dim, self.start, self.length
        return [x.narrow(dim, start, length) for x in xs]


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

    def leaves(self, xs: list[Tensor]) -> Sequence[Tensor]:
        dim, row = self.dim, self.row
        return [x.select(dim, row) for x in xs]


@dataclass(slots=True)
class Roll(StructuralOp):
    """Rows shifted around along dimensions."""

    shifts: Dims
    dims: Dims

    def size(self, batch: Size) -> Size:
        return batch

    def names(self, names: DimNames) -> DimNames | None:
        return names

    def leaves(self, xs: list[Tensor]) -> Sequence[Tensor]:
        shifts: Any = self.shifts
        dims: Any = self.dims
        if len(dims) == 1:  # torch reads ints faster than tuples, here and in flip
            shifts, dims = shifts[0], dims[0]
        return [x.roll(shifts, dims) for x in xs]


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

    def leaves(self, xs: list[Tensor]) -> Sequence[Tensor]:
        dims: Any = self.dims[0] if len(self.dims) == 1 else self.dims
        return [x.flip(dims) for x in xs]


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

    def leaves(self, xs: list[Tensor]) -> Sequence[Tensor]:
        return rows_of(xs, self.dim, self.index)


@dataclass(slots=True, eq=False)
class Gather(StructuralOp):
    """``torch.gather`` along a dimension by an index of the batch's rank."""

    keeps_lock = False

    dim: int
    index: Tensor

    def size(self, batch: Size) -> Size:
        return self.index.shape + batch[self.index.ndim :]

    def names(self, names: DimNames) -> DimNames | None:
        return names

    def leaves(self, xs: list[Tensor]) -> Sequence[Tensor]:
        dim, index = self.dim, self.index
        if index.ndim == 1:  # whole rows
            return rows_of(xs, dim, index)
        out = []
        seen: Size | None = None  # leaves of one shape follow each other often
        wide = index
        for x in xs:
            shape = x.shape
            if shape != seen:
                seen, tail = shape, shape[index.ndim :]
                wide = index.view(index.shape + (1,) * len(tail)).expand(index.shape + tail)
            at = beside(wide, x)
            if x.dtype in AS_INTEGERS:
                out.append(bits(x).gather(dim, at).view(x.dtype))
            else:
                out.append(x.gather(dim, at))
        return out


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


def beside(index: Tensor, x: Tensor) -> Tensor:
    """An index on the device of a tensor."""
    if index.is_cpu and x.is_cpu:  # comparing devices costs more
        return index
    return index if index.device == x.device else index.to(x.device)


def rows_of(xs: list[Tensor], dim: int, index: Tensor) -> list[Tensor]:
    """``index_select`` of each tensor, with the index on its device."""
    if index.is_cpu and False not in [x.is_cpu for x in xs]:
        return [x.index_select(dim, index) for x in xs]
    return [x.index_select(dim, beside(index, x)) for x in xs]


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
