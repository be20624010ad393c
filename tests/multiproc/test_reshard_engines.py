"""Weights between the engines of torch on 4 gloo ranks, and what the engines then compute."""

import itertools

import pytest
import torch
import torch.distributed as dist
from tests.multiproc.engines import KINDS, PLAN, Model, engine, extents, new_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from tensordict import TensorDict
from tensordict.distributed import reshard, reshard_scaled
from tensordict.distributed.golden import shard
from tensordict.distributed.testing import run_ranks
from tensordict.placement import (
    CastPolicy,
    convert,
    layouts_of,
    model_layouts,
    optimizer_tensors,
    plan_reshard,
    plan_scaled_reshard,
)

pytestmark = pytest.mark.ranks
TOKENS = torch.arange(13).view(1, 13)


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def planned(kind, ranks, dtype=None):
    with torch.device("meta"):
        module = Model()
    return model_layouts(
        module, ranks=ranks, mesh_shape=extents(kind, ranks), axes=KINDS[kind][1],
        plan=PLAN, dtype=dtype,
    )  # fmt: skip


def boxes(layouts):
    return {name: (layout.boxes, layout.dtype) for name, layout in layouts.items()}


def layouts_are_foreseen(rank, size):
    for kind in KINDS:
        real = layouts_of(engine(kind, range(size)))
        assert boxes(real) == boxes(planned(kind, range(size))), kind
    return True


def test_layouts_of_engines_are_those_foreseen():
    assert all(run_ranks(layouts_are_foreseen, 4))


def between_engines(rank, size):
    """Every kind to every other: new values into live parameters; then forward and a step."""
    expected = new_model(1)
    golden = expected.state_dict()
    logits = expected(TOKENS)
    for src_kind, dst_kind in itertools.product(KINDS, repeat=2):
        src = engine(src_kind, range(size), seed=1)
        dst = engine(dst_kind, range(size), seed=2)
        plan = plan_reshard(layouts_of(src), layouts_of(dst))
        assert plan.efficiency == 1.0
        plan.check_coverage()
        reshard(src, plan, out=dst).wait(60)
        where = (src_kind, dst_kind)
        for name, value in dst.state_dict().items():
            assert torch.equal(full(value), golden[name]), (*where, name)
        optimizer = torch.optim.SGD(dst.parameters(), lr=0.1)
        out = full(dst(TOKENS))
        torch.testing.assert_close(out, logits, msg=str(where))
        out.square().mean().backward()
        optimizer.step()
        same = [n for n, v in dst.state_dict().items() if torch.equal(full(v), golden[n])]
        assert same == ["scale"], (where, same)
    return True


def test_weights_go_between_all_engines():
    assert all(run_ranks(between_engines, 4, timeout=240))


def to_other_ranks(rank, size):
    """A trainer on ranks 0 and 1, tensor parallel in bfloat16 on ranks 2 and 3."""
    kinds = [("fsdp", "tp"), ("fsdp", "plain"), ("tp", "fsdp")]
    for src_kind, dst_kind in kinds:
        src_layouts = planned(src_kind, [0, 1])
        dst_layouts = planned(dst_kind, [2, 3], torch.bfloat16)
        plan = plan_reshard(src_layouts, dst_layouts)
        golden = {k: v.to(torch.bfloat16) for k, v in new_model(1).state_dict().items()}
        # Meshes are made by all ranks.
        trainer = engine(src_kind, [0, 1], seed=1)
        server = engine(dst_kind, [2, 3], seed=2)
        if rank < 2:
            assert boxes(layouts_of(trainer, ranks=[0, 1])) == boxes(src_layouts)
            assert reshard(trainer, plan).wait(60) is None
        else:
            server.to(torch.bfloat16)
            assert boxes(layouts_of(server, ranks=[2, 3])) == boxes(dst_layouts)
            reshard(None, plan, out=server, partial=True).wait(60)
            for name, value in server.state_dict().items():
                assert torch.equal(full(value), golden[name]), (src_kind, dst_kind, name)
    return True


def test_weights_go_to_other_ranks_in_another_dtype():
    assert all(run_ranks(to_other_ranks, 4, timeout=120))


def with_optimizer(rank, size):
    """Parameters and AdamW states from FSDP to FSDP over tensor parallelism; both go on alike."""

    def trained(kind, seed, steps):
        model = engine(kind, range(size), seed)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for _ in range(steps):
            step(model, optimizer)
        return model, optimizer

    def step(model, optimizer):
        optimizer.zero_grad()
        full(model(TOKENS)).square().mean().backward()
        optimizer.step()

    src, src_optimizer = trained("fsdp", 1, 2)
    dst, dst_optimizer = trained("fsdp over tp", 2, 1)
    states = [optimizer_tensors(m, o) for m, o in ((src, src_optimizer), (dst, dst_optimizer))]
    for a, b in ((src, dst), states):
        plan = plan_reshard(layouts_of(a), layouts_of(b))
        assert plan.efficiency == 1.0
        reshard(a, plan, out=b).wait(60)
    for name, value in states[1].items():
        assert torch.equal(full(value), full(states[0][name])), name
    step(src, src_optimizer)
    step(dst, dst_optimizer)
    for name, value in dst.state_dict().items():
        torch.testing.assert_close(full(value), full(src.state_dict()[name]), msg=name)
    return True


def test_optimizer_states_follow_and_training_goes_on():
    assert all(run_ranks(with_optimizer, 4, timeout=120))


def to_8_bit_floats(rank, size):
    """Weights of every kind of engine as 8-bit floats with scales on two other shards."""
    keep = dict.fromkeys(("*norm*", "*bias", "embed*"), torch.bfloat16)
    policy = CastPolicy({**keep, "scale": None}, default="fp8", scale="tensor")
    whole = {tuple(name.split(".")): x for name, x in new_model(1).state_dict().items()}
    golden = convert(TensorDict(whole), policy)
    server = {name: x.as_dtype(None) for name, x in planned("tp", [1, 3]).items()}
    for kind in KINDS:
        trainer = engine(kind, range(size), seed=1)
        plan = plan_scaled_reshard(layouts_of(trainer), server, policy)
        out = reshard_scaled(trainer, plan).wait(60)
        assert (out is None) == (rank not in (1, 3)) and "blocks.0.up.weight_scale" in plan.dst
        for name, layout in plan.dst.items() if out is not None else ():
            expected = shard(layout, golden[tuple(name.split("."))])[rank]
            got = out[tuple(name.split("."))]
            assert got.dtype is expected.dtype
            assert torch.equal(got.float(), expected.float()), (kind, name)
    return True


def test_weights_become_8_bit_floats_on_the_way():
    assert all(run_ranks(to_8_bit_floats, 4, timeout=120))


def in_a_subgroup(rank, size):
    """Ranks of the plan are those of the world, whatever the group."""
    group = dist.new_group([1, 3])
    src = engine("plain", [3], 1)
    plan = plan_reshard(planned("plain", [3]), planned("plain", [1], torch.float16))
    if rank in (1, 3):
        out = reshard(src if rank == 3 else None, plan, group=group).wait(60)
        if rank == 1:
            weight = new_model(1).head.weight.detach().to(torch.float16)
            assert torch.equal(out["head", "weight"], weight)
    dist.barrier()
    return True


def test_sub_groups():
    assert all(run_ranks(in_a_subgroup, 4))


def by_distribute_tensor(rank, size):
    """Layouts against the local tensors of ``distribute_tensor``, uneven and strided ones too."""
    meshes = [init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))]
    for shape, mesh in itertools.product([(8, 6), (7, 5), (3, 1), (2, 9)], meshes):
        kinds = [Replicate(), Shard(0), Shard(1)]
        every = list(itertools.product(kinds, repeat=mesh.ndim))
        if mesh.ndim == 2:
            every.append((_StridedShard(0, split_factor=2), Shard(0)))
        whole = torch.arange(torch.Size(shape).numel()).view(shape)
        for placements in every:
            made = distribute_tensor(whole, mesh, placements, src_data_rank=None)
            layout = layouts_of({"w": made})["w"]
            assert torch.equal(made.to_local(), shard(layout, whole)[rank]), (shape, placements)
    return True


def test_layouts_are_those_of_distribute_tensor():
    assert all(run_ranks(by_distribute_tensor, 4))
