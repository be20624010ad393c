"""The one checked write: a user's value becomes an entry that fits its node.

Checks live here, at the user's door; results of our own operations go straight to
``Node._store``.  A write converts and checks everything before it changes anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Size, Tensor

from .._keys import short
from .._options import option
from .._typing import Path
from ..errors import (
    BatchSizeError,
    EntryTypeError,
    LockedError,
    MissingKeyError,
    NotANodeError,
    ShapeError,
)
from .leaf import Leaf, NonTensorData, NonTensorStack
from .lock import touched
from .metadata import with_names
from .node import Entry, Node
from .traverse import map_entries, nodes_with_path

_NUMBERS = (bool, int, float)
_NUMERIC_KINDS = "biufc"


def entry_of(node: Node, value: Any, path: Path, non_blocking: bool = False) -> Entry:
    """The entry that ``value`` becomes when written to ``node``: checked, moved, converted.

    Args:
        node: the node written to; it is not changed.
        value: tensor, node, number, array, mapping, list or any other object.
        path: where it goes, for errors.
        non_blocking: passed to the copy when the node's device moves the value.

    Raises:
        BatchSizeError: the shape does not start with the node's batch size.
    """
    if isinstance(value, Tensor):
        batch = node._batch_size
        if batch and value.shape[: len(batch)] != batch:
            raise BatchSizeError(_shape_message(batch, value.shape, path))
        device = node._device
        if device is not None and value.device != device:
            return value.to(device, non_blocking=non_blocking)
        return value
    if isinstance(value, Node):
        return _node_entry(node, value, path, non_blocking)
    if isinstance(value, Leaf):
        return value._with(_leaf_size(node, value, path), node._device)
    return _converted(node, value, path, non_blocking)


def resolve(node: Node, path: Path) -> tuple[Node, Path]:
    """The deepest existing node on the way to ``path``, and the names left from there.

    Raises:
        NotANodeError: the way leads through an entry that holds no entries.
    """
    for i, name in enumerate(path[:-1]):
        below = node._fetch(name)
        if below is None:
            return node, path[i:]
        if not isinstance(below, Node):
            raise not_a_node(path, i, below)
        node = below
    return node, path[-1:]


def assign(node: Node, path: Path, value: Any, non_blocking: bool = False) -> None:
    """Write ``value`` under ``path``, replacing what is there; makes the nodes between.

    Raises:
        LockedError: the node written to is locked.
    """
    whole = path
    if len(path) > 1:
        node, path = resolve(node, path)
    if node._lock is not None:
        raise LockedError
    name = path[0]
    # Nodes made on the way have the same batch size and device, so one check serves all.
    node._admit(name)
    entry = entry_of(node, value, whole, non_blocking)
    if len(path) == 1:
        node._store(name, entry)
    else:
        commit(node, path, entry)


def prepare(
    node: Node, path: Path, value: Any, non_blocking: bool = False, ignore_lock: bool = False
) -> tuple[Node, Path, Entry]:
    """What `assign` checks and converts, without the write: arguments for `commit`."""
    whole = path
    if len(path) > 1:
        node, path = resolve(node, path)
    if node._lock is not None and not ignore_lock:
        raise LockedError
    # Nodes made on the way have the same batch size and device, so one check serves all.
    node._admit(path[0])
    return node, path, entry_of(node, value, whole, non_blocking)


def commit(node: Node, path: Path, entry: Entry) -> None:
    """Store an entry that `prepare` checked."""
    if len(path) > 1:
        node, path = resolve(node, path)  # an earlier commit may have made part of the way
    for name in path[:-1]:
        child = node._child()
        node._store(name, child)
        node = child
    node._store(path[-1], entry)
    if node._lock is not None:
        touched(node)


def fetch(node: Node, path: Path) -> Entry | None:
    """The entry under ``path``, None when any part of the way is missing.

    Raises:
        NotANodeError: (a ``KeyError``) the way leads through a tensor.
    """
    entry: Entry = node
    for i, name in enumerate(path):
        if not isinstance(entry, Node):
            raise not_a_node(path, i - 1, entry)
        below = entry._fetch(name)
        if below is None:
            return None
        entry = below
    return entry


def require(node: Node, path: Path) -> Entry:
    """The entry under ``path``.

    Raises:
        MissingKeyError: (a ``KeyError``) when there is none.
    """
    entry = fetch(node, path)
    if entry is None:
        raise missing(node, path)
    return entry


def contains(node: Node, path: Path) -> bool:
    """Whether there is an entry under ``path``; reads none."""
    for name in path[:-1]:
        below = node._fetch(name)
        if not isinstance(below, Node):
            return False
        node = below
    return path[-1] in node._names()


def missing(node: Node, path: Path) -> MissingKeyError:
    """The error for a key that is not there, naming the keys that are."""
    if len(path) == 1:
        return MissingKeyError(
            f'key "{path[0]}" not found in TensorDict with keys {sorted(node._names())}'
            + _members_with(node, path[0])
        )
    parent = node
    for name in path[:-1]:
        below = parent._fetch(name)
        if not isinstance(below, Node):
            break
        parent = below
    return MissingKeyError(
        f"key {path!r} not found in TensorDict with keys {sorted(parent._names())} "
        f"at the last level that exists" + _members_with(parent, path[-1])
    )


def _members_with(node: Node, name: str) -> str:
    """What to add to the error for a key that only some members of a stack have."""
    members = node._members() or ()
    some = [i for i, member in enumerate(members) if name in member._names()]
    if not some:
        return ""
    return f". Only the members {some} of the lazy stack have it: read it from them (unbind())."


def not_a_node(path: Path, i: int, entry: Entry) -> NotANodeError:
    """The error for a nested key that leads through a leaf."""
    return NotANodeError(
        f"{short(path[: i + 1])!r} is a {type(entry).__name__}, not a tensordict, "
        f"so it has no entry {path[i + 1]!r}."
    )


def write_into(target: Tensor, value: Any, path: Path) -> Tensor:
    """Check that ``value`` can be copied into ``target`` (broadcast, cast); the tensor to copy.

    Raises:
        ShapeError: (a ``RuntimeError``) when the shape does not fit.
        EntryTypeError: (a ``ValueError``) when it holds no numbers.
    """
    value = as_values(value, target, path)
    if value.shape != target.shape:
        try:
            value = value.expand(target.shape)
        except RuntimeError:
            raise ShapeError(
                f"Failed to update {short(path)!r} in tensordict: the value of shape "
                f"{list(value.shape)} does not fit the entry of shape {list(target.shape)}. "
                f"Use set() to replace the entry."
            ) from None
    return value


def as_values(value: Any, target: Tensor, path: Path) -> Tensor:
    """The tensor that a value is, to be written into ``target``.

    Raises:
        EntryTypeError: (a ``ValueError``) it holds no numbers.
    """
    if isinstance(value, Tensor):
        return value
    try:
        if not isinstance(value, (Node, Leaf)):
            return torch.as_tensor(value, device=target.device)
    except (TypeError, ValueError, RuntimeError):
        pass  # as `_sequence_entry`: no numbers, or not of one shape
    raise EntryTypeError(
        f"Cannot write into the tensor {short(path)!r}: expected a tensor, an array or numbers, got a "
        f"{type(value).__name__}. Use set() to replace the entry."
    )


def _node_entry(node: Node, value: Node, path: Path, non_blocking: bool) -> Node:
    batch = node._batch_size
    mine = value._batch_size
    if mine[: len(batch)] != batch:
        if len(mine) >= len(batch) or batch[: len(mine)] != mine:
            raise BatchSizeError(
                f"Cannot set {short(path)!r} in a TensorDict of batch size {list(batch)}: expected a "
                f"tensordict whose batch size starts with it, got batch size {list(mine)}. "
                f"Expand the value or change the batch size."
            )
        value = _resized(value, batch, path)
    if any(part is node for part in _subtree(value)):
        raise EntryTypeError(
            f"Cannot set {short(path)!r}: the tensordict would contain itself. Store a copy()."
        )
    if node._dim_names is not None:
        value = with_names(value, node._dim_names, path)
    device = node._device
    if device is not None and value._device != device:
        value = on_device(value, device, non_blocking)
    return value


def _subtree(node: Node) -> list[Node]:
    out = [node]
    for part in out:
        out.extend(part._children())
    return out


def _resized(node: Any, batch: Size, path: Path) -> Node:
    """A copy of the containers with a longer batch size, checked against every leaf."""
    members = node._members()
    if members is not None:
        dim = node.stack_dim
        inner = batch[:dim] + batch[dim + 1 :]
        resized: Node = node._regroup(
            [_resized(member, inner, (*path, str(i))) for i, member in enumerate(members)]
        )
        return resized
    out: dict[str, Entry] = {}
    for name, entry in node._items():
        here = (*path, name)
        if isinstance(entry, Tensor):
            if entry.shape[: len(batch)] != batch:
                raise BatchSizeError(
                    f"the Tensor {short(here)!r} has shape {entry.shape} which is incompatible with "
                    f"the batch-size {batch}. Expand the value or change the batch size."
                )
            out[name] = entry
        elif isinstance(entry, Node):
            short_batch = len(entry._batch_size) < len(batch)
            if not short_batch and entry._batch_size[: len(batch)] != batch:
                raise BatchSizeError(
                    f"the nested tensordict {short(here)!r} has batch size {entry._batch_size} which "
                    f"is incompatible with the batch-size {batch}."
                )
            out[name] = _resized(entry, batch, here) if short_batch else entry
        else:
            out[name] = entry._with(batch, entry._device)
    return node._like(out, batch, None)


def on_device(node: Node, device: torch.device | None, non_blocking: bool = False) -> Node:
    """A copy of the containers with another device attribute, leaves moved when it is not None."""

    def moved(_: Path, entry: Tensor | Leaf) -> Entry:
        if not isinstance(entry, Tensor):
            return entry._with(entry._batch_size, device)
        if device is None or entry.device == device:
            return entry
        return entry.to(device, non_blocking=non_blocking)

    out = map_entries(node, moved)
    for _, part in nodes_with_path(out):
        part._device = device
    return out


def _leaf_size(node: Node, leaf: Leaf, path: Path) -> Size:
    batch = node._batch_size
    mine = leaf._batch_size
    if mine[: len(batch)] == batch:
        return mine
    if isinstance(leaf, NonTensorData) and not mine:
        return batch  # a bare value stands for the whole batch
    if batch[: len(mine)] == mine:
        return batch
    raise BatchSizeError(_shape_message(batch, mine, path))


def _converted(node: Node, value: Any, path: Path, non_blocking: bool) -> Entry:
    if isinstance(value, _NUMBERS):
        if node._batch_size:
            raise BatchSizeError(
                _shape_message(node._batch_size, EMPTY_SHAPE, path)
                + f" A number has no batch: expand it (torch.full({list(node._batch_size)}, ...)) or "
                f"wrap it in NonTensorData."
            )
        return torch.tensor(value, device=node._device)
    if isinstance(value, Mapping):
        return _mapping_entry(node, value, path, non_blocking)
    if isinstance(value, (np.ndarray, np.generic)):
        if value.dtype.kind in _NUMERIC_KINDS:
            return entry_of(node, _from_numpy(value), path, non_blocking)
        return NonTensorData._new(value, node._batch_size, node._device)
    if isinstance(value, (list, tuple)):
        return _sequence_entry(node, value, path, non_blocking)
    return NonTensorData._new(value, node._batch_size, node._device)


EMPTY_SHAPE = Size([])


def _from_numpy(value: Any) -> Tensor:
    if isinstance(value, np.generic):
        return torch.as_tensor(value)
    strides_fit = all(s >= 0 and s % value.itemsize == 0 for s in value.strides)
    if not strides_fit or not value.dtype.isnative:
        value = value.astype(value.dtype.newbyteorder("="), copy=True, order="C")
    if not value.flags.writeable:
        value = value.copy()  # a tensor over it could write to it
    return torch.from_numpy(value)


def _mapping_entry(node: Node, value: Mapping[Any, Any], path: Path, non_blocking: bool) -> Node:
    child = node._child()
    fill(child, value, path, non_blocking)
    return child


def fill(
    node: Node, source: Mapping[Any, Any], path: Path = (), non_blocking: bool = False
) -> None:
    """Write every item of a mapping into a fresh node (left half-filled on an error)."""
    from .._keys import path_of

    for key, value in source.items():
        if type(key) is str:
            node._store(key, entry_of(node, value, (*path, key), non_blocking))
            continue
        below = path_of(key)
        target, rest = (node, below) if len(below) == 1 else resolve(node, below)
        commit(target, rest, entry_of(target, value, (*path, *below), non_blocking))


def _sequence_entry(node: Node, value: Any, path: Path, non_blocking: bool) -> Entry:
    flat = _flat(value)
    for kind, called in ((Tensor, "tensors"), (Node, "tensordicts")):
        if flat and all(isinstance(x, kind) for x in flat) and isinstance(value[0], kind):
            try:
                stacked = torch.stack(list(value))
            except (RuntimeError, KeyError) as err:
                raise ShapeError(
                    f"Cannot set {short(path)!r} to a list of {called} that do not stack: {err}. "
                    f"Wrap the list in NonTensorData to keep it as it is."
                ) from None
            return entry_of(node, stacked, path, non_blocking)
    if all(isinstance(x, (*_NUMBERS, np.number, np.bool_, complex)) for x in flat):
        try:
            return entry_of(node, torch.tensor(value), path, non_blocking)
        except (ValueError, TypeError, RuntimeError) as err:
            if isinstance(err, BatchSizeError):
                raise
            # ragged numbers: not a tensor
    if isinstance(value, list) and option("list_to_stack"):
        values = [x._data if type(x) is NonTensorData else x for x in value]
        return _stack_entry(node, values, path)
    return NonTensorData._new(value, node._batch_size, node._device)


def _stack_entry(node: Node, value: list[Any], path: Path) -> Entry:
    batch = node._batch_size
    if not batch:
        return NonTensorStack.from_list(value, 1, node._device)
    try:
        stack = NonTensorStack.from_list(value, len(batch), node._device)
    except ShapeError:
        stack = NonTensorStack.from_list(value, 1, node._device)
    return stack._with(_leaf_size(node, stack, path), node._device)


def _flat(value: Any) -> list[Any]:
    out: list[Any] = []
    for x in value:
        if isinstance(x, (list, tuple)):
            out.extend(_flat(x))
        else:
            out.append(x)
    return out


def _shape_message(batch: Size, shape: Any, path: Path) -> str:
    key = short(path) if path else "the source"
    return (
        f"batch dimension mismatch, got self.batch_size={batch} and value.shape={shape} for key "
        f"{key!r}. Expected leading dimensions {list(batch)}: expand the value or change the batch size."
    )
