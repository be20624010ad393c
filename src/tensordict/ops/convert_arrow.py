"""Arrow tables (pyarrow is an extra): columns without a copy where their memory allows it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core.leaf import NonTensorDataBase, NonTensorStack
from ..core.node import Node
from ..core.registry import node_class
from ..errors import EntryTypeError
from .convert_arrays import array_of

_NULLS = ("raise", "fill")


def _pyarrow() -> Any:
    try:
        import pyarrow
    except ImportError:
        raise ImportError(
            "Cannot use Arrow tables: pyarrow is not installed. "
            "Install the extra: pip install tensordict[data]."
        ) from None
    return pyarrow


def to_arrow(td: Node) -> Any:
    """An Arrow table with one row per element of the first batch dimension.

    Nested tensordicts become struct columns, entries with more dimensions (nested)
    fixed-size lists, values columns of what Arrow makes of them.

    Raises:
        ValueError: no batch dimension.
    """
    pa = _pyarrow()
    if len(td._batch_size) < 1:
        raise EntryTypeError(
            "Cannot make a table of a tensordict without batch dimensions: expected one row per "
            "element of the first. Use td.unsqueeze(0) for a single row."
        )
    columns = {name: _array(pa, entry, name) for name, entry in td._items()}
    return pa.table(columns)


def _array(pa: Any, entry: Any, name: str) -> Any:
    if isinstance(entry, Tensor):
        values = array_of(entry, name)
        out = pa.array(np.ascontiguousarray(values).reshape(-1))
        for n in reversed(values.shape[1:]):
            out = pa.FixedSizeListArray.from_arrays(out, n)
        return out
    if isinstance(entry, Node):
        children = [_array(pa, below, below_name) for below_name, below in entry._items()]
        return pa.StructArray.from_arrays(children, list(entry._names()))
    if not isinstance(entry, NonTensorDataBase):
        raise EntryTypeError(f"Cannot make a column of {name!r}: a {type(entry).__name__}.")
    return pa.array(entry.tolist())


def from_arrow(
    table: Any,
    *,
    copy: bool | None = None,
    nulls: str = "raise",
    mask_key: Any = None,
    device: Any = None,
) -> Any:
    """A tensordict of an Arrow table, columns as entries; its batch size is the number of rows.

    Args:
        table: a table or record batch.
        copy: None copies where the memory cannot be shared (several chunks, booleans,
            read-only memory is shared); True always; False raises where a copy is needed.
        nulls: ``"raise"``, or ``"fill"``: NaN in floating columns, 0 in others.
        mask_key: with ``"fill"``, where boolean masks of the present values go.
        device: where the tensors are moved.

    Raises:
        ValueError: a null and ``nulls="raise"``, or a copy and ``copy=False``.
    """
    if nulls not in _NULLS:
        raise EntryTypeError(f"Cannot treat nulls as {nulls!r}: expected one of {_NULLS}.")
    if mask_key is not None and nulls == "raise":
        raise EntryTypeError("Cannot make masks with nulls='raise': pass nulls='fill'.")
    masks: dict[str, Any] | None = None if mask_key is None else {}
    read = _Reader(copy, nulls)
    n = table.num_rows
    entries: dict[Any, Any] = {}
    for name in table.schema.names:
        column = table.column(name)
        chunks = column.chunks if hasattr(column, "chunks") else [column]
        array = chunks[0] if len(chunks) == 1 else read.joined(column, name)
        entries[name] = read.entry(array, name, masks)
    if masks is not None:
        entries[mask_key] = masks
    return node_class("dense")(entries, batch_size=[n], device=device)


class _Reader:
    """Arrow arrays to entries under one choice of what to do with copies and nulls."""

    def __init__(self, copy: bool | None, nulls: str) -> None:
        self.copy = copy
        self.nulls = nulls

    def joined(self, column: Any, name: str) -> Any:
        if self.copy is False:
            raise EntryTypeError(f"Cannot read {name!r} without a copy: it has several chunks.")
        array = column.combine_chunks()
        return array.chunk(0) if hasattr(array, "chunks") and array.num_chunks == 1 else array

    def entry(self, array: Any, name: str, masks: dict[str, Any] | None) -> Any:
        pa = _pyarrow()
        kind = array.type
        if pa.types.is_struct(kind):
            below: dict[str, Any] | None = None if masks is None else {}
            out = {
                kind.field(i).name: self.entry(child, f"{name}.{kind.field(i).name}", below)
                for i, child in enumerate(array.flatten())
            }
            if masks is not None and below:
                masks[name] = below
            return node_class("dense")(out, batch_size=[len(array)])
        if array.null_count:
            if self.nulls == "raise":
                raise EntryTypeError(
                    f"Cannot read {name!r}: {array.null_count} of its {len(array)} values are null. "
                    f"Pass nulls='fill'."
                )
            if masks is not None:
                masks[name.rsplit(".", 1)[-1]] = torch.tensor(array.is_valid().to_pylist())
        return self.values(array, name)

    def values(self, array: Any, name: str) -> Any:
        pa = _pyarrow()
        shape = [len(array)]
        while pa.types.is_fixed_size_list(array.type):
            shape.append(array.type.list_size)
            array = array.flatten()
        kind = array.type
        if not (
            pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
        ):
            return _listed(array, shape)
        if array.null_count:
            array = array.fill_null(float("nan") if pa.types.is_floating(kind) else 0)
        shared = not pa.types.is_boolean(kind) and self.copy is not True
        if not shared and self.copy is False:
            raise EntryTypeError(f"Cannot read {name!r} without a copy: booleans are packed bits.")
        if shared:
            x: Tensor = torch.utils.dlpack.from_dlpack(array)
            return x.view(shape)
        return torch.tensor(array.to_numpy(zero_copy_only=False)).view(shape)


def _listed(array: Any, shape: list[int]) -> Any:
    values = array.to_pylist()
    if len(shape) == 1 and values and all(isinstance(v, list) for v in values):
        try:
            return torch.tensor(values)
        except (ValueError, TypeError, RuntimeError):
            pass  # ragged or not numbers
    if not values:
        return torch.zeros(shape)
    return NonTensorStack.from_list(values, 1)
