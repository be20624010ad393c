"""Plans: names, views, ties, errors, balance, hosts, identity, reports."""

import json

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel

from tensordict.distributed.golden import evaluate, golden_reshard, shard, simulate_reshard
from tensordict.errors import LayoutError, MissingKeyError, PlanMismatch
from tensordict.placement import Box, CastPolicy, Layout, Placement, views
from tensordict.placement.models import follow, layouts_of, model_layouts
from tensordict.placement.renames import strip_wrappers
from tensordict.placement.reshard import Layouts, ReshardPlan, plan_reshard
from tensordict.placement.reshard_program import count_messages

R = Placement("replicate")
F32, BF16 = torch.float32, torch.bfloat16


def S(dim, factor=1):
    return Placement("shard", dim, factor)


def rows(shape, ranks, dtype=F32):
    return Layout.from_placements(shape, [len(ranks)], [S(0)], ranks=ranks, dtype=dtype)


def columns(shape, ranks, dtype=None):
    return Layout.from_placements(shape, [len(ranks)], [S(1)], ranks=ranks, dtype=dtype)


def run(plan, full):
    """Simulated and golden results of a plan, which must be equal; returns them."""
    local = {name: shard(layout, full[name]) for name, layout in plan.src.items()}
    sources = {
        rank: {name: parts[rank] for name, parts in local.items() if rank in parts}
        for rank in plan.ranks
    }
    results, traffic = simulate_reshard(plan, sources)
    golden = golden_reshard(plan, full)
    assert results.keys() == golden.keys()
    for rank, expected in golden.items():
        assert results[rank].keys() == expected.keys()
        for name, value in expected.items():
            assert results[rank][name].dtype is value.dtype
            assert torch.equal(results[rank][name], value), (rank, name)
    assert sum(traffic.sent.values()) == plan.total_bytes
    assert traffic.n_messages == count_messages(plan)
    plan.check_coverage()
    return results


def numbers(*shape):
    return torch.arange(torch.Size(shape).numel(), dtype=F32).reshape(shape) + 1


# --- names -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rename",
    [
        {"model.a.weight": "a", "model.b.weight": "b"},
        {"model.{x}.weight": "{x}"},
        lambda name: name.split(".")[1],
        [lambda name: name.removeprefix("model."), {"a.weight": "a", "b.weight": "b"}],
    ],
)
def test_sources_are_renamed(rename):
    src = {"model.a.weight": rows((4, 2), [0, 1]), ("model", "b", "weight"): rows((3, 2), [0, 1])}
    plan = plan_reshard(src, {"a": rows((4, 2), [2]), "b": rows((3, 2), [2])}, rename=rename)
    run(plan, {"model.a.weight": numbers(4, 2), "model.b.weight": numbers(3, 2)})


def test_wrappers_are_stripped_and_states_follow_their_parameter():
    src = {"_orig_mod.h.0.w": rows((4, 2), [0]), "_orig_mod.h.0.w.exp_avg": rows((4, 2), [0])}
    dst = {"x.0.w": rows((4, 2), [1]), "x.0.w.exp_avg": rows((4, 2), [1])}
    plan = plan_reshard(src, dst, rename=[strip_wrappers, {"h.{i}": "x.{i}"}])
    run(plan, {name: numbers(4, 2) for name in src})


def test_a_subset_moves_alone():
    src = {f"h.{i}.{kind}": rows((4, 2), [0, 1]) for i in range(3) for kind in ("w", "lora_a")}
    dst = {name: columns((4, 2), [0, 1]) for name in src}
    plan = plan_reshard(src, dst, only="*lora*")
    assert list(plan.dst) == [f"h.{i}.lora_a" for i in range(3)]
    assert plan.unused == tuple(f"h.{i}.w" for i in range(3))
    assert "3 source tensors are not wanted" in plan.summary()
    run(plan, {name: numbers(4, 2) for name in plan.src})


# --- views -----------------------------------------------------------------------------

SOURCES = {"q": (8, 6), "k": (4, 6), "v": (4, 6), "qkv": (16, 6), "e": (3, 4, 6), "vec": (8,)}
VIEWS = [
    views.concat(["q", "k", "v"]),
    views.concat(["q", "v"], dim=-2),
    views.concat([views.transpose("q"), views.transpose("k")], dim=1),
    views.interleave(["q", "k", "v"], groups=4),
    views.interleave(["q", "k", "v"], groups=2),
    views.deinterleave("qkv", 0, [8, 4, 4], groups=2),
    views.deinterleave("qkv", 2, [8, 4, 4], groups=4),
    views.piece("qkv", 1, 4),
    views.narrow("qkv", 3, 9),
    views.narrow("e", 1, 2, dim=2),
    views.transpose("e", 0, 2),
    views.select("e", 1),
    views.select("e", 2, dim=1),
    views.stack(["k", "v", "k"]),
    views.stack(["k", "v"], dim=2),
    views.stack([views.select("e", i) for i in (2, 0, 1)]),
    views.pad("k", size=7),
    views.pad("k", size=9, dim=1, fill=-1.5),
    views.pad(views.concat(["k", "v"]), size=12, fill=3),
    views.repeat("k", groups=2, times=3),
    views.select("vec", 3),
    views.stack([views.select("vec", i) for i in (3, 1)]),
]


@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.op)
def test_views_are_what_torch_makes_of_them(view):
    full = {name: numbers(*shape) + 1000 * i for i, (name, shape) in enumerate(SOURCES.items())}
    shape = tuple(evaluate(view, full).shape)
    sources = [
        {name: rows(s, [0, 1, 2]) for name, s in SOURCES.items()},
        {
            name: Layout.from_placements(s, [2], [S(len(s) - 1)], dtype=F32)
            for name, s in SOURCES.items()
        },
        {
            name: Layout.from_placements(s, [2, 2], [S(0, 2), S(0)], dtype=F32)
            for name, s in SOURCES.items()
        },
    ]
    targets = [Layout.replicated(shape, [1, 7])]
    if shape:
        targets.append(rows(shape, [1, 2, 3, 4, 5], dtype=None))
        targets.append(Layout.from_placements(shape, [3], [S(len(shape) - 1)], ranks=[9, 1, 0]))
    for src in sources:
        for dst in targets:
            plan = plan_reshard(src, {"made": dst}, views={"made": view})
            assert plan.efficiency == 1.0
            run(plan, full)
            again = ReshardPlan.from_json(json.loads(json.dumps(plan.to_json())))
            assert again.hash == plan.hash


def test_views_by_pattern():
    src = {f"layers.{i}.{n}": rows((4, 2), [0, 1]) for i in range(3) for n in ("gate", "up")}
    dst = {f"h.{i}.gate_up": columns((8, 2), [2, 3], BF16) for i in range(3)}
    view = views.concat(["layers.{n}.gate", "layers.{n}.up"])
    plan = plan_reshard(src, dst, views={"h.{n}.gate_up": view})
    assert not plan.unused
    run(plan, {name: numbers(4, 2) for name in src})
    # And back again: two tensors of one.
    back = {f"layers.{i}.{n}": rows((4, 2), [0, 1], BF16) for i in range(3) for n in ("gate", "up")}
    undo = {
        "layers.{n}.gate": views.piece("h.{n}.gate_up", 0, 2),
        "layers.{n}.up": views.piece("h.{n}.gate_up", 1, 2),
    }
    run(plan_reshard(dst, back, views=undo), {n: numbers(8, 2).to(BF16) for n in dst})


@pytest.mark.parametrize(
    "view",
    [
        views.concat(["q", "e"]),
        views.piece("q", 0, 3),
        views.piece("q", 4, 4),
        views.narrow("q", 4, 5),
        views.select("e", 3),
        views.pad("q", size=7),
        views.transpose("q", 0, 2),
        views.deinterleave("qkv", 0, [8, 4], 2),
        views.leaf("nobody"),
    ],
    ids=lambda view: view.op,
)
def test_views_that_do_not_fit_are_refused(view):
    with pytest.raises(LayoutError):
        view.resolve(SOURCES)


# --- ties --------------------------------------------------------------------------------


def test_tied_tensors_move_once():
    src = Layouts(
        {"embed": rows((8, 4), [0, 1]), "head": rows((8, 4), [0, 1])}, ties={"head": "embed"}
    )
    dst = {"embed": columns((8, 4), [2, 3]), "head": columns((8, 4), [2, 3])}
    plan = plan_reshard(src, dst)
    assert plan.aliases == {"head": "embed"}
    assert plan.total_bytes == 8 * 4 * 4
    w = numbers(8, 4)
    results = run(plan, {"embed": w, "head": w})
    assert results[2]["head"] is results[2]["embed"]
    other = {"embed": columns((8, 4), [2, 3]), "head": rows((8, 4), [2, 3])}
    assert plan_reshard(src, other).total_bytes == 2 * 8 * 4 * 4


# --- what does not fit ---------------------------------------------------------------------


def test_everything_that_does_not_fit_is_said_at_once():
    src = {
        "gap": Layout.from_boxes([4], {0: [Box((0,), (1,))], 1: [Box((2,), (4,))]}),
        "shape": rows((4, 2), [0]),
        "dtype": rows((4, 2), [0]),
        "parts": Layout.from_placements([4], [2], [Placement("partial", reduce_op="norm")]),
    }
    dst = {
        "gone": rows((4, 2), [1]),
        "shape": rows((2, 4), [1]),
        "dtype": rows((4, 2), [1], torch.float16),
        "parts": rows((4,), [1]),
        "doubled": Layout.from_boxes([4], {0: [Box((0,), (3,)), Box((2,), (4,))]}),
        "sum": Layout.from_boxes(
            [4], {0: [Box((0,), (4,))], 1: [Box((0,), (2,))]}, partial="sum", dtype=torch.float32
        ),
        "made": rows((4,), [1]),
        "wrong": "not a layout",
        "unhashable": [],
    }
    asked = {"made": views.concat(["gap", "nobody"]), "nowhere": views.leaf("gap")}
    with pytest.raises(LayoutError) as caught:
        plan_reshard(
            src,
            {**dst, "doubled": dst["doubled"]},
            dtype=BF16,
            views=asked,
            rename=lambda name: name,
        )
    text = str(caught.value)
    for part in (
        "'gone'", "missing at the source", "shape [4, 2] at the source, [2, 4]",
        "float16 at the destination, bfloat16 asked for", "reduction 'norm'",
        "made of 'nobody'", "'nowhere'", "expected a Layout, got str",
        "expected a Layout, got list",
    ):  # fmt: skip
        assert part in text
    src2 = {"doubled": rows((4,), [0]), "sum": rows((4,), [0])}
    with pytest.raises(LayoutError) as caught:
        plan_reshard(src2, {name: dst[name] for name in src2})
    assert "rank 0: boxes that overlap" in str(caught.value)
    assert "a partial destination of other boxes on each rank" in str(caught.value)


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"rename": {"w.{i}": "x.{j}"}}, "'j' is none of the fields"),
        ({"views": {"w.{i}": views.leaf("x.{j}")}}, "'j' is none of the fields"),
        ({"dtype": {"w.0": BF16}}, "expected a dtype or a CastPolicy"),
        ({"bucket_bytes": "1MB"}, "expected bytes"),
        ({"hosts": ["a", "b"]}, "how many ranks a host has"),
        ({"hosts": 0}, "expected 1 or more"),
    ],
)
def test_options_that_mean_nothing(options, part):
    src, dst = {"w.0": rows((4,), [0, 1])}, {"w.0": rows((4,), [2], dtype=None)}
    with pytest.raises(LayoutError, match=part):
        plan_reshard(src, dst, **options)
    with pytest.raises(LayoutError, match="expected names and layouts"):
        plan_reshard(list(src), dst)
    with pytest.raises(LayoutError, match="Cannot read a plan"):
        ReshardPlan.from_json({"version": 1})


def test_hosts_of_equally_many_ranks_and_views_by_name():
    src = {"a": Layout.replicated((8, 4), [0, 1, 2, 3], dtype=F32)}
    dst = {"w": rows((8, 4), [0, 2, 4, 5])}
    plan = plan_reshard(src, dst, views={"w": "a"}, hosts=2)
    assert plan == plan_reshard(
        src, dst, views={"w": views.leaf("a")}, hosts={r: r // 2 for r in range(6)}
    )


def test_styles_of_tensor_parallelism():
    class Own(ColwiseParallel):
        pass

    layers = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    plan = {"0": Own(), "1": "sequence"}
    layouts = model_layouts(layers, ranks=[0, 1], axes=["tp"], plan=plan)
    assert layouts["0.weight"].local_shape(0) == (2, 4)
    assert layouts["1.weight"].local_shape(0) == (4,)
    with pytest.raises(LayoutError, match="'columnwise'"):
        model_layouts(layers, ranks=[0, 1], axes=["tp"], plan={"0": "columnwise"})


def test_layouts_that_do_not_cover_are_refused():
    holes = Layout.from_boxes([4, 4], {0: [Box((0, 0), (3, 4))], 1: [Box((3, 1), (4, 4))]})
    whole = Layout.replicated([4, 4], [2, 3])
    with pytest.raises(LayoutError, match="do not cover") as caught:
        plan_reshard({"a": holes, "b": holes}, {"a": whole, "b": whole})
    assert str(caught.value).count("no source holds 1 of its elements") == 4


def test_check_coverage_finds_planted_gaps_and_overlaps():
    src, dst = rows((6, 4), [0, 1, 2]), columns((6, 4), [3, 4])
    for plant in ("gap", "overlap", "moved"):
        plan = plan_reshard({"w": src}, {"w": dst}, bucket_bytes=1000 + len(plant))
        edge = plan.edges[0]
        geometry = edge.geometry
        start, stop = geometry.start.copy(), geometry.stop.copy()
        if plant == "gap":
            stop[1, 0] -= 1
        elif plant == "overlap":
            start[1, 0] -= 1
        else:  # as many elements as before, one of them twice
            start[1, 0] -= 1
            stop[1, 0] -= 1
        from dataclasses import replace

        planted = replace(geometry, start=start, stop=stop, _memo={})
        edges = (replace(edge, geometry=planted),)
        broken = replace(plan, edges=edges, _memo={})
        plan.check_coverage()
        with pytest.raises(LayoutError, match="twice" if plant != "gap" else "arrive"):
            broken.check_coverage()


def test_options_are_checked():
    a = {"w": rows((4, 4), [0])}
    for bad in ({"sources": "some"}, {"bucket_bytes": 3}, {"buckets": 1}):
        with pytest.raises(LayoutError):
            plan_reshard(a, a, **bad)
    with pytest.raises(LayoutError, match="two source tensors"):
        plan_reshard({"a": a["w"], "b": a["w"]}, {"c": a["w"]}, rename=lambda name: "c")


# --- who sends -----------------------------------------------------------------------------


def test_holders_share_the_sending():
    src = {f"p{i}": Layout.replicated((64,), [0, 1, 2, 3], dtype=F32) for i in range(8)}
    dst = {name: rows((64,), [4, 5]) for name in src}
    plan = plan_reshard(src, dst)
    assert {plan.sent_bytes(rank) for rank in range(4)} == {8 * 64 * 4 // 4}
    lowest = plan_reshard(src, dst, sources="lowest")
    assert lowest.sent_bytes(0) == lowest.total_bytes
    # Tensors of all sizes, each alone in its layout.
    src = {f"p{i}": Layout.replicated((3 * i + 1,), [0, 1], dtype=F32) for i in range(40)}
    plan = plan_reshard(src, {name: Layout.replicated(x.shape, [2]) for name, x in src.items()})
    assert abs(plan.sent_bytes(0) - plan.sent_bytes(1)) <= 4 * (3 * 39 + 1)


def test_a_holder_of_the_same_host_is_preferred():
    src = {"w": Layout.replicated((8, 4), [0, 4], dtype=F32)}
    dst = {"w": rows((8, 4), [1, 2, 5, 6])}
    plan = plan_reshard(src, dst, hosts={r: r // 4 for r in range(8)})
    senders = {
        int(d): int(s) for s, d in zip(plan.edges[0].geometry.src, plan.edges[0].geometry.dst)
    }
    assert senders == {1: 0, 2: 0, 5: 4, 6: 4}
    run(plan, {"w": numbers(8, 4)})


def test_a_box_enters_a_host_once_and_is_passed_on():
    hosts = {r: "abcd"[r // 4] for r in range(16)}
    src = {"w": rows((16, 4), [0, 1, 2, 3]), "b": rows((7,), [0, 1, 2, 3])}
    dst = {
        "w": Layout.from_placements((16, 4), [2, 4], [R, S(1)], ranks=range(4, 12), dtype=BF16),
        "b": Layout.replicated((7,), range(4, 12), dtype=torch.float64),
    }
    plan = plan_reshard(src, dst, hosts=hosts)
    assert plan.efficiency == 1.0
    moved = plan.transfers
    crossing = [hosts[int(s)] != hosts[int(d)] for s, d in zip(moved["src"], moved["dst"])]
    # Each element enters both hosts once: 64 of w as bfloat16, 7 of b as float32.
    assert moved["nbytes"][crossing].sum() == 2 * (64 * 2 + 7 * 4)
    assert set(moved["stage"].tolist()) == {0, 1}
    assert "which received it" in plan.explain("b")
    run(plan, {"w": numbers(16, 4), "b": numbers(7)})


def test_rounds_are_matchings():
    src = {"w": rows((12, 12), [0, 1, 2, 3])}
    plan = plan_reshard(src, {"w": columns((12, 12), [2, 3, 4])})
    talks = {(m.round, m.src, m.dst) for r in plan.ranks for m in plan.for_rank(r).messages}
    for turn in {turn for turn, _, _ in talks}:
        pairs = [(s, d) for t, s, d in talks if t == turn]
        assert len({s for s, _ in pairs}) == len({d for _, d in pairs}) == len(pairs)


def test_staging_stays_below_its_bound():
    src = {f"p{i}": rows((64, 8), [0, 1, 2, 3]) for i in range(6)}
    dst = {name: columns((64, 8), [0, 1, 2, 3]) for name in src}
    free = plan_reshard(src, dst, bucket_bytes=512)
    bound = plan_reshard(src, dst, bucket_bytes=512, max_staging_bytes=1024)
    for rank in range(4):
        assert bound.peak_bytes(rank) <= 1024 < free.peak_bytes(rank)
    run(bound, {name: numbers(64, 8) for name in src})


# --- dtypes --------------------------------------------------------------------------------


def test_dtypes_come_from_the_policy():
    src = {
        "w": rows((4, 2), [0]), "norm.weight": rows((4,), [0]),
        "step": Layout.replicated((), [0], dtype=torch.int64),
    }  # fmt: skip
    dst = {name: Layout.replicated(x.shape, [1]) for name, x in src.items()}
    plan = plan_reshard(src, dst, dtype=CastPolicy.mixed())
    assert [x.dtype for x in plan.dst.values()] == [BF16, F32, torch.int64]
    assert plan_reshard(src, dst, dtype="bf16").dst["norm.weight"].dtype is BF16
    assert plan_reshard(src, dst).dst["w"].dtype is F32


# --- identity ------------------------------------------------------------------------------


def test_equal_questions_have_one_plan():
    src = {"w": rows((8, 4), [0, 1])}
    dst = {"w": columns((8, 4), [0, 1])}
    plan = plan_reshard(src, dst, dtype=BF16)
    assert plan_reshard(dict(src), dict(dst), dtype=BF16) is plan
    others = [
        plan_reshard(src, dst),
        plan_reshard(src, dst, dtype=BF16, bucket_bytes=4096),
        plan_reshard(src, {"w": columns((8, 4), [1, 0])}, dtype=BF16),
        plan_reshard(src, {"x": dst["w"]}, dtype=BF16, rename={"w": "x"}),
    ]
    assert len({plan.hash, *(other.hash for other in others)}) == 5
    data = json.loads(json.dumps(plan.to_json()))
    assert ReshardPlan.from_json(data) == plan
    data["hash"] = "0" * 32
    with pytest.raises(PlanMismatch):
        ReshardPlan.from_json(data)
    with pytest.raises(PlanMismatch):
        ReshardPlan.from_json({**data, "version": 2})


def test_a_renamed_and_tied_plan_comes_back_from_json():
    # "a.b" keeps its name although "a" does not.
    src = Layouts(
        {"m.a": rows((8, 4), [0, 1]), "m.a.b": rows((4,), [0, 1]), "m.t": rows((8, 4), [0, 1])},
        ties={"m.t": "m.a"},
    )
    names = {"m.a": "x", "m.t": "t", "m.a.b": "m.a.b"}
    dst = {"x": columns((8, 4), [2]), "t": rows((8, 4), [2]), "m.a.b": rows((4,), [2])}
    plan = plan_reshard(src, dst, rename=names.__getitem__)
    again = ReshardPlan.from_json(json.loads(json.dumps(plan.to_json())))
    assert again == plan and again.aliases == plan.aliases
    assert list(again.src) == list(plan.src)


def test_ties_of_ties_are_one_tensor_and_must_be_laid_out_alike():
    a = rows((8, 4), [0, 1])
    src = Layouts({"a": a, "b": a, "c": a}, ties={"c": "b", "b": "a"})
    dst = {name: columns((8, 4), [2]) for name in src}
    plan = plan_reshard(src, dst)
    assert plan.aliases == {"b": "a", "c": "a"} and list(plan.src) == ["a"]
    src["b"] = columns((8, 4), [0, 1])
    with pytest.raises(LayoutError, match="'b'  tied to 'a', which is laid out otherwise"):
        plan_reshard(src, dst)


def test_only_some_tensors():
    src = {name: rows((4,), [0, 1]) for name in ("q", "k", "lora.a", "lora.b")}
    dst = {"qk": rows((8,), [2]), "lora.a": rows((4,), [2]), "lora.b": rows((4,), [2])}
    made = {"qk": views.concat(["q", "k"])}
    plan = plan_reshard(src, dst, views=made, only="lora.*")
    assert list(plan.dst) == ["lora.a", "lora.b"] and plan.unused == ("q", "k")
    with pytest.raises(LayoutError, match=r"'\*laro\*'  asked for"):
        plan_reshard(src, dst, views=made, only=["qk", "*laro*"])


def test_the_order_of_tensors_does_not_matter():
    src = {f"p{i}": rows((8 + i, 4), [0, 1]) for i in (3, 1, 2)}
    dst = {name: columns(x.shape, [1, 2]) for name, x in src.items()}
    plan = plan_reshard(src, dst)
    other = plan_reshard(dict(reversed(src.items())), dict(sorted(dst.items())))
    assert list(plan.dst) == ["p3", "p1", "p2"] and list(other.dst) == ["p1", "p2", "p3"]
    assert plan.hash == other.hash
    assert [e.dst for e in plan.edges] == [e.dst for e in other.edges]


def test_a_plan_tells_what_it_does():
    src = Layouts({"a": rows((8, 4), [0, 1]), "b": rows((8, 4), [0, 1])}, ties={"b": "a"})
    dst = {"a": Layout.replicated((8, 4), [1, 2]), "b": Layout.replicated((8, 4), [1, 2])}
    plan = plan_reshard(src, dst, dtype=BF16)
    assert "2 tensors from 2 ranks (0, 1) to 2 ranks (1, 2)" in plan.summary()
    assert plan.hash in plan.summary()
    first, second = plan.table().splitlines()[1:]
    assert first.split()[:5] == ["a", "8x4", "float32", "->", "bfloat16"]
    assert "= a" in second
    assert plan.explain("a", 1).splitlines()[2:] == [
        "    rank 1 [0:4, 0:4]: from rank 0 (32 B)",
        "    rank 1 [4:8, 0:4]: has it already",
    ]
    assert "moves once for both" in plan.explain(("b",))
    with pytest.raises(MissingKeyError):
        plan.explain("c")
    assert repr(plan).startswith("ReshardPlan(2 tensors, 3 ranks, 96 bytes")


# --- layouts of models -----------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.zeros(3))


def test_layouts_of_plain_modules():
    layouts = layouts_of(Tied(), ranks=[0, 1])
    assert layouts.ties == {"head.weight": "embed.weight"}
    assert layouts["table"] == Layout.replicated((3,), [0, 1], dtype=F32)
    with torch.device("meta"):
        module = Tied()
    made = model_layouts(module, ranks=[4, 5], axes=["fsdp"], dtype=BF16)
    assert made.ties == {"head.weight": "embed.weight"}
    assert made["embed.weight"] == rows((8, 4), [4, 5], BF16)
    assert made["table"] == Layout.replicated((3,), [4, 5], dtype=BF16)
    states = follow(made, ["exp_avg"], scalars=["step"], dtype=F32)
    assert states["embed.weight.exp_avg"] == rows((8, 4), [4, 5], F32)
    assert states["embed.weight.step"].shape == ()
    for bad in ({"axes": ["dp"]}, {"axes": ["tp"], "plan": {"nobody": "colwise"}}):
        with pytest.raises(LayoutError):
            model_layouts(module, ranks=[0, 1], **bad)
