"""The printed forms of a tensordict."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..core.leaf import Leaf
from ..core.lock import origin_of
from ..core.node import Node

_INDENT = "    "


def type_name(x: Tensor) -> str:
    """The class name shown for a leaf."""
    if type(x) is Tensor or x.is_nested:
        return "Tensor"
    return type(x).__name__


def is_shared(x: Tensor) -> bool:
    """Whether a leaf is in shared memory; False where that cannot be asked."""
    if x.device.type == "meta" or x.is_nested:
        return False
    try:
        return x.is_shared()
    except (RuntimeError, NotImplementedError):
        return False


def leaf_text(x: Tensor) -> str:
    """``Tensor(shape=..., device=..., dtype=..., is_shared=...)``."""
    shape = _shape(x)
    return (
        f"{type_name(x)}(shape={shape}, device={x.device}, dtype={x.dtype}, "
        f"is_shared={is_shared(x)})"
    )


def _shape(x: Tensor) -> torch.Size:
    if x.is_nested:
        return torch.Size([n if isinstance(n, int) else -1 for n in x.shape])
    return x.shape


def node_text(node: Any, indent: str = "") -> str:
    """The full form: one line per field, keys sorted, nested ones indented."""
    inner = indent + _INDENT
    body = ",\n".join(inner + line for line in node._lines(inner))
    return f"{type(node).__name__}(\n{body})"


def fields_text(node: Node, names: Iterable[str], inner: str, title: str = "fields") -> str:
    """``fields={...}`` of some entries of a node, one line each, sorted."""
    lines = [
        f"{inner}{_INDENT}{name}: {field_text(node, name, inner + _INDENT)}"
        for name in sorted(names)
    ]
    return f"{title}={{\n" + ",\n".join(lines) + "}" if lines else f"{title}={{\n{inner}}}"


def field_text(node: Node, name: str, indent: str) -> str:
    """One entry of a node; of a stack, without stacking it."""
    cls = node._class_of(name)
    if cls is None or not issubclass(cls, Tensor) or node._members() is None:
        return entry_text(node._fetch(name), indent)
    xs: list[Any] = [member._fetch(name) for member in node._members() or ()]
    devices = {x.device for x in xs}
    shared = all(is_shared(x) for x in xs)
    dtype = xs[0].dtype
    for x in xs[1:]:
        dtype = torch.promote_types(dtype, x.dtype)
    return (
        f"{type_name(xs[0])}(shape={node._shape_of(name)}, "
        f"device={xs[0].device if len(devices) == 1 else None}, dtype={dtype}, is_shared={shared})"
    )


def metadata_lines(node: Node) -> list[str]:
    """The lines after the fields."""
    return [
        f"batch_size={node._batch_size}",
        f"device={node._device}",
        f"is_shared={shared(node)}",
    ]


def entry_text(entry: Any, indent: str) -> str:
    """One entry, continued lines indented."""
    if isinstance(entry, Tensor):
        return leaf_text(entry)
    if isinstance(entry, Node):
        return node_text(entry, indent)
    assert isinstance(entry, Leaf)
    return repr(entry).replace("\n", "\n" + indent)


def shared(node: Node) -> bool:
    """Whether the tree as a whole is in shared memory."""
    origin = origin_of(node)
    return origin is not None and origin.shared


class DisplayMethods(Node):
    """Printing."""

    __slots__ = ()

    def __repr__(self) -> str:
        return node_text(self)

    def _lines(self, inner: str) -> list[str]:
        """The lines of the full form; kinds that print otherwise have their own."""
        return [fields_text(self, self._names(), inner), *metadata_lines(self)]
