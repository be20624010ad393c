"""Leaf-wise writes: every leaf or none.

What torch would refuse on a later leaf (a dtype, an autograd leaf, memory that overlaps
itself, a shape) is found before the first leaf is written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import repeat
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor

from .._keys import short
from ..core.node import Node
from ..core.traverse import leaves_with_path
from ..errors import ShapeError, table_of
from .operands import grouped, one_grad, transforms

_requires_grad = attrgetter("requires_grad")
_autograd: Any = torch._C._autograd


def write_each(
    node: Node,
    xs: Sequence[Tensor],
    fn: Callable[..., Any],
    each: Callable[..., Any] | None,
    operands: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
) -> None:
    """Run an in-place operation on leaves.

    Args:
        node: whose leaves they are, for errors.
        xs: the leaves.
        fn: the in-place operation of one tensor.
        each: its foreach form, None when there is none.
        operands: numbers, or lists with one tensor for each leaf.
        kwargs: keyword arguments of both forms.
    """
    kwargs = kwargs or {}
    lists = [o for o in operands if type(o) is list]
    alike = len(xs) > 2 and _alike(xs, lists)
    if len(xs) > 1 and not alike:
        for ys in lists:
            _check_shapes(node, xs, ys)
        if not _uniform(xs) or not all(map(_one_dtype, lists)):
            rehearse(xs, fn, operands, kwargs)
            if _half_differentiable(xs, lists):
                each = None
        elif not one_grad(*lists):
            each = None
    if each is not None and (transforms() is None if alike else grouped(xs)):
        try:
            each(xs, *operands, **kwargs)
            return
        except NotImplementedError:  # a subclass without the rule, before anything is written
            pass
    for i, x in enumerate(xs):
        fn(x, *(o[i] if type(o) is list else o for o in operands), **kwargs)


def _alike(xs: Sequence[Tensor], lists: Sequence[Sequence[Tensor]]) -> bool:
    """Whether what torch would refuse on a leaf, it would refuse on the first: the common trees.

    One pass over plain tensors of one dtype that record no gradients, operands in their shapes.
    """
    dtype = xs[0].dtype
    for x in xs:
        if (
            type(x) is not Tensor
            or x.dtype is not dtype
            or x.requires_grad
            or not x.is_contiguous()
        ):
            return False
    for ys in lists:
        first = ys[0]
        if first is ys[-1] and not first.ndim:  # a number, the same for every leaf
            if first.requires_grad or not all(map(is_, ys, repeat(first))):
                return False
            continue
        dtype = first.dtype
        for x, y in zip(xs, ys):
            if (
                type(y) is not Tensor
                or y.dtype is not dtype
                or y.shape != x.shape
                or y.requires_grad
            ):
                return False
    return True


def _half_differentiable(xs: Sequence[Tensor], lists: Sequence[Sequence[Tensor]]) -> bool:
    """Whether there may be integers beside leaves that require grad: foreach has no formula."""
    return any(x.requires_grad for part in (xs, *lists) for x in part)


def copy_each(targets: Sequence[Tensor], values: Sequence[Tensor], non_blocking: bool) -> None:
    """Copy each value into its target; every pair is known to fit in shape.

    Args:
        targets, values: tensors, in pairs.
        non_blocking: as of ``Tensor.copy_``.
    """
    recorded = torch.is_grad_enabled()
    # The foreach form has no derivative.
    together = grouped(targets) and not (recorded and True in map(_requires_grad, values))
    for x in targets:
        if (recorded and x.requires_grad) or not (x.is_contiguous() or not _overlaps(x)):
            if len(targets) > 1:
                rehearse(targets, Tensor.copy_, [list(values)])
            together = False
            break
    try_odd_copies(targets, values)
    if together:
        try:
            torch._foreach_copy_(targets, values, non_blocking)  # type: ignore[arg-type]
            return
        except RuntimeError:  # a subclass, or gradients, without a rule: before anything is written
            pass
    for target, value in zip(targets, values):
        target.copy_(value, non_blocking)


def try_odd_copies(targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy what torch may refuse to copy into memory somewhere else first.

    Raises:
        RuntimeError: torch refuses (sparse, quantized or meta values).
    """
    for x, y in zip(targets, values):
        if is_odd(y):
            torch.empty_like(x).copy_(y)


def is_odd(y: Tensor) -> bool:
    """Whether copying from a tensor may fail whatever its shape and dtype."""
    return y.layout is not torch.strided or y.is_meta or y.is_quantized


def _uniform(xs: Sequence[Tensor]) -> bool:
    dtype = xs[0].dtype
    for x in xs:
        if x.dtype is not dtype or x.requires_grad or not (x.is_contiguous() or not _overlaps(x)):
            return False
    return True


def _one_dtype(ys: Sequence[Tensor]) -> bool:
    return len({y.dtype for y in ys}) == 1


def _overlaps(x: Tensor) -> bool:
    return any(step == 0 and n > 1 for step, n in zip(x.stride(), x.shape))


def _check_shapes(node: Node, xs: Sequence[Tensor], ys: Sequence[Tensor]) -> None:
    for x, y in zip(xs, ys):
        if x.shape != y.shape and y.ndim and not _fits(y.shape, x.shape):
            break
    else:
        return
    rows = [
        (short(path), f"{list(y.shape)} does not broadcast to {list(x.shape)}")
        for (path, x), y in zip(leaves_with_path(node), ys)
        if not _fits(y.shape, x.shape)
    ]
    raise ShapeError(table_of(f"Cannot write in place: {len(rows)} leaves do not fit.", rows))


def _fits(small: Sequence[int], large: Sequence[int]) -> bool:
    if len(small) > len(large):
        return False
    return all(a == b or a == 1 for a, b in zip(reversed(small), reversed(large)))


def rehearse(
    xs: Sequence[Tensor],
    fn: Callable[..., Any],
    operands: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
) -> None:
    """Run the operation on a tensor of one element (or none) for each sort of leaf.

    Raises:
        RuntimeError: what torch would raise on one of the leaves.
    """
    if transforms() is not None or torch.compiler.is_compiling():
        return  # traced: an error comes before anything runs
    seen = set()
    for i, x in enumerate(xs):
        args = [o[i] if type(o) is list else o for o in operands]
        sorts = [_sort(a) for a in args if isinstance(a, Tensor)]
        sort = (_sort(x), _standing(x), _overlaps(x), *sorts)
        if sort in seen:
            continue
        seen.add(sort)
        n = min(1, x.numel())
        probe = _stand_in(x, n)
        if sort[2] and n:  # without elements nothing overlaps
            probe = probe.expand(2)
        fn(probe, *[_probe(a, n) if isinstance(a, Tensor) else a for a in args], **(kwargs or {}))


def _stand_in(x: Tensor, n: int) -> Tensor:
    """A tensor of ``n`` elements that autograd lets be written where it lets ``x``.

    It does not let a leaf be written, nor a view of one, nor one of several views that one call
    made (``unbind``), nor a view made without gradients.
    """
    leaf, made = _standing(x)
    root = torch.ones(n, dtype=x.dtype, device=x.device, requires_grad=leaf or made is not None)
    if made is None:
        return root
    view = (root if leaf else root * 1).view(n)
    _autograd._set_creation_meta(view, made)
    return view


def _standing(x: Tensor) -> tuple[bool, Any]:
    """Whether a tensor, or what it is a view of, is a leaf, and how autograd says a view was made.

    Where gradients are recorded: elsewhere it does not matter.
    """
    if not (x.requires_grad and torch.is_grad_enabled()):
        return False, None
    base = x._base if x._is_view() else None
    if base is None or not base.requires_grad:
        return x.is_leaf, None
    return base.is_leaf, _autograd._get_creation_meta(x)


def _sort(x: Tensor) -> Any:
    return x.dtype, x.device, x.ndim > 0, x.numel() > 0


def _probe(x: Tensor, n: int) -> Tensor:
    return torch.ones((n,) if x.ndim else (), dtype=x.dtype, device=x.device)
