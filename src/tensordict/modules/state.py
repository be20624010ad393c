"""Modules as trees: parameters and buffers taken out of a module, and put into one.

`plan_swap` reads a module and a tree and checks everything; running the plan only
assigns.  A swap stores values in ``module._parameters`` and ``module._buffers``, as
``torch.func.functional_call`` does; ``setattr`` (six times slower) is used for classes
that override it, such as RNNs, which cache their weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from .._keys import short
from .._typing import Path
from ..core import lock as locking
from ..core.node import Node
from ..core.registry import node_class
from ..core.sizes import EMPTY
from ..errors import MissingKeyError, ShapeError, table_of
from ..ops.inplace import copy_each

_functorch_stack = torch._C._functorch.peek_interpreter_stack


def module_tree(module: nn.Module, filter_empty: bool = True) -> Any:
    """A tensordict of the parameters and buffers of a module: the same objects, nested by name.

    Args:
        module: any module; a module that appears twice is listed under both names.
        filter_empty: leave out submodules that hold nothing.
    """
    new = node_class("dense")._new
    return new(_entries(module, filter_empty, new), EMPTY, None, None)


def _entries(module: nn.Module, filter_empty: bool, new: Any) -> dict[str, Any]:
    out: dict[str, Any] = {k: v for k, v in module._parameters.items() if v is not None}
    if module._buffers:
        out.update({k: v for k, v in module._buffers.items() if v is not None})
    for name, child in module._modules.items():
        if isinstance(child, Node):  # a tensordict that is a module: its batch size is kept
            out[name] = child._map(lambda x: x)
        elif child is not None:
            below = _entries(child, filter_empty, new)
            if below or not filter_empty:
                out[name] = new(below, EMPTY, None, None)
    return out


def state_tree(module: nn.Module) -> Any:
    """A tensordict of ``module.state_dict()``, nested at the dots; state-dict hooks apply.

    Entries that are not tensors (extra state) are kept as non-tensor data.
    """
    return node_class("dense")(nested(module.state_dict()))


def nested(flat: Any) -> dict[str, Any]:
    """A mapping with dotted names as nested dicts.

    >>> nested({"a.b": 1, "c": 2})
    {'a': {'b': 1}, 'c': 2}
    """
    out: dict[str, Any] = {}
    for name, value in flat.items():
        *parents, last = name.split(".")
        level = out
        for parent in parents:
            level = level.setdefault(parent, {})
        level[last] = value
    return out


# One value of a module and what takes its place: store, name, old value, new value.
Move: TypeAlias = tuple[dict[str, Any], str, Any, Tensor]


class Moves:
    """What goes where.

    Attributes:
        listed: one move for each leaf of the tree.
        watched: id of a store to its module, for classes that override ``__setattr__``.
        nodes: modules that are tensordicts: lists that they cache when locked go out of date.
    """

    __slots__ = ("listed", "nodes", "watched")

    def __init__(self) -> None:
        self.listed: list[Move] = []
        self.watched: dict[int, nn.Module] = {}
        self.nodes: list[Node] = []

    def enter(self, module: nn.Module) -> None:
        """Note what is special about a module whose values will be moved."""
        if type(module).__setattr__ is not _plain_setattr:
            for store in (module._parameters, module._buffers):
                self.watched[id(store)] = module
        if isinstance(module, Node):
            self.nodes.append(module)

    def put(self, values: Iterable[Any]) -> None:
        """Store one value for each move, in the place that it has in the module's order."""
        if not self.watched:
            for (store, name, _, _), value in zip(self.listed, values):
                store[name] = value
        else:
            for (store, name, _, _), value in zip(self.listed, values):
                module = self.watched.get(id(store))
                if module is None:
                    store[name] = value
                else:
                    _put_by_setattr(module, name, value, store)
        for node in self.nodes:
            locking.touched(node)


_plain_setattr = nn.Module.__setattr__


def _put_by_setattr(module: nn.Module, name: str, value: Any, store: dict[str, Any]) -> None:
    """Let ``__setattr__`` see the value while ``store`` keeps its order and takes any tensor."""
    attrs = module.__dict__
    which = "_parameters" if store is module._parameters else "_buffers"
    attrs[which] = {}  # nothing is registered for the moment: any value may be assigned
    try:
        setattr(module, name, value)
    finally:
        attrs[which] = store
        attrs.pop(name, None)
        if store is not module._parameters:
            module._parameters.pop(name, None)
    store[name] = value


class Swap:
    """A plan to put the leaves of a tree into a module, and the way back.

    As the write-back of the tree of former values it restores the module at the end of a
    block, also when the block raised.  In the block the module holds the very tensors
    of the tree; outside one, a plain tensor that takes the place of a parameter is
    wrapped in a Parameter over the same memory, so that optimisers find it.
    """

    __slots__ = ("moves", "wrapped")

    def __init__(self, moves: Moves) -> None:
        self.moves = moves
        self.wrapped = False

    def run(self) -> None:
        """Put the new values in."""
        values = [raw for _, _, _, raw in self.moves.listed]
        if not torch.compiler.is_compiling() and _functorch_stack() is None:
            self._wrap(values)
        self.moves.put(values)

    def _wrap(self, values: list[Tensor]) -> None:
        made: dict[int, nn.Parameter] = {}  # a tie stays a tie
        for i, (_, _, old, raw) in enumerate(self.moves.listed):
            if type(raw) is nn.Parameter or raw.requires_grad or isinstance(raw, nn.Parameter):
                continue
            if type(old) is nn.Parameter or isinstance(old, nn.Parameter):
                new = made.get(id(raw))
                if new is None:
                    grad = old.requires_grad and (raw.is_floating_point() or raw.is_complex())
                    new = made[id(raw)] = nn.Parameter(raw, grad)
                values[i] = new
                self.wrapped = True

    def begin(self, result: Node) -> None:
        """In a block, the tensors of the tree take the place of their wrappers."""
        if self.wrapped:
            self.moves.put([raw for _, _, _, raw in self.moves.listed])

    def __call__(self, source: Any, result: Any) -> None:
        """Put the former values back."""
        self.moves.put([old for _, _, old, _ in self.moves.listed])


class Overwrite:
    """A plan to copy the leaves of a tree into the memory of a module, and the way back."""

    __slots__ = ("former", "moves", "non_blocking")

    def __init__(self, moves: Moves, former: list[Tensor], non_blocking: bool) -> None:
        self.moves = moves
        self.former = former
        self.non_blocking = non_blocking

    def run(self) -> None:
        """Copy the new values in."""
        self._copy([raw for _, _, _, raw in self.moves.listed])

    def __call__(self, source: Any, result: Any) -> None:
        """Copy the former values back."""
        self._copy(self.former)

    def _copy(self, values: list[Tensor]) -> None:
        targets: list[Tensor] = []
        others: list[Tensor] = []
        for (_, _, old, _), new in zip(self.moves.listed, values):
            if old is not new:
                targets.append(old)
                others.append(new)
        if targets:
            with torch.no_grad():
                copy_each(targets, others, self.non_blocking)


def plan_moves(node: Node, module: nn.Module) -> tuple[Moves, Any]:
    """What goes where, and the values that were there as a tensordict of the same structure.

    Raises:
        MissingKeyError: (a ``KeyError``) the module lacks an entry of the tree; all of
            them are named.
    """
    moves = Moves()
    unknown: list[Path] = []
    former = _pair(node, module, (), moves, unknown, node_class("dense")._new)
    if unknown:
        raise MissingKeyError(
            table_of(
                f"Cannot put the tensordict into {type(module).__name__}: it has no parameter, "
                f"buffer or submodule of {len(unknown)} of the names. Use select() to choose entries.",
                [(short(path), "not in the module") for path in unknown],
            )
        )
    return moves, former


def _pair(
    node: Node, module: nn.Module, path: Path, moves: Moves, unknown: list[Path], new: Any
) -> Any:
    params, buffers, children = module._parameters, module._buffers, module._modules
    moves.enter(module)
    listed = moves.listed
    former: dict[str, Any] = {}
    for name, entry in node._items():
        if isinstance(entry, Tensor):
            store: Any
            if name in params:
                store = params
            elif name in buffers:
                store = buffers
            else:
                unknown.append((*path, name))
                continue
            old = store[name]
            listed.append((store, name, old, entry))
            if old is not None:
                former[name] = old
        elif isinstance(entry, Node):
            child = children.get(name)
            if child is not None:
                former[name] = _pair(entry, child, (*path, name), moves, unknown, new)
            elif len(entry._names()):
                unknown.append((*path, name))
    return new(former, EMPTY, None, None)


def check_shapes(moves: Moves) -> None:
    """Check that every value can be copied over the one it replaces.

    Raises:
        ShapeError: (a ``RuntimeError``) naming every value of another shape.
    """
    rows = [
        (name, f"{_shape(old)} in the module, {list(raw.shape)} given")
        for _, name, old, raw in moves.listed
        if old is None or old.shape != raw.shape
    ]
    if rows:
        raise ShapeError(table_of("Cannot write into the module in place: shapes differ.", rows))


def _shape(x: Tensor | None) -> str:
    return "None" if x is None else str(list(x.shape))


def named_values(node: Node, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Dotted names and tensors of a tree, as in ``module.state_dict()``."""
    for name, entry in node._items():
        if isinstance(entry, Node):
            yield from named_values(entry, f"{prefix}{name}.")
        elif isinstance(entry, Tensor):
            yield prefix + name, entry
