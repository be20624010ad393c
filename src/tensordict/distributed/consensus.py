"""Ranks that say yes or no together: all go on, or all raise the same error.

The lowest rank collects what the others have to say and tells everyone the verdict, in messages
of their own tag, so that collectives of the user on the same group are not in the way.
"""

from __future__ import annotations

import contextlib
import json
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..errors import (
    LayoutError,
    PeerLost,
    PlanMismatch,
    TransferError,
    TransferTimeout,
    table_of,
)
from .at_exit import in_background
from .pending import Pending
from .torch_work import FOREVER
from .transport import bytes_tensor
from .transport_protocol import Transport, Work

# The errors that can be agreed on; the first of them that some rank has is what all raise.
_KINDS: tuple[type[TransferError], ...] = (
    PlanMismatch,
    LayoutError,
    PeerLost,
    TransferTimeout,
    TransferError,
)
_GRACE = 2.0
_RECORD = struct.Struct("<16sqq")  # digest, kind (0 for fine), bytes of text


@dataclass(slots=True)
class Report:
    """What one rank has to say.

    Attributes:
        digest: 16 bytes that must be the same everywhere.
        rows: What is wrong here, and where.
        kind: Which kind of error it is.
    """

    digest: bytes
    rows: list[tuple[str, str]] = field(default_factory=list)
    kind: type[TransferError] = TransferError

    def note(self, error: BaseException, where: str) -> None:
        """Add an error; the first one gives the kind."""
        if not self.rows:
            self.kind = _KINDS[_kind_of(error)]
        self.rows.append((where, f"{type(error).__name__}: {error}"))


@dataclass(frozen=True, slots=True)
class Consensus:
    """Who agrees, and how they reach each other.

    Attributes:
        transport: What carries it.
        members: The ranks, as the transport counts them; the first one collects.
        names: What errors call each member.
        tag: A tag that nothing else uses at the time.
        timeout: Seconds that the collecting rank waits for the others, all together.  They wait
            longer for the verdict, so that silence of one does not look like that of the first.
    """

    transport: Transport
    members: Sequence[int]
    names: Sequence[str]
    tag: int
    timeout: float

    def send(self, data: bytes, rank: int) -> Work:
        """Start to send bytes to a member."""
        return self.transport.isend(bytes_tensor(bytearray(data)), rank, self.tag, control=True)

    def receive(self, size: int, rank: int) -> bytes:
        """Receive bytes from a member, however long that takes.

        A wait that times out would close gloo's connections to all ranks, so none does: threads
        wait, and whoever needs an answer gives up the thread.
        """
        buffer = torch.empty(size, dtype=torch.uint8)
        self.transport.irecv(buffer, rank, self.tag, control=True).wait(FOREVER)
        return _bytes(buffer)


class Vote:
    """One agreement: listening from the start, so that the end of a member is heard at once.

    Args:
        consensus: Who agrees.

    Attributes:
        wake: Set whenever something was heard.
    """

    def __init__(self, consensus: Consensus) -> None:
        self.wake = threading.Event()
        self._consensus = consensus
        root, *others = consensus.members
        self._collects = consensus.transport.rank == root
        if self._collects:
            self._heard = [Pending(partial(self._hear, rank), "a record") for rank in others]
        else:
            self._heard = [Pending(self._listen, "the verdict")]
        for pending in self._heard:
            pending.add_done_callback(lambda _: self.wake.set())

    def is_lost(self) -> bool:
        """Whether it is known already that not all will agree."""
        for pending in self._heard:
            if pending.done():
                if pending.exception() is not None:
                    return True
                said = pending.wait()
                if (said[1] >= 0) if self._collects else (said is not None):
                    return True
        return False

    def cast(self, report: Report, headline: str) -> None:
        """Say what this rank has to say; return when all members are fine.

        Raises:
            TransferError: some member is not; the same error on all of them, of the kind that
                member has, with a line for each trouble.
        """
        verdict = self._collect(report, headline) if self._collects else self._ask(report)
        if verdict is not None:
            kind, text, rows = verdict
            raise _KINDS[kind](table_of(text, [tuple(row) for row in rows]))

    # --- members ------------------------------------------------------------------------

    def _listen(self) -> Any:
        root = self._consensus.members[0]
        size = int.from_bytes(self._consensus.receive(8, root), "little")
        return json.loads(self._consensus.receive(size, root)) if size else None

    def _ask(self, report: Report) -> Any:
        consensus = self._consensus
        root, name = consensus.members[0], consensus.names[0]
        text = json.dumps(report.rows).encode() if report.rows else b""
        kind = 1 + _KINDS.index(report.kind) if text else 0  # the root reads kind - 1
        sends: list[Work] = []
        try:
            # Said even when the verdict is there: the root listens for it.
            sends.append(consensus.send(_RECORD.pack(report.digest, kind, len(text)), root))
            if text:
                sends.append(consensus.send(text, root))
            verdict = self._heard[0].wait(2 * consensus.timeout + 5)
        except TransferError as error:
            _finish_later(sends)
            raise _named(error, name) from None
        if verdict is not None:  # else the root has had them
            _finish_later(sends)
        return verdict

    # --- the one that collects ----------------------------------------------------------

    def _hear(self, rank: int) -> tuple[bytes, int, Any]:
        """Digest, kind of error (-1 for none) and rows of a member."""
        receive = self._consensus.receive
        digest, kind, size = _RECORD.unpack(receive(_RECORD.size, rank))
        return digest, kind - 1, json.loads(receive(size, rank)) if size else None

    def _collect(self, report: Report, headline: str) -> Any:
        consensus = self._consensus
        root, *others = consensus.members
        found = _Findings(dict(zip(consensus.members, consensus.names)))
        found.add(root, report.digest, _KINDS.index(report.kind), report.rows)
        waiting = dict(zip(others, self._heard))
        late: list[int] = []
        end = time.monotonic() + consensus.timeout
        hurried = False
        while True:
            self.wake.clear()
            for rank in [rank for rank, pending in waiting.items() if pending.done()]:
                found.take(rank, waiting.pop(rank))
            now = time.monotonic()
            if not hurried and (found.kinds or now >= end):
                # It is lost.  The others get a moment to say what they saw.
                late = [] if found.kinds else list(waiting)
                hurried, end = True, now + (0.0 if len(late) == 1 else _GRACE)
            if not waiting or now >= end:
                break
            self.wake.wait(end - now)
        for rank in late:
            if rank in waiting:
                found.silent(rank, consensus.timeout)
        verdict = found.verdict(headline)
        self._tell(verdict, [rank for rank in others if rank not in found.lost])
        return verdict

    def _tell(self, verdict: Any, members: list[int]) -> None:
        text = b"" if verdict is None else json.dumps(verdict).encode()
        sends: list[Work] = []
        for rank in members:
            # A member that is gone by now finds out by itself.
            with contextlib.suppress(TransferError):
                sends.append(self._consensus.send(len(text).to_bytes(8, "little"), rank))
                if text:
                    sends.append(self._consensus.send(text, rank))
        if verdict is not None:  # some may never come for it
            _finish_later(sends)
            return
        for send in sends:
            with contextlib.suppress(TransferError):
                send.wait()


@dataclass(slots=True)
class _Findings:
    """What the collecting rank knows about the others.

    Attributes:
        names: What errors call each member.
        digests: Who has which plan.
        kinds: The kinds of errors that some member has.
        rows: What is wrong, and where.
        lost: Members that are gone.
    """

    names: dict[int, str]
    digests: dict[bytes, list[str]] = field(default_factory=dict)
    kinds: set[int] = field(default_factory=set)
    rows: list[list[str]] = field(default_factory=list)
    lost: set[int] = field(default_factory=set)

    def add(self, rank: int, digest: bytes, kind: int, rows: Any) -> None:
        """Note what a member says."""
        name = self.names[rank]
        self.digests.setdefault(digest, []).append(name)
        if rows:
            self.kinds.add(kind)
            self.rows += [[path, f"{name}: {text}"] for path, text in rows]

    def take(self, rank: int, pending: Pending[Any]) -> None:
        """Note what was heard of a member, or that it is gone."""
        error = pending.exception()
        if error is None:
            self.add(rank, *pending.wait())
            return
        self.lost.add(rank)
        self._fail(_named(error, self.names[rank]))

    def silent(self, rank: int, timeout: float) -> None:
        """Note that a member said nothing."""
        self._fail(_named(TransferTimeout(f"nothing for {timeout} s"), self.names[rank]))

    def _fail(self, error: TransferError) -> None:
        self.kinds.add(_kind_of(error))
        self.rows.append(["agreement", str(error)])

    def verdict(self, headline: str) -> list[Any] | None:
        """What all members raise; ``None`` if nothing is wrong."""
        if len(self.digests) > 1:
            self.kinds.add(_KINDS.index(PlanMismatch))
            for digest, names in self.digests.items():
                self.rows.append(["plan", f"{digest.hex()} on {', '.join(names)}"])
        return [min(self.kinds), headline, self.rows] if self.kinds else None


def _finish_later(sends: list[Work]) -> None:
    """Let a thread keep messages until they are through."""

    def wait() -> None:
        for send in sends:
            with contextlib.suppress(TransferError):
                send.wait()

    in_background(wait, "late messages")


def _bytes(buffer: Tensor) -> bytes:
    return buffer.numpy().tobytes()


def _kind_of(error: BaseException) -> int:
    found = (i for i, kind in enumerate(_KINDS) if isinstance(error, kind))
    return next(found, len(_KINDS) - 1)


def _named(error: BaseException, name: str) -> TransferError:
    return _KINDS[_kind_of(error)](f"{name} at agreement: {error}")
