"""Data frames and table files (pandas and pyarrow are extras): one row per batch element."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Size, Tensor

from ..core.leaf import NonTensorDataBase, NonTensorStack
from ..core.node import Node
from ..errors import EntryTypeError, MissingKeyError
from . import keysets
from .convert import dense_class, sized
from .convert_arrays import array_of

PathLike: TypeAlias = "str | os.PathLike[str]"


def _pandas() -> Any:
    try:
        import pandas
    except ImportError:
        raise ImportError(
            "Cannot use data frames: pandas is not installed. "
            "Install the extra: pip install tensordict[data]."
        ) from None
    return pandas


def frame_of(node: Node, separator: str | None) -> Any:
    """`TableMethods.to_pandas`."""
    pandas = _pandas()
    if len(node._batch_size) < 1:
        raise EntryTypeError(
            "Cannot make a table of a tensordict without batch dimensions: expected one row per "
            "element of the first. Use td.unsqueeze(0) for a single row."
        )
    if separator is None and node._children():
        raise EntryTypeError(
            f"Cannot make a table of nested entries "
            f"{[name for name, entry in node._items() if isinstance(entry, Node)]}: pass separator= "
            f"to join their keys."
        )
    flat = keysets.flatten(node, separator or ".", None)
    index = pandas.RangeIndex(node._batch_size[0])
    return pandas.DataFrame(
        {name: _series(entry, name) for name, (_, entry) in flat.items()}, index=index
    )


def _series(entry: Any, name: str) -> Any:
    if isinstance(entry, Tensor):
        array = array_of(entry, name)
        return array if array.ndim == 1 else _objects(list(array))
    if not isinstance(entry, NonTensorDataBase):
        raise EntryTypeError(f"Cannot make a column of {name!r}: a {type(entry).__name__}.")
    return _objects(entry.tolist())


def _objects(values: list[Any]) -> Any:
    out = np.empty(len(values), dtype=object)
    for i, value in enumerate(values):
        out[i] = value
    return out


def from_frame(
    cls: type,
    frame: Any,
    separator: str | None,
    dtype: torch.dtype | None,
    auto_batch_size: bool,
    batch_dims: int | None,
    device: Any,
    batch_size: Any,
) -> Any:
    """`TableMethods.from_pandas`."""
    n = len(frame)
    entries: dict[Any, Any] = {}
    for i, label in enumerate(frame.columns):
        name = str(label)
        key: Any = tuple(name.split(separator)) if separator else name
        if key in entries:
            raise MissingKeyError(f"Cannot read a table in which two columns are named {name!r}.")
        entries[key] = _column(frame.iloc[:, i], n, dtype)
    dense = dense_class(cls)
    if batch_size is None and not auto_batch_size and batch_dims is None:
        batch_size = Size([n])
    return sized(
        lambda size, dev, names: dense(entries, batch_size=size, device=dev),
        auto_batch_size=auto_batch_size,
        batch_dims=batch_dims,
        batch_size=batch_size,
        device=device,
    )


def _column(series: Any, n: int, dtype: torch.dtype | None) -> Any:
    array = series.to_numpy()
    if array.dtype.kind == "O" and getattr(series.dtype, "kind", "O") in "iuf":
        array = series.to_numpy(dtype="float64", na_value=np.nan)  # missing numbers
    if array.dtype.kind in "biufc":
        x = torch.tensor(array)
        return x if dtype is None else x.to(dtype)
    values = series.tolist()
    stacked = _as_tensor(values)
    if stacked is None:
        return NonTensorStack.from_list(values, 1) if n else torch.zeros(0)
    return stacked if dtype is None else stacked.to(dtype)


def _as_tensor(values: list[Any]) -> Tensor | None:
    """Rows of numbers (lists or arrays of one shape) as a tensor, None for anything else."""
    if not values or not all(isinstance(v, (list, np.ndarray)) for v in values):
        return None
    try:
        array = np.array([np.asarray(v.tolist() if hasattr(v, "tolist") else v) for v in values])
    except ValueError:  # ragged
        return None
    return torch.from_numpy(array) if array.dtype.kind in "biufc" else None


class TableMethods(Node):
    """Conversion from and to data frames and table files."""

    __slots__ = ()

    def to_pandas(self, *, separator: str | None = None) -> Any:
        """A data frame with one row per element of the first batch dimension.

        Entries with more dimensions become columns of arrays.

        Args:
            separator: joins the keys of nested entries.

        Raises:
            ValueError: nested entries and no separator, or no batch dimension.
        """
        return frame_of(self, separator)

    @classmethod
    def from_pandas(
        cls,
        dataframe: Any,
        *,
        auto_batch_size: bool = False,
        batch_dims: int | None = None,
        device: Any = None,
        batch_size: Any = None,
        separator: str | None = None,
        dtype: torch.dtype | None = None,
    ) -> Any:
        """A tensordict of a data frame, columns as entries; its batch size is the number of rows.

        Columns of numbers, and of equal arrays or lists of numbers, become tensors;
        others one value per row. Missing numbers become NaN.

        Args:
            dataframe: the frame.
            auto_batch_size, batch_dims, device, batch_size: as in `from_dict`.
            separator: splits column names into nested keys.
            dtype: dtype of the tensors.
        """
        return from_frame(
            cls, dataframe, separator, dtype, auto_batch_size, batch_dims, device, batch_size
        )

    def to_csv(self, path: PathLike, *, separator: str | None = None, **kwargs: Any) -> None:
        """Write a comma-separated file; ``kwargs`` go to ``pandas.DataFrame.to_csv``.

        Raises:
            ValueError: an entry with more than one value per row: CSV has no arrays.
        """
        frame = frame_of(self, separator)
        for name in frame.columns:
            if any(isinstance(value, np.ndarray) for value in frame[name].head(1)):
                raise EntryTypeError(
                    f"Cannot write {name!r} as CSV: each row holds an array. Use to_json() or "
                    f"to_parquet(), or split the entry."
                )
        frame.to_csv(path, index=False, **kwargs)

    @classmethod
    def from_csv(
        cls,
        path: PathLike,
        *,
        auto_batch_size: bool = False,
        batch_dims: int | None = None,
        device: Any = None,
        batch_size: Any = None,
        separator: str | None = None,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> Any:
        """A tensordict of a comma-separated file; ``kwargs`` go to ``pandas.read_csv``."""
        frame = _pandas().read_csv(path, **kwargs)
        return from_frame(
            cls, frame, separator, dtype, auto_batch_size, batch_dims, device, batch_size
        )

    def to_json(
        self, path: PathLike, *, separator: str | None = None, lines: bool = False, **kwargs: Any
    ) -> None:
        """Write a JSON file of records, one per row; ``lines`` writes one record per line."""
        frame_of(self, separator).to_json(
            path, **{"orient": "records", "lines": lines, "double_precision": 15, **kwargs}
        )

    @classmethod
    def from_json(
        cls,
        path: PathLike,
        *,
        auto_batch_size: bool = False,
        batch_dims: int | None = None,
        device: Any = None,
        batch_size: Any = None,
        separator: str | None = None,
        dtype: torch.dtype | None = None,
        lines: bool = False,
        **kwargs: Any,
    ) -> Any:
        """A tensordict of a JSON file of records; ``kwargs`` go to ``pandas.read_json``."""
        frame = _pandas().read_json(path, **{"orient": "records", "lines": lines, **kwargs})
        return from_frame(
            cls, frame, separator, dtype, auto_batch_size, batch_dims, device, batch_size
        )

    def to_parquet(self, path: PathLike, *, separator: str | None = None, **kwargs: Any) -> None:
        """Write a Parquet file; ``kwargs`` go to ``pandas.DataFrame.to_parquet``."""
        frame = frame_of(self, separator)
        for name in frame.columns:  # pyarrow takes lists of lists, not arrays of rank 2
            if any(isinstance(value, np.ndarray) and value.ndim > 1 for value in frame[name]):
                frame[name] = [value.tolist() for value in frame[name]]
        frame.to_parquet(path, **kwargs)

    @classmethod
    def from_parquet(
        cls,
        path: PathLike,
        *,
        auto_batch_size: bool = False,
        batch_dims: int | None = None,
        device: Any = None,
        batch_size: Any = None,
        separator: str | None = None,
        dtype: torch.dtype | None = None,
        columns: Sequence[str] | None = None,
        **kwargs: Any,
    ) -> Any:
        """A tensordict of a Parquet file, or of some ``columns`` of it."""
        columns = None if columns is None else list(columns)
        frame = _pandas().read_parquet(path, columns=columns, **kwargs)
        return from_frame(
            cls, frame, separator, dtype, auto_batch_size, batch_dims, device, batch_size
        )
