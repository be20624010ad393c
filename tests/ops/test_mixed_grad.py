"""Each leaf requires grad as if it had been computed alone, whatever the others do."""

from __future__ import annotations

import pytest
import torch

from tensordict import TensorDict


def tree():
    return TensorDict(
        {
            "w": torch.ones(3, requires_grad=True),
            "b": torch.ones(3),
            "n": {"c": torch.ones(3), "d": torch.ones(3)},
        },
        batch_size=[3],
    )


OPS = {
    "clone": lambda x, y: x.clone(),
    "exp": lambda x, y: x.exp(),
    "mul number": lambda x, y: x * 2,
    "one minus": lambda x, y: 1 - x,
    "add": lambda x, y: x + y,
    "plain add mixed": lambda x, y: x.detach() + y,
    "lerp": lambda x, y: x.lerp(y, 0.5),
    "in place, mixed operand": lambda x, y: x.detach().clone().add_(y),
    "sum": lambda x, y: x.sum(),
}


@pytest.mark.parametrize("name", OPS)
def test_results_require_grad_leaf_by_leaf(name):
    op = OPS[name]
    x, y = tree(), tree()
    out = op(x, y)
    for key, leaf in out.items(True, True):
        assert leaf.requires_grad == op(x[key], y[key]).requires_grad, key


def test_writes_require_grad_leaf_by_leaf():
    wanted = {"w": True, "b": False, ("n", "c"): False, ("n", "d"): False}
    for write in (
        lambda td: td.update_(tree()),
        lambda td: td.copy_(tree()),
        lambda td: td.__setitem__(slice(0, 3), tree()),
    ):
        td = tree().detach().clone()
        write(td)
        assert {key: x.requires_grad for key, x in td.items(True, True)} == wanted
