"""The other side of a leaf-wise operation, matched to the leaves of a tensordict.

An operand is a number, a tensor or another tensordict:

* a number goes to every leaf;
* a tensor of shape ``[*B']`` broadcasts against the batch size ``[*B]``, whatever the
  feature dimensions of a leaf are; without batch dimensions it meets each leaf as torch
  would have it;
* a tensordict is matched by key; batch sizes that differ broadcast against each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Size, Tensor

from .._keys import path_of, short
from .._typing import Path
from ..core.node import Entry, Node
from ..core.traverse import (
    DESCEND,
    leaves,
    leaves_like,
    leaves_with_path,
    nodes_with_path,
    pairs_like,
    snapshot,
    spread,
    taken_apart,
    zip_map,
)
from ..core.write import commit, fetch
from ..errors import BatchSizeError, EntryTypeError, ShapeError, StructureError
from .keys import ChosenItemsView
from .shape import Expand

# A number, or one tensor for each leaf.
Number: TypeAlias = "int | float | bool | complex | torch.SymInt | torch.SymFloat"
Values: TypeAlias = "Number | list[Tensor]"
# What a user may pass.
Operand: TypeAlias = "Number | Tensor | Node | np.ndarray | np.generic"

NUMBERS = (int, float, bool, complex, torch.SymInt, torch.SymFloat)

# None outside of `torch.func` transforms: the foreach kernels have no batching rule.
transforms: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack


def grouped(xs: Sequence[Tensor]) -> bool:
    """Whether one foreach call pays for these leaves, and is allowed."""
    if len(xs) < 3 or transforms() is not None:
        return False
    kinds = {type(x) for x in xs}
    # A subclass would make all the results its own, or refuse the others.
    return len(kinds) == 1 or kinds <= _PLAIN


def groups(frame: Any, xs: Sequence[Tensor]) -> bool:
    """`grouped` for the tensors of ``taken_apart``, whose frame tells what is known of them."""
    if type(frame) is dict:
        return len(xs) > 2 and transforms() is None
    return grouped(xs)


def one_grad(*lists: Sequence[Tensor]) -> bool:
    """Whether a foreach call over these lists records gradients as single calls would.

    Where it records for one leaf it records for all: each result would require grad.
    """
    if not torch.is_grad_enabled():
        return True
    some = False
    for xs in lists:
        n = 0
        for x in xs:  # a loop: a generator costs twice as much
            if x.requires_grad:
                n += 1
        if n:
            if n == len(xs):
                return True
            some = True
    return not some


def run_grouped(
    each: Callable[..., Any],
    fn: Callable[..., Tensor],
    xs: Sequence[Tensor],
    *args: Any,
    **kwargs: Any,
) -> Sequence[Tensor]:
    """One foreach call; leaf by leaf where it would differ from single calls, or is refused.

    Args:
        each, fn: the operation on lists and on tensors.
        xs: the leaves.
        *args: numbers, or lists with one tensor for each leaf.
        **kwargs: keyword arguments of both.
    """
    try:
        out = each(xs, *args, **kwargs)
    except (RuntimeError, TypeError):  # a subclass or a dtype without the grouped form
        pass
    else:
        # Without a gradient recorded nothing can differ: the common case is one look at the results.
        if True not in [x.requires_grad for x in out] or one_grad(
            xs, *[a for a in args if type(a) is list]
        ):
            return out
    return [
        fn(x, *(a[i] if type(a) is list else a for a in args), **kwargs) for i, x in enumerate(xs)
    ]


def number_list(value: Any, xs: Sequence[Tensor]) -> list[Tensor] | None:
    """A number as one tensor without dimensions for each leaf; None where it has to stay a number.

    torch makes such a tensor in every call that gets a number, which costs more than the
    operation on a small leaf (on a large one its kernels for numbers are faster). The tensor is
    made here, once for each dtype, where it promotes and rounds as the number does: for single
    and double floats and int64 on the CPU.
    """
    kind = type(value)
    if (kind is not float and kind is not int) or not xs:
        return None
    if not xs[0].is_cpu or xs[0].numel() > _SMALL:
        return None
    if torch.compiler.is_compiling():
        return None
    if not set(map(type, xs)) <= _PLAIN:
        return None  # a subclass may refuse plain tensors beside its own
    try:
        dtypes = {x.dtype for x in xs}
        if len(dtypes) == 1:
            number = _number_like(value, kind, xs[0].dtype)
            return None if number is None else [number] * len(xs)
        made = {dtype: _number_like(value, kind, dtype) for dtype in dtypes}
    except (RuntimeError, OverflowError):  # too large for a dtype
        return None
    out = [made[x.dtype] for x in xs]
    return None if None in made.values() else out  # type: ignore[return-value]


def _number_like(value: Any, kind: type, dtype: torch.dtype) -> Tensor | None:
    if dtype is torch.int64 and kind is float:
        dtype = torch.get_default_dtype()
    if dtype not in _EXACT:
        return None
    # A tensor made in inference mode cannot be saved for a backward pass.
    key = (value, kind, dtype, torch.is_inference_mode_enabled())
    out = _numbers.get(key)
    if out is None:
        out = torch.scalar_tensor(value, dtype=dtype, device="cpu")
        # 0.0 and -0.0 are one key; a mode makes tensors of another class, a transform its own.
        plain = type(out) is Tensor and transforms() is None
        if plain and len(_numbers) < _MOST_NUMBERS and (value or kind is int):
            _numbers[key] = out
    return out


# The tensors of numbers that were used before: operands only, nobody writes into them.
_numbers: dict[Any, Tensor] = {}
_MOST_NUMBERS = 128


_SMALL = 2048
_PLAIN = {Tensor, torch.nn.Parameter}
# Dtypes in which torch computes with a number as it does with a tensor of the dtype.
_EXACT = frozenset({torch.float32, torch.float64, torch.int64})


def accepts(other: Any) -> bool:
    """Whether ``other`` can be an operand."""
    kind = type(other)
    if kind is int or kind is float or isinstance(other, Node):
        return True
    return isinstance(other, (*NUMBERS, Tensor, Node, np.ndarray, np.generic))


def refuse(name: str, other: Any) -> EntryTypeError:
    """The error for something that is no operand."""
    return EntryTypeError(
        f"Cannot {name} a tensordict and a {type(other).__name__}: expected a tensordict with the "
        f"same keys, a tensor or a number, got {other!r}."
    )


def pair(node: Any, other: Any, name: str) -> tuple[Any, Values]:
    """The operand in the order of the leaves, and the node (expanded if it broadcasts).

    Raises:
        StructureError: (a ``KeyError``) keys of two tensordicts differ.
        ShapeError: batch sizes do not broadcast.
        EntryTypeError: (a ``TypeError``) not an operand.
    """
    if isinstance(other, Node):
        if other._batch_size != node._batch_size:
            node, other = _broadcast(node, other, name)
        return node, leaves_like(node, other)
    if isinstance(other, NUMBERS):
        return node, other
    if isinstance(other, (np.ndarray, np.generic)):
        other = torch.as_tensor(other)
    if not isinstance(other, Tensor):
        raise refuse(name, other)
    batch = node._batch_size
    if other.ndim and batch:
        if other.shape != batch:
            size = _common(batch, other.shape, name)
            if size != batch:
                node = node._restructure(Expand(size, len(batch)))
            other = other.reshape((1,) * (len(size) - other.ndim) + other.shape)
        return node, spread(node, other)
    return node, [other] * len(leaves(node))


def at_hand(node: Node, frame: Any, other: Any) -> Any:
    """The operand in the order of a flat frame, where that needs no work; else None."""
    kind = type(other)
    if kind is int or kind is float:
        return other
    if isinstance(other, Node) and other._batch_size == node._batch_size:
        theirs = other._flat_tensors()
        if theirs is not None and list(theirs) == list(frame):
            return list(theirs.values())
    return None


def matched(node: Any, other: Any, name: str) -> tuple[Any, Any, list[Tensor], Any]:
    """A tree taken apart, and an operand in the order of its tensors.

    Returns:
        The node (expanded if it broadcasts), its frame and tensors (`taken_apart`), and the
        operand: a number, or one tensor for each of them.

    Raises:
        StructureError, ShapeError, EntryTypeError: as `pair`.
    """
    frame, xs = taken_apart(node)
    if type(frame) is not dict:
        node, values = pair(frame, other, name)
        return node, node, leaves(node), values
    values = at_hand(node, frame, other)
    if values is not None:
        return node, frame, xs, values
    if isinstance(other, Tensor) and other.ndim and other.shape == node._batch_size:
        shape, n = other.shape, other.ndim
        views = {rank: other.reshape(shape + (1,) * (rank - n)) for rank in {x.ndim for x in xs}}
        return node, frame, xs, [views[x.ndim] for x in xs]
    # From here on by way of a node, which no other thread can change.
    start = node._like(frame)
    node, values = pair(start, other, name)
    if node is start:
        return node, frame, xs, values
    return node, node, leaves(node), values


def inplace_pair(node: Node, other: Any, name: str) -> tuple[list[Tensor], Values]:
    """The leaves, which are going to be written, and the operand in their order."""
    if isinstance(other, Node) and other._batch_size == node._batch_size:
        xs, ys, _ = pairs_like(node, other)
        return xs, ys
    if isinstance(other, NUMBERS):
        return leaves(node), other
    node = snapshot(node)
    out, values = pair(node, other, name)
    if out is not node:
        raise BatchSizeError(
            f"Cannot {name} in place: the result would have batch size {list(out._batch_size)}, the "
            f"tensordict has {list(node._batch_size)}."
        )
    return leaves(node), values


def keeps_batch(node: Node, results: Sequence[Tensor]) -> None:
    """Refuse results that no longer start with the batch size.

    Leaves of unequal rank meet from the right, so that a feature dimension can meet a
    batch dimension of size 1; that needs two batch dimensions.
    """
    batch = node._batch_size
    n = len(batch)
    if n < 2 or 1 not in batch:
        return
    # The members of a stack have their own batch size.
    heads = {path: part._batch_size for path, part in nodes_with_path(node)}
    for (path, _), x in zip(leaves_with_path(node), results):
        head = heads[path[:-1]]
        if x.shape[: len(head)] != head:
            raise ShapeError(
                f"Cannot combine {short(path)!r}: broadcasting its two sides gives shape "
                f"{list(x.shape)}, which does not start with the batch size {list(head)}."
            )


def joined(node: Any, other: Any, fn: Callable[[Any, Any], Tensor], default: Any) -> Any:
    """A leaf-wise operation on two tensordicts that need not hold the same keys.

    Args:
        node: left side; its non-tensor entries are kept.
        other: right side.
        fn: the operation.
        default: ``"intersection"`` drops the leaves that only one side has; a number or a
            tensor stands for what is missing.
    """
    if isinstance(default, str) and default != "intersection":
        raise EntryTypeError(
            f"Cannot use {default!r} as default: expected 'intersection', a number or a tensor."
        )
    if other._batch_size != node._batch_size:
        node, other = _broadcast(node, other, "combine")
    keep = not isinstance(default, str)

    def visit(path: Path, entry: Entry, theirs: list[Entry | None]) -> Any:
        if not isinstance(entry, Tensor):
            return DESCEND if isinstance(entry, Node) else entry
        y = theirs[0]
        if isinstance(y, Tensor):
            return fn(entry, y)
        return fn(entry, _default(default, node, entry)) if keep else None

    def build(path: Path, part: Node, entries: dict[str, Entry]) -> Node | None:
        lost = path and not entries and len(part._names())
        return None if lost else part._like(entries)

    out = zip_map(node, (other,), visit, build)
    if keep:
        for key, y in ChosenItemsView(other, True, True, None, False):
            path = path_of(key)
            if isinstance(y, Tensor) and fetch(node, path) is None:
                commit(out, path, fn(_default(default, node, y), y))
    return out


def _default(default: Any, node: Node, like: Tensor) -> Tensor:
    value = torch.as_tensor(default, device=like.device)
    n = len(node._batch_size)
    if value.ndim and n:
        value = value.reshape(value.shape + (1,) * (like.ndim - n))
    return value


def same_keys(node: Node, other: Node) -> bool:
    """Whether two tensordicts hold tensors under the same keys."""
    try:
        leaves_like(node, other)
    except StructureError:
        return False
    return True


def _broadcast(node: Any, other: Any, name: str) -> tuple[Any, Any]:
    a, b = node._batch_size, other._batch_size
    size = _common(a, b, name)
    if size != a:
        node = node._restructure(Expand(size, len(a)))
    if size != b:
        other = other._restructure(Expand(size, len(b)))
    return node, other


def _common(a: Size, b: Size, name: str) -> Size:
    try:
        return torch.broadcast_shapes(a, b)
    except RuntimeError:
        raise ShapeError(
            f"Cannot {name}: batch size {list(a)} does not broadcast with {list(b)}. The operand is "
            f"matched to the batch dimensions."
        ) from None
