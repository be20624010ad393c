"""Peers that lie where `test_hostile` does not look: answers, late schemas, collectives."""

import json
import random
import threading
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from tests.distributed.test_hostile import (
    LIMITS,
    NUMBERS,
    Meter,
    frame_of,
    good_frame,
    mutate,
    seal,
    tree,
)

from tensordict import TensorDict
from tensordict.distributed import agreement, all_gather, all_reduce, broadcast, recv, send, wire
from tensordict.distributed.loopback import LoopbackGroup, LoopbackTransport
from tensordict.distributed.wire import Header, Kind
from tensordict.errors import TensorDictError, TransferError, WireError

ROUNDS = 400
BODY, ANSWER = 1 << 28, 1 << 29


def as_tensor(data):
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def rounds(seed, monkeypatch, attack, n=ROUNDS):
    """Attack again and again; whatever comes out is a typed error or a result."""
    meter = Meter()
    monkeypatch.setattr(torch, "empty", meter)
    rng, refused = random.Random(seed), 0
    for _ in range(n):
        group = LoopbackGroup(2, timeout=0.02)
        try:
            attack(rng, group)
        except TensorDictError:
            refused += 1
    assert meter.largest <= max(LIMITS.max_payload_nbytes, LIMITS.max_schema_nbytes)
    return refused


# --- answers to a sender ------------------------------------------------------------------


def hostile_answer(rng):
    kind = rng.choice(list(Kind))
    body = rng.choice(
        [
            b"",
            b"null",
            b"[" * 400,
            b'{"type":"os.system","fields":["true"]}',
            b'{"type":"SchemaMismatch","fields":[1]}',
            b'{"type":"SchemaMismatch","fields":["x",[[["a"],"y"],[3,4]]]}',
            b'{"type":"UnsupportedLeaf","fields":[{"a":1},2,3]}',
            b'{"type":"WireError","fields":["x",' + b"9" * 300 + b"]}",
            rng.randbytes(100),
        ]
    )
    answer = wire.reply_frame(kind, body)
    how = rng.randrange(4)
    if how == 0:
        answer[rng.randrange(len(answer))] ^= rng.randint(1, 255)
    elif how == 1:
        answer[rng.randrange(60)] = rng.randrange(256)
        seal(answer)
    elif how == 2:  # a long reason, of any length
        header = Header(kind, schema_nbytes=rng.choice(NUMBERS), inline_schema=rng.random() < 0.5)
        answer[: wire.HEADER_NBYTES] = header.pack()
    return answer


def test_answers_of_any_kind(monkeypatch):
    def attack(rng, group):
        peer = group.transport(1)
        for _ in range(3):
            peer.isend(as_tensor(hostile_answer(rng)), 0, ANSWER)
        peer.irecv(torch.zeros(wire.EAGER_NBYTES, dtype=torch.uint8), 0, 0)
        send(tree(), 1, transport=group.transport(0), limits=LIMITS)

    refused = rounds(1, monkeypatch, attack)
    assert ROUNDS / 2 < refused < ROUNDS  # an ACCEPT is the end of a small exchange


# --- a schema of its own message ----------------------------------------------------------


def test_schemas_that_come_when_asked_for(monkeypatch):
    frames = [good_frame(one_buffer) for one_buffer in (False, True)]

    def attack(rng, group):
        _, schema, payload = rng.choice(frames)
        text = bytearray(schema)
        for _ in range(rng.randint(0, 2)):
            text[rng.randrange(len(text))] = rng.randrange(32, 127)
        if rng.random() < 0.3:
            document = json.loads(schema)
            document[rng.choice(list(document))] = rng.choice([*NUMBERS, [], {}, "x", [[]], None])
            text = bytearray(json.dumps(document).encode())
        announced = rng.choice([len(text)] * 6 + NUMBERS)
        said = Header(
            Kind.DATA,
            schema_nbytes=announced,
            payload_nbytes=rng.choice([len(payload)] * 6 + NUMBERS),
            digest=wire.schema_digest(bytes(text)),
            strict=rng.random() < 0.7,
            one_buffer=rng.random() < 0.5,
        )
        peer = group.transport(0)
        peer.isend(as_tensor(frame_of(said, b"", b"")), 1, 0)
        peer.isend(as_tensor(text), 1, BODY)
        peer.isend(as_tensor(payload), 1, BODY)
        for _ in range(2):
            peer.irecv(torch.zeros(wire.REPLY_NBYTES, dtype=torch.uint8), 1, ANSWER)
        out = tree() if rng.random() < 0.5 else None
        try:
            got = recv(0, out=out, transport=group.transport(1), limits=LIMITS)
        except TensorDictError:
            assert out is None or out["a"].eq(torch.arange(4.0)).all()
            raise
        repr(got)

    assert 0 < rounds(2, monkeypatch, attack) < ROUNDS


# --- collectives --------------------------------------------------------------------------


def limit_collectives(monkeypatch):
    """Let rounds have the limits of these tests."""
    init = agreement.Round.__init__
    defaults = [LIMITS if x is wire.DEFAULT_LIMITS else x for x in init.__defaults__]
    assert LIMITS in defaults
    monkeypatch.setattr(init, "__defaults__", tuple(defaults))


def against(group, lies, call):
    """One rank tells lies, one after the other; the other makes a call."""

    def lie():
        with suppress(TransferError, RuntimeError):
            for data in lies:
                group.gather(0, data)

    thread = threading.Thread(target=lie)
    thread.start()
    try:
        return call(group.transport(1))
    except RuntimeError as error:
        # The loop-back group copies between tensors, and wants equal sizes of all ranks.
        if "must match the size" not in str(error) and "equal size" not in str(error):
            raise
        raise TransferError(str(error)) from None
    finally:
        thread.join()


def hostile_header(rng, mine):
    header = Header(
        rng.choice([Kind.DATA, Kind.DATA, Kind.ERROR, Kind.REFUSE]),
        schema_nbytes=rng.choice(NUMBERS),
        payload_nbytes=rng.choice(NUMBERS),
        digest=rng.choice([mine.digest, bytes(16), rng.randbytes(16)]),
        one_buffer=rng.random() < 0.5,
        sequence=rng.choice([mine.sequence, 0]) if rng.random() < 0.3 else mine.sequence,
    )
    packed = bytearray(header.pack())
    if rng.random() < 0.3:
        packed[rng.randrange(64)] = rng.randrange(256)
        if rng.random() < 0.5:
            packed = seal(packed)
    return header, packed


def header_of(td, call):
    """What a rank shows of a tensordict in a collective."""
    shown = []

    class Listening(LoopbackTransport):
        def all_gather(self, out, tensor, *, control=False):
            shown.append(wire.parse_header(tensor.numpy().tobytes()))
            return super().all_gather(out, tensor, control=control)

    with suppress(TensorDictError):
        call(td, transport=Listening(LoopbackGroup(2, timeout=0.02), 1))
    return shown[0]


@pytest.mark.parametrize("call", [all_reduce, all_gather])
def test_what_another_rank_shows_in_a_collective(monkeypatch, call):
    limit_collectives(monkeypatch)
    td = TensorDict({"a": torch.arange(4.0)})
    mine = header_of(td, call)

    def attack(rng, group):
        header, packed = hostile_header(rng, mine)
        room = max(header.schema_nbytes, 500)
        body = rng.choice([b"null", b"{}", b"[" * 300, b'{"type":"X","fields":[]}'])
        lies = [as_tensor(packed)]
        if room < 1 << 20:
            lies.append(as_tensor(body.ljust(room, b"\0")))
        try:
            against(group, lies, lambda t: call(td, transport=t, timeout=0.02))
        finally:
            assert td["a"].tolist() == [0, 1, 2, 3]

    assert rounds(3, monkeypatch, attack, 100) > 50


@pytest.mark.parametrize(
    ("value", "more"), [(None, -1), (None, 1), (None, 1 << 40), ("text", 0), ("text", 1 << 20)]
)
def test_values_of_another_rank_are_within_the_limits(monkeypatch, more, value):
    limit_collectives(monkeypatch)
    td = TensorDict({"a": torch.arange(4.0)})
    if value is not None:
        td["value"] = value
    mine = header_of(td, all_gather)
    lie = as_tensor(replace(mine, payload_nbytes=64 + more).pack())
    with pytest.raises(WireError):
        against(LoopbackGroup(2, timeout=0.5), [lie], lambda t: all_gather(td, transport=t))


def test_what_a_source_broadcasts(monkeypatch):
    limit_collectives(monkeypatch)
    frames = [good_frame(one_buffer) for one_buffer in (False, True)]

    def attack(rng, group):
        parts = rng.choice(frames)
        frame = mutate(rng, *parts)
        lies = [as_tensor(frame), as_tensor(parts[1]), as_tensor(parts[0].pack())]
        repr(against(group, lies, lambda t: broadcast(None, 0, transport=t, timeout=0.02)))

    assert rounds(4, monkeypatch, attack, 100) > 75


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_many_answers_and_schemas(monkeypatch, seed):
    def attack(rng, group):
        peer = group.transport(1)
        for _ in range(3):
            peer.isend(as_tensor(hostile_answer(rng)), 0, ANSWER)
        peer.irecv(torch.zeros(wire.EAGER_NBYTES, dtype=torch.uint8), 0, 0)
        send(tree(), 1, transport=group.transport(0), limits=LIMITS)

    assert rounds(100 + seed, monkeypatch, attack, 10_000) > 5000
