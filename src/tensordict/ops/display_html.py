"""Trees for notebooks and for rich: foldable, with shapes, dtypes, devices and bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from .display_cards import Card, LeafCard, NodeCard, ValueCard
from .display_text import dtype_code, leaf_code, ordered

_FAINT = '<span style="opacity:0.7">{}</span>'
_LIST = '<ul style="list-style:none;margin:0;padding-left:1.5em">{}</ul>'


def html(card: NodeCard, options: Mapping[str, Any]) -> str:
    """A ``<details>`` tree: one entry per line, nested ones folded."""
    return (
        f'<div style="font-family:monospace;line-height:1.4">{_node("", card, options, True)}</div>'
    )


def _node(name: str, card: NodeCard, options: Mapping[str, Any], opened: bool) -> str:
    items = "".join(f"<li>{_entry(n, c, options)}</li>" for n, c in ordered(card.fields, options))
    items += "".join(f"<li>{escape(n)}: {_FAINT.format('None')}</li>" for n in card.missing)
    for i, part in (card.exclusive or {}).items():
        below = "".join(f"<li>{_entry(n, c, options)}</li>" for n, c in ordered(part, options))
        items += f"<li>only in {i}{_LIST.format(below)}</li>"
    label = f"<b>{escape(_title(card))}</b>"
    if name:
        label = f"{escape(name)}: {label}"
    facts = _FAINT.format(escape(node_facts(card)))
    tag = "details open" if opened else "details"
    return f"<{tag}><summary>{label} {facts}</summary>{_LIST.format(items)}</details>"


def _entry(name: str, card: Card, options: Mapping[str, Any]) -> str:
    if isinstance(card, NodeCard):
        return _node(name, card, options, False)
    return f"{escape(name)}: {_FAINT.format(escape(entry_facts(card)))}"


def _title(card: NodeCard) -> str:
    return card.title if card.wrapper is None else card.wrapper.split("(")[0]


def node_facts(card: NodeCard) -> str:
    """Batch size, names, device, lock, number of entries and bytes of a node."""
    node: Any = card.node
    facts = [f"batch_size={list(node._batch_size)}"]
    if node._dim_names is not None:
        facts.append(f"names={node._dim_names}")
    if node.device is not None:
        facts.append(f"device={node.device}")
    facts += [f"{name}={value}" for name, value in card.extra.items()]
    if node._lock is not None:
        facts.append("locked")
    if card.is_shared:
        facts.append("shared")
    n = len(card.fields)
    facts += [f"{n} entr{'y' if n == 1 else 'ies'}", size_text(card.nbytes)]
    return ", ".join(facts)


def entry_facts(card: LeafCard | ValueCard) -> str:
    """Shape, dtype, device and bytes of a tensor; type and start of the text of a value."""
    if isinstance(card, ValueCard):
        text = repr(card.leaf._value())
        return f"{card.kind} {text if len(text) <= 60 else text[:57] + '...'}"
    kind = "" if card.kind == "Tensor" else f"{card.kind} "
    return (
        f"{kind}{dtype_code(card.dtype)}{list(card.shape)}, {card.device}, {size_text(card.nbytes)}"
    )


def size_text(n: float) -> str:
    """A number of bytes for people.

    >>> size_text(12), size_text(2048)
    ('12 B', '2.0 KiB')
    """
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while n >= 1024 and len(units) > 1:
        n /= 1024
        units.pop(0)
    return f"{n:.1f} {units[0]}" if isinstance(n, float) else f"{n} B"


def rich_tree(card: NodeCard, options: Mapping[str, Any]) -> Any:
    """A ``rich.tree.Tree``; called by rich, which is there then."""
    from rich.markup import escape as plain
    from rich.tree import Tree

    def grow(tree: Any, part: NodeCard) -> Any:
        for name, below in ordered(part.fields, options):
            if isinstance(below, NodeCard):
                label = (
                    f"[bold]{plain(name)}[/bold]: {_title(below)} [dim]{plain(node_facts(below))}"
                )
                grow(tree.add(label), below)
            else:
                tree.add(f"[bold]{plain(name)}[/bold]: [dim]{plain(entry_facts(below))}")
        for name in part.missing:
            tree.add(f"[bold]{plain(name)}[/bold]: [dim]None")
        for i, some in (part.exclusive or {}).items():
            branch = tree.add(f"only in {i}")
            grow(branch, NodeCard("", list(some), part.node))
        return tree

    return grow(Tree(f"[bold]{_title(card)}[/bold] [dim]{plain(node_facts(card))}"), card)


def rich_parts(card: NodeCard, options: Mapping[str, Any]) -> Iterator[Any]:
    """Arguments for ``__rich_repr__``: fields, then metadata."""
    for name, below in ordered(card.fields, options):
        if isinstance(below, LeafCard):
            yield name, _Code(leaf_code(below))
        elif isinstance(below, ValueCard):
            yield name, below.leaf._value()
        else:
            yield name, below.node
    for name in card.missing:
        yield name, None
    yield "batch_size", list(card.node._batch_size)
    yield "device", card.node._device, None


class _Code(str):
    """Text that is shown as it is."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)
