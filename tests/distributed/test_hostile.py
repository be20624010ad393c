"""A peer that sends anything at all: an error or a tensordict, never code, memory or a hang."""

import json
import random
import struct
import time
import zlib
from dataclasses import replace

import pytest
import torch

from tensordict import NonTensorData, TensorDict
from tensordict.distributed import recv, wire
from tensordict.distributed import schema as schemas
from tensordict.distributed.describe import describe
from tensordict.distributed.loopback import LoopbackGroup
from tensordict.distributed.packing import plan_packing, plan_whole
from tensordict.distributed.wire import Checksum, Header, Kind, Limits
from tensordict.errors import TensorDictError

LIMITS = Limits(max_schema_nbytes=1 << 16, max_payload_nbytes=1 << 16, max_depth=16)
NUMBERS = [0, 1, 63, 64, 4031, 4032, 4033, 2**16, 2**16 + 1, 2**31, 2**32, 2**53, 2**63, 2**64 - 1]


def tree():
    return TensorDict(
        {
            "a": torch.arange(4.0),
            "n": TensorDict({"b": torch.ones(2, dtype=torch.int16), "s": NonTensorData("x")}, []),
        },
        [],
    )


def good_frame(one_buffer):
    """The bytes of a frame, its header, its schema document, its payload."""
    described = describe(tree().consolidate() if one_buffer else tree())
    schema = schemas.encode(described.schema)
    values = json.dumps([[[], "x"]]).encode()
    plan = plan_whole if one_buffer else plan_packing
    payload = bytes(plan(described.schema).packed_nbytes) + values
    header = Header(
        Kind.DATA,
        schema_nbytes=len(schema),
        payload_nbytes=len(payload),
        digest=wire.schema_digest(schema),
        inline_schema=True,
        inline_payload=True,
        one_buffer=one_buffer,
    )
    return header, schema, payload


def frame_of(header, schema, payload):
    frame = wire.eager_frame(header, schema[: wire.EAGER_ROOM])
    start = wire.payload_start(64 + len(schema))
    frame[start : start + len(payload)] = payload
    return wire.seal(bytearray(frame[: wire.EAGER_NBYTES].ljust(wire.EAGER_NBYTES, b"\0")))


def seal(frame):
    frame[60:64] = struct.pack("<I", zlib.crc32(bytes(frame[:60])))
    return frame


def mutate(rng, header, schema, payload):
    """One hostile frame; most of them have right checksums and digests."""
    how = rng.randrange(6)
    if how == 0:  # any byte
        frame = frame_of(header, schema, payload)
        for _ in range(rng.randint(1, 4)):
            frame[rng.randrange(len(frame))] ^= rng.randint(1, 255)
        return wire.seal(frame) if rng.random() < 0.5 else frame
    if how == 1:  # any header byte, sealed
        frame = frame_of(header, schema, payload)
        frame[rng.randrange(60)] = rng.randrange(256)
        return seal(frame)
    if how == 2:  # any lengths
        changed = replace(
            header,
            kind=rng.choice(list(Kind)),
            one_buffer=rng.random() < 0.5,
            schema_nbytes=rng.choice([*NUMBERS, len(schema)]),
            payload_nbytes=rng.choice([*NUMBERS, len(payload)]),
            digest=rng.choice([header.digest, bytes(16)]),
            inline_schema=rng.random() < 0.7,
            inline_payload=rng.random() < 0.7,
            checksum=rng.choice(list(Checksum)),
        )
        return frame_of(changed, schema, payload)
    if how == 3:  # any text as a schema
        text = bytearray(schema)
        for _ in range(rng.randint(1, 3)):
            text[rng.randrange(len(text))] = rng.randrange(256)
        return with_schema(header, bytes(text), payload)
    if how == 4:  # another number or string in the schema
        document = json.loads(schema)
        spot = document
        while isinstance(spot, (dict, list)) and spot:
            keys = list(spot) if isinstance(spot, dict) else range(len(spot))
            key = rng.choice(list(keys))
            if not isinstance(spot[key], (dict, list)) or rng.random() < 0.3:
                value = [*NUMBERS, -1, None, "", "os:system", [], {}, [[]], "x" * 3000, True]
                spot[key] = rng.choice(value)
                break
            spot = spot[key]
        return with_schema(header, json.dumps(document).encode(), payload)
    values = [b"[" * 1000, b"null", b'[[[],{"~enum":["os","x"]}]]', b'[[[],{"~os:system":"x"}]]']
    values += [b'[[[],{"~array":["|O",[1],""]}]]', b'[[[],{"~int":"zz"}]]', b"[[[-1],1]]"]
    values += [b'[[[],{"~tensor":["float32",[4611686018427387904],""]}]]', b'[[["a"],1]]']
    text = rng.choice(values)
    packed = payload[: len(payload) - len(json.dumps([[[], "x"]]))]
    body = packed + text
    changed = replace(header, payload_nbytes=len(body))
    return frame_of(changed, schema, body)


def with_schema(header, text, payload):
    changed = replace(header, schema_nbytes=len(text), digest=wire.schema_digest(text))
    return frame_of(changed, text, payload)


class Meter:
    """Notes the largest allocation asked for."""

    def __init__(self):
        self.largest = 0
        self._empty = torch.empty

    def __call__(self, *args, **kwargs):
        out = self._empty(*args, **kwargs)
        if out.device.type == "cpu":
            self.largest = max(self.largest, out.numel() * out.element_size())
        return out


def post(group, frame):
    """Send a frame, and take what is answered."""
    peer = group.transport(0)
    peer.isend(torch.frombuffer(frame, dtype=torch.uint8), 1, 0)
    peer.irecv(torch.zeros(wire.REPLY_NBYTES, dtype=torch.uint8), 1, 1 << 29)


def attack(n, seed, monkeypatch, one_buffer):
    meter = Meter()
    monkeypatch.setattr(torch, "empty", meter)
    rng = random.Random(seed)
    parts = good_frame(one_buffer)
    outcomes = {"taken": 0, "refused": 0}
    for k in range(n):
        frame = mutate(rng, *parts)
        group = LoopbackGroup(2, timeout=0.02)
        post(group, frame)
        into = (None, tree(), tree().consolidate())[k % 3]
        start = time.monotonic()
        try:
            got = recv(0, out=into, transport=group.transport(1), limits=LIMITS)
        except TensorDictError:
            outcomes["refused"] += 1
            if into is not None:
                assert torch.equal(into["a"], torch.arange(4.0)) and into["n", "s"] == "x"
        else:
            outcomes["taken"] += 1
            assert isinstance(got, TensorDict)
            repr(got)
        assert time.monotonic() - start < 5
    assert meter.largest <= max(LIMITS.max_payload_nbytes, LIMITS.max_schema_nbytes)
    return outcomes


@pytest.mark.parametrize("one_buffer", [False, True])
def test_the_unchanged_frame_is_taken(one_buffer):
    header, schema, payload = good_frame(one_buffer)
    group = LoopbackGroup(2)
    post(group, frame_of(header, schema, payload))
    got = recv(0, transport=group.transport(1), limits=LIMITS)
    assert got["n", "s"] == "x" and got["a"].eq(0).all() and got.is_consolidated() == one_buffer


@pytest.mark.parametrize("one_buffer", [False, True])
def test_hostile_frames(monkeypatch, one_buffer):
    outcomes = attack(2000, 0, monkeypatch, one_buffer)
    assert outcomes["refused"] > 1000


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("one_buffer", [False, True])
def test_ten_thousand_hostile_frames(monkeypatch, seed, one_buffer):
    attack(10_000, seed + 1, monkeypatch, one_buffer)
