"""Tensordicts as nodes of ``torch.utils._pytree``, so that vmap, export and others look inside.

Whoever flattens a tensordict may give back other leaves: `torch.vmap` takes a dimension
away or adds one, chunks shorten one, a user's ``tree_map`` does anything.  The context
keeps what the leaves looked like; `_batch_after` finds out what became of the batch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Size, Tensor
from torch.utils import _pytree

from .containers.dense import TensorDict
from .containers.lazy import LazyStackedTensorDict
from .containers.params import TensorDictParams
from .core.leaf import Leaf, MetaData, NonTensorData, NonTensorDataBase, NonTensorStack
from .core.node import Node
from .core.registry import watch_nodes
from .core.structural import DimNames
from .core.traverse import entries_with_path, fold, leaves
from .ops.stacking import lazy_stack
from .typed.view import TypedView


class Mapped(NonTensorData):
    """Whatever else than a tensor an entry was mapped to; flattens back to that value."""

    __slots__ = ()

    kind = "mapped"


_ONLY_MAPPED = {Mapped}


class Context:
    """What a node is beside its leaves; equal for trees that can be mapped together.

    Attributes:
        cls: the class of the node.
        keys: the names of the entries that are tensors or nodes, in insertion order.
        others: name, value and position of the entries that are neither.
        batch_size, dim_names, device: metadata of the node (take no part in equality).
        shapes: shapes of the tensors and batch sizes of the nodes under ``keys``; None for others.
        stack_dim: the dimension of a lazy stack, None for other nodes.
        members: whether the values are the members of a lazy stack, which differ.
    """

    __slots__ = (
        "batch_size",
        "cls",
        "device",
        "dim_names",
        "keys",
        "members",
        "others",
        "shapes",
        "stack_dim",
    )

    def __init__(self, node: Any, keys: list[str], shapes: list[Any], others: Any) -> None:
        # A module that is mapped gives a plain tensordict: its leaves may be anything.
        self.cls = type(node) if isinstance(node, (TensorDict, TypedView)) else TensorDict
        self.keys = keys
        self.others = others
        self.shapes = shapes
        self.batch_size = node._batch_size
        self.dim_names = node._dim_names
        self.device = node._device
        self.stack_dim = None if node._members() is None else node.stack_dim
        self.members = False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Context) and self._key() == other._key()

    def _key(self) -> tuple[Any, ...]:
        return self.cls, self.keys, self.stack_dim, self.members

    def __hash__(self) -> int:
        return hash((self.cls, tuple(self.keys)))

    def __repr__(self) -> str:
        return f"{self.cls.__name__}(keys={self.keys}, batch_size={self.batch_size})"


def _flatten(node: Any) -> tuple[list[Any], Context]:
    """By key; a lazy stack whose members differ, which no key can be read of, by member."""
    frame = node._flat_tensors()
    if frame is not None:
        tensors = list(frame.values())
        return tensors, Context(node, list(frame), [x.shape for x in tensors], ())
    members = node._members()
    if members is None:
        if set(map(type, node._contents())) == _ONLY_MAPPED:
            numbers = [entry._data for entry in node._contents()]
            return numbers, Context(node, list(node._names()), [None] * len(numbers), ())
    elif not _alike(members):
        context = Context(node, [str(i) for i in range(len(members))], [], ())
        context.members = True
        return [node._dress(member) for member in members], context
    keys: list[str] = []
    values: list[Any] = []
    shapes: list[Size | None] = []
    others: list[tuple[str, Leaf, int]] = []
    for name, entry in node._items():
        if type(entry) is Mapped:
            keys.append(name)
            values.append(entry._data)
            shapes.append(None)
            continue
        if isinstance(entry, Leaf):
            others.append((name, entry, len(keys)))
            continue
        keys.append(name)
        values.append(entry)
        shapes.append(entry.shape if isinstance(entry, Tensor) else entry._batch_size)
    return values, Context(node, keys, shapes, others)


def _flatten_with_keys(node: Any) -> tuple[list[tuple[Any, Any]], Context]:
    values, context = _flatten(node)
    return [(_pytree.MappingKey(k), v) for k, v in zip(context.keys, values)], context


def _alike(members: Sequence[Node]) -> bool:
    """Whether all members have the same keys, with entries of the same shapes."""
    first = {path: x.shape for path, x in entries_with_path(members[0])}
    return all({p: x.shape for p, x in entries_with_path(m)} == first for m in members[1:])


def _unflatten(values: Iterable[Any], context: Context) -> Any:
    values = list(values)
    if context.members:
        if all(isinstance(value, Node) for value in values):
            return lazy_stack(values, context.stack_dim or 0)
        return TensorDict(dict(zip(context.keys, values)))
    kinds = set(map(type, values))
    if not context.others and kinds <= _NUMBERS and kinds:
        # What vmap makes to see the structure: no leaf says anything about the batch.
        batch, device = context.batch_size, context.device
        mapped: dict[str, Any]
        if len(kinds) == 1 and values.count(values[0]) == len(values):
            mapped = dict.fromkeys(context.keys, Mapped._new(values[0], batch, device))
        else:
            made = [Mapped._new(value, batch, device) for value in values]
            mapped = dict(zip(context.keys, made))
        return context.cls._new(mapped, batch, context.dim_names, device)
    if kinds == _ONLY_TENSORS and None not in context.shapes:
        news = [value.shape for value in values]
        batch, names = _batch_of(context.shapes, news, values[0], context)
    else:
        batch, names = _batch_after(values, context)
    entries: dict[str, Any] = {}
    others = list(context.others)
    if not others and kinds == _ONLY_TENSORS:
        entries = dict(zip(context.keys, values))
        values = []
    for i, (name, value) in enumerate(zip(context.keys, values)):
        while others and others[0][2] <= i:
            other, leaf, _ = others.pop(0)
            entries[other] = _fitted_leaf(leaf, batch)
        entries[name] = _fitted(value, batch, context)
    entries.update((other, _fitted_leaf(leaf, batch)) for other, leaf, _ in others)
    out = context.cls._new(entries, batch, names, context.device)
    if context.stack_dim is None or batch != context.batch_size or _holds_mapped(out):
        return out
    return out.to_lazystack(context.stack_dim)


_NUMBERS = {int, bool, type(None)}
_ONLY_TENSORS = {Tensor}


def _fitted(value: Any, batch: Size, context: Context) -> Any:
    """What is stored for a value that an entry was mapped to."""
    if isinstance(value, (Tensor, Leaf)):
        return value
    if isinstance(value, Node):
        # Without leaves a node cannot know what became of the batch: it follows its parent.
        if batch == context.batch_size or leaves(value):
            return value
        return fold(
            value,
            lambda leaf: _fitted_leaf(leaf, batch),  # type: ignore[arg-type]
            lambda node, entries: node._like(entries, batch, None),
        )
    return Mapped._new(value, batch, context.device)


def _holds_mapped(node: Node) -> bool:
    return any(type(entry) is Mapped for _, entry in entries_with_path(node))


def _fitted_leaf(leaf: Leaf, batch: Size) -> Leaf:
    if isinstance(leaf, NonTensorData):
        return leaf._with(batch, leaf._device)
    if leaf._batch_size[: len(batch)] == batch:
        return leaf
    # One value per row, and other rows than before: the rows can only be kept as a value.
    return NonTensorData._new(leaf._plain(), batch, leaf._device)


def _batch_after(values: Sequence[Any], context: Context) -> tuple[Size, DimNames | None]:
    """The batch size and dimension names of a node that gets other leaves."""
    olds: list[Size] = []
    news: list[Size] = []
    leaf = None
    for old, value in zip(context.shapes, values):
        if isinstance(value, Tensor):
            new = value.shape
            leaf = value if leaf is None else leaf
        elif isinstance(value, Node) and leaves(value):
            new = value._batch_size
        else:
            continue
        if old is not None:
            olds.append(old)
            news.append(new)
    return _batch_of(olds, news, leaf, context)


def _batch_of(
    olds: list[Size], news: list[Size], leaf: Tensor | None, context: Context
) -> tuple[Size, DimNames | None]:
    """`_batch_after` from the shapes of entries before and after, and one of the tensors."""
    batch, names = context.batch_size, context.dim_names
    if olds == news:
        return batch, names
    grown = len(news[0]) - len(olds[0])
    if olds.count(olds[0]) == news.count(news[0]) == len(olds):
        olds, news = olds[:1], news[:1]  # one pair of shapes says what all of them say
    elif any(len(new) - len(old) != grown for old, new in zip(olds, news)):
        return _same_rank(batch, names, [batch, *news])
    if grown == 0:
        return _same_rank(batch, names, news)
    if grown == -1:
        dim = _dim_taken(olds, news, leaf)
        if dim is not None and dim < len(batch):
            left = None if names is None else _unless_empty([*names[:dim], *names[dim + 1 :]])
            return batch[:dim] + batch[dim + 1 :], left
        if dim is not None:
            return batch, names
    if grown == 1:
        dim = _dim_added(olds, news, len(batch))
        if dim is not None:
            more = None if names is None else [*names[:dim], None, *names[dim:]]
            return Size([*batch[:dim], news[0][dim], *batch[dim:]]), more
    return _same_rank(batch, names, [batch, *news])


def _same_rank(
    batch: Size, names: DimNames | None, shapes: Sequence[Size]
) -> tuple[Size, DimNames | None]:
    """The leading dimensions that all shapes share, at most as many as the batch had."""
    n = len(batch)
    if all(shape[:n] == batch for shape in shapes):
        return batch, names
    first = shapes[-1]
    while n and not all(shape[:n] == first[:n] for shape in shapes):
        n -= 1
    return first[:n], names if n == len(batch) else None


def _dim_taken(olds: Sequence[Size], news: Sequence[Size], leaf: Tensor | None) -> int | None:
    """The dimension that every leaf lost."""
    fits = [
        dim
        for dim in range(len(olds[0]))
        if all(new == old[:dim] + old[dim + 1 :] for old, new in zip(olds, news))
    ]
    # Sizes alone cannot tell the dimensions of a square apart, but vmap knows which it took.
    if len(fits) > 1 and leaf is not None and not torch.compiler.is_compiling():
        taken = torch._C._functorch.maybe_get_bdim(leaf)
        if taken in fits:
            return taken
    return fits[0] if fits else None


def _dim_added(olds: Sequence[Size], news: Sequence[Size], limit: int) -> int | None:
    """The dimension that every leaf gained, one of the first ``limit + 1``."""
    sizes = news[0]
    for dim in range(min(limit + 1, len(sizes))):
        n = sizes[dim]
        if all(
            dim < len(new) and new[dim] == n and new[:dim] + new[dim + 1 :] == old
            for old, new in zip(olds, news)
        ):
            return dim
    return None


def _unless_empty(names: DimNames) -> DimNames | None:
    return names if any(name is not None for name in names) else None


def register(
    cls: type,
    flatten: Callable[[Any], Any] = _flatten,
    unflatten: Callable[[Iterable[Any], Any], Any] = _unflatten,
    flatten_with_keys: Callable[[Any], Any] = _flatten_with_keys,
) -> None:
    """Make a class a pytree node; torch looks classes up by identity, so each needs it."""
    if cls not in _pytree.SUPPORTED_NODES:
        _pytree.register_pytree_node(
            cls, flatten, unflatten, flatten_with_keys_fn=flatten_with_keys
        )


_known: list[type] = []


def register_with_optree() -> None:
    """Make tensordicts nodes of `optree` too, in its global namespace.

    Done by itself when optree is imported before this package, whose own import does not
    import it.

    >>> register_with_optree()
    >>> import optree
    >>> optree.tree_map(lambda x: x + 1, TensorDict(a=0))["a"]
    tensor(1)
    """
    import optree

    namespace = vars(optree.registry)["__GLOBAL_NAMESPACE"]
    while _known:
        optree.register_pytree_node(
            _known.pop(),
            _flatten_for_optree,
            _unflatten_for_optree,
            path_entry_type=optree.MappingEntry,
            namespace=namespace,
        )


def _flatten_for_optree(node: Any) -> tuple[list[Any], Context, list[str]]:
    values, context = _flatten(node)
    return values, context, context.keys


def _unflatten_for_optree(context: Any, values: Iterable[Any]) -> Any:
    return _unflatten(values, context)


def _register(cls: type) -> None:
    if issubclass(cls, (TensorDict, TensorDictParams, TypedView, LazyStackedTensorDict)):
        register(cls)
        _known.append(cls)
        if "optree" in sys.modules:
            register_with_optree()


watch_nodes(_register)


class Held:
    """A value outside of tensordicts: a node without leaves; any two of one class are equal."""

    __slots__ = ("leaf",)

    def __init__(self, leaf: NonTensorDataBase) -> None:
        self.leaf = leaf

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Held) and type(self.leaf) is type(other.leaf)

    def __hash__(self) -> int:
        return hash(type(self.leaf))


for _cls in (NonTensorData, MetaData, NonTensorStack):
    register(
        _cls,
        lambda leaf: ([], Held(leaf)),
        lambda _, held: held.leaf,
        lambda leaf: ([], Held(leaf)),
    )
