"""`TensorClass`: a tensordict seen through a class with typed fields.

An instance holds one node and nothing else.  It is a node itself: the primitives go to
the node within, results come back in the class, and so every method of tensordicts is
a method of tensorclasses without being named here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import FrozenInstanceError
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Size, Tensor
from typing_extensions import dataclass_transform

from .._keys import is_key
from .._typing import NO_DEFAULT, NestedKey
from ..containers.base import NodeMethods
from ..containers.dense import TensorDict
from ..core import lock as locking
from ..core._torch import new_object, set_attribute
from ..core.devices import as_device
from ..core.leaf import Leaf
from ..core.node import KEEP, Entry, Node
from ..core.registry import node_class
from ..core.sizes import EMPTY, as_size
from ..core.structural import DimNames, DividingOp, StructuralOp
from ..errors import EntryTypeError, LockedError
from ..ops.display_cards import NodeCard, field_cards
from ..ops.metadata import check_names
from .fields import Options, Spec, no_such_field

if TYPE_CHECKING:
    from typing_extensions import Self

# What operations set on a result: the state of the node within.
_STATE = frozenset({"_batch_size", "_device", "_dim_names", "_lock", "_undo"})


@dataclass_transform(field_specifiers=(dataclasses.field, dataclasses.Field))
class TypedView(NodeMethods):
    """A node that looks at another one; `TensorClass` makes classes of it."""

    __slots__ = ("_inner",)

    _inner: Any
    _spec: ClassVar[Spec]
    _may_lack = True
    _options: ClassVar[Options] = Options()

    if not TYPE_CHECKING:  # the state is that of the node within; written out, for speed

        @property
        def _batch_size(self):
            return self._inner._batch_size

        @property
        def _device(self):
            return self._inner._device

        @property
        def _dim_names(self):
            return self._inner._dim_names

        @property
        def _lock(self):
            return self._inner._lock

        @property
        def _undo(self):
            return self._inner._undo

    def __init__(
        self,
        *args: Any,
        batch_size: Any = None,
        device: Any = None,
        names: Any = None,
        lock: bool = False,
        **kwargs: Any,
    ) -> None:
        spec = type(self)._spec
        values, extra = spec.bind(args, kwargs)
        batch = EMPTY if batch_size is None else as_size(batch_size)
        inner = TensorDict._new({}, batch, None, None if device is None else as_device(device))
        if names is not None:
            inner._dim_names = check_names(names, batch)
        entries = inner._entries
        set_attribute(self, "_inner", inner)
        for name, value in values.items():
            entry = spec.entry(inner, name, value)
            if entry is not None:
                entries[name] = entry
        after = getattr(self, "__post_init__", None)
        if after is not None:
            after(*extra)
        if lock or spec.options.frozen:
            locking.lock(self)

    @classmethod
    def _over(cls, inner: Any) -> Self:
        """The class over a node: no check, no copy."""
        out = new_object(cls)
        set_attribute(out, "_inner", inner)
        return out

    @classmethod
    def _new(
        cls,
        entries: dict[str, Entry],
        batch_size: Size,
        dim_names: DimNames | None,
        device: torch.device | None,
    ) -> Self:
        return cls._over(TensorDict._new(entries, batch_size, dim_names, device))

    @classmethod
    def _of(cls, source: Any) -> Self:
        """A tensordict or a mapping in this class (a field's value)."""
        if isinstance(source, Node):
            return cls.from_tensordict(source)
        return cls(**source)

    # --- fields -------------------------------------------------------------------------

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _STATE:
            setattr(self._inner, name, value)
            return
        if not hasattr(type(getattr(type(self), name, None)), "__set__"):
            raise no_such_field(type(self), name)
        super().__setattr__(name, value)

    @classmethod
    def fields(cls) -> tuple[dataclasses.Field[Any], ...]:
        """The fields, as `dataclasses.fields` gives them."""
        return dataclasses.fields(cls)  # type: ignore[arg-type]

    @classmethod
    def from_dict(cls, input_dict: Mapping[Any, Any], **options: Any) -> Self:
        """A typed tensordict of a nested dict whose keys are fields.

        Args:
            input_dict: keys are fields; fields without a key are None.
            **options: as `TensorDict.from_dict`.

        Raises:
            ValueError: a key that is no field.
        """
        return cls.from_tensordict(TensorDict.from_dict(input_dict, **options))

    @classmethod
    def from_tensordict(
        cls,
        tensordict: Any,
        non_tensordict: Mapping[str, Any] | None = None,
        safe: bool | None = None,
    ) -> Self:
        """A tensordict seen through this class: the same entries, no copy.

        Args:
            tensordict: whose keys are fields; fields without an entry are None.
            non_tensordict: values of further fields.
            safe: accepted for compatibility of calls; keys are always checked.

        Raises:
            ValueError: a key that is no field.
        """
        names = cls._spec.names
        extra = [
            name for name in (*tensordict._names(), *(non_tensordict or ())) if name not in names
        ]
        if extra:
            raise EntryTypeError(
                f"Cannot make a {cls.__name__} of a tensordict with the keys {extra}: its fields are "
                f"{sorted(names)}."
            )
        out = cls._over(tensordict._bare())
        for name, entry in list(tensordict._items()) if tensordict._members() is None else ():
            nested = cls._spec._nested(name, entry) if isinstance(entry, Node) else entry
            if nested is not entry:  # a plain tensordict in a field of a typed class
                out = cls._over(out._inner._like({**dict(out._inner._items()), name: nested}))
        for name, value in (non_tensordict or {}).items():
            new = cls._spec.entry(out._inner, name, value)
            if new is not None:
                out._inner._store(name, new)
        after = getattr(out, "__post_init__", None)
        if after is not None and not cls._spec.extra:
            after()
        return out

    @property
    def _tensordict(self) -> Any:
        return self._inner

    # --- keys: fields are read as attributes ----------------------------------------------

    def __getitem__(self, index: Any) -> Self:
        """The rows that ``index`` selects.

        Raises:
            ValueError: a key; fields are attributes.
        """
        if isinstance(index, (str, tuple)) and is_key(index):
            raise _not_an_index(index)
        out: Self = super().__getitem__(index)
        return out

    def __setitem__(self, index: Any, value: Any) -> None:
        """Write into the rows that ``index`` selects."""
        if isinstance(index, (str, tuple)) and is_key(index):
            raise _not_an_index(index)
        super().__setitem__(index, value)

    def get(self, key: NestedKey, default: Any = NO_DEFAULT, **form: Any) -> Any:
        """The value of a field or of an entry below it, or ``default`` when it is missing."""
        entry = super().get(key, default, **form)
        return entry._value() if isinstance(entry, Leaf) else entry

    def set(
        self, key: NestedKey, item: Any, inplace: bool = False, *, non_blocking: bool = False
    ) -> Self:
        """Write a field or an entry below it, as `TensorDict.set`."""
        if isinstance(key, str) and not inplace:
            set_field(self, key, item)
            return self
        return super().set(key, item, inplace, non_blocking=non_blocking)

    def _card(self) -> NodeCard:
        held = self._names()
        names = sorted({*self._spec.names, *held})
        return NodeCard(
            type(self).__name__,
            field_cards(self._inner, [name for name in names if name in held]),
            self,
            attributes=True,
            missing=[name for name in names if name not in held],
        )

    # --- primitives: one level ------------------------------------------------------------

    def _absent(self) -> list[str]:
        held = self._names()
        return [name for name in self._spec.names if name not in held]

    def _fetch(self, name: str) -> Entry | None:
        return self._inner._fetch(name)

    def _store(self, name: str, entry: Entry) -> None:
        self._inner._store(name, entry)

    def _admit(self, name: str) -> None:
        if name not in self._spec.fields:
            raise no_such_field(type(self), name)

    def _remove(self, name: str) -> None:
        self._inner._remove(name)

    def _remove_last(self) -> tuple[str, Entry]:
        return self._inner._remove_last()

    def _items(self) -> Collection[tuple[str, Entry]]:
        return self._inner._items()

    def _flat_tensors(self) -> dict[str, Tensor] | None:
        entries: dict[str, Tensor] | None = self._inner._flat_tensors()
        return entries

    def _names(self) -> Collection[str]:
        return self._inner._names()

    def _children(self) -> list[Node]:
        return self._inner._children()

    def _like(
        self,
        entries: dict[str, Entry],
        batch_size: Size = KEEP,
        dim_names: DimNames | None = KEEP,
        device: torch.device | None = KEEP,
    ) -> Self:
        return self._over(self._inner._like(entries, batch_size, dim_names, device))

    def _child(self) -> Node:
        return self._inner._child()

    def _class_of(self, name: str) -> type | None:
        return self._inner._class_of(name)

    def _shape_of(self, name: str) -> Size:
        return self._inner._shape_of(name)

    # --- primitives: a stack within, the view ---------------------------------------------

    def _members(self) -> Sequence[Node] | None:
        return self._inner._members()

    @property
    def stack_dim(self) -> int:
        """The stack dimension of the lazy stack within.

        Raises:
            AttributeError: there is none.
        """
        return self._inner.stack_dim

    def _regroup(self, members: list[Any]) -> Self:
        return self._over(self._inner._regroup([member._bare() for member in members]))

    def _shares(self, value: Any, ndim: int) -> list[Any]:
        return self._inner._shares(value, ndim)

    def _bare(self) -> Node:
        return self._inner

    def _dress(self, node: Any) -> Any:
        return node if isinstance(node, TypedView) else self._over(node)

    # --- primitives: the whole tree -------------------------------------------------------

    def _collect(self, out: list[Tensor]) -> None:
        self._inner._collect(out)

    def _rebuild(self, leaves: Iterator[Tensor]) -> Self:
        # `_over`, spelled out here and below: the end of nearly every operation.
        out = new_object(type(self))
        set_attribute(out, "_inner", self._inner._rebuild(leaves))
        return out

    def _map(self, fn: Callable[[Tensor], Tensor]) -> Self:
        out = new_object(type(self))
        set_attribute(out, "_inner", self._inner._map(fn))
        return out

    def _restructure(self, op: StructuralOp) -> Self:
        out = new_object(type(self))
        set_attribute(out, "_inner", self._inner._restructure(op))
        return out

    def _divide(self, op: DividingOp) -> list[Self]:
        return [self._over(piece) for piece in self._inner._divide(op)]

    @classmethod
    def _stack(cls, nodes: Sequence[Any], dim: int) -> Any:
        inner = _same_class(nodes, "stack")
        return nodes[0]._over(type(inner[0])._stack(inner, dim))

    @classmethod
    def _cat(cls, nodes: Sequence[Any], dim: int) -> Any:
        inner = _same_class(nodes, "concatenate")
        return nodes[0]._over(type(inner[0])._cat(inner, dim))

    # --- primitives: description ----------------------------------------------------------

    def _header(self) -> dict[str, Any]:
        return {**self._inner._header(), "within": self._inner.kind}

    @classmethod
    def _from_header(cls, header: dict[str, Any], entries: dict[str, Entry]) -> Any:
        return cls._over(node_class(header["within"])._from_header(header, entries))


def field_property(name: str, doc: str | None = None) -> property:
    """The attribute of a field."""

    def read(self: Any) -> Any:
        inner = self._inner
        # The usual node within is asked without a call.
        entry = inner._entries.get(name) if type(inner) is TensorDict else inner._fetch(name)
        if type(entry) is Tensor or not isinstance(entry, Leaf):
            return entry
        return entry._value()

    def write(self: Any, value: Any) -> None:
        set_field(self, name, value)

    return property(read, write, doc=doc)


def set_field(view: TypedView, name: str, value: Any) -> None:
    """Write a field: checked, converted as the class says; None removes the entry.

    Raises:
        FrozenInstanceError: (an ``AttributeError``) the class is frozen.
        LockedError: the instance is locked.
        AttributeError: no such field.
    """
    spec = view._spec
    if view._lock is not None:
        if spec.options.frozen:
            raise FrozenInstanceError(f"cannot assign to field {name!r}")
        raise LockedError
    if name not in spec.fields:
        raise no_such_field(type(view), name)
    inner = view._inner
    entry = spec.entry(inner, name, value)
    if entry is not None:
        inner._store(name, entry)
    elif name in inner._names():
        inner._remove(name)


def _same_class(nodes: Sequence[Any], what: str) -> list[Any]:
    """The nodes within views of one class (or of one class and bases with the same fields)."""
    first = type(nodes[0])
    for node in nodes:
        cls = type(node)
        if cls is first:
            continue
        alike = isinstance(node, TypedView) and set(cls._spec.names) == set(first._spec.names)
        if not alike or not (issubclass(cls, first) or issubclass(first, cls)):
            raise EntryTypeError(
                f"Cannot {what} different tensorclasses: got "
                f"{sorted({type(node).__name__ for node in nodes})}."
            )
    return [node._inner for node in nodes]


def _not_an_index(index: Any) -> EntryTypeError:
    return EntryTypeError(
        f"Invalid indexing arguments: {index!r}. A tensorclass is indexed along its batch dimensions; "
        f"to read a field, use the attribute or get({index!r})."
    )
