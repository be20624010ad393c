"""Gradients: reading, clearing, detaching, running backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._keys import short
from ..core import lock as locking
from ..core.node import Entry, Node
from ..core.traverse import DESCEND, leaves, leaves_like, leaves_with_path, zip_map
from ..errors import EntryTypeError, GradError, table_of

if TYPE_CHECKING:
    from typing_extensions import Self


class AutogradMethods(Node):
    """What autograd offers of a tensor, for every leaf."""

    __slots__ = ()

    @property
    def data(self) -> Self:
        """The same tree over ``.data`` of the leaves: their memory, unknown to autograd."""
        return _locked_like(self._map(_data), self)

    def detach(self) -> Self:
        """The leaves detached from the autograd graph; their memory is shared."""
        return _locked_like(self._map(torch.detach), self)

    def detach_(self) -> Self:
        """Detach every leaf in place."""
        for x in leaves(self):
            x.detach_()
        return self

    @property
    def grad(self) -> Self | None:
        """The gradients of the leaves that have one; None when no leaf has.

        >>> from tensordict import TensorDict
        >>> td = TensorDict(a=torch.ones(2), b=torch.ones(2)).requires_grad_()
        >>> td["a"].sum().backward()
        >>> td.grad["a"], "b" in td.grad
        (tensor([1., 1.]), False)
        """
        if all(x.grad is None for x in leaves(self)):
            return None

        def visit(path: Any, entry: Entry, theirs: Any) -> Any:
            if isinstance(entry, Tensor):
                return entry.grad
            return DESCEND if isinstance(entry, Node) else entry

        def build(path: Any, part: Node, entries: dict[str, Entry]) -> Node | None:
            return part._like(entries) if entries or not len(part._names()) else None

        out: Self = zip_map(self, (), visit, build)
        return out

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Set whether autograd records operations on the leaves.

        Raises:
            RuntimeError: a leaf is not floating or complex; nothing has changed then.
        """
        if requires_grad:
            bad = [
                (short(path), str(x.dtype))
                for path, x in leaves_with_path(self)
                if not (x.is_floating_point() or x.is_complex())
            ]
            if bad:
                raise GradError(
                    table_of("only Tensors of floating point dtype can require gradients.", bad)
                )
        for x in leaves(self):
            x.requires_grad_(requires_grad)
        return self

    def zero_grad(self, set_to_none: bool = True) -> Self:
        """Clear the gradients of the leaves: to None, or to zeros in their memory."""
        for x in leaves(self):
            if x.grad is None:
                continue
            if set_to_none:
                x.grad = None
            else:
                x.grad.detach_().zero_()
        return self

    def backward(
        self,
        gradient: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        """Run backward from every leaf that requires grad, in one pass.

        Args:
            gradient: tensordict of the gradients of the leaves; without it each of these
                leaves must have one element.
            retain_graph, create_graph: as in `torch.Tensor.backward`.
            inputs: tensors (or a tensordict of them) to accumulate gradients into.
        """
        xs = leaves(self)
        gs: Sequence[Any] = [None] * len(xs)
        if gradient is not None:
            if not isinstance(gradient, Node):
                raise EntryTypeError(
                    f"Cannot run backward with a gradient of type {type(gradient).__name__}: "
                    f"expected a tensordict with the same keys."
                )
            gs = leaves_like(self, gradient)
        pairs = [(x, g) for x, g in zip(xs, gs) if x.requires_grad]
        if not pairs:
            raise GradError(
                "backward() cannot be called on a tensordict that has no leaf that requires grad."
            )
        if isinstance(inputs, Node):
            inputs = leaves(inputs)
        torch.autograd.backward(
            [x for x, _ in pairs],
            None if gradient is None else [g for _, g in pairs],
            retain_graph,
            create_graph,
            inputs=inputs,
        )


def _data(x: Tensor) -> Tensor:
    return x.data


def _locked_like(result: Any, source: Node) -> Any:
    if source._lock is not None:
        locking.lock(result)
    return result
