"""`TypedTensorDict`: a tensordict whose keys are declared, with shapes and dtypes checked on request."""

from __future__ import annotations

import inspect
import typing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import NotRequired, get_type_hints

from ..containers.dense import TensorDict
from ..core.node import Node
from ..errors import EntryTypeError, StructureError, table_of

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What an entry has to look like, for ``Annotated[Tensor, TensorSpec(...)]``.

    Attributes:
        shape: sizes after the batch dimensions: numbers, None for any, or a name, which
            stands for one size in the whole tensordict.
        dtype: the dtype, None for any.
    """

    shape: tuple[int | str | None, ...] | None = None
    dtype: torch.dtype | None = None


class TypedTensorDict(TensorDict):
    """A `TensorDict` with declared entries, read and written as attributes or by key.

    A subclass declares entries by annotation, ``NotRequired[...]`` for those that may be
    missing.  The constructor takes them as keywords and wants every required one, and no
    other; later writes are those of `TensorDict`.  `check` compares with the declaration.

    >>> from typing import Annotated
    >>> class State(TypedTensorDict):
    ...     pos: Annotated[Tensor, TensorSpec(shape=("n", 3), dtype=torch.float32)]
    ...     mass: Annotated[Tensor, TensorSpec(shape=("n",))]
    ...     tag: NotRequired[str]
    >>> state = State(pos=torch.zeros(2, 5, 3), mass=torch.ones(2, 5), batch_size=[2])
    >>> state.check().pos.shape, type(state[0]).__name__
    (torch.Size([2, 5, 3]), 'State')
    """

    __slots__ = ()

    __required_keys__: ClassVar[frozenset[str]] = frozenset()
    __optional_keys__: ClassVar[frozenset[str]] = frozenset()

    def __init__(
        self,
        *,
        batch_size: Any = None,
        device: Any = None,
        names: Any = None,
        lock: bool = False,
        **entries: Any,
    ) -> None:
        _check_names(type(self), entries)
        super().__init__(entries, batch_size, device, names, lock=lock)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        required, optional = set(cls.__required_keys__), set(cls.__optional_keys__)
        hints = _hints(cls)
        for name in inspect.get_annotations(cls):
            if typing.get_origin(hints.get(name)) is ClassVar or name.startswith("__"):
                continue
            if hasattr(TensorDict, name):
                raise AttributeError(
                    f"Attribute name {name} can't be used in a TypedTensorDict, as tensordicts have a "
                    f"member of that name."
                )
            missing_is_fine = typing.get_origin(hints.get(name)) is NotRequired
            (optional if missing_is_fine else required).add(name)
            (required if missing_is_fine else optional).discard(name)
            setattr(cls, name, _entry(name))
        cls.__required_keys__ = frozenset(required)
        cls.__optional_keys__ = frozenset(optional)

    @classmethod
    def from_tensordict(cls, tensordict: Node) -> Self:
        """A tensordict with these entries in this class: the same entries, no copy.

        Raises:
            TypeError: a required entry is missing, or one is not declared.
        """
        entries = dict(tensordict._items())
        _check_names(cls, entries)
        return cls._new(entries, tensordict._batch_size, tensordict._dim_names, tensordict._device)

    def check(self) -> Self:
        """Compare entries, shapes and dtypes with the declaration; returns self.

        Raises:
            StructureError: (a ``KeyError``) lists every difference.
        """
        cls = type(self)
        rows = [(n, "missing") for n in sorted(cls.__required_keys__) if n not in self._entries]
        declared = cls.__required_keys__ | cls.__optional_keys__
        rows += [(n, "not declared") for n in self._entries if n not in declared]
        sizes: dict[str, tuple[str, int]] = {}
        for name, hint in _hints(cls).items():
            entry = self._entries.get(name)
            if entry is None or name not in declared:
                continue
            rows += [(name, text) for text in _differences(self, name, entry, hint, sizes)]
        if rows:
            raise StructureError(
                table_of(f"{cls.__name__} is not as declared: {len(rows)} differences.", rows)
            )
        return self


def _entry(name: str) -> property:
    def read(self: Any) -> Any:
        return self[name]

    def write(self: Any, value: Any) -> None:
        self[name] = value

    return property(read, write)


def _check_names(cls: Any, entries: Any) -> None:
    missing = sorted(cls.__required_keys__ - set(entries))
    if missing:
        raise EntryTypeError(f"{cls.__name__}() missing required field(s): {', '.join(missing)}")
    extra = sorted(set(entries) - cls.__required_keys__ - cls.__optional_keys__)
    if extra:
        raise EntryTypeError(f"{cls.__name__}() got unexpected field(s): {', '.join(extra)}")


def _hints(cls: type) -> dict[str, Any]:
    """The resolved annotations; those that do not resolve say nothing."""
    out: dict[str, Any] = {}
    for owner in reversed(cls.__mro__):
        if owner is TypedTensorDict or not issubclass(owner, TypedTensorDict):
            continue
        for name, hint in inspect.get_annotations(owner).items():
            # One at a time: the others need not resolve.
            probe = type(owner.__name__, (), {"__module__": owner.__module__})
            probe.__annotations__ = {name: hint}
            try:
                out[name] = get_type_hints(probe, include_extras=True)[name]
            except (NameError, AttributeError, TypeError, SyntaxError):
                out.pop(name, None)
    return out


def _differences(
    node: TensorDict, name: str, entry: Any, hint: Any, sizes: dict[str, tuple[str, int]]
) -> list[str]:
    if typing.get_origin(hint) is NotRequired:
        (hint,) = typing.get_args(hint)
    specs = [x for x in getattr(hint, "__metadata__", ()) if isinstance(x, TensorSpec)]
    base = typing.get_args(hint)[0] if specs else hint
    if base is Tensor and not isinstance(entry, Tensor):
        return [f"expected a tensor, got a {type(entry).__name__}"]
    out: list[str] = []
    if hasattr(base, "array_type") and not isinstance(entry, base):  # jaxtyping: dtype and shape
        out.append(f"expected {base.__name__}, got {entry.dtype} {list(entry.shape)}")
    for spec in specs:
        if spec.dtype is not None and entry.dtype is not spec.dtype:
            out.append(f"expected {spec.dtype}, got {entry.dtype}")
        if spec.shape is not None:
            out += _shape_differences(name, entry.shape[node.ndim :], spec.shape, sizes)
    return out


def _shape_differences(
    name: str,
    shape: torch.Size,
    wanted: tuple[int | str | None, ...],
    sizes: dict[str, tuple[str, int]],
) -> list[str]:
    if len(shape) != len(wanted):
        return [f"expected shape [*B, {', '.join(map(str, wanted))}], got [*B] + {list(shape)}"]
    out: list[str] = []
    for n, want in zip(shape, wanted):
        if isinstance(want, str):
            where, size = sizes.setdefault(want, (name, n))
            if size != n:
                out.append(f"expected {want}={size} as in {where!r}, got {n}")
        elif want is not None and n != want:
            out.append(f"expected size {want}, got {n} in [*B] + {list(shape)}")
    return out
