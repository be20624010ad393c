"""Nested dicts in and out, and dense copies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from ..core.leaf import Leaf, NonTensorData, NonTensorDataBase
from ..core.linked import LinkedList
from ..core.node import Node
from ..core.registry import node_class
from ..core.traverse import fold, nested_dict


def is_tensor_collection(datatype: Any) -> bool:
    """Whether an object or a class is a tensordict, a tensorclass or non-tensor data.

    >>> from tensordict import TensorDict
    >>> is_tensor_collection(TensorDict), is_tensor_collection({})
    (True, False)
    """
    cls = datatype if isinstance(datatype, type) else type(datatype)
    return issubclass(cls, (Node, NonTensorDataBase))


def dense_class(cls: type) -> Any:
    """The class that conversions called on ``cls`` make: ``cls`` if it is dense, else `TensorDict`."""
    dense = node_class("dense")
    return cls if issubclass(cls, dense) else dense


def sized(
    make: Any,
    *,
    auto_batch_size: bool | None,
    batch_dims: int | None,
    batch_size: Any,
    device: Any = None,
    names: Sequence[str | None] | None = None,
) -> Any:
    """What ``make(batch_size, device, names)`` gives, its batch size given or found out.

    Args:
        make: builds the tensordict.
        auto_batch_size: take the largest batch size that all entries share.
        batch_dims: take that many dimensions of it.
        batch_size: the batch size, exclusive with the other two.
        device, names: passed on.
    """
    if batch_size is not None or not (auto_batch_size or batch_dims is not None):
        return make(batch_size, device, names)
    out = make(None, device, None).auto_batch_size_(batch_dims)
    if batch_dims is not None:  # nested ones get no more dimensions than the root
        out = make(out.batch_size, device, None)
    if names is not None:
        out.names = names
    return out


def from_dict(
    cls: type,
    input_dict: Mapping[Any, Any],
    auto_batch_size: bool | None,
    batch_size: Any,
    device: Any,
    batch_dims: int | None,
    names: Sequence[str | None] | None,
) -> Any:
    """`ConvertMethods.from_dict`."""
    dense = dense_class(cls)
    return sized(
        lambda size, dev, dims: dense(input_dict, batch_size=size, device=dev, names=dims),
        auto_batch_size=auto_batch_size,
        batch_dims=batch_dims,
        batch_size=batch_size,
        device=device,
        names=names,
    )


def value_of(entry: Tensor | Leaf) -> Any:
    """A tensor, or what ``td[key]`` gives for a leaf of another kind, lists without a way back."""
    if isinstance(entry, Tensor):
        return entry
    value = entry._value()
    return _unlinked(value) if type(value) is LinkedList else value


def _unlinked(values: list[Any]) -> list[Any]:
    return [_unlinked(v) if type(v) is LinkedList else v for v in values]


def to_dict(node: Node, retain_none: bool, convert_tensors: bool, tolist_first: bool) -> Any:
    """`ConvertMethods.to_dict`."""

    def on_entry(entry: Any) -> Any:
        if isinstance(entry, Tensor):
            return entry.tolist() if convert_tensors else entry
        return entry._plain()

    def on_node(below: Any, values: dict[str, Any]) -> Any:
        if tolist_first and below is not node and below._batch_size:
            return below.tolist(convert_tensors=convert_tensors)
        if retain_none:
            return {**values, **dict.fromkeys(below._absent())}
        return {name: value for name, value in values.items() if value is not None}

    return fold(node, on_entry, on_node)


class ConvertMethods(Node):
    """Conversion from and to dicts and dense copies."""

    __slots__ = ()

    @classmethod
    def from_dict(
        cls,
        input_dict: Mapping[Any, Any],
        *,
        auto_batch_size: bool | None = None,
        batch_size: Any = None,
        device: Any = None,
        batch_dims: int | None = None,
        names: Sequence[str | None] | None = None,
    ) -> Any:
        """A tensordict of a nested dict.

        Args:
            input_dict: keys are str or tuples of str; values anything `set` takes.
            auto_batch_size: take the largest batch size that all entries share.
            batch_size: the batch size, ``[]`` by default.
            device: where the tensors are moved.
            batch_dims: take that many dimensions of the largest batch size.
            names: names of the batch dimensions.

        >>> from tensordict import TensorDict
        >>> import torch
        >>> TensorDict.from_dict({"a": torch.zeros(3, 4)}, auto_batch_size=True).batch_size
        torch.Size([3, 4])
        """
        return from_dict(cls, input_dict, auto_batch_size, batch_size, device, batch_dims, names)

    @classmethod
    def fromkeys(cls, keys: Iterable[Any], value: Any = 0) -> Any:
        """A tensordict of one value under each key.

        >>> from tensordict import TensorDict
        >>> TensorDict.fromkeys(["a", ("n", "b")], 1)["n", "b"]
        tensor(1)
        """
        return dense_class(cls)(dict.fromkeys(keys, value))

    def from_dict_instance(
        self,
        input_dict: Mapping[Any, Any],
        *,
        auto_batch_size: bool | None = None,
        batch_size: Any = None,
        device: Any = None,
        batch_dims: int | None = None,
        names: Sequence[str | None] | None = None,
    ) -> Any:
        """`from_dict` with the class of self."""
        return from_dict(
            type(self), input_dict, auto_batch_size, batch_size, device, batch_dims, names
        )

    def to_dict(
        self, *, retain_none: bool = True, convert_tensors: bool = False, tolist_first: bool = False
    ) -> dict[str, Any]:
        """A nested dict of the tensors and values.

        Args:
            retain_none: keep entries whose value is None.
            convert_tensors: tensors become nested lists of numbers.
            tolist_first: nested tensordicts with a batch become lists of dicts.

        >>> from tensordict import TensorDict
        >>> TensorDict(a=0, n={"s": "x"}).to_dict()
        {'a': tensor(0), 'n': {'s': 'x'}}
        """
        if retain_none and not convert_tensors and not tolist_first:
            return nested_dict(self, value_of)
        out: dict[str, Any] = to_dict(self, retain_none, convert_tensors, tolist_first)
        return out

    def to_tensordict(self, *, retain_none: bool | None = None) -> Any:
        """A dense copy in memory, unlocked: new leaves, every nested node a `TensorDict`.

        Args:
            retain_none: False leaves out entries whose value is None.
        """
        new = node_class("dense")._new

        def on_node(node: Any, values: dict[str, Any]) -> Any:
            if retain_none is False:
                values = {k: v for k, v in values.items() if not _is_none(v)}
            return new(values, node._batch_size, node._dim_names, node._device)

        return fold(self, _copied, on_node)


def _copied(entry: Tensor | Leaf) -> Any:
    return entry.clone() if isinstance(entry, Tensor) else entry


def _is_none(entry: Any) -> bool:
    return isinstance(entry, NonTensorData) and entry._data is None
