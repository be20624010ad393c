"""Channels that are connected anew, between real gloo ranks."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tensordict import TensorDict
from tensordict.distributed import Channel, recv, send
from tensordict.distributed.testing import run_ranks
from tensordict.errors import ChannelClosed, PeerLost, TransferError, TransferTimeout

pytestmark = pytest.mark.ranks


def weights(i, n=1_000):
    return TensorDict({"w": torch.full((n,), float(i)), "at": f"step {i}"})


def large(i):
    return weights(i, 800_000)


def is_soon(begun, limit=2.0):
    assert time.monotonic() - begun < limit


def goes_on(channel, version, make=weights):
    """Two publications after a reset, the first of which is agreed on anew."""
    if channel._publishes:
        assert [channel.publish(make(i)) for i in (version, version + 1)][-1] == channel.version
        return
    while channel.version <= version:
        got = channel.recv(version=max(version, channel.version + 1), timeout=20)
        assert got["at"] == f"step {channel.version}" and (got["w"] == channel.version).all()


def cut(group=None):
    """Give up a message that nobody sends: gloo closes the connections of this rank."""
    with pytest.raises(TransferTimeout):
        recv(0 if dist.get_rank() else 1, init_tag=77, timeout=0.1, group=group)


def _who_gives_up(rank, size, who):
    channel = Channel(0, 1, timeout=20)
    goes_on(channel, 1)
    other = dist.new_group([0, 1])
    dist.barrier(group=other)
    if rank == who:
        cut()
    begun = time.monotonic()
    if rank == 0:
        with pytest.raises(PeerLost, match=r"Channel\.reset"):
            for _ in range(50):  # the other end may just be giving up
                channel.publish(weights(3))
                time.sleep(0.02)
        version = channel.version
    else:
        with pytest.raises(PeerLost):
            while True:
                channel.recv(timeout=5)
        version = 0
    is_soon(begun)
    version = int(_share(version, other))
    channel.reset(timeout=20)
    goes_on(channel, version + 1)
    with pytest.raises(PeerLost):  # the group itself stays cut
        send(weights(1), 1 - rank)
    dist.barrier(group=other)
    channel.close()
    if rank == 1:
        with pytest.raises(ChannelClosed):
            channel.recv(timeout=20)
        with pytest.raises(ChannelClosed, match="is closed"):
            channel.reset(timeout=1)
    else:
        with pytest.raises(ChannelClosed, match="is closed"):
            channel.reset(timeout=1)
    return True


def _share(number, group):
    told = torch.tensor([float(number)])
    dist.all_reduce(told, group=group)
    return told.item()


@pytest.mark.parametrize("who", [0, 1])
def test_a_channel_goes_on_after_either_end_gave_up(who):
    assert run_ranks(_who_gives_up, 2, who, reuse=False, timeout=60) == [True, True]


def _late_receiver(rank, size):
    other = dist.new_group([0, 1])
    if rank == 0:
        channel = Channel(0, 1, timeout=0.3)
        with pytest.raises(TransferTimeout):
            channel.publish(weights(1))
        assert channel.version == 1  # it may have arrived: the number is not used again
        dist.barrier(group=other)
    else:
        dist.barrier(group=other)
        channel = Channel(0, 1)
        begun = time.monotonic()
        with pytest.raises(PeerLost):
            channel.recv(timeout=10)
        is_soon(begun)
    for turn in range(3):
        channel.reset(timeout=20)
        goes_on(channel, 2 + 2 * turn, (weights, large)[turn % 2])
    return channel.version


def test_a_receiver_that_comes_late_and_resets_again_and_again():
    assert run_ranks(_late_receiver, 2, reuse=False, timeout=60) == [7, 7]


def _twice_cut(rank, size):
    """The channel's own connections are cut by a timeout as well, and are made anew."""
    channel = Channel(0, 1, timeout=20)
    for turn in range(2):
        goes_on(channel, 1 + 3 * turn, large)
        if rank == 0:
            with pytest.raises(TransferTimeout):
                recv(1, transport=channel._request.transport, init_tag=7, timeout=0.1)
            with pytest.raises(PeerLost, match="rank 0 gave up waiting for rank 1 on tag 7"):
                channel.publish(weights(3))
        channel.reset(timeout=20)
    goes_on(channel, 7)
    return True


def test_connections_of_the_channel_itself_are_given_up():
    assert run_ranks(_twice_cut, 2, reuse=False, timeout=60) == [True, True]


def _one_end_only(rank, size, who):
    """A reset that the other end does not call leaves the channel as it was."""
    channel = Channel(0, 1, timeout=20)
    goes_on(channel, 1)
    if rank == who:
        begun = time.monotonic()
        with pytest.raises(TransferTimeout, match="has not called it") as caught:
            channel.reset(timeout=0.5)
        assert caught.value.stage == "connect" and caught.value.peer == 1 - rank
        is_soon(begun)
    dist.barrier()
    goes_on(channel, 3)
    dist.barrier()
    # The attempt that came to nothing is not taken for one of the next.
    if rank != who:
        time.sleep(0.2)
    channel.reset(timeout=20)
    goes_on(channel, 5)
    return True


@pytest.mark.parametrize("who", [0, 1])
def test_a_reset_by_one_end_alone(who):
    assert run_ranks(_one_end_only, 2, who, reuse=False, timeout=60) == [True, True]


def _pending(rank, size):
    """What has arrived and was not taken is there after a reset, and numbers go on."""
    channel = Channel(0, 1, timeout=20)
    if rank == 0:
        channel.publish(weights(1))
        channel.publish(large(2))
    channel.reset(timeout=20)
    if rank == 1:
        assert channel.recv(version=2, timeout=20)["at"] == "step 2"
    dist.barrier()
    goes_on(channel, 3)
    return True


def test_publications_that_were_not_taken_are_kept():
    assert run_ranks(_pending, 2, reuse=False, timeout=60) == [True, True]


def _dead(rank, size, who):
    channel = Channel(0, 1, timeout=20)
    goes_on(channel, 1)
    dist.barrier()
    if rank == who:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(TransferError):
        channel.publish(weights(3)) if rank == 0 else channel.recv(timeout=20)
        time.sleep(0.3)
        channel.publish(weights(4))
    begun = time.monotonic()
    for _ in range(2):
        with pytest.raises((TransferTimeout, PeerLost), match="Cannot reset the channel"):
            channel.reset(timeout=0.5)
    is_soon(begun, 3)
    return True


@pytest.mark.parametrize("who", [0, 1])
def test_a_reset_with_a_dead_peer_ends_in_time(who):
    assert run_ranks(_dead, 2, who, may_die=[who], timeout=30)[1 - who]


def _groups(rank, size, kind):
    """Ranks 1 and 3 of four; the others take no part."""
    if kind == "sub-group":
        group = dist.new_group([3, 1, 0])
    else:
        group = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["dp"]
    other = dist.new_group([0, 1, 2, 3])
    if kind == "sub-group" and rank == 2:
        dist.barrier(group=other)
        return True
    here = rank in (1, 3) or kind == "sub-group"
    if not here:
        dist.barrier(group=other)
        return True
    channel = Channel(3, 1, group=group, timeout=20)
    if rank in (1, 3):
        goes_on(channel, 1)
    if rank == 3:
        with pytest.raises(TransferTimeout):
            recv(1, init_tag=7, timeout=0.1, group=group)
    channel.reset(timeout=20)
    if rank in (1, 3):
        goes_on(channel, 3)
        assert "rank 3" in channel._name and "rank 1" in channel._name
        transport = channel._request.transport
        with pytest.raises(TransferError, match="alone"):
            transport.isend(torch.zeros(1), transport.rank, 0)
        with pytest.raises(TransferError, match="collective"):
            transport.all_reduce(torch.zeros(1), dist.ReduceOp.SUM)
    dist.barrier(group=other)
    return True


@pytest.mark.parametrize("kind", ["sub-group", "mesh axis"])
def test_channels_over_a_part_of_the_world(kind):
    assert run_ranks(_groups, 4, kind, reuse=False, timeout=60) == [True] * 4


def _two_channels(rank, size):
    """Two of one pair, reset at the same time by a thread each."""
    out, back = Channel(0, 1, init_tag=1, timeout=20), Channel(1, 0, init_tag=2, timeout=20)
    goes_on(out, 1)
    goes_on(back, 1)
    threads = [threading.Thread(target=channel.reset, args=(20,)) for channel in (out, back)]
    for thread in threads if rank == 0 else threads[::-1]:
        thread.start()
    for thread in threads:
        thread.join()
    goes_on(out, 3)
    goes_on(back, 3)
    return True


def test_two_channels_are_reset_at_once():
    assert run_ranks(_two_channels, 2, reuse=False, timeout=60) == [True, True]


def n_connections():
    return sum(
        os.readlink(f"/proc/self/fd/{fd}").startswith("socket")
        for fd in os.listdir("/proc/self/fd")
        if os.path.islink(f"/proc/self/fd/{fd}")
    )


def _lifetime(rank, size):
    """Connections of earlier resets are closed, and all of them at the end."""
    channel = Channel(0, 1, timeout=20)
    goes_on(channel, 1)
    before, counts = n_connections(), []
    for i in range(4):
        channel.reset(timeout=20)
        goes_on(channel, 3 + 2 * i)
        counts.append(n_connections())
    dist.barrier()
    channel.close()
    if rank == 1:
        with pytest.raises(ChannelClosed):
            channel.recv(timeout=20)
        channel._listener.join(5)
    after = n_connections()
    return before, counts, after


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts sockets by /proc")
def test_the_connections_of_a_channel_end_with_it():
    for before, counts, after in run_ranks(_lifetime, 2, reuse=False, timeout=60):
        assert counts[-1] == counts[0] > before, counts
        assert after == before


_LEFT_OPEN = """
import torch.distributed as dist
from tensordict import TensorDict
from tensordict.distributed import Channel

dist.init_process_group("gloo", init_method="{init}", rank={rank}, world_size=2)
channel = Channel(0, 1)
channel.reset(timeout=30)
if {rank} == 0:
    channel.publish(TensorDict(w=1))
else:
    assert channel.recv(timeout=30)["w"] == 1
dist.barrier()
"""


def test_programs_that_leave_a_channel_open_after_a_reset_end_well(tmp_path):
    init = f"file://{tmp_path}/store"
    programs = [_LEFT_OPEN.format(init=init, rank=rank) for rank in (0, 1)]
    ranks = [
        subprocess.Popen([sys.executable, "-c", text], stderr=subprocess.PIPE, text=True)
        for text in programs
    ]
    try:
        for rank in ranks:
            _, errors = rank.communicate(timeout=60)
            assert rank.returncode == 0, errors
    finally:
        for rank in ranks:
            rank.kill()
