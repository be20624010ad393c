"""Stacking and concatenating trees that hold the same keys."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Size, Tensor

from .._keys import short
from .._typing import Path
from ..core.leaf import Leaf, join
from ..core.node import Entry, Node
from ..core.sizes import insert
from ..core.torch_function import implements
from ..errors import BatchSizeError, DimError, EntryTypeError, ShapeError, StructureError
from .update import fill_out


@implements(torch.stack)
def stack(input: Iterable[Any], dim: int = 0, *, out: Any = None) -> Any:
    """Tensordicts of one structure stacked along a new batch dimension.

    Args:
        input: tensordicts (or non-tensor values) of batch size ``[*B]``.
        dim: where the new dimension goes, in ``[-B-1, B]``.
        out: a tensordict of the result's batch size that is filled and returned.

    Raises:
        RuntimeError: nothing to stack, other batch sizes, keys or leaf shapes.

    >>> from tensordict import TensorDict
    >>> stack([TensorDict(a=0), TensorDict(a=1)])["a"]
    tensor([0, 1])
    """
    parts = list(input)
    if not parts:
        raise ShapeError("Cannot stack an empty list: expected one tensordict or more.")
    first = parts[0]
    if isinstance(first, Leaf):
        return join(parts, dim, new_dim=True)
    _all_nodes(parts, "stack")
    batch = first._batch_size
    for i, part in enumerate(parts):
        if part._batch_size != batch:
            raise BatchSizeError(
                f"stacking tensordicts requires them to have congruent batch sizes, got "
                f"td[0].batch_size={batch} and td[{i}].batch_size={part._batch_size}."
            )
    ndim = len(batch) + 1
    if not -ndim <= dim < ndim:
        raise DimError(f"Cannot stack along dim {dim}: expected a dim in [{-ndim}, {ndim - 1}].")
    result = first._stack(parts, dim % ndim)
    if out is None:
        return result
    fill_out(out, result)
    return out


@implements(torch.cat, torch.concat, torch.concatenate)
def cat(input: Iterable[Any], dim: int = 0, *, out: Any = None) -> Any:
    """Tensordicts of one structure concatenated along a batch dimension.

    Args:
        input: tensordicts (or non-tensor values) whose batch sizes differ in ``dim`` at most.
        dim: batch dimension to join.
        out: a tensordict of the result's batch size that is filled and returned.

    Raises:
        RuntimeError: nothing to join, no batch dimension, other sizes.
        KeyError: other keys.

    >>> from tensordict import TensorDict
    >>> cat([TensorDict({"a": torch.zeros(2)}, [2])] * 2).batch_size
    torch.Size([4])
    """
    parts = list(input)
    if not parts:
        raise ShapeError("Cannot concatenate an empty list: expected one tensordict or more.")
    first = parts[0]
    if isinstance(first, Leaf):
        return join(parts, dim, new_dim=False)
    _all_nodes(parts, "concatenate")
    ndim = len(first._batch_size)
    if not -ndim <= dim < ndim:
        raise DimError(
            f"dim must be in the range [{-ndim}, {ndim - 1}] (batch dimensions), got {dim}."
        )
    dim %= ndim
    batch = first._batch_size
    for i, part in enumerate(parts):
        other = part._batch_size
        if len(other) != ndim or other[:dim] != batch[:dim] or other[dim + 1 :] != batch[dim + 1 :]:
            raise BatchSizeError(
                f"Cannot concatenate along dim {dim}: expected batch sizes that differ only there, "
                f"got td[0].batch_size={batch} and td[{i}].batch_size={other}."
            )
    result = first._cat(parts, dim)
    if out is None:
        return result
    fill_out(out, result)
    return out


def stack_entries(nodes: Sequence[Any], dim: int, path: Path = ()) -> Any:
    """`stack` of nodes that are dicts of entries, after the checks; keys come out sorted."""
    first = nodes[0]
    names = _common_names(nodes, path, RuntimeError)
    entries: dict[str, Entry] = {}
    for name in sorted(names):
        column = [node._fetch(name) for node in nodes]
        here = (*path, name)
        head = column[0]
        if isinstance(head, Tensor):
            entries[name] = _stack_tensors(column, dim, here)
        elif isinstance(head, Node):
            entries[name] = _stack_nodes(column, dim, here)
        else:
            entries[name] = _join_leaves(column, dim, here, True)
    dim_names = _merged_names(nodes)
    if dim_names is not None:
        dim_names = [*dim_names[:dim], None, *dim_names[dim:]]
    return first._like(
        entries, insert(first._batch_size, dim, len(nodes)), dim_names, _some_device(nodes)
    )


def cat_entries(nodes: Sequence[Any], dim: int, path: Path = ()) -> Any:
    """`cat` of nodes that are dicts of entries, after the checks."""
    first = nodes[0]
    names = _common_names(nodes, path, KeyError)
    entries: dict[str, Entry] = {}
    for name in names:
        column = [node._fetch(name) for node in nodes]
        here = (*path, name)
        head = column[0]
        if isinstance(head, Tensor):
            _same_kind(column, here)
            entries[name] = torch.cat(column, dim)
        elif isinstance(head, Node):
            _same_kind(column, here)
            entries[name] = type(head)._cat(column, dim)
        else:
            entries[name] = _join_leaves(column, dim, here, False)
    size = list(first._batch_size)
    size[dim] = sum(node._batch_size[dim] for node in nodes)
    return first._like(entries, Size(size), _merged_names(nodes), _one_device(nodes))


def _all_nodes(parts: Sequence[Any], what: str) -> None:
    for part in parts:
        if not isinstance(part, Node):
            raise EntryTypeError(
                f"Cannot {what} a {type(parts[0]).__name__} and a {type(part).__name__}: expected "
                f"tensordicts only."
            )


def _common_names(nodes: Sequence[Any], path: Path, error: type) -> list[str]:
    first = list(nodes[0]._names())
    wanted = set(first)
    for node in nodes[1:]:
        names = node._names()
        if len(names) != len(first) or not wanted.issuperset(names):
            other = set(names)
            where = f" of {short(path)!r}" if path else ""
            text = (
                f"The tensordicts to join do not hold the same keys{where}: exclusive keys are "
                f"{sorted(wanted ^ other)}. Use lazy_stack, or select the common keys."
            )
            raise (StructureError if error is KeyError else ShapeError)(text)
    return first


def _stack_tensors(column: Sequence[Any], dim: int, path: Path) -> Tensor:
    try:
        return torch.stack(list(column), dim)
    except (RuntimeError, TypeError):
        _same_kind(column, path)
        shapes = [tuple(x.shape) for x in column]
        if len(set(shapes)) > 1:
            raise ShapeError(
                f"The shapes of the tensors to stack is incompatible: {shapes} for key "
                f"{short(path)}. Use lazy_stack or pad_sequence for entries of several shapes."
            ) from None
        raise


def _stack_nodes(column: Sequence[Any], dim: int, path: Path) -> Any:
    _same_kind(column, path)
    sizes = {node._batch_size for node in column}
    if len(sizes) > 1:
        raise BatchSizeError(
            f"stacking tensordicts requires them to have congruent batch sizes, got "
            f"{[tuple(node._batch_size) for node in column]} for key {short(path)}."
        )
    return type(column[0])._stack(column, dim)


def _join_leaves(column: Sequence[Any], dim: int, path: Path, new_dim: bool) -> Leaf:
    for x in column:
        if not isinstance(x, Leaf):
            raise ShapeError(
                f"Cannot join the entries {short(path)!r}: a {type(column[0]).__name__} and a "
                f"{type(x).__name__}."
            )
    return join(column, dim, new_dim=new_dim)


def _same_kind(column: Sequence[Any], path: Path) -> None:
    kind = Tensor if isinstance(column[0], Tensor) else Node
    for x in column:
        if not isinstance(x, kind):
            raise ShapeError(
                f"Cannot join the entries {short(path)!r}: a {type(column[0]).__name__} and a "
                f"{type(x).__name__}."
            )


def _merged_names(nodes: Sequence[Node]) -> Any:
    names = nodes[0]._dim_names
    if names is None:
        return None
    return names if all(node._dim_names == names for node in nodes) else None


def _some_device(nodes: Sequence[Node]) -> torch.device | None:
    devices = {node._device for node in nodes} - {None}
    return devices.pop() if len(devices) == 1 else None


def _one_device(nodes: Sequence[Node]) -> torch.device | None:
    device = nodes[0]._device
    return device if all(node._device == device for node in nodes) else None
