"""How many messages each form puts on the wire, and small things that need no process."""

import gc
import threading

import pytest
import torch

from tensordict import TensorDict
from tensordict.distributed import (
    Limits,
    Pending,
    all_gather,
    all_reduce,
    broadcast,
    irecv,
    isend,
    recv,
    send,
)
from tensordict.distributed.describe import describe
from tensordict.distributed.endpoint import Catalogue, StagePool
from tensordict.distributed.testing import (
    CountingTransport,
    Fault,
    FaultyTransport,
    LoopbackGroup,
)
from tensordict.errors import LossyCast, PeerLost, TransferTimeout, WireError
from tensordict.placement import CastPolicy


def small(n, numel=26, fill=1.0):
    return TensorDict({f"k{i}": torch.full((numel,), fill) for i in range(n)})


def exchange(td, times, into=False, **options):
    """Messages that each rank sends in each of several exchanges."""

    def main(transport):
        counting = CountingTransport(transport)
        out, counts = small_like(td), []
        for _ in range(times):
            counting.reset()
            if transport.rank == 0:
                send(td, 1, transport=counting, **options)
            else:
                got = recv(0, transport=counting, out=out if into else None)
                assert all(torch.equal(got[k], v) for k, v in td.items())
            counts.append(counting.sent_messages)
        return counts

    return LoopbackGroup(2).run(main)


def small_like(td):
    return TensorDict({k: torch.zeros_like(v) for k, v in td.items()})


@pytest.mark.parametrize(
    ("name", "td", "cold", "steady", "answers"),
    [
        ("everything in the first frame", small(3), 1, 1, [1, 1]),
        ("1,000 small leaves", small(1000, 256), 3, 2, [2, 1]),
        ("10,000 small leaves", small(10_000), 3, 2, [2, 1]),
    ],
)
def test_forward_messages_of_small_leaves(name, td, cold, steady, answers):
    forward, back = exchange(td, 3)
    assert forward == [cold, steady, steady], name
    assert back == [*answers, answers[-1]]


def test_a_receiver_that_has_the_structure_needs_no_schema():
    assert exchange(small(1000, 256), 2, into=True) == [[2, 2], [1, 1]]


def test_large_leaves_travel_alone_and_are_confirmed():
    td = small(100)
    for k in range(3):
        td[f"big{k}"] = torch.zeros(1 << 18)
    forward, back = exchange(td, 2, into=True)
    # frame, packed, three large ones, the byte that ends them; an answer before and after
    assert forward == [6, 6] and back == [2, 2]


def test_one_message_when_everything_is_packed():
    td = small(100)
    td["big"] = torch.zeros(1 << 17)
    forward, _ = exchange(td, 2, into=True, pack_below=1 << 60)
    assert forward == [2, 2]


def test_collectives_agree_by_one_small_message():
    def main(transport):
        counting = CountingTransport(transport)
        td = small(500)
        all_reduce(td, transport=counting)
        assert td["k0"].eq(2).all()
        reduced = [(m.verb, m.nbytes) for m in counting.messages]
        counting.reset()
        parts = all_gather(td, transport=counting)
        assert len(parts) == 2
        gathered = [m.verb for m in counting.messages]
        counting.reset()
        got = broadcast(td if transport.rank == 0 else None, 0, transport=counting)
        assert got["k1"].eq(2).all()
        return reduced, gathered, [m.verb for m in counting.messages]

    for reduced, gathered, spread in LoopbackGroup(2).run(main):
        assert reduced == [("all_gather", 64), ("all_reduce", 500 * 26 * 4)]
        assert gathered == ["all_gather", "all_gather"]
        assert spread == ["broadcast", "broadcast", "all_gather", "broadcast"]


def test_every_rank_broadcasts_its_large_leaves_to_all_gather_them():
    def main(transport):
        counting = CountingTransport(transport)
        td = small(50)
        td["big"] = torch.full((1 << 18,), float(transport.rank))
        parts = all_gather(td, transport=counting)
        assert [part["big"].unique().item() for part in parts] == [0, 1, 2]
        td["big"] += 1
        assert [part["big"].unique().item() for part in parts] == [0, 1, 2]
        return [m.verb for m in counting.messages]

    for verbs in LoopbackGroup(3).run(main):
        # the agreement, a broadcast from each rank, what is packed
        assert verbs == ["all_gather", *["broadcast"] * 3, "all_gather"]


def test_large_leaves_are_reduced_while_small_ones_are_packed():
    def main(transport):
        counting = CountingTransport(transport)
        td = small(50)
        td["big"] = torch.ones(1 << 17)
        td["ints"] = torch.ones(3, dtype=torch.int64)
        for _ in range(2):
            counting.reset()
            all_reduce(td, transport=counting)
        assert all(v.eq(4).all() for v in td.values())
        return [(m.verb, m.nbytes) for m in counting.messages]

    for messages in LoopbackGroup(2).run(main):
        assert messages == [
            ("all_gather", 64),
            ("all_reduce", 4 << 17),
            ("all_reduce", 24),
            ("all_reduce", 50 * 26 * 4),
        ]


@pytest.mark.parametrize("form", ["all_reduce", "into"])
def test_a_steady_exchange_starts_no_garbage_collection(form):
    rounds, collections = 5, []

    def main(transport):
        td = small(3000)

        def once():
            if form == "all_reduce":
                all_reduce(td, "max", transport=transport)
            elif transport.rank == 0:
                send(td, 1, transport=transport)
            else:
                recv(0, out=td, transport=transport)

        for _ in range(3):
            once()
        meet.wait()
        if transport.rank == 0:
            gc.collect()
            gc.callbacks.append(note)
        meet.wait()
        for _ in range(rounds):
            once()
        meet.wait()

    def note(phase, info):
        collections.append(phase)

    meet = threading.Barrier(2)
    try:
        LoopbackGroup(2, timeout=10).run(main)
    finally:
        gc.callbacks.remove(note)
    # One object that is tracked for each leaf would make 20 collections on each rank.
    assert collections.count("start") <= 3


def test_several_tensordicts_in_one_exchange():
    def main(transport):
        counting = CountingTransport(transport)
        tds = [small(2, fill=3.0), TensorDict({"s": "text"}, [4]), small(1).lock_()]
        if transport.rank == 0:
            for _ in range(2):
                send(tds, 1, transport=counting)
            return counting.sent_messages
        got = recv(0, transport=counting)
        assert [len(list(x.keys())) for x in got] == [2, 1, 1]
        assert got[1].batch_size == (4,) and got[1]["s"] == "text"
        assert [x.is_locked for x in got] == [False, False, True]
        out = [small(2), TensorDict({"s": "other"}, [4]), small(1).lock_()]
        assert recv(0, out=out, transport=counting)[0] is out[0]
        assert out[0]["k0"].eq(3).all() and out[1]["s"] == "text"
        return 2

    assert LoopbackGroup(2).run(main) == [2, 2]


def test_a_policy_casts_on_the_way():
    policy = CastPolicy({"norm": None}, default="bf16")

    def main(transport):
        td = TensorDict({"w": torch.full((4,), 1.5), "norm": torch.ones(2)})
        if transport.rank == 0:
            send(td, 1, transport=transport, policy=policy)
            lossy = CastPolicy((), default="fp16", on_lossy="error", check="full")
            with pytest.raises(LossyCast):
                send(TensorDict({"w": torch.tensor([1e9])}), 1, transport=transport, policy=lossy)
            return None
        got = recv(0, transport=transport)
        assert got["w"].dtype is torch.bfloat16 and got["norm"].dtype is torch.float32
        with pytest.raises(LossyCast):
            recv(0, transport=transport)
        return None

    LoopbackGroup(2).run(main)


def test_the_receiver_decides_how_much_it_takes():
    def main(transport):
        td = small(1000)
        with pytest.raises(WireError, match="above the limit of 1000"):
            if transport.rank == 0:
                send(td, 1, transport=transport)
            else:
                recv(0, transport=transport, limits=Limits(max_payload_nbytes=1000))

    LoopbackGroup(2).run(main)


def test_handles_say_when_they_are_done():
    def main(transport):
        if transport.rank == 0:
            pending = isend(small(3), 1, transport=transport)
            assert not pending.done() and "under way" in repr(pending)
            with pytest.raises(TransferTimeout, match="still under way"):
                pending.wait(0.05)
            gate.set()
            assert pending.wait() is None and pending.done() and "done" in repr(pending)
            return None
        gate.wait(5)
        return irecv(0, transport=transport).wait()["k0"].tolist()

    gate = threading.Event()
    assert LoopbackGroup(2).run(main)[1] == [1.0] * 26


def test_a_handle_is_awaitable_and_keeps_its_error():
    import asyncio

    async def main():
        assert await Pending(lambda: 5, "five") == 5
        failing = Pending(lambda: 1 / 0, "division")
        with pytest.raises(ZeroDivisionError):
            await failing
        assert isinstance(failing.exception(), ZeroDivisionError) and "failed" in repr(failing)
        seen = []
        failing.add_done_callback(seen.append)
        assert seen == [failing]

    asyncio.run(main())


def test_a_dropped_frame_is_a_timeout_and_a_lost_rank_is_named():
    group = LoopbackGroup(2, timeout=0.1)

    def main(transport):
        if transport.rank == 0:
            transport = FaultyTransport(transport, Fault(at=0, kind="drop"))
        out = small(3, fill=0.0)
        with pytest.raises((TransferTimeout, PeerLost)) as caught:
            if transport.rank == 0:
                send(small(3), 1, transport=transport)
            else:
                recv(0, out=out, transport=transport)
        assert caught.value.stage == "agree" and out["k0"].eq(0).all()

    group.run(main)
    other = LoopbackGroup(2, timeout=5)
    other.lose(1)
    with pytest.raises(PeerLost, match="rank 0 lost rank 1"):
        send(small(1), 1, transport=other.transport(0))


def test_atomic_receives_write_nothing_before_everything_is_there():
    td = TensorDict({"a": torch.ones(200_000), "b": torch.full((200_000,), 2.0)})

    def main(transport):
        if transport.rank == 0:
            faulty = FaultyTransport(transport, Fault(at=2, kind="drop"))  # frame, a, b
            with pytest.raises(PeerLost, match="rank 1 gave up"):
                send(td, 1, transport=faulty, timeout=20, checksum="sum64")
            return None
        out = small_like(td)
        with pytest.raises(TransferTimeout):
            recv(0, out=out, transport=transport, timeout=0.2)
        assert out["a"].eq(0).all() and out["b"].eq(0).all()
        return None

    LoopbackGroup(2).run(main)


def test_in_place_receives_use_the_memory_of_the_leaves():
    td = TensorDict({"a": torch.ones(200_000), "t": torch.arange(90_000.0).view(300, 300).t()})

    def main(transport):
        if transport.rank == 0:
            send(td, 1, transport=transport)
            return None
        out = TensorDict({"a": torch.zeros(200_000), "t": torch.zeros(300, 300).t()})
        a, t = out["a"], out["t"]
        recv(0, out=out, transport=transport, atomic=False)
        assert out["a"] is a and a.eq(1).all() and out["t"] is t and torch.equal(t, td["t"])
        return None

    LoopbackGroup(2).run(main)


def test_what_changed_since_the_last_time_is_seen():
    x = torch.arange(4.0).view(2, 2)
    changes = [
        lambda td: None,
        lambda td: td.set("b", td["a"].t()),  # the same address and shape, another reading
        lambda td: td.set("b", td["a"]),
        lambda td: td["c"].requires_grad_(),
        lambda td: td.set("c", td["c"].detach().to(torch.int32)),
        lambda td: setattr(td, "names", ["n"]),
        lambda td: td.set("c", torch.ones(2, 3)[:, ::2]),
        lambda td: td.lock_(),
    ]

    def main(transport):
        td = TensorDict({"a": x, "b": x, "c": torch.zeros(2)}, [2])
        for change in changes:
            if transport.rank == 0:
                change(td)
                send(td, 1, transport=transport)
                send(td, 1, transport=transport)
                leaves = {k: (v.detach().clone(), v.requires_grad) for k, v in td.items()}
                want.append((leaves, td.names, td.is_locked))
                ready.release()
                continue
            got = [recv(0, transport=transport) for _ in range(2)]
            ready.acquire()
            leaves, names, locked = want[-1]
            for out in got:
                assert out.names == names and out.is_locked == locked
                for key, (value, grad) in leaves.items():
                    assert torch.equal(out[key], value) and out[key].dtype == value.dtype
                    assert out[key].requires_grad == grad

    want, ready = [], threading.Semaphore(0)
    LoopbackGroup(2, timeout=10).run(main)


def test_kept_buffers_are_bounded_and_used_again():
    pool = StagePool(300_000)
    entries = [Catalogue().of(describe(small(n, 1000)).schema) for n in (10, 20, 30)]
    stages = [pool.take(entry) for entry in entries]
    for entry, stage in zip(entries, stages):
        pool.keep(entry, stage)
    assert pool.nbytes <= 300_000 and [len(e.stages) for e in entries] == [1, 1, 1]
    large = Catalogue().of(describe(small(60, 1000)).schema)
    pool.keep(large, pool.take(large))
    assert pool.nbytes <= 300_000
    assert [len(e.stages) for e in (*entries, large)] == [0, 0, 0, 1]
    again = pool.take(large)
    assert pool.nbytes == 0 and again.packing is large.packing
    huge = Catalogue().of(describe(small(90, 1000)).schema)
    pool.keep(huge, pool.take(huge))
    assert pool.nbytes == 0 and not huge.stages
