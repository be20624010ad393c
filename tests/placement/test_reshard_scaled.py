"""Reshards to 8-bit floats: values and scales of whole tensors, cut afterwards, bit for bit."""

import itertools
import json

import pytest
import torch

from tensordict import TensorDict
from tensordict.distributed import DoubleBuffer, reshard_scaled
from tensordict.distributed.golden import evaluate, shard
from tensordict.distributed.testing import CountingTransport, LoopbackGroup
from tensordict.errors import LayoutError, PlanMismatch
from tensordict.placement import (
    Box,
    CastPolicy,
    Layout,
    Layouts,
    Placement,
    ScaledPlan,
    convert,
    plan_reshard,
    plan_scaled_reshard,
    views,
)

FP8 = torch.float8_e4m3fn
R = Placement("replicate")
SUM = Placement("partial", reduce_op="sum")


def S(dim, factor=1):
    return Placement("shard", dim, factor)


def lay(shape, mesh, placements, first=0, dtype=torch.float32):
    ranks = range(first, first + torch.Size(mesh).numel())
    return Layout.from_placements(shape, mesh, placements, ranks=ranks, dtype=dtype)


def data(shape, seed=0):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return x * torch.logspace(-3, 4, x.numel()).view(shape)


def scaled_whole(x, extents):
    """Scales and values of a whole tensor, block by block."""
    before = x.ndim - len(extents)
    extents = [1] * before + [n if e < 0 else e for n, e in zip(x.shape[before:], extents)]
    grid = [-(-n // e) for n, e in zip(x.shape, extents)]
    scales = torch.ones(grid)
    values = torch.zeros(x.shape, dtype=FP8)
    for at in itertools.product(*map(range, grid)):
        block = tuple(slice(i * e, (i + 1) * e) for i, e in zip(at, extents))
        largest = x[block].float().abs().max()
        scales[at] = largest / 448 if largest > 0 else 1
        values[block] = (x[block].float() / scales[at]).to(FP8)
    return scales, values


def run(plan, layouts, whole, size, **options):
    local = {name: shard(layout, whole[name]) for name, layout in layouts.items()}

    def main(transport):
        counting = CountingTransport(transport)
        rank = transport.rank
        mine = {name: parts[rank] for name, parts in local.items() if rank in parts}
        out = reshard_scaled(mine, plan, transport=counting, **options).wait(30)
        sent = sum(m.nbytes for m in counting.messages if m.verb == "send" and not m.control)
        return out, sent

    return LoopbackGroup(size).run(main)


def same(a, b):
    assert a.dtype is b.dtype and a.shape == b.shape
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


LAYOUTS = [
    (lay((7, 10), [4], [S(0)]), lay((7, 10), [2], [S(1)], 3)),
    (lay((7, 10), [2, 2], [S(0, 2), S(0)]), lay((7, 10), [2], [R], 4)),
    (lay((7, 10), [2, 2], [R, S(1)]), lay((7, 10), [3], [S(0)])),
    (
        Layout.from_boxes(
            (7, 10), {0: [Box((0, 0), (3, 10)), Box((3, 0), (4, 4))],
                      1: [Box((3, 4), (4, 10)), Box((4, 0), (7, 10))]}, dtype=torch.float32,
        ),
        lay((7, 10), [4], [S(0)]),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("src", "dst"), LAYOUTS)
def test_one_scale_is_that_of_the_whole_tensor(src, dst):
    dst = dst.as_dtype(None)
    whole = {"w": data((7, 10)), "norm": torch.ones(7, 10)}
    policy = CastPolicy({"norm": None}, default=FP8, scale="tensor")
    plan = plan_scaled_reshard({"w": src, "norm": src}, {"w": dst, "norm": dst}, policy)
    expected = convert(TensorDict(whole), policy)
    for rank, (out, sent) in enumerate(run(plan, {"w": src, "norm": src}, whole, 6)):
        least = sum(p.sent_bytes(rank) for p in (plan.values, plan.amax, plan.spread))
        assert sent == least
        if not dst.has_rank(rank):
            assert out is None
            continue
        assert set(out.keys()) == {"w", "w_scale", "norm"}
        assert same(out["w"], shard(dst, expected["w"])[rank])
        assert same(out["w_scale"], expected["w_scale"])
        assert not any(x.is_inference() for x in out.values())
        assert out["norm"].dtype is torch.float32
    assert plan.values.total_bytes == plan.values.optimal_bytes


@pytest.mark.parametrize("block", [(2, 3), (4, 16), (1, -1), (-1, 5), (3,)])
@pytest.mark.parametrize(("src", "dst"), LAYOUTS)
def test_blocks_cut_by_shards(src, dst, block):
    x = data((7, 10), 1)
    x[0, 0], x[1:3, :6] = float("inf"), 0
    finite = x.clone()
    finite[0, 0] = 0
    scales, values = scaled_whole(finite, block)
    # The scales themselves may be sharded too.
    ranks = list(dst.ranks)
    split = Layout.from_placements(scales.shape, [len(ranks)], [S(0)], ranks=ranks)
    wanted = {"w": dst.as_dtype(None), "w_scale": split}
    plan = plan_scaled_reshard({"w": src}, wanted, FP8, block=block)
    plan = ScaledPlan.from_json(json.loads(json.dumps(plan.to_json())))
    for rank, (out, _) in enumerate(run(plan, {"w": src}, {"w": x}, 6)):
        if rank in ranks:
            assert same(out["w_scale"], shard(split, scales)[rank])
            at, right = out["w"].float(), shard(dst, values)[rank].float()
            kept = shard(dst, x)[rank].isfinite()
            assert torch.equal(at[kept], right[kept])


def test_fused_split_and_tied_tensors():
    src = Layouts(
        {
            "m.q": lay((8, 6), [2], [S(0)]),
            "m.k": lay((4, 6), [2], [S(0)]),
            "m.embed": lay((6, 6), [2], [S(1)], dtype=torch.float64),
            "m.head": lay((6, 6), [2], [S(1)], dtype=torch.float64),
            "m.both": lay((8, 5), [2], [S(0)]),
            "m.bias": lay((8,), [2], [S(0)]),
        },
        ties={"m.head": "m.embed"},
    )
    made = {
        "qk": views.interleave(["q", "k"], 2),
        "left": views.piece("both", 0, 2),
        "right": views.transpose(views.piece("both", 1, 2)),
    }
    dst = {
        "qk": lay((12, 6), [2], [S(0)], 1, None),
        "left": lay((4, 5), [2], [R], 1, None),
        "right": lay((5, 4), [2], [S(0)], 1, None),
        "embed": lay((6, 6), [2], [S(0)], 1, None),
        "head": lay((6, 6), [2], [S(0)], 1, None),
        "bias": lay((8,), [2], [R], 1, None),
    }
    whole = {n: data(x.shape, i).to(x.dtype) for i, (n, x) in enumerate(src.items())}
    whole["m.head"] = whole["m.embed"]
    policy = CastPolicy({"bias": torch.bfloat16}, default=FP8, scale="tensor")
    plan = plan_scaled_reshard(src, dst, policy, rename=strip("m.", src), views=made)
    named = {name[2:]: x for name, x in whole.items()}
    for out, _ in run(plan, src, whole, 3)[1:]:
        assert out["bias"].dtype is torch.bfloat16 and "bias_scale" not in out
        assert out["head"] is out["embed"] and same(out["head_scale"], out["embed_scale"])
    results = [out for out, _ in run(plan, src, whole, 3)]
    for name in ("qk", "left", "right", "embed"):
        full = evaluate(made[name], named) if name in made else named[name]
        expected = convert(TensorDict({name: full}), CastPolicy(default=FP8, scale="tensor"))
        for rank, part in shard(dst[name], expected[name]).items():
            assert same(results[rank][name], part)
            assert same(results[rank][f"{name}_scale"], expected[f"{name}_scale"])


def strip(prefix, names):
    return {name: name.removeprefix(prefix) for name in names}


def test_what_cannot_be_scaled_is_said_at_once():
    src = {
        "sum": lay((4, 4), [2], [SUM]),
        "two": lay((4, 4), [2], [S(0)]),
        "int": lay((4, 4), [2], [S(0)], dtype=torch.int32),
        "old": lay((4, 4), [2], [S(0)], dtype=FP8),
        "old_scale": lay((), [2], [R]),
        "row": lay((4,), [2], [S(0)]),
    }
    make = {"a": views.leaf("two"), "b": views.narrow("two", 1, 2)}
    rows = lay((4, 4), [2], [S(0)], dtype=None)
    dst = {
        "sum": rows,
        "a": rows,
        "b": lay((2, 4), [2], [S(0)], dtype=None),
        "int": rows.as_dtype(FP8),
        "row": lay((4,), [2], [R], dtype=None),
        "a_scale": lay((3,), [2], [R], dtype=torch.float16),
    }
    with pytest.raises(LayoutError) as caught:
        plan_scaled_reshard(src, dst, FP8, views=make, block=(2, 2))
    for part in (
        "partial sum: reduce it", "under scales of their own", "of int32: expected floating-point",
        "shape [4] has no blocks", "shape [3], there are [2, 2] blocks", "float16: scales are",
    ):  # fmt: skip
        assert part in str(caught.value)
    with pytest.raises(LayoutError, match="not the scale of an 8-bit tensor"):
        plan_scaled_reshard(src, {"row": dst["row"], "row_scale": dst["row"]}, "bf16")
    with pytest.raises(LayoutError, match="expected extents"):
        plan_scaled_reshard(src, {"two": rows}, FP8, block=(0,))
    # Values that are 8-bit already move as they are, with their scales.
    plan = plan_scaled_reshard(src, {n: src[n] for n in ("old", "old_scale")}, FP8)
    assert not plan.sections and plan.values.dst["old_scale"].dtype is torch.float32
    policy = CastPolicy(default=FP8, scale="tensor")
    with pytest.raises(LayoutError, match="plan_scaled_reshard"):
        plan_reshard({"two": rows}, {"two": rows}, dtype=policy)
    with pytest.raises(LayoutError, match="convert what arrives"):
        plan_reshard(
            {"old": src["old"]}, {"old": rows}, dtype=CastPolicy(default="bf16", scale="tensor")
        )


@pytest.mark.parametrize("partial", [False, True])
def test_live_tensors_and_a_loader(partial):
    src = {"w": lay((4, 6), [2], [S(0)])}
    dst = {"w": lay((4, 6), [2], [S(1)], 1, None)}
    plan = plan_scaled_reshard(src, dst, FP8)
    x = data((4, 6))
    scale, values = scaled_whole(x, (-1, -1))
    parts = shard(src["w"], x)

    def main(transport):
        rank, seen = transport.rank, []
        mine = {"w": parts[rank]} if rank < 2 else None
        if rank == 0:
            return reshard_scaled(mine, plan, transport=transport).wait(20)
        out = TensorDict({"w": torch.zeros(4, 3, dtype=FP8), "w_scale": torch.zeros(())})
        back = reshard_scaled(
            mine, plan, transport=transport, out=out, partial=partial,
            loader=lambda name, value: seen.append(name),
        ).wait(20)  # fmt: skip
        assert back is out and same(out["w_scale"], scale.view(()))
        assert same(out["w"], shard(dst["w"], values)[rank])
        return seen

    assert LoopbackGroup(3).run(main) == [None, ["w", "w_scale"], ["w", "w_scale"]]


def test_some_tensors_alone():
    src = {name: lay((4, 6), [2], [S(0)]) for name in ("a", "b", "c")}
    dst = {"ab": lay((8, 6), [1], [R], 2, None), "c": lay((4, 6), [1], [R], 2, None)}
    made = {"ab": views.concat(["a", "b"])}
    plan = plan_scaled_reshard(src, dst, FP8, views=made, only="c")
    assert list(plan.dst) == ["c", "c_scale"] and plan.values.unused == ("a", "b")
    assert ScaledPlan.from_json(json.loads(json.dumps(plan.to_json()))).hash == plan.hash


def test_a_double_buffer_has_scales_too():
    src = {"w": lay((4, 6), [2], [S(0)])}
    plan = plan_scaled_reshard(src, {"w": lay((4, 6), [1], [R], 2, None)}, FP8, block=(1, -1))
    buffer = DoubleBuffer(plan, 2)
    assert buffer.back["w"].dtype is FP8 and buffer.back["w_scale"].shape == (4, 1)


def test_misfits_and_other_blocks_are_told_to_all_before_the_first_byte():
    src = {"w": lay((4, 6), [2], [S(0)])}
    dst = {"w": lay((4, 6), [2], [S(1)], 1, None)}
    plans = [plan_scaled_reshard(src, dst, FP8, block=b) for b in ((2, 2), (4, 1))]
    assert plans[0].n_scales == plans[1].n_scales
    sent = []

    def main(transport, plan, mine):
        counting = CountingTransport(transport)
        out = None
        if transport.rank:
            out = {"w": torch.zeros(4, 3, dtype=FP8), "w_scale": torch.zeros(2, 2)}
        try:
            reshard_scaled(mine, plan, transport=counting, out=out).wait(20)
        except Exception as error:
            return error
        finally:
            sent.extend(m for m in counting.messages if not m.control)
            assert out is None or not out["w"].float().any()

    group = LoopbackGroup(3)
    mine = {"w": torch.ones(2, 6)}
    errors = group.run(lambda t: main(t, plans[0], mine if t.rank == 1 else {}))
    assert {type(error) for error in errors} == {PlanMismatch} and not sent
    for part in ("'w'", "rank 0: missing in the source", "rank 2", "w_scale", "[2, 2] in out"):
        assert part in str(errors[2])
    errors = LoopbackGroup(3).run(lambda t: main(t, plans[t.rank // 2], mine if t.rank < 2 else {}))
    assert {type(error) for error in errors} == {PlanMismatch} and not sent
