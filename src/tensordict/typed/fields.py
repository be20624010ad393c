"""The fields of a typed view: what a class declares, and how values become entries."""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass
from typing import Any

import torch
from torch import Tensor

from ..core import write
from ..core.leaf import Leaf, NonTensorData
from ..core.node import Entry, Node

_NUMBERS = (bool, int, float, complex)
_UNKNOWN: Any = object()  # the hint of an annotation that cannot be resolved


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a class, each of the name of its keyword.

    Attributes:
        autocast: convert values to the annotated type.
        nocast: store what is no tensor as it is, numbers and lists too.
        frozen: lock instances and refuse to set fields.
        shadow: allow fields with the name of a method.
        tensor_only: every field is a tensor; values are converted.
        kw_only: fields are keyword-only in the constructor.
    """

    autocast: bool = False
    nocast: bool = False
    frozen: bool = False
    shadow: bool = False
    tensor_only: bool = False
    kw_only: bool = False

    def __post_init__(self) -> None:
        if self.autocast + self.nocast + self.tensor_only > 1:
            raise ValueError(
                "autocast, nocast and tensor_only exclude each other: pass one of them."
            )


CASTING = ("autocast", "nocast", "tensor_only")
OPTIONS = tuple(field.name for field in dataclasses.fields(Options))


class Spec:
    """What a class declares, read once.

    Attributes:
        names: the fields in order.
        positional: the fields that the constructor takes by position.
        fields: the dataclass field of each name.
        extra: init-only variables, passed on to ``__post_init__``.
        options: the options of the class.
    """

    __slots__ = ("_cls", "_hints", "extra", "fields", "names", "options", "positional")

    def __init__(self, cls: type, options: Options) -> None:
        declared = cls.__dataclass_fields__  # type: ignore[attr-defined]
        self.fields: dict[str, dataclasses.Field[Any]] = {
            f.name: f for f in dataclasses.fields(cls)
        }
        self.names = tuple(self.fields)
        self.extra = {
            name: f
            for name, f in declared.items()
            if name not in self.fields
            and name not in METADATA
            and not _is_class_variable(f)  # an init-only variable
        }
        self.positional = tuple(
            name
            for name, f in declared.items()
            if (name in self.fields or name in self.extra) and f.init and f.kw_only is not True
        )
        self.options = options
        self._cls = cls
        self._hints: dict[str, Any] = {}

    def hint(self, name: str) -> Any:
        """The resolved annotation of a field without ``None``; `_UNKNOWN` when it has no value here.

        Of one of jaxtyping (``Float[Tensor, "b n"]``) the array type.
        """
        found = self._hints.get(name)
        if found is None:
            found = _without_none(_resolved(self._cls, self.fields[name]))
            # An annotation of jaxtyping is no class to convert to; it names the one that is.
            found = self._hints[name] = getattr(found, "array_type", found)
        return found

    def bind(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
        """The value of every field and of the init-only variables, defaults filled in.

        Raises:
            TypeError: a value is missing, given twice, or given by position too many times.
            AttributeError: a keyword that is no field.
        """
        cls = self._cls
        if len(args) > len(self.positional):
            raise TypeError(
                f"{cls.__name__}.__init__() takes {len(self.positional)} positional arguments but "
                f"{len(args)} were given"
            )
        given = dict(zip(self.positional, args))
        for name, value in kwargs.items():
            if name in given:
                raise TypeError(
                    f"{cls.__name__}.__init__() got multiple values for argument {name!r}"
                )
            field = self.fields.get(name) or self.extra.get(name)
            if field is None or not field.init:
                raise no_such_field(cls, name)
            given[name] = value
        missing: list[str] = []
        values: dict[str, Any] = {}
        for name, field in self.fields.items():
            values[name] = given[name] if name in given else _default(field, missing)
        extra = [
            given[name] if name in given else _default(field, missing)
            for name, field in self.extra.items()
        ]
        if missing:
            names = ", ".join(repr(name) for name in missing)
            raise TypeError(
                f"{cls.__name__}.__init__() missing {len(missing)} required "
                f"argument{'s' if len(missing) > 1 else ''}: {names}"
            )
        return values, extra

    def entry(self, node: Node, name: str, value: Any) -> Entry | None:
        """The entry that a value becomes in a field, None for no entry."""
        if value is None:
            return None
        if isinstance(value, (Tensor, Leaf)):
            return write.entry_of(node, value, (name,))
        options = self.options
        if isinstance(value, (Node, Mapping)):
            return write.entry_of(node, self._nested(name, value), (name,))
        if options.tensor_only:
            return write.entry_of(node, torch.as_tensor(value, device=node._device), (name,))
        if options.nocast:
            return _value(node, value)
        if options.autocast:
            return self._cast(node, name, value)
        if isinstance(value, _NUMBERS) and node._batch_size and self.hint(name) in _NUMBERS:
            return _value(node, value)  # one number for the whole batch
        return write.entry_of(node, value, (name,))

    def _nested(self, name: str, value: Any) -> Any:
        """A tensordict or mapping as the annotated class of a field has it."""
        hint = self.hint(name)
        if isinstance(hint, type) and issubclass(hint, Node):
            view = getattr(hint, "_of", None)
            if view is not None and not isinstance(value, hint):
                return view(value)
            return value
        return NonTensorData(value) if isinstance(value, dict) else value

    def _cast(self, node: Node, name: str, value: Any) -> Entry:
        hint = self.hint(name)
        origin = typing.get_origin(hint) or hint
        if not isinstance(origin, type) or origin is object:
            return write.entry_of(node, value, (name,))
        if issubclass(origin, Tensor):
            return write.entry_of(node, torch.as_tensor(value, device=node._device), (name,))
        if isinstance(value, origin) and not (origin is int and isinstance(value, bool)):
            return _value(node, value)
        cast: Any = origin
        return _value(node, cast(value))


def _is_class_variable(field: dataclasses.Field[Any]) -> bool:
    return "CLASSVAR" in repr(field._field_type)  # type: ignore[attr-defined]


# Parameters of every constructor that are no fields.
METADATA = ("batch_size", "device", "names")


def _value(node: Node, value: Any) -> Entry:
    return NonTensorData._new(value, node._batch_size, node._device)


def no_such_field(cls: Any, name: str) -> AttributeError:
    """The error for a name that is no field of a class."""
    return AttributeError(
        f"Cannot set the attribute {name!r}: {cls.__name__} has no such field. Its fields are "
        f"{sorted(cls._spec.names)}."
    )


def _default(field: dataclasses.Field[Any], missing: list[str]) -> Any:
    if field.default is not MISSING:
        return field.default
    if field.default_factory is not MISSING:
        return field.default_factory()
    if field.init:
        missing.append(field.name)
    return None


def _resolved(cls: type, field: dataclasses.Field[Any]) -> Any:
    hint: Any = field.type
    if not isinstance(hint, str):
        return hint
    for owner in cls.__mro__:
        if field.name in inspect.get_annotations(owner):
            # A class of its own: the other annotations need not be resolvable.
            probe = type(owner.__name__, (), {"__module__": owner.__module__})
            probe.__annotations__ = {field.name: hint}
            try:
                return typing.get_type_hints(probe, localns={owner.__name__: owner})[field.name]
            except (NameError, AttributeError, TypeError, SyntaxError):
                return _UNKNOWN
    return _UNKNOWN


def _without_none(hint: Any) -> Any:
    """``X`` for ``X | None``; a union of several types is left as it is."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        kinds = [kind for kind in typing.get_args(hint) if kind is not type(None)]
        if len(kinds) == 1:
            return kinds[0]
    return hint


def is_tensor_hint(hint: Any) -> bool:
    """Whether an annotation is a tensor class."""
    return isinstance(hint, type) and issubclass(hint, Tensor)


def signature(spec: Spec) -> inspect.Signature:
    """The constructor's signature, for `help` and editors."""
    kind = inspect.Parameter
    rows = {**spec.fields, **spec.extra}
    params = [kind("self", kind.POSITIONAL_OR_KEYWORD)]
    by_position = list(spec.positional)
    rest = [n for n, f in rows.items() if f.init and n not in by_position]
    for names, how in ((by_position, kind.POSITIONAL_OR_KEYWORD), (rest, kind.KEYWORD_ONLY)):
        for name in names:
            f = rows[name]
            default: Any = kind.empty
            if f.default is not MISSING:
                default = f.default
            elif f.default_factory is not MISSING:
                default = f.default_factory
            params.append(kind(name, how, default=default, annotation=f.type))
    params += [kind(name, kind.KEYWORD_ONLY, default=None) for name in METADATA]
    params.append(kind("lock", kind.KEYWORD_ONLY, default=False))
    try:
        return inspect.Signature(params)
    except ValueError:  # a field without default after one with: only keywords tell them apart
        return inspect.Signature(
            [params[0], *(p.replace(kind=kind.KEYWORD_ONLY) for p in params[1:])]
        )
