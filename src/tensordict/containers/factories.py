"""The package's functions that make tensordicts: the classmethods of `TensorDict` by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..ops.convert_tables import PathLike
from .dense import TensorDict


def make_tensordict(
    input_dict: Mapping[Any, Any] | None = None,
    batch_size: Any = None,
    device: Any = None,
    auto_batch_size: bool | None = None,
    **kwargs: Any,
) -> TensorDict:
    """A tensordict of a mapping and keyword entries.

    >>> make_tensordict(a=torch.zeros(3, 4), b=torch.zeros(3), auto_batch_size=True).batch_size
    torch.Size([3])
    """
    entries = {**(input_dict or {}), **kwargs}
    return TensorDict.from_dict(
        entries, batch_size=batch_size, device=device, auto_batch_size=auto_batch_size
    )


def from_dict(
    d: Mapping[Any, Any],
    *,
    auto_batch_size: bool | None = None,
    batch_dims: int | None = None,
    device: Any = None,
    batch_size: Any = None,
    names: Sequence[str | None] | None = None,
) -> TensorDict:
    """`TensorDict.from_dict`."""
    return TensorDict.from_dict(
        d,
        auto_batch_size=auto_batch_size,
        batch_dims=batch_dims,
        device=device,
        batch_size=batch_size,
        names=names,
    )


def fromkeys(keys: Iterable[Any], value: Any = 0) -> TensorDict:
    """`TensorDict.fromkeys`."""
    return TensorDict.fromkeys(keys, value)


def from_any(
    obj: Any,
    *,
    auto_batch_size: bool = False,
    batch_dims: int | None = None,
    device: Any = None,
    batch_size: Any = None,
) -> Any:
    """`TensorDict.from_any`."""
    return TensorDict.from_any(
        obj,
        auto_batch_size=auto_batch_size,
        batch_dims=batch_dims,
        device=device,
        batch_size=batch_size,
    )


def from_tuple(
    obj: tuple[Any, ...],
    *,
    auto_batch_size: bool = False,
    batch_dims: int | None = None,
    device: Any = None,
    batch_size: Any = None,
) -> TensorDict:
    """`TensorDict.from_tuple`."""
    return TensorDict.from_tuple(
        obj,
        auto_batch_size=auto_batch_size,
        batch_dims=batch_dims,
        device=device,
        batch_size=batch_size,
    )


def from_namedtuple(
    named_tuple: Any,
    *,
    auto_batch_size: bool = False,
    batch_dims: int | None = None,
    device: Any = None,
    batch_size: Any = None,
) -> TensorDict:
    """`TensorDict.from_namedtuple`."""
    return TensorDict.from_namedtuple(
        named_tuple,
        auto_batch_size=auto_batch_size,
        batch_dims=batch_dims,
        device=device,
        batch_size=batch_size,
    )


def from_pytree(
    pytree: Any,
    *,
    batch_size: Any = None,
    auto_batch_size: bool = False,
    batch_dims: int | None = None,
) -> TensorDict:
    """`TensorDict.from_pytree`."""
    return TensorDict.from_pytree(
        pytree, batch_size=batch_size, auto_batch_size=auto_batch_size, batch_dims=batch_dims
    )


def from_struct_array(
    struct_array: Any,
    *,
    auto_batch_size: bool = False,
    batch_dims: int | None = None,
    device: Any = None,
    batch_size: Any = None,
) -> TensorDict:
    """`TensorDict.from_struct_array`."""
    return TensorDict.from_struct_array(
        struct_array,
        auto_batch_size=auto_batch_size,
        batch_dims=batch_dims,
        device=device,
        batch_size=batch_size,
    )


def from_pandas(
    dataframe: Any,
    *,
    auto_batch_size: bool = False,
    batch_dims: int | None = None,
    device: Any = None,
    batch_size: Any = None,
    separator: str | None = None,
    dtype: torch.dtype | None = None,
) -> TensorDict:
    """`TensorDict.from_pandas`."""
    return TensorDict.from_pandas(
        dataframe,
        auto_batch_size=auto_batch_size,
        batch_dims=batch_dims,
        device=device,
        batch_size=batch_size,
        separator=separator,
        dtype=dtype,
    )


def from_csv(
    path: PathLike,
    *,
    auto_batch_size: bool = False,
    batch_dims: int | None = None,
    device: Any = None,
    batch_size: Any = None,
    separator: str | None = None,
    dtype: torch.dtype | None = None,
    **kwargs: Any,
) -> TensorDict:
    """`TensorDict.from_csv`."""
    return TensorDict.from_csv(
        path,
        auto_batch_size=auto_batch_size,
        batch_dims=batch_dims,
        device=device,
        batch_size=batch_size,
        separator=separator,
        dtype=dtype,
        **kwargs,
    )


def from_json(
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
) -> TensorDict:
    """`TensorDict.from_json`."""
    return TensorDict.from_json(
        path,
        auto_batch_size=auto_batch_size,
        batch_dims=batch_dims,
        device=device,
        batch_size=batch_size,
        separator=separator,
        dtype=dtype,
        lines=lines,
        **kwargs,
    )


def from_parquet(
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
) -> TensorDict:
    """`TensorDict.from_parquet`."""
    return TensorDict.from_parquet(
        path,
        auto_batch_size=auto_batch_size,
        batch_dims=batch_dims,
        device=device,
        batch_size=batch_size,
        separator=separator,
        dtype=dtype,
        columns=columns,
        **kwargs,
    )


def from_module(
    module: nn.Module,
    as_module: bool = False,
    lock: bool = True,
    use_state_dict: bool = False,
    filter_empty: bool = True,
) -> Any:
    """`TensorDict.from_module`, locked by default."""
    return TensorDict.from_module(
        module,
        as_module=as_module,
        lock=lock,
        use_state_dict=use_state_dict,
        filter_empty=filter_empty,
    )


def from_modules(
    *modules: nn.Module,
    as_module: bool = False,
    lock: bool = True,
    use_state_dict: bool = False,
    lazy_stack: bool = False,
    expand_identical: bool = False,
) -> Any:
    """`TensorDict.from_modules`."""
    return TensorDict.from_modules(
        *modules,
        as_module=as_module,
        lock=lock,
        use_state_dict=use_state_dict,
        lazy_stack=lazy_stack,
        expand_identical=expand_identical,
    )
