"""Making typed classes: the base `TensorClass` and the decorator `tensorclass`."""

from __future__ import annotations

import dataclasses
import inspect
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, overload

from torch import Tensor
from typing_extensions import dataclass_transform

from ..core import registry
from ..errors import EntryTypeError
from .fields import CASTING, METADATA, OPTIONS, Options, Spec, is_tensor_hint, signature
from .view import TypedView, field_property

T = TypeVar("T")
CastFilter = Callable[[Any, Tensor], Any]


class TensorClass(TypedView):
    """Base of classes with typed fields that behave like a tensordict.

    A subclass declares its fields by annotation, as a dataclass does; the constructor
    takes them, then ``batch_size=``, ``device=``, ``names=`` and ``lock=`` as `TensorDict`.
    Every method of tensordicts works, and gives the class back.  Options are class
    keywords, or ``TensorClass["nocast", "frozen"]``: see `tensordict.typed.fields.Options`.
    The keywords ``register_as=`` and ``cast_filter=`` are those of `tensorclass`.

    >>> import torch
    >>> class Sample(TensorClass):
    ...     features: torch.Tensor
    ...     label: str = "none"
    >>> batch = torch.stack([Sample(torch.zeros(3)), Sample(torch.ones(3), label="one")])
    >>> type(batch).__name__, batch.features.shape, batch.label
    ('Sample', torch.Size([2, 3]), ['none', 'one'])
    """

    if TYPE_CHECKING:
        # Keyword-only fields to type checkers, so that constructors take them.
        batch_size: Any = dataclasses.field(default=None, kw_only=True)
        device: Any = dataclasses.field(default=None, kw_only=True)
        names: Any = dataclasses.field(default=None, kw_only=True)
        lock: dataclasses.InitVar[bool] = dataclasses.field(default=False, kw_only=True)

    kind: ClassVar[str]

    def __init_subclass__(
        cls, register_as: str | None = None, cast_filter: CastFilter | None = None, **kwargs: Any
    ) -> None:
        given = {name: bool(kwargs.pop(name)) for name in OPTIONS if name in kwargs}
        super().__init_subclass__(**kwargs)
        _make(cls, given, register_as)
        _filter_casts(cls, cast_filter)

    def __class_getitem__(cls, item: Any) -> Any:
        names = item if isinstance(item, tuple) else (item,)
        if names and all(isinstance(name, str) and name in OPTIONS for name in names):
            return _with_options(cls, tuple(sorted(names)))
        if all(isinstance(name, str) for name in names):
            raise EntryTypeError(
                f"Cannot make {cls.__name__}[{item!r}]: expected options among {sorted(OPTIONS)}."
            )
        return super().__class_getitem__(item)  # type: ignore[misc]


_variants: dict[Any, type] = {}


def _with_options(cls: type, names: tuple[str, ...]) -> type:
    """A class without fields of its own that has the options; one per set of them."""
    found = _variants.get((cls, names))
    if found is None:
        title = f"{cls.__name__}[{', '.join(names)}]"
        found = types.new_class(
            title,
            (cls,),
            dict.fromkeys(names, True),
            lambda ns: ns.update(__module__=cls.__module__),
        )
        _variants[cls, names] = found
    return found


@overload
def tensorclass(cls: type[T], /) -> type[T]: ...


@overload
def tensorclass(
    *,
    autocast: bool = False,
    frozen: bool = False,
    nocast: bool = False,
    shadow: bool = False,
    tensor_only: bool = False,
    kw_only: bool = False,
    register_as: str | None = None,
    skip_post_init_on_rebuild: bool = True,
    cast_filter: CastFilter | None = None,
) -> Callable[[type[T]], type[T]]: ...


@dataclass_transform(field_specifiers=(dataclasses.field, dataclasses.Field))
def tensorclass(
    cls: Any = None,
    /,
    *,
    register_as: str | None = None,
    skip_post_init_on_rebuild: bool = True,
    cast_filter: CastFilter | None = None,
    **options: bool,
) -> Any:
    """Make a class of annotated fields a `TensorClass`.

    Args:
        cls: the class.
        register_as: name under which files and messages know it; ``module:qualname``
            without it.
        skip_post_init_on_rebuild: accepted for compatibility of calls: ``__post_init__``
            runs at construction only.
        cast_filter: called with the path (a tuple of names) and the tensor of each leaf when an
            instance is cast (``half()``, ``to(dtype)``); only leaves for which it is true are.
            Casts of a tree that holds an instance do not ask, and an own ``cast_filter=``
            comes first.
        **options: see `tensordict.typed.fields.Options`.

    >>> import torch
    >>> @tensorclass
    ... class Point:
    ...     xy: torch.Tensor
    ...     def norm(self):
    ...         return self.xy.norm(dim=-1)
    >>> Point(torch.ones(4, 2), batch_size=[4])[:2].norm().shape
    torch.Size([2])
    """
    unknown = sorted(set(options) - set(OPTIONS))
    if unknown:
        raise TypeError(f"tensorclass() has no options {unknown}: expected {sorted(OPTIONS)}.")

    def decorate(cls: Any) -> Any:
        made = _decorated(cls, register_as, options)
        _filter_casts(made, cast_filter)
        return made

    return decorate if cls is None else decorate(cls)


def _filter_casts(cls: Any, cast_filter: CastFilter | None) -> None:
    if cast_filter is not None:
        cls._cast_filter = staticmethod(cast_filter)


def _decorated(cls: Any, register_as: str | None, options: dict[str, bool]) -> Any:
    if issubclass(cls, TensorClass):  # made by its base already: the options are new
        _make(cls, options, register_as, again=True)
        return cls
    namespace = {
        name: value
        for name, value in cls.__dict__.items()
        if name not in ("__dict__", "__weakref__", "__slots__")
    }
    bases = tuple(base for base in cls.__bases__ if base is not object)
    at = len(bases)
    for i, base in enumerate(bases):
        if base.__module__ == "typing":  # Generic comes last
            at = i
            break
    bases = (*bases[:at], TensorClass, *bases[at:])
    keywords: dict[str, Any] = {**options, "register_as": register_as}
    namespace["__qualname__"] = cls.__qualname__
    made = types.new_class(cls.__name__, bases, keywords, lambda ns: ns.update(namespace))
    _rebind(namespace.values(), cls, made)
    return made


def _rebind(functions: Any, old: type, new: type) -> None:
    """Point ``super()`` in the functions of a class at the class that took its place."""
    for function in functions:
        for part in (function, *(getattr(function, n, None) for n in ("fget", "fset", "__func__"))):
            for cell in getattr(part, "__closure__", None) or ():
                if cell.cell_contents is old:
                    cell.cell_contents = new


def _make(cls: Any, given: dict[str, bool], register_as: str | None, again: bool = False) -> None:
    """Read the fields of a class, give it their attributes and register it."""
    options = cls._options = _merged(cls._options, given)
    if not again:
        own = list(inspect.get_annotations(cls))
        for name in own:
            if name not in cls.__dict__:  # what is inherited under the name is no default
                setattr(cls, name, dataclasses.field())
        dataclasses.dataclass(init=False, repr=False, eq=False, kw_only=options.kw_only)(cls)
        for name in own:
            if name in {field.name for field in dataclasses.fields(cls)}:
                _refuse_name(cls, name, options)
                setattr(cls, name, field_property(name))
        cls.__dataclass_fields__.update(_Metadata.__dataclass_fields__)
    spec = cls._spec = Spec(cls, options)
    if options.tensor_only:
        _only_tensors(cls, spec)
    cls.__signature__ = signature(spec)
    _register(cls, register_as)


@dataclasses.dataclass(init=False, repr=False, eq=False)
class _Metadata:
    """The constructor's other parameters as init-only variables, for `dataclasses.replace`."""

    batch_size: dataclasses.InitVar[Any] = None
    device: dataclasses.InitVar[Any] = None
    names: dataclasses.InitVar[Any] = None


def _merged(known: Options, given: dict[str, bool]) -> Options:
    values = {name: getattr(known, name) for name in OPTIONS}
    if any(given.get(name) for name in CASTING):
        values.update(dict.fromkeys(CASTING, False))
    return Options(**{**values, **given})


def _refuse_name(cls: type, name: str, options: Options) -> None:
    if name in (*METADATA, "lock") or (hasattr(TensorClass, name) and not options.shadow):
        raise AttributeError(
            f"Attribute name {name} can't be used with @tensorclass or TensorClass, as tensorclasses "
            f"have a member of that name. To allow it, pass shadow=True "
            f"(@tensorclass(shadow=True) or TensorClass['shadow'])."
        )


def _only_tensors(cls: type, spec: Spec) -> None:
    for name in spec.names:
        if not is_tensor_hint(spec.hint(name)):
            raise TypeError(
                f"Cannot make {cls.__name__} tensor_only: the field {name!r} is annotated with "
                f"{spec.fields[name].type}. tensor_only requires types to be Tensor, Tensor-subtypes "
                f"or None."
            )


def _register(cls: Any, register_as: str | None) -> None:
    """Make a class known to files and messages.

    Raises:
        EntryTypeError: another class with other fields has the name; a class of a function
            or of ``__main__`` may be defined anew.
    """
    cls.kind = register_as or f"{cls.__module__}:{cls.__qualname__}"
    other = registry.known_node(cls.kind)
    passing = cls.__module__ == "__main__" or "<locals>" in cls.__qualname__
    if other is not None and other is not cls and not (passing and register_as is None):
        fields = other._spec.names if issubclass(other, TypedView) else None
        if fields != cls._spec.names:
            raise EntryTypeError(
                f"Cannot register {cls.__name__} as {cls.kind!r}: a class with other fields has that "
                f"name: {fields}. Pass register_as= to give it another one."
            )
    registry.register_node(cls)


def is_tensorclass(obj: Any) -> bool:
    """Whether an object or a class is a tensorclass.

    >>> is_tensorclass(TensorClass), is_tensorclass(3)
    (True, False)
    """
    return issubclass(obj if isinstance(obj, type) else type(obj), TensorClass)
