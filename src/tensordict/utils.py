"""Helpers, under the import path that users type: ``tensordict.utils``."""

from __future__ import annotations

from torch.nn import Buffer

from ._keys import unravel_key, unravel_key_list, unravel_key_to_tuple
from ._options import (
    capture_non_tensor_stack,
    lazy_legacy,
    list_to_stack,
    set_capture_non_tensor_stack,
    set_lazy_legacy,
    set_list_to_stack,
)
from ._pytree import register_with_optree
from ._typing import NestedKey
from .core.leaf import is_non_tensor
from .core.linked import LinkedList
from .ops.closeness import assert_allclose_td, assert_close
from .ops.convert import is_tensor_collection
from .ops.functions import expand_as_right, expand_right, isin, remove_duplicates
from .ops.timing import timeit
from .storage.listing import print_directory_tree

__all__ = [
    "Buffer",
    "LinkedList",
    "NestedKey",
    "assert_allclose_td",
    "assert_close",
    "capture_non_tensor_stack",
    "expand_as_right",
    "expand_right",
    "is_non_tensor",
    "is_tensor_collection",
    "isin",
    "lazy_legacy",
    "list_to_stack",
    "print_directory_tree",
    "register_with_optree",
    "remove_duplicates",
    "set_capture_non_tensor_stack",
    "set_lazy_legacy",
    "set_list_to_stack",
    "timeit",
    "unravel_key",
    "unravel_key_list",
    "unravel_key_to_tuple",
]
