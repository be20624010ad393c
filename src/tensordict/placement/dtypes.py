"""A method for each dtype, named as those of `torch.Tensor` or as the dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..core.node import Node
from ..errors import EntryTypeError
from .moving import cast_leaves


def _caster(name: str, dtype: torch.dtype) -> Callable[..., Any]:
    def cast(self: Node, *, cast_filter: Callable[[Any, torch.Tensor], Any] | None = None) -> Any:
        return cast_leaves(self, dtype, cast_filter)

    cast.__name__ = name
    cast.__qualname__ = f"DtypeMethods.{name}"
    cast.__doc__ = f"""Cast every leaf to ``{dtype}``.

    Args:
        cast_filter: Called with the path (a tuple of names) and the tensor of each leaf; only
            the leaves for which it is true are cast.
    """
    return cast


class DtypeMethods(Node):
    """Casts of all leaves.

    >>> from tensordict import TensorDict
    >>> td = TensorDict({"a": torch.zeros(2), "b": torch.zeros(2)})
    >>> half = td.half(cast_filter=lambda path, x: path == ("a",))
    >>> half["a"].dtype, half["b"].dtype
    (torch.float16, torch.float32)
    """

    __slots__ = ()

    def type(
        self,
        dst_type: torch.dtype,
        *,
        cast_filter: Callable[[Any, torch.Tensor], Any] | None = None,
    ) -> Any:
        """Cast every leaf to a dtype.

        Args:
            dst_type: The dtype.
            cast_filter: As of the other casts.

        Raises:
            TypeError: for anything that is no dtype.
        """
        if not isinstance(dst_type, torch.dtype):
            raise EntryTypeError(
                f"Cannot cast to {dst_type!r}: expected a torch.dtype, got an object of another type."
            )
        return cast_leaves(self, dst_type, cast_filter)

    bfloat16 = _caster("bfloat16", torch.bfloat16)
    bool = _caster("bool", torch.bool)
    byte = _caster("byte", torch.uint8)
    cdouble = _caster("cdouble", torch.complex128)
    cfloat = _caster("cfloat", torch.complex64)
    chalf = _caster("chalf", torch.complex32)
    char = _caster("char", torch.int8)
    complex32 = _caster("complex32", torch.complex32)
    complex64 = _caster("complex64", torch.complex64)
    complex128 = _caster("complex128", torch.complex128)
    double = _caster("double", torch.float64)
    float = _caster("float", torch.float32)
    float16 = _caster("float16", torch.float16)
    float32 = _caster("float32", torch.float32)
    float64 = _caster("float64", torch.float64)
    half = _caster("half", torch.float16)
    int = _caster("int", torch.int32)
    int8 = _caster("int8", torch.int8)
    int16 = _caster("int16", torch.int16)
    int32 = _caster("int32", torch.int32)
    int64 = _caster("int64", torch.int64)
    long = _caster("long", torch.int64)
    qint8 = _caster("qint8", torch.qint8)
    qint32 = _caster("qint32", torch.qint32)
    quint8 = _caster("quint8", torch.quint8)
    quint4x2 = _caster("quint4x2", torch.quint4x2)
    short = _caster("short", torch.int16)
    uint8 = _caster("uint8", torch.uint8)
    uint16 = _caster("uint16", torch.uint16)
    uint32 = _caster("uint32", torch.uint32)
    uint64 = _caster("uint64", torch.uint64)
