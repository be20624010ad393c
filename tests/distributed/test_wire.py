"""Headers, limits, checksums and golden frames."""

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tensordict import NonTensorData, NonTensorStack, TensorDict
from tensordict.distributed import recv, send, wire
from tensordict.distributed.loopback import LoopbackGroup
from tensordict.distributed.testing import CountingTransport
from tensordict.distributed.wire import Checksum, Header, Kind, Limits
from tensordict.errors import WireError

GOLDEN = Path(__file__).parent / "golden"

short = settings(max_examples=60, deadline=None)

headers = st.builds(
    Header,
    kind=st.sampled_from(Kind),
    schema_nbytes=st.integers(0, 2**64 - 1),
    payload_nbytes=st.integers(0, 2**64 - 1),
    digest=st.binary(min_size=16, max_size=16),
    inline_schema=st.booleans(),
    inline_payload=st.booleans(),
    strict=st.booleans(),
    delta=st.booleans(),
    last=st.booleans(),
    checksum=st.sampled_from(Checksum),
    payload_sum=st.integers(0, 2**64 - 1),
    sequence=st.integers(0, 2**32 - 1),
    version=st.integers(0, 2**64 - 1),
)


@short
@given(headers)
def test_a_header_survives_the_round_trip(header):
    packed = header.pack()
    assert len(packed) == 64 and packed[:4] == b"TDXF" and packed[4:6] == b"\x01\x00"
    assert wire.parse_header(packed) == header


@short
@given(headers, st.integers(0, 63), st.integers(1, 255))
def test_every_changed_byte_is_noticed(header, at, mask):
    packed = bytearray(header.pack())
    packed[at] ^= mask
    with pytest.raises(WireError):
        wire.parse_header(bytes(packed))


def test_every_byte_of_a_header_matters():
    packed = Header(Kind.DATA, schema_nbytes=100, payload_nbytes=1000, digest=bytes(16)).pack()
    for at in range(64):
        for value in set(range(256)) - {packed[at]}:
            changed = bytearray(packed)
            changed[at] = value
            with pytest.raises(WireError):
                wire.parse_header(bytes(changed))


def test_sealed_headers_of_any_byte_are_read_or_refused():
    packed = Header(Kind.DATA, schema_nbytes=100, payload_nbytes=1000, digest=bytes(16)).pack()
    limits, read = Limits(max_schema_nbytes=4096, max_payload_nbytes=4096), set()
    for at in range(60):
        for value in set(range(256)) - {packed[at]}:
            changed = bytearray(packed)
            changed[at] = value
            try:
                header = wire.parse_header(resealed(changed))
                wire.check_limits(header, limits)
            except WireError:
                continue
            read.add(at)
            assert header.schema_nbytes <= 4096 and header.payload_nbytes <= 4096
            assert header.pack() == resealed(changed) or at == 5  # the minor version is not kept
    # The minor version, flags, lengths within the limits, the digest, the checksum, the numbers.
    assert read == {*range(5, 10), 16, 17, *range(24, 60)}


def resealed(packed: bytearray) -> bytes:
    packed[60:64] = struct.pack("<I", zlib.crc32(bytes(packed[:60])))
    return bytes(packed)


@pytest.mark.parametrize(
    ("at", "value", "text"),
    [
        (4, 2, "speaks protocol 2.0"),
        (6, 0b100, "unknown flags"),
        (6, 0b10000000, "unknown flags"),
        (7, 0xF0, "unknown kind"),
        (7, 0x09, "unknown checksum"),
    ],
)
def test_a_sealed_header_of_another_protocol_is_refused(at, value, text):
    packed = bytearray(Header(Kind.DATA).pack())
    packed[at] |= value
    if at == 4:
        packed[at] = value
    with pytest.raises(WireError, match=text):
        wire.parse_header(resealed(packed))


def test_a_cut_or_changed_message_is_noticed():
    header = Header(Kind.DATA, schema_nbytes=3, inline_schema=True)
    for frame in (wire.eager_frame(header, b"abc"), wire.reply_frame(Kind.REFUSE, b"because")):
        wire.check_seal(bytes(frame))
        for at in (64, 70, len(frame) - 5, len(frame) - 1):
            changed = bytearray(frame)
            changed[at] ^= 1
            with pytest.raises(WireError, match="cut or changed"):
                wire.check_seal(bytes(changed))


def test_a_short_header_is_refused():
    with pytest.raises(WireError, match="64 bytes, got 10"):
        wire.parse_header(b"TDXF\x01\x00....")


@pytest.mark.parametrize(
    "header",
    [
        Header(Kind.DATA, schema_nbytes=101),
        Header(Kind.DATA, payload_nbytes=2**63),
        Header(
            Kind.DATA,
            schema_nbytes=100,
            payload_nbytes=4000,
            inline_schema=True,
            inline_payload=True,
        ),
        Header(Kind.ERROR, schema_nbytes=2**64 - 1, inline_schema=True),
    ],
)
def test_lengths_above_the_limits_are_refused(header):
    with pytest.raises(WireError):
        wire.check_limits(header, Limits(max_schema_nbytes=100, max_payload_nbytes=4000))


@short
@given(st.lists(st.binary(max_size=40), max_size=4), st.sampled_from(list(Checksum)[1:]))
def test_checksums_see_changes_and_the_order_of_messages(parts, kind):
    arrays = [np.frombuffer(p, np.uint8) for p in parts]
    total = wire.checksum_of(kind, arrays)
    assert total == wire.checksum_of(kind, arrays) and 0 <= total < 2**64
    for k, part in enumerate(parts):
        if part:
            changed = bytearray(part)
            changed[0] ^= 1
            others = [*arrays[:k], np.frombuffer(bytes(changed), np.uint8), *arrays[k + 1 :]]
            assert wire.checksum_of(kind, others) != total
    if len({bytes(p) for p in parts}) > 1 and kind is not Checksum.CRC32:
        assert wire.checksum_of(kind, arrays[::-1]) != total or parts == parts[::-1]


def test_crc32_is_the_one_of_zlib():
    parts = [np.frombuffer(b"abc", np.uint8), np.frombuffer(b"defg", np.uint8)]
    assert wire.checksum_of(Checksum.CRC32, parts) == zlib.crc32(b"abcdefg")


def golden_tree() -> TensorDict:
    td = TensorDict(
        {
            "w": torch.arange(6, dtype=torch.float32).view(2, 3),
            "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
            "n": TensorDict({"i": torch.tensor([[7], [8]])}, [2, 1]),
            "flag": torch.tensor([True, False]),
            "text": NonTensorData("héllo", batch_size=[2]),
            "rows": NonTensorStack({"k": (1, 2.5)}, b"\x00\xff"),
        },
        [2],
        names=["t"],
    )
    td["tied"] = td["w"]
    td["n"].names = None
    return td


class Recording(CountingTransport):
    """Keeps the bytes of what is sent."""

    def __init__(self, inner):
        super().__init__(inner)
        self.sent = []

    def isend(self, tensor, dst, tag, *, control=False):
        self.sent.append((tag, tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()))
        return super().isend(tensor, dst, tag, control=control)


def frames() -> dict[str, bytes]:
    """Every message of two exchanges, by name."""

    def main(transport):
        recording = Recording(transport)
        td = golden_tree()
        if transport.rank == 0:
            send(td, 1, transport=recording, init_tag=3)
            send(td, 1, transport=recording, init_tag=3, checksum="crc32")
        else:
            recv(0, transport=recording, init_tag=3)
            recv(0, transport=recording, init_tag=3)
        return recording.sent

    out = {}
    for rank, sent in enumerate(LoopbackGroup(2).run(main)):
        for k, (tag, data) in enumerate(sent):
            out[f"rank{rank}-message{k}-tag{tag}.bin"] = data
    return out


def test_frames_are_the_golden_ones():
    made = frames()
    assert sorted(made) == sorted(path.name for path in GOLDEN.glob("*.bin"))
    for name, data in made.items():
        assert data == (GOLDEN / name).read_bytes(), f"{name}: the format changed: raise MINOR"


def test_the_golden_frame_still_reads():
    frame = bytearray((GOLDEN / "rank0-message0-tag3.bin").read_bytes())

    def main(transport):
        if transport.rank == 0:
            answer = torch.empty(wire.REPLY_NBYTES, dtype=torch.uint8)
            work = transport.irecv(answer, 1, 3 + (1 << 29), control=True)
            transport.isend(torch.frombuffer(frame, dtype=torch.uint8), 1, 3, control=True).wait()
            work.wait()
            return wire.parse_header(answer.numpy().tobytes()).kind
        return recv(0, transport=transport, init_tag=3)

    kind, got = LoopbackGroup(2).run(main)
    want = golden_tree()
    assert kind is Kind.ACCEPT
    assert got.names == ["t"] and got["n"].batch_size == (2, 1)
    assert torch.equal(got["w"], want["w"]) and got["tied"] is got["w"]
    assert torch.equal(got["half"], want["half"]) and torch.equal(got["flag"], want["flag"])
    assert got["text"] == "héllo" and got.get("rows").tolist() == [{"k": (1, 2.5)}, b"\x00\xff"]
