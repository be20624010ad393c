"""What several storage tests count with."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class CountCopies(TorchDispatchMode):
    """Names, in ``calls``, of the copy operations that torch dispatches inside the block."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(word in func.name() for word in ("copy", "clone")):
            self.calls.append(func.name())
        return func(*args, **(kwargs or {}))
