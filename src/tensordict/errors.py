"""Every error this package raises on purpose.

Each type subclasses the builtin that users of dicts, tensors and
``torch.distributed`` already catch.  A message says what cannot be done, where,
what was expected, what was got, and what to do about it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

LOCKED_MESSAGE = (
    "Cannot modify locked TensorDict. For in-place modification, consider using the "
    "`set_()` method and make sure the key is present."
)


class TensorDictError(Exception):
    """Base of the errors raised by this package."""


class LockedError(TensorDictError, RuntimeError):
    """An entry would be added, removed or replaced in a locked tensordict."""

    def __init__(self, message: str = LOCKED_MESSAGE) -> None:
        super().__init__(message)


class StateError(TensorDictError, RuntimeError):
    """Something cannot be done to a tensordict in the state it is in."""


class BatchSizeError(TensorDictError, RuntimeError):
    """A shape does not start with the batch size it has to start with."""


class ShapeError(TensorDictError, RuntimeError):
    """Shapes do not fit each other (stack, cat, in-place writes, expand)."""


class DimError(TensorDictError, IndexError, RuntimeError):
    """A dimension or an index is out of range."""


class EntryTypeError(TensorDictError, TypeError, ValueError):
    """A value of a type that cannot be used here."""


class MissingKeyError(TensorDictError, KeyError):
    """A key is not there, or something that is not a key was used as one."""

    def __str__(self) -> str:
        # KeyError prints the repr of its argument; a sentence should read as one.
        return str(self.args[0]) if self.args else ""


class NotANodeError(MissingKeyError):
    """A nested key leads through an entry that holds no entries."""


class StructureError(MissingKeyError, RuntimeError):
    """Two trees do not have the same keys."""


class GradError(TensorDictError, RuntimeError):
    """Autograd cannot do this with these leaves."""


class CastError(TensorDictError, ValueError):
    """A cast cannot be done or is not allowed by the policy."""


class TransferError(TensorDictError, RuntimeError):
    """Moving data between devices, layouts or ranks failed."""


class LayoutError(TransferError, ValueError):
    """A sharding layout cannot be used, or would have to change without ``reshard``."""


_NO_ENCODING = "has no encoding without pickle"


class UnsupportedLeaf(TransferError, TypeError):
    """A leaf that has no safe encoding, or not the operation: names its path and its type."""

    def __init__(self, path: Any, what: str, advice: str = "", why: str = _NO_ENCODING) -> None:
        self.path = path
        self.what = what
        self.advice = advice
        self.why = why
        shown = path[0] if isinstance(path, tuple) and len(path) == 1 else path
        doing = "encode" if why == _NO_ENCODING else "use"
        super().__init__(f"Cannot {doing} the entry {shown!r}: {what} {why}. {advice}".rstrip())

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path, self.what, self.advice, self.why)


class SchemaMismatch(TransferError, ValueError):
    """Two ranks, or a plan and a tree, disagree on the structure: lists every difference."""

    def __init__(self, headline: str, differences: Sequence[tuple[Any, str]] = ()) -> None:
        self.headline = headline
        self.differences = list(differences)
        super().__init__(table_of(headline, self.differences))

    @property
    def paths(self) -> list[Any]:
        """The paths that differ, in order."""
        return [path for path, _ in self.differences]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.headline, self.differences)


class PlanMismatch(TransferError, ValueError):
    """Ranks hold different plans, or a plan is run on a tree it was not made for."""


class LossyCast(TransferError, ValueError):
    """A cast would lose values that the policy does not allow to lose.

    Attributes:
        report: What each leaf would lose, where it is known.
    """

    def __init__(self, message: str, report: Any = None) -> None:
        self.report = report
        super().__init__(message)


class _ExchangeError(TransferError):
    """An exchange that stopped on its way.

    Attributes:
        peer: the rank at the other end, in the group; None when no single one is known.
        stage: what was under way: ``"agree"``, ``"schema"``, ``"payload"`` or ``"commit"``;
            ``"connect"`` for `Channel.reset`.
        bytes_done: bytes of payload that were through.
    """

    def __init__(
        self, message: str, *, peer: int | None = None, stage: str = "", bytes_done: int = 0
    ) -> None:
        self.peer = peer
        self.stage = stage
        self.bytes_done = bytes_done
        super().__init__(message)


class TransferTimeout(_ExchangeError, TimeoutError):
    """A peer said nothing for longer than the timeout."""


class PeerLost(_ExchangeError, ConnectionError):
    """The other end is gone: its process, or the connection, which a timeout closes."""


class ChannelClosed(TransferError):
    """The other end has ended a channel: nothing more will come."""


class WireError(TransferError, ValueError):
    """Bytes that are not a frame of this protocol: says why and at which offset."""

    def __init__(self, reason: str, offset: int | None = None) -> None:
        self.reason = reason
        self.offset = offset
        where = "" if offset is None else f" at byte {offset}"
        super().__init__(f"Cannot read the frame{where}: {reason}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.reason, self.offset)


class ChecksumMismatch(WireError):
    """The payload does not have the checksum its header announces."""


class StagingExhausted(TransferError, MemoryError):
    """A staging buffer larger than its pool allows was asked for."""


class MemoryBudgetError(TransferError, MemoryError):
    """A plan needs more memory than there is, or than its budget: says how much is missing."""


class FileFormatError(TensorDictError, ValueError):
    """A file or folder is not what its name or header says."""


def table_of(headline: str, rows: Iterable[tuple[Any, str]], limit: int = 50) -> str:
    """A headline and one aligned line per path; says how many were left out past ``limit``."""
    lines = [(repr(path), text) for path, text in rows]
    if not lines:
        return headline
    width = min(60, max(len(path) for path, _ in lines[:limit]))
    body = [f"    {path:<{width}}  {text}" for path, text in lines[:limit]]
    if len(lines) > limit:
        body.append(f"    ... and {len(lines) - limit} more")
    return "\n".join([headline, *body])
