"""Reductions over batch dimensions, over feature dimensions, or of everything.

``dim`` of a reduction is one of:

* nothing: every leaf is reduced whole, the result has no batch dimensions;
* an int or a tuple of ints: batch dimensions; an empty tuple is no dim, as in torch;
* ``"feature"``: the dimensions of each leaf that are not batch dimensions.

With ``reduce=True`` the leaves are then reduced together, to one tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Size, Tensor

from ..core.node import Entry, Node
from ..core.sizes import EMPTY, insert, wrap_dim, wrap_dims
from ..core.structural import DimNames, StructuralOp, named
from ..core.torch_function import implements
from ..core.traverse import DESCEND, has_stack, leaves, snapshot, taken_apart, zip_map
from ..errors import EntryTypeError, ShapeError
from .operands import grouped, groups, run_grouped
from .shape import Expand
from .table import Reduction, Scan, defaults, extra

Dims: TypeAlias = "int | tuple[int, ...] | str | None"
flatten_dense_tensors = torch._utils._flatten_dense_tensors
# fn(x, dims, keepdim): one tensor reduced over dimensions counted from the front.
Fold: TypeAlias = Callable[[Tensor, tuple[int, ...], bool], Tensor]


class ReductionMethods(Node):
    """`all`, `any` and `norm`; the other reductions are made from the op table."""

    __slots__ = ()

    def all(self, dim: int | tuple[int, ...] | None = None, keepdim: bool = False) -> Any:
        """Whether every element of every leaf is true: a bool; with ``dim``, a tensordict.

        >>> from tensordict import TensorDict
        >>> (TensorDict(a=1, b=1) == 1).all()
        True
        """
        if dim is None:
            xs = leaves(self)
            joint = _in_one(xs)
            return all(bool(x.all()) for x in xs) if joint is None else bool(joint.all())
        _refuse_empty("all", dim)
        return reduced(self, lambda x, dims, keep: torch.all(x, dims, keep), dim, keepdim)

    def any(self, dim: int | tuple[int, ...] | None = None, keepdim: bool = False) -> Any:
        """Whether some element of some leaf is true: a bool; with ``dim``, a tensordict."""
        if dim is None:
            xs = leaves(self)
            joint = _in_one(xs)
            return any(bool(x.any()) for x in xs) if joint is None else bool(joint.any())
        _refuse_empty("any", dim)
        return reduced(self, lambda x, dims, keep: torch.any(x, dims, keep), dim, keepdim)

    def norm(
        self,
        *,
        p: float = 2,
        out: Any = None,
        dtype: torch.dtype | None = None,
        key_transform: Callable[[str], str] | None = None,
    ) -> Any:
        """The norm of each leaf, as a tensordict without batch dimensions.

        Args:
            p: order of the norm.
            out: tensordict to write the norms into, and to return.
            dtype: dtype to compute in.
            key_transform: new name for every name.

        >>> from tensordict import TensorDict
        >>> TensorDict(a=torch.tensor([3.0, 4.0])).norm()["a"]
        tensor(5.)
        """
        norm = torch.linalg.vector_norm
        frame, xs = taken_apart(self)
        if type(frame) is dict and groups(frame, xs):
            options = {} if dtype is None else {"dtype": dtype}
            norms = run_grouped(torch._foreach_norm, norm, xs, p, **options)
            result = self._like(dict(zip(frame, norms)), EMPTY, None)
            return _finished(result, key_transform, out)
        node: Any = self._like(frame) if type(frame) is dict else frame
        if has_stack(node):  # by key: the rows of an entry have one norm
            return _finished(
                reduced(node, lambda x, dims, keep: norm(x, p, dtype=dtype)), key_transform, out
            )
        if grouped(xs):
            norms = run_grouped(torch._foreach_norm, norm, xs, p, dtype=dtype)
        else:
            norms = [norm(x, p, dtype=dtype) for x in xs]
        return _finished(reduced_to(node, norms), key_transform, out)


def _in_one(xs: Sequence[Tensor]) -> Tensor | None:
    """The elements of small leaves as one tensor, to be looked at once; None where it does not pay.

    Looking costs a call for each tensor, and on an accelerator a wait.
    """
    if not grouped(xs) or sum(map(Tensor.numel, xs)) > _SMALL:
        return None
    if len({(x.dtype, x.device) for x in xs}) > 1 or xs[0].is_complex():
        return None
    return flatten_dense_tensors(xs)


_SMALL = 65536


class Reduce(StructuralOp):
    """Dimensions reduced.

    Attributes:
        fold: how to reduce one tensor.
        dims: batch dimensions, None for every dimension of every leaf.
        keepdim: whether reduced dimensions stay, of size 1.
        direct: the same on one tensor, for torch functions that read a number, or nothing,
            faster than a tuple of dimensions.
    """

    __slots__ = ("dims", "direct", "fold", "keepdim")

    keeps_lock = False
    moves_rows = False

    def __init__(
        self,
        fold: Fold,
        dims: tuple[int, ...] | None,
        keepdim: bool,
        direct: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.fold = fold
        self.dims = dims
        self.keepdim = keepdim
        self.direct = direct

    def size(self, batch: Size) -> Size:
        if self.dims is None:
            return Size([1] * len(batch)) if self.keepdim else EMPTY
        if self.keepdim:
            return Size([1 if i in self.dims else n for i, n in enumerate(batch)])
        return Size([n for i, n in enumerate(batch) if i not in self.dims])

    def names(self, names: DimNames) -> DimNames | None:
        if self.keepdim:
            return names
        if self.dims is None:
            return None
        left = [name for i, name in enumerate(names) if i not in self.dims]
        return named(left)

    def leaves(self, xs: list[Tensor]) -> Sequence[Tensor]:
        direct, fold, dims, keepdim = self.direct, self.fold, self.dims, self.keepdim
        if direct is not None:
            return [direct(x) for x in xs]
        if dims is None:
            return [fold(x, tuple(range(x.ndim)), keepdim) for x in xs]
        return [fold(x, dims, keepdim) for x in xs]

    def values(self, rows: np.ndarray) -> np.ndarray:
        """One list of values for each element of the result."""
        dims = range(rows.ndim) if self.dims is None else self.dims
        kept = [i for i in range(rows.ndim) if i not in dims]
        moved = rows.transpose([*kept, *dims])
        left = moved.shape[: len(kept)]
        out = np.empty(left, dtype=object)
        for i in np.ndindex(left):
            out[i] = moved[i].tolist()
        return out.reshape(tuple(self.size(Size(rows.shape))))


class Along(StructuralOp):
    """A function of one dimension that leaves the shape as it is.

    Attributes:
        fn: ``fn(tensor, dim)``.
        dim: the batch dimension.
    """

    __slots__ = ("dim", "fn")

    keeps_lock = False
    moves_rows = False

    def __init__(self, fn: Callable[[Tensor, int], Tensor], dim: int) -> None:
        self.fn = fn
        self.dim = dim

    def size(self, batch: Size) -> Size:
        return batch

    def names(self, names: DimNames) -> DimNames | None:
        return names

    def leaves(self, xs: list[Tensor]) -> Sequence[Tensor]:
        fn, dim = self.fn, self.dim
        return [fn(x, dim) for x in xs]

    def values(self, rows: np.ndarray) -> np.ndarray:
        """Values without an order stay."""
        return rows


def reduced(node: Any, fold: Fold, dim: Dims = None, keepdim: bool = False) -> Any:
    """A tree reduced over ``dim``, see the top of the module."""
    dim = _none_if_empty(dim)
    if dim == "feature":
        if keepdim:
            raise EntryTypeError("dim='feature' is incompatible with keepdim=True.")
        return _features(node, fold)
    return node._restructure(Reduce(fold, None if dim is None else _wrapped(dim, node), keepdim))


def reduced_to(node: Any, values: Iterable[Tensor], dim: Dims = None, keepdim: bool = False) -> Any:
    """As `reduced`, over tensors that the leaves were reduced to before, in their order.

    A fold cannot count the leaves: it is not called in their order.

    Args:
        node: without lazy stacks in it, which are reduced by key.
    """
    return reduced(node, lambda x, dims, keep: x, dim, keepdim)._rebuild(iter(values))


def _features(node: Node, fold: Fold) -> Any:
    def visit(path: Any, entry: Entry, theirs: Any) -> Any:
        return DESCEND if isinstance(entry, Node) else entry

    def build(path: Any, part: Node, entries: dict[str, Entry]) -> Node:
        n = len(part._batch_size)
        reduce = {k: _feature(x, n, fold) for k, x in entries.items() if isinstance(x, Tensor)}
        return part._like({**entries, **reduce})

    return zip_map(node, (), visit, build)


def _feature(x: Tensor, n: int, fold: Fold) -> Tensor:
    if x.ndim == n:
        x = x.unsqueeze(-1)
    return fold(x, tuple(range(n, x.ndim)), False)


def together(node: Any, fold: Fold, dim: Dims, keepdim: bool, name: str) -> Tensor:
    """The leaves reduced over ``dim`` and with each other, to one tensor."""
    dim = _none_if_empty(dim)
    if dim is not None and has_stack(node):
        node = node.to_tensordict()  # by key: dimensions are those of the entries
    xs = _some(node, name)
    if dim is None:
        return fold(_flat(xs), (0,), False)
    if dim == "feature":
        batch = node._batch_size
        n = len(batch)
        parts = [x.flatten(n) if x.ndim > n else x.unsqueeze(-1) for x in xs]
        return fold(torch.cat(parts, n), (n,), False)
    dims = _wrapped(dim, node)
    shapes = {x.shape[: dims[0]] + x.shape[dims[0] + 1 :] for x in xs}
    if len(shapes) > 1:
        raise ShapeError(
            f"Cannot {name}(dim={dim}, reduce=True): expected leaves of one shape, got "
            f"{sorted(list(x.shape) for x in xs)}. Use dim='feature' or no dim."
        )
    return fold(torch.cat(list(xs), dims[0]), dims, keepdim)


def _flat(xs: Sequence[Tensor]) -> Tensor:
    """The elements of leaves one after the other."""
    if grouped(xs) and len({x.dtype for x in xs}) == 1:
        return flatten_dense_tensors(xs)
    return torch.cat([x.reshape(-1) for x in xs])


def _some(node: Node, name: str) -> list[Tensor]:
    xs = leaves(node)
    if not xs:
        raise ShapeError(f"Cannot {name}(reduce=True): the tensordict has no tensor leaves.")
    return xs


def _refuse_empty(name: str, dim: Dims) -> None:
    """torch reduces nothing here, where its other reductions reduce everything."""
    if _none_if_empty(dim) is None:
        raise EntryTypeError(
            f"Cannot take {name}() over no dimension: expected a batch dimension or several, got "
            f"dim=(). Leave dim out to reduce everything."
        )


def _none_if_empty(dim: Dims) -> Dims:
    return None if isinstance(dim, (tuple, list)) and not dim else dim


def _wrapped(dim: Any, node: Node) -> tuple[int, ...]:
    ndim = len(node._batch_size)
    if isinstance(dim, int):
        return (wrap_dim(dim, ndim),)
    if isinstance(dim, (tuple, list)) and all(isinstance(d, int) for d in dim):
        return tuple(sorted(wrap_dims(dim, ndim)))
    raise EntryTypeError(
        f"Cannot reduce over {dim!r}: expected a batch dimension, a tuple of them, or 'feature'."
    )


def _finished(result: Any, key_transform: Callable[[str], str] | None, out: Any) -> Any:
    result = _renamed(result, key_transform)
    return result if out is None else out.copy_(result)


def _renamed(node: Any, key_transform: Callable[[str], str] | None) -> Any:
    if key_transform is None:
        return node

    def build(path: Any, part: Node, entries: dict[str, Entry]) -> Node:
        return part._like({key_transform(name): entry for name, entry in entries.items()})

    def visit(path: Any, entry: Entry, theirs: Any) -> Any:
        return DESCEND if isinstance(entry, Node) else entry

    return zip_map(node, (), visit, build)


# --- from the table -----------------------------------------------------------------------


def _one_dim(fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Fold:
    """A fold from a torch function that reduces one dimension only."""

    def fold(x: Tensor, dims: tuple[int, ...], keepdim: bool) -> Any:
        if len(dims) == 1:
            return fn(x, *args, dim=dims[0], keepdim=keepdim, **kwargs)
        rest = [i for i in range(x.ndim) if i not in dims]
        shape = [x.shape[i] for i in rest]
        flat = x.permute([*rest, *dims]).reshape([*shape, math.prod(x.shape[i] for i in dims)])
        out = fn(flat, *args, dim=-1, **kwargs)
        if not keepdim:
            return out
        if not isinstance(out, Tensor):  # values and indices
            return [_put_back(part, dims, part.ndim - len(rest)) for part in out]
        return _put_back(out, dims, out.ndim - len(rest))

    return fold


def _put_back(x: Tensor, dims: tuple[int, ...], leading: int) -> Tensor:
    for i in dims:
        x = x.unsqueeze(leading + i)
    return x


def _count_nonzero(x: Tensor, dims: tuple[int, ...], keepdim: bool) -> Tensor:
    return (x != 0).sum(dims, keepdim=keepdim)  # torch's own has no keepdim


def _folds(row: Reduction) -> Callable[..., Fold]:
    """What makes a fold of a row from the arguments of its torch function."""
    fn = getattr(torch, row.name)
    if row.name == "count_nonzero":
        return lambda *args, **kwargs: _count_nonzero
    if not row.dims:
        return lambda *args, **kwargs: _one_dim(fn, args, kwargs)
    return lambda **kwargs: lambda x, dims, keepdim: fn(x, dims, keepdim=keepdim, **kwargs)


def reduction(row: Reduction) -> dict[str, Callable[..., Any]]:
    """The method of a row, which is also the rule of its torch function."""
    if row.indices:
        method = _with_indices(row)
    elif row.first:
        method = _quantile(row)
    else:
        method = _plain(row)
    implements(getattr(torch, row.name))(method)
    return {row.name: method}


def _plain(row: Reduction) -> Callable[..., Any]:
    name, batch, folds = row.name, row.batch, _folds(row)
    fn = getattr(torch, name)

    def method(
        self: Any,
        dim: Dims = None,
        keepdim: bool = False,
        *,
        reduce: bool | None = None,
        key_transform: Callable[[str], str] | None = None,
        out: Any = None,
        **kwargs: Any,
    ) -> Any:
        if batch and dim is None:
            dim = tuple(range(len(self._batch_size)))
            if not dim:
                raise ShapeError(f"Cannot {name}: the tensordict has no batch dimension.")
        if reduce and dim is None and not kwargs:
            return fn(_flat(_some(self, name)))
        fold = folds(**kwargs)
        if reduce:
            return together(self, fold, dim, keepdim, name)
        if kwargs or keepdim or not (dim is None or type(dim) is int):
            result = reduced(self, fold, dim, keepdim)
        elif dim is None:
            result = self._restructure(Reduce(fold, None, False, fn))
        else:
            d = wrap_dim(dim, len(self._batch_size))
            result = self._restructure(Reduce(fold, (d,), False, lambda x: fn(x, d)))
        result = _renamed(result, key_transform)
        return result if out is None else out.copy_(result)

    return method


def _quantile(row: Reduction) -> Callable[..., Any]:
    name, folds = row.name, _folds(row)

    def method(
        self: Any,
        q: Any,
        dim: Dims = None,
        keepdim: bool = False,
        *,
        reduce: bool | None = None,
        key_transform: Callable[[str], str] | None = None,
        **kwargs: Any,
    ) -> Any:
        fold = folds(q, **kwargs)
        if reduce:
            return together(self, fold, dim, keepdim, name)
        result = reduced(self, fold, dim, keepdim)
        if isinstance(q, Tensor) and q.ndim and _none_if_empty(dim) is not None:
            result = _leading(result, q.shape[0])
        return _renamed(result, key_transform)

    return method


def _leading(node: Any, n: int) -> Any:
    """A tree whose leaves have a new first dimension, told to its batch size."""

    def visit(path: Any, entry: Entry, theirs: Any) -> Any:
        if isinstance(entry, Node):
            return DESCEND
        if isinstance(entry, Tensor):
            return entry
        size = entry._batch_size
        return entry._restructure(Expand(insert(size, 0, n), len(size)))

    def build(path: Any, part: Node, entries: dict[str, Entry]) -> Node:
        names = part._dim_names
        names = None if names is None else [None, *names]
        return part._like(entries, insert(part._batch_size, 0, n), names)

    return zip_map(node, (), visit, build)


def _with_indices(row: Reduction) -> Callable[..., Any]:
    name, folds = row.name, _folds(row)
    fn = getattr(torch, name)
    made = getattr(torch.return_types, name)

    def method(
        self: Any,
        dim: Dims = None,
        keepdim: bool = False,
        *,
        reduce: bool | None = None,
        return_indices: bool = True,
    ) -> Any:
        if _none_if_empty(dim) is None and not keepdim:
            if reduce:
                return fn(_flat(_some(self, name)))
            return reduced(self, lambda x, dims, keep: fn(x))
        fold = folds()
        if reduce:
            pair = together(self, fold, dim, keepdim, name)
            return made(tuple(pair)) if return_indices else pair[0]
        if not return_indices:
            return reduced(self, lambda x, dims, keep: fold(x, dims, keep)[0], dim, keepdim)
        if dim == "feature" or has_stack(self):
            # Leaves are not visited in the order in which the result holds them.
            first = reduced(self, lambda x, dims, keep: fold(x, dims, keep)[0], dim, keepdim)
            return made((first, reduced(self, lambda x, d, k: fold(x, d, k)[1], dim, keepdim)))
        node: Any = snapshot(self)
        xs = leaves(node)
        if type(dim) is int and not keepdim:
            d = wrap_dim(dim, len(node._batch_size))
            pairs = [fn(x, d) for x in xs]
        else:
            dims = None if dim is None else _wrapped(dim, node)
            pairs = [fold(x, tuple(range(x.ndim)) if dims is None else dims, keepdim) for x in xs]
        result = reduced_to(node, [pair[0] for pair in pairs], dim, keepdim)
        return made((result, result._rebuild(iter([pair[1] for pair in pairs]))))

    return method


def scan(row: Scan) -> dict[str, Callable[..., Any]]:
    """The method of a row, which is also the rule of its torch function."""
    fn = getattr(torch, row.name)
    params = defaults(row.params)
    if row.indices:
        method = _scan_with_indices(row)
    else:

        def method(self: Any, dim: int, *args: Any, **kwargs: Any) -> Any:
            d = wrap_dim(dim, len(self._batch_size))
            if not args and not kwargs:
                return self._restructure(Along(fn, d))
            given = extra(params, args, kwargs)
            return self._restructure(Along(lambda x, d: fn(x, d, **given), d))

    implements(fn)(method)
    return {row.name: method}


def _scan_with_indices(row: Scan) -> Callable[..., Any]:
    name = row.name
    fn = getattr(torch, name)
    made = getattr(torch.return_types, name)

    def method(
        self: Any, dim: int, *, reduce: bool | None = None, return_indices: bool = True
    ) -> Any:
        d = wrap_dim(dim, len(self._batch_size))
        if reduce:
            pair = together(self, lambda x, dims, keep: fn(x, dims[0]), d, False, name)
            return pair if return_indices else pair[0]
        if has_stack(self):  # its leaves do not have the dimension under this number
            values = self._restructure(Along(lambda x, d: fn(x, d)[0], d))
            if not return_indices:
                return values
            return made((values, self._restructure(Along(lambda x, d: fn(x, d)[1], d))))
        pairs = [fn(x, d) for x in leaves(self)]
        values = self._rebuild(iter([pair[0] for pair in pairs]))
        if not return_indices:
            return values
        return made((values, self._rebuild(iter([pair[1] for pair in pairs]))))

    return method


@implements(torch.norm, torch.linalg.vector_norm)
def _norm(
    input: Any,
    p: Any = 2,
    dim: Any = None,
    keepdim: bool = False,
    *,
    out: Any = None,
    dtype: torch.dtype | None = None,
) -> Any:
    if dim is not None or keepdim:
        raise EntryTypeError("Cannot take a norm over some dimensions: use td.apply().")
    return input.norm(p=2 if p == "fro" else p, out=out, dtype=dtype)


@implements(torch.nn.functional.softmax)
def _softmax(input: Any, dim: int, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> Any:
    return input.softmax(dim, dtype)


@implements(torch.nn.functional.log_softmax)
def _log_softmax(
    input: Any, dim: int, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> Any:
    return input.log_softmax(dim, dtype)


implements(torch.all)(ReductionMethods.all)
implements(torch.any)(ReductionMethods.any)
