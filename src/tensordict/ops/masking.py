"""Choosing and filling rows by a mask over the batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Size, Tensor

from .._keys import short
from .._typing import Path
from ..core.leaf import NonTensorDataBase, NonTensorStack, same
from ..core.node import Entry, Node
from ..core.torch_function import as_methods, implements
from ..core.traverse import leaves, spread
from ..errors import (
    BatchSizeError,
    DimError,
    EntryTypeError,
    MissingKeyError,
    ShapeError,
    StructureError,
)
from .indexing import read_rows
from .inplace import write_each
from .reshaping import become
from .update import fill_out

if TYPE_CHECKING:
    from typing_extensions import Self

_NUMBERS = (bool, int, float, complex, np.number, np.bool_)


class MaskingMethods(Node):
    """masked_select, masked_fill and where."""

    __slots__ = ()

    def masked_select(self, mask: Tensor, *, inplace: bool = False) -> Self:
        """The rows at which ``mask`` is true, along one new batch dimension.

        Args:
            mask: booleans over the leading batch dimensions.
            inplace: make self the result.

        Raises:
            IndexError: a mask of another shape.

        >>> from tensordict import TensorDict
        >>> td = TensorDict({"a": torch.arange(3)}, [3])
        >>> td.masked_select(torch.tensor([True, False, True]))["a"]
        tensor([0, 2])
        """
        _check_mask(mask, self._batch_size, "mask", DimError)
        result: Self = read_rows(self, mask)
        if not inplace:
            return result
        become(self, result)
        return self

    def masked_fill(self, mask: Tensor, value: Any) -> Self:
        """A tensordict with ``value`` in the rows at which ``mask`` is true.

        Args:
            mask: booleans over the leading batch dimensions.
            value: a number (or 0-d tensor) for every leaf.

        >>> from tensordict import TensorDict
        >>> td = TensorDict({"a": torch.zeros(2)}, [2])
        >>> td.masked_fill(torch.tensor([True, False]), 1)["a"]
        tensor([1., 0.])
        """
        _check_mask(mask, self._batch_size, "mask")
        _check_value(value)
        pairs = zip(leaves(self), spread(self, mask))
        return self._rebuild(iter([x.masked_fill(_beside(m, x), value) for x, m in pairs]))

    def masked_fill_(self, mask: Tensor, value: Any) -> Self:
        """`masked_fill` in place; allowed when locked."""
        _check_mask(mask, self._batch_size, "mask")
        _check_value(value)
        tensors = leaves(self)
        for dtype in {x.dtype for x in tensors}:
            # What would fail in the first write of this dtype fails here.
            torch.full((), value, dtype=dtype)
        masks = [_beside(m, x) for m, x in zip(spread(self, mask), tensors)]
        write_each(self, tensors, Tensor.masked_fill_, None, (masks, value))
        return self

    def where(
        self,
        condition: Tensor,
        other: Any,
        *,
        out: Any = None,
        pad: Any = None,
        update_batch_size: bool = False,
    ) -> Self:
        """Rows of self where ``condition`` is true, of ``other`` elsewhere.

        Args:
            condition: booleans over the leading batch dimensions.
            other: a tensordict of the same batch size, or a tensor or number for every leaf.
            out: a tensordict to fill.
            pad: what stands for an entry that only one side has.
            update_batch_size: give ``out`` the batch size of self first.

        Raises:
            KeyError: keys differ and there is no ``pad``.

        >>> from tensordict import TensorDict
        >>> td = TensorDict({"a": torch.arange(2)}, [2])
        >>> td.where(torch.tensor([True, False]), 6)["a"]
        tensor([0, 6])
        """
        _check_mask(condition, self._batch_size, "condition")
        if isinstance(other, Node):
            if other._batch_size != self._batch_size:
                raise BatchSizeError(
                    f"Cannot choose between tensordicts: expected batch size "
                    f"{list(self._batch_size)}, got {list(other._batch_size)}."
                )
            result: Self = _chosen(condition, self, other, pad, ())
        elif isinstance(other, (Tensor, *_NUMBERS)):
            result = _chosen_or(condition, self, other)
        else:
            raise EntryTypeError(
                f"Cannot choose between a tensordict and a {type(other).__name__}: expected a "
                f"tensordict, a tensor or a number."
            )
        if out is None:
            return result
        if update_batch_size and out._batch_size != result._batch_size:
            out.batch_size = result._batch_size
        fill_out(out, result)
        return out


@implements(torch.where)
def _where(condition: Tensor, input: Any, other: Any, *, out: Any = None) -> Any:
    if isinstance(input, MaskingMethods):
        return input.where(condition, other, out=out)
    return other.where(condition.logical_not(), input, out=out)


as_methods("masked_fill", "masked_select")


def _right(mask: Tensor, x: Tensor) -> Tensor:
    """The mask with trailing dimensions of size 1, as many as the tensor has more."""
    if mask.device != x.device:
        mask = mask.to(x.device)
    missing = x.ndim - mask.ndim
    return mask.view(*mask.shape, *(1,) * missing) if missing else mask


def _beside(mask: Tensor, x: Tensor) -> Tensor:
    return mask if mask.device == x.device else mask.to(x.device)


def _check_mask(mask: Any, batch: Size, what: str, error: type[Exception] = ShapeError) -> None:
    if not isinstance(mask, Tensor) or mask.dtype is not torch.bool:
        kind = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise EntryTypeError(f"Cannot use the {what}: expected a boolean tensor, got {kind}.")
    if mask.shape != batch[: mask.ndim]:
        raise error(
            f"Cannot use the {what}: expected a shape that batch size {list(batch)} starts with, "
            f"got {list(mask.shape)}."
        )


def _check_value(value: Any) -> None:
    one = not value.ndim if isinstance(value, Tensor) else isinstance(value, _NUMBERS)
    if not one:
        raise EntryTypeError(
            f"Cannot fill with a {type(value).__name__}: expected a number or a 0-d tensor."
        )


def _chosen_or(condition: Tensor, node: Any, other: Any) -> Any:
    """Rows of a node, or of one tensor or number for every leaf."""
    xs = leaves(node)
    ys: list[Any] = [other] * len(xs)
    rows = isinstance(other, Tensor) and bool(other.ndim)
    if rows and other.shape == node._batch_size[: other.ndim]:
        ys = list(spread(node, other))
    masks = spread(node, condition)
    return node._rebuild(iter([torch.where(_beside(m, x), x, y) for x, m, y in zip(xs, masks, ys)]))


def _chosen(condition: Tensor, a: Any, b: Any, pad: Any, path: Path) -> Any:
    members = a._members()
    if members is not None:
        dim, rows = a.stack_dim, a._shares(b, len(b._batch_size))
        masks = condition.unbind(dim) if condition.ndim > dim else [condition] * len(members)
        return a._regroup([_chosen(c, x, y, pad, path) for c, x, y in zip(masks, members, rows)])
    entries: dict[str, Entry] = {}
    theirs = b._names()
    for name, x in a._items():
        here = (*path, name)
        y = b._fetch(name)
        entries[name] = (
            _padded(condition, x, pad, here, True)
            if y is None
            else (_pick(condition, x, y, pad, here))
        )
    for name in theirs:
        if name not in entries:
            y = b._fetch(name)
            entries[name] = _padded(condition, y, pad, (*path, name), False)
    return a._like(entries)


def _pick(condition: Tensor, x: Any, y: Any, pad: Any, path: Path) -> Entry:
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        return torch.where(_right(condition, x), x, y)
    if isinstance(x, Node) and isinstance(y, Node):
        return _chosen(condition, x, y, pad, path)
    if isinstance(x, NonTensorDataBase) and isinstance(y, NonTensorDataBase):
        return _pick_values(condition, x, y)
    raise StructureError(
        f"Cannot choose between the entries {short(path)!r}: a {type(x).__name__} and a "
        f"{type(y).__name__}."
    )


def _pick_values(condition: Tensor, x: Any, y: Any) -> NonTensorDataBase:
    if type(x) is type(y) and x._batch_size == y._batch_size and same(x._value(), y._value()):
        return x
    left, right = x._rows(), y._rows()
    mask = (
        condition.cpu()
        .numpy()
        .reshape(tuple(condition.shape) + (1,) * (left.ndim - condition.ndim))
    )
    values = np.where(mask, left, right)
    return NonTensorStack._new(values, x._device)


def _padded(condition: Tensor, entry: Any, pad: Any, path: Path, mine: bool) -> Entry:
    if pad is None:
        raise MissingKeyError(
            f"Key {short(path)!r} not found in {'the other' if mine else 'this'} tensordict and no "
            f"pad value provided."
        )
    if isinstance(entry, Node):
        items = {n: _padded(condition, e, pad, (*path, n), mine) for n, e in entry._items()}
        return entry._like(items)
    if not isinstance(entry, Tensor):
        return entry
    fill = torch.full_like(entry, pad)
    mask = _right(condition, entry)
    return torch.where(mask, entry, fill) if mine else torch.where(mask, fill, entry)
