"""The few things that differ between backends, behind one protocol.

Everything that copies, waits or pins asks `ops_for`; nothing else of this package names a
backend.  Tests register a stand-in, so that the rules are proven without hardware.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch


@runtime_checkable
class DeviceEvent(Protocol):
    """A mark in the queue of a device."""

    def wait(self) -> None:
        """Block the host until everything before the mark is done."""

    def done(self) -> bool:
        """Whether everything before the mark is done."""


@runtime_checkable
class DeviceOps(Protocol):
    """What a backend can do."""

    type: str

    def is_available(self) -> bool:
        """Whether a device of this type can be used."""

    def record(self, device: torch.device) -> DeviceEvent | None:
        """Mark the present end of the queue in use on ``device``; None: the backend has no events."""

    def synchronize(self, device: torch.device) -> None:
        """Block the host until the device is idle."""

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a host tensor in memory that this backend can read on its own."""

    def empty_pinned(self, nbytes: int) -> torch.Tensor:
        """Such memory without values, ``uint8`` of shape ``[nbytes]``."""

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether a host tensor is in such memory."""

    def free_memory(self, device: torch.device) -> int:
        """Free bytes on the device."""


class HostOps:
    """The host, and the meta device: nothing is ever queued there."""

    def __init__(self, kind: str) -> None:
        self.type = kind

    def is_available(self) -> bool:
        """Always true."""
        return True

    def record(self, device: torch.device) -> DeviceEvent | None:
        """There is no queue."""
        return None

    def synchronize(self, device: torch.device) -> None:
        """There is nothing to wait for."""

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Pin for the accelerator in use (torch raises where there is none)."""
        return tensor.pin_memory()

    def empty_pinned(self, nbytes: int) -> torch.Tensor:
        """Pinned memory without values."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is pinned for the accelerator in use."""
        return tensor.is_pinned()

    def free_memory(self, device: torch.device) -> int:
        """Memory that the host can still give, from psutil; 0 for meta."""
        if self.type == "meta":
            return 0
        import psutil

        return int(psutil.virtual_memory().available)


class _TorchEvent:
    __slots__ = ("_event",)

    def __init__(self, event: Any) -> None:
        self._event = event

    def wait(self) -> None:
        self._event.synchronize()

    def done(self) -> bool:
        return bool(self._event.query())


class AcceleratorOps:
    """A backend with a torch module of its own (``torch.cuda``, ``torch.xpu``, ``torch.mps`` ...).

    A backend without events (or whose events cannot be recorded on a given device) falls back to
    its ``synchronize``.
    """

    def __init__(self, kind: str) -> None:
        self.type = kind

    @property
    def _module(self) -> Any:
        return getattr(torch, self.type, None)

    def is_available(self) -> bool:
        """Whether torch sees such a device."""
        module = self._module
        return bool(module is not None and module.is_available())

    def record(self, device: torch.device) -> DeviceEvent | None:
        """An event recorded on the current stream of ``device``."""
        module = self._module
        # Fake tensors may be on devices that this machine has not: nothing is queued there.
        if not self.is_available():
            return None
        if not hasattr(module, "Event") or not hasattr(module, "current_stream"):
            return None
        event = module.Event()
        event.record(module.current_stream(device))
        return _TorchEvent(event)

    def synchronize(self, device: torch.device) -> None:
        """Wait for every queue of the device."""
        module = self._module
        if not self.is_available():
            return
        if self.type == "mps":
            module.synchronize()
        else:
            module.synchronize(device)

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """A pinned copy of a host tensor."""
        return tensor.pin_memory()

    def empty_pinned(self, nbytes: int) -> torch.Tensor:
        """Pinned memory without values."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether a host tensor is pinned."""
        return tensor.is_pinned()

    def free_memory(self, device: torch.device) -> int:
        """Free bytes by the backend's own count; 0 where it tells none."""
        module = self._module
        if hasattr(module, "mem_get_info"):
            return int(module.mem_get_info(device)[0])
        if hasattr(module, "recommended_max_memory"):
            return int(module.recommended_max_memory() - module.driver_allocated_memory())
        return 0


_registry: dict[str, DeviceOps] = {
    "cpu": HostOps("cpu"),
    "meta": HostOps("meta"),
    **{kind: AcceleratorOps(kind) for kind in ("cuda", "xpu", "mps")},
}


def ops_for(device: torch.device | str) -> DeviceOps:
    """The operations of the backend of a device.

    An unknown type gets the generic accelerator operations, which use the torch module of that
    name: this is how a privateuse1 backend works without being registered.

    >>> ops_for("cpu").type, ops_for(torch.device("cuda:1")).type
    ('cpu', 'cuda')
    """
    kind = device if type(device) is str else device.type  # type: ignore[union-attr]
    ops = _registry.get(kind)
    if ops is None:
        ops = _registry[kind] = AcceleratorOps(kind)
    return ops


def accelerator_ops() -> DeviceOps:
    """The operations of the accelerator of this machine.

    Raises:
        RuntimeError: when there is none.
    """
    for ops in _registry.values():
        if ops.type not in ("cpu", "meta") and ops.is_available():
            return ops
    if torch.accelerator.is_available():  # a backend that registered itself with torch alone
        device = torch.accelerator.current_accelerator()
        if device is not None:
            return ops_for(device)
    raise RuntimeError(
        "Cannot pin memory: expected an accelerator, and there is none on this machine."
    )


def register_device_ops(ops: DeviceOps) -> DeviceOps | None:
    """Use ``ops`` for its device type from now on; return what was used before.

    >>> before = register_device_ops(HostOps("meta"))
    >>> before.type
    'meta'
    """
    before = _registry.get(ops.type)
    _registry[ops.type] = ops
    return before


@contextmanager
def using_device_ops(*many: DeviceOps) -> Iterator[None]:
    """Use other operations within a ``with`` block.

    >>> mine = HostOps("meta")
    >>> with using_device_ops(mine):
    ...     ops_for("meta") is mine
    True
    >>> ops_for("meta") is mine
    False
    """
    before = dict(_registry)
    try:
        for ops in many:
            _registry[ops.type] = ops
        yield
    finally:
        _registry.clear()
        _registry.update(before)
