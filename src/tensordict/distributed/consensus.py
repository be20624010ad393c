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
from .pending import Pending
from .transport import Transport, Work, bytes_tensor

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

        A wait that times out would close gloo's connections to all ranks, so none has a timeout:
        threads wait, and whoever needs an answer gives up the thread.
        """
        buffer = torch.empty(size, dtype=torch.uint8)
        self.transport.irecv(buffer, rank, self.tag, control=True).wait()
        return _bytes(buffer)


class Vote:
    """One agreement: listening from the start, so that the end of a member is heard at once.

    Args:
        consensus: Who agrees.
        wake: Set whenever something was heard.
    """

    def __init__(self, consensus: Consensus, wake: threading.Event | None = None) -> None:
        self._consensus = consensus
        root, *others = consensus.members
        self._collects = consensus.transport.rank == root
        if self._collects:
            self._heard = [Pending(partial(self._hear, rank), "a record") for rank in others]
        else:
            self._heard = [Pending(self._listen, "the verdict")]
        if wake is not None:
            for pending in self._heard:
                pending.add_done_callback(lambda _: wake.set())

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
        names = consensus.names
        rows = [[path, f"{names[0]}: {text}"] for path, text in report.rows]
        kinds = {_KINDS.index(report.kind)} if report.rows else set()
        digests = {report.digest: [names[0]]}
        lost: set[int] = set()
        others = list(zip(consensus.members[1:], names[1:], self._heard))
        # Once it is lost, the others get a moment to say what they saw.
        known_lost = bool(kinds) or self.is_lost()
        end = time.monotonic() + (
            min(consensus.timeout, _GRACE) if known_lost else consensus.timeout
        )
        for rank, name, pending in others:
            try:
                digest, kind, said = pending.wait(max(0.0, end - time.monotonic()))
            except TransferError as error:
                gone = pending.done()
                if gone:
                    lost.add(rank)
                if gone or not known_lost:
                    error = _named(error, name)
                    kinds.add(_kind_of(error))
                    rows.append(["agreement", str(error)])
                if not known_lost:
                    known_lost, end = True, min(end, time.monotonic() + _GRACE)
                continue
            digests.setdefault(digest, []).append(name)
            if said:
                kinds.add(kind)
                rows += [[path, f"{name}: {text}"] for path, text in said]
        if len(digests) > 1:
            kinds.add(_KINDS.index(PlanMismatch))
            rows += [["plan", f"{d.hex()} on {', '.join(who)}"] for d, who in digests.items()]
        verdict = [min(kinds), headline, rows] if kinds else None
        self._tell(verdict, [rank for rank, _, _ in others if rank not in lost])
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


def _finish_later(sends: list[Work]) -> None:
    """Let a thread keep messages until they are through."""

    def wait() -> None:
        for send in sends:
            with contextlib.suppress(TransferError):
                send.wait()

    threading.Thread(target=wait, name="late messages", daemon=True).start()


def _bytes(buffer: Tensor) -> bytes:
    return buffer.numpy().tobytes()


def _kind_of(error: BaseException) -> int:
    found = (i for i, kind in enumerate(_KINDS) if isinstance(error, kind))
    return next(found, len(_KINDS) - 1)


def _named(error: TransferError, name: str) -> TransferError:
    return _KINDS[_kind_of(error)](f"{name} at agreement: {error}")
