"""Stacking and concatenating trees that hold the same keys."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Any

import torch
from torch import Size, Tensor

from ..core import jagged
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
    return _result(parts, dim % ndim, torch.stack, out)


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
    sizes = [part._batch_size for part in parts]
    for i, other in enumerate(() if sizes.count(batch) == len(sizes) else sizes):
        if len(other) != ndim or other[:dim] != batch[:dim] or other[dim + 1 :] != batch[dim + 1 :]:
            raise BatchSizeError(
                f"Cannot concatenate along dim {dim}: expected batch sizes that differ only there, "
                f"got td[0].batch_size={batch} and td[{i}].batch_size={other}."
            )
    return _result(parts, dim, torch.cat, out)


def stack_entries(nodes: Sequence[Any], dim: int) -> Any:
    """`stack` of nodes that are dicts of entries, after the checks; keys come out sorted."""
    first = nodes[0]
    columns: dict[str, Any] = dict(_columns(nodes, ShapeError))
    entries = _tensors_joined(torch.stack, first, columns, dim)
    if entries is None:
        entries = {}
        for name, column in columns.items():
            head = column[0]
            if isinstance(head, Tensor):
                entries[name] = _joined(torch.stack, column, dim, name)
            elif isinstance(head, Node):
                entries[name] = _stack_nodes(column, dim, name)
            else:
                entries[name] = _join_leaves(column, dim, name, True)
    entries = {name: entries[name] for name in sorted(entries)}
    dim_names = _merged_names(nodes)
    if dim_names is not None:
        dim_names = [*dim_names[:dim], None, *dim_names[dim:]]
    return first._like(
        entries, insert(first._batch_size, dim, len(nodes)), dim_names, _some_device(nodes)
    )


def cat_entries(nodes: Sequence[Any], dim: int) -> Any:
    """`cat` of nodes that are dicts of entries, after the checks."""
    first = nodes[0]
    columns: dict[str, Any] = dict(_columns(nodes, StructureError))
    entries = _tensors_joined(torch.cat, first, columns, dim)
    if entries is None:
        entries = {}
        for name, column in columns.items():
            head = column[0]
            if isinstance(head, Tensor):
                entries[name] = _joined(torch.cat, column, dim, name)
            elif isinstance(head, Node):
                _same_kind(column, name)
                entries[name] = _inside(name, type(head)._cat, column, dim)
            else:
                entries[name] = _join_leaves(column, dim, name, False)
    size = list(first._batch_size)
    size[dim] = sum([node._batch_size[dim] for node in nodes])
    return first._like(entries, Size(size), _merged_names(nodes), _one_device(nodes))


def _result(parts: list[Any], dim: int, join: Any, out: Any) -> Any:
    first = parts[0]
    if out is not None:
        direct: list[tuple[Any, Tensor]] = []
        if _goes_into(parts, dim, join, out, direct):
            for column, target in direct:
                join(column, dim, out=target)
            return out
    result = first._stack(parts, dim) if join is torch.stack else first._cat(parts, dim)
    if out is None:
        return result
    fill_out(out, result)
    return out


def _goes_into(
    nodes: Sequence[Any], dim: int, join: Any, out: Any, direct: list[tuple[Any, Tensor]]
) -> bool:
    """Whether torch can write every result into ``out`` itself; (inputs, output) of each.

    Only what certainly succeeds: plain tensors of one dtype, and outputs of exactly the
    shape and dtype of the result.  Everything else is joined first and copied.
    """
    if not isinstance(out, Node) or any(node._members() is not None for node in (*nodes, out)):
        return False
    size = _joined_shape([node._batch_size for node in nodes], dim, join)
    if out._batch_size != size or out._names() != nodes[0]._names():
        return False
    last: tuple[Size, ...] | None = None  # columns of the same shapes follow each other often
    wanted: Size | None = None
    for name, column in _columns(nodes, StructureError):
        head, target = column[0], out._fetch(name)
        if type(head) is Tensor and type(target) is Tensor:
            shapes = _shapes(column, head, target)
            if shapes is None:
                return False
            if shapes != last:
                last, wanted = shapes, _joined_shape(shapes, dim, join)
            if target.shape != wanted:
                return False
            direct.append((column, target))
            continue
        nested = isinstance(head, Node) and all(isinstance(x, Node) for x in column)
        if not nested or not _goes_into(column, dim, join, target, direct):
            return False
    return True


def _shapes(column: Sequence[Any], head: Tensor, target: Tensor) -> tuple[Size, ...] | None:
    """The shapes of a column of plain tensors that take no gradient, all like ``target``."""
    dtype, device = target.dtype, target.device
    if target.requires_grad or head.is_nested:
        return None
    out = []
    for x in column:
        if type(x) is not Tensor or x.dtype is not dtype or x.requires_grad or x.device != device:
            return None
        out.append(x.shape)
    return tuple(out)


def _joined_shape(shapes: Sequence[Size], dim: int, join: Any) -> Size | None:
    """The shape of a stack or concatenation, None when the inputs do not fit."""
    first = shapes[0]
    if join is torch.stack:
        return insert(first, dim, len(shapes)) if all(s == first for s in shapes) else None
    if any(len(s) != len(first) or s[:dim] != first[:dim] for s in shapes):
        return None
    if any(s[dim + 1 :] != first[dim + 1 :] for s in shapes):
        return None
    return Size([*first[:dim], sum([s[dim] for s in shapes]), *first[dim + 1 :]])


def _all_nodes(parts: Sequence[Any], what: str) -> None:
    for part in parts:
        if not isinstance(part, Node):
            raise EntryTypeError(
                f"Cannot {what} a {type(parts[0]).__name__} and a {type(part).__name__}: expected "
                f"tensordicts only."
            )


def _columns(nodes: Sequence[Any], error: type[Exception]) -> Iterable[tuple[str, Any]]:
    """Each name with its entries in all nodes."""
    names = [list(node._names()) for node in nodes]
    if names.count(names[0]) == len(names):
        return zip(names[0], zip(*[node._contents() for node in nodes]))
    _check_names(nodes, error)
    return [(name, [node._fetch(name) for node in nodes]) for name in names[0]]


def _check_names(nodes: Sequence[Any], error: type[Exception]) -> None:
    wanted = set(nodes[0]._names())
    for node in nodes[1:]:
        exclusive = wanted.symmetric_difference(node._names())
        if exclusive:
            raise error(
                f"The tensordicts to join do not hold the same keys: exclusive keys are "
                f"{sorted(exclusive)}. Use lazy_stack, or select the common keys."
            )


def _tensors_joined(
    join: Any, first: Node, columns: dict[str, Any], dim: int
) -> dict[str, Entry] | None:
    """The entries of a result where ``first`` holds plain tensors only and torch joins them all.

    None otherwise: joined one after the other, an error can say of which name it is.
    """
    if first._flat_tensors() is None:
        return None
    try:
        return dict(zip(columns, map(join, columns.values(), repeat(dim))))
    except (RuntimeError, TypeError, IndexError) as err:
        if isinstance(err, torch.OutOfMemoryError):
            raise
        return None


def _joined(join: Any, column: Sequence[Any], dim: int, name: str) -> Tensor:
    """`torch.stack` or `torch.cat` of the entries of a name."""
    if column[0].is_nested and join is torch.cat:
        _same_kind(column, name)
        return jagged.joined(column)
    try:
        return join(column, dim)
    except (RuntimeError, TypeError, IndexError) as err:
        raise _not_joined(join, column, name, err) from None


def _not_joined(join: Any, column: Sequence[Any], name: str, err: Exception) -> Exception:
    """What to raise when torch cannot join the entries of a name."""
    if isinstance(err, torch.OutOfMemoryError):
        return err
    _same_kind(column, name)
    shapes = [tuple(x.shape) for x in column]
    if join is torch.stack and len(set(shapes)) > 1:
        return ShapeError(
            f"The shapes of the tensors to stack is incompatible: {shapes} for key "
            f"{name}. Use lazy_stack or pad_sequence for entries of several shapes."
        )
    return ShapeError(f"Cannot join the entries {name!r} of shapes {shapes}: {err}")


def _stack_nodes(column: Sequence[Any], dim: int, name: str) -> Any:
    _same_kind(column, name)
    sizes = {node._batch_size for node in column}
    if len(sizes) > 1:
        raise BatchSizeError(
            f"stacking tensordicts requires them to have congruent batch sizes, got "
            f"{[tuple(node._batch_size) for node in column]} for key {name}."
        )
    return _inside(name, type(column[0])._stack, column, dim)


def _inside(name: str, join: Any, column: Sequence[Any], dim: int) -> Any:
    """Join nested nodes; an error says where they are."""
    try:
        return join(column, dim)
    except (ShapeError, BatchSizeError, StructureError) as err:
        raise type(err)(f"In {name!r}: {err}") from None


def _join_leaves(column: Sequence[Any], dim: int, name: str, new_dim: bool) -> Leaf:
    for x in column:
        if not isinstance(x, Leaf):
            raise ShapeError(
                f"Cannot join the entries {name!r}: a {type(column[0]).__name__} and a "
                f"{type(x).__name__}."
            )
    return join(column, dim, new_dim=new_dim)


def _same_kind(column: Sequence[Any], name: str) -> None:
    kind = Tensor if isinstance(column[0], Tensor) else Node
    for x in column:
        if not isinstance(x, kind):
            raise ShapeError(
                f"Cannot join the entries {name!r}: a {type(column[0]).__name__} and a "
                f"{type(x).__name__}."
            )


def _merged_names(nodes: Sequence[Node]) -> Any:
    names = nodes[0]._dim_names
    if names is None:
        return None
    return names if all(node._dim_names == names for node in nodes) else None


def _some_device(nodes: Sequence[Node]) -> torch.device | None:
    devices = {node._device for node in nodes}
    devices.discard(None)
    return devices.pop() if len(devices) == 1 else None


def _one_device(nodes: Sequence[Node]) -> torch.device | None:
    device = nodes[0]._device
    return device if all(node._device == device for node in nodes) else None
