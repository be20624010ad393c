"""Functions over whole tensordicts that are no methods: merging, grouping, row sets, dtype tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._keys import path_of
from .._typing import NestedKey
from ..core import write
from ..core.leaf import NonTensorDataBase
from ..core.node import Node
from ..core.sizes import as_size
from ..core.torch_function import implements
from ..core.traverse import leaves
from ..errors import DimError, EntryTypeError, ShapeError
from .combine import stack


def merge_tensordicts(*tensordicts: Any, callback_exist: Callable[..., Any] | None = None) -> Any:
    """A tensordict of the entries of several; of a key that more than one has, the first's.

    Args:
        *tensordicts: two or more, of one batch size.
        callback_exist: called with the entries of a key that all of them have; gives the
            merged entry.

    Raises:
        RuntimeError: fewer than two, or entries that do not fit the batch size of the first.

    >>> from tensordict import TensorDict
    >>> merged = merge_tensordicts(TensorDict(a=1, n={"b": 2}), TensorDict(a=3, n={"c": 4}))
    >>> merged["a"], set(merged["n"].keys()) == {"b", "c"}
    (tensor(1), True)
    """
    if len(tensordicts) < 2:
        raise ShapeError(f"at least 2 tensordicts must be provided, got {len(tensordicts)}")
    for td in tensordicts:
        if not isinstance(td, Node):
            raise EntryTypeError(f"Cannot merge a {type(td).__name__}: expected tensordicts.")
    return _merged(tensordicts, callback_exist)


def _merged(nodes: Sequence[Any], callback: Callable[..., Any] | None) -> Any:
    first = nodes[0]
    out = first._like({})
    for name in dict.fromkeys(name for node in nodes for name in node._names()):
        held = [entry for entry in (node._fetch(name) for node in nodes) if entry is not None]
        if all(isinstance(entry, Node) for entry in held):
            # Below a key that some lack, no key is in all: the callback has nothing to do there.
            deeper = callback if len(held) == len(nodes) else None
            value = _merged(held, deeper) if len(held) > 1 else held[0]
        elif callback is not None and len(held) == len(nodes):
            value = callback(*held)
        else:
            value = held[0]
        write.assign(out, (name,), value)
    return out


def dense_stack_tds(td_list: Any, dim: int | None = None) -> Any:
    """A dense tensordict of a lazy stack, or of a list of tensordicts stacked along ``dim``.

    Raises:
        ValueError: a list without ``dim``, or a lazy stack with another one than its own.

    >>> from tensordict import TensorDict
    >>> dense_stack_tds([TensorDict(a=0), TensorDict(a=1)], dim=0)["a"]
    tensor([0, 1])
    """
    if isinstance(td_list, Node):
        members = td_list._members()
        if members is None:
            raise EntryTypeError("Cannot make a dense stack of a tensordict that is no lazy stack.")
        own: int = td_list.stack_dim  # type: ignore[attr-defined]
        if dim is not None and dim != own:
            raise EntryTypeError(f"Cannot stack along {dim}: the lazy stack has its own dim {own}.")
        td_list, dim = [member.to_tensordict() for member in members], own  # type: ignore[attr-defined]
    if dim is None:
        raise EntryTypeError("If a list of tensordicts is provided, stack_dim must not be None")
    return stack(td_list, dim)


def group_by(tensordict: Any, key: NestedKey) -> tuple[Any, tuple[Any, ...]]:
    """The distinct values of an entry along the first batch dimension, and the rows of each.

    Args:
        tensordict: of batch size ``[N, ...]``.
        key: an entry; tensor values come sorted, others in order of appearance.

    Returns:
        The values (a tensor ``[G, ...]`` or a list) and G tensordicts, rows in order.

    Raises:
        ValueError: no batch dimension; KeyError: no such entry.

    >>> from tensordict import TensorDict
    >>> td = TensorDict({"k": torch.tensor([2, 1, 2]), "v": torch.arange(3)}, [3])
    >>> values, groups = group_by(td, "k")
    >>> values, [group["v"].tolist() for group in groups]
    (tensor([1, 2]), [[1], [0, 2]])
    """
    if not tensordict._batch_size:
        raise EntryTypeError(
            "group_by groups the rows along the first batch dimension of the tensordict, which has none."
        )
    entry = write.require(tensordict, path_of(key))
    if isinstance(entry, Tensor):
        values, which, counts = torch.unique(entry, dim=0, return_inverse=True, return_counts=True)
        rows = tensordict[which.argsort(stable=True)]
        return values, tuple(rows.split(counts.tolist(), 0))
    if not isinstance(entry, NonTensorDataBase):
        raise EntryTypeError(f"Cannot group by {key!r}: a {type(entry).__name__} has no values.")
    groups: dict[Any, list[int]] = {}
    for i, value in enumerate(entry.tolist()):
        groups.setdefault(tuple(value) if isinstance(value, list) else value, []).append(i)
    return list(groups), tuple(tensordict[torch.tensor(rows)] for rows in groups.values())


def remove_duplicates(
    input: Any, key: NestedKey, dim: int = 0, *, return_indices: bool = False
) -> Any:
    """The rows in which the values of one entry occur first, sorted by these values.

    Args:
        input: the tensordict.
        key: the entry whose values are compared.
        dim: the batch dimension of the rows.
        return_indices: also return, for each row of ``input``, the row of the result that
            has its values.

    Raises:
        KeyError: no such entry; ValueError: ``dim`` is no batch dimension.

    >>> from tensordict import TensorDict
    >>> td = TensorDict({"k": torch.tensor([3, 1, 3]), "v": torch.arange(3)}, [3])
    >>> remove_duplicates(td, "k")["v"]
    tensor([1, 0])
    """
    values = _values(input, key)
    dim = _batch_dim(input, dim)
    unique, which = torch.unique(values, dim=dim, return_inverse=True)
    n = unique.shape[dim]
    first = torch.full((n,), which.numel(), device=which.device)
    rows = torch.arange(which.numel(), device=which.device)
    first = first.scatter_reduce(0, which, rows, "amin")
    out = input[(slice(None),) * dim + (first,)]
    return (out, which) if return_indices else out


def isin(input: Any, reference: Any, key: NestedKey, dim: int = 0) -> Tensor:
    """Which rows of ``input`` have values of an entry that some row of ``reference`` has.

    Args:
        input, reference: tensordicts of one number of batch dimensions.
        key: the entry whose values are compared.
        dim: the batch dimension of the rows.

    Returns:
        A boolean tensor, one value per row of ``input``.

    Raises:
        KeyError: no such entry; ValueError: sizes that cannot be compared.

    >>> from tensordict import TensorDict
    >>> td = TensorDict({"k": torch.tensor([1, 2, 3])}, [3])
    >>> isin(td, td[1:], "k")
    tensor([False,  True,  True])
    """
    mine, theirs = _values(input, key), _values(reference, key)
    if len(input._batch_size) != len(reference._batch_size):
        raise EntryTypeError(
            "The number of dimensions in the batch size of the input and reference must be the same."
        )
    dim = _batch_dim(input, dim)
    mine, theirs = mine.movedim(dim, 0), theirs.movedim(dim, 0)
    if mine.shape[1:] != theirs.shape[1:]:
        raise EntryTypeError(
            f"Cannot compare the rows of {key!r}: shapes {list(mine.shape[1:])} and "
            f"{list(theirs.shape[1:])}."
        )
    n = mine.shape[0]
    _, which = torch.unique(torch.cat([mine, theirs]), dim=0, return_inverse=True)
    return torch.isin(which[:n], which[n:])


def _values(td: Any, key: NestedKey) -> Tensor:
    entry = write.fetch(td, path_of(key))
    if entry is None:
        raise write.missing(td, path_of(key))
    if not isinstance(entry, Tensor):
        raise EntryTypeError(
            f"Cannot compare {key!r}: expected a tensor, got a {type(entry).__name__}."
        )
    return entry


def _batch_dim(td: Any, dim: int) -> int:
    n = len(td._batch_size)
    if not -n <= dim < n:
        raise EntryTypeError(
            f"The specified dimension '{dim}' is invalid for a TensorDict with batch size "
            f"'{td._batch_size}'."
        )
    return dim % n


# --- shapes --------------------------------------------------------------------------------------


def expand_right(tensor: Any, shape: Any) -> Any:
    """A tensor (or tensordict) of shape ``[*S]`` expanded on the right to ``[*S, *R]``.

    Raises:
        RuntimeError: ``shape`` does not start with the tensor's.

    >>> expand_right(torch.zeros(3), (3, 4)).shape
    torch.Size([3, 4])
    """
    size = as_size(shape, "shape")
    missing = len(size) - tensor.ndim
    if missing < 0:
        raise DimError(
            f"Cannot expand {list(tensor.shape)} on the right to {list(size)}: expected at least as "
            f"many dimensions as the tensor has."
        )
    for _ in range(missing):
        tensor = tensor.unsqueeze(-1)
    return tensor.expand(size)


def expand_as_right(tensor: Any, dest: Any) -> Any:
    """A tensor (or tensordict) expanded on the right to the shape of another.

    Raises:
        RuntimeError: the shape of ``dest`` does not start with the tensor's.

    >>> expand_as_right(torch.zeros(3), torch.zeros(3, 4)).shape
    torch.Size([3, 4])
    """
    if dest.ndim < tensor.ndim:
        raise DimError(
            f"expand_as_right requires the destination tensor to have at least as many dimensions as "
            f"the input tensor, got tensor.ndimension()={tensor.ndim} and "
            f"dest.ndimension()={dest.ndim}"
        )
    if dest.shape[: tensor.ndim] != tensor.shape:
        raise DimError(
            f"expand_as_right requires the shape of dest to start with that of tensor, got "
            f"{list(dest.shape)} and {list(tensor.shape)}."
        )
    return expand_right(tensor, dest.shape)


@implements(torch.clone)
def _clone(td: Any, *, memory_format: torch.memory_format | None = None) -> Any:
    if memory_format in (None, torch.preserve_format):
        return td.clone()
    return td._map(lambda x: x.clone(memory_format=memory_format))


@implements(torch.clamp_max_)
def _clamp_max_(td: Any, max: Any) -> Any:
    return td.clamp_max_(max)


@implements(torch.clamp_min_)
def _clamp_min_(td: Any, min: Any) -> Any:
    return td.clamp_min_(min)


# --- dtypes --------------------------------------------------------------------------------------


def _dtypes(args: Sequence[Any]) -> list[torch.dtype]:
    out: list[torch.dtype] = []
    for arg in args:
        if isinstance(arg, torch.dtype):
            out.append(arg)
        elif isinstance(arg, Tensor):
            out.append(arg.dtype)
        elif isinstance(arg, Node):
            out += [x.dtype for x in leaves(arg)]
        else:
            raise EntryTypeError(
                f"Cannot test the dtype of a {type(arg).__name__}: expected tensors, tensordicts or "
                f"dtypes."
            )
    return out


def is_bool(*args: Any) -> bool:
    """Whether every leaf of the tensors, tensordicts and dtypes given is boolean.

    >>> is_bool(torch.tensor(True), torch.bool), is_bool(torch.tensor(1))
    (True, False)
    """
    return all(dtype is torch.bool for dtype in _dtypes(args))


def is_floating(*args: Any) -> bool:
    """Whether every leaf is of a real floating dtype."""
    return all(dtype.is_floating_point for dtype in _dtypes(args))


def is_inexact(*args: Any) -> bool:
    """Whether every leaf is of a real or complex floating dtype."""
    return all(dtype.is_floating_point or dtype.is_complex for dtype in _dtypes(args))


def is_integer(*args: Any) -> bool:
    """Whether every leaf is of an integer dtype (bool is none)."""
    return all(
        not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)
        for dtype in _dtypes(args)
    )
