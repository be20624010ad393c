"""Python values as JSON, without pickle: what a non-tensor entry may hold in a file or a message.

A value that JSON has (None, bool, str, lists, finite floats, small integers) is itself; any
other is an object with one member whose name starts with ``~``.  Decoding makes builtins,
NumPy and torch values only; further classes take part when the program registers them, and
a name that was not registered is an error, never an import.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable
from enum import Enum
from typing import Any, Final

import numpy as np
import torch

from ..errors import UnsupportedLeaf

_MAX_DEPTH: Final = 100
_SAFE_INT: Final = 1 << 53  # what every reader of JSON can hold
_ARRAY_KINDS: Final = "biufcSUmM"

_DTYPES: Final[dict[str, torch.dtype]] = {
    name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)
}

_encoders: dict[type, tuple[str, Callable[[Any], Any]]] = {}
_decoders: dict[str, Callable[[Any], Any]] = {}
_owners: dict[str, str] = {}  # the class of each key of `_decoders`
_enums: dict[str, type[Enum]] = {}


def register_value(
    cls: type, key: str, encode: Callable[[Any], Any], decode: Callable[[Any], Any]
) -> None:
    """Let values of a class travel and be saved.

    Args:
        cls: the class, exactly (not its subclasses).
        key: the name that stands for it; the same in every program that reads it.
        encode: turns a value into one that has an encoding (a dict, say).
        decode: the inverse.

    Raises:
        ValueError: the name stands for another class already.

    >>> from fractions import Fraction
    >>> register_value(Fraction, "fraction", str, Fraction)
    >>> decode(encode(Fraction(1, 3)))
    Fraction(1, 3)
    """
    name = f"{cls.__module__}.{cls.__qualname__}"  # a class may be defined again
    owner = "a kind of plain values" if key in _MAKERS else _owners.get(key, name)
    if owner != name:
        raise ValueError(
            f"Cannot register {name} under the key {key!r}: it stands for {owner} already. "
            "Take another key."
        )
    _owners[key] = name
    _encoders[cls] = (key, encode)
    _decoders[key] = decode


def register_enum(cls: type[Enum], key: str | None = None) -> type[Enum]:
    """Let the members of an enumeration travel and be saved; usable as a decorator.

    Args:
        cls: the enumeration.
        key: the name that stands for it, ``module:qualname`` by default.
    """
    key = f"{cls.__module__}:{cls.__qualname__}" if key is None else key
    _enums[key] = cls
    _encoders[cls] = ("enum", lambda member: [key, member.name])
    return cls


def encode(value: Any, path: Any = ()) -> Any:
    """The JSON form of a value.

    Args:
        value: what to encode.
        path: the key under which it is stored, for errors.

    Raises:
        UnsupportedLeaf: the value, or a part of it, has no encoding.

    >>> encode({"a": (1, 2.5)})
    {'~dict': [['a', {'~tuple': [1, 2.5]}]]}
    """
    return _encode(value, path, 0)


def decode(form: Any) -> Any:
    """The value of a JSON form.

    Raises:
        ValueError: when ``form`` is not one that `encode` makes.

    >>> decode(encode([{1, 2}, b"x", torch.float32, slice(0, 3)]))
    [{1, 2}, b'x', torch.float32, slice(0, 3, None)]
    """
    return _decode(form, 0)


def _encode(value: Any, path: Any, depth: int) -> Any:
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    if kind is int:
        return value if -_SAFE_INT <= value <= _SAFE_INT else {"~int": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {"~float": repr(value)}
    if depth >= _MAX_DEPTH:
        raise UnsupportedLeaf(path, f"a value nested deeper than {_MAX_DEPTH}")
    if kind is list:
        return [_encode(part, path, depth + 1) for part in value]
    if kind in (tuple, set, frozenset, torch.Size):
        parts = list(value)
        if kind in (set, frozenset):
            parts.sort(key=lambda part: (type(part).__name__, repr(part)))
        return {f"~{kind.__name__.lower()}": [_encode(part, path, depth + 1) for part in parts]}
    if kind is dict:
        pairs = [
            [_encode(k, path, depth + 1), _encode(v, path, depth + 1)] for k, v in value.items()
        ]
        return {"~dict": pairs}
    if isinstance(value, (np.ndarray, np.generic)):
        return _encode_array(value, path)
    if kind is torch.Tensor:
        return _encode_tensor(value, path)
    plain = _PLAIN.get(kind)
    if plain is not None:
        return {f"~{plain[0]}": _encode(plain[1](value), path, depth + 1)}
    if kind in _encoders:
        key, function = _encoders[kind]
        return {f"~{key}": _encode(function(value), path, depth + 1)}
    raise UnsupportedLeaf(
        path,
        f"a value of type {kind.__module__}.{kind.__qualname__}",
        "Register an encoder with tensordict.register_value, or store plain values.",
    )


def _encode_array(value: Any, path: Any) -> Any:
    array = np.asarray(value)
    if array.dtype.kind not in _ARRAY_KINDS:
        raise UnsupportedLeaf(path, f"a NumPy value of dtype {array.dtype}")
    data = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
    if isinstance(value, np.generic):
        return {"~scalar": [array.dtype.str, data]}
    return {"~array": [array.dtype.str, list(array.shape), data]}


def _encode_tensor(value: torch.Tensor, path: Any) -> Any:
    if value.layout is not torch.strided or value.is_quantized or value.is_nested:
        raise UnsupportedLeaf(path, f"a tensor of layout {value.layout} inside a value")
    flat = value.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    data = base64.b64encode(flat.view(torch.uint8).numpy().tobytes()).decode()
    return {"~tensor": [dtype_name(value.dtype), list(value.shape), data]}


def dtype_name(dtype: torch.dtype) -> str:
    """``"float32"`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


# class -> (name, what stands for a value of it)
_PLAIN: Final[dict[type, tuple[str, Callable[[Any], Any]]]] = {
    bytes: ("bytes", lambda value: base64.b64encode(value).decode()),
    complex: ("complex", lambda value: [value.real, value.imag]),
    slice: ("slice", lambda value: [value.start, value.stop, value.step]),
    range: ("range", lambda value: [value.start, value.stop, value.step]),
    torch.dtype: ("dtype", dtype_name),
    torch.device: ("device", str),
}


def _decode(form: Any, depth: int) -> Any:
    kind = type(form)
    if form is None or kind in (bool, str, int, float):
        return form
    if depth > 2 * _MAX_DEPTH:
        raise ValueError(f"a value is nested deeper than {_MAX_DEPTH}")
    if kind is list:
        return [_decode(part, depth + 1) for part in form]
    if kind is not dict or len(form) != 1:
        raise ValueError("expected a plain value or an object with one member")
    ((tag, inner),) = form.items()
    if not tag.startswith("~"):
        raise ValueError(f"{tag[:40]!r} is not the name of a kind of value")
    make = _MAKERS.get(tag[1:]) or _decoders.get(tag[1:])
    if make is None:
        raise ValueError(
            f"values of kind {tag[1:41]!r} are not known here: register them with "
            "tensordict.register_value"
        )
    try:
        return make(_decode(inner, depth + 1))
    except Exception as error:  # whatever a constructor thinks of foreign values
        raise ValueError(f"a value of kind {tag[1:41]!r} is malformed: {error}") from None


def _bytes_of(text: Any) -> bytes:
    if type(text) is not str:
        raise ValueError("expected bytes as base64")
    return base64.b64decode(text, validate=True)


def _make_array(parts: Any) -> np.ndarray:
    name, shape, data = parts
    dtype = np.dtype(_checked(name))
    return np.frombuffer(_bytes_of(data), dtype).reshape([_size(n) for n in shape]).copy()


def _make_scalar(parts: Any) -> Any:
    name, data = parts
    (out,) = np.frombuffer(_bytes_of(data), np.dtype(_checked(name)))
    return out


def _checked(name: Any) -> str:
    # "<f4", "|S3", "<M8[ns]": nothing that describes objects or records.
    if type(name) is not str or len(name) > 24 or name[1:2] not in _ARRAY_KINDS or not name[1:2]:
        raise ValueError("expected the name of a plain NumPy dtype")
    return name


def _size(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError("expected a size")
    return value


def dtype_named(name: Any) -> torch.dtype:
    """The torch dtype of a name such as ``"float32"``.

    Raises:
        ValueError: for anything else.
    """
    found = _DTYPES.get(name) if type(name) is str else None
    if found is None:
        raise ValueError(f"there is no dtype {str(name)[:40]!r}")
    return found


def _make_tensor(parts: Any) -> torch.Tensor:
    name, shape, data = parts
    dtype, sizes = dtype_named(name), [_size(n) for n in shape]
    raw = bytearray(_bytes_of(data))
    if len(raw) != math.prod(sizes) * dtype.itemsize:
        raise ValueError("a tensor has not the bytes of its shape")
    if not raw:
        return torch.empty(sizes, dtype=dtype)
    return torch.frombuffer(raw, dtype=torch.uint8).view(dtype).reshape(sizes)


def _make_enum(parts: Any) -> Enum:
    key, name = parts
    if key not in _enums:
        raise ValueError(f"the enumeration {str(key)[:80]!r} is not registered here")
    return _enums[key][name]


_MAKERS: Final[dict[str, Callable[[Any], Any]]] = {
    "int": lambda text: int(text, 16),
    "float": lambda text: {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[text],
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "size": lambda parts: torch.Size([_size(n) for n in parts]),
    "dict": lambda pairs: {k: v for k, v in pairs},  # noqa: C416 (a pair is checked to be one)
    "bytes": _bytes_of,
    "complex": lambda parts: complex(*parts),
    "slice": lambda parts: slice(*parts),
    "range": lambda parts: range(*parts),
    "dtype": dtype_named,
    "device": lambda name: torch.device(str(name)),
    "array": _make_array,
    "scalar": _make_scalar,
    "tensor": _make_tensor,
    "enum": _make_enum,
}
