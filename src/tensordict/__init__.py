"""A dict of torch tensors that behaves like one tensor."""

from . import _pytree as _pytree  # registers the nodes
from ._keys import KEY_SEPARATOR, unravel_key, unravel_key_list, unravel_key_to_tuple
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
from .containers.base import TensorCollection, TensorDictBase
from .containers.dense import TensorDict
from .containers.factories import (
    from_any,
    from_csv,
    from_dict,
    from_json,
    from_module,
    from_modules,
    from_namedtuple,
    from_pandas,
    from_parquet,
    from_pytree,
    from_struct_array,
    from_tuple,
    fromkeys,
    make_tensordict,
)
from .containers.lazy import LazyStackedTensorDict
from .containers.params import TensorDictParams
from .core.leaf import MetaData, NonTensorData, NonTensorDataBase, NonTensorStack, is_non_tensor
from .core.linked import LinkedList
from .core.unbatched import UnbatchedTensor
from .data.collation import collate
from .ops.closeness import assert_allclose_td, assert_close
from .ops.combine import cat, stack
from .ops.convert import is_tensor_collection
from .ops.convert_arrow import from_arrow, to_arrow
from .ops.display_options import get_printoptions, set_printoptions
from .ops.functions import (
    dense_stack_tds,
    group_by,
    is_bool,
    is_floating,
    is_inexact,
    is_integer,
    merge_tensordicts,
)
from .ops.keys import default_is_leaf, is_leaf_nontensor
from .ops.packing import PackLayout
from .ops.padding import pad, pad_sequence, unpad_sequence
from .ops.parsing import parse_tensor_dict_string
from .ops.stacking import lazy_stack, maybe_dense_stack
from .placement.attrs import TensorAttrs
from .storage.consolidated_file import read_consolidated as from_consolidated
from .storage.named import from_safetensors, to_safetensors
from .storage.values import register_enum, register_value
from .tensorclass import TensorClass, is_tensorclass
from .typed.dataclasses import from_dataclass
from .typed.schema import TypedTensorDict
from .typed.tensorclass import tensorclass  # takes the name of the module just imported

__version__ = "0.16.0"

__all__ = [
    "KEY_SEPARATOR",
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
    "TensorCollection",
    "TensorDict",
    "TensorDictBase",
    "TensorDictParams",
    "TypedTensorDict",
    "UnbatchedTensor",
    "assert_allclose_td",
    "assert_close",
    "capture_non_tensor_stack",
    "cat",
    "collate",
    "default_is_leaf",
    "dense_stack_tds",
    "from_any",
    "from_arrow",
    "from_consolidated",
    "from_csv",
    "from_dataclass",
    "from_dict",
    "from_json",
    "from_module",
    "from_modules",
    "from_namedtuple",
    "from_pandas",
    "from_parquet",
    "from_pytree",
    "from_safetensors",
    "from_struct_array",
    "from_tuple",
    "fromkeys",
    "get_defaults_to_none",
    "get_printoptions",
    "group_by",
    "is_bool",
    "is_floating",
    "is_inexact",
    "is_integer",
    "is_leaf_nontensor",
    "is_non_tensor",
    "is_tensor_collection",
    "is_tensorclass",
    "lazy_legacy",
    "lazy_stack",
    "list_to_stack",
    "make_tensordict",
    "maybe_dense_stack",
    "merge_tensordicts",
    "pad",
    "pad_sequence",
    "parse_tensor_dict_string",
    "register_enum",
    "register_value",
    "set_capture_non_tensor_stack",
    "set_get_defaults_to_none",
    "set_lazy_legacy",
    "set_list_to_stack",
    "set_printoptions",
    "stack",
    "tensorclass",
    "to_arrow",
    "to_safetensors",
    "unpad_sequence",
    "unravel_key",
    "unravel_key_list",
    "unravel_key_to_tuple",
]
