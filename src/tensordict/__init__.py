"""A dict of torch tensors that behaves like one tensor."""

from . import _pytree as _pytree  # registers the nodes
from ._keys import unravel_key, unravel_key_list, unravel_key_to_tuple
from ._options import (
    capture_non_tensor_stack,
    get_defaults_to_none,
    lazy_legacy,
    list_to_stack,
    set_capture_non_tensor_stack,
    set_get_defaults_to_none,
    set_lazy_legacy,
    set_list_to_stack,
)
from ._typing import NestedKey
from .containers.base import TensorDictBase
from .containers.dense import TensorDict
from .containers.lazy import LazyStackedTensorDict, lazy_stack, maybe_dense_stack
from .containers.params import TensorDictParams
from .core.leaf import MetaData, NonTensorData, NonTensorDataBase, NonTensorStack, is_non_tensor
from .core.linked import LinkedList
from .core.unbatched import UnbatchedTensor
from .ops.combine import cat, stack
from .ops.convert import is_tensor_collection
from .ops.display_options import get_printoptions, set_printoptions
from .ops.keys import default_is_leaf, is_leaf_nontensor
from .ops.packing import PackLayout
from .ops.padding import pad, pad_sequence
from .placement.attrs import TensorAttrs
from .storage.named import from_safetensors, to_safetensors
from .tensorclass import TensorClass, is_tensorclass
from .typed.tensorclass import tensorclass  # takes the name of the module just imported

__version__ = "0.16.0"

__all__ = [
    "LazyStackedTensorDict",
    "LinkedList",
    "MetaData",
    "NestedKey",
    "NonTensorData",
    "NonTensorDataBase",
    "NonTensorStack",
    "PackLayout",
    "TensorAttrs",
    "TensorClass",
    "TensorDict",
    "TensorDictBase",
    "TensorDictParams",
    "UnbatchedTensor",
    "capture_non_tensor_stack",
    "cat",
    "default_is_leaf",
    "from_safetensors",
    "get_defaults_to_none",
    "get_printoptions",
    "is_leaf_nontensor",
    "is_non_tensor",
    "is_tensor_collection",
    "is_tensorclass",
    "lazy_legacy",
    "lazy_stack",
    "list_to_stack",
    "maybe_dense_stack",
    "pad",
    "pad_sequence",
    "set_capture_non_tensor_stack",
    "set_get_defaults_to_none",
    "set_lazy_legacy",
    "set_list_to_stack",
    "set_printoptions",
    "stack",
    "tensorclass",
    "to_safetensors",
    "unravel_key",
    "unravel_key_list",
    "unravel_key_to_tuple",
]
