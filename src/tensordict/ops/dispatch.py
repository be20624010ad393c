"""``torch.f(td)``: the class hook that looks our rules up."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..core.node import Node
from ..core.torch_function import dispatch


class DispatchMethods(Node):
    """``__torch_function__``."""

    __slots__ = ()

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return dispatch(func, args, kwargs)
