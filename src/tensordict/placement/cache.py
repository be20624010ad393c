"""Plans of locked trees, kept with the lock for the next call.

As long as a tree is locked and no entry is replaced, its plan for a target stays the same, and
nothing has to be looked at.  (`MovePlan.run` still checks every leaf, because ``leaf.data = ...``
changes a leaf without changing an entry.)
"""

from __future__ import annotations

from typing import Any

import torch

from ..core.node import Node
from .policy import CastPolicy
from .rules import Spec, Target

_VALUES = (torch.dtype, torch.device, Target, str, int, type(None))
_CAPACITY = 16


def plan_key(td: Node, target: Any, policy: CastPolicy | None, *options: Any) -> Any:
    """What a plan is kept under; ``None`` when the tree or the target may change."""
    if td._lock is None:
        return None
    if isinstance(target, Node):
        if target._lock is None:
            return None
        return ("plan", id(target._lock), id(policy), *options)
    if isinstance(target, Spec):
        return ("plan", id(target), id(policy), *options)
    return ("plan", target, id(policy), *options) if isinstance(target, _VALUES) else None


def kept_plan(td: Node, key: Any) -> Any:
    """The plan kept under ``key``, else ``None``."""
    memo = None if key is None or td._lock is None else td._lock.memo
    found = None if memo is None else memo.get(key)
    return None if found is None else found[0]


def keep_plan(td: Node, key: Any, plan: Any, *held: Any) -> None:
    """Keep a plan; ``held`` are the objects whose identity is in the key."""
    state = td._lock
    if key is None or state is None:
        return
    if state.memo is None:
        state.memo = {}
    if len(state.memo) >= _CAPACITY:
        state.memo.pop(next(iter(state.memo)), None)
    state.memo[key] = (plan, *held)
