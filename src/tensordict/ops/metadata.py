"""What a tensordict knows about itself: sizes, device, names, lock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Size

from .._typing import NO_DEFAULT
from ..core import lock as locking
from ..core.devices import as_device
from ..core.leaf import NonTensorData
from ..core.metadata import set_device, set_names
from ..core.node import KEEP, Node
from ..core.sizes import as_size, common_prefix, wrap_dim
from ..core.structural import DimNames
from ..core.traverse import leaves, map_entries, nodes_with_path, rekey
from ..core.undo import remember
from ..errors import BatchSizeError, EntryTypeError, StateError

if TYPE_CHECKING:
    from typing_extensions import Self


def check_names(names: Sequence[str | None], batch: Size) -> DimNames | None:
    """Dimension names as a list; None when none is given.

    Raises:
        EntryTypeError: (a ``ValueError``) wrong length or a name given twice.
    """
    out = list(names)
    if len(out) != len(batch):
        raise EntryTypeError(
            f"the length of the dimension names must equate the tensordict batch dimensions: got "
            f"{len(out)} names {out} for batch size {list(batch)}."
        )
    given = [name for name in out if name is not None]
    for name in given:
        if not isinstance(name, str):
            raise EntryTypeError(
                f"Cannot use {name!r} as a dimension name: expected a str or None."
            )
    if len(set(given)) != len(given):
        raise EntryTypeError(f"Some dimension names are non-unique: {out}.")
    return out if given else None


class MetadataMethods(Node):
    """Sizes, device, names and locks."""

    __slots__ = ()

    # --- batch size ------------------------------------------------------------------

    @property
    def batch_size(self) -> Size:
        """Leading shape ``[*B]`` that every entry has; settable (checked)."""
        return self._batch_size

    @batch_size.setter
    def batch_size(self, value: Any) -> None:
        size = as_size(value)
        _check_batch(self, size)
        _set_batch(self, size)

    @property
    def shape(self) -> Size:
        """Same as `batch_size`."""
        return self._batch_size

    def size(self, dim: int | None = None) -> Any:
        """The batch size, or one of its dimensions."""
        if dim is None:
            return self._batch_size
        return self._batch_size[wrap_dim(dim, len(self._batch_size))]

    @property
    def batch_dims(self) -> int:
        """Number of batch dimensions."""
        return len(self._batch_size)

    @property
    def ndim(self) -> int:
        """Number of batch dimensions."""
        return len(self._batch_size)

    def dim(self) -> int:
        """Number of batch dimensions."""
        return len(self._batch_size)

    def ndimension(self) -> int:
        """Number of batch dimensions."""
        return len(self._batch_size)

    def numel(self) -> int:
        """Elements of the batch shape, at least 1."""
        return max(1, self._batch_size.numel())

    def __len__(self) -> int:
        return self._batch_size[0] if self._batch_size else 0

    def __bool__(self) -> bool:
        raise StateError(
            "Converting a tensordict to boolean value is not permitted. Use td.is_empty() or "
            "(td == other).all()."
        )

    def auto_batch_size_(
        self, batch_dims: int | None = None, keep_compliant_size: bool = False
    ) -> Self:
        """Set the largest batch size that all entries share.

        Args:
            batch_dims: at most this many dimensions, here and below.
            keep_compliant_size: leave nested batch sizes that already fit as they are.
        """
        _fit_batch(self, batch_dims, keep_compliant_size)
        return self

    # --- device -----------------------------------------------------------------------

    @property
    def device(self) -> torch.device | None:
        """The device that entries are moved to when written; None moves nothing. Not settable."""
        if self._device is None:
            members = self._members()
            devices = {member._device for member in members or ()}
            if len(devices) > 1:
                names = " and ".join(sorted(str(device) for device in devices))
                raise StateError(
                    f"devices differ, got {names}: the members of this lazy stack are not on one "
                    f"device. Ask its members."
                )
        return self._device

    @device.setter
    def device(self, value: Any) -> None:
        raise StateError(
            "device cannot be set using tensordict.device = device, because device cannot be updated "
            "in-place. To update the tensordict device, use tensordict.to(new_device), "
            "auto_device_() or clear_device_()."
        )

    def clear_device_(self) -> Self:
        """Set the device attribute to None, here and below; nothing moves."""
        set_device(self, None)
        return self

    def auto_device_(self) -> Self:
        """Set the device attribute to the one device of all leaves, else to None; nothing moves."""
        devices = {as_device(x.device) for x in leaves(self)}
        set_device(self, devices.pop() if len(devices) == 1 else None)
        return self

    @property
    def is_cuda(self) -> bool:
        """Whether the device attribute is a CUDA device."""
        return self._device is not None and self._device.type == "cuda"

    @property
    def is_cpu(self) -> bool:
        """Whether the device attribute is the CPU."""
        return self._device is not None and self._device.type == "cpu"

    @property
    def is_meta(self) -> bool:
        """Whether the device attribute is the meta device."""
        return self._device is not None and self._device.type == "meta"

    # --- names ------------------------------------------------------------------------

    @property
    def names(self) -> list[Any]:
        """One name or None per batch dimension; settable, None clears."""
        names = self._dim_names
        return [None] * len(self._batch_size) if names is None else list(names)

    @names.setter
    def names(self, value: Sequence[str | None] | None) -> None:
        names = None if value is None else check_names(value, self._batch_size)
        set_names(self, names)

    def refine_names(self, *names: Any) -> Self:
        """Fill in names that are missing; ``...`` stands for the rest.

        Raises:
            RuntimeError: a dimension already has another name.
        """
        wanted = _expand_ellipsis(names, self.names)
        for old, new in zip(self.names, wanted):
            if old is not None and new != old:
                raise StateError(
                    f"refine_names: cannot coerce TensorDict names {self.names} with {wanted}."
                )
        self.names = wanted
        return self

    def rename_(self, *names: Any, **rename_map: str) -> Self:
        """Rename dimensions in place: all of them by position, or some by ``old=new``."""
        self.names = _renamed(self.names, names, rename_map)
        return self

    def rename(self, *names: Any, **rename_map: str) -> Self:
        """A tensordict with other dimension names; the leaves are shared."""
        wanted = _renamed(self.names, names, rename_map)
        out = self._map(lambda x: x)
        out.names = None if wanted is None else wanted
        return out

    # --- lock -------------------------------------------------------------------------

    @property
    def is_locked(self) -> bool:
        """Whether entries cannot be added, replaced or removed; settable."""
        return self._lock is not None

    @is_locked.setter
    def is_locked(self, value: bool) -> None:
        if value:
            self.lock_()
        else:
            self.unlock_()

    def lock_(self) -> Self:
        """Forbid adding, replacing and removing entries, here and below; context manager."""
        was = self._lock is not None
        locking.lock(self)
        out: Self = remember(self, self, _locked if was else _unlocked, always=True)
        return out

    def unlock_(self) -> Self:
        """Undo `lock_`; context manager.

        Raises:
            RuntimeError: this tensordict is held by another locked one.
        """
        was = self._lock is not None
        locking.unlock(self)
        out: Self = remember(self, self, _locked if was else _unlocked, always=True)
        return out

    def clear_refs_for_compile_(self) -> Self:
        """Forget the way back of a ``with`` block, which holds a weak reference; returns self."""
        for _, node in nodes_with_path(self):
            node._undo = None
        return self

    # --- contents ---------------------------------------------------------------------

    def is_empty(self) -> bool:
        """Whether no leaf is held, at any depth."""
        members = self._members()
        parts = (entry for _, entry in self._items()) if members is None else iter(members)
        return all(isinstance(part, MetadataMethods) and part.is_empty() for part in parts)

    @property
    def depth(self) -> int:
        """Number of nested levels below this one."""
        return max(len(path) for path, _ in nodes_with_path(self))

    def is_contiguous(self) -> bool:
        """Whether every leaf is contiguous."""
        return all(x.is_contiguous() for x in leaves(self))

    def is_floating_point(self) -> bool:
        """Whether every leaf is of a floating dtype."""
        return all(x.is_floating_point() for x in leaves(self))

    @property
    def dtype(self) -> torch.dtype | None:
        """The one dtype of all leaves, else None."""
        dtypes = {x.dtype for x in leaves(self)}
        return dtypes.pop() if len(dtypes) == 1 else None

    @property
    def requires_grad(self) -> bool:
        """Whether any leaf requires grad."""
        return any(x.requires_grad for x in leaves(self))

    def bytes(self, *, count_duplicates: bool = True) -> int:
        """Bytes of all leaves (elements times element size).

        Args:
            count_duplicates: count a tensor that is held twice twice.
        """
        return sum(x.nbytes for x in _distinct(leaves(self), count_duplicates))

    def param_count(self, *, count_duplicates: bool = True) -> int:
        """Elements of all leaves."""
        return sum(x.numel() for x in _distinct(leaves(self), count_duplicates))

    def data_ptr(self, *, storage: bool = False) -> Any:
        """A tensordict of the data pointers of the leaves, as int64 tensors of shape ``[]``."""
        pick = (lambda x: x.untyped_storage().data_ptr()) if storage else (lambda x: x.data_ptr())
        out = self._map(lambda x: torch.tensor(pick(x)))
        for _, node in reversed(list(nodes_with_path(out))):
            members = node._members()
            if members is None:
                node._batch_size = Size([])
            else:
                node._bare()._stack_dim = 0  # type: ignore[attr-defined]
                node._batch_size = Size([len(members), *members[0]._batch_size])
            node._dim_names = None
            node._device = None
        return out

    def empty(
        self,
        recurse: bool = False,
        *,
        batch_size: Any = None,
        device: Any = NO_DEFAULT,
        names: Any = NO_DEFAULT,
    ) -> Self:
        """A tensordict with the same metadata and no entries.

        Args:
            recurse: keep the (empty) nested tensordicts.
            batch_size, device, names: other metadata for the result.
        """
        bare = map_entries(self, lambda _, entry: None) if recurse else rekey(self, lambda _: {})
        if batch_size is None and device is NO_DEFAULT and names is NO_DEFAULT:
            return bare
        size = KEEP if batch_size is None else as_size(batch_size)
        dim_names: Any = KEEP if size is KEEP else None
        if names is not NO_DEFAULT:
            dim_names = (
                None
                if names is None
                else check_names(names, self._batch_size if size is KEEP else size)
            )
        where: Any = KEEP
        if device is not NO_DEFAULT:
            where = None if device is None else as_device(device)
        return bare._like(dict(bare._items()), size, dim_names, where)


def _locked(source: Node, _: Node) -> None:
    locking.lock(source)


def _unlocked(source: Node, _: Node) -> None:
    locking.unlock(source)


def _distinct(tensors: list[Any], count_duplicates: bool) -> list[Any]:
    if count_duplicates:
        return tensors
    return list({_place(x): x for x in tensors}.values())


def _place(x: Any) -> Any:
    try:
        return x.data_ptr(), x.shape, x.stride(), x.dtype, x.device if x.data_ptr() else id(x)
    except RuntimeError:  # no storage (fake, functional): identity is all there is
        return id(x)


def _fit_batch(node: Any, limit: int | None, keep: bool) -> None:
    """Set the largest batch size that all entries share, below first."""
    own = node._batch_size
    members = node._members()
    if members is None:
        for child in node._children():
            _fit_batch(child, limit, keep)
        size = common_prefix(_fixed_shapes(node), limit)
    else:
        dim = node.stack_dim
        for member in members:
            _fit_batch(member, None if limit is None else max(dim, limit - 1), keep)
        inner = common_prefix(member._batch_size for member in members)
        for member in members:
            _set_batch(member, inner)
        size = Size([*inner[:dim], len(members), *inner[dim:]])
    if keep and own and size[: len(own)] == own:
        return
    if len(own) != len(size):
        node._dim_names = None
    if members is None:
        _set_batch(node, size)
    node._batch_size = size


def _fixed_shapes(node: Node) -> list[Size]:
    """The shapes of the entries; not of values and empty nodes, which fit a batch of any size."""
    out = []
    for _, entry in node._items():
        if isinstance(entry, Node):
            if _fixed_shapes(entry):
                out.append(entry._batch_size)
        elif not isinstance(entry, NonTensorData):
            out.append(entry.shape)
    return out


def _inner_size(node: Any, size: Size) -> Size:
    """The part of a stack's batch size that is its members'.

    Raises:
        BatchSizeError: the size does not have the stack's dimension.
    """
    dim, n = node.stack_dim, len(node._members())
    if len(size) <= dim or size[dim] != n:
        raise BatchSizeError(
            f"Cannot give a lazy stack of {n} along dimension {dim} the batch size {list(size)}: "
            f"expected size {n} there. Call to_tensordict() first."
        )
    return size[:dim] + size[dim + 1 :]


def _check_batch(node: Node, size: Size) -> None:
    members = node._members()
    if members is not None:
        inner = _inner_size(node, size)
        for member in members:
            _check_batch(member, inner)
        return
    for child in node._children():
        _check_batch(child, size)
    n = len(size)
    for path, entry in [((name,), e) for name, e in node._items() if not isinstance(e, Node)]:
        if entry.shape[:n] != size and not (
            not isinstance(entry, torch.Tensor) and size[: entry.ndim] == entry.shape
        ):
            raise BatchSizeError(
                f"the tensor {path[0] if len(path) == 1 else path} has shape {entry.shape} which is "
                f"incompatible with the batch-size {size}. Expected leading dimensions {list(size)}."
            )


def _set_batch(node: Node, size: Size) -> None:
    old = node._batch_size
    members = node._members()
    if members is not None:
        inner = _inner_size(node, size)
        for member in members:
            _set_batch(member, inner)
    for name, entry in list(node._items()) if members is None else ():
        if isinstance(entry, Node):
            if entry._batch_size[: len(size)] != size:
                _set_batch(entry, size)
        elif not isinstance(entry, torch.Tensor) and (
            entry._batch_size == old or len(entry._batch_size) < len(size)
        ):
            node._store(name, entry._with(size, entry._device))
    if node._dim_names is not None and len(old) != len(size):
        node._dim_names = [*node._dim_names, *[None] * len(size)][: len(size)]
    node._batch_size = size


def _expand_ellipsis(names: Sequence[Any], old: list[Any]) -> list[Any]:
    if ... not in names:
        return list(names)
    i = names.index(...)
    tail = len(names) - i - 1
    return [*names[:i], *old[i : len(old) - tail], *names[i + 1 :]]


def _renamed(old: list[Any], names: Sequence[Any], rename_map: dict[str, str]) -> Any:
    if names and rename_map:
        raise EntryTypeError("Cannot rename: pass names by position or old=new pairs, not both.")
    if rename_map:
        for name in rename_map:
            if name not in old:
                raise EntryTypeError(f"Cannot rename the dimension {name!r}: the names are {old}.")
        return [rename_map.get(name, name) for name in old]
    if len(names) == 1 and names[0] is None:
        return None
    return _expand_ellipsis(names, old)
