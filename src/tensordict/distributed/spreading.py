"""`broadcast` and `all_gather`: whole tensordicts on every rank of a group."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from ..core.devices import as_device
from ..core.leaf import Leaf
from ..core.node import Node
from ..errors import TransferError, WireError
from . import composite, wire
from .agreement import Round, agree, confirm, described_in, round_of
from .describe import Described, decode_values, encode_values
from .endpoint import Known, learn
from .packing import PACK_BELOW, Stage, sendable
from .receive import Landing, New, no_device, values_of
from .refusal import decode_error, encode_error
from .transport import bytes_tensor, group_rank
from .transport_protocol import Transport, Work
from .wire import Header, Kind

BROADCAST_FROM: Final = 1 << 20  # bytes from which all_gather broadcasts the part of each rank


def broadcast(
    td: Node | None,
    src: int | None = None,
    *,
    group: Any = None,
    group_src: int | None = None,
    device: Any = None,
    timeout: float | None = None,
    transport: Transport | None = None,
) -> Any:
    """Give every rank the tensordict of one.

    Args:
        td: the tensordict on the source; what other ranks pass does not matter.
        src: rank of the source in the world.
        group: a process group or a device mesh of one dimension; the default group if None.
        group_src: rank of the source in the group, instead of ``src``.
        device: where the leaves of received tensordicts go.
        timeout: seconds for the whole; the group's own by default.
        transport: what to send with instead of a process group.

    Returns:
        ``td`` on the source; on other ranks a new, unlocked tensordict.

    Raises:
        UnsupportedLeaf: an entry cannot travel; on every rank.
    """
    round_ = round_of("broadcast", group, transport, timeout)
    source = group_rank(round_.transport, group, src, group_src)
    if round_.transport.rank == source:
        _broadcast_from(round_, source, td)
        return td
    return _broadcast_to(round_, source, None if device is None else as_device(device))


def _broadcast_from(round_: Round, source: int, td: Node | None) -> None:
    error: Exception | None = None
    entry = described = None
    buffer: Tensor | None = None
    values = b""
    try:
        if not isinstance(td, Node):
            raise TypeError(f"Cannot broadcast a {type(td).__name__}. Expected a tensordict.")
        described, entry = round_.endpoint.describe(td, pack_below=PACK_BELOW)
        buffer = entry.buffer_under(td, described)
        form = entry if buffer is None else entry.whole()
        values = _values_of(described, entry)
        body = entry.data
        header = Header(
            Kind.DATA,
            schema_nbytes=len(body),
            payload_nbytes=form.packing.nbytes + len(values),
            digest=entry.digest,
            one_buffer=buffer is not None,
        )
    except Exception as caught:
        error = caught
        body = encode_error(caught, wire.EAGER_ROOM)
        header = Header(Kind.ERROR, schema_nbytes=len(body))
    fits = len(body) <= wire.EAGER_ROOM
    header = replace(header, inline_schema=fits)
    _spread(round_, source, bytes_tensor(wire.eager_frame(header, body if fits else b"")))
    if error is not None:
        raise error
    assert entry is not None and described is not None
    if not fits:
        _spread(round_, source, bytes_tensor(bytearray(body)))
    confirm(round_, entry, None)
    if buffer is not None:
        _spread_payload(round_, source, [buffer, _padded(values, len(values))])
        return
    with _staged(entry) as stage:
        message = _pack(stage, described, values)
        devices = round_.transport.capabilities.devices
        parts = [sendable(described.parts[i], devices) for i in entry.packing.large]
        _spread_payload(round_, source, [message, *parts])


def _broadcast_to(round_: Round, source: int, device: torch.device | None) -> Node:
    frame = torch.empty(wire.EAGER_NBYTES, dtype=torch.uint8)
    _spread(round_, source, frame)
    entry: Known | None = None
    error: Exception | None = None
    header = wire.parse_header(frame.numpy()[: wire.HEADER_NBYTES].tobytes())
    try:
        wire.check_seal(frame.numpy().tobytes())
        wire.check_limits(header, round_.limits)
        text = _broadcast_schema(round_, source, header, frame)
        if header.kind is Kind.ERROR:
            raise decode_error(text)
        entry = round_.endpoint.catalogue.find(header.digest)
        if entry is None:
            entry = round_.endpoint.catalogue.add(learn(text, header.digest, round_.limits))
        if header.one_buffer:
            entry = entry.whole()
        values_nbytes = _values_nbytes(round_, entry, header.payload_nbytes)
        trouble = no_device(device)
        if trouble is not None:
            raise trouble
        if any(c.kind == composite.DTENSOR for c in entry.schema.composites):
            raise TransferError(
                "Cannot broadcast shards of distributed tensors. Gather them first."
            )
    except TransferError as caught:
        if header.kind is Kind.ERROR:
            raise
        entry, error = None, caught
    confirm(round_, entry, error)
    assert entry is not None
    landing = New(device, locks=False).landing(entry, values_nbytes)
    messages = entry.packing.messages(landing.packed)
    _spread_payload(round_, source, [*messages, *landing.large])
    landing.prepare()
    return landing.commit(_read(entry, landing.packed[entry.packing.packed_nbytes :]))


def _broadcast_schema(round_: Round, source: int, header: Header, frame: Tensor) -> bytes:
    if header.inline_schema:
        end = wire.HEADER_NBYTES + header.schema_nbytes
        return frame.numpy()[wire.HEADER_NBYTES : end].tobytes()
    buffer = torch.empty(header.schema_nbytes, dtype=torch.uint8)
    _spread(round_, source, buffer)
    return buffer.numpy().tobytes()


def _spread(round_: Round, source: int, tensor: Tensor) -> None:
    begin = partial(round_.transport.broadcast, tensor, source, control=True)
    round_.wait(round_.start(begin, "agree"), "agree")


def _spread_payload(round_: Round, source: int, messages: Sequence[Tensor]) -> None:
    tensors = [_as_bytes(x) for x in messages if x.numel()]
    works = [
        round_.start(partial(round_.transport.broadcast, x, source), "payload") for x in tensors
    ]
    for work in works:
        round_.wait(work, "payload")


def _as_bytes(x: Tensor) -> Tensor:
    return x.reshape(-1).view(torch.uint8)


def _values_nbytes(round_: Round, entry: Known, payload_nbytes: int) -> int:
    """What a payload holds beside the leaves: no rank may make others allocate what it likes."""
    nbytes = payload_nbytes - entry.packing.nbytes
    if nbytes < 0 or (nbytes > 0) != bool(entry.schema.values):
        raise WireError("the payload does not fit the schema", 16)
    if nbytes > round_.limits.max_schema_nbytes:
        limit = round_.limits.max_schema_nbytes
        raise WireError(f"{nbytes} bytes of values are above the limit of {limit}", 16)
    return nbytes


def _values_of(described: Described, entry: Known) -> bytes:
    if not described.values:
        return b""
    forms = encode_values(described, entry.value_paths)
    return json.dumps(forms, separators=(",", ":")).encode()


def _read(entry: Known, values: Tensor) -> Sequence[Leaf]:
    if not entry.schema.values:
        return ()
    try:
        return decode_values(entry.schema, json.loads(values.numpy().tobytes().rstrip(b"\0")))
    except (ValueError, RecursionError) as error:
        raise WireError(f"the values are not JSON: {error}") from None


class _staged:
    """A stage of a schema for a ``with`` block."""

    def __init__(self, entry: Known) -> None:
        self._entry = entry
        self._stage = entry.stage()

    def __enter__(self) -> Stage:
        return self._stage

    def __exit__(self, kind: object, *exc: object) -> None:
        if kind is None:  # else a message may still be under way in it
            self._entry.give_back(self._stage)


def _padded(values: bytes, room: int) -> Tensor:
    return bytes_tensor(bytearray(values.ljust(room, b"\0")))


def _pack(stage: Stage, described: Described, values: bytes, room: int | None = None) -> Tensor:
    message = stage.message(len(values) if room is None else room)
    stage.pack(described.parts)
    start = stage.packing.packed_nbytes
    if message.numel() > start:
        message[start:].zero_()
        if values:
            message[start : start + len(values)].copy_(bytes_tensor(bytearray(values)))
    return message


# --- all_gather ---------------------------------------------------------------------------


def all_gather(
    td: Node,
    *,
    group: Any = None,
    timeout: float | None = None,
    transport: Transport | None = None,
) -> list[Any]:
    """The tensordicts of all ranks, which have one structure.

    Args:
        td: this rank's.
        group: a process group or a device mesh of one dimension; the default group if None.
        timeout: seconds for the whole; the group's own by default.
        transport: what to send with instead of a process group.

    Returns:
        One new, unlocked tensordict per rank, in rank order; their own values in each.

    Raises:
        SchemaMismatch: structures differ; on every rank.
    """
    round_ = round_of("all_gather", group, transport, timeout)
    described, entry, error = described_in(round_, td)
    values, buffer = b"", None
    if entry is not None:
        try:
            assert described is not None
            values = _values_of(described, entry)
            buffer = entry.buffer_under(td, described)
            if any(c.kind == composite.DTENSOR for c in entry.schema.composites):
                raise TransferError("Cannot all_gather shards of distributed tensors.")
        except TransferError as caught:
            entry, error = None, caught
    total = 0 if entry is None else entry.packing.nbytes + len(values)
    agreed = agree(round_, described, entry, error, total, one_buffer=buffer is not None)
    entry = agreed.entry
    room = max(map(partial(_values_nbytes, round_), agreed.entries, agreed.totals))
    if agreed.one_buffer and buffer is not None:
        entry = entry.whole()
        mine = [x for x in (buffer, _padded(values, room)) if x.numel()]
        landings = [New(locks=False).landing(entry, room) for _ in agreed.totals]
        _gather_all(round_, landings, mine)
    else:
        landings = [New(locks=False).landing(entry, room) for _ in agreed.totals]
        with _staged(entry) as stage:
            message = _pack(stage, agreed.described, values, room)
            devices = round_.transport.capabilities.devices
            parts = agreed.described.parts
            mine = [sendable(parts[i], devices) for i in entry.packing.large]
            _gather_all(round_, landings, [*mine, *entry.packing.messages(message)])
    result = []
    for landing, theirs in zip(landings, agreed.entries):
        landing.prepare()
        raw = landing.packed[entry.packing.packed_nbytes :]
        result.append(landing.commit(values_of(theirs.schema, entry.schema, _read(theirs, raw))))
    return result


def _gather_all(round_: Round, landings: Sequence[Landing], mine: Sequence[Tensor]) -> None:
    """Give every rank the messages of all."""
    outs = [landing.messages() for landing in landings]
    works = []
    for k, x in enumerate(mine):
        out = [_as_bytes(messages[k]) for messages in outs]
        works += _gather_one(round_, out, _as_bytes(x))
    for work in works:
        round_.wait(work, "payload")


def _gather_one(round_: Round, out: list[Tensor], x: Tensor) -> list[Work]:
    """Start to give every rank the bytes of all.

    Large ones are broadcast by each rank, from and into memory of ours.  ``all_gather`` of gloo
    goes through a buffer of its own, for one more copy; when a rank dies it frees the buffer
    before its thread has stopped to send from there, which aborts the process.
    """
    transport = round_.transport
    if x.numel() < BROADCAST_FROM:
        return [round_.start(partial(transport.all_gather, out, x), "payload")]
    out[transport.rank].copy_(x)
    return [
        round_.start(partial(transport.broadcast, part, rank), "payload")
        for rank, part in enumerate(out)
    ]
