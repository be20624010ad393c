"""Exchange tensordicts between two ranks.

    python examples/rank_exchange.py
    torchrun --nproc-per-node 2 examples/rank_exchange.py

Under ``python`` the script starts its own two ranks.  Each step prints what it did.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from tensordict import TensorDict
from tensordict.distributed import all_reduce, recv, send, sendrecv
from tensordict.distributed.testing import run_ranks
from tensordict.errors import SchemaMismatch


def say(rank: int, text: str) -> None:
    print(f"rank {rank}: {text}", flush=True)


def model(fill: float) -> TensorDict:
    """A small state, with a tied leaf and something that is not a tensor."""
    embed = torch.full((4, 8), fill)
    return TensorDict(
        {
            "embed": embed,
            "layer": {"weight": torch.full((8, 8), fill), "bias": torch.full((8,), fill)},
            "head": embed,
            "step": 3,
        }
    )


def main(rank: int, size: int) -> list[str]:
    """The steps of one rank; returns what happened, for the test."""
    done = []

    # A new tensordict: the receiver knows nothing.
    if rank == 0:
        send(model(1.0), 1)
    elif rank == 1:
        got = recv(0)
        assert got["head"] is got["embed"] and got["step"] == 3
        done.append(f"received {len(list(got.keys(True, True)))} entries, the tie kept")
    dist.barrier()

    # Into an existing one, with the methods.
    mine = model(float(rank))
    if rank == 0:
        mine.send(dst=1)
    elif rank == 1:
        weight = mine["layer", "weight"]
        mine.recv(src=0)
        assert weight.eq(0).all()
        done.append("received in place")
    dist.barrier()

    # Structures that differ: the same error on both ranks, and the group goes on.
    if rank < 2:
        mine = TensorDict({"a": torch.zeros(3 + rank)})
        try:
            mine.send(dst=1) if rank == 0 else mine.recv(src=0)
        except SchemaMismatch as error:
            done.append(str(error))
        other = sendrecv(TensorDict({"rank": torch.tensor(rank)}), 1 - rank, 1 - rank)
        done.append(f"swapped with rank {int(other['rank'])}")
    dist.barrier()

    # The mean over all ranks.
    state = model(float(rank))
    all_reduce(state, "avg")
    done.append(f"mean of the ranks {float(state['embed'].flatten()[0]):g}")
    for text in done:
        say(rank, text)
    return done


if __name__ == "__main__":
    if "RANK" in os.environ:  # torchrun
        dist.init_process_group("gloo")
        if dist.get_world_size() < 2:
            raise SystemExit("An exchange takes two ranks: torchrun --nproc-per-node 2")
        main(dist.get_rank(), dist.get_world_size())
        dist.destroy_process_group()
    else:
        run_ranks(main, 2)
