"""Comparisons: trees of booleans, also for non-tensor entries; and whole-tree answers."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .._keys import path_of
from .._typing import Path
from ..core import write
from ..core.leaf import NonTensorData, NonTensorDataBase, compare
from ..core.node import Entry, Node
from ..core.torch_function import implements, implements_operator
from ..core.traverse import (
    DESCEND,
    leaves,
    leaves_like,
    only_tensors,
    put_together,
    zip_map,
)
from ..errors import StructureError
from .operands import accepts, matched, number_list, refuse
from .table import Comparison


class CompareMethods(Node):
    """`equal` and `allclose`; ``==`` and its kin are made from the op table."""

    __slots__ = ()

    def equal(self, other: Any) -> bool:
        """Whether two tensordicts have the same keys, shapes and values.

        >>> from tensordict import TensorDict
        >>> TensorDict(a=1).equal(TensorDict(a=1)), TensorDict(a=1).equal(TensorDict(b=1))
        (True, False)
        """
        if not isinstance(other, Node) or other._batch_size != self._batch_size:
            return False
        try:
            ys = leaves_like(self, other)
        except StructureError:
            return False
        if not all(torch.equal(x, y) for x, y in zip(leaves(self), ys)):
            return False
        return _equal_values(self, other)

    def allclose(
        self, other: Any, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False
    ) -> bool:
        """Whether every leaf is close to the operand everywhere.

        Args:
            other: tensordict, tensor or number.
            rtol, atol, equal_nan: as in `torch.allclose`.
        """
        near = self.isclose(other, rtol, atol, equal_nan)  # type: ignore[attr-defined]
        return all(bool(x.all()) for x in leaves(near))


@implements(torch.equal)
def _equal(input: Any, other: Any) -> bool:
    return isinstance(input, CompareMethods) and input.equal(other)


@implements(torch.allclose)
def _allclose(input: Any, other: Any, *args: Any, **kwargs: Any) -> bool:
    if not isinstance(input, CompareMethods):
        input, other = other, input
    return bool(input.allclose(other, *args, **kwargs))


def _equal_values(node: Node, other: Node) -> bool:
    """Whether two trees hold the same non-tensor values under the same keys."""
    pairs: list[tuple[NonTensorDataBase, Any]] = []

    def visit(path: Path, entry: Entry, theirs: list[Entry | None]) -> Any:
        if isinstance(entry, Node):
            return DESCEND
        if isinstance(entry, NonTensorDataBase):
            pairs.append((entry, theirs[0]))
        return None

    zip_map(node, (other,), visit, lambda path, part, entries: None)
    if any(not isinstance(theirs, NonTensorDataBase) for _, theirs in pairs):
        return False
    if len(pairs) != _count_values(node, other):
        return False
    return all(bool(compare(mine, theirs).all()) for mine, theirs in pairs)


def _count_values(node: Node, other: Node) -> int:
    """How many non-tensor entries ``other`` has, counted along the stacks of ``node``."""
    members = node._members()
    if members is not None:
        shares = node._shares(other, len(other._batch_size))
        return sum(_count_values(m, share) for m, share in zip(members, shares))
    count = 0
    for name in other._names():
        entry = other._fetch(name)
        if isinstance(entry, NonTensorDataBase):
            count += 1
        elif isinstance(entry, Node):
            mine = node._fetch(name)
            count += _count_values(mine if isinstance(mine, Node) else entry, entry)
    return count


def comparison(row: Comparison) -> dict[str, Callable[..., Any]]:
    """The method and the operator of a row, and the rule of its torch function."""
    name = row.name
    fn = getattr(torch, name)
    op = getattr(operator, name)

    def method(self: Any, other: Any) -> Any:
        if not accepts(other) and not isinstance(other, Mapping):
            raise refuse(name, other)
        return _compared(self, other, fn, name)

    def dunder(self: Any, other: Any) -> Any:
        if not accepts(other) and not isinstance(other, Mapping):
            return NotImplemented
        return _compared(self, other, fn, name)

    def rule(input: Any, other: Any) -> Any:
        if isinstance(input, Node):
            return method(input, other)
        return _compared(other, input, lambda y, x: op(x, y), name)

    implements(fn, getattr(Tensor, name))(rule)
    implements_operator(f"__{name}__", rule)
    return {name: method, f"__{name}__": dunder}


def _compared(node: Any, other: Any, fn: Callable[..., Tensor], name: str) -> Any:
    if isinstance(other, Mapping) and not isinstance(other, Node):
        other = _from_mapping(node, other)
    node, frame, xs, values = matched(node, other, name)
    ys: Any = values if type(values) is list else number_list(values, xs)
    if ys is None:
        ys = [values] * len(xs)
    result = put_together(node, frame, map(fn, xs, ys))
    if type(frame) is dict or name not in ("eq", "ne"):
        return result  # values have no order: they stay
    return _with_values(result, other if isinstance(other, Node) else NonTensorData(other), name)


def _with_values(result: Any, other: Any, name: str) -> Any:
    """The tree of booleans with its non-tensor entries compared too."""
    if only_tensors(result):
        return result

    def visit(path: Path, entry: Entry, theirs: list[Entry | None]) -> Any:
        if isinstance(entry, Node):
            return DESCEND
        if not isinstance(entry, NonTensorDataBase):
            return entry
        if not isinstance(other, Node):
            equal = compare(entry, other)
        elif isinstance(theirs[0], NonTensorDataBase):
            equal = compare(entry, theirs[0])
        else:
            equal = torch.zeros(entry._batch_size, dtype=torch.bool)
        equal = equal.expand(entry._batch_size).to(entry._device)
        return equal if name == "eq" else ~equal

    others = (other,) if isinstance(other, Node) else ()
    return zip_map(result, others, visit, lambda path, part, entries: part._like(entries))


def _from_mapping(node: Node, source: Mapping[Any, Any]) -> Node:
    """A mapping as a tensordict of the batch size of ``node``; numbers fill the batch."""
    out = node._child()
    batch = node._batch_size
    for key, value in source.items():
        path = path_of(key)
        if isinstance(value, Mapping):
            below = node._fetch(path[0]) if len(path) == 1 else None
            value = _from_mapping(below if isinstance(below, Node) else node, value)
        elif isinstance(value, (bool, int, float)):
            value = torch.full(batch, value)
        write.assign(out, path, value)
    return out
