"""Send a tensordict from one process to another, and see both refuse what does not fit.

python examples/two_ranks.py
"""

from __future__ import annotations

import torch

from tensordict import TensorDict
from tensordict.distributed import recv, send
from tensordict.distributed.testing import run_ranks
from tensordict.errors import SchemaMismatch


def weights() -> TensorDict:
    return TensorDict({"enc": {"w": torch.ones(256, 256)}, "step": torch.tensor(7), "note": "v1"})


def rank(number: int, size: int) -> str:
    # 1. The receiver needs to know nothing.
    if number == 0:
        send(weights(), 1)
    else:
        assert (recv(0) == weights()).all()

    # 2. Or it receives in place, into memory that is there.
    mine = weights().apply(torch.zeros_like)
    if number == 0:
        send(weights(), 1)
    else:
        recv(0, out=mine)
        assert mine["enc", "w"].sum() == 256 * 256

    # 3. What does not fit is refused on both sides, before any payload, with every difference.
    mine["enc", "w"] = torch.zeros(256, 128)
    try:
        if number == 0:
            send(weights(), 1)
        else:
            recv(0, out=mine)
    except SchemaMismatch as error:
        return str(error)
    return "nothing was refused"


def main() -> None:
    sender, receiver = run_ranks(rank, 2)
    assert sender == receiver
    print(sender)


if __name__ == "__main__":
    main()
