"""One side of one exchange with one peer: posts messages, waits for them, answers.

Everything an error has to name (this rank, the peer, the stage, the bytes done) is known
here, so the protocol above reads as the list of its steps.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from ..errors import ChecksumMismatch, PeerLost, TransferError, TransferTimeout, WireError
from . import wire
from .asleep import waiting
from .at_exit import in_background
from .endpoint import Endpoint, Known
from .packing import PACK_BELOW
from .pending import Pending
from .refusal import decode_error, encode_error
from .torch_work import FOREVER, pause_after
from .transport import MAX_TAG, bytes_tensor, check_timeout
from .transport_protocol import Transport, Work
from .wire import Checksum, Header, Kind, Limits

# A user's tag has three channels: the frame on the tag itself, what follows it and the
# answers in bands of their own, so that no payload can meet the frame of another exchange.
_BODY: Final = 1 << 28
_REPLY: Final = 1 << 29

_COUNTING_S: Final = 0.05

_STAGES: Final = {
    "agree": "agreeing on the structure",
    "schema": "exchanging the schema",
    "payload": "exchanging the payload",
    "commit": "confirming",
}


_ANEW: Final = (
    "If its process is there, connect anew: Channel.reset on both ends, or a new process group."
)


class Agreed:
    """The structures that the two ends of a channel agree on: the same on both, by the same rule."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[bytes, Known] = {}

    def find(self, digest: bytes) -> Known | None:
        """The schema of a digest that was agreed on."""
        return self._known.get(digest)

    def add(self, entry: Known) -> None:
        """Note a schema, when both ends do; they forget all at once."""
        if len(self._known) >= _MAX_AGREED:
            self._known.clear()
        self._known[entry.digest] = entry


_MAX_AGREED: Final = 16


@dataclass(frozen=True, slots=True)
class Request:
    """The arguments of an exchange with one peer.

    Attributes:
        transport: how messages travel.
        endpoint: what this rank remembers.
        peer: rank of the peer in the group.
        tag: the user's tag.
        timeout: seconds for the whole exchange; None is the transport's own.
        strict: whether the receiver answers before any payload is sent.
        checksum: of the payload.
        pack_below: bytes below which a leaf is packed.
        limits: what this rank accepts.
        policy: casts leaves before they are sent.
        bundle: number of tensordicts in the one that is exchanged, None for a plain one.
        agreed: of a channel: what is sent without schema and answers.
        version: the number of a publication on a channel.
    """

    transport: Transport
    endpoint: Endpoint
    peer: int
    tag: int
    timeout: float | None = None
    strict: bool = True
    checksum: Checksum = Checksum.NONE
    pack_below: int = PACK_BELOW
    limits: Limits = wire.DEFAULT_LIMITS
    policy: Any = None
    bundle: int | None = None
    agreed: Agreed | None = None
    version: int = 0

    def __post_init__(self) -> None:
        check_timeout(self.timeout)
        if type(self.tag) is not int or not 0 <= self.tag <= MAX_TAG:
            raise ValueError(
                f"Cannot exchange on the tag {self.tag!r}. Expected an int of 0 to {MAX_TAG}."
            )
        if self.peer == self.transport.rank:
            raise TransferError(
                f"Cannot exchange with oneself: {self.transport.name_of(self.peer)} is this rank."
            )


def loss_of_peer(request: Request) -> PeerLost | None:
    """What to say if the connection to the peer of an exchange is known to have ended."""
    try:
        reason = request.transport.lost([request.peer]).get(request.peer)
    except TransferError as error:  # the group was destroyed
        reason = str(error)
    if reason is None:
        return None
    me, peer = (request.transport.name_of(r) for r in (request.transport.rank, request.peer))
    text = f"{me} lost {peer} within a message: {reason}. {_ANEW}"
    return PeerLost(text, peer=request.peer)


class Link:
    """The conversation of one exchange."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.stage = "agree"
        self.bytes_done = 0
        self._transport = request.transport
        timeout = request.timeout
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._sent: list[Work] = []

    @property
    def me(self) -> str:
        """How errors call this rank."""
        return self._transport.name_of(self._transport.rank)

    @property
    def peer(self) -> str:
        """How errors call the peer."""
        return self._transport.name_of(self.request.peer)

    # --- messages ------------------------------------------------------------------

    def post_frame(self, frame: bytearray) -> None:
        self._post(bytes_tensor(frame), 0, control=True)

    def post_reply(self, frame: bytearray) -> None:
        self._post(bytes_tensor(frame), _REPLY, control=True)

    def post_bytes(self, data: bytes) -> None:
        """Send a schema or a long reason, on the channel of what it belongs to."""
        self._post(bytes_tensor(bytearray(data)), _BODY, control=True)

    def post_payload(self, tensor: Tensor) -> None:
        self._post(tensor, _BODY, control=False)

    def _post(self, tensor: Tensor, band: int, *, control: bool) -> None:
        try:
            work = self._transport.isend(
                tensor, self.request.peer, self.request.tag + band, control=control
            )
        except (PeerLost, TransferTimeout) as error:
            raise self._explain(error) from None
        self._sent.append(work)

    def expect_frame(self) -> tuple[Tensor, Work]:
        return self._expect(wire.EAGER_NBYTES, 0)

    def expect_reply(self) -> tuple[Tensor, Work]:
        return self._expect(wire.REPLY_NBYTES, _REPLY)

    def expect_bytes(self, nbytes: int) -> tuple[Tensor, Work]:
        return self._expect(nbytes, _BODY)

    def expect_payload(self, tensor: Tensor) -> Work:
        return self._receive(tensor, _BODY, control=False)

    def _expect(self, nbytes: int, band: int) -> tuple[Tensor, Work]:
        buffer = torch.empty(nbytes, dtype=torch.uint8)
        return buffer, self._receive(buffer, band, control=True)

    def _receive(self, tensor: Tensor, band: int, *, control: bool) -> Work:
        try:
            return self._transport.irecv(
                tensor, self.request.peer, self.request.tag + band, control=control
            )
        except (PeerLost, TransferTimeout) as error:
            raise self._explain(error) from None

    def _left(self) -> float | None:
        if self._deadline is None:
            return None
        return max(self._deadline - time.monotonic(), 1e-3)

    def wait(self, work: Work) -> None:
        """Wait within the time that this exchange has left."""
        try:
            waiting(work.wait, self._left())
        except (PeerLost, TransferTimeout) as error:
            raise self._explain(error) from None

    def wait_payload(self, works: list[Work], tensors: list[Tensor], end: Work | None) -> None:
        """Wait for all payload messages, first of all for the one that says they are through."""
        sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
        if end is not None:
            try:
                waiting(end.wait, self._left())
            except (PeerLost, TransferTimeout) as error:
                self._count(works, sizes)
                raise self._explain(error) from None
        for work, nbytes in zip(works, sizes):
            self.wait(work)
            self.bytes_done += nbytes

    def _count(self, works: list[Work], sizes: list[int]) -> None:
        """Find out which messages were through when the connection ended.

        A thread waits for them: a wait of gloo that times out closes the connections to all ranks.
        """
        done: list[int] = []

        def look() -> None:
            with suppress(TransferError):
                for work, nbytes in zip(works, sizes):
                    work.wait(FOREVER)
                    done.append(nbytes)

        in_background(look, "messages that were through").join(_COUNTING_S)
        self.bytes_done += sum(done)

    def flush(self) -> None:
        """Wait until everything that was posted is through."""
        for work in self._sent:
            self.wait(work)
        self._sent.clear()

    def flush_unconfirmed(self) -> None:
        """As `flush`, for a payload that nobody will confirm.

        gloo does not wake a sender whose peer dies in the middle of a message, nor always one
        whose peer goes before it asks for the message: a thread waits, and this one looks whether
        the peer is there.
        """
        peer = self.request.peer
        pending = Pending(self.flush, f"payload to {self.peer}")
        start = time.monotonic()
        while not pending.done():
            with suppress(TransferTimeout):  # of the pause, or of the exchange: raised below
                pending.exception(pause_after(time.monotonic() - start))
            lost = {} if pending.done() else self._transport.lost([peer])
            if lost:
                raise self._explain(PeerLost(lost[peer]))
        pending.wait()

    def _explain(self, error: TransferError) -> TransferError:
        stage, done = self.stage, self.bytes_done
        doing = f"{_STAGES[stage]} with {self.peer} ({done} bytes of payload done)"
        if isinstance(error, TransferTimeout):
            text = f"{self.me} gave up {doing}: no progress within {self.request.timeout} s."
            if self.request.timeout is None:
                text = f"{self.me} gave up {doing}: no progress within the group's timeout."
            text += f" Is {self.peer} in the matching call, on tag {self.request.tag}?"
            return TransferTimeout(text, peer=self.request.peer, stage=stage, bytes_done=done)
        text = f"{self.me} lost {self.peer} while {doing}: {error}. {_ANEW}"
        return PeerLost(text, peer=self.request.peer, stage=stage, bytes_done=done)

    # --- answers -------------------------------------------------------------------

    def accept(self, kind: Kind = Kind.ACCEPT) -> None:
        """Answer with something that has no body."""
        self.post_reply(wire.reply_frame(kind))

    def refuse(self, error: BaseException) -> None:
        """Answer that nothing will be received, and why; the caller raises ``error``."""
        body = encode_error(error, self.request.limits.max_schema_nbytes)
        frame = wire.reply_frame(Kind.REFUSE, body)
        self.post_reply(frame)
        if wire.parse_header(bytes(frame)).inline_schema:
            self.leave()  # a peer that is not a sender of ours may never take it
        else:
            self._post(bytes_tensor(bytearray(body)), _REPLY, control=True)
            self.flush()

    def leave(self) -> None:
        """Do not wait for the last message to be taken; its memory stays for a while."""
        _unclaimed.append((self._transport, self._sent.pop()))
        del _unclaimed[:-_KEEP]

    def answer(self, buffer: Tensor, work: Work, allowed: tuple[Kind, ...]) -> Kind:
        """Wait for an answer; raise the peer's error when it refuses.

        Raises:
            WireError: an answer that is none, or of a kind that cannot come here.
        """
        self.wait(work)
        data = buffer.numpy().tobytes()
        header = wire.parse_header(data)
        wire.check_seal(data)
        if header.kind is Kind.REFUSE:
            raise self._reason(header, data)
        if header.kind not in allowed:
            raise WireError(f"an answer of kind {header.kind.name} cannot come here", 6)
        return header.kind

    def _reason(self, header: Header, data: bytes) -> TransferError:
        n = header.schema_nbytes
        if header.inline_schema:
            return decode_error(data[wire.HEADER_NBYTES :][: min(n, wire.REPLY_ROOM)])
        if n > self.request.limits.max_schema_nbytes:
            return WireError(f"the peer refuses with a reason of {n} bytes", 8)
        buffer, work = self._expect(n, _REPLY)
        self.wait(work)
        return decode_error(buffer.numpy().tobytes())

    def verify(self, header: Header, messages: list[Tensor]) -> None:
        """Compare the checksum of a payload.

        Raises:
            ChecksumMismatch: it is another one.
        """
        if header.checksum is Checksum.NONE:
            return
        if payload_sum(header.checksum, messages) != header.payload_sum:
            raise ChecksumMismatch(
                f"the payload from {self.peer} does not have the {header.checksum.name} "
                "checksum that its header announces"
            )


_KEEP: Final = 64
# Answers under way: their memory must stay until they are through.
_unclaimed: list[tuple[Transport, Work]] = []


def release(transport: Transport) -> None:
    """Let go of what is under way on connections that nobody will use again."""
    _unclaimed[:] = [pair for pair in _unclaimed if pair[0] is not transport]


def payload_sum(kind: Checksum, messages: list[Tensor]) -> int:
    """The checksum of contiguous payload messages."""
    arrays = [
        message.detach().cpu().reshape(-1).view(torch.uint8).numpy()
        for message in messages
        if message.numel()
    ]
    return wire.checksum_of(kind, arrays)
