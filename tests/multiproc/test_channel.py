"""Channels between real gloo ranks, beside other exchanges and when an end dies."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

from tensordict import TensorDict
from tensordict.distributed import Channel, all_reduce, recv, send
from tensordict.distributed.testing import run_ranks
from tensordict.errors import ChannelClosed, PeerLost, TransferError
from tensordict.placement import CastPolicy

pytestmark = pytest.mark.ranks


def weights(i, n=1_000):
    return TensorDict(
        {
            "w": torch.full((n,), float(i)),
            "big": torch.full((700_000,), float(i)),
            "at": f"step {i}",
        }
    )


def _publishes(rank, size):
    with Channel(0, 1, init_tag=9, timeout=20) as channel:
        if rank == 0:
            for i in range(1, 6):
                channel.publish(weights(i))
                all_reduce(TensorDict({"loss": torch.ones(3)}))  # the group stays in use
                send(weights(i), 1)
            dist.barrier()
            return channel.version
        seen = []
        for i in range(1, 6):
            loss = TensorDict({"loss": torch.ones(3)})
            all_reduce(loss)
            assert loss["loss"].tolist() == [2, 2, 2]
            assert recv(0)["at"] == f"step {i}"
            got = channel.recv(version=i)
            assert all((got[key] == channel.version).all() for key in ("w", "big"))
            seen.append(channel.version)
        dist.barrier()
        with pytest.raises(ChannelClosed):
            channel.recv(timeout=10)
        return seen


def test_publications_beside_other_exchanges():
    first, second = run_ranks(_publishes, 2, timeout=60)
    assert first == 5 and second == [1, 2, 3, 4, 5]


def _both_ways(rank, size):
    """Weights go out and samples come back, on a channel each, and both are closed."""
    out, back = Channel(0, 1, init_tag=1), Channel(1, 0, init_tag=2)
    for i in range(1, 4):
        if rank == 0:
            out.publish(weights(i))
            assert back.recv(version=i, timeout=20)["w"][0] == -i
        else:
            got = out.recv(version=i, timeout=20)
            back.publish(TensorDict({"w": -got["w"]}))
    out.close()
    back.close()
    with pytest.raises(ChannelClosed):
        (back if rank == 0 else out).recv(timeout=20)
    return True


def test_two_channels_of_one_pair():
    assert run_ranks(_both_ways, 2, timeout=60) == [True, True]


def _publisher_dies(rank, size):
    channel = Channel(0, 1)
    if rank == 0:
        channel.publish(weights(1))
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    assert channel.recv(timeout=20)["at"] == "step 1"
    start = time.monotonic()
    for _ in range(2):  # as often as it is asked
        with pytest.raises(PeerLost):
            channel.recv(timeout=20)
    with pytest.raises(PeerLost):
        channel.latest()
    return time.monotonic() - start < 5


def test_a_publisher_that_is_killed():
    assert run_ranks(_publisher_dies, 2, may_die=[0], timeout=30)[1]


def _receiver_dies(rank, size):
    channel = Channel(0, 1, timeout=20)
    if rank == 1:
        channel.recv()
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(TransferError):
        for i in range(1_000):
            channel.publish(weights(i))
            time.sleep(0.01)
    return time.monotonic() - start < 10


def test_a_receiver_that_is_killed():
    assert run_ranks(_receiver_dies, 2, may_die=[1], timeout=30)[0]


def _arrives_cast(rank, size):
    policy = CastPolicy(default="bf16")
    if rank == 0:
        for _ in range(2):
            send(weights(3), 1)
        return True
    got = recv(0, policy=policy)
    into = recv(0, policy=policy, out=got.clone().zero_())
    for td in (got, into):
        assert td["w"].dtype is torch.bfloat16 and (td["big"] == 3).all() and td["at"] == "step 3"
    return True


def test_a_policy_casts_what_has_arrived():
    assert run_ranks(_arrives_cast, 2, timeout=60) == [True, True]


_LEFT_OPEN = """
import torch.distributed as dist
from tensordict import TensorDict
from tensordict.distributed import Channel

dist.init_process_group("gloo", init_method="file://{store}", rank={rank}, world_size=2)
channel = Channel(0, 1)
if {rank} == 0:
    channel.publish(TensorDict(w=1))
    del channel
else:
    assert channel.recv(timeout=30)["w"] == 1
dist.barrier()
"""


def test_programs_that_leave_a_channel_open_end_well(tmp_path):
    """A thread that listens while the interpreter closes would end the process with a signal."""
    programs = [_LEFT_OPEN.format(store=tmp_path / "store", rank=rank) for rank in (0, 1)]
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
