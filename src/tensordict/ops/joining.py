"""Methods that join tensordicts, or the entries of one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._keys import path_of, short
from .._typing import NestedKey, Path
from ..core import write
from ..core.node import Node
from ..core.traverse import leaves, leaves_with_path
from ..errors import EntryTypeError, LockedError, ShapeError, StructureError
from . import combine, keysets, stacking

if TYPE_CHECKING:
    from typing_extensions import Self


class JoiningMethods(Node):
    """stack and cat, of tensordicts and of entries."""

    __slots__ = ()

    @classmethod
    def stack(cls, input: Iterable[Any], dim: int = 0, *, out: Any = None) -> Self:
        """Tensordicts stacked along a new batch dimension; see `tensordict.stack`."""
        result: Self = combine.stack(input, dim, out=out)
        return result

    @classmethod
    def cat(cls, input: Iterable[Any], dim: int = 0, *, out: Any = None) -> Self:
        """Tensordicts concatenated along a batch dimension; see `tensordict.cat`."""
        result: Self = combine.cat(input, dim, out=out)
        return result

    @classmethod
    def lazy_stack(
        cls, input: Iterable[Any], dim: int = 0, *, out: Any = None, **kwargs: Any
    ) -> Any:
        """Tensordicts stacked without copying them; see `tensordict.lazy_stack`."""
        return stacking.lazy_stack(input, dim, out=out, **kwargs)

    @classmethod
    def maybe_dense_stack(
        cls, input: Iterable[Any], dim: int = 0, *, out: Any = None, **kwargs: Any
    ) -> Any:
        """A dense stack where possible, else a lazy one; see `tensordict.maybe_dense_stack`."""
        return stacking.maybe_dense_stack(input, dim, out=out, **kwargs)

    def to_lazystack(self, dim: int = 0) -> Any:
        """The rows of a batch dimension as the members of a lazy stack, over the same memory.

        >>> from tensordict import TensorDict
        >>> type(TensorDict({"a": torch.zeros(2)}, [2]).to_lazystack()).__name__
        'LazyStackedTensorDict'
        """
        rows: Any = self.unbind(dim)  # type: ignore[attr-defined]
        return stacking.lazy_stack(rows, dim)

    def stack_tensors(
        self, *keys: NestedKey, out_key: NestedKey, dim: int = 0, keep_entries: bool = False
    ) -> Self:
        """Replace entries by one that stacks them; returns self.

        Args:
            *keys: the entries, tensors of one shape.
            out_key: where the stack goes.
            dim: its new dimension.
            keep_entries: keep the entries as well.

        Raises:
            KeyError: an entry is missing.
            RuntimeError: shapes differ, the result does not start with the batch size, or the
                tensordict is locked; nothing has changed then.

        >>> from tensordict import TensorDict
        >>> TensorDict(a=0, b=1).stack_tensors("a", "b", out_key="c")["c"]
        tensor([0, 1])
        """
        return _joined(self, torch.stack, keys, out_key, dim, keep_entries)

    def cat_tensors(
        self, *keys: NestedKey, out_key: NestedKey, dim: int = 0, keep_entries: bool = False
    ) -> Self:
        """Replace entries by one that concatenates them; arguments as in `stack_tensors`.

        >>> from tensordict import TensorDict
        >>> td = TensorDict(a=torch.zeros(1), b=torch.ones(2))
        >>> td.cat_tensors("a", "b", out_key="c")["c"]
        tensor([0., 1., 1.])
        """
        return _joined(self, torch.cat, keys, out_key, dim, keep_entries)

    def stack_from_tensordict(
        self, dim: int = 0, *, sorted: Any = None, out: Tensor | None = None
    ) -> Tensor:
        """One tensor that stacks all leaves.

        Args:
            dim: the new dimension.
            sorted: True for the order of the keys, False or None for that of insertion, or
                a list of all keys.
            out: a tensor to fill.
        """
        return torch.stack(_column(self, sorted), dim, out=out)

    def cat_from_tensordict(
        self, dim: int = 0, *, sorted: Any = None, out: Tensor | None = None
    ) -> Tensor:
        """One tensor that concatenates all leaves; arguments as in `stack_from_tensordict`.

        >>> from tensordict import TensorDict
        >>> td = TensorDict(b=torch.zeros(1), a=torch.ones(1))
        >>> td.cat_from_tensordict(), td.cat_from_tensordict(sorted=True)
        (tensor([0., 1.]), tensor([1., 0.]))
        """
        return torch.cat(_column(self, sorted), dim, out=out)


def _joined(
    node: Any, join: Any, keys: Iterable[NestedKey], out_key: NestedKey, dim: int, keep: bool
) -> Any:
    paths = [path_of(key) for key in keys]
    column = [_tensor(node, path) for path in paths]
    if not column:
        raise EntryTypeError("Cannot join entries: expected one key or more.")
    # Everything that can fail comes before the first change.
    prepared = write.prepare(node, path_of(out_key), _one(join, column, dim, paths))
    for path in paths if not keep else ():
        if write.resolve(node, path)[0]._lock is not None:
            raise LockedError
    if not keep:
        for path in dict.fromkeys(paths):
            keysets.remove(node, path)
    write.commit(*prepared)
    return node


def _one(join: Any, column: list[Tensor], dim: int, paths: list[Path]) -> Tensor:
    try:
        return join(column, dim)
    except (RuntimeError, IndexError, TypeError) as err:
        named = {short(path): list(x.shape) for path, x in zip(paths, column)}
        raise ShapeError(f"Cannot join the entries {named} along dim {dim}: {err}") from None


def _tensor(node: Node, path: Any) -> Tensor:
    entry = write.require(node, path)
    if not isinstance(entry, Tensor):
        raise EntryTypeError(
            f"Cannot join the entry {short(path)!r}: expected a tensor, got a {type(entry).__name__}."
        )
    return entry


def _column(node: Node, order: Any) -> list[Tensor]:
    if order is None or order is False:
        return leaves(node)
    pairs = leaves_with_path(node)
    if order is True:
        return [x for _, x in sorted(pairs, key=lambda pair: pair[0])]
    wanted = [path_of(key) for key in order]
    present = dict(pairs)
    if len(wanted) != len(present) or present.keys() != set(wanted):
        raise StructureError(
            f"The provided set of keys differs from the tensordict list of keys: got "
            f"{[short(p) for p in wanted]}, expected {[short(p) for p in present]}."
        )
    return [present[path] for path in wanted]
