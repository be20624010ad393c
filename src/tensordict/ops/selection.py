"""Methods that choose, reorder or repeat rows along batch dimensions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core.node import Node
from ..core.sizes import wrap_dim, wrap_dims
from ..core.structural import StructuralOp
from ..core.torch_function import as_methods
from ..errors import DimError, EntryTypeError, ShapeError
from .reshaping import become
from .shape import Flip, Gather, Narrow, Repeat, RepeatInterleave, Roll, RollFlat, Rot90, Tile
from .update import fill_out

if TYPE_CHECKING:
    from typing_extensions import Self


class SelectionMethods(Node):
    """Narrow, roll, flip, rotate, repeat and gather."""

    __slots__ = ()

    def narrow(self, dim: int, start: Any, length: int) -> Self:
        """``length`` rows of a batch dimension from ``start`` on, as views.

        Raises:
            RuntimeError: the range does not lie in the dimension.

        >>> from tensordict import TensorDict
        >>> TensorDict({"a": torch.arange(5)}, [5]).narrow(0, 1, 2)["a"]
        tensor([1, 2])
        """
        dim = wrap_dim(dim, len(self._batch_size))
        n = self._batch_size[dim]
        given = int(start)
        first = given + n if given < 0 else given
        if first < 0 or length < 0 or first + length > n:
            raise DimError(
                f"Cannot narrow dim {dim}: start ({given}) + length ({length}) exceeds dimension "
                f"size ({n})."
            )
        return self._restructure(Narrow(dim, first, length))

    def roll(self, shifts: Any, dims: Any = None, *, inplace: bool = False) -> Self:
        """Rows shifted around along batch dimensions (without ``dims``: of the flattened batch).

        >>> from tensordict import TensorDict
        >>> TensorDict({"a": torch.arange(3)}, [3]).roll(1, 0)["a"]
        tensor([2, 0, 1])
        """
        ndim = len(self._batch_size)
        by = tuple(shifts) if isinstance(shifts, Sequence) else (shifts,)
        op: StructuralOp
        if dims is None or (isinstance(dims, Sequence) and not dims):
            if len(by) != 1:
                raise DimError(f"Cannot roll by {list(by)} without dims: expected one shift.")
            op = RollFlat(by[0], ndim)
        else:
            given = dims if isinstance(dims, Sequence) else (dims,)
            if len(given) != len(by):
                raise DimError(
                    f"Cannot roll: expected one dim per shift, got shifts {list(by)} and dims "
                    f"{list(given)}."
                )
            op = Roll(by, tuple([wrap_dim(dim, ndim) for dim in given]))
        return _applied(self, op, inplace)

    def flip(self, *dims: Any) -> Self:
        """Reversed along batch dimensions.

        >>> from tensordict import TensorDict
        >>> TensorDict({"a": torch.arange(3)}, [3]).flip(0)["a"]
        tensor([2, 1, 0])
        """
        given = dims[0] if len(dims) == 1 and isinstance(dims[0], Sequence) else dims
        return self._restructure(Flip(wrap_dims(given, len(self._batch_size))))

    def fliplr(self) -> Self:
        """Reversed along batch dimension 1."""
        return self._restructure(Flip((_existing(self, 1, "fliplr"),)))

    def flipud(self) -> Self:
        """Reversed along batch dimension 0."""
        return self._restructure(Flip((_existing(self, 0, "flipud"),)))

    def rot90(self, k: int = 1, dims: Sequence[int] = (0, 1)) -> Self:
        """Rotated ``k`` quarter turns in the plane of two batch dimensions."""
        plane = wrap_dims(dims, len(self._batch_size), "rot90: dims")
        if len(plane) != 2:
            raise DimError(f"Cannot rotate: expected two dims, got {list(dims)}.")
        return self._restructure(Rot90(k, plane))

    def repeat(self, *repeats: Any, inplace: bool = False) -> Self:
        """Batch dimensions tiled: one factor for each.

        >>> from tensordict import TensorDict
        >>> TensorDict({"a": torch.arange(2)}, [2]).repeat(2)["a"]
        tensor([0, 1, 0, 1])
        """
        given = repeats[0] if len(repeats) == 1 and isinstance(repeats[0], Sequence) else repeats
        factors = tuple(given)
        ndim = len(self._batch_size)
        if len(factors) != ndim:
            raise EntryTypeError(
                f"The number of repeat elements must match the number of dimensions of the "
                f"tensordict. Got {len(factors)} but ndim={ndim}."
            )
        _no_negatives(factors)
        return _applied(self, Repeat(factors), inplace)

    def tile(self, *dims: Any) -> Self:
        """Batch dimensions tiled; fewer factors act on the last ones, more add new ones in front."""
        given = dims[0] if len(dims) == 1 and isinstance(dims[0], Sequence) else dims
        ndim = len(self._batch_size)
        factors = (1,) * (ndim - len(given)) + tuple(given)
        _no_negatives(factors)
        return self._restructure(Tile(factors, ndim))

    def repeat_interleave(
        self,
        repeats: int | Tensor,
        dim: int | None = None,
        *,
        output_size: int | None = None,
        inplace: bool = False,
    ) -> Self:
        """Each row of a dimension (without ``dim``: of the flattened batch) repeated.

        Args:
            repeats: how often; a number or one number per row.
            dim: the dimension.
            output_size: sum of ``repeats``, where the caller knows it.
            inplace: make self the result.

        >>> from tensordict import TensorDict
        >>> TensorDict({"a": torch.arange(2)}, [2]).repeat_interleave(2, dim=0)["a"]
        tensor([0, 0, 1, 1])
        """
        if dim is None:
            flat: Any = self if len(self._batch_size) == 1 else _flat(self)
            out = flat.repeat_interleave(repeats, 0, output_size=output_size)
            return _adopted(self, out, inplace)
        dim = wrap_dim(dim, len(self._batch_size))
        n = self._batch_size[dim]
        if isinstance(repeats, Tensor) and repeats.ndim == 0:
            repeats = int(repeats)
        if isinstance(repeats, int):
            _no_negatives((repeats,))
            index = torch.arange(n).repeat_interleave(repeats)
        else:
            index = _repeated(torch.as_tensor(repeats), n, dim, output_size)
        if output_size is not None and output_size != index.shape[0]:
            raise ShapeError(
                f"Cannot repeat: output_size is {output_size}, {index.shape[0]} rows come out."
            )
        return _applied(self, RepeatInterleave(index, dim), inplace)

    def gather(self, dim: int, index: Tensor, out: Any = None, *, inplace: bool = False) -> Self:
        """``torch.gather`` along a batch dimension.

        Args:
            dim: the dimension.
            index: positions, an integer tensor with as many dimensions as the batch; its
                shape is the result's batch size.
            out: a tensordict to fill.
            inplace: make self the result.

        >>> from tensordict import TensorDict
        >>> td = TensorDict({"a": torch.tensor([5, 6, 7])}, [3])
        >>> td.gather(0, torch.tensor([2, 0]))["a"]
        tensor([7, 5])
        """
        batch = self._batch_size
        dim = wrap_dim(dim, len(batch))
        _check_index(index, dim, batch)
        try:
            result = self._restructure(Gather(dim, index.long()))
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, IndexError) as err:
            raise DimError(f"Cannot gather along dim {dim}: {err}") from None
        if out is not None:
            fill_out(out, result)
            return out
        return _adopted(self, result, inplace)


def _repeated(repeats: Tensor, n: int, dim: int, output_size: int | None) -> Tensor:
    """The row that each row of the result is of, for one number of repeats per row."""
    if repeats.shape not in ((n,), (1,)):
        raise ShapeError(
            f"Cannot repeat rows of dim {dim}: expected {n} repeats, got shape "
            f"{list(repeats.shape)}."
        )
    try:
        return torch.repeat_interleave(repeats.expand(n), output_size=output_size)
    except RuntimeError as err:
        raise DimError(f"Cannot repeat rows of dim {dim}: {err}") from None


def _check_index(index: Any, dim: int, batch: torch.Size) -> None:
    if not isinstance(index, Tensor) or index.is_floating_point() or index.is_complex():
        kind = index.dtype if isinstance(index, Tensor) else type(index).__name__
        raise EntryTypeError(f"Cannot gather: expected an index tensor of integers, got {kind}.")
    fits = index.ndim == len(batch) and all(
        i == dim or n <= size for i, (n, size) in enumerate(zip(index.shape, batch))
    )
    if not fits:
        raise ShapeError(
            f"Cannot gather along dim {dim}: expected an index of {len(batch)} dimensions that is "
            f"no larger than batch size {list(batch)} apart from dim {dim}, got shape "
            f"{list(index.shape)}."
        )


def _flat(node: Any) -> Any:
    return node.reshape(math.prod(node._batch_size))


def _applied(node: Any, op: StructuralOp, inplace: bool) -> Any:
    return _adopted(node, node._restructure(op), inplace)


def _adopted(node: Any, result: Any, inplace: bool) -> Any:
    if not inplace:
        return result
    become(node, result)
    return node


def _existing(node: Node, dim: int, what: str) -> int:
    if len(node._batch_size) <= dim:
        raise DimError(
            f"Cannot {what}: expected {dim + 1} batch dimensions or more, got batch size "
            f"{list(node._batch_size)}."
        )
    return dim


def _no_negatives(factors: Sequence[int]) -> None:
    for n in factors:
        if not isinstance(n, int) or n < 0:
            raise DimError(
                f"Cannot repeat: expected factors that are not negative, got {list(factors)}."
            )


as_methods(
    "flip", "fliplr", "flipud", "gather", "narrow", "repeat_interleave", "roll", "rot90", "tile"
)
