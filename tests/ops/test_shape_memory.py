"""Results of shape operations hold nothing alive, and gradients pass through them."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tensordict import TensorDict

ROWS = torch.tensor([1, 0, 1])
MASK = torch.tensor([True, False])
OPS = {
    "int": lambda td: td[1],
    "slice": lambda td: td[1:],
    "rows": lambda td: td[ROWS],
    "mask": lambda td: td[MASK],
    "inner rows": lambda td: td[:, [0, 2]],
    "two tensors": lambda td: td[ROWS, ROWS],
    "none": lambda td: td[None],
    "view": lambda td: td.view(-1),
    "reshape": lambda td: td.permute(1, 0).reshape(-1),
    "flatten": lambda td: td.flatten(),
    "unflatten": lambda td: td.unflatten(1, (3, 1)),
    "permute": lambda td: td.permute(1, 0),
    "unsqueeze": lambda td: td.unsqueeze(0),
    "squeeze": lambda td: td[:, :1].squeeze(1),
    "expand": lambda td: td.expand(4, 2, 3),
    "split": lambda td: td.split(1)[1],
    "unbind": lambda td: td.unbind(1)[2],
    "stack": lambda td: torch.stack([td, td], 1),
    "cat": lambda td: torch.cat([td, td], 1),
    "roll": lambda td: td.roll(1, 0),
    "flip": lambda td: td.flip(0),
    "repeat": lambda td: td.repeat(2, 1),
    "repeat_interleave": lambda td: td.repeat_interleave(2, 1),
    "gather": lambda td: td.gather(0, torch.tensor([[1, 0, 1]])),
    "masked_select": lambda td: td.masked_select(MASK),
    "masked_fill": lambda td: td.masked_fill(MASK, 0),
    "where": lambda td: td.where(MASK, td * 2),
    "pad": lambda td: td.pad([0, 1]),
    "pack": lambda td: td.pack()[1].unpack(td.pack()[0]),
    "contiguous": lambda td: td.permute(1, 0).contiguous(),
}
NO_RULE = {"mask", "masked_select"}  # their size depends on values, which fakes do not have


def leaf():
    return torch.arange(24.0).view(2, 3, 4)


def make(x=None):
    x = leaf() if x is None else x
    return TensorDict(
        {"a": x, "n": TensorDict({"b": x[..., :2]}, [2, 3])}, [2, 3], names=["x", "y"]
    )


@pytest.mark.parametrize("op", OPS.values(), ids=list(OPS))
def test_source_and_result_are_freed_without_the_collector(op):
    gc.collect()
    gc.disable()
    try:
        td = make()
        out = op(td)
        refs = [weakref.ref(x) for x in (td, td["n"], out, out["n"])]
        del td
        assert refs[0]() is None and out.batch_size is not None
        del out
        assert [ref() for ref in refs] == [None] * 4
    finally:
        gc.enable()


@pytest.mark.parametrize("op", OPS.values(), ids=list(OPS))
def test_gradients_pass_through(op):
    x, y = leaf().requires_grad_(), leaf().requires_grad_()
    out = op(make(x))
    weights = torch.rand_like(out["a"])
    (out["a"] * weights).sum().backward()
    truth = op(TensorDict({"a": y, "n": TensorDict({"b": y[..., :2]}, [2, 3])}, [2, 3]))["a"]
    (truth * weights).sum().backward()
    assert x.grad is not None and torch.equal(x.grad, y.grad) and x.grad.abs().sum() > 0


@pytest.mark.parametrize("name", OPS)
def test_shapes_are_told_without_data(name):
    op = OPS[name]
    want = op(make())
    there = op(make().to("meta")) if name not in ("gather",) else want
    assert there.batch_size == want.batch_size and there["n", "b"].shape == want["n", "b"].shape
    if name in NO_RULE:
        return
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = op(make(mode.from_tensor(leaf())))
    assert fake.batch_size == want.batch_size and fake.names == want.names
    assert fake["a"].shape == want["a"].shape and fake["n"].batch_size == want["n"].batch_size
