"""A rank that is killed within a large message of a collective: whoever is left hears of it."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist

from tensordict import TensorDict
from tensordict.distributed import (
    TorchTransport,
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    gather,
    recv,
    reduce,
    reduce_scatter,
    scatter,
    send,
)
from tensordict.distributed.testing import run_ranks
from tensordict.errors import PeerLost, TransferTimeout

pytestmark = pytest.mark.ranks


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def tree(fill=1.0, numel=4 << 20):
    """Two leaves of 16 MiB, by default, and small ones."""
    td = TensorDict({f"k{i}": torch.full((8,), fill) for i in range(20)})
    td["a"] = torch.full((numel,), fill)
    td["b"] = torch.full((numel,), fill)
    return td


CALLS = {
    "all_reduce": lambda td, rank, n: all_reduce(td),
    "all_reduce async": lambda td, rank, n: all_reduce(td, async_op=True).wait(30),
    "reduce": lambda td, rank, n: reduce(td, 0),
    "reduce_scatter": lambda td, rank, n: reduce_scatter([td] * n),
    "broadcast": lambda td, rank, n: broadcast(td if rank == 1 else None, 1),
    "broadcast of another": lambda td, rank, n: broadcast(td if rank == 0 else None, 0),
    "all_gather": lambda td, rank, n: all_gather(td),
    "all_to_all": lambda td, rank, n: all_to_all([td] * n),
    "gather": lambda td, rank, n: gather(td, 0),
    "scatter": lambda td, rank, n: scatter([td] * n if rank == 0 else None, 0),
}


class Dying:
    """A transport whose rank is killed some time after its first large message began."""

    def __init__(self, inner, delay):
        self._inner, self._delay = inner, delay

    def __getattr__(self, name):
        call = getattr(self._inner, name)
        if name not in ("isend", "irecv", "broadcast", "all_gather", "all_reduce", "reduce"):
            return call

        def begin(*args, **options):
            tensor = args[1] if name == "all_gather" else args[0]
            if tensor.nbytes > 1 << 20:
                threading.Timer(self._delay, die).start()
            return call(*args, **options)

        return begin


def killed(rank, size, what, victim, delay):
    # The functions that take a transport find this one for the group.
    if rank == victim:
        inner = TorchTransport.of(None)
        TorchTransport.of = staticmethod(lambda group=None: Dying(inner, delay))
    td = tree()
    dist.barrier()
    start = time.monotonic()
    try:
        CALLS[what](td, rank, size)
    except (PeerLost, TransferTimeout) as error:
        outcome, text = type(error).__name__, str(error)
        assert error.stage
    else:
        outcome, text = "done", ""
    return outcome, text, time.monotonic() - start


def check(results, victim, may_be_done):
    assert results[victim] is None
    for rank, result in enumerate(results):
        if rank != victim:
            outcome, text, took = result
            assert took < 10  # the group's timeout is 60
            if outcome == "done" and rank in may_be_done:
                continue
            assert outcome == PeerLost.__name__, (rank, result)
            assert f"rank {victim}" in text


# Those who need nothing of the victim any more, or never did, may be through.
@pytest.mark.parametrize(
    ("what", "victim", "may_be_done"),
    [
        ("all_reduce", 1, ()),
        ("all_reduce async", 0, ()),
        ("reduce", 2, (1,)),
        ("reduce_scatter", 1, ()),
        ("broadcast", 1, ()),
        ("broadcast of another", 2, (1,)),
        ("all_gather", 2, ()),
        ("all_to_all", 0, ()),
        ("gather", 1, (2,)),
        ("gather", 0, ()),
        ("scatter", 0, ()),
    ],
)
def test_a_rank_killed_within_a_large_collective_is_named(what, victim, may_be_done):
    check(run_ranks(killed, 3, what, victim, 0.0, may_die=[victim]), victim, may_be_done)


@pytest.mark.slow
@pytest.mark.parametrize("victim", range(4))
@pytest.mark.parametrize("what", list(CALLS))
def test_a_rank_killed_at_any_time_of_a_collective_of_four(what, victim):
    for delay in (0.0, 0.002, 0.005, 0.01, 0.02, 0.05):
        results = run_ranks(killed, 4, what, victim, delay, may_die=[victim])
        if all(result is None or result[0] == "done" for result in results):
            continue  # it was killed after the end
        results[victim] = None  # it may have been through, and killed then
        check(results, victim, range(4))


class Late:
    """A transport whose rank comes too late to the first large message."""

    def __init__(self, inner):
        self._inner = inner

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def all_reduce(self, tensor, op):
        time.sleep(2.5)
        return self._inner.all_reduce(tensor, op)


def late(rank, size):
    transport = TorchTransport.of(None)
    try:
        all_reduce(tree(), timeout=1, transport=Late(transport) if rank == 1 else transport)
    except TransferTimeout as error:
        return error.stage, str(error)
    return None


def test_a_late_rank_is_a_timeout_that_says_what_is_missing():
    first, _, third = run_ranks(late, 3, reuse=False)
    for stage, text in (first, third):
        assert stage == "payload" and "are not through after" in text
        assert "rank 0 to rank 2 are all connected" in text


def late_and_other(rank, size):
    """A rank comes when the others have given up, with another structure, and goes on."""
    outcomes = []
    if rank == 2:
        time.sleep(1.2)
    for k in range(3):
        td = TensorDict({"a": torch.ones(3 + (rank == 2)), f"k{k}": torch.ones(2)})
        with pytest.raises((PeerLost, TransferTimeout)) as caught:
            all_gather(td, timeout=0.4 if rank < 2 else 2)
        outcomes.append(type(caught.value).__name__)
    return outcomes, str(caught.value)


def test_after_a_timeout_no_message_of_another_collective_meets_a_rank():
    # gloo ends a process that receives more than it expects.
    for outcomes, text in run_ranks(late_and_other, 3, reuse=False):
        assert outcomes == ["TransferTimeout", "PeerLost", "PeerLost"]
        assert "gave up a collective of this group before" in text and "new group" in text


def survivors(rank, size):
    """Those who are left go on with each other after a receive that was cut."""
    dist.barrier()
    if rank == 1:
        transport = Dying(TorchTransport.of(None), 0.005)
        send(tree(), 0, transport=transport)
        time.sleep(5)
    if rank == 0:
        with pytest.raises(PeerLost) as caught:
            recv(1)
        assert caught.value.peer == 1
        send(tree(3.0), 2)
        return caught.value.bytes_done
    return recv(0)["a"].eq(3.0).all().item()


def test_those_who_are_left_can_go_on():
    done, _, received = run_ranks(survivors, 3, may_die=[1])
    assert received and done in (0, 16 << 20, 32 << 20)


# Ranks of a group with the timeout of torch (half an hour) that exit as programs do.
PROGRAM = """
import os, sys, signal, threading, time
import torch, torch.distributed as dist
from tensordict import TensorDict
from tensordict.distributed import broadcast
from tensordict.errors import PeerLost
torch.set_num_threads(1)
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
pids = []
for rank in range(3):
    pids.append(os.fork())
    if pids[-1] == 0:
        dist.init_process_group("gloo", rank=rank, world_size=3, init_method="file://{path}")
        td = TensorDict({{"a": torch.ones(16 << 20)}})
        dist.barrier()
        if rank == 0:
            threading.Timer(0.01, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
        try:
            broadcast(td if rank == 0 else None, 0)
        except PeerLost:
            time.sleep(1)
            if rank == 1:
                dist.destroy_process_group()
            sys.exit(7)
        sys.exit(0)
print([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids])
"""


def test_a_collective_that_was_given_up_does_not_keep_a_rank_from_exiting(tmp_path):
    program = PROGRAM.format(path=tmp_path / "init")
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "[-9, 7, 7]", done.stderr
