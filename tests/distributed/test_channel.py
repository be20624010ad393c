"""Numbered publications from one rank to another."""

import threading

import pytest
import torch

from tensordict import TensorDict, lazy_stack
from tensordict.distributed import Channel, Limits, recv, send
from tensordict.distributed.link import Agreed, Request
from tensordict.distributed.testing import CountingTransport, LoopbackGroup
from tensordict.errors import (
    ChannelClosed,
    LossyCast,
    TransferError,
    TransferTimeout,
    UnsupportedLeaf,
    WireError,
)
from tensordict.placement import CastPolicy
from tensordict.storage.values import register_value


def weights(i, n=3):
    return TensorDict(
        {"w": torch.full((n,), float(i)), "n": {"b": torch.arange(4) + i}, "step": f"step {i}"}
    )


def ends(publisher, receiver, n=2):
    """What the two ends of a channel do; both are told when the other is through with a stage."""
    stages = threading.Barrier(2, timeout=20)

    def main(transport):
        return (publisher, receiver)[transport.rank](transport, stages.wait)

    return LoopbackGroup(n).run(main)


def test_each_publication_arrives_with_its_number():
    def publisher(transport, step):
        with Channel(0, 1, transport=transport) as channel:
            for i in (1, 2, 7):
                assert channel.publish(weights(i), version=i) == i == channel.version
                step()
            with pytest.raises(ValueError, match="at version 7 already"):
                channel.publish(weights(0), version=7)
            with pytest.raises(TransferError, match="not the end"):
                channel.recv()

    def receiver(transport, step):
        channel = Channel(0, 1, transport=transport)
        for i in (1, 2, 7):
            got = channel.recv()
            assert channel.version == i and got["step"] == f"step {i}"
            assert torch.equal(got["w"], weights(i)["w"]) and torch.equal(
                got["n", "b"], weights(i)["n", "b"]
            )
            step()
        with pytest.raises(ValueError, match="version 7 was taken already"):
            channel.recv(version=7)
        with pytest.raises(TransferError, match="not the start"):
            channel.publish(weights(1))
        with pytest.raises(ChannelClosed, match="was closed"):
            channel.recv()

    ends(publisher, receiver)


def test_the_newest_wins_and_nothing_waits_for_the_receiver():
    def publisher(transport, step):
        with Channel(0, 1, transport=transport) as channel:
            for i in range(20):
                channel.publish(weights(i))
            step()
            step()
            channel.publish(weights(99))

    def receiver(transport, step):
        channel = Channel(0, 1, transport=transport)
        step()
        assert channel.recv(version=20)["w"][0] == 19 and channel.latest() is None
        with pytest.raises(TransferTimeout, match="no version 21"):
            channel.recv(version=21, timeout=0.05)
        step()
        assert channel.recv(timeout=10)["w"][0] == 99 and channel.version == 21
        with pytest.raises(ChannelClosed):
            channel.recv(timeout=10)
        with pytest.raises(ChannelClosed):
            channel.latest()

    ends(publisher, receiver)


def test_a_known_structure_is_one_frame_without_schema_and_answer():
    def publisher(transport, step):
        counting = CountingTransport(transport)
        channel = Channel(0, 1, transport=counting)
        counts = []
        for td in (
            weights(1),
            weights(2),
            weights(3),
            weights(4, n=5),
            weights(5, n=5),
            weights(6),
        ):
            counting.reset()
            channel.publish(td)
            counts.append((counting.sent_messages, counting.sent_nbytes))
        step()
        channel.close()
        channel.close()
        return counts

    def receiver(transport, step):
        counting = CountingTransport(transport)
        channel = Channel(0, 1, transport=counting)
        step()
        assert channel.recv(version=6)["w"].tolist() == [6, 6, 6]
        return counting.sent_messages

    counts, answers = ends(publisher, receiver)
    assert answers == 2  # one for each structure
    assert [messages for messages, _ in counts] == [1] * 6


def test_large_payloads_without_schema_in_the_frame():
    names = [f"a_rather_long_name_of_a_leaf_{i}" for i in range(400)]

    def publisher(transport, step):
        counting = CountingTransport(transport)
        counts = []
        with Channel(0, 1, transport=counting) as channel:
            for i in range(3):
                counting.reset()
                big = TensorDict(
                    {"big": torch.full((800_000,), i), **{k: torch.full((9,), i) for k in names}}
                )
                channel.publish(big)
                counts.append(
                    (counting.sent_messages, counting.sent_nbytes - 8 * 800_000 - 400 * 72)
                )
        return counts

    def receiver(transport, step):
        got = Channel(0, 1, transport=transport).recv(version=3)
        assert (got["big"] == 2).all() and (got[names[-1]] == 2).all()

    counts, _ = ends(publisher, receiver)
    assert [n for n, _ in counts] == [5, 4, 4]  # frame, (schema), large, packed, end
    assert counts[1][1] < 5000 < counts[0][1]


def test_structures_are_forgotten_on_both_ends_alike():
    def publisher(transport, step):
        with Channel(0, 1, transport=transport) as channel:
            for _turn in range(2):
                for n in range(1, 20):
                    channel.publish(weights(n, n=n))
            step()

    def receiver(transport, step):
        channel = Channel(0, 1, transport=transport)
        for i in range(100):  # another exchange fills the catalogue with other structures
            send(
                TensorDict({f"k{i}": torch.zeros(1)}),
                0,
                transport=transport,
                init_tag=5,
                strict=False,
            )
        step()
        return channel.recv(version=38)["w"].tolist()

    def drain(transport, step):
        thread = threading.Thread(
            target=lambda: [recv(1, transport=transport, init_tag=5) for _ in range(100)]
        )
        thread.start()
        publisher(transport, step)
        thread.join()

    assert ends(drain, receiver)[1] == [19.0] * 19


def test_an_error_of_one_publication_is_heard_once_on_both_ends():
    policy = CastPolicy(default="fp16", on_lossy="error", check="full")

    def publisher(transport, step):
        channel = Channel(0, 1, transport=transport, policy=policy)
        channel.publish(weights(1))
        step()
        with pytest.raises(LossyCast):
            channel.publish(weights(1e9))
        step()
        with pytest.raises(UnsupportedLeaf):
            channel.publish(weights(1).set("o", object()))
        step()
        assert channel.publish(weights(2)) == 2
        step()
        channel.close()
        with pytest.raises(ChannelClosed):
            channel.publish(weights(3))

    def receiver(transport, step):
        channel = Channel(0, 1, transport=transport)
        assert channel.recv()["w"].dtype is torch.float16
        step()
        with pytest.raises(LossyCast):
            channel.recv()
        step()
        with pytest.raises(UnsupportedLeaf):
            channel.recv()
        step()
        assert channel.recv()["w"].tolist() == [2, 2, 2]
        step()
        assert list(channel) == []

    ends(publisher, receiver)


def test_iteration_other_ranks_devices_and_stacks():
    def main(transport):
        channel = Channel(1, 2, transport=transport, device="meta" if transport.rank == 2 else None)
        if transport.rank == 0:
            assert channel.version == 0 and channel.close() is None
            return None
        if transport.rank == 1:
            for n in (1, 2):
                channel.publish(lazy_stack([TensorDict({"x": torch.ones(k)}) for k in (n, 3)]))
            channel.close()
            return None
        seen = list(channel)
        assert 1 <= len(seen) <= 2 and all(td[0]["x"].is_meta for td in seen)
        return channel.version

    assert LoopbackGroup(3).run(main)[2] == 2


def test_a_schema_that_was_not_agreed_on_is_refused():
    """A peer that leaves out a schema that this end does not know."""
    td = weights(1)

    def main(transport):
        if transport.rank == 0:
            channel = Channel(0, 1, transport=transport)
            assert isinstance(channel._request, Request)
            entry = channel._request.endpoint.describe(td, pack_below=channel._request.pack_below)[
                1
            ]
            channel._request.agreed.add(entry)
            return channel.publish(td)
        with pytest.raises(ValueError, match="not agreed on"):
            Channel(0, 1, transport=transport, limits=Limits()).recv(timeout=20)
        return None

    LoopbackGroup(2).run(main)
    assert Agreed().find(b"") is None


class Unreadable:
    """A value of a class that the receiver does not know."""


def test_a_value_that_cannot_be_read_is_an_error_of_one_publication():
    def decode(form):
        raise ValueError("not here")

    register_value(Unreadable, "tests.unreadable", lambda value: None, decode)
    x = torch.zeros(2)

    def main(transport):
        with Channel(0, 1, transport=transport, timeout=10) as channel:
            for k, value in enumerate((Unreadable(), "fine", Unreadable(), "well")):
                td = TensorDict({"x": x, "value": value})
                if transport.rank == 0:
                    channel.publish(td)
                elif type(value) is str:
                    assert channel.recv(version=k + 1)["value"] == value
                else:
                    with pytest.raises(WireError, match="not here"):
                        channel.recv(version=k + 1)
                meeting.wait(10)
        return True

    meeting = threading.Barrier(2)
    assert LoopbackGroup(2, timeout=10).run(main) == [True, True]
