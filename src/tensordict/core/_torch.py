"""What differs between versions of torch, decided once: each name is what this torch has.

The oldest version is 2.11. A name goes when the oldest version has what is bound to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

_OnLists: TypeAlias = "Callable[[Sequence[Tensor]], Sequence[Tensor]]"


def _clone_each(xs: Sequence[Tensor]) -> Sequence[Tensor]:
    return list(map(torch.clone, xs))


def _new_object(cls: type) -> Any:
    return object.__new__(cls)


def _set_attribute(obj: object, name: str, value: Any) -> None:
    object.__setattr__(obj, name, value)


# From torch 2.12 on.
foreach_clone: _OnLists = getattr(torch, "_foreach_clone", _clone_each)

# Dynamo traces these builtins under a name of ours from torch 2.13 on. Under it they save 20 ns
# for each node that is made.
_TRACED = torch.__version__ >= "2.13"
new_object: Callable[[type], Any] = object.__new__ if _TRACED else _new_object
set_attribute: Callable[[object, str, Any], None] = (
    object.__setattr__ if _TRACED else _set_attribute
)
