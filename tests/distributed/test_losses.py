"""Who is told of a rank that is gone, without real processes."""

import threading
import time
from datetime import timedelta

import pytest
import torch

from tensordict.distributed import torch_work
from tensordict.distributed.consensus import Consensus, Report, Vote
from tensordict.distributed.testing import LoopbackGroup
from tensordict.distributed.torch_work import CollectiveWork, translate
from tensordict.errors import PeerLost, TransferTimeout


def consensus(group, rank, timeout):
    members = list(range(group.size))
    return Consensus(group.transport(rank), members, [f"rank {r}" for r in members], 5, timeout)


def test_the_end_of_one_member_is_heard_while_another_is_silent():
    group = LoopbackGroup(3)
    vote = Vote(consensus(group, 0, timeout=60))
    threading.Timer(0.05, group.lose, [2]).start()
    begun = time.monotonic()
    with pytest.raises(PeerLost, match="rank 2 at agreement"):
        vote.cast(Report(bytes(16)), "Cannot go on.")
    assert time.monotonic() - begun < 20  # not for rank 1, however long that is silent


def test_only_those_who_said_nothing_are_called_silent():
    group = LoopbackGroup(3)
    errors = {}

    def member(rank, timeout):
        try:
            Vote(consensus(group, rank, timeout)).cast(Report(bytes(16)), "Cannot go on.")
        except TransferTimeout as error:
            errors[rank] = str(error)

    threads = [threading.Thread(target=member, args=(rank, 0.2)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors[0] == errors[1]
    assert "rank 2 at agreement" in errors[0] and "rank 1" not in errors[0]


class Slow:
    """A work of ``torch.distributed`` that is through, or fails, after some waits."""

    def __init__(self, waits, error=None):
        self.waits, self.error = waits, error

    def is_completed(self):
        return self.waits <= 0

    def wait(self, timeout=None):
        assert timeout is None or isinstance(timeout, timedelta)
        self.waits -= 1
        if self.waits > 0:
            time.sleep(0.001)
            raise RuntimeError("Operation timed out!")
        if self.error is not None:
            raise RuntimeError(self.error)


def collective(work, *lost):
    group = LoopbackGroup(3)
    for rank in lost:
        group.lose(rank)
    return CollectiveWork(work, (torch.zeros(4),), transport=group.transport(0), group=group)


def test_a_collective_is_waited_for_while_all_are_there():
    collective(Slow(5)).wait()
    collective(Slow(5)).wait(60)


def test_a_collective_may_end_well_after_a_rank_has_left():
    collective(Slow(5), 1).wait()


def test_a_collective_without_a_rank_is_given_up(monkeypatch):
    monkeypatch.setattr(torch_work, "_LEAST_HOPE", 0.02)
    with pytest.raises(PeerLost, match=r"rank 1 is gone \(is gone\)") as caught:
        collective(Slow(10**9), 1).wait()
    assert caught.value.peer == 1
    with pytest.raises(PeerLost, match="rank 1, rank 2 are gone, or gave up") as caught:
        collective(Slow(10**9), 1, 2).wait()
    assert caught.value.peer is None


def test_a_collective_that_fails_names_who_is_gone(monkeypatch):
    monkeypatch.setattr(torch_work, "LOOK_AFTER", 0.01)
    with pytest.raises(PeerLost, match="rank 2 is gone"):
        collective(Slow(2, "Connection closed by peer [127.0.0.1]:9"), 2).wait()
    with pytest.raises(RuntimeError, match="another trouble"):
        collective(Slow(2, "another trouble")).wait()


def test_a_late_collective_is_a_timeout_that_names_bytes_and_ranks():
    with pytest.raises(
        TransferTimeout, match=r"16 bytes .* after 0.01 s. rank 0 to rank 2 are all"
    ):
        collective(Slow(10**9)).wait(0.01)


@pytest.mark.parametrize(
    ("text", "kind", "reason"),
    [
        (
            "[/src/gloo/tcp/pair.cc:537] Read error [::1]:9: Connection reset by peer. "
            "This is typically caused by a remote worker hanging.",
            PeerLost,
            "Read error [::1]:9: Connection reset by peer",
        ),
        ("[a/b.cc:78] Timed out waiting 40ms for recv", TransferTimeout, None),
    ],
)
def test_reasons_are_those_of_gloo_without_its_source_lines(text, kind, reason):
    found = translate(RuntimeError(text))
    assert type(found) is kind
    assert str(found) == (reason or "Timed out waiting 40ms for recv")
