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

    Attributes:
        entered: Blocks on the result that have begun; with none there is nothing to undo.
        outer: The undo of a block that the result is in already (``with a.to(...) as b:
            b.unlock_()``), which must not be forgotten.
    """

    __slots__ = ("entered", "outer", "source", "write_back")

    def __init__(self, source: Node, write_back: WriteBack, outer: Undo | None) -> None:
        self.source = weakref.ref(source)
        self.write_back = write_back
        self.outer = outer
        self.entered = 0


def remember(result: Any, source: Node, write_back: WriteBack) -> Any:
    """Give ``result`` the way back into ``source``; returns ``result``."""
    if not torch.compiler.is_compiling():  # weak references do not trace; blocks there see no undo
        result._undo = Undo(source, write_back, _entered(result._undo))
    return result


def begin(result: Node) -> None:
    """The block on ``result`` begins: tell a write-back that compares before and after."""
    undo = result._undo
    if undo is None:
        return
    undo.entered += 1
    hook = getattr(undo.write_back, "begin", None)
    if hook is not None and undo.entered == 1:
        hook(result)


def leave(result: Node, failed: bool = False) -> None:
    """Write ``result`` back at the end of its block, unless it ``failed``."""
    undo = _entered(result._undo)
    if undo is None:
        result._undo = None
        return
    undo.entered -= 1
    if undo.entered:  # an inner block on the same object: the outer one is still open
        result._undo = undo
        return
    result._undo = undo.outer
    if failed:
        return
    source = undo.source()
    if source is None:
        raise TensorDictError(
            "Cannot write the block back: the tensordict it came from is gone. "
            "Keep a reference to it while the block runs."
        )
    undo.write_back(source, result)


def _entered(undo: Undo | None) -> Undo | None:
    """The innermost undo whose block has begun."""
    while undo is not None and not undo.entered:
        undo = undo.outer
    return undo
