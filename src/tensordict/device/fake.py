"""Devices without hardware, whose copies arrive late, to prove the rules of asynchronous moves.

Within `FakeDevices`, tensors can be moved to ``cuda:0``, ``cuda:1``, ``xpu:0``, ``mps:0`` ...
A non-blocking copy is only queued: until the queue of its device is waited for (or another
operation of that device needs the value), a host destination holds wrong bytes.  A pinned source
is read when the copy runs, a pageable one at once.  So code that reads early, or reuses a pinned
source early, computes something wrong, every time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from .kinds import PLAIN_TENSORS
from .ops import DeviceEvent, using_device_ops

_aten = torch.ops.aten
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class FakeCopy:
    """One copy that was seen.

    Attributes:
        src: Device read.
        dst: Device written.
        non_blocking: The flag the copy was called with.
        nbytes: Bytes written.
    """

    src: torch.device
    dst: torch.device
    non_blocking: bool
    nbytes: int


class FakeDeviceTensor(torch.Tensor):
    """A tensor that says it is on an accelerator; its bytes are those of a host tensor."""

    host: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor, device: torch.device) -> FakeDeviceTensor:
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=device,
        )
        self.host = inner
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return (
            f"FakeDeviceTensor(shape={list(self.shape)}, device={self.device}, dtype={self.dtype})"
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        raise RuntimeError(f"Cannot run {func} on a fake device tensor outside of FakeDevices.")


class _Queue:
    """The work of one device, in order."""

    def __init__(self) -> None:
        self.pending: deque[Callable[[], None]] = deque()
        self.pushed = 0
        self.ran = 0

    def push(self, work: Callable[[], None]) -> None:
        self.pending.append(work)
        self.pushed += 1

    def run_until(self, position: int) -> None:
        while self.ran < position and self.pending:
            self.ran += 1
            self.pending.popleft()()


class _FakeEvent:
    def __init__(self, world: FakeDevices, device: torch.device) -> None:
        self._world = world
        self._device = device
        self._queue = world.queue(device)
        self._position = self._queue.pushed

    def wait(self) -> None:
        self._world.waits.append(self._device)
        self._queue.run_until(self._position)

    def done(self) -> bool:
        return self._queue.ran >= self._position


class FakeOps:
    """Device operations of one fake type; ``events=False`` is a backend that cannot record."""

    def __init__(self, kind: str, world: FakeDevices, *, events: bool = True) -> None:
        self.type = kind
        self.events = events
        self._world = world

    def is_available(self) -> bool:
        """Always true."""
        return True

    def record(self, device: torch.device) -> DeviceEvent | None:
        """A mark at the end of the queue of ``device``."""
        return _FakeEvent(self._world, device) if self.events else None

    def synchronize(self, device: torch.device) -> None:
        """Run everything that is queued on ``device``."""
        self._world.waits.append(device)
        queue = self._world.queue(device)
        queue.run_until(queue.pushed)

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """A host copy that counts as pinned."""
        out = tensor.clone()
        self._world.pinned.add(out.untyped_storage().data_ptr())
        self._world.n_pins += 1
        return out

    def empty_pinned(self, nbytes: int) -> torch.Tensor:
        """Host memory that counts as pinned."""
        return self.pin(torch.zeros(nbytes, dtype=torch.uint8))

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether the storage of a host tensor was pinned here."""
        return self._world.is_pinned(tensor)

    def free_memory(self, device: torch.device) -> int:
        """What ``FakeDevices.free_memory`` says, else 80 GiB."""
        return self._world.free_memory.get(device, 80 << 30)


class FakeDevices(TorchDispatchMode):
    """A world of accelerators with delayed copies, as a context manager.

    Args:
        without_events: Device types whose backend cannot record events.

    Attributes:
        copies: Every copy seen, in order.
        waits: The device of every wait, in order.
        n_pins: Host tensors pinned.

    >>> with FakeDevices() as world:
    ...     x = torch.ones(2).to("cuda:0", non_blocking=True)
    ...     early = x.to("cpu", non_blocking=True)
    ...     wrong = bool((early == 1).all())
    ...     world.run_all()
    >>> wrong, early
    (False, tensor([1., 1.]))
    """

    def __init__(self, *, without_events: tuple[str, ...] = ("mps",)) -> None:
        super().__init__()
        self.copies: list[FakeCopy] = []
        self.waits: list[torch.device] = []
        self.pinned: set[int] = set()
        self.n_pins = 0
        self.free_memory: dict[torch.device, int] = {}
        self._queues: dict[torch.device, _Queue] = {}
        self._without_events = without_events
        self._stack = ExitStack()

    def __enter__(self) -> FakeDevices:
        kinds = ("cuda", "xpu", "mps")
        ops = [FakeOps(kind, self, events=kind not in self._without_events) for kind in kinds]
        for module in (torch.cuda, torch.xpu):
            self._stack.enter_context(mock.patch.object(module, "_lazy_init", lambda: None))
        self._stack.enter_context(using_device_ops(*ops))
        PLAIN_TENSORS.add(FakeDeviceTensor)
        super().__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        PLAIN_TENSORS.discard(FakeDeviceTensor)
        self._stack.close()

    def queue(self, device: torch.device) -> _Queue:
        """The queue of a device."""
        return self._queues.setdefault(device, _Queue())

    def run_all(self) -> None:
        """Let every queued copy happen, without counting a wait."""
        for queue in list(self._queues.values()):
            queue.run_until(queue.pushed)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether a host tensor is in fake pinned memory."""
        return tensor.device == _CPU and tensor.untyped_storage().data_ptr() in self.pinned

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is _aten._to_copy.default:
            return self._to_copy(args[0], **kwargs)
        if func is _aten.copy_.default:
            non_blocking = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
            return self._copy_into(args[0], args[1], non_blocking)
        if func is _aten._foreach_copy_.default:
            non_blocking = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
            for dst, src in zip(args[0], args[1]):
                self._copy_into(dst, src, non_blocking)
            return None
        return self._run_on_inner(func, args, kwargs)

    def _to_copy(
        self,
        src: torch.Tensor,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        non_blocking: bool = False,
        memory_format: torch.memory_format | None = None,
        **_: Any,
    ) -> torch.Tensor:
        device = src.device if device is None else device
        if device.type == "meta":
            self.copies.append(FakeCopy(src.device, device, non_blocking, 0))
            return torch.empty_like(_inner(src), dtype=dtype, device="meta")
        if src.device == device:
            extra = {} if memory_format is None else {"memory_format": memory_format}
            return self._run_on_inner(
                _aten._to_copy.default, (src,), {"dtype": dtype, **extra}, device=device
            )
        out = torch.empty_like(_inner(src), dtype=dtype)
        dst = out if device == _CPU else FakeDeviceTensor(out, device)
        self._transfer(dst, src, non_blocking)
        return dst

    def _copy_into(self, dst: torch.Tensor, src: torch.Tensor, non_blocking: bool) -> torch.Tensor:
        if src.device == dst.device:
            self._drain(dst, src)
            _inner(dst).copy_(_inner(src))
        else:
            self._transfer(dst, src, non_blocking)
        return dst

    def _transfer(self, dst: torch.Tensor, src: torch.Tensor, non_blocking: bool) -> None:
        into, source = _inner(dst), _inner(src)
        self.copies.append(FakeCopy(src.device, dst.device, non_blocking, into.nbytes))
        if not non_blocking:
            self._drain(dst, src)
            into.copy_(source)
            return
        if dst.device == _CPU:
            into.view(torch.uint8).fill_(
                0x5A
            ) if into.is_contiguous() and into.dim() else into.fill_(7)
        if src.device == _CPU and not self.is_pinned(src):
            source = source.clone()
        # The copy runs on the queue of the source accelerator, as in torch; a destination
        # accelerator waits for it there.
        if src.device == _CPU:
            self.queue(dst.device).push(lambda: _copy(into, source))
            return
        queue = self.queue(src.device)
        queue.push(lambda: _copy(into, source))
        if dst.device != _CPU:
            position = queue.pushed
            self.queue(dst.device).push(lambda: queue.run_until(position))

    def _drain(self, *tensors: torch.Tensor) -> None:
        for tensor in tensors:
            if tensor.device != _CPU:
                queue = self.queue(tensor.device)
                queue.run_until(queue.pushed)

    def _run_on_inner(
        self, func: Any, args: Any, kwargs: dict[str, Any], device: torch.device | None = None
    ) -> Any:
        flat, tree = _pytree.tree_flatten((args, kwargs))
        fakes = [x for x in flat if type(x) is FakeDeviceTensor]
        if fakes:
            device = fakes[0].device
            if not _is_view(func):
                self._drain(*fakes)
        elif device is None:
            asked = kwargs.get("device")
            device = asked if asked is not None and asked.type not in ("cpu", "meta") else None
        if device is None or device == _CPU:
            return func(*args, **kwargs)
        flat = [x.host if type(x) is FakeDeviceTensor else x for x in flat]
        args, kwargs = _pytree.tree_unflatten(flat, tree)
        if "device" in kwargs:
            kwargs["device"] = _CPU
        out = func(*args, **kwargs)
        back = {id(fake.host): fake for fake in fakes}

        def wrap(x: torch.Tensor) -> torch.Tensor:
            # An in-place operation returns its own argument.
            return back[id(x)] if id(x) in back else FakeDeviceTensor(x, device)

        return _pytree.tree_map_only(torch.Tensor, wrap, out)


def _is_view(func: Any) -> bool:
    """Whether an operation only looks at memory in another way, which needs no values."""
    schema = func._schema
    return not schema.is_mutable and any(r.alias_info is not None for r in schema.returns)


def _inner(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.host if type(tensor) is FakeDeviceTensor else tensor


def _copy(dst: torch.Tensor, src: torch.Tensor) -> None:
    # Queued work may run inside or outside of the mode: plain host tensors either way.
    with torch.no_grad():
        dst.copy_(src)
