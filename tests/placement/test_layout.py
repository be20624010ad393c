"""Layouts against torch's own arithmetic and against a split done with real tensors."""

import itertools
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tensordict.errors import LayoutError
from tensordict.placement.layout import Box, Layout, Placement


def split_for_real(shape, mesh_shape, dims, coordinate):
    """The indices one rank holds, by `torch.chunk` on a tensor of indices, left to right."""
    part = torch.arange(torch.Size(shape).numel()).reshape(shape)
    for size, dim, at in zip(mesh_shape, dims, coordinate):
        if dim is None:
            continue
        pieces = list(part.chunk(size, dim)) if part.shape[dim] else []
        part = pieces[at] if at < len(pieces) else part.narrow(dim, 0, 0)
    return part


def indices_of(shape, boxes):
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    return torch.cat([whole[box.slices].reshape(-1) for box in boxes]).sort().values


@pytest.mark.parametrize("mesh_shape", [(2,), (3,), (2, 2), (2, 4), (3, 2)])
@pytest.mark.parametrize("shape", [(8, 4), (5, 3), (1, 7), (0, 4), (16, 2)])
def test_shards_are_those_of_chunk(mesh_shape, shape):
    for dims in itertools.product((None, 0, 1), repeat=len(mesh_shape)):
        own = [Placement("replicate") if d is None else Placement("shard", d) for d in dims]
        layout = Layout.from_placements(shape, mesh_shape, own)
        for rank, coordinate in enumerate(itertools.product(*map(range, mesh_shape))):
            real = split_for_real(shape, mesh_shape, dims, coordinate)
            assert torch.equal(
                indices_of(shape, layout.of_rank(rank)), real.reshape(-1).sort().values
            )


@pytest.mark.parametrize("rows", [16, 13, 8, 7, 5, 3, 1, 0])
@pytest.mark.parametrize(("fsdp", "tp"), [(2, 4), (2, 2), (3, 2), (4, 2)])
def test_fsdp_over_tensor_parallelism_splits_the_other_way_round(rows, fsdp, tp):
    own = (Placement("shard", 0, split_factor=tp), Placement("shard", 0))
    layout = Layout.from_placements([rows], [fsdp, tp], own)
    held = [box for rank in layout.ranks for box in layout.of_rank(rank)]
    assert indices_of((rows,), held).tolist() == list(range(rows))
    if rows % (fsdp * tp) == 0:
        # Tensor parallelism first, then FSDP within its shard.
        for rank, (i, j) in enumerate(itertools.product(range(fsdp), range(tp))):
            real = torch.arange(rows).chunk(tp)[j].chunk(fsdp)[i] if rows else torch.arange(0)
            assert indices_of((rows,), layout.of_rank(rank)).tolist() == real.tolist()


def test_placements_of_torch_are_read():
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    assert Placement.of(Shard(1)) == Placement("shard", 1)
    assert Placement.of(Replicate()) == Placement("replicate")
    assert Placement.of(Partial("avg")) == Placement("partial", reduce_op="avg")
    assert Placement.of(_StridedShard(0, split_factor=4)) == Placement("shard", 0, 4)


def test_a_partial_axis_is_remembered():
    layout = Layout.from_placements([4], [2], [Placement("partial", reduce_op="sum")])
    assert layout.partial == "sum"
    assert layout.of_rank(0) == layout.of_rank(1) == (Box((0,), (4,)),)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Layout.from_placements([4], [2], []),
        lambda: Layout.from_placements([4], [2], [Placement("shard", 1)]),
        lambda: Layout.from_placements([4], [2], [Placement("replicate")], ranks=[0]),
        lambda: Layout.from_boxes([4], {0: [Box((0,), (5,))]}),
        lambda: Layout.from_boxes([4], {0: [Box((0, 0), (1, 1))]}),
        lambda: Box((2,), (1,)),
        lambda: Box((2,), (3, 4)),
    ],
)
def test_what_does_not_fit_is_refused(make):
    with pytest.raises(LayoutError):
        make()


boxes = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=2, max_size=2).map(
    lambda pairs: Box(tuple(min(p) for p in pairs), tuple(max(p) for p in pairs))
)


@settings(max_examples=100, deadline=None)
@given(boxes, boxes)
def test_intersection_is_that_of_the_elements(a, b):
    grid = torch.zeros(6, 6, dtype=torch.int64)
    grid[a.slices] += 1
    grid[b.slices] += 1
    common = a.intersect(b)
    count = int((grid == 2).sum())
    assert (common.numel if common else 0) == count
    assert a.contains(b) == (count == b.numel)
    if common:
        local = torch.ones(a.shape)[common.relative_to(a).slices]
        assert local.shape == torch.Size(common.shape)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=3),
    st.lists(st.sampled_from([None, 0, -1]), min_size=1, max_size=2),
)
def test_json_round_trip(shape, dims):
    own = [Placement("replicate") if d is None else Placement("shard", d) for d in dims]
    layout = Layout.from_placements(shape, [2] * len(dims), own, ranks=range(3, 3 + 2 ** len(dims)))
    assert Layout.from_json(json.loads(json.dumps(layout.to_json()))) == layout


@pytest.mark.parametrize(
    ("shape", "placement", "ranks", "part"),
    [
        ([-1], Placement("shard", 0), [0, 1], "no negative numbers"),
        ([4], Placement("shard", 0), [-1, 0], "no negative numbers"),
        ([4], Placement("shard", 0, split_factor=0), [0, 1], "split factor of 1 or more"),
        ([4], Placement("sharded", 0), [0, 1], "kind='sharded'"),
        ([4], Placement("partial"), [0, 1], "'partial' with a reduction"),
    ],
)
def test_layouts_that_mean_nothing(shape, placement, ranks, part):
    with pytest.raises(LayoutError, match=part):
        Layout.from_placements(shape, [2], [placement], ranks=ranks)


@pytest.mark.parametrize(
    "data",
    [{"shape": [4]}, {"shape": [4], "ranks": [0], "held": []}, {}, [], {"shape": 4, "ranks": 0}],
)
def test_what_is_no_layout_is_not_read(data):
    with pytest.raises(LayoutError, match="Cannot read a layout"):
        Layout.from_json(data)


def test_a_rank_that_takes_no_part_has_no_local_shape():
    with pytest.raises(LayoutError, match="rank 9"):
        Layout.replicated([4], [0, 1]).local_shape(9)
