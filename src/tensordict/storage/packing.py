"""How the leaves of a tree become plain tensors in one buffer, and leaves again.

Most leaves are one part.  A jagged nested tensor is its values and offsets, a sparse tensor its
indices and values, a DTensor its local shard.  Tied parts lie in the buffer once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Buffer, Parameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .._keys import short
from .._typing import Path
from ..errors import EntryTypeError, table_of
from .buffer import HOST_ALIGNMENT, BufferLayout, layout_of, views, why_not_bytes
from .ties import ties_of

# How a leaf is made of its parts: the name of a function below, and its arguments.
Recipe = tuple[str, Any]


@dataclass(frozen=True, slots=True)
class Packing:
    """Where the leaves of a tree lie in a buffer.

    Attributes:
        layout: of the parts that are stored.
        slots: for each part of each leaf, in order, its place in the layout; ``None`` when part
            i is simply at place i.
        joins: for each leaf that is not one plain part: its index, the number of its parts, and
            how it is made of them.
    """

    layout: BufferLayout
    slots: tuple[int, ...] | None = None
    joins: tuple[tuple[int, int, Recipe], ...] = ()

    def join(self, stored: list[Tensor]) -> list[Tensor]:
        """The leaves of the stored parts; tied leaves are one object."""
        parts = stored if self.slots is None else [stored[i] for i in self.slots]
        for index, count, (kind, detail) in self.joins:
            # Leaves before this one are joined already, so the index counts leaves.
            parts[index : index + count] = [_JOINS[kind](parts[index : index + count], detail)]
        return parts

    def leaves(self, buffer: Tensor) -> list[Tensor]:
        """The leaves as views of a buffer."""
        return self.join(views(buffer, self.layout))


def plan_packing(
    leaves: Sequence[Tensor],
    alignment: int = HOST_ALIGNMENT,
    paths: Callable[[], Sequence[Path]] | None = None,
) -> tuple[Packing, list[Tensor]]:
    """Decide where leaves go, and list the tensors to copy there, in the order of the layout.

    Args:
        leaves: tensors of any kind.
        alignment: of the parts in the buffer.
        paths: the paths of the leaves, for errors only.

    Raises:
        EntryTypeError: when leaves cannot be viewed as bytes; names each of them and why.
    """
    parts: list[Tensor] = []
    joins: list[tuple[int, int, Recipe]] = []
    bad: list[tuple[int, str]] = []
    for i, leaf in enumerate(leaves):
        if type(leaf) is Tensor and not why_not_bytes(leaf):
            parts.append(leaf)
            continue
        pieces, recipe = split_leaf(leaf)
        for piece in pieces:
            why = why_not_bytes(piece) or _why_not_plain(piece)
            if why:
                bad.append((i, why))
        if recipe is not None:
            joins.append((i, len(pieces), recipe))
        parts.extend(pieces)
    if bad:
        names = list(range(len(leaves))) if paths is None else [short(p) for p in paths()]
        raise EntryTypeError(
            table_of(
                f"Cannot put {len(bad)} of {len(leaves)} leaves into one buffer of bytes:",
                [(names[i], why) for i, why in bad],
            )
        )
    ties = ties_of(parts)
    if ties is None:
        return Packing(layout_of(parts, alignment), None, tuple(joins)), parts
    place = {i: k for k, i in enumerate(i for i in range(len(parts)) if i not in ties)}
    stored = [parts[i] for i in place]
    slots = tuple(place[ties.get(i, i)] for i in range(len(parts)))
    return Packing(layout_of(stored, alignment), slots, tuple(joins)), stored


def _why_not_plain(x: Tensor) -> str:
    if type(x) in (Tensor, Parameter, Buffer) or not is_traceable_wrapper_subclass(x):
        return ""
    return f"a {type(x).__name__}, which keeps its elements in a form of its own"


def split_leaf(x: Tensor) -> tuple[tuple[Tensor, ...], Recipe | None]:
    """The plain tensors that a leaf is made of, and how (None: the leaf is the one part)."""
    if x.layout is torch.jagged:
        return _split_jagged(x)
    if x.layout is torch.sparse_coo:
        return (x._indices(), x._values()), ("sparse_coo", (tuple(x.shape), x.is_coalesced()))
    module = sys.modules.get("torch.distributed.tensor")
    # A DTensor exists only where its module was imported; importing it here would cost 0.7 s.
    if module is not None and isinstance(x, module.DTensor):
        detail = (x.device_mesh, x.placements, tuple(x.shape), x.stride())
        return (x.to_local(),), ("dtensor", detail)
    return (x,), None


def _split_jagged(x: Any) -> tuple[tuple[Tensor, ...], Recipe]:
    lengths = x.lengths()
    parts = (x.values(), x.offsets()) if lengths is None else (x.values(), x.offsets(), lengths)
    # torch keeps a bound that it knows as the size of an empty tensor.
    known = {key: x._metadata_cache.get(key) for key in ("min_seqlen", "max_seqlen")}
    bounds = {key: int(value.shape[0]) for key, value in known.items() if value is not None}
    return parts, ("jagged", {"jagged_dim": x._ragged_idx, **bounds})


def _join_jagged(parts: Sequence[Tensor], detail: dict[str, int]) -> Tensor:
    values, offsets, *lengths = parts
    return torch.nested.nested_tensor_from_jagged(
        values, offsets, lengths[0] if lengths else None, **detail
    )


def _join_sparse_coo(parts: Sequence[Tensor], detail: tuple[Any, bool]) -> Tensor:
    shape, coalesced = detail
    return torch.sparse_coo_tensor(
        parts[0], parts[1], shape, is_coalesced=coalesced, check_invariants=False
    )


def _join_dtensor(parts: Sequence[Tensor], detail: tuple[Any, ...]) -> Tensor:
    from torch.distributed.tensor import DTensor

    mesh, placements, shape, stride = detail
    return DTensor.from_local(
        parts[0], mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


_JOINS: dict[str, Callable[[Sequence[Tensor], Any], Tensor]] = {
    "jagged": _join_jagged,
    "sparse_coo": _join_sparse_coo,
    "dtensor": _join_dtensor,
}
