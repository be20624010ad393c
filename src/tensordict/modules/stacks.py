"""`from_module` and `from_modules`: trees of modules, one or stacked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..core import lock as locking
from ..core.registry import node_class
from ..core.traverse import leaves, leaves_like, rebuild
from ..errors import ShapeError
from .state import module_tree, state_tree


def tree_of(
    module: nn.Module, as_module: bool, lock: bool, use_state_dict: bool, filter_empty: bool
) -> Any:
    """`ModuleMethods.from_module`."""
    tree = state_tree(module) if use_state_dict else module_tree(module, filter_empty)
    return _finished(tree, as_module, lock)


def stacked_trees(
    modules: Sequence[nn.Module],
    as_module: bool,
    lock: bool,
    use_state_dict: bool,
    lazy_stack: bool,
    expand_identical: bool,
) -> Any:
    """`ModuleMethods.from_modules`."""
    if not modules:
        raise ShapeError("Cannot stack the parameters of no module: pass one module or more.")
    trees = [state_tree(m) if use_state_dict else module_tree(m) for m in modules]
    if lazy_stack:
        return _finished(node_class("lazy_stack")(*trees, stack_dim=0), as_module, lock)
    with torch.no_grad():
        out = type(trees[0])._stack(trees, 0)
    columns = zip(leaves(out), *(leaves_like(out, tree) for tree in trees))
    out = rebuild(out, [_own_leaf(x, parts, expand_identical) for x, *parts in columns])
    return _finished(out, as_module, lock)


def _own_leaf(stacked: Tensor, parts: list[Tensor], expand_identical: bool) -> Tensor:
    """A stacked leaf of the kind of its parts: a parameter for parameters, trainable if one is."""
    first = parts[0]
    if expand_identical and all(part is first for part in parts):
        stacked = first.detach().expand(stacked.shape)
    grad = any(part.requires_grad for part in parts)
    if isinstance(first, nn.Parameter):
        return nn.Parameter(stacked, requires_grad=grad)
    return stacked.requires_grad_(grad)


def _finished(tree: Any, as_module: bool, lock: bool) -> Any:
    out = node_class("params")(tree, no_convert=True) if as_module else tree
    if lock:
        locking.lock(out)
    return out
