"""`TensorAttrs`: what one leaf is like, as an entry of its own kind.

``td.attrs()`` is a light tree of such records, made in one walk; equal leaves share one record.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Size, Tensor

from ..core.devices import as_device
from ..core.leaf import Leaf
from ..core.node import Node
from ..core.registry import register_leaf
from ..core.structural import StructuralOp
from ..core.traverse import map_leaves, nodes
from ..errors import EntryTypeError
from .layout import Layout
from .names import dtype_name, parse_dtype

FIELDS = ("device", "dtype", "shape")
_NO_BATCH = Size([])


@register_leaf
class TensorAttrs(Leaf):
    """Device, dtype and shape of one tensor; a field that was not recorded is ``None``.

    Records do not change, so equal leaves of one tree share one.

    Args:
        tgt_device: Device, stored in normal form.
        tgt_dtype: Element type.
        tgt_shape: Full shape, batch dimensions included.
        tgt_layout: Sharding of a DTensor (``fields=(..., "layout")``).

    >>> TensorAttrs.from_tensor(torch.zeros(3, dtype=torch.float16))
    TensorAttrs(device=cpu, dtype=torch.float16, shape=[3])
    """

    # `_host_dtype` is the dtype of a record of host memory, and unset in any other record.
    __slots__ = ("_host_dtype", "tgt_device", "tgt_dtype", "tgt_layout", "tgt_shape")

    kind = "attrs"

    tgt_device: torch.device | None
    tgt_dtype: torch.dtype | None
    tgt_shape: Size | None
    tgt_layout: Layout | None
    _host_dtype: torch.dtype | None

    def __init__(
        self,
        tgt_device: Any = None,
        tgt_dtype: torch.dtype | None = None,
        tgt_shape: Sequence[int] | None = None,
        tgt_layout: Layout | None = None,
        *,
        batch_size: Any = _NO_BATCH,
        device: Any = None,
        names: Any = None,
    ) -> None:
        _fill(
            self,
            None if tgt_device is None else as_device(tgt_device),
            tgt_dtype,
            None if tgt_shape is None else Size(tgt_shape),
            tgt_layout,
        )

    @classmethod
    def from_tensor(cls, tensor: Tensor, *, fields: Iterable[str] = FIELDS) -> TensorAttrs:
        """The record of one tensor.

        >>> TensorAttrs.from_tensor(torch.zeros(3), fields=("dtype",))
        TensorAttrs(dtype=torch.float32)
        """
        return _record(tensor, frozenset((fields,) if isinstance(fields, str) else fields))

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(
            f"Cannot set {name!r} of a TensorAttrs: records are shared between leaves. "
            f"Make a new one."
        )

    def __eq__(self, other: object) -> Any:
        if self is other:
            return True
        if type(other) is not TensorAttrs:
            return NotImplemented
        return self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[Any, ...]:
        return self.tgt_device, self.tgt_dtype, self.tgt_shape, self.tgt_layout

    def __repr__(self) -> str:
        parts = []
        if self.tgt_device is not None:
            parts.append(f"device={self.tgt_device}")
        if self.tgt_dtype is not None:
            parts.append(f"dtype={self.tgt_dtype}")
        if self.tgt_shape is not None:
            parts.append(f"shape={list(self.tgt_shape)}")
        if self.tgt_layout is not None:
            parts.append(f"layout={self.tgt_layout}")
        return f"TensorAttrs({', '.join(parts)})"

    def __reduce__(self) -> Any:
        return TensorAttrs, self._key()

    # --- leaf kind -----------------------------------------------------------------

    def _value(self) -> TensorAttrs:
        return self

    def _with(self, batch_size: Size, device: torch.device | None) -> TensorAttrs:
        return self

    def _encoded(self) -> dict[str, Any]:
        return {
            "device": None if self.tgt_device is None else str(self.tgt_device),
            "dtype": None if self.tgt_dtype is None else dtype_name(self.tgt_dtype),
            "shape": None if self.tgt_shape is None else list(self.tgt_shape),
            "layout": None if self.tgt_layout is None else self.tgt_layout.to_json(),
        }

    @classmethod
    def _from_encoded(cls, data: Any) -> TensorAttrs:
        device, dtype, shape, layout = (data[k] for k in ("device", "dtype", "shape", "layout"))
        return cls(
            device,
            None if dtype is None else parse_dtype(dtype),
            shape,
            None if layout is None else Layout.from_json(layout),
        )

    def _restructure(self, op: StructuralOp) -> Leaf:
        raise EntryTypeError(
            "Cannot index or reshape an attrs() tree: its entries describe whole leaves. "
            "Take attrs() of the reshaped tensordict."
        )

    @classmethod
    def _stack(cls, leaves: Sequence[Any], dim: int) -> Leaf:
        # The record of the stacked leaf, as read through a lazy stack; what differs is left open.
        first = leaves[0]
        shape = _common([x.tgt_shape for x in leaves])
        return cls(
            _common([x.tgt_device for x in leaves]),
            _common([x.tgt_dtype for x in leaves]),
            None if shape is None else (*shape[:dim], len(leaves), *shape[dim:]),
            first.tgt_layout if len(leaves) == 1 else None,
        )

    @classmethod
    def _cat(cls, leaves: Sequence[Any], dim: int) -> Leaf:
        raise EntryTypeError(
            "Cannot concatenate attrs() trees: take attrs() of the concatenated tensordict."
        )


# A record is plain values: `torch.load(weights_only=True)` may make one.
torch.serialization.add_safe_globals([TensorAttrs])


def _fill(
    out: TensorAttrs,
    device: torch.device | None,
    dtype: torch.dtype | None,
    shape: Size | None,
    layout: Layout | None,
) -> TensorAttrs:
    object.__setattr__(out, "tgt_device", device)
    object.__setattr__(out, "tgt_dtype", dtype)
    object.__setattr__(out, "tgt_shape", shape)
    object.__setattr__(out, "tgt_layout", layout)
    object.__setattr__(out, "_batch_size", _NO_BATCH)
    object.__setattr__(out, "_device", None)
    if layout is None and (device is None or device.type == "cpu"):
        object.__setattr__(out, "_host_dtype", dtype)
    return out


def _common(values: Sequence[Any]) -> Any:
    return values[0] if all(value == values[0] for value in values) else None


def host_dtypes(records: Iterable[Any]) -> list[torch.dtype | None] | None:
    """The dtypes of records that all ask for host memory; ``None`` when any does not."""
    try:
        return [record._host_dtype for record in records]
    except AttributeError:
        return None


def _record(x: Tensor, fields: frozenset[str]) -> TensorAttrs:
    layout = None
    if "layout" in fields and hasattr(x, "placements") and hasattr(x, "device_mesh"):
        layout = Layout.from_dtensor(x).as_dtype(None)  # a record has a dtype of its own
    return _fill(
        object.__new__(TensorAttrs),
        x.device if "device" in fields else None,
        x.dtype if "dtype" in fields else None,
        x.shape if "shape" in fields else None,
        layout,
    )


def attrs_of(node: Node, fields: Iterable[str] = FIELDS) -> Node:
    """The tree of records of ``node``: batch size ``[]`` (but for lazy stacks), no device, unlocked.

    Args:
        node: Any tree.
        fields: What to record: ``"device"``, ``"dtype"``, ``"shape"``, ``"layout"``; an unknown
            name is ignored.
    """
    chosen = frozenset((fields,) if isinstance(fields, str) else fields)
    known: dict[Any, TensorAttrs] = {}

    def standard(x: Tensor) -> Any:
        key = (x.device, x.dtype, x.shape)
        found = known.get(key)
        if found is None:
            found = known[key] = _fill(object.__new__(TensorAttrs), *key, None)
        return found

    def selected(x: Tensor) -> Any:
        new = _record(x, chosen)
        return known.setdefault(new._key(), new)

    out = map_leaves(node, standard if chosen == frozenset(FIELDS) else selected)
    for part in nodes(out):
        part._device = None
        part._dim_names = None
    # The entries of a stack keep the batch size that the stack dimension counts in.
    pending = [out]
    for part in pending:
        if part._members() is None:
            part._batch_size = _NO_BATCH
            pending.extend(part._children())
    return out
