"""Channels that are connected anew, and what a receiver notices of a publisher that is gone."""

import threading
import time

import pytest
import torch

from tensordict import TensorDict
from tensordict.distributed import (
    Channel,
    Pending,
    StagedTransport,
    asleep,
    channel,
    irecv,
    isend,
    recv,
)
from tensordict.distributed.testing import CountingTransport, Fault, FaultyTransport, LoopbackGroup
from tensordict.errors import ChannelClosed, PeerLost, TransferError, TransferTimeout

from .test_staged import Device, LikeNccl


def weights(i, n=3):
    return TensorDict({"w": torch.full((n,), float(i)), "step": f"step {i}"})


def ends(publisher, receiver):
    """What the two ends of a channel do; each gets what waits for the other."""
    stages = threading.Barrier(2, timeout=20)

    def main(transport):
        return (publisher, receiver)[transport.rank](transport, stages.wait)

    return LoopbackGroup(2).run(main)


def test_a_publication_that_timed_out_and_those_after_it():
    def publisher(transport, step):
        with Channel(0, 1, transport=transport) as out:
            faulty = FaultyTransport(transport, Fault(at=1, kind="drop"))
            out._request = out._first = channel.replace(out._first, transport=faulty)
            out.publish(weights(1))
            with pytest.raises(TransferTimeout):
                out._timeout, out._request = 20, channel.replace(out._request, timeout=0.2)
                out.publish(weights(2, n=5))  # another structure: its frame is lost
            assert out.version == 2
            with pytest.raises(PeerLost, match=r"rank 0 gave up a message.*Channel\.reset on both"):
                out.publish(weights(3))
            version = out.version
            step()
            out.reset()
            assert out.publish(weights(version + 1)) == version + 1
            return version

    def receiver(transport, step):
        into = Channel(0, 1, transport=transport, timeout=20)
        step()
        # What has arrived is taken first, then the error is heard, as often as it is asked for.
        assert into.recv()["step"] == "step 1"
        for _ in range(2):
            with pytest.raises(PeerLost, match="rank 0 gave up"):
                into.recv()
        into.reset()
        got = into.recv()
        assert got["step"] == f"step {into.version}"
        with pytest.raises(ChannelClosed):
            into.recv()
        return into.version - 1

    assert ends(publisher, receiver) == [3, 3]


def test_a_reset_that_one_end_calls_leaves_all_as_it_was():
    def publisher(transport, step):
        out = Channel(0, 1, transport=transport)
        out.publish(weights(1))
        with pytest.raises(
            TransferTimeout, match=r"Cannot reset the channel from rank 0 to rank 1"
        ):
            out.reset(timeout=0.1)
        out.publish(weights(2))
        step()
        step()
        for _ in range(2):
            out.reset(timeout=20)
        out.publish(weights(3))
        out.close()

    def receiver(transport, step):
        into = Channel(0, 1, transport=transport)
        step()
        with pytest.raises(TransferTimeout) as caught:
            into.reset(timeout=0.1)
        assert caught.value.peer == 0 and caught.value.stage == "connect"
        assert into.recv(version=2, timeout=20)["step"] == "step 2"
        step()
        for _ in range(2):
            into.reset(timeout=20)
        assert into.recv(version=3, timeout=20)["step"] == "step 3"
        with pytest.raises(ChannelClosed):
            into.recv(timeout=20)
        with pytest.raises(ChannelClosed, match="Cannot reset"):
            into.reset()

    ends(publisher, receiver)


def test_a_publication_that_nobody_has_taken_outlives_a_reset():
    def publisher(transport, step):
        out = Channel(0, 1, transport=transport)
        out.publish(weights(1))
        out.reset(timeout=20)
        step()
        assert out.publish(weights(2)) == 2

    def receiver(transport, step):
        into = Channel(0, 1, transport=transport)
        into.reset(timeout=20)
        assert into.recv(timeout=20)["step"] == "step 1"
        step()
        assert into.recv(timeout=20)["step"] == "step 2" and into.version == 2

    ends(publisher, receiver)


def test_structures_are_agreed_on_anew_by_a_transport_of_the_same_kind():
    def publisher(transport, step):
        counting = CountingTransport(transport)
        out = Channel(0, 1, transport=counting)
        out.publish(weights(1))
        out.reset(timeout=20)
        counting.reset()
        out.publish(weights(2))
        answers = sum(message.verb == "recv" for message in counting.messages)
        out.publish(weights(3))
        return answers, sum(message.verb == "recv" for message in counting.messages)

    def receiver(transport, step):
        into = Channel(0, 1, transport=transport)
        into.reset(timeout=20)
        assert into.recv(version=3, timeout=20)["step"] == "step 3"

    assert ends(publisher, receiver)[0] == (1, 1)


def test_a_reset_waits_for_a_publication_that_is_under_way():
    group = LoopbackGroup(2)
    out = Channel(0, 1, transport=group.transport(0))
    heard = []

    def publish():
        try:
            out.publish(weights(1))
        except PeerLost as error:
            heard.append(error)

    thread = threading.Thread(target=publish)
    thread.start()
    while not out._turn.locked():
        time.sleep(0.001)
    with pytest.raises(TransferTimeout, match="a publication is still under way"):
        out.reset(timeout=0.05)
    with pytest.raises(TransferError, match="an earlier publication"):
        out.publish(weights(2))
    group.lose(1)
    thread.join()
    with pytest.raises(PeerLost, match="rank 1 is gone"):
        out.reset(timeout=20)
    assert out.version == 1 and len(heard) == 1


def test_ranks_that_are_no_ends_and_transports_that_cannot_connect():
    group = LoopbackGroup(3)
    assert Channel(0, 1, transport=group.transport(2)).reset() is None

    class Plain:
        def __init__(self, inner):
            self.rank, self.size, self.capabilities = inner.rank, inner.size, inner.capabilities
            self.lost, self.name_of, self.isend = inner.lost, inner.name_of, inner.isend

    with pytest.raises(TransferError, match="Plain has no method reconnect"):
        Channel(0, 1, transport=Plain(group.transport(0))).reset(timeout=1)


def test_an_error_in_the_block_is_not_hidden_by_the_end_of_the_channel():
    group = LoopbackGroup(2)
    with (
        pytest.raises(TransferTimeout),
        Channel(0, 1, transport=group.transport(0), timeout=0.05) as out,
    ):
        out.publish(weights(1))
    with pytest.raises(PeerLost, match="rank 0 gave up"):
        recv(0, transport=group.transport(1))


class Sided(LikeNccl):
    """Device memory, with a side channel of the host over which two ranks connect anew."""

    def reconnect(self, peer, key, timeout=None):
        return self.inner.reconnect(peer, key, timeout)


def test_a_channel_over_device_memory_goes_on_over_the_host():
    def main(transport):
        device = Device()
        inner = Sided(transport, device)
        staged = StagedTransport(
            inner, torch.device("cuda", 0), to_device=device.to_device, is_there=device.is_there
        )
        end = Channel(0, 1, transport=staged, timeout=20)
        for i in (1, 2):
            if transport.rank == 0:
                end.publish(weights(i, n=100_000))
            else:
                got = end.recv(version=i)
                assert got["w"].eq(i).all() and got["step"] == f"step {i}"
            counts.append(sum(not m.control for m in inner.messages))
            end.reset()

    counts = []
    LoopbackGroup(2).run(main)
    assert counts == [2] * 4  # large and packed; none after the reset


class _Held:
    """A message of which the rest never comes, and whose waiter nobody wakes."""

    def wait(self, timeout=None):
        threading.Event().wait(timeout)
        raise TransferTimeout("in vain")


class Holding(CountingTransport):
    """Holds back the rest of a payload, as a transport that leaves its waiters asleep."""

    def __init__(self, inner, nth=1):
        super().__init__(inner)
        self.nth = nth

    def _held(self, work, verb, control):
        payloads = sum(not m.control and m.verb == verb for m in self.messages)
        return _Held() if not control and payloads == self.nth else work

    def irecv(self, tensor, src, tag, *, control=False):
        return self._held(super().irecv(tensor, src, tag, control=control), "recv", control)

    def isend(self, tensor, dst, tag, *, control=False):
        return self._held(super().isend(tensor, dst, tag, control=control), "send", control)


def test_a_publisher_that_dies_within_a_message_is_noticed(monkeypatch):
    monkeypatch.setattr(asleep, "GRACE_S", 0.1)
    group = LoopbackGroup(2)
    stages = threading.Barrier(2, timeout=20)

    def main(transport):
        if transport.rank == 0:
            out = Channel(0, 1, transport=transport)
            out.publish(weights(1, n=5_000))
            stages.wait()
            out.publish(weights(2, n=5_000))
            group.lose(0)
            return None
        into = Channel(0, 1, transport=Holding(transport, nth=2), timeout=20)
        assert into.recv()["step"] == "step 1"
        stages.wait()
        begun = time.monotonic()
        for _ in range(2):
            with pytest.raises(PeerLost, match="rank 1 lost rank 0 within a message: is gone"):
                into.recv()
        with pytest.raises(PeerLost):
            into.latest()
        assert into._listener.is_alive()  # nobody wakes it
        return time.monotonic() - begun

    assert group.run(main)[1] < 10


@pytest.mark.parametrize("victim", [0, 1])
def test_a_peer_that_dies_within_a_message_is_noticed_by_who_waits_for_a_handle(
    monkeypatch, victim
):
    monkeypatch.setattr(asleep, "GRACE_S", 0.1)
    group = LoopbackGroup(2)
    td = weights(1, n=5_000)

    def main(transport):
        if transport.rank == victim:
            other = (
                isend(td, 1, transport=transport) if victim == 0 else irecv(0, transport=transport)
            )
            other.wait(20)
            group.lose(victim)
            return
        held = Holding(transport)
        pending = irecv(0, transport=held) if victim == 0 else isend(td, 1, transport=held)
        heard = []
        pending.add_done_callback(heard.append)
        with pytest.raises(PeerLost, match=f"rank {1 - victim} lost rank {victim}"):
            pending.wait(20)
        assert heard == [pending] and isinstance(pending.exception(), PeerLost)
        assert pending.done() and pending._thread.is_alive()

    group.run(main)


def test_a_thread_that_works_on_what_has_arrived_is_not_called_asleep(monkeypatch):
    monkeypatch.setattr(asleep, "GRACE_S", 0.01)
    go_on = threading.Event()
    looks = []

    def loss():
        looks.append(1)
        if len(looks) == 2:
            go_on.set()
        return PeerLost("gone")

    def run():
        go_on.wait(20)
        return 5

    assert Pending(run, "work", loss=loss).wait(20) == 5
    assert len(looks) == 2
    waits = Pending(
        lambda: asleep.waiting(run_forever.wait, 20), "wait", loss=lambda: PeerLost("x")
    )
    with pytest.raises(TransferTimeout, match="still under way"):
        waits.wait(0.01)
    with pytest.raises(PeerLost):
        waits.wait(20)
    run_forever.set()


run_forever = threading.Event()
