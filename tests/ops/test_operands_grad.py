"""Integer leaves beside leaves that require grad: what foreach kernels refuse."""

from __future__ import annotations

import torch

from tensordict import TensorDict


def test_integers_beside_leaves_that_require_grad():
    td = TensorDict(a=torch.ones(2, requires_grad=True), b=torch.ones(2), i=torch.arange(2))
    for out in (td * 2, td + td, 2 - td):
        out["a"].sum().backward()
    assert torch.equal((td * 2)["i"], torch.tensor([0, 2])) and td["a"].grad is not None
