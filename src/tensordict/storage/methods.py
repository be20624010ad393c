"""The storage methods of a tensordict: parse, call a function, return."""

from __future__ import annotations

import os
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

from .._typing import DeviceLike
from ..core.devices import as_device
from ..core.node import Node
from . import consolidate as consolidation
from . import reduce, shared
from .consolidated_file import read_consolidated, write_consolidated

if TYPE_CHECKING:
    from typing_extensions import Self


class StorageMethods(Node):
    """Consolidation, shared memory, pickling."""

    __slots__ = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # The pickler of multiprocessing looks classes up exactly, so each subclass is named.
        ForkingPickler.register(cls, reduce.reduce_for_process)

    def consolidate(
        self,
        filename: str | os.PathLike[str] | None = None,
        *,
        device: DeviceLike | None = None,
        non_blocking: bool = False,
        inplace: bool = False,
        share_memory: bool = False,
        pin_memory: bool = False,
        num_threads: int = 0,
        return_early: bool = False,
        use_buffer: bool = False,
        metadata: bool = False,
    ) -> Self:
        """A locked tensordict whose leaves are views of one buffer.

        Such a tensordict moves, pickles and travels as one tensor.  ``unlock_()`` ends that.

        Args:
            filename: also write it to this file, from which `from_consolidated` reads it.
            device: where the buffer goes; by default where the leaves are.
            non_blocking: passed to the copy that leads there.
            inplace: replace the leaves of this tensordict and return it.
            share_memory: put the buffer into shared memory.
            pin_memory: pin the buffer.
            num_threads, return_early, use_buffer, metadata: without effect: packing is one call
                into torch, a file is complete when the call returns, the layout is always kept.

        Returns:
            A new tensordict; this one when it is consolidated already or with ``inplace``.  Grad
            history is dropped; tied leaves stay tied and are stored once.

        Raises:
            TypeError: when leaves cannot be viewed as bytes (quantized ones, say), or lie on
                several devices; nothing was touched then.
            UnsupportedLeaf: (a ``TypeError``) for an entry that the file has no place for.

        >>> import torch
        >>> from tensordict import TensorDict
        >>> td = TensorDict({"a": torch.zeros(3), "n": {"b": torch.ones(3, 2)}}, batch_size=[3])
        >>> c = td.consolidate()
        >>> c.is_consolidated(), c.is_locked
        (True, True)
        >>> c["a"].untyped_storage().data_ptr() == c["n", "b"].untyped_storage().data_ptr()
        True
        """
        run: Any = consolidation.consolidate_ if inplace else consolidation.consolidate
        out: Self = run(
            self,
            device=None if device is None else as_device(device),
            non_blocking=non_blocking,
            share_memory=share_memory,
            pin_memory=pin_memory,
        )
        if filename is not None:
            write_consolidated(out, filename)
        return out

    @classmethod
    def from_consolidated(cls, filename: str | os.PathLike[str]) -> Any:
        """The consolidated tensordict of a file that ``consolidate(filename)`` wrote.

        The file is mapped: nothing is read before it is used, and writing to the leaves leaves
        the file as it is.

        Raises:
            FileFormatError: (a ``ValueError``) when the file is not what it should be.

        >>> import tempfile, torch
        >>> from tensordict import TensorDict
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = TensorDict({"a": torch.ones(2), "b": "text"}).consolidate(f"{folder}/x.td")
        ...     td = TensorDict.from_consolidated(f"{folder}/x.td")
        ...     td["a"], td["b"]
        (tensor([1., 1.]), 'text')
        """
        return read_consolidated(filename)

    def is_consolidated(self) -> bool:
        """Whether all leaves are views of one buffer; see `consolidate`."""
        return consolidation.is_consolidated(self)

    def share_memory_(self) -> Self:
        """Move every host leaf to shared memory and lock; other processes then see writes.

        The leaves stay the same tensor objects.

        Raises:
            RuntimeError: when this tensordict is memory-mapped.

        >>> import torch
        >>> from tensordict import TensorDict
        >>> td = TensorDict({"a": torch.zeros(3)}, batch_size=[3]).share_memory_()
        >>> td.is_shared(), td["a"].is_shared(), td.is_locked
        (True, True, True)
        """
        return shared.share_memory_(self)

    def is_shared(self) -> bool:
        """Whether `share_memory_` was called and this tensordict is locked since."""
        return shared.is_shared(self)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return reduce.reduce_tree(self, int(protocol))

    def __copy__(self) -> Self:
        return self._map(lambda x: x)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        out: Self = reduce.deep_copy(self, memo)
        return out
