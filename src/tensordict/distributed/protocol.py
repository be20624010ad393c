"""Send a tensordict to one rank and receive one, with agreement before payload.

    sender                                receiver
    frame (4 KiB: header, and whatever fits) ->
                                          <- ACCEPT, NEED_SCHEMA or REFUSE
    schema, when it was asked for         ->
                                          <- ACCEPT or REFUSE
    large leaves, packed message, end     ->   (of a consolidated tree: its buffer, values)
                                          <- COMMIT or REFUSE, for a large or a summed payload

Each side sends only what the other has agreed to, so a refusal leaves nothing behind and
the group can be used again at once.  Both sides raise the same error.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from ..core.leaf import Leaf
from ..core.node import Node
from ..errors import StagingExhausted, TransferError, WireError
from ..placement.convert import convert
from . import packing, receive, wire
from .describe import Described, decode_values, encode_values
from .endpoint import Known, learn
from .link import Link, Request, payload_sum
from .packing import Stage
from .refusal import decode_error, encode_error
from .transport import bytes_tensor
from .transport_protocol import Work
from .wire import Checksum, Header, Kind, Limits


@dataclass(slots=True)
class _Payload:
    """What a sender is about to send; its messages are made when they are asked for.

    Attributes:
        stage: None for a consolidated tree, whose buffer is the message.
        entry: the structure, in the form in which the payload travels.
    """

    stage: Stage | None
    values: bytes
    described: Described
    entry: Known
    devices: frozenset[str]
    _packed: list[Tensor] | None = None
    _large: list[Tensor] | None = None

    @property
    def nbytes(self) -> int:
        return self.entry.packing.nbytes + len(self.values)

    def packed(self) -> list[Tensor]:
        """The packed message, the small parts and then the values; or a buffer, and the values."""
        if self._packed is None:
            assert self.stage is not None
            message = self.stage.message(len(self.values))
            self.stage.pack(self.described.parts)
            if self.values:
                end = self.entry.packing.packed_nbytes
                message[end:].copy_(bytes_tensor(bytearray(self.values)))
            self._packed = self.entry.packing.messages(message)
        return self._packed

    def large(self) -> list[Tensor]:
        """The parts that travel alone."""
        if self._large is None:
            parts = self.described.parts
            large = self.entry.packing.large
            self._large = [packing.sendable(parts[i], self.devices) for i in large]
        return self._large


def run_send(request: Request, node: Node) -> None:
    """Send ``node`` to the peer of ``request``; return when it is through.

    Raises:
        SchemaMismatch: the receiver expects another structure.
        UnsupportedLeaf: an entry that cannot travel; the receiver raises it too.
        TransferTimeout, PeerLost, WireError: see `tensordict.errors`.
    """
    endpoint = request.endpoint
    with endpoint.claim("send", request.peer, request.tag):
        link = Link(request)
        try:
            payload = _prepare(request, node)
        except Exception as error:
            with suppress(TransferError):  # what is wrong here matters more than who heard it
                _send_error(link, error)
            raise
        _send(link, payload)
        if payload.stage is not None:
            payload.entry.give_back(payload.stage)


def run_error(request: Request, error: Exception) -> None:
    """Tell a peer that waits for a tensordict that none will come, and why."""
    with request.endpoint.claim("send", request.peer, request.tag):
        _send_error(Link(request), error)


def post_error(request: Request, error: Exception) -> None:
    """As `run_error`, without waiting for the peer to hear of it."""
    link = Link(request)
    _post_error(link, error)
    link.leave()


def _prepare(request: Request, node: Node) -> _Payload:
    if request.policy is not None:
        node = convert(node, request.policy)
    taken = request.endpoint.take(node, pack_below=request.pack_below, bundle=request.bundle)
    described, entry, stage = taken.described, taken.entry, taken.stage
    values = b""
    if described.values:
        forms = encode_values(described, entry.value_paths)
        values = json.dumps(forms, separators=(",", ":")).encode()
    devices = request.transport.capabilities.devices
    if taken.buffer is not None:
        messages = [x for x in (taken.buffer, bytes_tensor(bytearray(values))) if x.numel()]
        return _Payload(None, values, described, entry.whole(), devices, messages)
    packed = None
    if taken.packed and stage is not None:
        packed = entry.packing.messages(stage.message())
    return _Payload(stage, values, described, entry, devices, packed)


def _send_error(link: Link, error: Exception) -> None:
    """Tell the receiver that nothing will come, and why."""
    _post_error(link, error)
    link.flush()


def _post_error(link: Link, error: Exception) -> None:
    body = _error_body(error)
    header = Header(Kind.ERROR, schema_nbytes=len(body), inline_schema=True)
    link.post_frame(wire.eager_frame(header, body))


def _error_body(error: Exception) -> bytes:
    room = wire.EAGER_ROOM
    body = encode_error(error, room)
    if len(body) > room:
        body = encode_error(TransferError(str(error)[:500]), room)
    return body


def _send(link: Link, payload: _Payload) -> None:
    request = link.request
    agreed = request.agreed is not None and request.agreed.find(payload.entry.digest) is not None
    if agreed:
        request = replace(request, strict=False)
    header, schema = _announce(request, payload, agreed)
    inline = b""
    if header.inline_payload:
        inline = b"".join(x.numpy().tobytes() for x in payload.packed())
    frame = wire.eager_frame(header, schema, inline)
    if not request.strict:
        link.post_frame(frame)
        if not (header.inline_schema or agreed):
            link.post_bytes(payload.entry.data)
        _send_payload(link, payload, header)
        # gloo may leave asleep a sender whose message the peer has not asked for when it goes.
        if agreed or _has_end(header):
            link.flush_unconfirmed()
        else:
            link.flush()
        return
    reply = link.expect_reply()
    link.post_frame(frame)
    payload.packed()  # while the receiver makes up its mind
    _agree(link, payload.entry, reply)
    commit = link.expect_reply() if _has_commit(header) else None
    _send_payload(link, payload, header)
    if commit is not None:
        link.answer(*commit, (Kind.COMMIT,))
    link.flush()
    if request.agreed is not None:
        request.agreed.add(payload.entry)


def _announce(request: Request, payload: _Payload, agreed: bool) -> tuple[Header, bytes]:
    """The header of a frame, and the schema that rides in it; none when it was agreed on before."""
    entry = payload.entry
    header = Header(
        Kind.DATA,
        schema_nbytes=0 if agreed else len(entry.data),
        payload_nbytes=payload.nbytes,
        digest=entry.digest,
        strict=request.strict,
        checksum=request.checksum,
        version=request.version,
        one_buffer=entry.packing.one_buffer is not None,
    )
    schema = b""
    acked = agreed or (request.strict and request.endpoint.is_acked(request.peer, entry.digest))
    if len(entry.data) <= wire.EAGER_ROOM and not acked:
        schema, header = entry.data, replace(header, inline_schema=True)
    start = wire.payload_start(wire.HEADER_NBYTES + len(schema))
    room = wire.EAGER_NBYTES - wire.SEAL_NBYTES
    if not entry.packing.large and start + payload.nbytes <= room:
        header = replace(header, inline_payload=True)
    if request.checksum is not Checksum.NONE:
        total = payload_sum(request.checksum, [*payload.large(), *payload.packed()])
        header = replace(header, payload_sum=total)
    return header, schema


def _agree(link: Link, entry: Known, reply: tuple[Tensor, Work]) -> None:
    """Hear whether the receiver takes it; send the schema when it asks for it."""
    request = link.request
    if link.answer(*reply, (Kind.ACCEPT, Kind.NEED_SCHEMA)) is Kind.NEED_SCHEMA:
        link.stage = "schema"
        request.endpoint.unack(request.peer, entry.digest)
        reply = link.expect_reply()
        link.post_bytes(entry.data)
        link.answer(*reply, (Kind.ACCEPT,))
    request.endpoint.ack(request.peer, entry.digest)


# gloo does not wake a rank whose peer dies in the middle of a message, but it does wake one
# that waits for a message which has not begun.  Payloads that can be cut (a smaller one is in
# the hands of the kernel at once) therefore end with one more byte, for which receivers wait
# first, and are confirmed by an answer, for which senders wait first.
_END_ABOVE: Final = 2 << 20
_POSTED_FIRST: Final = 128


def _has_end(header: Header) -> bool:
    return header.payload_nbytes > _END_ABOVE and not header.inline_payload


def _has_commit(header: Header) -> bool:
    return header.strict and (header.checksum is not Checksum.NONE or _has_end(header))


def _send_payload(link: Link, payload: _Payload, header: Header) -> None:
    link.stage = "payload"
    if header.inline_payload:
        return
    for tensor in (*payload.large(), *payload.packed()):
        link.post_payload(tensor)
    if _has_end(header):
        link.post_bytes(b"\1")


def run_recv(request: Request, target: receive.Target) -> Any:
    """Receive a tensordict from the peer of ``request``, into ``target`` or as a new one.

    Returns:
        The target's tensordict, or the new one; a list when several came in one.

    Raises:
        SchemaMismatch: the sender's structure is not the target's; nothing was written.
        UnsupportedLeaf, TransferTimeout, PeerLost, WireError: see `tensordict.errors`.
    """
    endpoint = request.endpoint
    with endpoint.claim("receive", request.peer, request.tag):
        link = Link(request)
        frame, work = link.expect_frame()
        trouble = target.look(request)  # while the frame is under way
        link.wait(work)
        data = frame.numpy()
        header = _read_frame(link, data)
        if trouble is not None:
            raise _refused(link, header, trouble)
        try:
            entry = _schema(link, header, data)
            form = entry.whole() if header.one_buffer else entry
            _check_sizes(header, form, link.request.limits)
        except WireError as error:
            raise _refused(link, header, error) from None
        found = target.mismatch(form, link)
        if found is not None:
            if not header.strict:
                _drain(link, header, form)
            raise _refused(link, header, found)
        agreed = request.agreed if header.strict else None
        try:
            out = _take(link, header, form, target, data)
        except WireError:
            if agreed is not None and target.version and not _has_commit(header):
                agreed.add(entry)  # as the sender does, who hears of nothing
            raise
        if agreed is not None:
            agreed.add(entry)
        if "bundle" in entry.schema.headers[0]:
            return [part for _, part in out._items()]
        return out


def _refused(link: Link, header: Header, error: Exception) -> Exception:
    if header.strict:
        link.refuse(error)
    return error


def _read_frame(link: Link, data: Any) -> Header:
    try:
        header = wire.parse_header(data[: wire.HEADER_NBYTES].tobytes())
        wire.check_seal(data.tobytes())
        wire.check_limits(header, link.request.limits)
        if header.kind not in (Kind.DATA, Kind.ERROR):
            raise WireError(f"a frame of kind {header.kind.name} cannot start an exchange", 6)
    except WireError as error:
        link.refuse(error)
        raise
    if header.kind is Kind.ERROR:
        end = wire.HEADER_NBYTES + min(header.schema_nbytes, wire.EAGER_NBYTES)
        raise decode_error(data[wire.HEADER_NBYTES : end].tobytes())
    return header


def _schema(link: Link, header: Header, data: Any) -> Known:
    """The schema that a frame means: carried, remembered, or asked for."""
    catalogue = link.request.endpoint.catalogue
    if not (header.strict or header.schema_nbytes):  # agreed on before, on this channel
        agreed = link.request.agreed
        known = None if agreed is None else agreed.find(header.digest)
        if known is None:
            raise WireError("a frame without schema for a structure that was not agreed on", 8)
        return known
    entry = catalogue.find(header.digest)
    if entry is not None:
        if not header.strict and not header.inline_schema:
            _fetch_schema(link, header)
        return entry
    if header.inline_schema:
        stop = wire.HEADER_NBYTES + header.schema_nbytes
        text = data[wire.HEADER_NBYTES : stop].tobytes()
    else:
        link.stage = "schema"
        if header.strict:
            buffer, work = link.expect_bytes(header.schema_nbytes)
            link.accept(Kind.NEED_SCHEMA)
            link.wait(work)
            text = buffer.numpy().tobytes()
        else:
            text = _fetch_schema(link, header)
    return catalogue.add(learn(text, header.digest, link.request.limits))


def _fetch_schema(link: Link, header: Header) -> bytes:
    buffer, work = link.expect_bytes(header.schema_nbytes)
    link.wait(work)
    return buffer.numpy().tobytes()


def _check_sizes(header: Header, entry: Known, limits: Limits) -> None:
    values = header.payload_nbytes - entry.packing.nbytes
    if values < 0 or (values > 0) != bool(entry.schema.values):
        raise WireError(
            f"a payload of {header.payload_nbytes} bytes does not fit a schema of "
            f"{entry.packing.nbytes} bytes and {len(entry.schema.values)} values",
            16,
        )
    if values > limits.max_schema_nbytes:
        raise WireError(
            f"{values} bytes of non-tensor values are above the limit of {limits.max_schema_nbytes}",
            16,
        )
    if header.inline_payload and entry.packing.large:
        raise WireError("an inline payload cannot have large leaves", 6)


def _take(link: Link, header: Header, entry: Known, target: receive.Target, data: Any) -> Node:
    """Agree, receive the payload, verify it, and only then write."""
    plan = entry.packing
    link.request.endpoint.met(link.request.peer, entry)
    values_nbytes = header.payload_nbytes - plan.nbytes
    try:
        landing = target.landing(entry, values_nbytes)
    except (RuntimeError, MemoryError) as error:
        text = f"{link.me} has no room for {header.payload_nbytes} bytes from {link.peer}: {error}"
        raise _refused(link, header, StagingExhausted(text)) from None
    link.stage = "payload"
    end = None
    messages = landing.messages()
    if header.inline_payload:
        first = wire.HEADER_NBYTES + (header.schema_nbytes if header.inline_schema else 0)
        first = wire.payload_start(first)
        arrived = torch.from_numpy(data[first : first + header.payload_nbytes].copy())
        with torch.inference_mode():  # memory of the user may have been made in it
            landing.packed.copy_(arrived)
        messages = []
    # Posting is slow beside messages under way, but the sender should not wait for thousands.
    works = [link.expect_payload(x) for x in messages[:_POSTED_FIRST]]
    if header.strict:
        link.accept()
    works += [link.expect_payload(x) for x in messages[_POSTED_FIRST:]]
    if _has_end(header):
        end = link.expect_bytes(1)[1]
    landing.prepare()  # while the payload is under way
    link.wait_payload(works, messages, end)
    target.version = header.version
    link.stage = "commit"
    try:
        link.verify(header, landing.messages())
        leaves = _values(entry, landing.packed, plan.packed_nbytes)
    except WireError as error:
        if _has_commit(header):
            link.refuse(error)
        raise
    link.flush()  # nothing may fail once the target is written
    out = landing.commit(leaves)
    if _has_commit(header):
        link.accept(Kind.COMMIT)
        link.leave()
    landing.release()
    return out


def _values(entry: Known, packed: Tensor, start: int) -> list[Leaf]:
    if not entry.schema.values:
        return []
    try:
        forms = json.loads(packed[start:].numpy().tobytes())
    except (ValueError, RecursionError) as error:
        raise WireError(f"the values are not JSON: {error}") from None
    return decode_values(entry.schema, forms)


def _drain(link: Link, header: Header, entry: Known) -> None:
    """Receive and drop a payload that was sent without asking."""
    if header.inline_payload:
        return
    plan = entry.packing
    packed = header.payload_nbytes - plan.large_total
    parts = [packed]
    if plan.one_buffer is not None:
        parts = [plan.packed_nbytes, packed - plan.packed_nbytes]
    lengths = [*plan.large_nbytes, *(n for n in parts if n)]
    if not lengths:
        return
    scrap = torch.empty(max(lengths), dtype=torch.uint8)
    messages = [scrap[:n] for n in lengths]  # all in one place: nobody reads them
    works = [link.expect_payload(x) for x in messages]
    end = link.expect_bytes(1)[1] if _has_end(header) else None
    link.wait_payload(works, messages, end)
