"""The methods of a tensordict that move and cast its leaves."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from ..core.traverse import leaves
from .attrs import FIELDS, attrs_of
from .dtypes import DtypeMethods
from .moving import move, run_request
from .pinning import pin_tree
from .request import parse_to

if TYPE_CHECKING:
    from typing_extensions import Self


class PlacementMethods(DtypeMethods):
    """Devices, dtypes and memory of the leaves."""

    __slots__ = ()

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Move and cast the leaves.

        The forms of `torch.Tensor.to`: a device, a dtype, both, or a tensor; ``other=`` with a
        tensordict; a spec made by `attrs` or `tensordict.placement.spec`.  As a context manager,
        what the block changes goes back into the original entries.

        Args:
            *args: A device, a dtype, a device and a dtype, a tensor, a tensordict, or a spec.
            **kwargs: ``device``, ``dtype``, ``other``, ``memory_format``; ``batch_size`` for the
                result; ``inplace=True`` to write into this tensordict; ``non_blocking`` (``None``:
                asynchronous copies, and one wait where values could be read too early; ``True``:
                asynchronous, the caller waits; ``False``: blocking); ``non_blocking_pin`` and
                ``num_threads`` to pin leaves while others are copied.

        Returns:
            This tensordict when there is nothing to do (the device attribute is the target
            already); else a new one, with the very same tensor for each leaf that stays.

        Raises:
            LockedError: for ``inplace=True`` on a locked tensordict.
            LayoutError: when a spec asks for another sharding.

        >>> from tensordict import TensorDict
        >>> td = TensorDict({"a": torch.zeros(3)}, batch_size=[3])
        >>> td.to(torch.float16)["a"].dtype, td.to("meta").device
        (torch.float16, device(type='meta'))
        """
        return move(self, args, kwargs)

    def cpu(self, **kwargs: Any) -> Self:
        """``to("cpu")``."""
        return run_request(self, parse_to("cpu", **kwargs))

    def cuda(self, device: Any = None, **kwargs: Any) -> Self:
        """``to("cuda")``, or to the CUDA device of an index."""
        if device is None:
            device = "cuda"
        elif isinstance(device, int):
            device = torch.device("cuda", device)
        return run_request(self, parse_to(device, **kwargs))

    def attrs(self, *, fields: Iterable[str] = FIELDS, num_threads: int | None = None) -> Self:
        """A tree of `TensorAttrs`: what each leaf is like, as an argument of `to`.

        Args:
            fields: What to record: ``"device"``, ``"dtype"``, ``"shape"``, ``"layout"``.
            num_threads: Accepted and not needed: one walk takes less than starting a thread.

        >>> from tensordict import TensorDict
        >>> TensorDict({"a": torch.zeros(3)}).attrs()["a"].tgt_dtype
        torch.float32
        """
        return attrs_of(self, fields)  # type: ignore[return-value]

    def pin_memory(self, num_threads: int | None = None, inplace: bool = False) -> Self:
        """A tensordict whose leaves are in pinned memory.

        Args:
            num_threads: Threads that pin; ``None`` is one per core, 0 the calling thread.
            inplace: Replace the leaves of this tensordict and return it.

        Raises:
            RuntimeError: where there is no accelerator.
            EntryTypeError: when leaves are not in host memory; names each, and pins none.
            LockedError: for ``inplace=True`` on a locked tensordict.
        """
        return pin_tree(self, num_threads, inplace)

    def pin_memory_(self, num_threads: int | None = 0) -> Self:
        """Deprecated name of ``pin_memory(inplace=True)``."""
        warnings.warn(
            "pin_memory_() is deprecated, and will be removed in version 0.17. "
            "Use pin_memory(inplace=True).",
            DeprecationWarning,
            stacklevel=2,
        )
        return pin_tree(self, num_threads, True)

    def record_stream(self, stream: Any) -> Self:
        """Tell the allocator that ``stream`` uses the leaves that are on an accelerator."""
        for x in leaves(self):
            if x.device.type not in ("cpu", "meta"):
                x.record_stream(stream)
        return self
