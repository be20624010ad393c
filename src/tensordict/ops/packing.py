"""All leaves of a tensordict as one tensor, and the way back."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Size, Tensor

from .._keys import short
from .._typing import NestedKey, Path
from ..core.leaf import Leaf
from ..core.node import Node
from ..core.registry import node_class
from ..core.structural import named
from ..core.traverse import entries_with_path, nodes_with_path
from ..errors import DimError, EntryTypeError, ShapeError, StructureError
from .dense_forms import densified

if TYPE_CHECKING:
    pass


@dataclass(frozen=True, slots=True)
class PackLayout:
    """Where each leaf lies in a packed tensor.

    Attributes:
        keys: the keys of the leaves, in order.
        shapes: their shapes without the batch dimensions.
        dim: the packed dimension, counted from the end (negative).
        nested: (path, further batch sizes, names of these) of nested tensordicts.
        device: device attribute of the tensordict.
        cls: class of the tensordict where it is a subclass of `TensorDict`.
    """

    keys: tuple[NestedKey, ...]
    shapes: tuple[Size, ...]
    dim: int
    nested: tuple[tuple[Path, Size, Any], ...] = ()
    device: torch.device | None = None
    cls: Any = None

    @property
    def offsets(self) -> tuple[int, ...]:
        """First position of each leaf along `dim`."""
        sizes = [0, *[math.prod(shape) for shape in self.shapes[:-1]]]
        return tuple(accumulate(sizes)) if self.shapes else ()

    @property
    def numel(self) -> int:
        """Size of the packed dimension."""
        return sum([math.prod(shape) for shape in self.shapes])

    def unpack(self, flat: Tensor) -> Any:
        """The tensordict whose leaves lie in ``flat``, as views where the memory allows it.

        Args:
            flat: ``[*B1, numel, *B2]``, packed along `dim`; the batch size may be another one
                than that of the tensordict that was packed.

        Raises:
            IndexError: ``flat`` has too few dimensions.
            ShapeError: (a ``RuntimeError``) another size along `dim`.

        >>> from tensordict import TensorDict
        >>> flat, layout = TensorDict({"a": torch.zeros(3, 2), "b": torch.ones(3)}, [3]).pack()
        >>> layout.unpack(flat[:2])["a"].shape
        torch.Size([2, 2])
        """
        if -self.dim > flat.ndim:
            raise DimError(
                f"dim {self.dim} is out of range for a tensor with {flat.ndim} dimensions."
            )
        if flat.shape[self.dim] != self.numel:
            raise ShapeError(
                f"Expected {self.numel} entries along dim {self.dim} of the packed tensor, got "
                f"{flat.shape[self.dim]}."
            )
        flat = flat.movedim(self.dim, -1)
        batch = flat.shape[:-1]
        parts = flat.split([math.prod(shape) for shape in self.shapes], -1) if self.keys else ()
        make = node_class("dense")
        out = (self.cls or make)._new({}, batch, None, self.device)
        empty: dict[Path, Any] = {}
        for path, tail, names in self.nested:
            given = None if names is None else named([*[None] * len(batch), *names])
            empty[path] = make._new({}, batch + tail, given, self.device)
        for key, shape, part in zip(self.keys, self.shapes, parts):
            _put(out, (key,) if isinstance(key, str) else key, part.reshape(batch + shape), empty)
        for path in list(empty):  # parents before children: those without leaves
            if path in empty:
                _put(out, path, empty.pop(path), empty)
        return out


class PackingMethods(Node):
    """pack."""

    __slots__ = ()

    def pack(self, dim: int = -1, *, layout: PackLayout | None = None) -> tuple[Tensor, PackLayout]:
        """One tensor of all leaves, and the layout whose ``unpack`` undoes it.

        Args:
            dim: where the packed dimension goes among the batch dimensions of the result.
            layout: keys and order to use, from an earlier call.

        Returns:
            A copy of shape ``[*B, numel]`` (the packed dimension at ``dim``), and the layout.

        Raises:
            TypeError: leaves of several dtypes, or a non-tensor entry.
            KeyError: other keys than those of ``layout``.

        >>> from tensordict import TensorDict
        >>> flat, layout = TensorDict({"a": torch.zeros(3, 2), "b": torch.ones(3)}, [3]).pack()
        >>> flat.shape, layout.keys, layout.unpack(flat)["b"]
        (torch.Size([3, 3]), ('a', 'b'), tensor([1., 1., 1.]))
        """
        ndim = len(self._batch_size)
        if not -ndim - 1 <= dim <= ndim:
            raise DimError(
                f"dim {dim} is out of range for packing a tensordict with {ndim} batch dimensions."
            )
        at = dim % (ndim + 1)
        node = densified(self) if _holds_stack(self) else self
        entries = list(entries_with_path(node))
        if layout is None:
            layout = _layout_of(node, entries, at - ndim - 1)
            columns: list[Any] = [x for _, x in entries]
        else:
            columns = _ordered(entries, layout, ndim)
        _one_dtype(layout, columns)
        batch = self._batch_size
        if not columns:
            return torch.empty([*batch[:at], 0, *batch[at:]]), layout
        flat = torch.cat(
            [
                x if len(shape) == 1 else x.reshape(*batch, math.prod(shape))
                for x, shape in zip(columns, layout.shapes)
            ],
            -1,
        )
        return (flat.movedim(-1, layout.dim) if layout.dim != -1 else flat), layout


def _holds_stack(node: Node) -> bool:
    if node._members() is not None:
        return True
    # Most trees have no nodes below: then there is nothing to walk.
    below = nodes_with_path(node) if node._children() else ()
    return any(part._members() is not None for _, part in below)


def _layout_of(node: Node, entries: list[tuple[Path, Any]], dim: int) -> PackLayout:
    n = len(node._batch_size)
    for path, x in entries:
        if isinstance(x, Leaf):
            raise EntryTypeError(
                f"Cannot pack the non-tensor entry {short(path)!r}. Drop the non-tensor entries with "
                f"filter_non_tensor_data() first."
            )
    nested = [
        (path, part._batch_size[n:], None if part._dim_names is None else part._dim_names[n:])
        for path, part in (nodes_with_path(node) if node._children() else ())
        if path
    ]
    return PackLayout(
        tuple([short(path) for path, _ in entries]),
        tuple([x.shape[n:] for _, x in entries]),
        dim,
        tuple(nested),
        node._device,
        _subclass(node),
    )


def _subclass(node: Node) -> Any:
    plain = node_class("dense")
    return type(node) if isinstance(node, plain) and type(node) is not plain else None


def _ordered(entries: list[tuple[Path, Any]], layout: PackLayout, n: int) -> list[Any]:
    """The leaves in the order of a layout, checked against it."""
    mine = {short(path): x for path, x in entries}
    if mine.keys() != set(layout.keys):
        raise StructureError(
            f"The leaves of the tensordict differ from the keys of the layout: {list(mine)} vs "
            f"{list(layout.keys)}."
        )
    for key, shape in zip(layout.keys, layout.shapes):
        x = mine[key]
        if not isinstance(x, Tensor) or x.shape[n:] != shape:
            raise ShapeError(
                f"Cannot pack {key!r}: expected a tensor of shape {list(shape)} after the batch, got "
                f"{list(x.shape[n:])}."
            )
    return [mine[key] for key in layout.keys]


def _one_dtype(layout: PackLayout, columns: list[Any]) -> None:
    for key, x in zip(layout.keys, columns):
        if x.dtype is not columns[0].dtype:
            raise EntryTypeError(
                f"Cannot pack leaves of different dtypes: {columns[0].dtype} and {x.dtype} at "
                f"{key!r}. Cast the tensordict first, e.g. with float()."
            )


def _put(node: Node, path: Path, entry: Any, empty: dict[Path, Any]) -> None:
    """Store an entry, and the nodes on the way to it when it is the first below them."""
    for i, name in enumerate(path[:-1]):
        below = node._fetch(name)
        if below is None:
            below = empty.pop(path[: i + 1])
            node._store(name, below)
        assert isinstance(below, Node)
        node = below
    node._store(path[-1], entry)
