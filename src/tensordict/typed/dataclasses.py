"""Dataclasses as tensorclasses: a type gives a type, an instance an instance."""

from __future__ import annotations

import dataclasses
import types
import weakref
from typing import Any

from ..errors import EntryTypeError
from ..ops.convert_python import tensorclass_of
from .tensorclass import TensorClass, tensorclass

_made: weakref.WeakKeyDictionary[type, dict[Any, type]] = weakref.WeakKeyDictionary()


def from_dataclass(
    obj: Any,
    *,
    dest_cls: Any = None,
    auto_batch_size: bool = False,
    batch_dims: int | None = None,
    batch_size: Any = None,
    frozen: bool = False,
    autocast: bool = False,
    nocast: bool = False,
    inplace: bool = False,
    shadow: bool = False,
    tensor_only: bool = False,
    device: Any = None,
) -> Any:
    """A tensorclass type of a dataclass type, or an instance of it of an instance.

    Args:
        obj: a dataclass or an instance of one.
        dest_cls: the tensorclass of the result, for an instance.
        auto_batch_size, batch_dims, batch_size, device: as in `TensorDict.from_dict`.
        frozen, autocast, nocast, shadow, tensor_only: options of the tensorclass.
        inplace: only False: a class that others hold is not changed under them.

    Raises:
        TypeError: not a dataclass; NotImplementedError: ``inplace``.

    >>> import torch
    >>> @dataclasses.dataclass
    ... class Point:
    ...     xy: torch.Tensor
    ...     name: str = "p"
    >>> from_dataclass(Point(torch.zeros(3)), batch_size=[3]).name
    'p'
    """
    if inplace:
        raise NotImplementedError(
            "from_dataclass(inplace=True) would change a class that others hold. Use the class that "
            "from_dataclass() returns, or decorate with @tensorclass."
        )
    if not dataclasses.is_dataclass(obj):
        raise EntryTypeError(
            f"Cannot make a tensorclass of a {type(obj).__name__}: expected a dataclass or an "
            f"instance of one."
        )
    options = {
        "frozen": frozen,
        "autocast": autocast,
        "nocast": nocast,
        "shadow": shadow,
        "tensor_only": tensor_only,
    }
    options = {name: value for name, value in options.items() if value}
    if isinstance(obj, type):
        return _class_of(obj, options)
    cls = dest_cls or _class_of(type(obj), options)
    values = {f.name: getattr(obj, f.name) for f in dataclasses.fields(obj) if f.init}
    out = cls(**values, batch_size=batch_size, device=device)
    if batch_size is None and (auto_batch_size or batch_dims is not None):
        out.auto_batch_size_(batch_dims)
    return out


def _class_of(cls: type, options: dict[str, bool]) -> Any:
    if issubclass(cls, TensorClass):
        return cls
    made = _made.setdefault(cls, {})
    key = frozenset(options)
    if key not in made:
        made[key] = _build(cls, options)
    return made[key]


def _build(cls: type, options: dict[str, bool]) -> type:
    """A tensorclass with the fields and the methods of a dataclass."""
    namespace: dict[str, Any] = {"__annotations__": {}, "__doc__": cls.__doc__}
    for base in reversed(cls.__mro__[:-1]):
        for name, value in vars(base).items():
            ours = isinstance(value, (types.FunctionType, property, classmethod, staticmethod))
            if ours and (not name.startswith("__") or name == "__post_init__"):
                namespace[name] = value
    for field in dataclasses.fields(cls):
        namespace["__annotations__"][field.name] = field.type
        if field.default is not dataclasses.MISSING:
            namespace[field.name] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            namespace[field.name] = dataclasses.field(default_factory=field.default_factory)
    namespace["__module__"] = cls.__module__
    namespace["__qualname__"] = f"{cls.__qualname__}_tc"
    plain: Any = type(f"{cls.__name__}_tc", (), namespace)
    decorate: Any = tensorclass
    made: type = decorate(plain, **options)
    return made


tensorclass_of.append(lambda cls: _class_of(cls, {}))
