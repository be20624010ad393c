"""The arguments of ``td.to(...)`` as one record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Size, Tensor

from ..core.devices import as_device
from ..core.leaf import Leaf
from ..core.node import Node
from ..core.sizes import as_size
from ..core.traverse import leaves, parts
from .attrs import TensorAttrs
from .rules import Spec, Target


@dataclass(frozen=True, slots=True)
class MoveRequest:
    """What ``to()`` was asked for.

    Attributes:
        device: One device for all leaves.
        dtype: One dtype for all leaves.
        memory_format: One memory format for all leaves.
        spec: An ``attrs()`` tree, or a `Spec`: a target for each leaf.  Excludes the three above.
        batch_size: A batch size for the result.
        inplace: Write into the same tensordict.
        non_blocking: ``None`` copies asynchronously and waits where the values could be read early.
        non_blocking_pin: Pin leaves while others are copied.
        num_threads: Threads that pin; 0 pins on the calling thread.
    """

    device: torch.device | None = None
    dtype: torch.dtype | None = None
    memory_format: torch.memory_format | None = None
    spec: Node | Spec | None = None
    batch_size: Size | None = None
    inplace: bool = False
    non_blocking: bool | None = None
    non_blocking_pin: bool = False
    num_threads: int = 0

    @property
    def moves_nothing(self) -> bool:
        """Whether no leaf can be affected."""
        return (
            self.spec is None
            and self.device is None
            and self.dtype is None
            and self.memory_format is None
        )


def parse_to(
    *args: Any,
    other: Any = None,
    batch_size: Any = None,
    inplace: bool = False,
    non_blocking: bool | None = None,
    non_blocking_pin: bool = False,
    num_threads: int | None = 0,
    **kwargs: Any,
) -> MoveRequest:
    """Read the arguments of ``to()``.

    Raises:
        TypeError: for arguments that `torch.Tensor.to` would not take either, or a second
            positional argument beside a spec.
        NotImplementedError: for ``non_blocking_pin=True`` with a spec.

    >>> parse_to("cpu", torch.float16).dtype
    torch.float16
    """
    options: dict[str, Any] = {
        "batch_size": None if batch_size is None else as_size(batch_size),
        "inplace": inplace,
        "non_blocking_pin": non_blocking_pin,
        "num_threads": num_threads or 0,
    }
    if other is not None:
        device, dtype = _of_other(other)
        kwargs.setdefault("device", device)
        kwargs.setdefault("dtype", dtype)
    elif args and isinstance(args[0], (Node, Spec, Target)):
        first = args[0]
        if is_spec(first):
            _only_spec(args, kwargs, non_blocking_pin)
            if isinstance(first, Target):
                first = Spec(default=first)
            return MoveRequest(spec=first, non_blocking=non_blocking, **options)
        device, dtype = _of_other(first)
        args = args[1:]
        kwargs.setdefault("device", device)
        kwargs.setdefault("dtype", dtype)
    device, dtype, positional_flag, memory_format = _parse_torch(args, kwargs)
    if non_blocking is None and positional_flag is not None:
        non_blocking = positional_flag
    return MoveRequest(device, dtype, memory_format, None, non_blocking=non_blocking, **options)


def is_spec(value: Any) -> bool:
    """Whether ``value`` gives each leaf its own target: a `Spec`, or a tree made by ``attrs()``.

    >>> from tensordict import TensorDict
    >>> td = TensorDict({"a": torch.zeros(2)})
    >>> is_spec(td.attrs()), is_spec(td), is_spec(TensorDict())
    (True, False, False)
    """
    if isinstance(value, (Spec, Target)):
        return True
    pending: list[Node] = [value]
    for node in pending:
        for _, entry in parts(node):
            if type(entry) is TensorAttrs:
                return True
            if isinstance(entry, Node):
                pending.append(entry)
            elif not isinstance(entry, Leaf):
                # A tree of tensors: what is beside them does not matter.
                return False
    return False


def _only_spec(args: tuple[Any, ...], kwargs: dict[str, Any], non_blocking_pin: bool) -> None:
    if len(args) > 1 or kwargs:
        extra = [*(repr(arg) for arg in args[1:]), *kwargs]
        raise TypeError(
            f"Cannot combine a spec with other targets: to(spec) does not accept {', '.join(extra)}. "
            f"Put them in the spec."
        )
    if non_blocking_pin:
        raise NotImplementedError(
            "non_blocking_pin=True is not supported with a spec. Call pin_memory() first."
        )


def _of_other(other: Any) -> tuple[torch.device | None, torch.dtype | None]:
    """Device attribute and common dtype of a tensordict, both of a tensor."""
    if isinstance(other, Tensor):
        return other.device, other.dtype
    if not isinstance(other, Node):
        raise TypeError(
            f"Cannot use other={other!r}: expected a tensordict, got {type(other).__name__}."
        )
    dtypes = {x.dtype for x in leaves(other)}
    return other._device, dtypes.pop() if len(dtypes) == 1 else None


def _parse_torch(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[torch.device | None, torch.dtype | None, bool | None, torch.memory_format | None]:
    """The forms of `torch.Tensor.to`; torch's own parser reads all but the commonest."""
    memory_format = kwargs.pop("memory_format", None)
    device, dtype = kwargs.get("device"), kwargs.get("dtype")
    rest = args
    if args:
        first = args[0]
        if first is None and device is None:
            rest = args[1:]
        elif type(first) is torch.dtype and dtype is None:
            dtype, rest = first, args[1:]
        elif isinstance(first, (torch.device, str)) and device is None:
            device, rest = first, args[1:]
        if rest and type(rest[0]) is torch.dtype and dtype is None:
            dtype, rest = rest[0], rest[1:]
    if not rest and not (set(kwargs) - {"device", "dtype"}) and type(device) is not int:
        return None if device is None else as_device(device), dtype, None, memory_format
    kwargs = {key: value for key, value in kwargs.items() if value is not None}
    given = [*args]
    flag = next((arg for arg in given[1:] if isinstance(arg, bool)), None)
    device, dtype, _, parsed = torch._C._nn._parse_to(*given, **kwargs)
    return None if device is None else as_device(device), dtype, flag, memory_format or parsed
