"""From a printed form back to a tensordict of zeros."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Size

from ..core.node import Node
from ..core.registry import node_class
from ..errors import EntryTypeError
from .display_text import dtype_code

_FULL_LEAF = re.compile(
    r"\w+\(shape=torch\.Size\(\[([\d, ]*)\]\), device=([\w:]+), dtype=torch\.(\w+), is_shared=\w+\)"
)
_COMPACT_LEAF = re.compile(r"([a-z]\w*)\[([\d,]*)\]")
_NAME = re.compile(r"\s*(.+?): ", re.DOTALL)


def parse_tensor_dict_string(s: str) -> Any:
    """A tensordict of zeros with the keys, shapes, dtypes and devices of a printed one.

    Reads the full and the compact form, printed with the default options otherwise.

    Raises:
        ValueError: not such a text, or an entry that is neither a tensor nor a tensordict.

    >>> from tensordict import TensorDict
    >>> td = TensorDict({"a": torch.ones(3, 2), "n": {"b": torch.ones(3)}}, batch_size=[3])
    >>> parse_tensor_dict_string(repr(td))["a"].shape
    torch.Size([3, 2])
    """
    reader = _Reader(s.strip())
    out = reader.root()
    if reader.rest():
        raise EntryTypeError(f"Cannot parse {reader.rest()[:40]!r}: expected the end of the text.")
    return out


class _Reader:
    """A position in a text, and what is read there."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def rest(self) -> str:
        """What was not read yet."""
        return self.text[self.at :]

    def take(self, pattern: str, what: str) -> re.Match[str]:
        """Read a pattern, or fail naming what should be here."""
        found = re.compile(pattern, re.DOTALL).match(self.text, self.at)
        if found is None:
            raise EntryTypeError(f"Cannot parse {self.rest()[:40]!r}: expected {what}.")
        self.at = found.end()
        return found

    def root(self) -> Any:
        """A whole tensordict in either form."""
        if "batch_size=" not in self.text:
            raise EntryTypeError("Batch size not found in the string")
        self.take(r"\w+\(\s*", "the name of a class")
        if self.text.startswith("fields=", self.at):
            return self.full()
        batch = _sizes(self.take(r"batch_size=\[([\d,]*)\], ", "batch_size=[...]")[1])
        device = self.take(r"(?:device=([\w:]+), )?", "a device")[1]
        self.take(r"(?:stack_dim=\d+, )?fields=", "fields=")
        out = self.compact(batch, device)
        self.take(r"\)", "a closing parenthesis")
        return out

    def full(self) -> Any:
        """From ``fields=`` of the full form to the closing parenthesis."""
        self.take(r"fields=\{\s*", "fields={")
        entries: dict[str, Any] = {}
        while not self.text.startswith("}", self.at):
            name = self.name()
            leaf = _FULL_LEAF.match(self.text, self.at)
            if leaf is not None:
                self.at = leaf.end()
                entries[name] = _zeros(_sizes(leaf[1]), leaf[3], leaf[2])
            elif re.match(r"(?:TensorDict|LazyStackedTensorDict)\(", self.rest()):
                self.take(r"\w+\(\s*", "a tensordict")
                entries[name] = self.full()
            else:
                raise self.refuse(name)
            self.take(r",?\s*", "a comma")
        self.take(r"\},\s*(?:exclusive_fields=\{\s*\},\s*)?", "the end of the fields")
        batch = _sizes(self.take(r"batch_size=torch\.Size\(\[([\d, ]*)\]\),\s*", "batch_size")[1])
        device = self.take(r"device=([\w:]+),\s*is_shared=\w+(?:,\s*stack_dim=\d+)?\)", "device")[1]
        return _node(entries, batch, None if device == "None" else device)

    def compact(self, batch: Size, device: str | None) -> Any:
        """From ``{`` of the compact form to its ``}``."""
        self.take(r"\{\s*", "{")
        entries: dict[str, Any] = {}
        while not self.text.startswith("}", self.at):
            name = self.name()
            nested = re.match(r"(?:LazyStackedTensorDict)?(?:\[([\d,]*)\])?(?=\{)", self.rest())
            leaf = _COMPACT_LEAF.match(self.text, self.at)
            if nested is not None:
                self.at += nested.end()
                entries[name] = self.compact(batch + _sizes(nested[1] or ""), device)
            elif leaf is not None:
                self.at = leaf.end()
                entries[name] = _zeros(batch + _sizes(leaf[2]), leaf[1], device or "cpu")
            else:
                raise self.refuse(name)
            self.take(r",?\s*", "a comma")
        self.at += 1
        return _node(entries, batch, device)

    def name(self) -> str:
        """A key and its colon."""
        found = _NAME.match(self.text, self.at)
        if found is None:
            raise EntryTypeError(f"Cannot parse {self.rest()[:40]!r}: expected a key.")
        self.at = found.end()
        return found[1]

    def refuse(self, name: str) -> EntryTypeError:
        line = self.rest().split("\n", 1)[0]
        return EntryTypeError(
            f"Cannot parse the field '{name}: {line[:60]}': parse_tensor_dict_string reads Tensor "
            f"and TensorDict fields printed with the default print options."
        )


def _sizes(text: str) -> Size:
    return Size([int(n) for n in text.split(",") if n.strip()])


def _zeros(shape: Size, dtype: str, device: str) -> Any:
    found = getattr(torch, dtype, None)
    if not isinstance(found, torch.dtype):
        found = _CODES.get(dtype)
    if found is None:
        raise EntryTypeError(f"Cannot parse the dtype {dtype!r}.")
    return torch.zeros(shape, dtype=found, device=device)


def _node(entries: dict[str, Any], batch: Size, device: str | None) -> Node:
    node: Node = node_class("dense")(entries, batch_size=batch, device=device)
    return node


_CODES = {dtype_code(x): x for x in vars(torch).values() if isinstance(x, torch.dtype)}
