"""Reshards that go wrong on real gloo ranks: everyone hears of it, nothing is half done."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from tensordict import TensorDict
from tensordict.distributed import TorchTransport, recv, reshard, send
from tensordict.distributed.testing import Fault, FaultyTransport, run_ranks
from tensordict.errors import PeerLost, PlanMismatch, TransferError, TransferTimeout
from tensordict.placement import Layout, Placement, plan_reshard

pytestmark = pytest.mark.ranks
S0, S1 = Placement("shard", 0), Placement("shard", 1)


def plan_of(side=96, **options):
    src = Layout.from_placements([side, side], [3], [S0], dtype=torch.float32)
    dst = Layout.from_placements([side, side], [3], [S1])
    return plan_reshard({"w": src, "v": src}, {"w": dst, "v": dst}, **options)


def mine(rank, rows=32, columns=96):
    return {name: torch.full((rows, columns), float(rank)) for name in "wv"}


def good(rank):
    out = reshard(mine(rank), plan_of(), verify=True).wait(30)
    return out["w"][::32, 0].tolist() == [0.0, 1.0, 2.0]


def refusals(rank, size):
    """Misfits on one rank are told to all, in little time, and the group serves on."""
    told = []
    begin = time.monotonic()
    for bad in range(size):
        for wrong in ("plan", "shape", "missing", "dtype"):
            data, plan = mine(rank), plan_of()
            if rank == bad:
                if wrong == "plan":
                    plan = plan_of(bucket_bytes=4096)
                elif wrong == "shape":
                    data = mine(rank, rows=31)
                elif wrong == "dtype":
                    data = {name: x.double() for name, x in data.items()}
                else:
                    del data["v"]
            out = {name: torch.zeros(96, 32) for name in "wv"}
            with pytest.raises(PlanMismatch) as caught:
                reshard(data, plan, out=out).wait(30)
            assert not any(x.any() for x in out.values())
            told.append(str(caught.value))
    assert time.monotonic() - begin < 2 * len(told)
    assert good(rank)
    return told


def test_misfits_are_told_to_all_and_the_group_serves_on():
    first, *others = run_ranks(refusals, 3)
    assert all(told == first for told in others)
    assert all(f"rank {bad}" in first[4 * bad + i] for bad in range(3) for i in (1, 2, 3))


def killed(rank, size, victim, at, side, timeout):
    """One rank is killed before its ``at``-th message."""
    transport = TorchTransport.of(None)
    if rank == victim:
        call = lambda: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
        transport = FaultyTransport(transport, Fault(at=at, kind="call", call=call))
    out = {name: torch.zeros(side, side // 3) for name in "wv"}
    data = mine(rank, side // 3, side)
    dist.barrier()
    begin = time.monotonic()
    with pytest.raises(TransferError) as caught:
        reshard(data, plan_of(side), out=out, transport=transport, timeout=timeout).wait(90)
    took = time.monotonic() - begin
    assert not any(x.any() for x in out.values())
    # Those who are left go on with each other.
    first, second = (r for r in range(size) if r != victim)
    if rank == first:
        send(TensorDict({"a": torch.ones(100_000)}), second, timeout=20)
    else:
        assert recv(first, timeout=20)["a"].sum() == 100_000
    return type(caught.value).__name__, str(caught.value), took


# Before it says anything, and within the agreement.
@pytest.mark.parametrize("at", [0, 1, 3])
@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_rank_is_an_error_on_the_others(victim, at):
    results = run_ranks(killed, 3, victim, at, 96, 60, reuse=False, may_die=[victim])
    assert results[victim] is None
    for rank, result in enumerate(results):
        if rank != victim:
            name, text, took = result
            assert name == PeerLost.__name__, text
            assert took < 15


# 4 MiB each: 1 to 4 of a rank other than the first, 2 to 5 of the first, are payload.
@pytest.mark.parametrize("at", [2, 4, 5])
@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_killed_within_large_messages_is_known_without_a_timeout(victim, at):
    results = run_ranks(killed, 3, victim, at, 3072, 60, reuse=False, may_die=[victim])
    assert results[victim] is None
    for rank, result in enumerate(results):
        if rank != victim:
            name, text, took = result
            assert name == PeerLost.__name__, text
            assert f"rank {victim}" in text
            assert took < 10


def silent(rank, size):
    begin = time.monotonic()
    if rank == 1:
        time.sleep(4)
        return 0.0
    with pytest.raises(TransferTimeout, match="rank 1"):
        reshard(mine(rank), plan_of(), timeout=1.5).wait(30)
    return time.monotonic() - begin


def test_a_rank_that_does_not_come_is_a_timeout():
    assert max(run_ranks(silent, 3, reuse=False)) < 15
