from __future__ import annotations

import os
import signal
import socket
import time

import pytest
import torch
import torch.distributed as dist

from tensordict.cli.ranks import RankError, run_ranks

pytestmark = pytest.mark.ranks


def exchange(rank, emit, value):
    emit(rank * 10)
    x = torch.tensor([value + rank])
    dist.all_reduce(x)
    return x.item(), torch.get_num_threads()


def kill_rank_1(rank, emit):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.recv(torch.empty(1), 1)


def raise_on_rank_0(rank, emit):
    if rank == 0:
        raise ValueError("something\nis wrong")
    dist.recv(torch.empty(1), 0)


def leave_on_rank_1(rank, emit):
    if rank == 1:
        os._exit(3)
    dist.recv(torch.empty(1), 1)


def stay(rank, emit):
    emit(os.getpid())
    if rank == 0:
        time.sleep(600)


def test_results_and_events_come_back():
    events = []
    got = run_ranks(exchange, 2, (5,), on_event=lambda *e: events.append(e))
    assert got == [(11, 1), (11, 1)] and sorted(events) == [(0, 0), (1, 10)]


@pytest.mark.parametrize(
    ("task", "text"),
    [
        (kill_rank_1, "rank 1 died: killed by SIGKILL"),
        (leave_on_rank_1, "rank 1 died: exit status 3"),
        (raise_on_rank_0, "rank 0 failed: ValueError: something"),
    ],
)
def test_a_rank_that_ends_is_named_at_once(task, text):
    start = time.monotonic()
    with pytest.raises(RankError, match=text):
        run_ranks(task, 2, timeout=200)
    assert time.monotonic() - start < 150  # not the timeout: nobody waited for the dead


def test_a_rank_that_hangs_is_ended():
    run_ranks(exchange, 2, (5,))  # starting the server that forks ranks takes longer than this
    pids = []
    with pytest.raises(RankError, match="rank 0 was not done after 6 s"):
        run_ranks(stay, 2, timeout=6, on_event=lambda rank, pid: pids.append(pid))
    assert len(pids) == 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_port_in_use_is_told_before_ranks_start():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(RankError, match=rf"port {port} .*in use"):
            run_ranks(exchange, 2, (5,), port=port)
    assert run_ranks(exchange, 2, (5,), port=port)[0][0] == 11
    with pytest.raises(RankError, match="port 99999"):
        run_ranks(exchange, 2, (5,), port=99999)
