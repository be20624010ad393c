"""New tensordicts after the pattern of one: other batch size, other contents, other strides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Size, Tensor

from .._typing import NO_DEFAULT
from ..core.devices import as_device
from ..core.node import Node
from ..core.sizes import as_size, shape_args
from ..core.structural import DimNames, StructuralOp, named
from ..core.torch_function import HANDLERS
from ..core.traverse import leaves, leaves_like, nodes_with_path
from ..errors import LockedError
from .reshaping import become

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(slots=True, eq=False)
class Renew(StructuralOp):
    """New contents under another batch size; names stay with the last dimensions.

    Attributes:
        shape: the new batch shape.
        ndim: number of batch dimensions it replaces.
        make: called with a leaf and the full shape of the new one.
        options: more arguments of ``make``.
    """

    keeps_lock = False

    shape: Size
    ndim: int
    make: Callable[..., Tensor]
    options: dict[str, Any]

    def size(self, batch: Size) -> Size:
        return self.shape + batch[self.ndim :]

    def names(self, names: DimNames) -> DimNames | None:
        n = len(self.shape)
        head = [*[None] * n, *names[: self.ndim]]
        return named([*head[len(head) - n :], *names[self.ndim :]])

    def leaf(self, x: Tensor) -> Tensor:
        return self.make(x, (*self.shape, *x.shape[self.ndim :]), **self.options)

    def rows(self, x: Tensor) -> Tensor:
        return x.new_full(self.shape + x.shape[self.ndim :], -1)


class FillMethods(Node):
    """The new_* family, contiguous and as_tensor."""

    __slots__ = ()

    def new_zeros(self, *size: Any, device: Any = NO_DEFAULT, **kwargs: Any) -> Self:
        """Zeros of another batch size.

        Args:
            *size: the batch size; leaves keep their trailing dimensions.
            device: of the leaves and of the result; that of self by default.
            **kwargs: dtype, requires_grad, layout, pin_memory, as ``Tensor.new_zeros``.

        >>> from tensordict import TensorDict
        >>> TensorDict({"a": torch.ones(2, 4)}, [2]).new_zeros(3)["a"].shape
        torch.Size([3, 4])
        """
        return _renewed(self, _size_of(size, kwargs), Tensor.new_zeros, device, kwargs)

    def new_ones(self, *size: Any, device: Any = NO_DEFAULT, **kwargs: Any) -> Self:
        """Ones of another batch size; arguments as in `new_zeros`."""
        return _renewed(self, _size_of(size, kwargs), Tensor.new_ones, device, kwargs)

    def new_empty(self, *size: Any, device: Any = NO_DEFAULT, **kwargs: Any) -> Self:
        """Uninitialised leaves of another batch size; arguments as in `new_zeros`."""
        return _renewed(self, _size_of(size, kwargs), Tensor.new_empty, device, kwargs)

    def new_full(
        self, size: Any, fill_value: Any, *, device: Any = NO_DEFAULT, **kwargs: Any
    ) -> Self:
        """Leaves of another batch size filled with a value; arguments as in `new_zeros`."""

        def make(x: Tensor, shape: Size, **options: Any) -> Tensor:
            return x.new_full(shape, fill_value, **options)

        return _renewed(self, as_size(size, "size"), make, device, kwargs)

    def new_tensor(self, data: Any, *, device: Any = NO_DEFAULT, **kwargs: Any) -> Self:
        """Copies of ``data`` with the dtypes and devices of self.

        Args:
            data: a tensordict with the same keys, or numbers or a tensor for every leaf,
                whose shape is then the batch size.
            device: of the leaves and of the result; that of self by default.
            **kwargs: dtype, requires_grad, pin_memory, as ``Tensor.new_tensor``.
        """
        options = _options(kwargs, device)
        if isinstance(data, Node):
            values = iter(leaves(data))
            like = data._rebuild(iter(leaves_like(data, self)))
            out: Any = like._map(lambda x: _copied(x, next(values), options))
        else:
            value = torch.as_tensor(data)
            op = Renew(
                value.shape, len(self._batch_size), lambda x, _: _copied(x, value, options), {}
            )
            out = self._restructure(op)
            for _, node in nodes_with_path(out):
                node._batch_size = value.shape
                node._dim_names = None
        return _placed(out, self, device)

    def contiguous(self, *, canonical: bool = False, inplace: bool = False) -> Self:
        """Contiguous leaves; those that are already are kept as they are.

        Args:
            canonical: also give dimensions of size 1 the strides of a fresh tensor.
            inplace: replace the leaves of self.
        """
        result = self._map(_canonical if canonical else Tensor.contiguous)
        if not inplace:
            return result
        if self._lock is not None:
            raise LockedError
        become(self, result)
        return self

    def as_tensor(self) -> Self:
        """Memory-mapped leaves as plain tensors over the same memory; others as they are."""
        return self._map(_plain)


_MAKERS = ("zeros_like", "ones_like", "empty_like", "rand_like", "randn_like", "full_like")


def _like_rule(function: Callable[..., Tensor]) -> Callable[..., Any]:
    def rule(input: Any, *args: Any, **kwargs: Any) -> Any:
        given = bool(args or kwargs)
        out = input._map((lambda x: function(x, *args, **kwargs)) if given else function)
        return _placed(out, input, kwargs.get("device") or NO_DEFAULT)

    return rule


HANDLERS.update({getattr(torch, name): _like_rule(getattr(torch, name)) for name in _MAKERS})


def _size_of(size: tuple[Any, ...], kwargs: dict[str, Any]) -> Size:
    return as_size(kwargs.pop("size"), "size") if "size" in kwargs else shape_args(size, "size")


def _options(kwargs: dict[str, Any], device: Any) -> dict[str, Any]:
    # empty_lazy asks for an empty lazy stack where self is one; no other kind has a use for it.
    options = {k: v for k, v in kwargs.items() if v is not None and k != "empty_lazy"}
    if device is not NO_DEFAULT and device is not None:
        options["device"] = as_device(device)
    return options


def _renewed(
    node: Any, size: Size, make: Callable[..., Tensor], device: Any, kwargs: dict[str, Any]
) -> Any:
    options = _options(kwargs, device)
    op = Renew(size, len(node._batch_size), make, options)
    return _placed(node._restructure(op), node, device)


def _placed(out: Any, source: Node, device: Any) -> Any:
    """Give a fresh tree the device asked for, or that of its pattern."""
    where = source._device
    if device is not NO_DEFAULT:
        where = None if device is None else as_device(device)
    if out._device != where:
        for _, node in nodes_with_path(out):
            node._device = where
    return out


def _copied(x: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor:
    out = value.detach().to(
        options.get("device", x.device), options.get("dtype", x.dtype), copy=True
    )
    return out.requires_grad_() if options.get("requires_grad") else out


def _canonical(x: Tensor) -> Tensor:
    x = x.contiguous()
    strides: list[int] = []
    step = 1
    for n in reversed(x.shape):
        strides.append(step)
        step *= max(n, 1)
    strides.reverse()
    return x if list(x.stride()) == strides else x.as_strided(x.shape, strides)


def _plain(x: Tensor) -> Tensor:
    convert = getattr(x, "as_tensor", None)
    return x if convert is None else convert()
