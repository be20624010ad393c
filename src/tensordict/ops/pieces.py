"""Cutting a tree along a batch dimension: one torch call per leaf, whatever the number of pieces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Size, Tensor

from ..core.node import Node
from ..core.sizes import as_int, wrap_dim
from ..core.structural import DimNames, DividingOp, StructuralOp, named
from ..core.torch_function import as_methods, implements
from ..errors import EntryTypeError, ShapeError
from .shape import Narrow, Pick

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(slots=True)
class Split(DividingOp):
    """Pieces of given sizes along ``dim``; they add up to the dimension."""

    pieces: tuple[int, ...]
    dim: int

    def parts(self) -> Sequence[StructuralOp]:
        out: list[StructuralOp] = []
        start = 0
        for n in self.pieces:
            out.append(Narrow(self.dim, start, n))
            start += n
        return out

    def sizes(self, batch: Size) -> Sequence[Size]:
        head, tail = batch[: self.dim], batch[self.dim + 1 :]
        return [Size([*head, n, *tail]) for n in self.pieces]

    def names(self, names: DimNames) -> DimNames | None:
        return names

    def leaf(self, x: Tensor) -> Sequence[Tensor]:
        return x.split_with_sizes(self.pieces, self.dim)


@dataclass(slots=True)
class Unbind(DividingOp):
    """One piece for each of the ``n`` rows of ``dim``, without that dimension."""

    keeps_lock = False

    dim: int
    n: int

    def parts(self) -> Sequence[StructuralOp]:
        return [Pick(self.dim, i) for i in range(self.n)]

    def sizes(self, batch: Size) -> Sequence[Size]:
        return [batch[: self.dim] + batch[self.dim + 1 :]] * self.n

    def names(self, names: DimNames) -> DimNames | None:
        return named([*names[: self.dim], *names[self.dim + 1 :]])

    def leaf(self, x: Tensor) -> Sequence[Tensor]:
        return x.unbind(self.dim)


class PiecesMethods(Node):
    """Split, chunk, unbind and iteration over rows."""

    __slots__ = ()

    def split(self, split_size: int | Sequence[int], dim: int = 0) -> tuple[Self, ...]:
        """Pieces of a batch dimension, over views of the leaves.

        Args:
            split_size: size of every piece (the last may be smaller), or one size each.
            dim: the dimension.

        Raises:
            RuntimeError: sizes that do not add up to the dimension.
            ValueError: a size that is not positive.

        >>> from tensordict import TensorDict
        >>> [len(piece) for piece in TensorDict({"a": torch.zeros(5)}, [5]).split(2)]
        [2, 2, 1]
        """
        dim = wrap_dim(dim, len(self._batch_size))
        n = self._batch_size[dim]
        if isinstance(split_size, int):
            return tuple(self._divide(Split(_even(n, split_size), dim)))
        sizes = tuple([as_int(n, "a split size") for n in split_size])
        if sum(sizes) != n or any(size < 0 for size in sizes):
            raise ShapeError(
                f"Cannot split dim {dim} of size {n}: expected sizes that add up to it, got "
                f"{list(sizes)}."
            )
        return tuple(self._divide(Split(sizes, dim)))

    def chunk(self, chunks: int, dim: int = 0) -> tuple[Self, ...]:
        """At most ``chunks`` pieces of equal size (the last may be smaller), as ``torch.chunk``.

        >>> from tensordict import TensorDict
        >>> [len(piece) for piece in TensorDict({"a": torch.zeros(5)}, [5]).chunk(2)]
        [3, 2]
        """
        dim = wrap_dim(dim, len(self._batch_size))
        if not isinstance(chunks, int) or chunks <= 0:
            raise EntryTypeError(
                f"Cannot chunk dim {dim}: chunks must be a strictly positive integer, got {chunks!r}."
            )
        n = self._batch_size[dim]
        if not n:  # torch gives that many empty pieces
            return tuple(self._divide(Split((0,) * chunks, dim)))
        return tuple(self._divide(Split(_even(n, -(-n // chunks)), dim)))

    def tensor_split(self, indices_or_sections: Any, dim: int = 0) -> tuple[Self, ...]:
        """Pieces as ``torch.tensor_split``: a number of nearly equal ones, or cut at indices.

        >>> from tensordict import TensorDict
        >>> [len(piece) for piece in TensorDict({"a": torch.zeros(5)}, [5]).tensor_split([1, 3])]
        [1, 2, 2]
        """
        dim = wrap_dim(dim, len(self._batch_size))
        n = self._batch_size[dim]
        if isinstance(indices_or_sections, Tensor):
            indices_or_sections = indices_or_sections.tolist()
        if isinstance(indices_or_sections, int):
            sections = indices_or_sections
            if sections <= 0:
                raise EntryTypeError(
                    f"Cannot split dim {dim}: the number of sections must be larger than 0, got "
                    f"{sections}."
                )
            small, large = divmod(n, sections)
            sizes = (small + 1,) * large + (small,) * (sections - large)
            return tuple(self._divide(Split(sizes, dim)))
        stops = [min(max(i if i >= 0 else i + n, 0), n) for i in indices_or_sections]
        starts = [0, *stops]
        # Cut points may go back, as torch allows: such a piece is empty.
        cuts = [
            Narrow(dim, min(start, n), max(0, stop - start))
            for start, stop in zip(starts, [*stops, n])
        ]
        return tuple([self._restructure(cut) for cut in cuts])

    def unbind(self, dim: int = 0) -> tuple[Self, ...]:
        """One tensordict for each row of a batch dimension, over views of the leaves.

        >>> from tensordict import TensorDict
        >>> [row["a"].item() for row in TensorDict({"a": torch.arange(2)}, [2]).unbind(0)]
        [0, 1]
        """
        dim = wrap_dim(dim, len(self._batch_size))
        return tuple(self._divide(Unbind(dim, self._batch_size[dim])))

    def __iter__(self) -> Iterator[Self]:
        """The rows of the first batch dimension.

        Raises:
            TypeError: there is no batch dimension.
        """
        if not self._batch_size:
            raise EntryTypeError(
                "Cannot iterate over a tensordict without a batch dimension. "
                "Use keys(), values() or items()."
            )
        return iter(self._divide(Unbind(0, self._batch_size[0])))


def _even(n: int, size: int) -> tuple[int, ...]:
    if size <= 0:
        raise EntryTypeError(f"TensorDict.split: split_size must be positive, got {size}.")
    full, rest = divmod(n, size)
    return (size,) * full + ((rest,) if rest or not full else ())


@implements(torch.split)
def _split(tensor: Any, split_size_or_sections: Any, dim: int = 0) -> Any:
    return tensor.split(split_size_or_sections, dim)


as_methods("chunk", "tensor_split", "unbind")
