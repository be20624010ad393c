"""Tensordicts allocated from a description: shapes and dtypes by key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .._keys import path_of, short
from ..core import write
from ..core.node import Node
from ..core.registry import node_class
from ..core.sizes import as_size
from ..errors import EntryTypeError
from .convert import dense_class

_BACKENDS = (None, "memmap", "h5", "zarr", "shared")


def from_schema(
    cls: type,
    schema: Mapping[Any, Any],
    batch_size: Any,
    storage: str | None,
    device: Any,
    **options: Any,
) -> Any:
    """`SchemaMethods.from_schema`."""
    if storage in ("redis", "dragonfly"):
        raise EntryTypeError(
            f"Cannot allocate in {storage!r}: key-value stores are not part of this package."
        )
    if storage not in _BACKENDS:
        raise EntryTypeError(
            f"Unknown storage backend {storage!r}. Expected one of {', '.join(map(repr, _BACKENDS))}."
        )
    if options and storage in (None, "shared"):
        raise EntryTypeError(f"Cannot use the options {sorted(options)} with storage={storage!r}.")
    batch = as_size(batch_size)
    out = dense_class(cls)(batch_size=batch, device=None if storage else device)
    for key, spec in schema.items():
        path = path_of(key)
        shape, dtype = _spec(path, spec)
        # Nothing is allocated for what is only written elsewhere: one element, expanded.
        whole = (*batch, *shape)
        if storage in (None, "shared"):
            value = torch.zeros(whole, dtype=dtype, device=None if storage else device)
        else:
            value = torch.zeros((), dtype=dtype).expand(whole)
        write.assign(out, path, value)
    if storage is None:
        return out
    if storage == "shared":
        return out.share_memory_()
    if storage == "memmap":
        return out.memmap_like(options.pop("prefix", None), **options)
    persistent: Any = node_class("persistent")
    return persistent.from_dict(out, backend=storage, **options)


def _spec(path: Any, spec: Any) -> tuple[Any, torch.dtype]:
    ok = isinstance(spec, (tuple, list)) and len(spec) == 2 and isinstance(spec[1], torch.dtype)
    if not ok:
        raise EntryTypeError(
            f"Cannot read the schema entry {short(path)!r}: expected a pair (shape without the batch, "
            f"dtype), got {spec!r}. Use tuple keys for nested entries."
        )
    return as_size(spec[0], "shape"), spec[1]


class SchemaMethods(Node):
    """Allocation from a schema."""

    __slots__ = ()

    @classmethod
    def from_schema(
        cls,
        schema: Mapping[Any, Any],
        *,
        batch_size: Any = None,
        storage: str | None = None,
        device: Any = None,
        **kwargs: Any,
    ) -> Any:
        """A tensordict of zeros.

        Args:
            schema: key (tuples nest) to a pair of shape without the batch, and dtype.
            batch_size: leading shape of every entry.
            storage: None for memory, ``"shared"``, ``"memmap"`` (``prefix=``), ``"h5"``
                (``filename=``) or ``"zarr"`` (``filename=``).
            device: for memory only.
            **kwargs: options of the storage.

        Raises:
            ValueError: another storage, or an entry that is no such pair.

        >>> import torch
        >>> from tensordict import TensorDict
        >>> TensorDict.from_schema({("n", "a"): ((3,), torch.int64)}, batch_size=[2])["n", "a"].shape
        torch.Size([2, 3])
        """
        return from_schema(cls, schema, batch_size, storage, device, **kwargs)
