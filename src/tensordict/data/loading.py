"""What makes a ``DataLoader`` take tensordicts as they are.

torch collates by a table of types, which has a row for ours here.  Without automatic
batching it runs ``default_convert`` on what the data set gives, which takes mappings
apart key by key; a tensordict iterates over rows, so it is handed through instead.
"""

from __future__ import annotations

import functools
from typing import Any

from torch.utils.data._utils import collate as torch_collate

from ..core.node import Node
from .collation import collate_default

_convert = torch_collate.default_convert


@functools.wraps(_convert)
def default_convert(data: Any) -> Any:
    """``torch.utils.data.default_convert``, for which a tensordict needs no conversion."""
    return data if isinstance(data, Node) else _convert(data)


def register() -> None:
    """Teach torch's data loading about nodes; a second call does nothing."""
    torch_collate.default_collate_fn_map.setdefault(Node, collate_default)
    torch_collate.default_convert = default_convert


register()
