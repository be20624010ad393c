"""Calling a function on every leaf."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core.node import Node

if TYPE_CHECKING:
    from typing_extensions import Self


class ApplyMethods(Node):
    """Copies."""

    __slots__ = ()

    def clone(self, recurse: bool = True) -> Self:
        """A copy: new leaves, or (``recurse=False``) new containers over the same leaves."""
        if not recurse:
            return self._map(lambda x: x)
        return self._map(lambda x: x.clone())

    def copy(self) -> Self:
        """New containers over the same leaves."""
        return self._map(lambda x: x)
