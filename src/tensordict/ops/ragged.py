"""Reading an entry whose rows may differ in shape: as a list, padded, or as a nested tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .._keys import short
from .._typing import Path
from ..core import write
from ..core.leaf import Leaf
from ..core.node import Node
from ..errors import EntryTypeError, ShapeError

Read: TypeAlias = Callable[[Node, Path], Any]


def rows(node: Any, path: Path, read: Read) -> tuple[list[Any] | None, int]:
    """The rows of an entry along the dimension of the stack that holds it, and that dimension.

    ``read(member, path)`` reads from members that are stacks themselves, or hold the entry
    in one.  ``None`` when the entry is missing in a row.
    """
    for i in range(len(path)):
        members = node._members()
        if members is not None:
            rest = path[i:]
            get = read if any(_through_stack(member, rest) for member in members) else write.fetch
            found = [get(member, rest) for member in members]
            return (None if any(e is None for e in found) else found), node.stack_dim
        if i == len(path) - 1:
            break
        below = node._fetch(path[i])
        if below is None:
            return None, 0
        if not isinstance(below, Node):
            raise write.not_a_node(path, i, below)
        node = below
    entry = node._fetch(path[-1])
    if entry is None:
        return None, 0
    if isinstance(entry, Node) and entry._members() is not None:
        return list(entry._members() or ()), entry.stack_dim  # type: ignore[attr-defined]
    if isinstance(entry, Tensor):
        return list(entry.unbind(0)) if entry.ndim else [entry], 0
    return [entry], 0


def _through_stack(node: Any, path: Path) -> bool:
    """Whether the way to an entry leads through a stack."""
    for name in path:
        if node._members() is not None:
            return True
        node = node._fetch(name)
        if not isinstance(node, Node):
            return False
    return False


def read_as(
    node: Any,
    path: Path,
    *,
    as_list: bool = False,
    as_padded_tensor: bool = False,
    as_nested_tensor: bool = False,
    padding_value: float = 0.0,
    padding_side: str = "right",
    layout: torch.layout | None = None,
) -> Any:
    """One entry in the form asked for, None when it is missing.

    Args:
        as_list: the rows, one per member of the stack.
        as_padded_tensor: one tensor of the largest size, filled with ``padding_value``.
        as_nested_tensor: a nested tensor of ``layout`` (``torch.jagged`` by default).

    Raises:
        ValueError: not exactly one form, or an entry that is no tensor in the last two.
    """
    if as_list + as_padded_tensor + as_nested_tensor != 1:
        raise EntryTypeError(
            "Cannot read the entry in several forms: pass one of as_list, as_padded_tensor, "
            "as_nested_tensor."
        )

    def read(member: Node, rest: Path) -> Any:
        return read_as(
            member,
            rest,
            as_list=as_list,
            as_padded_tensor=as_padded_tensor,
            as_nested_tensor=as_nested_tensor,
            padding_value=padding_value,
            padding_side=padding_side,
            layout=layout,
        )

    found, dim = rows(node, path, read)
    if found is None:
        return None
    if as_list:
        return [row._value() if isinstance(row, Leaf) else row for row in found]
    for row in found:
        if not isinstance(row, Tensor):
            raise EntryTypeError(
                f"Cannot read {short(path)!r} as one tensor: it holds a {type(row).__name__}."
            )
    if as_padded_tensor:
        return padded(found, dim, padding_value, padding_side, path)
    return nested(found, dim, layout, path)


def padded(
    found: list[Tensor], dim: int, value: float, side: str = "right", path: Path = ()
) -> Tensor:
    """Tensors of one rank stacked along ``dim``, each padded to the largest size of all.

    Raises:
        ShapeError: tensors of different rank.
    """
    if len({x.ndim for x in found}) > 1:
        raise ShapeError(
            f"Cannot pad {short(path)!r}: expected rows of one rank, got shapes "
            f"{[tuple(x.shape) for x in found]}."
        )
    shape = [max(sizes) for sizes in zip(*(x.shape for x in found))]
    dtype = found[0].dtype
    for x in found[1:]:
        dtype = torch.promote_types(dtype, x.dtype)
    out = torch.full((len(found), *shape), value, dtype=dtype, device=found[0].device)
    for i, x in enumerate(found):
        row = out[i]
        for k, n in enumerate(x.shape):
            row = row.narrow(k, 0 if side == "right" else shape[k] - n, n)
        row.copy_(x)
    return out.movedim(0, dim)


def nested(
    found: list[Tensor], dim: int, layout: torch.layout | None = None, path: Path = ()
) -> Tensor:
    """Tensors that differ in sizes as one nested tensor, along a first dimension.

    Raises:
        ShapeError: stacked along another dimension, or sizes that the layout cannot hold.
    """
    if dim:
        raise ShapeError(
            f"Cannot read {short(path)!r} as a nested tensor: it is stacked along dimension {dim}, "
            f"a nested tensor has its rows along dimension 0."
        )
    try:
        return torch.nested.as_nested_tensor(found, layout=layout or torch.jagged)
    except RuntimeError as err:
        raise ShapeError(
            f"Cannot read {short(path)!r} as a nested tensor of layout {layout or torch.jagged}: "
            f"the rows have shapes {[tuple(x.shape) for x in found]} ({err})."
        ) from None
