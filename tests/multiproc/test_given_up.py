"""What is left of a group when a rank has given up waiting: nothing that hangs, all of it said."""

import time

import pytest
import torch
import torch.distributed as dist

from tensordict import TensorDict
from tensordict.distributed import TorchTransport, all_reduce, irecv, recv, send
from tensordict.distributed.testing import run_ranks
from tensordict.errors import PeerLost, TransferTimeout

pytestmark = pytest.mark.ranks


def tree():
    return TensorDict({"a": torch.arange(3)})


def heard(call):
    """The error that a call raises at once."""
    begun = time.monotonic()
    with pytest.raises(PeerLost) as caught:
        call()
    assert time.monotonic() - begun < 1.0
    return str(caught.value)


def _gives_up(rank, size, step):
    other = dist.new_group([0, 1, 2])
    all_reduce(TensorDict({"x": torch.ones(2)}))
    if rank == 1:
        pending = irecv(2, init_tag=8)  # of somebody else, under way meanwhile
        with pytest.raises(TransferTimeout):
            recv(0, init_tag=5, timeout=0.3) if step == "receive" else send(tree(), 0, timeout=0.3)
        with pytest.raises(PeerLost, match="this rank gave up another exchange"):
            pending.wait(5)
    dist.barrier(group=other)
    tag = 5 if step == "receive" else 0
    if rank == 1:
        for peer in (0, 2):
            for call in (lambda p=peer: send(tree(), p), lambda p=peer: recv(p)):
                text = heard(call)
                assert f"rank 1 gave up waiting for rank 0 on tag {tag}" in text
                assert "s ago" in text and "Channel.reset" in text
        assert heard(lambda: all_reduce(tree())).count("rank 1 gave up waiting for rank 0") == 1
        assert set(TorchTransport.of(None).lost(range(3))) == {0, 2}
    else:
        assert "Channel.reset" in heard(lambda: send(tree(), 1))
        assert heard(lambda: recv(1)).startswith(f"rank {rank} lost rank 1 while agreeing")
        # The two others are connected still, and another group of the same ranks is whole.
        send(tree(), 2) if rank == 0 else recv(0)
    dist.barrier(group=other)
    td = TensorDict({"x": torch.ones(2)})
    all_reduce(td, group=other)
    assert td["x"].tolist() == [3, 3]
    return True


@pytest.mark.parametrize("step", ["receive", "send"])
def test_a_rank_that_gave_up_is_cut_off_in_that_group_alone(step):
    assert run_ranks(_gives_up, 3, step, reuse=False, timeout=40) == [True] * 3
