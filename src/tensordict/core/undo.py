"""``with td.op(...) as x``: what the block did to ``x`` goes back into ``td``."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ..errors import StateError

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
        always: Write back also when the block raised.
    """

    __slots__ = ("always", "entered", "outer", "source", "write_back")

    def __init__(
        self,
        source: Node | None,
        write_back: WriteBack,
        outer: Undo | None = None,
        always: bool = False,
    ) -> None:
        self.source = None if source is None else weakref.ref(source)
        self.always = always
        self.write_back = write_back
        self.outer = outer
        self.entered = 0


def remember(result: Any, source: Node, write_back: WriteBack, always: bool = False) -> Any:
    """Give ``result`` the way back into ``source``; returns ``result``.

    Args:
        result: what the ``with`` block works on.
        source: what it came from.
        write_back: called with the source and the result when the block ends.
        always: also when the block raised.
    """
    if not torch.compiler.is_compiling():  # weak references do not trace; blocks there see no undo
        result._undo = Undo(source, write_back, _entered(result._undo), always)
    return result


def itself(node: Any) -> Any:
    """``node`` as the result of an operation without effect: a block on it writes nothing back."""
    # Without a way back there is nothing to hide from the block.
    return node if node._undo is None else remember(node, node, _nothing)


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
    """Write ``result`` back at the end of its block; a failed one only if ``always``."""
    undo = _entered(result._undo)
    if undo is None:
        result._undo = None
        return
    undo.entered -= 1
    if undo.entered:  # an inner block on the same object: the outer one is still open
        result._undo = undo
        return
    result._undo = undo.outer
    if failed and not undo.always:
        return
    source = None if undo.source is None else undo.source()
    if source is None and undo.source is not None:
        raise StateError(
            "Cannot write the block back: the tensordict it came from is gone. "
            "Keep a reference to it while the block runs."
        )
    undo.write_back(source, result)


def _entered(undo: Undo | None) -> Undo | None:
    """The innermost undo whose block has begun."""
    while undo is not None and not undo.entered:
        undo = undo.outer
    return undo


def _nothing(source: Any, result: Any) -> None:
    pass
