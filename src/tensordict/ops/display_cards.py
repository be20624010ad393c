"""What is known about a tree before it is printed: cards, which every form of printing reads.

A kind of node that shows something else than its entries has its own ``_card``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Size, Tensor

from ..core.leaf import Leaf, NonTensorData
from ..core.lock import origin_of
from ..core.node import Node

T = TypeVar("T")


@dataclass
class LeafCard:
    """A tensor, or the tensors of one key in the members of a stack.

    Attributes:
        kind: class name to show.
        tensors: the tensor, or one per member.
        shape: full shape, -1 for sizes that differ.
        batch_dims: how many of the leading dimensions are the batch of the node.
    """

    kind: str
    tensors: list[Tensor]
    shape: Size
    batch_dims: int

    @property
    def device(self) -> torch.device | None:
        """The one device of the tensors."""
        devices = {x.device for x in self.tensors}
        return devices.pop() if len(devices) == 1 else None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that a stack of the tensors has."""
        out = self.tensors[0].dtype
        for x in self.tensors[1:]:
            out = torch.promote_types(out, x.dtype)
        return out

    @property
    def is_shared(self) -> bool:
        """Whether all of them are in shared memory."""
        return all(is_shared(x) for x in self.tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return sum(ask(partial(getattr, x, "nbytes"), 0) for x in self.tensors)


@dataclass
class ValueCard:
    """A leaf that is no tensor."""

    leaf: Leaf

    @property
    def kind(self) -> str:
        """The type of the value, or the class of the leaf when it holds several."""
        if type(self.leaf) is NonTensorData:
            return type(self.leaf._data).__name__
        return type(self.leaf).__name__


@dataclass
class NodeCard:
    """A node.

    Attributes:
        title: class name to show.
        fields: names and cards in the order of the node.
        node: whose metadata is shown.
        attributes: shown as ``name=value`` rather than as fields of a dict.
        missing: names of attributes that are None.
        exclusive: for stacks: index of a member to names and cards only it has.
        extra: more metadata, after the rest.
        wrapper: class name and argument name to put around the whole.
    """

    title: str
    fields: list[tuple[str, Card]]
    node: Node
    attributes: bool = False
    missing: list[str] = field(default_factory=list)
    exclusive: dict[int, list[tuple[str, Card]]] | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    wrapper: str | None = None

    @property
    def is_shared(self) -> bool:
        """Whether the tree as a whole is in shared memory."""
        origin = origin_of(self.node)
        return origin is not None and origin.shared

    @property
    def nbytes(self) -> int:
        """Bytes of all leaves below."""
        own = sum(card.nbytes for _, card in self.fields if not isinstance(card, ValueCard))
        more = (self.exclusive or {}).values()
        return own + sum(
            card.nbytes for part in more for _, card in part if not isinstance(card, ValueCard)
        )


Card = LeafCard | ValueCard | NodeCard


def ask(question: Callable[[], T], otherwise: T) -> T:
    """The answer of a tensor; ``otherwise`` where it has none (sparse, uninitialised, functional)."""
    try:
        return question()
    except (RuntimeError, ValueError, TypeError):
        return otherwise


def is_shared(x: Tensor) -> bool:
    """Whether a leaf is in shared memory; False where that cannot be asked."""
    if x.device.type == "meta" or x.is_nested:
        return False
    return ask(x.is_shared, False)


def node_card(node: Node, title: str | None = None) -> NodeCard:
    """The card of a node that is a dict of entries."""
    return NodeCard(title or type(node).__name__, field_cards(node, node._names()), node)


def field_cards(node: Node, names: Iterable[str]) -> list[tuple[str, Card]]:
    """Names and cards of some entries of a node."""
    out: list[tuple[str, Card]] = []
    stacked = node._members() is not None
    for name in names:  # few frames a level: deep trees are shown too
        entry = None if stacked else node._fetch(name)
        if isinstance(entry, Node):
            out.append((name, entry._card()))  # type: ignore[attr-defined]
        else:
            out.append((name, field_card(node, name)))
    return out


def field_card(node: Node, name: str) -> Card:
    """The card of one entry; of a stack, without stacking it."""
    members = node._members()
    cls = node._class_of(name) if members is not None else None
    if cls is None or not issubclass(cls, Tensor):
        return entry_card(node._fetch(name), len(node._batch_size))
    xs: list[Any] = [member._fetch(name) for member in members or ()]
    return LeafCard(_kind(xs[0]), xs, node._shape_of(name), len(node._batch_size))


def entry_card(entry: Any, batch_dims: int) -> Card:
    """The card of an entry."""
    if isinstance(entry, Tensor):
        return LeafCard(_kind(entry), [entry], _shape(entry), batch_dims)
    if isinstance(entry, Node):
        card: NodeCard = entry._card()  # type: ignore[attr-defined]
        return card
    assert isinstance(entry, Leaf)
    return ValueCard(entry)


def _kind(x: Tensor) -> str:
    if type(x) is Tensor or x.is_nested:
        return "Tensor"
    return type(x).__name__


def _shape(x: Tensor) -> Size:
    """The shape, -1 where a size is not one number (ragged) or not known (uninitialised)."""
    if not x.is_nested:
        return ask(lambda: x.shape, Size([-1]))
    sizes: list[int] = []
    for i in range(x.dim()):
        size: Any = x.size
        n = ask(partial(size, i), -1)
        sizes.append(n if type(n) is int else -1)
    return Size(sizes)
