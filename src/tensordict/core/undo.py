"""``with td.op(...) as x``: what the block did to ``x`` goes back into ``td``."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ..errors import TensorDictError

if TYPE_CHECKING:
    from .node import Node

WriteBack = Callable[[Any, Any], None]


class Undo:
    """A weak reference to the source, and how to write a result back into it.

    Weak, because ``x = x.to("cpu")`` must not keep the accelerator's memory alive.
    """

    __slots__ = ("source", "write_back")

    def __init__(self, source: Node, write_back: WriteBack) -> None:
        self.source = weakref.ref(source)
        self.write_back = write_back


def remember(result: Any, source: Node, write_back: WriteBack) -> Any:
    """Give ``result`` the way back into ``source``; returns ``result``."""
    if not torch.compiler.is_compiling():  # weak references do not trace; blocks there see no undo
        result._undo = Undo(source, write_back)
    return result


def leave(result: Node) -> None:
    """Write ``result`` back at the end of its block."""
    undo = result._undo
    if undo is None:
        return
    result._undo = None
    source = undo.source()
    if source is None:
        raise TensorDictError(
            "Cannot write the block back: the tensordict it came from is gone. "
            "Keep a reference to it while the block runs."
        )
    undo.write_back(source, result)
