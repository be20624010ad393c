"""Names of the source under which the destination looks for its tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

from .views import filled, template

Rename: TypeAlias = "Mapping[str, str] | Callable[[str], str] | Sequence[Rename] | None"

_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def strip_wrappers(name: str) -> str:
    """Without what wrapping modules add: ``torch.compile``, DDP, FSDP, checkpointing.

    >>> strip_wrappers("module._orig_mod.layers.0._checkpoint_wrapped_module.weight")
    'layers.0.weight'
    """
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    while len(parts) > 1 and parts[0] == "module":
        del parts[0]
    return ".".join(parts) or name


def renamer(rename: Rename) -> Callable[[str], str]:
    """A function that renames.

    Args:
        rename: ``None`` for no change; a function; a mapping from old to new names, in which a
            name stands for everything below it too, and ``{fields}`` for one part of a name each;
            or a sequence of these, applied in turn.

    >>> new = renamer([strip_wrappers, {"model.{i}.att": "blocks.{i}.attention", "head": "out"}])
    >>> new("_orig_mod.model.3.att.weight"), new("head.bias"), new("header")
    ('blocks.3.attention.weight', 'out.bias', 'header')
    """
    if rename is None:
        return lambda name: name
    if callable(rename):
        return rename
    if isinstance(rename, Mapping):
        return _by_table(rename)
    steps = [renamer(step) for step in rename]

    def chained(name: str) -> str:
        for step in steps:
            name = step(name)
        return name

    return chained


def _by_table(table: Mapping[str, str]) -> Callable[[str], str]:
    exact = {old: new for old, new in table.items() if "{" not in old}
    patterns = [(template(old), new) for old, new in table.items() if "{" in old]

    def renamed(name: str) -> str:
        # The longest old name first, so that a whole name beats one that it lies below.
        for head, tail in _heads(name):
            if head in exact:
                return exact[head] + tail
            for pattern, new in patterns:
                match = pattern.fullmatch(head)
                if match:
                    return filled(new, match.groupdict()) + tail
        return name

    return renamed


def _heads(name: str) -> Iterable[tuple[str, str]]:
    end = len(name)
    while end > 0:
        yield name[:end], name[end:]
        end = name.rfind(".", 0, end)
