"""`spec`: targets for the leaves of a tree, from whatever describes them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .._keys import path_of
from .._typing import Path
from ..core.node import Node
from ..core.traverse import entries_with_path
from .attrs import TensorAttrs
from .rules import Spec, Target, rules_of


def spec(like: Any = None, *, rules: Any = (), default: Any = None) -> Spec:
    """A spec from a tree, from patterns, or both; see `Spec` for what is stronger.

    Args:
        like: An ``attrs()`` tree, a tensordict whose leaves are examples, a mapping of keys to
            targets, or another spec.
        rules: Patterns and their targets; the last match wins.
        default: The target of everything else.

    >>> import torch
    >>> mine = spec(rules={"head.*": "cuda:1", "*.bias": torch.float32}, default="cuda:0")
    >>> mine.target(("head", "bias"))
    Target(device=device(type='cuda', index=1), dtype=torch.float32)
    """
    own = rules_of(rules)
    base = Target.of(default)
    if isinstance(like, Spec):
        return Spec(like.entries, like.rules + own, base | like.default)
    entries: dict[Path, Target] = {}
    if isinstance(like, Node):
        for path, entry in entries_with_path(like):
            if isinstance(entry, Tensor):
                entries[path] = Target(entry.device, entry.dtype)
            elif type(entry) is TensorAttrs:
                entries[path] = Target(entry.tgt_device, entry.tgt_dtype, entry.tgt_layout)
    elif like is not None:
        entries = {path_of(key): Target.of(target) for key, target in like.items()}
    return Spec(entries, own, base)
