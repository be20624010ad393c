"""`run_ranks`: pools that are kept, and how failures of ranks are told."""

import os
import threading
import time

import pytest
import torch
import torch.distributed as dist

from tensordict.distributed.testing import RankFailed, run_ranks

pytestmark = pytest.mark.ranks


def _who(rank, size, text):
    x = torch.tensor([rank])
    dist.all_reduce(x)
    return os.getpid(), rank, size, text, int(x)


def test_results_come_by_rank_and_processes_are_kept():
    first = run_ranks(_who, 2, "a")
    second = run_ranks(_who, 2, "b")
    assert [r[1:] for r in first] == [(0, 2, "a", 1), (1, 2, "a", 1)]
    assert [r[0] for r in first] == [r[0] for r in second]
    third = run_ranks(_who, 2, "c", reuse=False)
    assert {r[0] for r in third}.isdisjoint(r[0] for r in first)


def _fails(rank, size, how):
    if rank == 1:
        if how == "raise":
            raise LookupError("on purpose")
        if how == "exit":
            os._exit(3)
        time.sleep(60)
    return rank


@pytest.mark.parametrize(
    ("how", "text"), [("raise", "on purpose"), ("exit", "exit code 3"), ("sleep", "not done after")]
)
def test_a_rank_that_fails_is_named(how, text):
    with pytest.raises(RankFailed, match=text) as caught:
        run_ranks(_fails, 2, how, timeout=4)
    assert list(caught.value.tracebacks) == [1]
    if how == "raise":
        assert isinstance(caught.value.errors[1], LookupError)
    assert run_ranks(_who, 2, "after")[1][3] == "after"


def test_what_does_not_pickle_is_refused():
    for task in ((lambda rank, size: rank,), (_who, threading.Lock())):
        with pytest.raises(TypeError, match="Expected a function at the top level of a module"):
            run_ranks(task[0], 2, *task[1:])
    assert run_ranks(_who, 2, "after")[1][3] == "after"


def _dies_at_once(rank, size):
    if rank == 1:
        os._exit(3)
    return dist.is_initialized()


def test_a_rank_that_dies_at_once_finds_the_others_in_the_group():
    for _ in range(3):
        assert run_ranks(_dies_at_once, 3, may_die=[1], reuse=False) == [True, None, True]


def test_a_rank_may_die_when_that_is_what_is_tested():
    assert run_ranks(_fails, 2, "exit", may_die=[1], timeout=20) == [0, None]
