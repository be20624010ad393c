"""Mixed-precision conversion: what is cast, counted, refused, and how much memory it takes."""

import json
import math
import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn

from tensordict import TensorDict
from tensordict.errors import EntryTypeError, LockedError, LossyCast
from tensordict.placement import (
    CastPolicy,
    Loss,
    Masters,
    convert,
    convert_module,
    guess_family,
    policy_for,
)
from tensordict.placement.families import FAMILIES


def state():
    w = torch.tensor([[1.0, 1e6], [1e-9, -2.0]])
    return TensorDict(
        {
            "embed": {"weight": w},
            "layer": {"weight": torch.tensor([0.1, 3.0]), "norm": torch.ones(2)},
            "head": {"weight": w},
            "step": torch.tensor(300),
            "name": "state",
        }
    )


FULL = CastPolicy({"*norm*": None}, default="fp16", on_lossy="allow", check="full")


def test_a_policy_casts_what_it_says_and_ties_stay():
    out = convert(state(), CastPolicy.mixed())
    assert out["layer", "weight"].dtype is torch.bfloat16
    assert out["layer", "norm"].dtype is torch.float32 and out["step"].dtype is torch.int64
    assert out["name"] == "state"
    low = convert(state(), FULL)
    assert low["embed", "weight"].data_ptr() == low["head", "weight"].data_ptr()


def test_the_report_names_every_lossy_leaf_with_its_counts():
    out, report = convert(state(), FULL, report=True)
    assert report.n_leaves == 5 and report.n_cast == 3
    lossy = {leaf.path: leaf for leaf in report.lossy}
    assert set(lossy) == {("embed", "weight"), ("layer", "weight"), ("head", "weight")}
    counts = lossy["embed", "weight"].counts
    assert (counts.n_overflow, counts.n_underflow) == (1, 1)
    assert lossy["layer", "weight"].lost == Loss.ROUNDING
    assert [leaf.path for leaf in report.beyond_rounding()] == [
        ("embed", "weight"),
        ("head", "weight"),
    ]
    assert report.nbytes_before == (4 + 2 + 2) * 4 + 8
    assert report.nbytes_after == (4 + 2) * 2 + 2 * 4 + 8
    for path in ("embed.weight", "layer.weight", "head.weight"):
        assert path in report.table()
    json.dumps(report.to_json())
    assert math.isinf(out["embed", "weight"][0, 1])


def test_error_refuses_by_values_and_changes_nothing():
    td = state()
    before = dict(td.items(True, True))
    policy = CastPolicy(default="fp16", on_lossy="error", check="full")
    with pytest.raises(LossyCast, match="2 leaves lose more than digits") as error:
        convert(td, policy, inplace=True)
    assert "embed.weight" in str(error.value) and "1 of 4 overflow" in str(error.value)
    assert len(error.value.report.lossy) == 3
    assert all(td[key] is x for key, x in before.items())
    td["embed", "weight"].clamp_(-5, 5).abs_().add_(1)
    assert convert(td, policy)["embed", "weight"].dtype is torch.float16


def test_without_a_look_at_values_the_pair_decides():
    with pytest.raises(LossyCast, match=r"check='full' decides by values"):
        convert(state(), CastPolicy(default="fp16", on_lossy="error"))
    convert(state(), CastPolicy(default="bf16", on_lossy="error"))


def test_warn_and_allow():
    with pytest.warns(UserWarning, match="leaves lose more than digits"):
        convert(state(), CastPolicy(default="fp16", check="full"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        convert(state(), FULL)
        convert(state(), CastPolicy(default="bf16", check="full"))


def test_kind_losses_are_refused_too():
    td = TensorDict({"c": torch.tensor([1 + 2j]), "x": torch.tensor([1.5])})
    policy = CastPolicy(default=torch.float32, floating_only=False, on_lossy="error", check="full")
    with pytest.raises(LossyCast, match="lose their fraction or imaginary part"):
        convert(td, policy)
    with pytest.raises(LossyCast, match="x"):
        convert(td.select("x"), CastPolicy(default=torch.int32, on_lossy="error", check="full"))


def test_a_sample_counts_fewer_elements():
    td = TensorDict({"w": torch.zeros(1 << 18)})
    policy = CastPolicy(default="fp16", check="sample")
    assert convert(td, policy, report=True)[1].leaves[0].counts.n_checked <= 1 << 16


def test_in_place_keeps_the_tree_and_refuses_locks():
    td = state()
    nested = td["layer"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert convert(td, FULL, inplace=True) is td
    assert td["layer"] is nested and nested["weight"].dtype is torch.float16
    assert td["embed", "weight"] is td["head", "weight"]
    with pytest.raises(LockedError):
        convert(state().lock_(), FULL, inplace=True)
    assert convert(state().lock_(), FULL).is_locked


def test_exact_casts_come_back():
    td = TensorDict({"w": torch.randn(100).bfloat16()})
    wide = convert(td, CastPolicy(default="fp32", on_lossy="error"))
    back = convert(wide, CastPolicy(default="bf16", on_lossy="error", check="full"))
    assert torch.equal(back["w"], td["w"])


# --- fp8 with scales ------------------------------------------------------------------


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_keeps_a_scale_beside_each_leaf_and_comes_back(dtype, inplace):
    td = TensorDict({"a": {"w": torch.randn(64) * 1e5, "norm": torch.ones(3)}, "z": torch.zeros(4)})
    source = td.clone()
    policy = CastPolicy(
        {"*norm*": None}, default=dtype, scale="tensor", on_lossy="error", check="full"
    )
    low = convert(td, policy, inplace=inplace)
    assert low["a", "w"].dtype is dtype and low["a", "w_scale"].shape == ()
    assert low["z_scale"] == 1 and low["a", "norm"].dtype is torch.float32
    assert float(low["a", "w"].float().abs().max()) == torch.finfo(dtype).max
    back = convert(low, CastPolicy(default="fp32", scale="tensor"), inplace=inplace)
    assert set(back.keys(True, True)) == set(source.keys(True, True))
    relative = (back["a", "w"] - source["a", "w"]).abs() / source["a", "w"].abs()
    assert float(relative.median()) < 2.0 ** -(2 if dtype is torch.float8_e5m2 else 3)


def test_scales_are_one_per_batch_element():
    td = TensorDict({"w": torch.tensor([[1.0, 2.0], [1000.0, 500.0]])}, batch_size=[2]).lock_()
    low = convert(td, CastPolicy(default="fp8", scale="tensor"))
    assert low.is_locked and low["w_scale"].shape == (2,)
    back = convert(low, CastPolicy(default="fp32", scale="tensor"))
    assert torch.allclose(back["w"], td["w"], rtol=0.07)
    assert low["w_scale"].tolist() == pytest.approx([2 / 448, 1000 / 448])


def test_fp8_without_a_scale_overflows_and_says_so():
    td = TensorDict({"w": torch.tensor([1e5])})
    with pytest.raises(LossyCast, match="1 of 1 overflow"):
        convert(td, CastPolicy(default="fp8", on_lossy="error", check="full"))


# --- memory ---------------------------------------------------------------------------

PEAK = """
import resource, sys, torch
from tensordict import TensorDict
from tensordict.placement import CastPolicy, convert
torch.set_num_threads(1)
MIB = 1 << 20
convert(TensorDict({"x": torch.ones(4096)}), CastPolicy(default="bf16"), inplace=True)
td = TensorDict({f"k{i}": torch.ones(16 * MIB // 4) for i in range(64)})
start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
sys.argv[1] == "convert" and convert(td, CastPolicy(default="bf16"), inplace=True)
sys.argv[1] == "to" and td.to(torch.bfloat16, inplace=True)
sys.argv[1] == "copy" and td.to(torch.bfloat16)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read as Linux reports it")
@pytest.mark.parametrize("how", ["convert", "to"])
def test_a_gibibyte_is_cast_in_place_within_64_mebibytes(how):
    done = subprocess.run(
        [sys.executable, "-c", PEAK, how], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) <= 64 << 10  # kilobytes


# --- masters and modules -----------------------------------------------------------------


def test_masters_are_paired_by_name_and_refreshed_in_place():
    pair = Masters(TensorDict({"w": torch.ones(3), "norm": torch.ones(3)}), CastPolicy.mixed())
    low = pair.working["w"]
    assert pair.working["norm"] is pair.master["norm"]
    pair.master["w"].add_(0.5)
    assert pair.refresh() is pair and pair.working["w"] is low and low.tolist() == [1.5] * 3
    low.requires_grad_()
    (low * 2).sum().backward()
    pair.take_gradients().take_gradients()
    assert pair.master["w"].grad.dtype is torch.float32 and pair.master["w"].grad.tolist() == [
        2,
        2,
        2,
    ]
    assert low.grad is None
    assert [path for path, _, _ in pair.pairs()] == [("w",), ("norm",)]
    del pair.working["w"]
    with pytest.raises(KeyError, match="'w'"):
        list(pair.pairs())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.layer = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        dtype = self.layer.weight.dtype
        return self.head(
            self.norm(self.layer(self.embed(x).to(dtype)).float()).to(self.head.weight.dtype)
        )


def test_a_live_module_is_converted_and_its_optimiser_goes_on():
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    net(torch.arange(5)).sum().backward()
    optimizer.step()
    before = dict(net.named_parameters(remove_duplicate=False))
    policy = CastPolicy({"*norm*": None}, default="bf16", check="full")
    _, report = convert_module(net, policy, optimizer=optimizer, report=True)
    assert all(p is before[name] for name, p in net.named_parameters(remove_duplicate=False))
    assert net.head.weight is net.embed.weight and net.head.weight.dtype is torch.bfloat16
    assert net.norm.running_mean.dtype is torch.float32 and net.layer.bias.dtype is torch.bfloat16
    assert net.norm.num_batches_tracked.dtype is torch.int64
    assert net.embed.weight.grad.dtype is torch.bfloat16
    moments = optimizer.state[net.layer.weight]
    assert moments["exp_avg"].dtype is torch.bfloat16 and moments["step"].dtype is torch.float32
    assert report.n_cast == 4 and all(leaf.counts is not None for leaf in report.leaves)
    optimizer.zero_grad()
    net(torch.arange(5)).float().sum().backward()
    weight = net.embed.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(weight, net.embed.weight)


def test_a_refused_module_is_as_it_was():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with torch.no_grad():
        net[1].weight.fill_(1e6)
    with pytest.raises(LossyCast, match=r"1\.weight"):
        convert_module(net, CastPolicy(default="fp16", on_lossy="error", check="full"))
    assert {p.dtype for p in net.parameters()} == {torch.float32}


def test_tied_buffers_stay_tied():
    net = nn.Module()
    net.a, net.b = nn.Module(), nn.Module()
    table = torch.ones(3)
    net.a.register_buffer("t", table)
    net.b.register_buffer("t", table)
    convert_module(net, CastPolicy(default="bf16"))
    assert net.a.t is net.b.t and net.a.t.dtype is torch.bfloat16


# --- families ---------------------------------------------------------------------------

NAMES = {
    "bert": ["encoder.layer.0.attention.self.query.weight", "encoder.layer.0.attention.output.dense.weight"],
    "gpt2": ["wte.weight", "h.0.attn.c_attn.weight"],
    "llama": ["layers.0.self_attn.q_proj.weight", "layers.0.mlp.gate_proj.weight"],
    "mixtral": ["layers.0.block_sparse_moe.experts.0.w1.weight", "layers.0.self_attn.q_proj.weight"],
    "t5": ["block.0.layer.0.SelfAttention.q.weight", "block.0.layer.0.relative_attention_bias.weight"],
    "vit": ["patch_embed.proj.weight", "blocks.0.attn.qkv.weight"],
    "whisper": ["encoder.conv1.weight", "decoder.layers.0.encoder_attn.q_proj.weight"],
    "mamba": ["layers.0.mixer.A_log", "layers.0.mixer.in_proj.weight"],
    "resnet": ["layer1.0.conv1.weight", "layer1.0.bn1.weight"],
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_families_are_guessed_from_their_names(family):
    paths = [tuple(name.split(".")) for name in NAMES[family]]
    assert guess_family(paths) == family
    policy = policy_for(family, on_lossy="error")
    assert policy.default is torch.bfloat16 and policy.on_lossy == "error"


def test_what_is_no_family():
    assert guess_family([("a",)]) == "mixed"
    assert policy_for("mixed") == CastPolicy.mixed()
    with pytest.raises(EntryTypeError, match="expected one of"):
        policy_for("parrot")


def test_patterns_of_families_never_warn():
    td = TensorDict({"a": torch.ones(1)})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for family in FAMILIES:
            convert(td, policy_for(family))


def test_a_dtype_is_a_policy():
    assert convert(TensorDict({"a": torch.ones(1)}), "bf16")["a"].dtype is torch.bfloat16
    assert convert_module(nn.Linear(1, 1), torch.bfloat16).weight.dtype is torch.bfloat16
    with pytest.raises(EntryTypeError, match="expected a CastPolicy or a dtype"):
        convert(TensorDict(), 3)


def test_ragged_leaves_are_cast_by_a_policy():
    rows = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    td = TensorDict({"rows": rows, "x": torch.ones(2)}, batch_size=[2])
    out, report = convert(td, CastPolicy(default="bf16"), report=True)
    assert report.nbytes_before == 2 * report.nbytes_after == 4 * 7
    assert out["rows"].dtype is torch.bfloat16 and out["rows"].unbind()[1].tolist() == [1, 1, 1]
