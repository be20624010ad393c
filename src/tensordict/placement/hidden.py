"""Tensors inside of non-tensor values: a dict, list or tuple kept as one value.

They are no leaves: `to` leaves them alone.  A plan reports them, and moves them when asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from .._typing import Path
from ..core.leaf import Leaf, NonTensorData, NonTensorStack
from ..core.traverse import nodes_with_path
from .routes import Route

_CONTAINERS = (dict, list, tuple, Tensor)

# A value's path, and where in it the tensor is.
Place = tuple[Path, Path]


@dataclass(frozen=True, slots=True)
class HiddenTensor:
    """A tensor inside of a non-tensor value.

    Attributes:
        path: Where the value is.
        inner: Keys and positions within the value.
        device, dtype, shape: What the tensor is like.
        route: How the plan moves it; ``None`` when it stays.
    """

    path: Path
    inner: Path
    device: torch.device
    dtype: torch.dtype
    shape: tuple[int, ...]
    route: Route | None = None

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def find_hidden(
    entries: Iterable[tuple[Path, Any]], route: Callable[[Path, Tensor], Route] | None
) -> tuple[HiddenTensor, ...]:
    """The tensors inside of non-tensor values.

    Args:
        entries: Paths and entries of a tree.
        route: The route of a tensor, from its path (that of the value and the one within it);
            ``None`` moves none.
    """
    out: list[HiddenTensor] = []
    for path, entry in entries:
        if not isinstance(entry, (NonTensorData, NonTensorStack)):
            continue
        value = _payload(entry)
        if not isinstance(value, _CONTAINERS):
            continue
        for inner, x in _tensors(value):
            made = None if route is None else route((*path, *inner), x)
            out.append(HiddenTensor(path, inner, x.device, x.dtype, tuple(x.shape), made))
    return tuple(out)


def move_hidden(
    out: Any, hidden: Iterable[HiddenTensor], copy: Callable[[Tensor, Route], Tensor]
) -> None:
    """Put moved tensors into the non-tensor values of a tree; the values are copied, not changed."""
    routes = {(item.path, item.inner): item.route for item in hidden}
    if not routes:
        return
    holders = dict(nodes_with_path(out))
    for path in dict.fromkeys(path for path, _ in routes):
        holder = holders[path[:-1]]._bare()
        leaf = holder._fetch(path[-1])
        assert isinstance(leaf, Leaf)
        holder._store(path[-1], _with_moved(leaf, path, routes, copy))


def _with_moved(
    leaf: Leaf,
    path: Path,
    routes: Mapping[Place, Route | None],
    copy: Callable[[Tensor, Route], Tensor],
) -> Leaf:
    def moved(keys: Any, x: Any) -> Any:
        route = routes.get((path, _inner(keys))) if isinstance(x, Tensor) else None
        return x if route is None else copy(x, route)

    value = _pytree.tree_map_with_path(moved, _payload(leaf))
    if isinstance(leaf, NonTensorStack):
        rows = leaf._rows().copy()
        rows.reshape(-1)[:] = value
        return NonTensorStack._new(rows, leaf._device)
    assert isinstance(leaf, NonTensorData)
    return type(leaf)._new(value, leaf._batch_size, leaf._device)


def _payload(leaf: Leaf) -> Any:
    if isinstance(leaf, NonTensorStack):
        return list(leaf._rows().reshape(-1))
    return leaf._data if isinstance(leaf, NonTensorData) else None


def _tensors(value: Any) -> list[tuple[Path, Tensor]]:
    found, _ = _pytree.tree_flatten_with_path(value)
    return [(_inner(keys), x) for keys, x in found if isinstance(x, Tensor)]


def _inner(keys: Any) -> Path:
    return tuple(str(getattr(key, "key", getattr(key, "idx", key))) for key in keys)
