"""Plans for small worlds, all pairs of layouts: against whole tensors and a count of elements."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tensordict.distributed.golden import (
    combine,
    contributions,
    golden_reshard,
    shard,
    simulate_reshard,
)
from tensordict.placement import views
from tensordict.placement.layout import Box, Layout, Placement
from tensordict.placement.reshard import plan_reshard
from tensordict.placement.reshard_program import count_messages

R, P = Placement("replicate"), Placement("partial", reduce_op="sum")


def S(dim, factor=1):
    return Placement("shard", dim, factor)


def mesh_layouts(shape, n_axes, first_rank=0, partial=False):
    """Every kind of layout on meshes of up to 8 ranks."""
    dims = range(len(shape))
    one = [R, *(S(d) for d in dims)] + [P] * partial
    meshes = {1: [(1,), (2,), (3,), (8,)], 2: [(2, 2), (2, 3), (4, 2)], 3: [(2, 2, 2)]}[n_axes]
    for mesh in meshes:
        choices = itertools.product(one, repeat=n_axes)
        strided = [(S(d, mesh[1]), S(d), *[R] * (n_axes - 2)) for d in dims] if n_axes > 1 else []
        for placements in (*choices, *strided):
            ranks = range(first_rank, first_rank + int(np.prod(mesh)))
            yield Layout.from_placements(shape, mesh, placements, ranks=ranks)


def contribution_of(layout, rank):
    """Which contribution to a partial tensor a rank holds."""
    at = np.unravel_index(layout.ranks.index(rank), layout.mesh_shape)
    return sum(int(i) for i, p in zip(at, layout.placements) if p.kind == "partial")


def least_elements(src, dst):
    """The lower bound by marking elements: wanted, not held, for each contribution."""
    size = int(np.prod(src.shape))
    parts = dict(zip(src.table().rank.tolist(), src.table().part.tolist()))
    n_parts = max(parts.values(), default=0) + 1
    whole = torch.arange(size).reshape(src.shape)
    out = 0
    if src.partial and src == dst:
        return 0
    for rank, boxes in dst.boxes:
        if dst.partial in ("sum", "product") and contribution_of(dst, rank):
            continue
        wanted = torch.zeros(size, dtype=torch.bool)
        for box in boxes:
            wanted[whole[box.slices].reshape(-1)] = True
        held = torch.zeros(size, dtype=torch.bool)
        for box in src.of_rank(rank):
            held[whole[box.slices].reshape(-1)] = True
        out += n_parts * int(wanted.sum()) - int((wanted & held).sum())
    return out


def check(src, dst, **options):
    plan = plan_reshard({"w": src}, {"w": dst}, **options)
    whole = torch.arange(int(np.prod(src.shape))).reshape(src.shape).to(src.dtype)
    if src.partial is None:
        local = shard(src, whole)
    else:
        local, whole = contributions(src, whole)
    sources = {rank: {"w": tensor} for rank, tensor in local.items()}
    results, traffic = simulate_reshard(plan, sources)
    golden = golden_reshard(plan, {"w": whole})
    assert results.keys() == golden.keys()
    for rank, expected in golden.items():
        stays = src.partial is not None and src == dst
        right = local[rank] if stays else expected["w"]
        assert torch.equal(results[rank]["w"], right), (src, dst, rank)
    itemsize = min(src.dtype.itemsize, plan.dst["w"].dtype.itemsize)
    itemsize = src.dtype.itemsize if src.partial else itemsize
    least = least_elements(src, dst) * itemsize
    assert plan.optimal_bytes == plan.total_bytes == sum(traffic.sent.values()) == least
    assert traffic.sent == {r: n for r in plan.ranks if (n := plan.sent_bytes(r))}
    assert traffic.received == {r: n for r in plan.ranks if (n := plan.recv_bytes(r))}
    assert traffic.n_messages == count_messages(plan)
    plan.check_coverage()
    return plan


SHAPES = [(8, 4), (7, 5), (3, 2), (5,), (1, 9), (0, 4)]


def pairs(shape, axes, shift, seed, count):
    """A few of all pairs, the same ones each time."""
    src = [x.as_dtype(torch.float32) for n in axes for x in mesh_layouts(shape, n, 0, True)]
    dst = [x.as_dtype(torch.float32) for n in axes for x in mesh_layouts(shape, n, shift, True)]
    every = list(itertools.product(src, dst))
    generator = np.random.default_rng(seed)
    return [every[i] for i in generator.choice(len(every), min(count, len(every)), False)]


@pytest.mark.parametrize("shift", [0, 2, 8])
@pytest.mark.parametrize("shape", SHAPES)
def test_pairs_of_layouts(shape, shift):
    for src, dst in pairs(shape, (1, 2, 3), shift, 0, 60):
        check(src, dst)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("shift", [0, 2, 8])
@pytest.mark.parametrize("shape", SHAPES)
def test_all_pairs_of_layouts(shape, shift):
    for src, dst in pairs(shape, (1, 2, 3), shift, 0, 1 << 30):
        check(src, dst)


@pytest.mark.parametrize("op", ["sum", "avg", "product", "max", "min"])
def test_contributions_are_reduced(op):
    part = Placement("partial", reduce_op=op)
    src = Layout.from_placements([6, 4], [2, 2], [part, S(0)], dtype=torch.float64)
    for placements in ([R, R], [S(0), R], [S(1), S(0)], [S(0, 2), S(0)]):
        check(src, Layout.from_placements([6, 4], [2, 2], placements, dtype=torch.float64))
    check(src, Layout.from_placements([6, 4], [3], [S(1)], ranks=[1, 5, 9], dtype=torch.float32))


@pytest.mark.parametrize("op", ["sum", "avg", "product", "max", "min"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.int32])
def test_a_value_becomes_contributions_that_give_it_back(op, dtype):
    part = Placement("partial", reduce_op=op)
    src = Layout.from_placements([6, 5], [3], [S(0)], dtype=torch.float32)
    dst = Layout.from_placements([6, 5], [2, 2], [part, S(1)], ranks=range(2, 6), dtype=dtype)
    whole = torch.arange(-10.0, 20).view(6, 5)
    plan = plan_reshard({"w": src}, {"w": dst})
    parts = shard(src, whole)
    results, _ = simulate_reshard(plan, {rank: {"w": x} for rank, x in parts.items()})
    halves = [[results[rank]["w"].double() for rank in ranks] for ranks in ((2, 4), (3, 5))]
    back = torch.cat([combine(half, op) for half in halves], 1)
    assert torch.equal(back, whole.to(dtype).double())
    assert plan.total_bytes == plan.optimal_bytes


@pytest.mark.parametrize("op", ["sum", "max"])
def test_partial_tensors_that_stay_as_they_are_cost_nothing(op):
    part = Placement("partial", reduce_op=op)
    both = Layout.from_placements([6, 4], [2, 2], [part, S(0)], dtype=torch.float32)
    assert check(both, both).total_bytes == 0
    # In another dtype they are reduced first: casting each contribution would round each.
    other = both.as_dtype(torch.float64)
    assert check(both, other).total_bytes > 0
    shifted = Layout.from_placements([6, 4], [2, 2], [part, S(0)], ranks=[3, 2, 1, 0])
    check(both, shifted.as_dtype(torch.float32))


def test_a_partial_destination_may_be_padded():
    src = {"w": Layout.from_placements([3], [1], [R], dtype=torch.float32)}
    dst = {"w": Layout.from_placements([5], [2], [P])}
    plan = plan_reshard(src, dst, views={"w": views.pad("w", 5, fill=7.0)})
    plan.check_coverage()
    results, _ = simulate_reshard(plan, {0: {"w": torch.ones(3)}})
    assert [results[r]["w"].tolist() for r in (0, 1)] == [[1, 1, 1, 7, 7], [0] * 5]
    assert "0 on 1, so that the sum is right" in plan.explain("w")


@pytest.mark.parametrize(
    ("src", "dst", "item"),
    [
        (torch.float32, torch.bfloat16, 2),
        (torch.bfloat16, torch.float32, 2),
        (torch.float32, torch.int8, 1),
        (torch.int64, torch.int32, 4),
        (torch.complex64, torch.complex64, 8),
        (torch.float16, torch.bfloat16, 2),
    ],
)
def test_the_cast_is_where_fewer_bytes_move(src, dst, item):
    a = Layout.from_placements([9, 4], [3], [S(0)], dtype=src)
    b = Layout.from_placements([9, 4], [2], [S(1)], ranks=[5, 6], dtype=dst)
    assert check(a, b).total_bytes == 36 * item


@pytest.mark.parametrize("pack_below", [0, 16, 1 << 20])
@pytest.mark.parametrize("bucket", [64, 100, 1 << 20])
def test_messages_of_any_size_carry_the_same(pack_below, bucket):
    a = Layout.from_placements([24, 6], [2, 2], [S(0, 2), S(0)], dtype=torch.float32)
    b = Layout.from_placements([24, 6], [4], [S(1)], dtype=torch.float32)
    plan = check(a, b, bucket_bytes=bucket, pack_below=pack_below)
    assert plan.options.pack_below <= plan.options.bucket_bytes // 2


def random_boxes(draw, shape, ranks):
    """Boxes of any place and size, several for a rank, that may overlap between ranks."""
    out = {}
    for rank in ranks:
        boxes = []
        for _ in range(draw(st.integers(0, 2))):
            sides = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
            boxes.append(Box(tuple(a for a, _ in sides), tuple(b for _, b in sides)))
        out[rank] = boxes
    return out


@st.composite
def worlds(draw):
    shape = draw(st.lists(st.integers(1, 7), min_size=1, max_size=3))
    source = random_boxes(draw, shape, range(draw(st.integers(1, 4))))
    # Something covers it all, so that every destination can be served.
    keeper = draw(st.integers(0, 5))
    source[keeper] = [Box((0,) * len(shape), tuple(shape))]
    wanted = {}
    for rank, boxes in random_boxes(draw, shape, range(2, 2 + draw(st.integers(1, 4)))).items():
        wanted[rank] = boxes[:1]
    make = Layout.from_boxes
    return make(shape, source, dtype=torch.float32), make(shape, wanted, dtype=torch.float32)


@settings(max_examples=60, deadline=None)
@given(worlds())
def test_boxes_of_any_kind(world):
    src, dst = world
    check(src, dst)


@pytest.mark.slow
@settings(max_examples=3000, deadline=None)
@given(worlds())
def test_boxes_of_any_kind_at_length(world):
    src, dst = world
    check(src, dst)


@st.composite
def meshes(draw, first):
    shape = draw(st.shared(st.lists(st.integers(0, 17), min_size=1, max_size=3), key="shape"))
    mesh = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    placements = [
        draw(st.sampled_from([R, *(S(d, f) for d in range(len(shape)) for f in (1, 2, 3))]))
        for _ in mesh
    ]
    order = draw(st.none() | st.permutations(range(len(mesh))))
    ranks = range(first, first + int(np.prod(mesh)))
    return Layout.from_placements(
        shape, mesh, placements, ranks=ranks, order=order, dtype=torch.float32
    )


@settings(max_examples=60, deadline=None)
@given(meshes(0), meshes(3))
def test_meshes_of_any_kind(src, dst):
    check(src, dst)


@pytest.mark.slow
@settings(max_examples=3000, deadline=None)
@given(meshes(0), meshes(3))
def test_meshes_of_any_kind_at_length(src, dst):
    check(src, dst)


def test_flat_shards_that_cut_rows():
    flat = {
        0: [Box((0, 0), (1, 5)), Box((1, 0), (2, 2))],
        1: [Box((1, 2), (2, 5)), Box((2, 0), (4, 5))],
    }
    src = Layout.from_boxes([4, 5], flat, dtype=torch.float32)
    check(src, Layout.from_placements([4, 5], [3], [S(1)], dtype=torch.float32))
    back = Layout.from_placements([4, 5], [2], [S(0)], dtype=torch.float32)
    check(back, src)


def test_scalars_and_empty_tensors():
    for shape in [(), (0,), (3, 0)]:
        src = Layout.replicated(shape, [0, 1], dtype=torch.float32)
        check(src, Layout.replicated(shape, [1, 2], dtype=torch.bfloat16))


ALL = [
    torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8,
    torch.int16, torch.uint8, torch.uint16, torch.uint64, torch.bool, torch.complex64,
    torch.complex128,
]  # fmt: skip


def test_every_dtype_arrives_with_its_bits():
    """In one plan, so that messages mix element sizes; and float32 cast to the narrow ones."""
    src, dst, full = {}, {}, {}
    for i, dtype in enumerate(ALL):
        bits = torch.randint(0, 2, (5, 3), generator=torch.Generator().manual_seed(i))
        for name, was in ((f"same{i}", dtype), (f"cast{i}", torch.float32)):
            if name.startswith("cast") and not dtype.is_floating_point:
                continue
            full[name] = (bits * 3).to(was)
            src[name] = Layout.from_placements((5, 3), [2], [S(0)], dtype=was)
            dst[name] = Layout.from_placements((5, 3), [3], [S(1)], ranks=[1, 2, 3], dtype=dtype)
    plan = plan_reshard(src, dst, bucket_bytes=256)
    local = {name: shard(layout, full[name]) for name, layout in src.items()}
    sources = {rank: {name: parts[rank] for name, parts in local.items()} for rank in (0, 1)}
    results, traffic = simulate_reshard(plan, sources)
    assert sum(traffic.sent.values()) == plan.optimal_bytes
    for rank, expected in golden_reshard(plan, full).items():
        for name, value in expected.items():
            got = results[rank][name]
            assert got.dtype is value.dtype
            assert torch.equal(got.view(torch.uint8), value.contiguous().view(torch.uint8)), name
