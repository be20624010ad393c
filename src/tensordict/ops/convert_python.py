"""Named tuples, dataclasses, lists and pytrees in and out."""

from __future__ import annotations

import dataclasses
from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core.leaf import NonTensorData, NonTensorStack
from ..core.linked import LinkedList
from ..core.node import Node
from ..core.registry import node_class
from ..core.traverse import fold
from ..errors import EntryTypeError, ShapeError
from .combine import stack
from .convert import dense_class, from_dict, sized, to_dict, value_of
from .convert_arrays import from_struct_array

# The class made for a dataclass type with ``as_tensorclass=True``; set by the layer that knows.
tensorclass_of: list[Callable[[type], Any]] = []

_NUMBERS = (bool, int, float, complex, np.number, np.bool_)


def is_namedtuple(obj: Any) -> bool:
    """Whether an object is an instance of a named tuple class."""
    return isinstance(obj, tuple) and hasattr(obj, "_fields")


def is_dataclass_instance(obj: Any) -> bool:
    """Whether an object is an instance of a dataclass."""
    return dataclasses.is_dataclass(obj) and not isinstance(obj, type)


def entries_of(obj: Any) -> Any:
    """Containers as nested dicts, arrays with fields as tensordicts, other objects unchanged."""
    if isinstance(obj, (Node, Tensor)):
        return obj
    if isinstance(obj, Mapping):
        return {key: entries_of(value) for key, value in obj.items()}
    if is_namedtuple(obj):
        return {name: entries_of(value) for name, value in zip(obj._fields, obj)}
    if isinstance(obj, tuple):
        return {str(i): entries_of(value) for i, value in enumerate(obj)}
    if is_dataclass_instance(obj):
        return {f.name: entries_of(getattr(obj, f.name)) for f in dataclasses.fields(obj)}
    if isinstance(obj, (np.ndarray, np.void)) and obj.dtype.names:
        return from_struct_array(node_class("dense"), obj, None, None, None, None)
    if isinstance(obj, list):
        return _list_entry(obj)
    return obj


def _list_entry(values: list[Any]) -> Any:
    """A tensor for (nested lists of) numbers, else one value per item."""
    try:
        if all(isinstance(x, (*_NUMBERS, list)) for x in values) and values:
            return torch.tensor(values)
    except (ValueError, TypeError, RuntimeError):
        pass  # ragged, or not only numbers: kept as values
    return NonTensorStack.from_list(values, 1)


def from_any(
    cls: type, obj: Any, auto_batch_size: bool, batch_dims: int | None, device: Any, batch_size: Any
) -> Any:
    """`PythonMethods.from_any`."""
    entries = entries_of(obj)
    if isinstance(entries, Mapping):
        return from_dict(cls, entries, auto_batch_size, batch_size, device, batch_dims, None)
    if isinstance(entries, Node):
        out: Any = entries
        if device is not None:
            out = out.to(device)
        if auto_batch_size or batch_dims is not None or batch_size is not None:
            out = out._map(lambda x: x)
            if batch_size is None:
                out.auto_batch_size_(batch_dims)
            else:
                out.batch_size = batch_size
        return out
    if isinstance(entries, (Tensor, NonTensorStack)):
        return entries if device is None or not isinstance(entries, Tensor) else entries.to(device)
    return entries


def _require(condition: bool, obj: Any, wanted: str) -> None:
    if not condition:
        raise EntryTypeError(
            f"Cannot convert to a tensordict: expected {wanted}, got a {type(obj).__name__}. "
            f"Use from_any() for objects of any kind."
        )


def to_pytree(node: Node) -> Any:
    """`PythonMethods.to_pytree`."""

    def on_node(below: Any, values: dict[str, Any]) -> Any:
        record = values.pop(_RECORD, None)
        return below._like(dict(below._items())) if record is None else record.build(values)

    return fold(node, value_of, on_node)


_RECORD = "_pytree_type"


class PytreeRecord:
    """What container a node of `from_pytree` was, and its keys."""

    __slots__ = ("cls", "keys")

    def __init__(self, cls: type, keys: list[Any]) -> None:
        self.cls = cls
        self.keys = keys

    def build(self, values: Mapping[str, Any]) -> Any:
        """The container over its values."""
        items = list(values.values())
        if issubclass(self.cls, tuple) and hasattr(self.cls, "_make"):
            return self.cls._make(items)
        if issubclass(self.cls, (list, tuple)):
            return self.cls(items)
        return dict(zip(self.keys, items))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PytreeRecord) and (self.cls, self.keys) == (other.cls, other.keys)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return self.cls.__name__


def _pytree_entries(obj: Any) -> Any:
    if is_namedtuple(obj):
        items: Any = dict(zip(obj._fields, obj))
    elif isinstance(obj, (list, tuple)):
        items = {str(i): value for i, value in enumerate(obj)}
    elif isinstance(obj, Mapping):
        items = dict(zip(_names_of(list(obj)), obj.values()))
    elif isinstance(obj, (Tensor, Node)):
        return obj
    else:
        return NonTensorData(obj) if not isinstance(obj, (*_NUMBERS, np.ndarray)) else obj
    keys = list(obj) if isinstance(obj, Mapping) else list(items)
    out = {key: _pytree_entries(value) for key, value in items.items()}
    out[_RECORD] = NonTensorData(PytreeRecord(type(obj), keys))
    return out


def _names_of(keys: list[Any]) -> list[str]:
    """A name for each key of a dict: itself, or a text that no other key has."""
    taken = {key for key in keys if isinstance(key, str)}
    out = []
    for key in keys:
        name = key
        if not isinstance(key, str):
            name = repr(key)
            while name in taken:
                name += "_"
            taken.add(name)
        out.append(name)
    return out


def from_list(
    cls: type, input: Sequence[Any], lazy: bool | None, names: Any, **options: Any
) -> Any:
    """`PythonMethods.from_list`."""
    if not len(input):
        raise ShapeError("Cannot make a tensordict of an empty list: expected one dict or more.")

    def rows(items: Any) -> Any:
        if isinstance(items, (list, tuple)):
            if not items:
                raise ShapeError("Cannot make a tensordict of a list that holds an empty list.")
            return _stacked([rows(item) for item in items], lazy)
        if isinstance(items, Node):
            return items
        _require(isinstance(items, Mapping), items, "(nested) lists of dicts")
        return dense_class(cls)(items)

    size, device = options["batch_size"], options["device"]
    out = rows(list(input))
    if device is not None:
        out = out.to(device)
    if size is not None:
        out.batch_size = size
    elif options["auto_batch_size"] or options["batch_dims"] is not None:
        out.auto_batch_size_(options["batch_dims"])
    if names is not None:
        out.names = names
    return out


def _stacked(parts: list[Any], lazy: bool | None) -> Any:
    if lazy:
        return node_class("lazy_stack")(*parts, stack_dim=0)
    try:
        return stack(parts, 0)
    except RuntimeError:
        if lazy is not None:
            raise
        return node_class("lazy_stack")(*parts, stack_dim=0)


class PythonMethods(Node):
    """Conversion from and to containers of Python."""

    __slots__ = ()

    @classmethod
    def from_any(
        cls,
        obj: Any,
        *,
        auto_batch_size: bool = False,
        batch_dims: int | None = None,
        device: Any = None,
        batch_size: Any = None,
    ) -> Any:
        """A tensordict of nested dicts, tuples, named tuples, dataclasses, structured arrays.

        Lists of numbers become tensors, other lists one value per item; what is no
        container comes back as it is.

        >>> from tensordict import TensorDict
        >>> TensorDict.from_any({"a": (1, 2.0), "b": [1, 2]})["a", "1"]
        tensor(2.)
        """
        return from_any(cls, obj, auto_batch_size, batch_dims, device, batch_size)

    @classmethod
    def from_tuple(
        cls,
        obj: tuple[Any, ...],
        *,
        auto_batch_size: bool = False,
        batch_dims: int | None = None,
        device: Any = None,
        batch_size: Any = None,
    ) -> Any:
        """A tensordict of a tuple, under the keys ``"0"``, ``"1"``, ...

        Raises:
            TypeError: not a tuple.
        """
        _require(isinstance(obj, tuple), obj, "a tuple")
        return from_any(cls, tuple(obj), auto_batch_size, batch_dims, device, batch_size)

    @classmethod
    def from_namedtuple(
        cls,
        named_tuple: Any,
        *,
        auto_batch_size: bool = False,
        batch_dims: int | None = None,
        device: Any = None,
        batch_size: Any = None,
    ) -> Any:
        """A tensordict of a named tuple, under its field names.

        Raises:
            TypeError: not a named tuple.
        """
        _require(is_namedtuple(named_tuple), named_tuple, "a named tuple")
        return from_any(cls, named_tuple, auto_batch_size, batch_dims, device, batch_size)

    @classmethod
    def from_dataclass(
        cls,
        dataclass: Any,
        *,
        dest_cls: Any = None,
        auto_batch_size: bool = False,
        batch_dims: int | None = None,
        as_tensorclass: bool = False,
        device: Any = None,
        batch_size: Any = None,
    ) -> Any:
        """A tensordict (or tensorclass) of a dataclass instance.

        Args:
            dataclass: the instance.
            dest_cls: a tensorclass to make instead.
            auto_batch_size, batch_dims, device, batch_size: as in `from_dict`.
            as_tensorclass: make a tensorclass with the fields of the dataclass.

        Raises:
            TypeError: not an instance of a dataclass.
        """
        _require(is_dataclass_instance(dataclass), dataclass, "an instance of a dataclass")
        out = from_any(cls, dataclass, auto_batch_size, batch_dims, device, batch_size)
        if dest_cls is None and as_tensorclass:
            _require(bool(tensorclass_of), dataclass, "the tensorclass layer to be imported")
            dest_cls = tensorclass_of[0](type(dataclass))
        return out if dest_cls is None else dest_cls.from_tensordict(out)

    @classmethod
    def from_pytree(
        cls,
        pytree: Any,
        *,
        batch_size: Any = None,
        auto_batch_size: bool = False,
        batch_dims: int | None = None,
    ) -> Any:
        """A tensordict of nested lists, tuples and dicts that `to_pytree` turns back into them.

        Raises:
            TypeError: not a list, tuple or dict.

        >>> from tensordict import TensorDict
        >>> TensorDict.from_pytree({"a": [1, ("x", 2)], 3: 4}).to_pytree()
        {'a': [tensor(1), ('x', tensor(2))], 3: tensor(4)}
        """
        _require(isinstance(pytree, (list, tuple, Mapping)), pytree, "a list, a tuple or a dict")
        entries = _pytree_entries(pytree)
        return sized(
            lambda size, device, names: dense_class(cls)(entries, batch_size=size),
            auto_batch_size=auto_batch_size,
            batch_dims=batch_dims,
            batch_size=batch_size,
        )

    def to_pytree(self) -> Any:
        """The containers that `from_pytree` read; a copy of the containers for other tensordicts."""
        return to_pytree(self)

    @classmethod
    def from_list(
        cls,
        input: Sequence[Any],
        *,
        auto_batch_size: bool | None = None,
        batch_size: Any = None,
        device: Any = None,
        batch_dims: int | None = None,
        names: Sequence[str | None] | None = None,
        lazy: bool | None = None,
    ) -> Any:
        """A stack of (nested lists of) dicts.

        Args:
            input: dicts or tensordicts; lists of them add a batch dimension each.
            auto_batch_size, batch_size, device, batch_dims, names: as in `from_dict`.
            lazy: True stacks lazily, False densely; None lazily only where shapes or keys
                differ.

        Raises:
            RuntimeError: an empty list; with ``lazy=False`` other keys or shapes.

        >>> from tensordict import TensorDict
        >>> TensorDict.from_list([{"a": 1}, {"a": 2}])["a"]
        tensor([1, 2])
        """
        return from_list(
            cls,
            input,
            lazy,
            names,
            auto_batch_size=auto_batch_size,
            batch_size=batch_size,
            device=device,
            batch_dims=batch_dims,
        )

    def to_namedtuple(self, dest_cls: Any = None) -> Any:
        """A named tuple of the entries, nested; ``dest_cls`` for the outermost one.

        Raises:
            ValueError: a key that is no identifier, when the class is made here.

        >>> from tensordict import TensorDict
        >>> TensorDict(a=1, n={"b": 2}).to_namedtuple()
        GenericDict(a=tensor(1), n=GenericDict(b=tensor(2)))
        """

        def on_node(node: Any, values: dict[str, Any]) -> Any:
            if node is self and dest_cls is not None:
                return dest_cls(**values)
            wrong = [name for name in values if not name.isidentifier() or name.startswith("_")]
            if wrong:
                raise EntryTypeError(f"Cannot make a named tuple: {wrong} are no names of fields.")
            return namedtuple("GenericDict", list(values))(**values)

        return fold(self, value_of, on_node)

    def tolist(
        self,
        *,
        convert_nodes: bool = True,
        convert_tensors: bool = False,
        tolist_first: bool = False,
        as_linked_list: bool = False,
    ) -> Any:
        """Nested lists along the batch of one dict per element; a dict without batch.

        Args:
            convert_nodes: the elements are dicts, else tensordicts.
            convert_tensors: tensors become lists of numbers.
            tolist_first: nested tensordicts with a batch of their own become lists.
            as_linked_list: the outermost list is a `LinkedList`.

        >>> import torch
        >>> from tensordict import TensorDict
        >>> TensorDict({"a": torch.arange(2)}, [2]).tolist(convert_tensors=True)
        [{'a': 0}, {'a': 1}]
        """
        if self._batch_size:
            simple = convert_nodes and len(self._batch_size) == 1 and not self._may_lack
            frame = self._flat_tensors() if simple else None
            if frame is not None:  # each leaf is cut once, and the rows need no node
                cut = Tensor.tolist if convert_tensors else torch.unbind
                columns = zip(*map(cut, frame.values()))
                out = [dict(zip(frame, row)) for row in columns]
                return LinkedList(out) if as_linked_list else out
            rows: Any = self._rows()
            out = [
                row.tolist(
                    convert_nodes=convert_nodes,
                    convert_tensors=convert_tensors,
                    tolist_first=tolist_first,
                )
                for row in rows
            ]
            return LinkedList(out) if as_linked_list else out
        if not convert_nodes:
            return self
        return to_dict(self, True, convert_tensors, tolist_first)

    def _rows(self) -> list[Any]:
        out: Any = self
        return list(out.unbind(0))
