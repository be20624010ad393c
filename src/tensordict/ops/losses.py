"""Rules for functions of ``torch.nn.functional`` and ``torch.autograd`` that take tensordicts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..core.node import Node
from ..core.torch_function import implements
from ..core.traverse import has_stack, leaves
from .operands import pair
from .reductions import reduced_to


def _loss(fn: Callable[..., Tensor]) -> None:
    """Register the rule of a loss: leaf by leaf, each leaf reduced as the tensor would be."""

    def rule(input: Any, target: Any, *args: Any, weight: Any = None, **kwargs: Any) -> Any:
        if not isinstance(input, Node):  # the losses are symmetric
            input, target = target, input

        unreduced = kwargs.get("reduction", "mean") == "none"
        if not unreduced and has_stack(input):  # by key: the rows of an entry have one loss
            input = input.to_tensordict()

        def call(x: Tensor, y: Any, w: Any) -> Tensor:
            y = y if isinstance(y, Tensor) else torch.full_like(x, y)
            extra = {} if w is None else {"weight": w.expand_as(x)}
            return fn(x, y.expand_as(x), *args, **extra, **kwargs)

        node, ys = pair(input, target, fn.__name__)
        xs = leaves(node)
        ws = None if weight is None else pair(node, weight, fn.__name__)[1]
        out = [call(x, y, w) for x, y, w in zip(xs, _each(ys, xs), _each(ws, xs))]
        if unreduced:
            return node._rebuild(iter(out))
        return reduced_to(node, out)

    implements(fn)(rule)


def _each(values: Any, xs: list[Tensor]) -> list[Any]:
    return values if type(values) is list else [values] * len(xs)


for _fn in (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss):
    _loss(_fn)


@implements(torch.autograd.grad)
def _grad(outputs: Any, inputs: Any, grad_outputs: Any = None, **kwargs: Any) -> Any:
    """Gradients of the leaves of ``outputs`` with respect to ``inputs``.

    Outputs, inputs and grad_outputs are tensors, tensordicts, or sequences of both. The
    result is a tuple with one part in the form of each input, or, as torch hands a single
    input over as a sequence of one, the tensordict itself where there is only that.
    """
    given = tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)
    grads = iter(torch.autograd.grad(_flat(outputs), _flat(given), _flat(grad_outputs), **kwargs))
    out = tuple(_like(x, grads) for x in given)
    return out[0] if len(out) == 1 and isinstance(given[0], Node) else out


def _flat(values: Any) -> Any:
    if values is None:
        return None
    parts = values if isinstance(values, (tuple, list)) else (values,)
    return [x for part in parts for x in (leaves(part) if isinstance(part, Node) else [part])]


def _like(x: Any, grads: Iterator[Tensor | None]) -> Any:
    """The gradients of one input in its form; leaves without one are left out."""
    if not isinstance(x, Node):
        return next(grads)
    mine = [next(grads) for _ in leaves(x)]
    found = iter(mine)
    if any(g is None for g in mine):
        return x.apply(lambda leaf: next(found))  # type: ignore[attr-defined]
    return x._rebuild(found)  # type: ignore[arg-type]
