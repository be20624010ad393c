"""`TensorDictParams`: a tensordict that is a module, its leaves parameters and buffers.

The entries live where torch looks for them: parameters in ``_parameters``, other tensors
in ``_buffers``, nested tensordicts (of this class too) in ``_modules``.  So everything that
torch does to modules (optimisers, ``state_dict``, ``to`` of a parent, hooks, FSDP) is true
of the tensordict at once; only the order of the entries is kept beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Size, Tensor, nn

from ..core import lock as locking
from ..core.node import KEEP, Entry, Node
from ..core.registry import register_node
from ..core.structural import DimNames, StructuralOp
from ..core.traverse import leaves, nodes_with_path
from ..errors import EntryTypeError
from ..ops.combine import cat_entries, stack_entries
from ..ops.display_cards import NodeCard
from .base import TensorDictBase
from .dense import TensorDict

if TYPE_CHECKING:
    from typing_extensions import Self


@register_node
class TensorDictParams(TensorDictBase, nn.Module):  # type: ignore[misc]
    """A tensordict as an ``nn.Module`` of parameters and buffers.

    A floating-point tensor that is written becomes a ``Parameter``; a ``Buffer`` and a
    tensor of another dtype become buffers.  Operations give plain tensordicts; copies
    (``clone``, ``copy``, ``deepcopy``, ``to``, pickle) are modules again.

    Args:
        parameters: a tensordict or mapping; exclusive with keyword entries.
        no_convert: keep plain tensors as they are, as buffers.
        lock: whether the result is locked.
        **kwargs: entries.

    >>> params = TensorDictParams(TensorDict(a=torch.zeros(3), n={"b": torch.ones(2)}))
    >>> [name for name, _ in params.named_parameters()]
    ['a', 'n.b']
    """

    kind = "params"

    _no_convert: bool
    _values: dict[str, Any]
    _order: dict[str, None]

    __hash__ = object.__hash__  # type: ignore[assignment]

    def __init__(
        self,
        parameters: Mapping[Any, Any] | Node | None = None,
        *,
        no_convert: bool = False,
        lock: bool = False,
        **kwargs: Any,
    ) -> None:
        nn.Module.__init__(self)
        if parameters is not None and kwargs:
            raise EntryTypeError(
                "Either a dictionary or a sequence of kwargs must be provided, not both."
            )
        source: Any = kwargs if parameters is None else parameters
        if not isinstance(source, Node):
            source = TensorDict(source)
        self._setup(source._batch_size, source._dim_names, source._device, no_convert)
        for name, entry in source._items():
            self._store(name, entry)
        if lock:
            locking.lock(self)

    def _setup(
        self,
        batch_size: Size,
        dim_names: DimNames | None,
        device: torch.device | None,
        no_convert: bool,
    ) -> None:
        put = object.__setattr__  # Module.__setattr__ looks at what it is given first
        put(self, "_batch_size", batch_size)
        put(self, "_dim_names", dim_names)
        put(self, "_device", device)
        put(self, "_lock", None)
        put(self, "_undo", None)
        self.__dict__.update(_no_convert=no_convert, _values={}, _order={})

    @classmethod
    def _made(
        cls, entries: Mapping[str, Entry], like: TensorDictParams, device: torch.device | None
    ) -> Self:
        """One with the metadata of another, over entries that are stored as they are."""
        out = cls.__new__(cls)
        nn.Module.__init__(out)
        out._setup(like._batch_size, like._dim_names, device, True)
        for name, entry in entries.items():
            out._store(name, entry)
        out._no_convert = like._no_convert
        out.training = like.training
        return out

    # --- primitives --------------------------------------------------------------

    def _stores(self) -> tuple[dict[str, Any], ...]:
        return self._parameters, self._buffers, self._modules, self._values

    def _fetch(self, name: str) -> Entry | None:
        for store in self._stores():
            entry: Entry | None = store.get(name)
            if entry is not None:
                return entry
        return None

    def _store(self, name: str, entry: Entry) -> None:
        if isinstance(entry, Tensor):
            entry = self._as_leaf(entry)
            target: Any = self._parameters if isinstance(entry, nn.Parameter) else self._buffers
        elif isinstance(entry, Node):
            if not isinstance(entry, TensorDictParams):
                entry = TensorDictParams(entry, no_convert=self._no_convert)
            target = self._modules
        else:
            target = self._values
        volatile = self._non_persistent_buffers_set
        if target is self._buffers and not getattr(entry, "persistent", True):
            volatile.add(name)
        elif volatile:
            volatile.discard(name)
        if name in self._order and name not in target:
            for store in self._stores():
                store.pop(name, None)
        target[name] = entry
        self._order[name] = None

    def _as_leaf(self, x: Tensor) -> Tensor:
        if self._no_convert or type(x) is nn.Parameter or isinstance(x, (nn.Parameter, nn.Buffer)):
            return x
        if x.is_floating_point() or x.is_complex():
            return nn.Parameter(x)
        return nn.Buffer(x)

    def _remove(self, name: str) -> None:
        for store in self._stores():
            store.pop(name, None)
        self._order.pop(name, None)

    def _present(self) -> dict[str, Entry]:
        # Torch may have added to or taken from the stores: they are the truth, not the order.
        held = {n: e for store in self._stores() for n, e in store.items() if e is not None}
        out = {name: held[name] for name in self._order if name in held}
        out.update(held)
        return out

    def _items(self) -> Any:
        return self._present().items()

    def _names(self) -> Any:
        return self._present().keys()

    def _children(self) -> list[Node]:
        children: Any = self._modules.values()
        return [child for child in children if isinstance(child, Node)]

    def _like(
        self,
        entries: dict[str, Entry],
        batch_size: Size = KEEP,
        dim_names: DimNames | None = KEEP,
        device: torch.device | None = KEEP,
    ) -> Any:
        return TensorDict._new(
            entries,
            self._batch_size if batch_size is KEEP else batch_size,
            self._dim_names if dim_names is KEEP else dim_names,
            self._device if device is KEEP else device,
        )

    def _child(self) -> Node:
        out = type(self)._made({}, self, self._device)
        out._no_convert = self._no_convert
        return out

    def _plain(self) -> TensorDict:
        """The same leaves in plain tensordicts."""
        entries = {
            name: entry._plain() if isinstance(entry, TensorDictParams) else entry
            for name, entry in self._items()
        }
        return TensorDict._new(entries, self._batch_size, self._dim_names, self._device)

    def _collect(self, out: list[Tensor]) -> None:
        for entry in self._present().values():
            if isinstance(entry, Tensor):
                out.append(entry)
            elif isinstance(entry, Node):
                entry._collect(out)

    def _rebuild(self, leaves: Iterator[Tensor]) -> Any:
        return self._plain()._rebuild(leaves)

    def _map(self, fn: Callable[[Tensor], Tensor]) -> Any:
        return self._plain()._map(fn)

    def _restructure(self, op: StructuralOp) -> Any:
        out = self._plain()._restructure(op)
        if op.keeps_lock and self._lock is not None:
            locking.lock(out)
        return out

    @classmethod
    def _stack(cls, nodes: Sequence[Any], dim: int) -> Any:
        return stack_entries(nodes, dim)

    @classmethod
    def _cat(cls, nodes: Sequence[Any], dim: int) -> Any:
        return cat_entries(nodes, dim)

    def _header(self) -> dict[str, Any]:
        return {
            "batch_size": list(self._batch_size),
            "device": None if self._device is None else str(self._device),
            "names": self._dim_names,
            "no_convert": self._no_convert,
            "training": self.training,
            "parameters": sorted(name for name, x in self._parameters.items() if x is not None),
            "buffers": sorted(
                name for name, x in self._buffers.items() if isinstance(x, nn.Buffer)
            ),
            "volatile": sorted(self._non_persistent_buffers_set),
        }

    @classmethod
    def _from_header(cls, header: dict[str, Any], entries: dict[str, Entry]) -> TensorDictParams:
        device = header.get("device")
        entries = _as_registered(header, entries)
        out = cls.__new__(cls)
        nn.Module.__init__(out)
        device = None if device is None else torch.device(device)
        out._setup(Size(header["batch_size"]), header.get("names"), device, True)
        for name, entry in entries.items():
            out._store(name, entry)
        out._no_convert = bool(header.get("no_convert"))
        out.training = bool(header.get("training", True))
        return out

    # --- copies are modules --------------------------------------------------------

    def _copied(self, fn: Callable[[Tensor], Tensor], device: Any = KEEP) -> Self:
        """A module of the same structure over ``fn(leaf)``; parameters stay parameters."""

        def convert(x: Tensor) -> Tensor:
            y = fn(x)
            if isinstance(x, nn.Parameter) and not isinstance(y, nn.Parameter):
                return nn.Parameter(y.detach(), x.requires_grad)
            return y

        entries = {
            name: convert(entry)
            if isinstance(entry, Tensor)
            else (entry._copied(fn, device) if isinstance(entry, TensorDictParams) else entry)
            for name, entry in self._items()
        }
        return self._made(entries, self, self._device if device is KEEP else device)

    def clone(self, recurse: bool = True, **kwargs: Any) -> Self:
        """A module with new parameters, or (``recurse=False``) with the same ones."""
        return self._copied(lambda x: x.detach().clone()) if recurse else self.copy()

    def copy(self) -> Self:
        """New containers over the same parameters."""
        return self._copied(lambda x: x)

    def __copy__(self) -> Self:
        return self.copy()

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """A module with parameters moved or cast; arguments as for any tensordict."""
        moved: Any = super().to(*args, **kwargs)
        if not isinstance(moved, Node) or isinstance(moved, TensorDictParams):
            return moved
        values = iter(leaves(moved))
        out = self._copied(lambda _: next(values), moved._device)
        if moved._lock is not None:
            locking.lock(out)
        return out

    # --- what torch does to modules --------------------------------------------------

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        locking.touched(self)
        if self._device is not None:
            self.auto_device_()
        return self

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Add a parameter under a name; None adds nothing."""
        if param is not None:
            self.set(name, param)

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        """Add a buffer (None adds nothing); state dicts leave out those that are not persistent."""
        if tensor is not None:
            self.set(name, nn.Buffer(tensor, persistent=persistent))

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Add a nested tensordict under a name.

        Raises:
            TypeError: for a module that is no tensordict.
        """
        if not isinstance(module, Node):
            raise EntryTypeError(
                f"Cannot add {name!r} to a TensorDictParams: expected a tensordict, got a "
                f"{type(module).__name__}. Use TensorDictParams.from_module(module, as_module=True)."
            )
        self.set(name, module)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As for any tensordict, without the buffers that are not persistent."""
        volatile = [
            (*path, name)
            for path, node in nodes_with_path(self)
            if isinstance(node, TensorDictParams)
            for name in node._non_persistent_buffers_set
        ]
        if not volatile:
            return super().state_dict(*args, **kwargs)
        return self._plain().exclude(*volatile).state_dict(*args, **kwargs)

    def _card(self) -> NodeCard:
        card = self._plain()._card()
        card.wrapper = f"{type(self).__name__}(params="
        return card


def _as_registered(header: dict[str, Any], entries: dict[str, Entry]) -> dict[str, Entry]:
    """Entries that came as plain tensors, as the parameters and buffers that a header says."""
    out = dict(entries)
    for name in header.get("parameters", ()):
        x = out[name]
        if isinstance(x, Tensor) and not isinstance(x, nn.Parameter):
            out[name] = nn.Parameter(x.detach(), x.requires_grad)
    volatile = header.get("volatile", ())
    for name in header.get("buffers", ()):
        x = out[name]
        if isinstance(x, Tensor) and not isinstance(x, nn.Buffer):
            out[name] = nn.Buffer(x, persistent=name not in volatile)
    return out
