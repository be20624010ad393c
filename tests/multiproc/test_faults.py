"""Peers that die or say nothing: a typed error in time on whoever is left."""

import os
import signal
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist

from tensordict import TensorDict
from tensordict.distributed import TorchTransport, all_reduce, broadcast, irecv, isend, recv, send
from tensordict.distributed.testing import Fault, FaultyTransport, run_ranks
from tensordict.errors import PeerLost, SchemaMismatch, TransferError, TransferTimeout

pytestmark = pytest.mark.ranks


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def tree(fill=0.0):
    """Three forward messages cold (frame, schema, packed) and two large ones."""
    td = TensorDict({f"key number {i}": torch.full((8,), fill) for i in range(200)})
    td["big"] = torch.full((50_000,), fill)
    td["bigger"] = torch.full((3_000_000,), fill)
    return td


def untouched(td):
    return all(x.eq(0).all() for x in td.values(True, True))


def survivor(call, limit=3.0, error=(PeerLost,)):
    start = time.monotonic()
    with pytest.raises(error) as caught:
        call()
    took = time.monotonic() - start
    assert took < limit, f"{took:.1f} s until {caught.value}"
    assert caught.value.stage and "rank" in str(caught.value)
    return caught.value.stage


def _sender_dies(rank, size, at, into):
    transport = TorchTransport.of(None)
    if rank == 0:
        send(tree(1.0), 1, transport=FaultyTransport(transport, Fault(at, "call", call=die)))
        die()
    td = tree()
    stage = survivor(lambda: recv(0, out=td if into else None))
    assert untouched(td), "a failed receive changed the target"
    return stage


@pytest.mark.parametrize(
    ("at", "into", "stage"),
    [
        (0, True, "agree"),
        (1, False, "schema"),
        (1, True, "payload"),
        (2, True, "payload"),
        (3, True, "payload"),
    ],
)
def test_the_sender_is_killed_before_each_message(at, into, stage):
    assert run_ranks(_sender_dies, 2, at, into, may_die=[0], timeout=20)[1] == stage


def _dies_inside(rank, size, who, delay):
    dist.barrier()
    if rank == who:
        pending = isend(tree(1.0), 1) if rank == 0 else irecv(0, out=tree())
        time.sleep(delay)
        die()
        pending.wait()
    td = tree()
    start = time.monotonic()
    try:
        send(tree(1.0), 1) if rank == 0 else recv(0, out=td)
    except PeerLost as error:
        assert untouched(td) and error.bytes_done < 12_000_000
    else:  # it was faster than the signal: all of it is there
        assert rank == 0 or all(x.eq(1).all() for x in td.values(True, True))
    assert time.monotonic() - start < 3
    return True


@pytest.mark.parametrize("delay", [0.004, 0.012, 0.02])
@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_is_killed_in_the_middle(who, delay):
    assert run_ranks(_dies_inside, 2, who, delay, may_die=[who], timeout=20)[1 - who]


def _receiver_dies(rank, size, at):
    transport = TorchTransport.of(None)
    if rank == 1:
        faulty = FaultyTransport(transport, Fault(at, "call", call=die))
        if at < 0:
            time.sleep(0.1)
            die()
        recv(0, transport=faulty)
        die()
    return survivor(lambda: send(tree(1.0), 1))


@pytest.mark.parametrize(("at", "stage"), [(-1, "agree"), (0, "agree"), (1, "schema")])
def test_the_receiver_is_killed_before_each_answer(at, stage):
    assert run_ranks(_receiver_dies, 2, at, may_die=[1], timeout=20)[0] == stage


def _silence(rank, size, side):
    start = time.monotonic()
    if side == "receiver waits" and rank == 1:
        td = tree()
        with pytest.raises(TransferTimeout) as caught:
            recv(0, out=td, timeout=0.5)
        assert untouched(td)
    elif side == "sender waits" and rank == 0:
        with pytest.raises(TransferTimeout) as caught:
            send(tree(), 1, timeout=0.5)
    else:
        time.sleep(1.8)
        return None
    assert 0.4 < time.monotonic() - start < 1.5
    assert caught.value.peer == 1 - rank and caught.value.stage == "agree"
    assert "matching call" in str(caught.value) and "tag 0" in str(caught.value)
    return True


@pytest.mark.parametrize("side", ["receiver waits", "sender waits"])
def test_silence_ends_with_the_timeout(side):
    run_ranks(_silence, 2, side, reuse=False, timeout=20)


def _stall(rank, size):
    transport = TorchTransport.of(None)
    if rank == 0:
        slow = FaultyTransport(transport, Fault(at=2, kind="delay", seconds=2.0))
        with pytest.raises((PeerLost, TransferTimeout)):
            send(tree(1.0), 1, transport=slow, timeout=5)
        return None
    td = tree()
    start = time.monotonic()
    with pytest.raises(TransferTimeout) as caught:
        recv(0, out=td, timeout=0.7)
    assert time.monotonic() - start < 1.7 and caught.value.stage == "payload"
    assert untouched(td)
    return None


def test_a_sender_that_stalls():
    run_ranks(_stall, 2, reuse=False, timeout=20)


def _collective_dies(rank, size, what):
    td = tree(1.0)
    all_reduce(td)
    dist.barrier()
    if rank == 1:
        die()
    call = {
        "all_reduce": partial(all_reduce, td),
        "broadcast": partial(broadcast, td if rank == 0 else None, 0),
        "all_gather": td.all_gather,
    }[what]
    start = time.monotonic()
    with pytest.raises((PeerLost, TransferTimeout)):
        for _ in range(3):  # a broadcast may be through before anybody notices
            call()
    assert time.monotonic() - start < 3
    return True


@pytest.mark.parametrize("what", ["all_reduce", "broadcast", "all_gather"])
def test_a_rank_dies_before_a_collective(what):
    assert run_ranks(_collective_dies, 2, what, may_die=[1], timeout=20)[0]


def _oneself(rank, size):
    td = TensorDict({"a": torch.zeros(1)})
    with pytest.raises(TransferError, match="oneself"):
        send(td, rank)
    if rank == 0:
        first = isend(td, 1, init_tag=3)
        time.sleep(0.05)
        with pytest.raises(TransferError, match="earlier send"):
            send(td, 1, init_tag=3)
        with pytest.raises(ValueError, match="Expected an int"):
            send(td, 1, init_tag=-1)
        dist.barrier()
        first.wait()
    else:
        dist.barrier()
        assert recv(0, init_tag=3)["a"] == 0


def test_oneself_and_a_busy_tag_are_refused_before_the_first_byte():
    run_ranks(_oneself, 2)


CORRUPT = {
    "header byte": (0, lambda raw: _flip(raw, 9)),
    "digest": (0, lambda raw: _flip(raw, 30)),
    "magic": (0, lambda raw: _flip(raw, 0)),
    "schema": (1, lambda raw: _flip(raw, 100)),
    "truncated schema": (1, lambda raw: raw[: len(raw) // 2].clone()),
    "truncated frame": (0, lambda raw: raw[:200].clone()),
    "other major version": (0, lambda raw: _version(raw)),
}


def _flip(raw, at):
    raw[at] ^= 0xFF
    return raw


def _version(raw):
    import zlib

    data = bytearray(raw.numpy().tobytes())
    data[4] = 9
    data[60:64] = zlib.crc32(bytes(data[:60])).to_bytes(4, "little")
    return torch.frombuffer(data, dtype=torch.uint8)


def _corrupt(rank, size, name):
    transport = TorchTransport.of(None)
    at, change = CORRUPT[name]
    start = time.monotonic()
    td = tree((rank == 0 and 1.0) or 0.0)
    with pytest.raises(TransferError) as caught:
        if rank == 0:
            faulty = FaultyTransport(transport, Fault(at, "change", change=change))
            send(td, 1, transport=faulty)
        else:
            recv(0, out=None if "schema" in name else td)
    assert time.monotonic() - start < 2
    if rank == 1:
        assert untouched(td)
    ok = TensorDict({"a": torch.full((2,), float(rank))})
    if rank == 0:
        send(ok, 1)
    else:
        assert recv(0)["a"].eq(0).all()
    return type(caught.value).__name__, str(caught.value)


@pytest.mark.parametrize("name", list(CORRUPT))
def test_a_changed_frame_is_the_same_error_on_both_ranks(name):
    first, second = run_ranks(_corrupt, 2, name, reuse=False)  # ranks that know no schema
    assert first == second and first[0] == "WireError"


def _checksum(rank, size):
    transport = TorchTransport.of(None)
    for checksum in ("crc32", "sum64", "blake2b"):
        td = tree(1.0 if rank == 0 else 0.0)
        at = 1  # after the frame; the receiver knows the schema from its own tensordict
        with pytest.raises(TransferError, match="checksum") as caught:
            if rank == 0:
                fault = Fault(at, "change", change=lambda raw: _flip(raw, 5))
                faulty = FaultyTransport(transport, fault)
                send(td, 1, transport=faulty, checksum=checksum)
            else:
                recv(0, out=td)
        assert type(caught.value).__name__ == "ChecksumMismatch"
        if rank == 1:
            assert untouched(td)
        good = tree(2.0)
        if rank == 0:
            send(good, 1, checksum=checksum)
        else:
            out = tree()
            recv(0, out=out)
            assert out["bigger"].eq(2).all()


def test_a_changed_payload_is_found_by_each_checksum():
    run_ranks(_checksum, 2)


def _unasked(rank, size):
    """strict=False: no answers; a mismatch is found by the receiver alone."""
    if rank == 0:
        send(tree(3.0), 1, strict=False)
        send(TensorDict({"a": torch.ones(2)}), 1, strict=False)
        send(tree(4.0), 1, strict=False)
    else:
        out = tree()
        recv(0, out=out)
        assert out["big"].eq(3).all()
        with pytest.raises(SchemaMismatch):
            recv(0, out=out)
        recv(0, out=out)
        assert out["bigger"].eq(4).all()


def test_without_answers_a_mismatch_leaves_the_group_usable():
    run_ranks(_unasked, 2)
