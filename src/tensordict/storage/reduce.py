"""Pickling, copying and handing trees to other processes.

A tree is described by flat columns: one row per node (class, header, names, and for each name
what it holds) and one list of leaves.  What becomes of the leaves depends on who pickles:

* ``pickle``: plain host leaves are packed into one buffer of bytes (out of band with protocol
  5), never one storage per leaf;
* ``torch.save`` (protocol 2): the leaves are tensors, so that sharing with the rest of a
  checkpoint and ``map_location`` work; loadable with ``weights_only=True``;
* ``torch.multiprocessing``: the leaves are tensors, sent as handles of shared memory.

A consolidated tree is one buffer and its layout in all three.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Size, Tensor

from ..core import lock as locking
from ..core.leaf import Leaf, NonTensorData, NonTensorStack
from ..core.node import Entry, Node
from ..core.registry import leaf_class
from ..core.traverse import nodes_with_path, parts
from ..errors import FileFormatError
from .buffer import layout_from, pack, why_not_bytes
from .consolidate import buffer_of, over_buffer, packing_of
from .packing import Packing, plan_packing
from .shared import is_shared, share_memory_

# One node: class, header, locked, and what each name holds: a leaf's index, -1 - the index of a
# node, or a leaf that is no tensor.
Row = tuple[type, dict[str, Any], bool, dict[str, Any]]


def describe(node: Node) -> tuple[list[Row], list[Tensor]]:
    """The rows of a tree, the root first, and its leaves."""
    nodes = list(nodes_with_path(node))
    index = {path: i for i, (path, _) in enumerate(nodes)}
    rows: list[Row] = []
    tensors: list[Tensor] = []
    for path, part in nodes:
        holds: dict[str, Any] = {}
        for name, entry in parts(part):
            if isinstance(entry, Tensor):
                holds[name] = len(tensors)
                tensors.append(entry)
            elif isinstance(entry, Node):
                child = (*path, name)
                holds[name] = -1 - index[child]
            else:
                holds[name] = _leaf_row(entry)
        rows.append((type(part), part._header(), part._lock is not None, holds))
    return rows, tensors


def rebuild(rows: Sequence[Row], tensors: Sequence[Tensor]) -> Any:
    """The tree that `describe` described, over other leaves, with no node locked.

    Raises:
        FileFormatError: when the rows describe no tree.
    """
    built: list[Node] = []
    for cls, header, _, holds in reversed(rows):
        if not (isinstance(cls, type) and issubclass(cls, Node)):
            raise FileFormatError(f"Cannot rebuild a tensordict: {cls!r} is not a class of nodes.")
        entries: dict[str, Entry] = {}
        for name, held in holds.items():
            if type(held) is not int:
                entries[name] = _leaf_of(held)
            elif held >= 0:
                entries[name] = tensors[held]
            else:
                # Nodes are built last to first, so a child stands before its parent.
                entries[name] = built[len(rows) + held]
        built.append(cls._from_header(header, entries))
    return built[-1]


def _leaf_row(entry: Leaf) -> Any:
    """A leaf as plain values where its kind is ours, which `weights_only` loading accepts."""
    if not isinstance(entry, (NonTensorData, NonTensorStack)):
        return entry
    device = None if entry.device is None else str(entry.device)
    value = entry._value() if isinstance(entry, NonTensorData) else entry._rows().ravel().tolist()
    return (entry.kind, list(entry.batch_size), device, value)


def _leaf_of(row: Any) -> Leaf:
    if isinstance(row, Leaf):
        return row
    kind, size, device, value = row
    cls = leaf_class(kind)
    device = None if device is None else torch.device(device)
    if not issubclass(cls, NonTensorStack):
        single: Leaf = cls._new(value, Size(size), device)
        return single
    values = np.empty(len(value), dtype=object)
    values[:] = value
    stack: Leaf = cls._new(values.reshape(size), device)
    return stack


def lock_as(node: Node, rows: Sequence[Row]) -> None:
    """Lock the nodes of a rebuilt tree that were locked."""
    for (_, part), (_, _, locked, _) in zip(nodes_with_path(node), rows):
        if locked:
            locking.lock(part)


# --- pickle ------------------------------------------------------------------------------


def reduce_tree(node: Node, protocol: int) -> tuple[Any, ...]:
    """What pickle needs to make a tree again; see the module."""
    rows, tensors = describe(node)
    as_bytes = protocol >= 3
    buffer = buffer_of(node)
    shared = is_shared(node)
    if buffer is not None:
        packing = packing_of(node)
        data = _bytes_of(buffer, protocol) if as_bytes and buffer.device.type == "cpu" else buffer
        return restore_consolidated, (rows, _columns_of(packing), data, shared)
    if not as_bytes:
        return restore, (rows, tensors, shared)
    packed = [i for i, x in enumerate(tensors) if _packable(x)]
    if not packed:
        return restore, (rows, tensors, shared)
    packing, pieces = plan_packing([tensors[i] for i in packed])
    data = _bytes_of(pack(pieces, packing.layout), protocol)
    left = set(packed)
    rest = [None if i in left else x for i, x in enumerate(tensors)]
    return restore_packed, (rows, _columns_of(packing), data, rest, shared)


def _packable(x: Tensor) -> bool:
    return (
        type(x) is Tensor
        and x.device.type == "cpu"
        and not x.requires_grad
        and not why_not_bytes(x)
    )


def reduce_for_process(node: Node) -> tuple[Any, ...]:
    """What `torch.multiprocessing` needs: tensors, which it sends as handles."""
    rows, tensors = describe(node)
    buffer = buffer_of(node)
    if buffer is not None:
        columns = _columns_of(packing_of(node))
        return restore_consolidated, (rows, columns, buffer, is_shared(node))
    return restore, (rows, tensors, is_shared(node))


def restore(rows: Sequence[Row], tensors: Sequence[Tensor], shared: bool) -> Node:
    """A tree from rows and leaves."""
    node: Node = rebuild(rows, tensors)
    if shared:
        return share_memory_(node)
    lock_as(node, rows)
    return node


def restore_packed(
    rows: Sequence[Row], columns: Any, data: Any, rest: list[Tensor | None], shared: bool
) -> Node:
    """A tree from rows, the bytes of its plain leaves, and its other leaves."""
    packed = iter(_packing_of_columns(columns).leaves(_tensor_of(data)))
    return restore(rows, [next(packed) if x is None else x for x in rest], shared)


def restore_consolidated(rows: Sequence[Row], columns: Any, data: Any, shared: bool) -> Node:
    """A consolidated tree from rows and its buffer."""
    buffer = data if isinstance(data, Tensor) else _tensor_of(data)
    packing = _packing_of_columns(columns)
    node = over_buffer(rebuild(rows, packing.leaves(buffer)), packing, buffer)
    return share_memory_(node) if shared else node


def _columns_of(packing: Packing) -> tuple[Any, ...]:
    layout = packing.layout
    shapes = [tuple(shape) for shape in layout.shapes]
    return (list(layout.dtypes), shapes, layout.alignment, packing.slots, packing.joins)


def _packing_of_columns(columns: Any) -> Packing:
    dtypes, shapes, alignment, slots, joins = columns
    return Packing(layout_from(dtypes, shapes, alignment), slots, joins)


def _bytes_of(buffer: Tensor, protocol: int) -> Any:
    array: Any = buffer.numpy()
    return pickle.PickleBuffer(array) if protocol >= 5 else bytearray(array)


def _tensor_of(data: Any) -> Tensor:
    """A writable, aligned uint8 tensor over bytes; copies only when they are not both."""
    array = np.frombuffer(data, dtype=np.uint8)
    if not array.size:  # numpy may give it the stride 0, which torch views as no other dtype
        return torch.empty(0, dtype=torch.uint8)
    if not array.flags.writeable or array.ctypes.data % 16:
        array = array.copy()
    return torch.from_numpy(array)


# --- copy --------------------------------------------------------------------------------


def deep_copy(node: Node, memo: dict[int, Any]) -> Any:
    """An unlocked tree over copies of the leaves and values; tied leaves stay tied."""
    rows, tensors = describe(node)
    fresh = [(cls, header, False, copy.deepcopy(holds, memo)) for cls, header, _, holds in rows]
    out = rebuild(fresh, copy.deepcopy(tensors, memo))
    memo[id(node)] = out
    return out


torch.serialization.add_safe_globals([restore, restore_consolidated])
