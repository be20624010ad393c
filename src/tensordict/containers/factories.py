"""The package's functions that make tensordicts: the classmethods of `TensorDict` by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from .dense import TensorDict

from_any = TensorDict.from_any
from_csv = TensorDict.from_csv
from_dict = TensorDict.from_dict
from_json = TensorDict.from_json
from_namedtuple = TensorDict.from_namedtuple
from_pandas = TensorDict.from_pandas
from_parquet = TensorDict.from_parquet
from_pytree = TensorDict.from_pytree
from_struct_array = TensorDict.from_struct_array
from_tuple = TensorDict.from_tuple
fromkeys = TensorDict.fromkeys


def make_tensordict(
    input_dict: Mapping[Any, Any] | None = None,
    batch_size: Any = None,
    device: Any = None,
    auto_batch_size: bool | None = None,
    **kwargs: Any,
) -> TensorDict:
    """A tensordict of a mapping and keyword entries.

    >>> import torch
    >>> make_tensordict(a=torch.zeros(3, 4), b=torch.zeros(3), auto_batch_size=True).batch_size
    torch.Size([3])
    """
    entries = {**(input_dict or {}), **kwargs}
    return TensorDict.from_dict(
        entries, batch_size=batch_size, device=device, auto_batch_size=auto_batch_size
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
