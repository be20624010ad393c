"""NumPy: structured arrays in and out, dicts of arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Size, Tensor

from ..core import write
from ..core.leaf import NonTensorData, NonTensorDataBase, NonTensorStack
from ..core.node import Node
from ..core.traverse import fold
from ..errors import EntryTypeError
from .convert import dense_class, sized, value_of

_NUMERIC_KINDS = "biufc"


def from_struct_array(
    cls: type,
    array: Any,
    auto_batch_size: bool | None,
    batch_dims: int | None,
    device: Any,
    batch_size: Any,
) -> Any:
    """`ArrayMethods.from_struct_array`."""
    if not isinstance(array, (np.ndarray, np.void)) or not array.dtype.names:
        raise EntryTypeError(
            f"Cannot read a structured array: expected an array whose dtype has fields, got "
            f"{type(array).__name__} of dtype {getattr(array, 'dtype', None)}."
        )
    dense = dense_class(cls)
    own = Size(array.shape)
    if batch_size is None and not auto_batch_size and batch_dims is None:
        batch_size = own
    return sized(
        lambda size, dev, names: dense(_fields(dense, array, own), batch_size=size, device=dev),
        auto_batch_size=auto_batch_size,
        batch_dims=batch_dims,
        batch_size=batch_size,
        device=device,
    )


def _fields(dense: Any, array: Any, batch: Size) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name in array.dtype.names:
        column, kind = array[name], array.dtype[name].base
        if kind.names:
            out[name] = dense(_fields(dense, column, Size(column.shape)), batch_size=column.shape)
        elif kind.kind in _NUMERIC_KINDS:
            out[name] = write._from_numpy(column)
        elif batch:
            out[name] = NonTensorStack.from_list(column.tolist(), len(batch))
        else:
            out[name] = NonTensorData(column.item() if isinstance(column, np.generic) else column)
    return out


def array_of(x: Tensor, name: str) -> Any:
    """A host array with the values of a tensor.

    Raises:
        EntryTypeError: (a ``TypeError``) NumPy lacks the dtype.
    """
    try:
        return x.detach().cpu().numpy()
    except TypeError as err:
        raise EntryTypeError(
            f"Cannot make an array of {name!r}: {err}. Cast it first, for example with "
            f"td.to(torch.float32)."
        ) from None


def to_struct_array(node: Node) -> Any:
    """`ArrayMethods.to_struct_array`."""
    batch = tuple(node._batch_size)
    columns = {name: _column(entry, name, len(batch)) for name, entry in node._items()}
    dtype = [(name, c.dtype, c.shape[len(batch) :]) for name, c in columns.items()]
    out = np.empty(batch, dtype=dtype)
    for name, column in columns.items():
        out[name] = column
    return out


def _column(entry: Any, name: str, ndim: int) -> Any:
    if isinstance(entry, Tensor):
        return array_of(entry, name)
    if isinstance(entry, Node):
        return to_struct_array(entry)
    if not isinstance(entry, NonTensorDataBase):
        raise EntryTypeError(f"Cannot make an array of {name!r}: a {type(entry).__name__}.")
    rows = entry._rows()
    flat = rows.reshape(-1).tolist()
    if flat and all(isinstance(value, str) for value in flat):
        return np.array(flat).reshape(rows.shape)
    return rows


class ArrayMethods(Node):
    """Conversion from and to NumPy."""

    __slots__ = ()

    # NumPy leaves arithmetic with a tensordict to the tensordict.
    __array_ufunc__ = None

    @classmethod
    def from_struct_array(
        cls,
        struct_array: Any,
        *,
        auto_batch_size: bool = False,
        batch_dims: int | None = None,
        device: Any = None,
        batch_size: Any = None,
    ) -> Any:
        """A tensordict of a structured array, fields as entries; its batch size is the array's.

        Fields of numbers share memory where torch can; others become values.

        Raises:
            TypeError: the array has no fields.

        >>> import numpy as np
        >>> from tensordict import TensorDict
        >>> array = np.array([(1, 2.0), (3, 4.0)], dtype=[("a", "i8"), ("b", "f8")])
        >>> TensorDict.from_struct_array(array)["a"]
        tensor([1, 3])
        """
        return from_struct_array(cls, struct_array, auto_batch_size, batch_dims, device, batch_size)

    def to_struct_array(self) -> Any:
        """A structured array of the batch shape with one field per entry, in key order.

        >>> import torch
        >>> from tensordict import TensorDict
        >>> TensorDict({"a": torch.arange(2), "b": torch.ones(2)}, [2]).to_struct_array()
        array([(0, 1.), (1, 1.)], dtype=[('a', '<i8'), ('b', '<f4')])
        """
        return to_struct_array(self)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        if copy is False:
            raise ValueError("Cannot make an array of a tensordict without a copy.")
        out = to_struct_array(self)
        return out if dtype is None else out.astype(dtype)

    def numpy(self) -> dict[str, Any]:
        """A nested dict of arrays that share memory with the leaves, and of values.

        Raises:
            RuntimeError: a leaf requires grad; TypeError: a leaf is not on the host.

        >>> import torch
        >>> from tensordict import TensorDict
        >>> TensorDict(a=torch.arange(3), s="x").numpy()
        {'a': array([0, 1, 2]), 's': 'x'}
        """
        out: dict[str, Any] = fold(
            self,
            lambda e: e.numpy() if isinstance(e, Tensor) else value_of(e),
            lambda node, values: values,
        )
        return out
