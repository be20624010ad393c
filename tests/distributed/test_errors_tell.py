"""What errors of an exchange name: rank, peer, stage, path, bytes done; and pipes."""

import asyncio

import pytest
import torch

from tensordict import TensorDict
from tensordict.distributed import all_reduce, receive, recv, send
from tensordict.distributed.testing import Fault, FaultyTransport, LoopbackGroup
from tensordict.errors import StagingExhausted, TransferError, TransferTimeout


def tree(numel=60_000):
    return TensorDict({"a": torch.ones(3), **{f"large{k}": torch.ones(numel) for k in range(3)}})


def both(sender, receiver, timeout=2.0):
    def main(transport):
        try:
            return (sender, receiver)[transport.rank](transport)
        except TransferError as error:
            return error

    return LoopbackGroup(2, timeout=timeout).run(main)


# Messages of a sender: 0 the frame, then the large ones, then the packed one, then the end.
@pytest.mark.parametrize(
    ("numel", "late", "stage", "done"),
    [
        (60_000, 0, "agree", 0),
        (60_000, 1, "payload", 0),
        (60_000, 2, "payload", 240_000),
        (60_000, 3, "payload", 480_000),
        (400_000, 1, "payload", 0),
        (400_000, 3, "payload", 3_200_000),
        (400_000, 4, "payload", 4_800_000),
    ],
)
def test_a_message_that_is_late(numel, late, stage, done):
    out = tree(numel).apply(torch.zeros_like)
    sent, got = both(
        lambda t: send(
            tree(numel), 1, transport=FaultyTransport(t, Fault(late, "delay", seconds=0.6))
        ),
        lambda t: recv(0, out=out, transport=t, timeout=0.3),
    )
    assert type(got) is TransferTimeout
    assert (got.peer, got.stage, got.bytes_done) == (0, stage, done)
    for text in ("rank 1 gave up", "with rank 0", f"({done} bytes of payload done)", "0.3 s"):
        assert text in str(got)
    assert all(x.eq(0).all() for x in out.values())
    assert isinstance(sent, TransferError) and sent.peer == 1 and "rank 0" in str(sent)


def test_a_lost_answer():
    sent, got = both(
        lambda t: send(tree(), 1, transport=t, timeout=0.2),
        lambda t: recv(0, transport=FaultyTransport(t, Fault(0, "drop")), timeout=0.5),
    )
    assert (sent.peer, sent.stage) == (1, "agree") and got.stage == "payload"


@pytest.mark.parametrize("error", [MemoryError("no"), RuntimeError("can't allocate memory")])
@pytest.mark.parametrize("into", [False, True])
def test_no_room_is_told_to_both(monkeypatch, error, into):
    def full(*args, **options):
        raise error

    monkeypatch.setattr(receive, "_IntoLanding" if into else "_NewLanding", full)
    out = tree().apply(torch.zeros_like) if into else None
    sent, got = both(
        lambda t: send(tree(), 1, transport=t), lambda t: recv(0, out=out, transport=t)
    )
    assert type(sent) is type(got) is StagingExhausted and str(sent) == str(got)
    assert "rank 1 has no room for" in str(got)
    assert out is None or all(x.eq(0).all() for x in out.values())


def test_a_silent_rank_of_a_collective():
    def main(transport):
        if transport.rank == 0:
            return None
        with pytest.raises(TransferTimeout) as caught:
            all_reduce(tree(), transport=transport)
        return caught.value.stage, str(caught.value)

    _, (stage, text) = LoopbackGroup(2, timeout=0.1).run(main)
    assert stage == "agree" and "rank 1" in text and "all_reduce" in text


class Pipe:
    """Both ends of a pipe in one event loop."""

    def __init__(self):
        self.held = asyncio.Queue()

    async def asend(self, td):
        await self.held.put(td.clone())

    async def arecv(self, td, *, device=None):
        got = await self.held.get()
        return got if device is None else got.to(device)


def test_pipes():
    async def main():
        pipe, td = Pipe(), tree()
        got, nothing = await asyncio.gather(TensorDict().arecv(pipe, device="meta"), td.asend(pipe))
        assert nothing is None and got["a"].is_meta
        assert sorted(got.keys()) == sorted(td.keys())

    asyncio.run(main())
