"""Type aliases shared by every layer."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

# A key is a str or a nested tuple of str; the recursion is not expressible without Any.
NestedKey: TypeAlias = str | tuple[Any, ...]
Path: TypeAlias = tuple[str, ...]
DeviceLike: TypeAlias = torch.device | str | int


class NoDefault:
    """The type of `NO_DEFAULT`, the mark for "no argument given"."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "NO_DEFAULT"


NO_DEFAULT: Any = NoDefault()
