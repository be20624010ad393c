"""The printed forms of a tensordict."""

from __future__ import annotations

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
    lines = [
        f"{inner}{_INDENT}{name}: {entry_text(entry, inner + _INDENT)}"
        for name, entry in sorted(node._items(), key=lambda pair: pair[0])
    ]
    fields = "fields={\n" + ",\n".join(lines) + "}" if lines else f"fields={{\n{inner}}}"
    rest = [
        fields,
        f"batch_size={node._batch_size}",
        f"device={node._device}",
        f"is_shared={shared(node)}",
    ]
    body = ",\n".join(inner + part for part in rest)
    return f"{type(node).__name__}(\n{body})"


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
