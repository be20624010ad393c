"""The same content without lazy stacks, and without ragged entries."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._keys import path_of
from .._typing import NestedKey
from ..core import write
from ..core.node import Entry, Node
from ..core.registry import node_class
from ..core.traverse import refuse_exclusive
from ..errors import ShapeError
from .ragged import padded, read_as
from .shape import Pad


class DenseFormMethods(Node):
    """densify and to_padded_tensor."""

    __slots__ = ()

    def densify(self, layout: torch.layout = torch.strided) -> Any:
        """The same content without lazy stacks; ragged entries become nested tensors.

        Args:
            layout: layout of the nested tensors.

        >>> from tensordict import TensorDict, lazy_stack
        >>> rows = lazy_stack([TensorDict(a=torch.ones(n)) for n in (1, 2)])
        >>> [len(row) for row in rows.densify(layout=torch.jagged)["a"].unbind()]
        [1, 2]
        """
        return densified(self, layout)

    def to_padded_tensor(self, padding: float = 0.0, mask_key: NestedKey | None = None) -> Any:
        """The same content with ragged entries and nested tensors padded to the largest size.

        Args:
            padding: what fills up.
            mask_key: where to store booleans of the batch shape, true where a row is none of
                padding; only for a lazy stack whose members differ in batch size.

        Raises:
            RuntimeError: ``mask_key`` where no batch dimension is padded.

        >>> from tensordict import TensorDict, lazy_stack
        >>> rows = lazy_stack([TensorDict(a=torch.ones(n)) for n in (1, 2)])
        >>> rows.to_padded_tensor()["a"]
        tensor([[1., 0.],
                [1., 1.]])
        """
        ragged = -1 in self._batch_size
        if mask_key is not None and not ragged:
            raise ShapeError(
                "Cannot store a mask: mask_key should only be provided if a batch dimension is "
                f"ragged, got batch size {list(self._batch_size)}."
            )
        out = _padded(self, padding)
        if mask_key is not None:
            write.assign(out, path_of(mask_key), _mask(self))
        return out


def densified(node: Any, layout: torch.layout | None = None) -> Any:
    """A tree without lazy stacks; with a layout, ragged entries as nested tensors.

    Raises:
        ShapeError: an entry is ragged and there is no layout.
        StructureError: only some members of a stack hold some keys.
    """
    refuse_exclusive(node)
    entries: dict[str, Entry] = {}
    for name in node._names():
        try:
            entry = node._fetch(name)
        except ShapeError:
            if layout is None:
                raise
            entry = read_as(node, (name,), as_nested_tensor=True, layout=layout)
        entries[name] = densified(entry, layout) if isinstance(entry, Node) else entry
    return _dense_like(node, entries)


def _dense_like(node: Any, entries: dict[str, Entry]) -> Any:
    if node._members() is None:
        return node._like(entries)
    bare = node_class("dense")._new(entries, node._batch_size, node._dim_names, node._device)
    return node._dress(bare)


def _padded(node: Any, padding: float) -> Any:
    if -1 in node._batch_size:
        node = _even(node, padding)
    entries: dict[str, Entry] = {}
    for name in node._names():
        try:
            entry = node._fetch(name)
        except ShapeError:
            entry = read_as(node, (name,), as_padded_tensor=True, padding_value=padding)
        if isinstance(entry, Node):
            entry = _padded(entry, padding)
        elif isinstance(entry, Tensor) and entry.is_nested:
            entry = entry.to_padded_tensor(padding)
        entries[name] = entry
    return _dense_like(node, entries)


def _even(node: Any, padding: float) -> Any:
    """A stack whose members differ in batch size, with the members padded to the largest."""
    members = [_even(m, padding) if -1 in m._batch_size else m for m in node._members()]
    longest = [max(sizes) for sizes in zip(*[member._batch_size for member in members])]
    out = []
    for member in members:
        pads = tuple([(0, n - m) for n, m in zip(longest, member._batch_size)])
        out.append(member._restructure(Pad(pads, padding)))
    even = type(node)._stack(out, node.stack_dim)
    even._dim_names = node._dim_names
    return even


def _mask(node: Any) -> Tensor:
    members = node._members()
    if members is None:
        return torch.ones(node._batch_size, dtype=torch.bool)
    return padded([_mask(member) for member in members], node.stack_dim, False)
