"""How all ranks of a group make sure that they mean the same, before the first byte.

Every rank shows a header: the digest of its structure, or that it has failed.  When all
digests are equal that was all.  When they are not, or a rank has failed, every rank shows
its schema or its error, and all raise the same.
"""

from __future__ import annotations

import time
import zlib
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..core.node import Node
from ..errors import PeerLost, SchemaMismatch, TransferError, TransferTimeout
from . import wire
from .describe import Described, alike
from .endpoint import Endpoint, Known, Taken, endpoint_of
from .packing import PACK_BELOW
from .receive import reordered
from .refusal import decode_error, encode_error
from .schema import Schema, decode, differences, tie_differences, unlocked
from .transport import TorchTransport, bytes_tensor, check_timeout
from .transport_protocol import Transport, Work
from .wire import Header, Kind, Limits


@dataclass(slots=True)
class Round:
    """One collective of one rank.

    Attributes:
        verb: how errors call it.
        transport, endpoint: how messages travel, what this rank remembers.
        options: what has to be the same on every rank beside the structure.
        timeout: seconds for the whole; None is the transport's own.
        limits: what this rank accepts.
        bytes_done: bytes of payload messages that are through.
    """

    verb: str
    transport: Transport
    endpoint: Endpoint
    timeout: float | None = None
    limits: Limits = wire.DEFAULT_LIMITS
    deadline: float | None = None
    bytes_done: int = 0
    options: str = ""

    def __post_init__(self) -> None:
        check_timeout(self.timeout)
        if self.timeout is not None:
            self.deadline = time.monotonic() + self.timeout

    def wait(self, work: Work, stage: str) -> None:
        """Wait for one message of the collective."""
        left = None
        if self.deadline is not None:
            left = max(self.deadline - time.monotonic(), 1e-3)
        done = self.bytes_done
        try:
            work.wait(left)
        except (PeerLost, TransferTimeout) as error:
            where = f"{self.verb} ({stage}, {done} bytes of payload done): {error}"
            kind = type(error)
            did = "lost a rank in" if kind is PeerLost else "gave up"
            text = f"{self.me} {did} {where}"
            raise kind(text, peer=error.peer, stage=stage, bytes_done=done) from None
        if stage == "payload":
            self.bytes_done += getattr(work, "nbytes", 0)

    @property
    def me(self) -> str:
        """How errors call this rank."""
        return self.transport.name_of(self.transport.rank)

    @property
    def code(self) -> int:
        """Stands for the call: its name and its options."""
        return zlib.crc32(f"{self.verb} {self.options}".encode())

    def start(self, begin: Any, stage: str) -> Work:
        """Begin a collective; a peer that is gone may show at once."""
        try:
            return begin()
        except (PeerLost, TransferTimeout) as error:
            raise type(error)(
                f"{self.me} lost a rank in {self.verb}: {error}", stage=stage
            ) from None

    def all_gather(self, mine: Tensor, stage: str = "agree") -> list[Tensor]:
        """The bytes of all ranks; equal sizes."""
        out = [torch.empty_like(mine) for _ in range(self.transport.size)]
        begin = lambda: self.transport.all_gather(out, mine, control=True)  # noqa: E731
        self.wait(self.start(begin, stage), stage)
        return out


def round_of(verb: str, group: Any, transport: Transport | None, timeout: float | None) -> Round:
    """What the arguments of a collective stand for."""
    if transport is None:
        transport = TorchTransport.of(group)
    return Round(verb, transport, endpoint_of(transport), timeout)


def described_in(
    round_: Round, td: Node, pack_below: int = PACK_BELOW
) -> tuple[Described | None, Known | None, Exception | None]:
    """Take a tensordict apart; a failure is told to the other ranks by `agree`."""
    try:
        described, entry = round_.endpoint.describe(td, pack_below=pack_below)
    except Exception as error:
        return None, None, error
    return described, entry, None


def taken_in(round_: Round, td: Node) -> tuple[Taken | None, Exception | None]:
    """`described_in`, for a tensordict that is going to be packed."""
    try:
        return round_.endpoint.take(td, pack_below=PACK_BELOW), None
    except Exception as error:
        return None, error


def confirm(
    round_: Round,
    entry: Known | None,
    error: Exception | None,
    payload_nbytes: int = 0,
    *,
    one_buffer: bool = False,
) -> tuple[list[int], list[Schema], bool]:
    """Let every rank know whether all of them go on.

    Args:
        round_: the collective.
        entry: the structure of this rank, None when it has failed.
        error: why it has.
        payload_nbytes: of this rank, with values.
        one_buffer: whether the tensordict of this rank is one buffer.

    Returns:
        The payload bytes of every rank; the schemas of all ranks where they are not equal in
        every byte, but differ in nothing that counts (the order of keys, say); whether all
        have equal schemas and one buffer.

    Raises:
        SchemaMismatch: structures differ; the same on every rank.
        Exception: ``error`` on this rank, its like on the others.
    """
    if entry is None:
        assert error is not None
        body = encode_error(error, round_.limits.max_schema_nbytes)
        header = Header(Kind.ERROR, schema_nbytes=len(body))
    else:
        body = entry.data
        header = Header(
            Kind.DATA,
            schema_nbytes=len(body),
            digest=entry.digest,
            payload_nbytes=payload_nbytes,
            one_buffer=one_buffer,
        )
    mine = replace(header, sequence=round_.code).pack()
    shown = [x.numpy().tobytes() for x in round_.all_gather(bytes_tensor(bytearray(mine)))]
    if entry is not None and all(x == mine for x in shown):  # one more look at each would be idle
        return [payload_nbytes] * len(shown), [], one_buffer
    headers = [wire.parse_header(x) for x in shown]
    _same_call(round_, headers)
    totals = [h.payload_nbytes for h in headers]
    if all(h.kind is Kind.DATA and h.digest == headers[0].digest for h in headers):
        return totals, [], all(h.one_buffer for h in headers)
    return totals, _reconcile(round_, headers, body, error), False


@dataclass(frozen=True, slots=True)
class Agreement:
    """What all ranks of a collective agree on.

    Attributes:
        described: this rank's tensordict, in the order of the common schema, but for its values.
        entry: that schema.
        entries: the schema of every rank, in whose order and form its values are.
        totals: the payload bytes of every rank.
        one_buffer: whether every rank's tensordict is one buffer of that schema.
    """

    described: Described
    entry: Known
    entries: list[Known]
    totals: list[int]
    one_buffer: bool


def _same_call(round_: Round, headers: list[Header]) -> None:
    """Every rank sees the same headers, and so all of them raise, or none."""
    if any(h.sequence != headers[0].sequence for h in headers):
        others = [rank for rank, h in enumerate(headers) if h.sequence != round_.code]
        names = ", ".join(round_.transport.name_of(rank) for rank in others)
        raise TransferError(
            f"{round_.me} cannot go on with {round_.verb}({round_.options}): {names} called another "
            "collective, or this one with other options. Let every rank make the same calls in the "
            "same order."
        )
    for h in headers:
        wire.check_limits(h, round_.limits)


def agree(
    round_: Round,
    described: Described | None,
    entry: Known | None,
    error: Exception | None,
    payload_nbytes: int = 0,
    *,
    one_buffer: bool = False,
) -> Agreement:
    """`confirm`, and bring this rank's tensordict into the order that all ranks use."""
    totals, schemas, whole = confirm(round_, entry, error, payload_nbytes, one_buffer=one_buffer)
    assert described is not None and entry is not None
    entries = [entry] * len(totals)
    if schemas:
        entries = [round_.endpoint.catalogue.of(schema) for schema in schemas]
        common = entries[0]
        if common is not entry:
            if alike(common.schema, entry.schema):
                described = replace(described, schema=common.schema)
            else:
                described = reordered(common.schema, entry.schema, described)
            entry = common
    return Agreement(described, entry, entries, totals, whole)


def _reconcile(
    round_: Round, headers: list[Header], body: bytes, error: Exception | None
) -> list[Schema]:
    """Show what every rank has; raise the error that all of them raise, if one is due."""
    room = max(h.schema_nbytes for h in headers)
    texts = round_.all_gather(bytes_tensor(bytearray(body.ljust(room, b"\0"))))
    bodies = [t.numpy().tobytes()[: h.schema_nbytes] for t, h in zip(texts, headers)]
    if error is not None:
        raise error
    for rank, (h, text) in enumerate(zip(headers, bodies)):
        if h.kind is Kind.ERROR:
            # An error that names a path or a structure is raised as it is on every rank.
            found = decode_error(text)
            if type(found) is TransferError:
                name = round_.transport.name_of(rank)
                raise TransferError(f"{name} failed in {round_.verb}: {found}")
            raise found
    return _compared(round_, headers, bodies)


def _schema_of(round_: Round, header: Header, text: bytes) -> Schema:
    known = round_.endpoint.catalogue.find(header.digest)
    return decode(text, round_.limits) if known is None else known.schema


def _compared(round_: Round, headers: list[Header], bodies: list[bytes]) -> list[Schema]:
    names = [round_.transport.name_of(rank) for rank in range(len(headers))]
    schemas = [_schema_of(round_, h, text) for h, text in zip(headers, bodies)]
    rows: list[tuple[Any, str]] = []
    seen = {headers[0].digest}
    for rank, h in enumerate(headers):
        if h.digest not in seen:
            seen.add(h.digest)
            first, other = schemas[0], schemas[rank]
            if headers[0].one_buffer or h.one_buffer:
                first, other = unlocked(first), unlocked(other)
            if alike(first, other) and first.locked == other.locked:
                continue
            sides = f"on {names[0]}", f"on {names[rank]}"
            rows += differences(first, other, *sides)
            rows += tie_differences(first, other, *sides)
    if not rows:
        return schemas
    n = len(rows)
    what = "1 entry differs" if n == 1 else f"{n} entries differ"
    raise SchemaMismatch(f"{round_.verb} cannot run on {len(headers)} ranks: {what}:", rows)
