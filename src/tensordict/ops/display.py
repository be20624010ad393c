"""Printing of tensordicts: text, HTML, rich, and what completes keys in notebooks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..core.node import Node
from . import display_options
from .display_cards import NodeCard, node_card
from .display_html import html, rich_parts, rich_tree
from .display_text import compact_text, full_text


class DisplayMethods(Node):
    """Printing."""

    __slots__ = ()

    def _card(self) -> NodeCard:
        """What is shown of this node; kinds that show something else have their own."""
        return node_card(self)

    def __repr__(self) -> str:
        options = display_options.get_printoptions()
        card = self._card()
        return compact_text(card, options) if options["compact"] else full_text(card, options)

    def _repr_html_(self) -> str | None:
        options = display_options.get_printoptions()
        return html(self._card(), options) if options["html"] else None

    def __rich__(self) -> Any:
        return rich_tree(self._card(), display_options.get_printoptions())

    def __rich_repr__(self) -> Iterator[Any]:
        return rich_parts(self._card(), display_options.get_printoptions())

    def _ipython_key_completions_(self) -> list[Any]:
        keys: Any = self.keys(include_nested=True)  # type: ignore[attr-defined]
        return list(keys)
