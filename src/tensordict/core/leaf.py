"""Leaf kinds that are not tensors: any Python value with a batch size.

`NonTensorData` holds one value for the whole batch, `NonTensorStack` one value for
each element of it, in a NumPy object array of the batch shape, so that whatever moves
rows about (indexing, stacking, permuting) moves the values with them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Size, Tensor

from .._options import option
from ..errors import BatchSizeError, EntryTypeError, ShapeError
from .devices import as_device
from .linked import LinkedList
from .registry import register_leaf
from .rows import Rows, after, extended, filled, numbers_of, taken
from .sizes import EMPTY, as_size, insert, wrap_dim
from .structural import DividingOp, StructuralOp
from .torch_function import dispatch


class Leaf:
    """An entry that is neither a tensor nor a node.

    A kind implements `_value`, `_restructure`, `_with` and the two joins; code above
    asks for nothing else.
    """

    __slots__ = ("_batch_size", "_device")

    kind: ClassVar[str]
    # Whether the value takes part in reads like a stored object: ``td[key]`` unwraps it.
    _batch_size: Size
    _device: torch.device | None

    @property
    def batch_size(self) -> Size:
        """The batch shape that the value stands for."""
        return self._batch_size

    @property
    def shape(self) -> Size:
        """Same as `batch_size`."""
        return self._batch_size

    @property
    def ndim(self) -> int:
        """Number of batch dimensions."""
        return len(self._batch_size)

    @property
    def device(self) -> torch.device | None:
        """The device of the tensordict that the value was written to (nothing lives there)."""
        return self._device

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return dispatch(func, args, kwargs)

    def _value(self) -> Any:
        """What ``td[key]`` returns."""
        raise NotImplementedError

    def _encoded(self) -> Any:
        """The leaf as plain values (numbers, texts, lists, dicts), to travel; None when it cannot."""
        return None

    @classmethod
    def _from_encoded(cls, data: Any) -> Leaf:
        """The leaf of an `_encoded` value, which may come from anywhere: check it."""
        raise ValueError(f"leaves of kind {cls.kind!r} do not travel")

    def _plain(self) -> Any:
        """The value in plain Python containers, for conversions."""
        return self._value()

    def _restructure(self, op: StructuralOp) -> Leaf:
        """The leaf after a shape or index operation."""
        raise NotImplementedError

    def _divide(self, op: DividingOp) -> list[Any]:
        """The leaves that this one is cut into."""
        return [self._restructure(part) for part in op.parts()]

    def _with(self, batch_size: Size, device: torch.device | None) -> Leaf:
        """The same value for another batch size (a longer or shorter one) and device."""
        raise NotImplementedError

    @classmethod
    def _stack(cls, leaves: Sequence[Any], dim: int) -> Leaf:
        """Leaves of equal batch size stacked along a new batch dimension."""
        raise NotImplementedError

    @classmethod
    def _cat(cls, leaves: Sequence[Any], dim: int) -> Leaf:
        """Leaves concatenated along a batch dimension."""
        raise NotImplementedError


class NonTensorDataBase(Leaf):
    """Base of the leaf kinds that hold Python values."""

    __slots__ = ()

    def _rows(self) -> np.ndarray:
        """One value per element, an object array of the batch shape."""
        raise NotImplementedError

    def tolist(self) -> Any:
        """The values as nested lists of the batch shape; the bare value without batch.

        >>> NonTensorData("a", batch_size=[2]).tolist(), NonTensorData("a").tolist()
        (['a', 'a'], 'a')
        """
        return self._rows().tolist()

    def __len__(self) -> int:
        return self._batch_size[0] if self._batch_size else 0

    def __getitem__(self, index: Any) -> Any:
        """The values of the rows that an index selects, as for a tensor of the batch shape."""
        return self._arranged(lambda rows: rows[index])

    def __iter__(self) -> Iterator[Any]:
        if not self._batch_size:
            raise EntryTypeError(
                "Cannot iterate over non-tensor data without a batch dimension. Read its value."
            )
        return iter([self[i] for i in range(len(self))])

    def unbind(self, dim: int = 0) -> tuple[Any, ...]:
        """The rows along a batch dimension."""
        dim = wrap_dim(dim, self.ndim)
        return tuple(
            [self._arranged(lambda r, i=i: r.select(dim, i)) for i in range(self._batch_size[dim])]  # type: ignore[misc]
        )

    def view(self, *shape: Any) -> Any:
        """The values in another batch shape."""
        return self._arranged(lambda rows: rows.reshape(*shape))

    reshape = view

    def expand(self, *shape: Any) -> Any:
        """The values repeated along batch dimensions of size 1 or new ones in front."""
        return self._arranged(lambda rows: rows.expand(*shape))

    def unsqueeze(self, dim: int) -> Any:
        """A batch dimension of size 1 before ``dim``."""
        return self._arranged(lambda rows: rows.unsqueeze(dim))

    def squeeze(self, *dim: Any) -> Any:
        """Without batch dimensions of size 1."""
        return self._arranged(lambda rows: rows.squeeze(*dim))

    def permute(self, *dims: Any) -> Any:
        """The batch dimensions in another order."""
        return self._arranged(lambda rows: rows.permute(*dims))

    def _arranged(self, fn: Callable[[Tensor], Tensor]) -> Any:
        """The values arranged as ``fn`` arranges a tensor of row numbers."""
        raise NotImplementedError

    def maybe_to_stack(self) -> NonTensorStack:
        """One value per row, if there is a batch."""
        return NonTensorStack._over(self._cells_of(), self._batch_size, self._device)

    def _cells_of(self) -> Rows:
        """One value for each element of the batch."""
        raise NotImplementedError

    def __eq__(self, other: object) -> Any:
        if isinstance(other, NonTensorDataBase):
            return compare(self, other)
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]


@register_leaf
class NonTensorData(NonTensorDataBase):
    """One Python value that stands for every element of a batch.

    Args:
        data: any object; a `NonTensorData` is unwrapped.
        batch_size: shape of the batch, ``[]`` by default.
        device: device to report; nothing is moved.

    >>> NonTensorData("hello", batch_size=[3])
    NonTensorData(data=hello, batch_size=torch.Size([3]), device=None)
    """

    __slots__ = ("_data",)

    kind = "non_tensor"
    # Whether the value holds for rows that are added, too.
    _of_any_row: ClassVar[bool] = False

    _data: Any

    def __init__(
        self, data: Any, *, batch_size: Any = EMPTY, device: Any = None, names: Any = None
    ) -> None:
        self._data = data._data if isinstance(data, NonTensorData) else data
        self._batch_size = as_size(batch_size)
        self._device = None if device is None else as_device(device)

    @classmethod
    def _new(cls, data: Any, batch_size: Size, device: torch.device | None) -> NonTensorData:
        out = object.__new__(cls)
        out._data = data
        out._batch_size = batch_size
        out._device = device
        return out

    @property
    def data(self) -> Any:
        """The value."""
        return self._data

    def _value(self) -> Any:
        return self._data

    def _rows(self) -> np.ndarray:
        return filled(self._data, self._batch_size)

    def _cells_of(self) -> Rows:
        return Rows.later("fill", (), (self._data, self._batch_size))

    def _restructure(self, op: StructuralOp) -> NonTensorDataBase:
        if op.adds_rows and not self._of_any_row:
            return self.maybe_to_stack()._restructure(op)
        return self._new(self._data, op.size(self._batch_size), self._device)

    def _with(self, batch_size: Size, device: torch.device | None) -> NonTensorData:
        return self._new(self._data, batch_size, device)

    def _arranged(self, fn: Callable[[Tensor], Tensor]) -> NonTensorData:
        rows = torch.zeros((), dtype=torch.bool).expand(self._batch_size)
        return self._new(self._data, fn(rows).shape, self._device)

    @classmethod
    def _stack(cls, leaves: Sequence[Any], dim: int) -> Leaf:
        if cls._collapses() and _all_same(leaves):
            first = leaves[0]
            return cls._new(first._data, insert(first._batch_size, dim, len(leaves)), first._device)
        return NonTensorStack._stack(leaves, dim)

    @classmethod
    def _cat(cls, leaves: Sequence[Any], dim: int) -> Leaf:
        if _all_same(leaves):
            first = leaves[0]
            size = list(first._batch_size)
            size[dim] = sum(leaf._batch_size[dim] for leaf in leaves)
            return cls._new(first._data, Size(size), first._device)
        return NonTensorStack._cat(leaves, dim)

    @classmethod
    def _collapses(cls) -> bool:
        """Whether a stack of equal values is one value."""
        return bool(option("capture_non_tensor_stack"))

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(data={self._data}, batch_size={self._batch_size}, "
            f"device={self._device})"
        )

    def __reduce__(self) -> Any:
        return type(self)._new, (self._data, self._batch_size, self._device)


@register_leaf
class MetaData(NonTensorData):
    """A `NonTensorData` whose stacks of equal values stay one value."""

    __slots__ = ()

    kind = "metadata"
    _of_any_row = True

    @classmethod
    def _collapses(cls) -> bool:
        return True


@register_leaf
class NonTensorStack(NonTensorDataBase):
    """One Python value for each element of a batch.

    Args:
        values: the values, or `NonTensorData` / `NonTensorStack` of equal batch size,
            stacked along a new first dimension.

    >>> NonTensorStack("a", "b").batch_size, NonTensorStack("a", "b").tolist()
    (torch.Size([2]), ['a', 'b'])
    """

    __slots__ = ("_cells",)

    kind = "non_tensor_stack"

    _cells: Rows

    def __init__(self, *values: Any, device: Any = None) -> None:
        if not values:
            raise EntryTypeError(
                "Cannot make a NonTensorStack of nothing: expected one value or more."
            )
        parts = [
            v if isinstance(v, NonTensorDataBase) else NonTensorData._new(v, EMPTY, None)
            for v in values
        ]
        _same_sizes(parts)
        self._values = np.stack([part._rows() for part in parts])
        self._batch_size = Size(self._values.shape)
        self._device = as_device(device) if device is not None else parts[0]._device

    @classmethod
    def _new(cls, values: np.ndarray, device: torch.device | None) -> NonTensorStack:
        return cls._over(Rows(values), Size(values.shape), device)

    @classmethod
    def _over(cls, cells: Rows, size: Size, device: torch.device | None) -> NonTensorStack:
        out = object.__new__(cls)
        out._cells = cells
        out._batch_size = size
        out._device = device
        return out

    def _later(self, how: str, argument: Any, size: Size) -> NonTensorStack:
        """What is done in a compiled graph: noted, and done when the values are read."""
        return self._over(Rows.later(how, [self._cells], argument), size, self._device)

    @property
    def _values(self) -> np.ndarray:
        return self._cells.get()

    @_values.setter
    def _values(self, values: np.ndarray) -> None:
        self._cells = Rows(values)

    def _cells_of(self) -> Rows:
        return self._cells

    @classmethod
    def from_list(
        cls, values: Any, ndim: int = 1, device: torch.device | None = None
    ) -> NonTensorStack:
        """A stack of nested lists, read as ``ndim`` batch dimensions.

        Raises:
            ShapeError: when the lists are ragged within those dimensions.
        """
        shape: list[int] = []
        level: Any = values
        for _ in range(ndim):
            shape.append(len(level))
            if not shape[-1]:
                break
            level = level[0]
        out = np.empty(tuple(shape), dtype=object)
        flat: Iterable[Any] = [values]
        for n in shape:
            parts: list[Any] = []
            for part in flat:
                if not isinstance(part, (list, tuple)) or len(part) != n:
                    raise ShapeError(
                        f"Cannot read nested lists as {len(shape)} batch dimensions: expected lists "
                        f"of shape {shape}, got a part {part!r}."
                    )
                parts.extend(part)
            flat = parts
        for index, value in zip(np.ndindex(out.shape), flat):
            out[index] = value
        return cls._new(out, device)

    @classmethod
    def from_nontensordata(cls, non_tensor: NonTensorData) -> NonTensorStack:
        """The stack that holds the value of ``non_tensor`` once per element of its batch."""
        return cls._new(non_tensor._rows(), non_tensor._device)

    def _value(self) -> Any:
        return LinkedList._of(self) if self._batch_size else self._values[()]

    def _rows(self) -> np.ndarray:
        return self._values

    def _plain(self) -> Any:
        return self.tolist()

    def _set_row(self, at: tuple[int, ...], value: Any) -> None:
        """Set the rows under a position: one value, or (nested) lists of the shape left."""
        # Rows of an expanded stack share a place; others may have to stay what they are.
        if not self._values.flags.writeable or self._cells.noted:
            self._values = self._values.copy()
        left = self._values.ndim - len(at)
        if left:
            self._values[at] = NonTensorStack.from_list(value, left)._values
        else:
            self._values[at] = value

    def _restructure(self, op: StructuralOp) -> NonTensorDataBase:
        if torch.compiler.is_compiling():
            return self._later("op", op, op.size(self._batch_size))
        return self._of(after(self._values, op))

    def _divide(self, op: DividingOp) -> list[NonTensorDataBase]:
        if torch.compiler.is_compiling():
            return [self._restructure(part) for part in op.parts()]
        numbers = numbers_of(self._batch_size)
        return [self._of(taken(self._values, rows)) for rows in op.leaf(numbers)]

    def _arranged(self, fn: Callable[[Tensor], Tensor]) -> NonTensorDataBase:
        return self._of(taken(self._values, fn(numbers_of(self._batch_size))))

    def _of(self, values: np.ndarray) -> NonTensorDataBase:
        if not values.shape:
            return NonTensorData._new(values[()], EMPTY, self._device)
        return NonTensorStack._new(values, self._device)

    def _with(self, batch_size: Size, device: torch.device | None) -> NonTensorStack:
        n = len(self._batch_size)
        if batch_size[:n] != self._batch_size and self._batch_size[: len(batch_size)] != batch_size:
            raise BatchSizeError(
                f"Cannot give a NonTensorStack of shape {list(self._batch_size)} the batch size "
                f"{list(batch_size)}."
            )
        if len(batch_size) <= n:
            return self._over(self._cells, self._batch_size, device)
        if torch.compiler.is_compiling():
            return self._over(Rows.later("extend", [self._cells], batch_size), batch_size, device)
        return self._new(extended(self._values, batch_size), device)

    @classmethod
    def _stack(cls, leaves: Sequence[Any], dim: int) -> Leaf:
        _same_sizes(leaves)
        if torch.compiler.is_compiling():
            cells = Rows.later("stack", [leaf._cells_of() for leaf in leaves], dim)
            size = insert(leaves[0]._batch_size, dim, len(leaves))
            return cls._over(cells, size, leaves[0]._device)
        return cls._new(np.stack([leaf._rows() for leaf in leaves], dim), leaves[0]._device)

    @classmethod
    def _cat(cls, leaves: Sequence[Any], dim: int) -> Leaf:
        if torch.compiler.is_compiling():
            cells = Rows.later("cat", [leaf._cells_of() for leaf in leaves], dim)
            size = list(leaves[0]._batch_size)
            size[dim] = sum(leaf._batch_size[dim] for leaf in leaves)
            return cls._over(cells, Size(size), leaves[0]._device)
        return cls._new(np.concatenate([leaf._rows() for leaf in leaves], dim), leaves[0]._device)

    def __repr__(self) -> str:
        return (
            f"NonTensorStack(\n    {self.tolist()},\n    batch_size={self._batch_size},\n"
            f"    device={self._device})"
        )

    def __reduce__(self) -> Any:
        return NonTensorStack._new, (self._values, self._device)


def is_non_tensor(data: Any) -> bool:
    """Whether an object is non-tensor data: the wrapper of a value or of one value per row.

    >>> is_non_tensor(NonTensorData("a")), is_non_tensor("a")
    (True, False)
    """
    return isinstance(data, NonTensorDataBase)


def join(leaves: Sequence[Leaf], dim: int, *, new_dim: bool) -> Leaf:
    """Stack (``new_dim``) or concatenate leaves that are not tensors.

    Raises:
        EntryTypeError: when a kind cannot be joined with the others.
    """
    first = leaves[0]
    dim = wrap_dim(dim, first.ndim + new_dim)
    cls: Any = type(first)
    for leaf in leaves:
        if type(leaf) is not cls:
            if not isinstance(leaf, NonTensorDataBase) or not isinstance(first, NonTensorDataBase):
                raise EntryTypeError(
                    f"Cannot join a {type(first).__name__} and a {type(leaf).__name__}."
                )
            cls = NonTensorStack
    out: Leaf = cls._stack(leaves, dim) if new_dim else cls._cat(leaves, dim)
    return out


def same(a: Any, b: Any) -> bool:
    """Whether two values are the same: identical, or of one type and equal without doubt."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    try:
        if isinstance(a, Tensor):
            return a.dtype is b.dtype and a.device == b.device and torch.equal(a, b)
        if isinstance(a, np.ndarray):
            return a.dtype == b.dtype and a.shape == b.shape and bool(np.all(a == b))
        if isinstance(a, float):  # 0.0 and -0.0 are equal and not the same
            return a == b and math.copysign(1.0, a) == math.copysign(1.0, b)
        if type(a) in (list, tuple):
            return len(a) == len(b) and all(map(same, a, b))
        if type(a) is dict:
            return len(a) == len(b) and all(
                same(k, j) and same(v, w) for (k, v), (j, w) in zip(a.items(), b.items())
            )
        return (a == b) is True
    except Exception:  # an __eq__ that raises: not known to be equal
        return False


def compare(a: NonTensorDataBase, b: NonTensorDataBase) -> Tensor:
    """A boolean tensor of the batch shape, true where the values are the same."""
    if isinstance(a, NonTensorData) and isinstance(b, NonTensorData):
        return torch.full(a._batch_size, same(a._data, b._data), dtype=torch.bool)
    left, right = np.broadcast_arrays(a._rows(), b._rows())
    flat = [same(x, y) for x, y in zip(left.reshape(-1), right.reshape(-1))]
    return torch.tensor(flat, dtype=torch.bool).reshape(left.shape)


def _all_same(leaves: Sequence[Any]) -> bool:
    first = leaves[0]
    return all(isinstance(leaf, NonTensorData) and same(leaf._data, first._data) for leaf in leaves)


def _same_sizes(leaves: Sequence[Leaf]) -> None:
    sizes = {tuple(leaf._batch_size) for leaf in leaves}
    if len(sizes) > 1:
        raise ShapeError(
            f"Cannot stack non-tensor values: expected one batch size, got {sorted(sizes)}."
        )
