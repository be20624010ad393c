"""Methods that give the batch another shape, the context managers among them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Size, Tensor

from .._keys import short
from ..core import traverse
from ..core.node import Node
from ..core.sizes import as_int, as_size, infer, shape_args, wrap_dim, wrap_dims
from ..core.structural import StructuralOp
from ..core.torch_function import as_methods, implements
from ..core.undo import itself, remember
from ..errors import BatchSizeError, DimError, LockedError, ShapeError
from .shape import (
    Broadcast,
    Expand,
    Flatten,
    Permute,
    Reshape,
    Squeeze,
    Transpose,
    Unflatten,
    Unsqueeze,
    View,
)
from .update import restore

if TYPE_CHECKING:
    from typing_extensions import Self


class ReshapingMethods(Node):
    """View, reshape, permute, squeeze, expand and their kin."""

    __slots__ = ()

    # --- another shape -------------------------------------------------------------

    def view(self, *shape: Any, size: Any = None, batch_size: Any = None) -> Self:
        """The same memory under another batch shape; context manager.

        Args:
            *shape: the sizes, one of which may be -1; or one dtype, as ``Tensor.view``.
            size, batch_size: the shape by keyword.

        Returns:
            A tensordict over views of the leaves; self when the shape is its own.

        Raises:
            RuntimeError: another number of elements, a dtype whose size changes a batch
                dimension, or leaves that need a copy
                (use `reshape`).

        >>> from tensordict import TensorDict
        >>> TensorDict({"a": torch.zeros(2, 3, 4)}, [2, 3]).view(-1)["a"].shape
        torch.Size([6, 4])
        """
        if len(shape) == 1 and type(shape[0]) is torch.dtype:
            dtype = shape[0]
            return _batch_kept(self._map(lambda x: x.view(dtype)), dtype)
        wanted = _wanted(self, shape, size if size is not None else batch_size, "view")
        if wanted == self._batch_size:
            return itself(self)
        return _undoable(self, View(wanted, len(self._batch_size)))

    def reshape(self, *args: Any, **kwargs: Any) -> Self:
        """Another batch shape: a view where the memory allows it, else a copy.

        Args:
            *args: the sizes, one of which may be -1 (or ``shape=`` / ``size=``).

        >>> from tensordict import TensorDict
        >>> TensorDict({"a": torch.zeros(2, 3)}, [2, 3]).reshape(3, -1).batch_size
        torch.Size([3, 2])
        """
        wanted = _wanted(self, args, _one_keyword(kwargs, "reshape"), "reshape")
        if wanted == self._batch_size:
            return itself(self)
        return self._restructure(Reshape(wanted, len(self._batch_size)))

    def flatten(
        self, start_dim: int | None = None, end_dim: int | None = None, *, inplace: bool = False
    ) -> Self:
        """The batch dimensions from ``start_dim`` to ``end_dim`` (all) merged; context manager.

        Args:
            start_dim, end_dim: first and last dimension to merge.
            inplace: make self the result.

        >>> from tensordict import TensorDict
        >>> TensorDict({"a": torch.zeros(2, 3, 4)}, [2, 3]).flatten()["a"].shape
        torch.Size([6, 4])
        """
        batch = self._batch_size
        if not batch and start_dim in (None, 0, -1) and end_dim in (None, 0, -1):
            return self._taken_over(Reshape(Size([1]), 0), inplace)
        start = wrap_dim(0 if start_dim is None else start_dim, len(batch), "start_dim")
        end = wrap_dim(-1 if end_dim is None else end_dim, len(batch), "end_dim")
        if end < start:
            raise DimError(
                f"Cannot flatten from dim {start} to dim {end}: expected start_dim <= end_dim."
            )
        return self._taken_over(Flatten(start, end, math.prod(batch[start : end + 1])), inplace)

    def unflatten(self, dim: int, unflattened_size: Any, *, inplace: bool = False) -> Self:
        """One batch dimension cut into several; context manager.

        Args:
            dim: the dimension.
            unflattened_size: sizes that multiply to it, one of which may be -1.
            inplace: make self the result.

        >>> from tensordict import TensorDict
        >>> TensorDict({"a": torch.zeros(6, 4)}, [6]).unflatten(0, (2, -1)).batch_size
        torch.Size([2, 3])
        """
        dim = wrap_dim(dim, len(self._batch_size))
        asked = as_size(unflattened_size, "unflattened_size")
        sizes = infer(asked, self._batch_size[dim], f"unflatten dim {dim}")
        return self._taken_over(Unflatten(dim, sizes), inplace)

    def _taken_over(self, op: StructuralOp, inplace: bool) -> Self:
        if not inplace:
            return _undoable(self, op)
        result = self._restructure(op)
        become(self, result)
        return self

    # --- dimensions of size 1 ---------------------------------------------------------

    def unsqueeze(self, *args: Any, **kwargs: Any) -> Self:
        """A batch dimension of size 1 before ``dim``; context manager.

        Raises:
            RuntimeError: ``dim`` is not in ``[-B-1, B]``.

        >>> from tensordict import TensorDict
        >>> TensorDict({"a": torch.zeros(2, 3)}, [2]).unsqueeze(-1).batch_size
        torch.Size([2, 1])
        """
        dim = as_int(_one_dim(args, kwargs, "unsqueeze"), "dim")
        n = len(self._batch_size) + 1
        if not -n <= dim < n:
            raise DimError(
                f"unsqueezing is allowed for dims in [{-n}, {n - 1}] (batch size "
                f"{list(self._batch_size)}), got {dim}."
            )
        return _undoable(self, Unsqueeze(dim % n))

    def squeeze(self, *args: Any, **kwargs: Any) -> Self:
        """Without the batch dimension ``dim`` if its size is 1, or (no ``dim``) without all such.

        Returns:
            Self when there is nothing to remove. With an explicit dim, a context manager.

        >>> from tensordict import TensorDict
        >>> td = TensorDict({"a": torch.zeros(1, 2, 1)}, [1, 2, 1])
        >>> td.squeeze().batch_size, td.squeeze(0).batch_size
        (torch.Size([2]), torch.Size([2, 1]))
        """
        batch = self._batch_size
        if not args and not kwargs:
            dims = tuple([i for i, n in enumerate(batch) if n == 1])
            if not dims:
                return itself(self)
            return remember(self._restructure(Squeeze(dims)), self, _no_way_back)
        dim = args[0] if len(args) == 1 and not kwargs else _one_dim(args, kwargs, "squeeze")
        if type(dim) is int:
            dim = wrap_dim(dim, len(batch))
            return _undoable(self, Squeeze((dim,))) if batch[dim] == 1 else itself(self)
        given = dim if isinstance(dim, (tuple, list)) else (dim,)
        dims = tuple([i for i in sorted(wrap_dims(given, len(batch))) if batch[i] == 1])
        if not dims:
            return itself(self)
        return _undoable(self, Squeeze(dims))

    # --- order of dimensions ----------------------------------------------------------

    def permute(self, *args: Any, **kwargs: Any) -> Self:
        """The batch dimensions in another order; context manager.

        Args:
            *args: every batch dimension once (or ``dims=``).

        Returns:
            A tensordict over views; self when the order is its own.

        >>> from tensordict import TensorDict
        >>> TensorDict({"a": torch.zeros(2, 3, 4)}, [2, 3]).permute(1, 0)["a"].shape
        torch.Size([3, 2, 4])
        """
        ndim = len(self._batch_size)
        given = _one_keyword(kwargs, "permute")
        if given is None:
            given = args[0] if len(args) == 1 and isinstance(args[0], Sequence) else args
        dims = wrap_dims(given, ndim, "permute: dims")
        if len(dims) != ndim:
            raise DimError(
                f"Cannot permute: expected each of the {ndim} batch dimensions once, got dims "
                f"{list(given)}."
            )
        moved = [i for i, dim in enumerate(dims) if i != dim]
        if not moved:
            return itself(self)
        return _undoable(self, Transpose(*moved) if len(moved) == 2 else Permute(dims))

    def transpose(self, dim0: int, dim1: int) -> Self:
        """Two batch dimensions swapped; context manager; self when they are the same.

        >>> from tensordict import TensorDict
        >>> TensorDict({"a": torch.zeros(2, 3, 4)}, [2, 3]).transpose(0, 1).batch_size
        torch.Size([3, 2])
        """
        ndim = len(self._batch_size)
        dim0, dim1 = wrap_dim(dim0, ndim, "dim0"), wrap_dim(dim1, ndim, "dim1")
        if dim0 == dim1:
            return itself(self)
        return _undoable(self, Transpose(dim0, dim1))

    def swapdims(self, axis0: int, axis1: int) -> Self:
        """As `transpose`."""
        return self.transpose(axis0, axis1)

    def swapaxes(self, axis0: int, axis1: int) -> Self:
        """As `transpose`."""
        return self.transpose(axis0, axis1)

    def movedim(self, source: Any, destination: Any) -> Self:
        """Batch dimensions moved to other places, the others keeping their order; context manager.

        >>> from tensordict import TensorDict
        >>> TensorDict({"a": torch.zeros(2, 3, 4)}, [2, 3, 4]).movedim(0, -1).batch_size
        torch.Size([3, 4, 2])
        """
        ndim = len(self._batch_size)
        src = wrap_dims(source if isinstance(source, Sequence) else (source,), ndim, "source")
        dst = wrap_dims(
            destination if isinstance(destination, Sequence) else (destination,),
            ndim,
            "destination",
        )
        if len(src) != len(dst):
            raise DimError(
                f"Cannot move dimensions: source {source} and destination {destination} differ in "
                f"length."
            )
        taken = dict(zip(dst, src))
        rest = iter([i for i in range(ndim) if i not in src])
        return self.permute([taken[i] if i in taken else next(rest) for i in range(ndim)])

    def moveaxis(self, source: Any, destination: Any) -> Self:
        """As `movedim`."""
        return self.movedim(source, destination)

    # --- repeated without a copy ------------------------------------------------------

    def expand(self, *args: Any, **kwargs: Any) -> Self:
        """The batch repeated along dimensions of size 1 and along new ones in front; no copy.

        Args:
            *args: the sizes (or ``size=`` / ``shape=``); -1 keeps one.

        Raises:
            RuntimeError: a size that is neither the present one nor an expansion of 1.

        >>> from tensordict import TensorDict
        >>> TensorDict({"a": torch.zeros(1, 4)}, [1]).expand(5, 3)["a"].shape
        torch.Size([5, 3, 4])
        """
        given = _one_keyword(kwargs, "expand")
        shape = as_size(given, "shape") if given is not None else shape_args(args, "shape")
        full = _expanded(self._batch_size, shape)
        return self._restructure(Expand(full, len(self._batch_size)))

    def expand_as(self, other: Any) -> Self:
        """`expand` to the batch shape of a tensordict or the shape of a tensor."""
        return self.expand(other.shape)

    def broadcast_to(self, shape: Any) -> Self:
        """As `expand`; the names of the batch dimensions are dropped."""
        full = _expanded(self._batch_size, as_size(shape, "shape"))
        return self._restructure(Broadcast(full, len(self._batch_size)))

    def atleast_1d(self) -> Self:
        """At least one batch dimension; self when there is one."""
        return _at_least(self, 1)

    def atleast_2d(self) -> Self:
        """At least two batch dimensions, new ones in front; self when there are two."""
        return _at_least(self, 2)

    def atleast_3d(self) -> Self:
        """At least three batch dimensions, new ones in front; self when there are three."""
        return _at_least(self, 3)


def _undoable(node: Any, op: StructuralOp) -> Any:
    """The result of an operation that a ``with`` block writes back through its inverse."""

    def write_back(source: Node, result: Node) -> None:
        back = result._restructure(op.inverse(source._batch_size))
        mine, theirs = traverse.holders(source), traverse.holders(back)
        if len(mine) != len(theirs):  # a stack came back as another one: by key
            mine, theirs = [source], [back]
        for node, changed in zip(mine, theirs):
            restore(node, traverse.changed_entries(node, changed))

    return remember(node._restructure(op), node, write_back)


def _no_way_back(source: Node, result: Node) -> None:
    raise ShapeError(
        "Cannot write the block back: squeeze() without a dim does not say which dimensions to "
        "restore. Pass dim."
    )


def become(node: Any, result: Any) -> None:
    """Give a node the entries and the batch size of a result of its own."""
    if node._lock is not None:
        raise LockedError
    for name, entry in list(result._items()):
        node._store(name, entry)
    node._batch_size = result._batch_size
    node._dim_names = result._dim_names


def _at_least(node: Any, ndim: int) -> Any:
    batch = node._batch_size
    missing = ndim - len(batch)
    if missing <= 0:
        return itself(node)
    return node._restructure(Expand(Size([1] * missing) + batch, len(batch)))


def _wanted(node: Node, shape: Sequence[Any], keyword: Any, what: str) -> Size:
    if shape == (-1,) and len(node._batch_size) == 1:
        return node._batch_size
    asked = as_size(keyword, "shape") if keyword is not None else shape_args(shape, "shape")
    batch = node._batch_size
    return asked if asked == batch else infer(asked, batch.numel(), what)


def _expanded(batch: Size, shape: Size) -> Size:
    new = len(shape) - len(batch)
    if new < 0:
        raise ShapeError(
            f"Incompatible expanded shape: the number of sizes provided ({len(shape)}) must be "
            f"greater or equal to the number of batch dimensions ({len(batch)})."
        )
    out = list(shape)
    for i, n in enumerate(out):
        old = batch[i - new] if i >= new else 1
        if n == -1 and i >= new:
            out[i] = old
        elif n < 0 or (n != old and old != 1):
            raise ShapeError(
                f"Incompatible expanded shape: cannot expand batch size {list(batch)} to "
                f"{list(shape)}. A dimension keeps its size (-1) unless it is 1."
            )
    return Size(out)


def _one_dim(args: Sequence[Any], kwargs: dict[str, Any], what: str) -> Any:
    given = [*args, *kwargs.values()]
    if len(given) != 1 or kwargs.keys() - {"dim"}:
        raise TypeError(f"{what}() takes one dim, got {len(args)} arguments and {sorted(kwargs)}.")
    return given[0]


def _one_keyword(kwargs: dict[str, Any], what: str) -> Any:
    if not kwargs:
        return None
    if len(kwargs) > 1 or kwargs.keys() - {"shape", "size", "dims"}:
        raise TypeError(f"{what}() got unexpected keyword arguments {sorted(kwargs)}.")
    return next(iter(kwargs.values()))


@implements(torch.atleast_1d)
def _atleast_1d(*nodes: Any) -> Any:
    return _each(nodes, 1)


@implements(torch.atleast_2d)
def _atleast_2d(*nodes: Any) -> Any:
    return _each(nodes, 2)


@implements(torch.atleast_3d)
def _atleast_3d(*nodes: Any) -> Any:
    return _each(nodes, 3)


def _each(nodes: Sequence[Any], ndim: int) -> Any:
    out = tuple([_at_least(node, ndim) for node in nodes])
    return out[0] if len(out) == 1 else out


as_methods(
    "broadcast_to",
    "flatten",
    "moveaxis",
    "movedim",
    "permute",
    "reshape",
    "squeeze",
    "swapaxes",
    "swapdims",
    "transpose",
    "unflatten",
    "unsqueeze",
)


def _batch_kept(out: Any, dtype: torch.dtype) -> Any:
    """``out``, seen as another dtype, unless that changed a batch dimension of it."""
    wrong = [
        (*path, name)
        for path, node in traverse.nodes_with_path(out)
        for name, entry in (node._items() if node._members() is None else ())
        if isinstance(entry, Tensor) and entry.shape[: len(node._batch_size)] != node._batch_size
    ]
    if wrong:
        raise BatchSizeError(
            f"Cannot view {', '.join(repr(short(path)) for path in wrong)} as {dtype}: the last "
            f"dimension, whose size changes, belongs to the batch. Use to({dtype}) to convert."
        )
    return out
