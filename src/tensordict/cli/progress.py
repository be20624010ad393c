"""A progress bar in bytes, and a transport that feeds one."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

import torch.distributed as dist
from torch import Tensor

from ..distributed.torch_work import TorchWork
from ..distributed.transport import TorchTransport
from ..placement.names import size_text

_WIDTH = 32
_EVERY = 0.05  # seconds between two drawings


class ProgressBar:
    """A line ``label [####    ] 12.0 MiB of 66.1 MiB`` that is redrawn in place.

    Args:
        label: what is going on.
        total: bytes in all.
        out: where to draw; stderr by default.  Where that is no terminal, only the last state
            is written.

    >>> import io
    >>> out = io.StringIO()
    >>> with ProgressBar("copy", 4, out) as bar:
    ...     bar.add(4)
    >>> out.getvalue()
    'copy [################################] 4 B of 4 B\\n'
    """

    def __init__(self, label: str, total: int, out: TextIO | None = None) -> None:
        self._label = label
        self._total = total
        self._out = sys.stderr if out is None else out
        self._done = 0
        self._drawn = 0.0
        self._live = self._out.isatty()

    def add(self, nbytes: int) -> None:
        """Some more bytes are done."""
        self._done += nbytes
        now = time.monotonic()
        if self._live and now - self._drawn > _EVERY:
            self._drawn = now
            self._out.write(f"\r{self._text()}")
            self._out.flush()

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        """Draw the last state and end the line; what failed is told by whoever catches it."""
        if self._live:
            self._out.write(f"\r{self._text()}\n")
        elif kind is None:
            self._out.write(f"{self._text()}\n")
        self._out.flush()

    def _text(self) -> str:
        full = _WIDTH if not self._total else min(_WIDTH, _WIDTH * self._done // self._total)
        bar = "#" * full + " " * (_WIDTH - full)
        done = min(self._done, self._total)  # messages carry some padding
        return f"{self._label} [{bar}] {size_text(done)} of {size_text(self._total)}"


class ReportingTransport(TorchTransport):
    """The default group, telling a function the bytes of each payload message that came in."""

    def __init__(self, report: Callable[[int], None]) -> None:
        super().__init__(dist.group.WORLD)
        self._report = report

    def irecv(self, tensor: Tensor, src: int, tag: int, *, control: bool = False) -> TorchWork:
        """As of `TorchTransport`; the report comes when the message was waited for."""
        work = super().irecv(tensor, src, tag, control=control)
        return work if control else _ReportingWork(work, tensor.nbytes, self._report)


class _ReportingWork(TorchWork):
    __slots__ = ("_inner", "_nbytes", "_report")

    def __init__(self, inner: Any, nbytes: int, report: Callable[[int], None]) -> None:
        self._inner = inner
        self._nbytes = nbytes
        self._report = report

    def wait(self, timeout: float | None = None) -> None:
        self._inner.wait(timeout)
        self._report(self._nbytes)
