"""torch functions that take tensordicts, and those that refuse them."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close

from tensordict import TensorDict, lazy_stack

LOSSES = [F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss]


def tree():
    return TensorDict({"a": torch.rand(3, 4), "n": {"b": torch.rand(3)}, "s": "text"}, [3])


@pytest.mark.parametrize("fn", LOSSES)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_losses(fn, reduction):
    x, y = tree(), tree() * 3
    out = fn(x, y, reduction=reduction)
    assert_close(out["a"], fn(x["a"], y["a"], reduction=reduction))
    assert_close(out["n", "b"], fn(x["n", "b"], y["n", "b"], reduction=reduction))
    assert out.batch_size == ((3,) if reduction == "none" else ()) and out["s"] == "text"
    row = torch.rand(3)
    wide = row[:, None].expand(3, 4)
    for result in (fn(x, row, reduction=reduction), fn(row, x, reduction=reduction)):
        assert_close(result["a"], fn(x["a"], wide, reduction=reduction))
    assert_close(fn(x, 0.5)["a"], fn(x["a"], torch.full((3, 4), 0.5)))


@pytest.mark.parametrize("fn", LOSSES)
def test_losses_where_plain_tensors_come_last(fn):
    x = TensorDict({"n": {"b": torch.rand(3)}, "a": torch.rand(3)}, [3])
    out = fn(x, x * 3)
    assert_close(out["a"], fn(x["a"], x["a"] * 3))
    assert_close(out["n", "b"], fn(x["n", "b"], x["n", "b"] * 3))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_losses_of_lazy_stacks(reduction):
    x = lazy_stack([TensorDict(a=torch.rand(3), b=torch.rand(2)) for _ in range(2)])
    out = F.mse_loss(x, x * 3, reduction=reduction)
    for name in ("a", "b"):
        assert_close(out[name], F.mse_loss(x[name], x[name] * 3, reduction=reduction))


def test_options_of_losses():
    x, y, w = tree(), tree() * 3, tree()
    assert_close(F.mse_loss(x, y, weight=w)["a"], F.mse_loss(x["a"], y["a"], weight=w["a"]))
    assert_close(F.smooth_l1_loss(x, y, beta=0.1)["a"], F.smooth_l1_loss(x["a"], y["a"], beta=0.1))
    with pytest.raises(ValueError):
        F.mse_loss(x, y, reduction="median")
    with pytest.raises(KeyError):
        F.mse_loss(x, y.exclude("a"))


def test_autograd_grad():
    x = tree().requires_grad_()
    expected = TensorDict({"a": torch.full((3, 4), 2.0), "n": {"b": torch.full((3,), 2.0)}}, [3])
    assert ((torch.autograd.grad((x * 2).sum(), x)) == expected.update({"s": "text"})).all()
    total = (x * 2).sum(reduce=True)
    assert_close(torch.autograd.grad(total, x)["n", "b"], expected["n", "b"])
    both = torch.autograd.grad((x * 2).sum(), (x, x["a"]))
    assert_close(both[0]["a"], expected["a"])
    assert_close(both[1], expected["a"])
    (only,) = torch.autograd.grad((x * 2).sum(), x["a"])
    assert_close(only, expected["a"])
    weighted = torch.autograd.grad(x * 2, x, grad_outputs=expected)
    assert_close(weighted["a"], torch.full((3, 4), 4.0))
    unused = torch.autograd.grad(x["a"].sum(), x, allow_unused=True)
    assert set(unused.keys(True, True)) == {"a"}


def test_equal_and_allclose():
    x = tree()
    assert torch.equal(x, x.clone()) and x.equal(x.clone())
    assert not torch.equal(x, x + 1) and not x.equal(x.exclude("a")) and not x.equal(1)
    assert not x.equal(x.clone().update({"s": "other"}))
    near = x + 1e-9
    assert torch.allclose(x, near) and x.allclose(near) and not x.allclose(x + 1)
    assert x.allclose(x + 1, atol=2) and not x.allclose(0)
    assert torch.allclose(torch.zeros(3), x * 0)


def test_functional_forms():
    x = tree() - 0.5
    assert_close(F.relu(x)["a"], F.relu(x["a"]))
    assert F.relu(x, inplace=True) is x and (x["a"] >= 0).all()
    assert_close(torch.clamp(x, 0, 0.1)["a"], x["a"].clamp(0, 0.1))


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: torch.einsum("ij->j", x),
        lambda x: torch.matmul(x, x),
        lambda x: torch.sort(x),
        lambda x: torch.linalg.svd(x),
        lambda x: F.conv1d(x, x),
        lambda x: torch.exp(x, out=x),
        lambda x: torch.ones(3).add_(x),
        lambda x: x @ x,
    ],
)
def test_functions_without_a_rule(fn):
    with pytest.raises(TypeError):
        fn(tree())
