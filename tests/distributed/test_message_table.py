"""The table of the guide, row by row: what each form puts on the wire."""

import pytest
import torch

from tensordict import TensorDict
from tensordict.distributed import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    gather,
    gather_and_stack,
    isend,
    recv,
    reduce,
    reduce_scatter,
    scatter,
    send,
    sendrecv,
)
from tensordict.distributed.testing import CountingTransport, LoopbackGroup

N = 3


def small():
    """More than a frame holds, schema and leaves."""
    return TensorDict({f"a long key, number {i}": torch.ones(26) for i in range(300)})


def beside(numel):
    td = small()
    td["large"] = torch.ones(numel)
    td["larger"] = torch.ones(numel)
    return td


def counts(call, times=2):
    """For each time and rank: the messages sent, and the verbs of its collectives."""

    def main(transport):
        counting = CountingTransport(transport)
        out = []
        for _ in range(times):
            counting.reset()
            call(counting)
            verbs = [m.verb for m in counting.messages if m.tag == -1]
            out.append((counting.sent_messages, verbs))
        return out

    by_rank = LoopbackGroup(N, timeout=10).run(main)
    return [[rank[k] for rank in by_rank] for k in range(times)]


SENT = {
    "in the frame": (lambda: TensorDict({"a": torch.ones(3), "v": "x"}), {}, 1, 1, 1),
    "small": (small, {}, 3, 2, 1),
    "two large": (lambda: beside(60_000), {}, 5, 4, 1),
    "two large, above 2 MiB": (lambda: beside(300_000), {}, 6, 5, 2),
    "one message": (lambda: beside(60_000), {"pack_below": 1 << 60}, 3, 2, 1),
    "one message, above 2 MiB": (lambda: beside(300_000), {"pack_below": 1 << 60}, 4, 3, 2),
    "consolidated": (lambda: beside(60_000).consolidate(), {}, 3, 2, 1),
    "a list": (lambda: [small(), small()], {}, 3, 2, 1),
    "summed": (small, {"checksum": "sum64"}, 3, 2, 2),
}


@pytest.mark.parametrize("name", list(SENT))
@pytest.mark.parametrize("form", [send, isend])
def test_messages_of_send(name, form):
    make, options, first, known, answers = SENT[name]

    def call(transport):
        if transport.rank == 0:
            pending = form(make(), 1, transport=transport, **options)
            if pending is not None:
                pending.wait()
        elif transport.rank == 1:
            recv(0, transport=transport)

    cold, steady = counts(call)
    asked = cold[0][0] - known  # for the schema
    assert [cold[0][0], steady[0][0]] == [first, known]
    assert [cold[1][0], steady[1][0]] == [answers + asked, answers]


def per_pair(rank, senders, receivers):
    """How often a rank sends, and how often it answers, for pairs that exchange."""
    return (
        sum(receiver != rank for receiver in receivers) if rank in senders else 0,
        sum(sender != rank for sender in senders) if rank in receivers else 0,
    )


EACH = list(range(N))
PAIRS = {
    "gather": (lambda t: gather(small(), 0, transport=t), EACH, [0]),
    "gather_and_stack": (
        lambda t: gather_and_stack(
            small() if t.rank else small().expand(N - 1).clone(), 0, transport=t
        ),
        EACH,
        [0],
    ),
    "scatter": (
        lambda t: scatter([small()] * N if t.rank == 0 else None, 0, transport=t),
        [0],
        EACH,
    ),
    "all_to_all": (lambda t: all_to_all([small()] * N, transport=t), EACH, EACH),
    "sendrecv": (
        lambda t: sendrecv(small(), (t.rank + 1) % N, (t.rank - 1) % N, transport=t),
        None,
        None,
    ),
}


@pytest.mark.parametrize("name", list(PAIRS))
def test_messages_of_pairs(name):
    call, senders, receivers = PAIRS[name]
    _, steady = counts(call)
    for rank, (sent, verbs) in enumerate(steady):
        out, back = (1, 1) if senders is None else per_pair(rank, senders, receivers)
        assert sent == 2 * out + back and verbs == [], rank


COLLECTIVES = {
    "broadcast": (
        lambda t: broadcast(beside(60_000) if t.rank == 0 else None, 0, transport=t),
        # frame, schema, agreement, packed, two large
        ["broadcast", "broadcast", "all_gather", *["broadcast"] * 3],
    ),
    "broadcast in the frame": (
        lambda t: broadcast(TensorDict({"a": torch.ones(3)}), 0, transport=t),
        ["broadcast", "all_gather", "broadcast"],
    ),
    "all_gather": (
        lambda t: all_gather(beside(60_000), transport=t),
        ["all_gather"] * 4,
    ),
    "all_gather of 1 MiB": (
        lambda t: all_gather(beside(1 << 18), transport=t),
        ["all_gather", *["broadcast"] * 2 * N, "all_gather"],
    ),
    "all_reduce": (
        lambda t: all_reduce(beside(60_000), transport=t),
        ["all_gather", *["all_reduce"] * 3],
    ),
    "reduce": (
        lambda t: reduce(beside(60_000), 0, transport=t),
        ["all_gather", *["reduce"] * 3],
    ),
    "reduce_scatter": (
        lambda t: reduce_scatter([beside(60_000) for _ in range(N)], transport=t),
        ["all_gather", *["reduce"] * 3] * N,
    ),
}


@pytest.mark.parametrize("name", list(COLLECTIVES))
def test_messages_of_collectives(name):
    call, want = COLLECTIVES[name]
    for once in counts(call):
        assert once == [(0, want)] * N
