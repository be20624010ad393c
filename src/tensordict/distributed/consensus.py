"""Ranks that say yes or no together: all go on, or all raise the same error.

The lowest rank collects what the others have to say and tells everyone the verdict, in messages
of their own tag, so that collectives of the user on the same group are not in the way.
"""

from __future__ import annotations

import contextlib
import json
import struct
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
    """One agreement among some ranks of a transport.

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

    def agree(self, report: Report, headline: str) -> None:
        """Return when all members are fine.

        Raises:
            TransferError: some member is not; the same error on all of them, of the kind that
                member has, with a line for each trouble.
        """
        if self.transport.rank == self.members[0]:
            verdict = self._collect(report, headline)
        else:
            verdict = self._ask(report)
        if verdict is not None:
            kind, text, rows = verdict
            raise _KINDS[kind](table_of(text, [tuple(row) for row in rows]))

    def _ask(self, report: Report) -> Any:
        root, name = self.members[0], self.names[0]
        text = json.dumps(report.rows).encode() if report.rows else b""
        kind = 1 + _KINDS.index(report.kind) if text else 0  # the root reads kind - 1
        record = bytearray(_RECORD.pack(report.digest, kind, len(text)))
        try:
            sends = [self._send(record, root)]
            if text:
                sends.append(self._send(bytearray(text), root))
            patience = 2 * self.timeout + 5
            size = int.from_bytes(self._receive(8, root, patience), "little")
            for send in sends:
                send.wait(patience)
            return json.loads(self._receive(size, root, patience)) if size else None
        except TransferError as error:
            raise _named(error, name) from None

    def _collect(self, report: Report, headline: str) -> Any:
        rows = [[path, f"{self.names[0]}: {text}"] for path, text in report.rows]
        kinds = {_KINDS.index(report.kind)} if report.rows else set()
        digests = {report.digest: [self.names[0]]}
        lost: set[int] = set()
        others = list(zip(self.members[1:], self.names[1:]))
        end = time.monotonic() + self.timeout
        # Each in a thread: a wait that times out would close gloo's connections to all ranks.
        waiting = [Pending(partial(self._hear, rank), f"record of {name}") for rank, name in others]
        for (rank, name), pending in zip(others, waiting):
            try:
                digest, kind, said = pending.wait(max(0.0, end - time.monotonic()))
            except TransferError as error:
                lost.add(rank)
                error = _named(error, name)
                kinds.add(_kind_of(error))
                rows.append(["agreement", str(error)])
                continue
            digests.setdefault(digest, []).append(name)
            if said:
                kinds.add(kind)
                rows += [[path, f"{name}: {text}"] for path, text in said]
        if len(digests) > 1:
            kinds.add(_KINDS.index(PlanMismatch))
            rows += [
                ["plan", f"{digest.hex()} on {', '.join(who)}"] for digest, who in digests.items()
            ]
        verdict = [min(kinds), headline, rows] if kinds else None
        self._tell(verdict, [rank for rank, _ in others if rank not in lost])
        return verdict

    def _hear(self, rank: int) -> tuple[bytes, int, Any]:
        """Digest, kind of error and rows of a member."""
        digest, kind, size = _RECORD.unpack(self._receive(_RECORD.size, rank, None))
        return digest, kind - 1, json.loads(self._receive(size, rank, None)) if size else None

    def _tell(self, verdict: Any, members: list[int]) -> None:
        text = b"" if verdict is None else json.dumps(verdict).encode()
        sends = []
        for rank in members:
            # A member that is gone by now finds out by itself.
            with contextlib.suppress(TransferError):
                sends.append(self._send(bytearray(len(text).to_bytes(8, "little")), rank))
                if text:
                    sends.append(self._send(bytearray(text), rank))
        for send in sends:
            with contextlib.suppress(TransferError):
                send.wait(self.timeout)

    def _send(self, data: bytearray, rank: int) -> Work:
        return self.transport.isend(bytes_tensor(data), rank, self.tag, control=True)

    def _receive(self, size: int, rank: int, timeout: float | None) -> bytes:
        buffer = torch.empty(size, dtype=torch.uint8)
        self.transport.irecv(buffer, rank, self.tag, control=True).wait(timeout)
        return _bytes(buffer)


def _bytes(buffer: Tensor) -> bytes:
    return buffer.numpy().tobytes()


def _kind_of(error: BaseException) -> int:
    found = (i for i, kind in enumerate(_KINDS) if isinstance(error, kind))
    return next(found, len(_KINDS) - 1)


def _named(error: TransferError, name: str) -> TransferError:
    return _KINDS[_kind_of(error)](f"{name} at agreement: {error}")
