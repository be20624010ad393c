"""A rank that is killed while large messages travel, in every form of send and receive."""

import os
import random
import signal
import threading
import time
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist

from tensordict import TensorDict
from tensordict.distributed import irecv, isend, recv, send, sendrecv
from tensordict.distributed.testing import run_ranks
from tensordict.errors import PeerLost, SchemaMismatch

pytestmark = pytest.mark.ranks


def tree(kind, fill):
    if kind == "one of 64 MiB":
        return TensorDict({"a": torch.full((16 << 20,), fill)})
    if kind == "one packed message":  # of 1.6 MB: nothing is sent after it
        return TensorDict({f"k{i}": torch.full((1000,), fill) for i in range(400)})
    td = TensorDict({f"k{i}": torch.full((500,), fill) for i in range(200)})
    for i in range(64):
        td[f"b{i}"] = torch.full((1 << 18,), fill)
    return td


def exchange(form, td, rank, options):
    if form == "both ways":
        sendrecv(td, 1 - rank, 1 - rank, **options)
    elif form == "asynchronous":
        (isend(td, 1, **options) if rank == 0 else irecv(0, out=td, **options)).wait()
    elif rank == 0:
        send(td, 1, **options)
    else:
        recv(0, out=td if form == "into" else None, **options)


def killed(rank, size, kind, form, victim, delay, options):
    td = tree(kind, 1.0 if rank == 0 else 0.0)
    dist.barrier()
    if rank == victim:
        threading.Timer(delay, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    begun = time.monotonic()
    with pytest.raises(PeerLost) as caught:
        while True:
            begun = time.monotonic()
            exchange(form, td, rank, options)
    assert caught.value.peer == victim and f"rank {victim}" in str(caught.value)
    return time.monotonic() - begun


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    ("kind", "form"),
    [
        ("one of 64 MiB", "new"),
        ("one of 64 MiB", "both ways"),
        ("64 of 1 MiB and small ones", "into"),
        ("64 of 1 MiB and small ones", "asynchronous"),
        ("one packed message", "new"),
    ],
)
def test_whoever_exchanges_with_a_rank_that_is_killed_hears_of_it(kind, form, strict, victim):
    delay = random.uniform(0.01, 0.1)
    args = kind, form, victim, delay, {"strict": strict}
    took = run_ranks(killed, 2, *args, may_die=[victim], timeout=20)[1 - victim]
    assert took < 10, f"{took} s, killed after {delay} s"


def drops(rank, size):
    """A sender that asks nobody is killed while the receiver drops what it cannot use."""
    dist.barrier()
    td = tree("one of 64 MiB", 1.0)
    if rank == 0:
        threading.Timer(0.02, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
        send(td, 1, strict=False)
        time.sleep(5)
    with pytest.raises(PeerLost) as caught:
        for _ in range(2):  # the payload may have been faster
            with suppress(SchemaMismatch):
                recv(0, out=TensorDict({"b": torch.zeros(3)}), strict=False)
    return caught.value.stage


def test_a_sender_that_asks_nobody_is_killed_while_its_payload_is_dropped():
    run_ranks(drops, 2, may_die=[0], timeout=20)
