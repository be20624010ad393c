"""The full and the compact form of a tree, as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .display_cards import Card, LeafCard, NodeCard, ValueCard, ask

_INDENT = "    "
_WIDTH = 80


def ordered(
    fields: Sequence[tuple[str, Card]], options: Mapping[str, Any]
) -> list[tuple[str, Card]]:
    """Fields in the order in which they are shown."""
    if options["sort_keys"] == "alphabetical":
        return sorted(fields, key=lambda pair: pair[0])
    return list(fields)


# --- the full form ---------------------------------------------------------------------------


def full_text(card: Card, options: Mapping[str, Any], indent: str = "") -> str:
    """The full form: one line per field, nested ones indented."""
    if isinstance(card, LeafCard):
        return _full_leaf(card, options)
    if isinstance(card, ValueCard):
        return repr(card.leaf).replace("\n", "\n" + indent)
    inner = indent + _INDENT
    lines: list[str] = []
    if card.attributes:
        lines += [f"{n}={full_text(c, options, inner)}" for n, c in ordered(card.fields, options)]
        lines += [f"{name}=None" for name in card.missing]
    else:
        lines.append(_full_fields("fields", card.fields, options, inner))
    if card.exclusive is not None:
        lines.append(_full_exclusive(card.exclusive, options, inner))
    if options["show_batch_size"]:
        lines.append(f"batch_size={card.node._batch_size}")
    if options["show_device"]:
        lines.append(f"device={card.node.device}")  # type: ignore[attr-defined]
    if options["show_is_shared"]:
        lines.append(f"is_shared={card.is_shared}")
    lines += [f"{name}={value}" for name, value in card.extra.items()]
    body = ",\n".join(inner + line for line in lines)
    text = f"{card.title}(\n{body})"
    return text if card.wrapper is None else f"{card.wrapper}{text})"


def _full_fields(
    title: str, fields: Sequence[tuple[str, Card]], options: Mapping[str, Any], indent: str
) -> str:
    inner = indent + _INDENT
    lines = [f"{inner}{n}: {full_text(c, options, inner)}" for n, c in ordered(fields, options)]
    return f"{title}={{\n" + ",\n".join(lines) + "}" if lines else f"{title}={{\n{indent}}}"


def _full_exclusive(
    exclusive: Mapping[int, Sequence[tuple[str, Card]]], options: Mapping[str, Any], indent: str
) -> str:
    if not exclusive:
        return f"exclusive_fields={{\n{indent}}}"
    inner = indent + _INDENT
    deep = inner + _INDENT
    parts = [
        f"{inner}{i} ->\n"
        + ",\n".join(f"{deep}{n}: {full_text(c, options, deep)}" for n, c in ordered(part, options))
        for i, part in exclusive.items()
    ]
    return "exclusive_fields={\n" + ",\n".join(parts) + "}"


def _full_leaf(card: LeafCard, options: Mapping[str, Any]) -> str:
    x = card.tensors[0]
    parts: list[str] = []
    if options["show_shape"]:
        parts.append(f"shape={card.shape}")
    if options["show_field_device"]:
        parts.append(f"device={card.device}")
    if options["show_dtype"]:
        parts.append(f"dtype={card.dtype}")
    if options["show_field_is_shared"]:
        parts.append(f"is_shared={card.is_shared}")
    if options["show_grad"]:
        parts.append(f"requires_grad={x.requires_grad}")
    if options["show_is_contiguous"]:
        parts.append(f"is_contiguous={all(ask(t.is_contiguous, False) for t in card.tensors)}")
    if options["show_is_view"]:
        parts.append(f"is_view={any(ask(t._is_view, False) for t in card.tensors)}")
    if options["show_storage_size"]:
        parts.append(f"storage_size={sum(_storage_nbytes(t) for t in card.tensors)}")
    if options["plain"]:
        parts += _statistics(card)
    return f"{card.kind}({', '.join(parts)})"


def _storage_nbytes(x: torch.Tensor) -> int:
    return ask(lambda: x.untyped_storage().nbytes(), 0)


def _statistics(card: LeafCard) -> list[str]:
    """Mean and standard deviation of all elements, where they can be computed."""

    def compute() -> list[str]:
        values = torch.cat([x.detach().reshape(-1).double() for x in card.tensors])
        if values.is_meta or not values.numel():
            return []
        return [f"mean={values.mean():.4g}", f"std={values.std(correction=0):.4g}"]

    return ask(compute, [])


# --- the compact form ------------------------------------------------------------------------


def compact_text(card: NodeCard, options: Mapping[str, Any]) -> str:
    """The compact form: one line if it fits, else one line per field."""
    head = []
    if options["show_batch_size"]:
        head.append(f"batch_size={_sizes(card.node._batch_size)}")
    device = card.node.device  # type: ignore[attr-defined]
    if options["show_device"] and device is not None:
        head.append(f"device={device}")
    head += [f"{name}={value}" for name, value in card.extra.items()]
    blocks = [("fields", _compact_fields(card, options))]
    if card.exclusive:
        blocks.append(("exclusive_fields", _compact_exclusive(card.exclusive, options)))
    start = "" if card.wrapper is None else card.wrapper
    end = ")" if card.wrapper is None else "))"
    flat = [
        *head,
        *(f"{title}={{{', '.join(_flat(b) for b in block)}}}" for title, block in blocks),
    ]
    line = f"{start}{card.title}({', '.join(flat)}{end}"
    if len(line) <= _WIDTH and "\n" not in line:
        return line
    parts = [*head, *(f"{title}={_broken(block, '', len(end))}" for title, block in blocks)]
    return f"{start}{card.title}({', '.join(parts)}{end}"


# A field in parts: its text up to an opening brace, and the fields within.
Block = tuple[str, "list[Any] | None"]


def _flat(block: Block) -> str:
    text, below = block
    return text if below is None else f"{text}{{{', '.join(_flat(b) for b in below)}}}"


def _broken(blocks: Sequence[Block], indent: str, tail: int) -> str:
    """``{`` and one line per field; lines too long with what closes after them broken in turn."""
    if not blocks:
        return "{}"
    inner = indent + _INDENT
    lines = []
    for i, block in enumerate(blocks):
        line = inner + _flat(block)
        after = 1 if i + 1 < len(blocks) else tail + 1  # a comma, or the braces that close here
        if len(line) + after > _WIDTH and block[1]:
            line = f"{inner}{block[0]}{_broken(block[1], inner, after)}"
        lines.append(line)
    return "{\n" + ",\n".join(lines) + "}"


def _compact_fields(card: NodeCard, options: Mapping[str, Any]) -> list[Block]:
    out = [_compact(name, below, card, options) for name, below in ordered(card.fields, options)]
    return out + [(f"{name}: None", None) for name in card.missing]


def _compact_exclusive(
    exclusive: Mapping[int, Sequence[tuple[str, Card]]], options: Mapping[str, Any]
) -> list[Block]:
    return [
        (f"{i}: ", [_compact(name, card, None, options) for name, card in ordered(part, options)])
        for i, part in exclusive.items()
    ]


def _compact(name: str, card: Card, parent: NodeCard | None, options: Mapping[str, Any]) -> Block:
    if isinstance(card, LeafCard):
        return f"{name}: {leaf_code(card, options['show_dtype'])}", None
    if isinstance(card, ValueCard):
        return f"{name}: {card.kind}", None
    title = card.title if card.wrapper is None else card.wrapper.split("(")[0]
    title = "" if title == "TensorDict" else title
    known = 0 if parent is None else len(parent.node._batch_size)
    sizes = card.node._batch_size[known:]
    return f"{name}: {title}{_sizes(sizes) if sizes else ''}", _compact_fields(card, options)


def leaf_code(card: LeafCard, show_dtype: bool = True) -> str:
    """``f32[3,2]``: the code of the dtype and the shape without the batch."""
    return (dtype_code(card.dtype) if show_dtype else "") + _sizes(card.shape[card.batch_dims :])


def dtype_code(dtype: torch.dtype) -> str:
    """A short name: ``f32``, ``bf16``, ``i64``, ``u8``, ``c64``, ``bool``.

    >>> dtype_code(torch.float32), dtype_code(torch.quint8)
    ('f32', 'qu8')
    """
    name = str(dtype).removeprefix("torch.")
    for long, short in (("bfloat", "bf"), ("float", "f"), ("complex", "c"), ("int", "i")):
        if name.startswith(long):
            return short + name[len(long) :]
    for long, short in (("uint", "u"), ("quint", "qu"), ("qint", "qi")):
        if name.startswith(long):
            return short + name[len(long) :]
    return name


def _sizes(sizes: Sequence[int]) -> str:
    return f"[{','.join(map(str, sizes))}]"
