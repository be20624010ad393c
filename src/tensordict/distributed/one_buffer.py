"""Where the parts of a schema lie in the buffer of a consolidated tree, so that it travels as it is.

The offsets follow from the dtypes, shapes, ties and alignment of the schema by the one rule of
`storage.buffer.BufferLayout`; they are never sent.  A tree whose leaves no longer lie where its
buffer has them (``leaf.data = other``) is packed like any other: `OneBuffer.holds` looks.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from ..core.lock import Origin, set_origin
from ..core.node import Node
from ..core.traverse import leaves
from ..storage.buffer import HOST_ALIGNMENT, BufferLayout, layout_from, views
from ..storage.consolidate import KIND, buffer_of, packing_of
from ..storage.packing import Packing as StoragePacking
from .schema import NODE, VALUE, Schema

_MAX_ALIGNMENT: Final = 1 << 16  # of a schema


@dataclass(frozen=True, slots=True)
class Cut:
    """How a buffer falls into the parts of one dtype.

    Attributes:
        dtype: what the buffer is viewed as.
        lengths: elements of each piece: parts, and what lies between them.
        pick: takes the parts out of the pieces.
        parts: their indices.
        shapes: of each; None when all have one dimension.
    """

    dtype: torch.dtype
    lengths: list[int]
    pick: Callable[[Any], Sequence[Tensor]]
    parts: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...] | None


@dataclass(slots=True, eq=False)
class OneBuffer:
    """The layout of a buffer, seen from the parts of a schema.

    Attributes:
        layout: of the parts that are not ties, in the order of the tree: depth first, each
            node where its key stands.
        order: all parts in that order.
        slots: for each of ``order`` its place in the layout; None when there are no ties.
        stored: the part at each place of the layout; of tied parts the one with the lowest number.
        offsets: the first byte of each part, -1 for one without elements.
    """

    layout: BufferLayout
    order: tuple[int, ...]
    slots: tuple[int, ...] | None
    stored: tuple[int, ...]
    offsets: tuple[int, ...]
    _cuts: list[Cut] | None = None
    _runs: list[tuple[torch.dtype, int, int]] | None = None

    @property
    def runs(self) -> list[tuple[torch.dtype, int, int]]:
        """The dtype, the first byte and the end of consecutive parts of one dtype."""
        if self._runs is None:
            self._runs = _runs_of(self.layout)
        return self._runs

    def addresses(self, buffer: Tensor) -> list[int]:
        """Where each part lies in a buffer; 0 for one without elements."""
        base = buffer.data_ptr()
        return [base + at if at >= 0 else 0 for at in self.offsets]

    def holds(self, parts: Sequence[Tensor], *, seen: bool) -> bool:
        """Whether parts that start where a buffer has them are what it has there.

        Their dtypes and shapes are those of the schema already.

        Args:
            parts: all of them.
            seen: whether they have been looked at before.  A leaf gets a negative bit without
                getting another address by torch's private functions only.
        """
        if False in map(Tensor.is_contiguous, parts):
            return False
        if not seen and True in map(Tensor.is_neg, parts):
            return False
        complex_ = any(dtype.is_complex for dtype in set(self.layout.dtypes))
        return not (complex_ and True in map(Tensor.is_conj, parts))

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return self.layout.total_nbytes

    def views(self, buffer: Tensor) -> tuple[Sequence[int], list[Tensor]]:
        """The parts that are not ties, and a view of a buffer for each."""
        return self.stored, views(buffer, self.layout)

    def take_apart(self, buffer: Tensor, parts: list[Any]) -> None:
        """Put tensors that share the memory of a fresh buffer in the places of ``parts``.

        They are not views of each other for autograd, as in `packing.take_apart`.
        """
        if self._cuts is None:
            self._cuts = _cuts_of(self.layout, self.stored)
        for cut in self._cuts:
            pieces = cut.pick(torch.unsafe_split_with_sizes(buffer.view(cut.dtype), cut.lengths))
            if cut.shapes is not None:
                pieces = [piece.view(shape) for piece, shape in zip(pieces, cut.shapes)]
            for i, piece in zip(cut.parts, pieces):
                parts[i] = piece


def plan_one_buffer(schema: Schema) -> OneBuffer:
    """The layout that the buffer of a consolidated tree of this schema has.

    Raises:
        EntryTypeError: a part of a dtype that cannot lie in a buffer.

    >>> from .describe import describe
    >>> from tensordict import TensorDict
    >>> td = TensorDict({"a": torch.zeros(3), "n": {"b": torch.zeros(2)}, "c": torch.zeros(1)})
    >>> plan = plan_one_buffer(describe(td).schema)  # parts: a, c, b
    >>> plan.order, plan.offsets, plan.nbytes
    ((0, 2, 1), (0, 128, 64), 192)
    """
    order = stored = tuple(_tree_order(schema))
    slots = None
    if schema.ties:
        place: dict[int, int] = {}
        slots = tuple(place.setdefault(schema.ties.get(i, i), len(place)) for i in order)
        stored = tuple(place)
    dtypes, shapes = schema.dtypes, schema.shapes
    layout = layout_from([dtypes[i] for i in stored], [shapes[i] for i in stored], schema.alignment)
    offsets = [-1] * len(order)
    for i, k in zip(order, range(len(order)) if slots is None else slots):
        if layout.nbytes[k]:
            offsets[i] = layout.offsets[k]
    return OneBuffer(layout, order, slots, stored, tuple(offsets))


def _tree_order(schema: Schema) -> list[int]:
    """The parts in the order of the tree; a schema numbers those of a node before those below."""
    if not any(NODE in letters for letters in schema.entries):
        return list(range(len(schema.dtypes)))
    rows = []
    wholes = iter(schema.composites)
    part = 0
    for letters in schema.entries:
        row: list[range | None] = []
        for letter in letters:
            if letter == NODE:
                row.append(None)
            elif letter != VALUE:
                n = 1 if letter == "t" else next(wholes).n
                row.append(range(part, part + n))
                part += n
        rows.append(iter(row))
    nodes = iter(rows)  # depth first is the order in which nodes are numbered
    coming, out = [next(nodes)], list[int]()
    while coming:
        for item in coming[-1]:
            if item is None:
                coming.append(next(nodes))
                break
            out += item
        else:
            coming.pop()
    return out


def _cuts_of(layout: BufferLayout, parts: Sequence[int]) -> list[Cut]:
    places: dict[torch.dtype, list[int]] = {}
    for k, dtype in enumerate(layout.dtypes):
        places.setdefault(dtype, []).append(k)
    out = []
    for dtype, ks in places.items():
        lengths, where, end, size = list[int](), list[int](), 0, dtype.itemsize
        for k in ks:
            gap = layout.offsets[k] - end
            if gap:
                lengths.append(gap // size)
            where.append(len(lengths))
            lengths.append(layout.nbytes[k] // size)
            end = layout.offsets[k] + layout.nbytes[k]
        lengths.append((layout.total_nbytes - end) // size)
        shapes = tuple(layout.shapes[k] for k in ks)
        flat = all(len(shape) == 1 for shape in shapes)
        indices = tuple(parts[k] for k in ks)
        out.append(Cut(dtype, lengths, _picker(where), indices, None if flat else shapes))
    return out


def _runs_of(layout: BufferLayout) -> list[tuple[torch.dtype, int, int]]:
    out: list[tuple[torch.dtype, int, int]] = []
    for dtype, offset, nbytes in zip(layout.dtypes, layout.offsets, layout.nbytes):
        if not nbytes:
            continue
        if out and out[-1][0] is dtype:
            out[-1] = dtype, out[-1][1], offset + nbytes
        else:
            out.append((dtype, offset, offset + nbytes))
    return out


def _picker(where: list[int]) -> Callable[[Any], Sequence[Tensor]]:
    first, step = where[0], where[1] - where[0] if len(where) > 1 else 1
    regular = slice(first, where[-1] + 1, step)
    if where == list(range(first, where[-1] + 1, step)):
        return operator.itemgetter(regular)
    return operator.itemgetter(*where)


def host_buffer_of(node: Node) -> Tensor | None:
    """The buffer of a consolidated tree, if it lies in host memory; None for anything else."""
    buffer = buffer_of(node) if isinstance(node, Node) else None
    if buffer is None or buffer.device.type != "cpu" or type(buffer) is not Tensor:
        return None
    plain = buffer.dtype is torch.uint8 and buffer.dim() == 1 and buffer.is_contiguous()
    return buffer if plain and packing_of(node).layout.alignment < _MAX_ALIGNMENT else None


def alignment_of(node: Node) -> int:
    """The alignment of the buffer of a consolidated tree; of one from a file, that of our files."""
    alignment = packing_of(node).layout.alignment
    return HOST_ALIGNMENT if alignment == 1 else alignment


def written(parts: Sequence[Tensor]) -> None:
    """Tell autograd that parts were written through their buffer."""
    torch.autograd.graph.increment_version(parts)


def left_buffer(node: Node) -> None:
    """Note that leaves of a node were replaced: no tree that holds it is what its buffer holds."""
    state = node._lock
    if state is None:
        return
    if buffer_of(node) is not None:
        state.origin = None
    for ref in state.parents:
        parent = ref()
        if parent is not None:
            left_buffer(parent)


def consolidated(node: Node, plan: OneBuffer, buffer: Tensor, parts: Sequence[Tensor]) -> bool:
    """Record that a new tree lies in one buffer; returns whether it does, leaf by leaf.

    Args:
        node: the tree, locked.
        plan: where its leaves lie.
        buffer: uint8 ``[plan.nbytes]``.
        parts: its leaves, in the order of the schema.
    """
    mine = leaves(node)
    meant = map(parts.__getitem__, plan.order)
    if len(mine) != len(parts) or not all(map(operator.is_, mine, meant)):
        return False  # a kind of node that collects its leaves in another order
    set_origin(node, Origin(KIND, buffer, StoragePacking(plan.layout, plan.slots)))
    return True
