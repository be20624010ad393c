"""Stacks that keep their members, and stacks that do so where they have to."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..core.leaf import Leaf, join
from ..core.node import Node
from ..core.registry import node_class
from ..core.sizes import wrap_dim
from ..errors import BatchSizeError, EntryTypeError, ShapeError
from .combine import stack

KIND = "lazy_stack"


def lazy_stack(input: Iterable[Any], dim: int = 0, *, out: Any = None, **kwargs: Any) -> Any:
    """Tensordicts stacked without copying them; shapes and keys may differ.

    Args:
        input: tensordicts, or typed views (tensorclasses) of one class, of batch size ``[*B]``.
        dim: where the new dimension goes, in ``[-B-1, B]``.
        out: a tensordict of the result's batch size that is filled and returned.
        **kwargs: further arguments of `LazyStackedTensorDict`.

    Raises:
        RuntimeError: nothing to stack.

    >>> import torch
    >>> from tensordict import TensorDict
    >>> lazy_stack([TensorDict(a=torch.zeros(n)) for n in (2, 3)]).batch_size
    torch.Size([2])
    """
    parts = list(input)
    first = parts[0] if parts else None
    if isinstance(first, Leaf):
        return join(parts, dim, new_dim=True)
    if isinstance(first, Node) and not kwargs and set(map(type, parts)) == {type(first)}:
        dim = wrap_dim(dim, len(first._batch_size) + 1, "stack_dim")
        if first._bare() is first:
            result: Any = node_class(KIND)._new(parts, dim)
        else:
            result = node_class(KIND)._new([part._bare() for part in parts], dim)
            result = first._dress(result)
    else:
        result = _stack_of_several(parts, dim, kwargs)
    return result if out is None else out.update_(result)


def _stack_of_several(parts: list[Any], dim: int, kwargs: dict[str, Any]) -> Any:
    views = {type(part) for part in parts if isinstance(part, Node) and part._bare() is not part}
    if (views and {type(part) for part in parts} != views) or len(views) > 1:
        raise EntryTypeError(
            f"Cannot stack different classes: got {sorted({type(part).__name__ for part in parts})}."
        )
    bare = [part._bare() if isinstance(part, Node) else part for part in parts]
    result = node_class(KIND)(*bare, stack_dim=dim, **kwargs)
    return parts[0]._dress(result)


def maybe_dense_stack(input: Iterable[Any], dim: int = 0, *, out: Any = None, **kwargs: Any) -> Any:
    """A dense stack when keys and shapes agree, else a lazy one.

    >>> import torch
    >>> from tensordict import TensorDict
    >>> type(maybe_dense_stack([TensorDict(a=torch.zeros(n)) for n in (2, 3)])).__name__
    'LazyStackedTensorDict'
    """
    parts = list(input)
    try:
        return stack(parts, dim, out=out)
    except (ShapeError, BatchSizeError):
        if not parts:
            raise
    return lazy_stack(parts, dim, out=out, **kwargs)
