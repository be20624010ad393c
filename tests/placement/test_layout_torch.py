"""Layouts against what torch itself makes of the same placements."""

import itertools
import json

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, init_device_mesh
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from tensordict.errors import LayoutError
from tensordict.placement.layout import Box, Layout, Placement

SHAPES = [(8, 4), (7, 5), (3, 2), (1, 6), (13, 3), (0, 4), (16, 1)]
MESHES = [(2,), (4,), (2, 2), (2, 3), (4, 2), (2, 2, 2)]
CHOICES = [Replicate(), Shard(0), Shard(1), _StridedShard(0, split_factor=2), Partial()]


def split_by_torch(shape, mesh_shape, placements, coordinate):
    """The flat indices one rank holds: torch's own split of a tensor of indices."""
    part = torch.arange(torch.Size(shape).numel()).reshape(shape)
    for size, placement, at in zip(mesh_shape, placements, coordinate):
        if isinstance(placement, (Shard, _StridedShard)):
            part = placement._split_tensor(part, size, with_padding=False)[0][at]
    return part


def held_by(layout, rank):
    """The flat indices of a rank's local tensor, in its own order."""
    whole = torch.arange(torch.Size(layout.shape).numel()).reshape(layout.shape)
    for dim, runs in enumerate(layout.runs_of(rank)):
        index = torch.cat([torch.arange(a, b) for a, b in runs])
        whole = whole.index_select(dim, index)
    return whole


@pytest.mark.parametrize("mesh_shape", MESHES)
@pytest.mark.parametrize("shape", SHAPES)
def test_local_tensors_are_those_of_torch(shape, mesh_shape):
    for placements in itertools.product(CHOICES, repeat=len(mesh_shape)):
        layout = Layout.from_placements(shape, mesh_shape, placements)
        for rank, coordinate in enumerate(itertools.product(*map(range, mesh_shape))):
            expected = split_by_torch(shape, mesh_shape, placements, coordinate)
            assert torch.equal(held_by(layout, rank), expected), placements
            assert layout.local_shape(rank) == tuple(expected.shape)
            in_boxes = sum(box.numel for box in layout.of_rank(rank))
            assert in_boxes == expected.numel()


@pytest.mark.parametrize("mesh_shape", MESHES)
@pytest.mark.parametrize("shape", SHAPES)
def test_offsets_are_those_of_torch_where_the_shard_is_one_run(shape, mesh_shape):
    for placements in itertools.product(CHOICES[:3], repeat=len(mesh_shape)):
        layout = Layout.from_placements(shape, mesh_shape, placements)
        for rank, coordinate in enumerate(itertools.product(*map(range, mesh_shape))):
            local, offset = _compute_local_shape_and_global_offset(
                shape, mesh_shape, list(coordinate), placements
            )
            assert layout.local_shape(rank) == local
            (box,) = layout.of_rank(rank)
            if box.numel:
                assert box.start == offset


@pytest.fixture
def fake_world():
    store = FakeStore()
    torch.distributed.init_process_group("fake", store=store, rank=7, world_size=8)
    yield
    torch.distributed.destroy_process_group()


def test_a_dtensor_tells_its_layout(fake_world):
    mesh = init_device_mesh("cpu", (2, 4))
    spec = (_StridedShard(0, split_factor=4), Shard(0))
    tensor = DTensor.from_local(torch.zeros(2, 3), mesh, spec, shape=(16, 3), stride=(3, 1))
    layout = Layout.from_dtensor(tensor)
    assert layout.of_rank(5) == (Box((6, 0), (8, 3)),)
    assert layout.dtype == torch.float32
    assert layout.ranks == tuple(range(8))


def test_the_local_shape_decides_what_an_uneven_strided_shard_means(fake_world):
    # 9 rows, tensor parallel over 2 (5 and 4), FSDP over 4 of each (2, 2, 1, 0 and 1, 1, 1, 1):
    # coordinate (3, 1) holds row 8; by the placements alone (3, 0) would.
    mesh = init_device_mesh("cpu", (4, 2))
    spec = (_StridedShard(0, split_factor=2), Shard(0))
    plain = Layout.from_placements((9,), (4, 2), spec)
    inner = plain.innermost_first()
    for rank, (i, j) in enumerate(itertools.product(range(4), range(2))):
        mine = torch.arange(9).chunk(2)[j].chunk(4)
        expected = mine[i] if i < len(mine) else torch.arange(0)
        assert torch.equal(held_by(inner, rank), expected)
    assert plain.local_shape(7) == (0,)
    tensor = DTensor.from_local(torch.zeros(1), mesh, spec, shape=(9,), stride=(1,))
    assert Layout.from_dtensor(tensor) == inner.as_dtype(torch.float32)


def test_a_shard_order_is_followed(fake_world):
    mesh = init_device_mesh("cpu", (2, 4))
    order = (ShardOrderEntry(tensor_dim=0, mesh_dims=(1, 0)),)
    meta = TensorMeta(torch.Size([16]), (1,), torch.float32)
    spec = DTensorSpec(mesh, (Shard(0), Shard(0)), tensor_meta=meta, shard_order=order)
    tensor = DTensor(torch.zeros(2), spec, requires_grad=False)
    layout = Layout.from_dtensor(tensor)
    strided = (Placement("shard", 0, split_factor=4), Placement("shard", 0))
    assert layout.boxes == Layout.from_placements([16], [2, 4], strided).boxes
    assert Layout.from_json(json.loads(json.dumps(layout.to_json()))) == layout


def test_boxes_that_are_no_product_are_held_flat():
    # A shard of a flattened 2-D tensor: a part of a row, whole rows, a part of a row.
    boxes = [Box((0, 2), (1, 4)), Box((1, 0), (3, 4)), Box((3, 0), (4, 1))]
    layout = Layout.from_boxes([4, 4], {0: boxes, 1: []})
    assert layout.runs_of(0) is None
    assert layout.local_shape(0) == (11,)
    assert layout.local_shape(1) == (0, 0)
    assert Layout.from_json(json.loads(json.dumps(layout.to_json()))) == layout


def test_contributions_to_a_partial_tensor_are_told_apart():
    layout = Layout.from_placements([4], [2, 2], [Partial(), Replicate()])
    table = layout.table()
    assert table.rank.tolist() == [0, 1, 2, 3]
    assert table.part.tolist() == [0, 0, 1, 1]
    with pytest.raises(LayoutError, match="one reduction"):
        Layout.from_placements([4], [2, 2], [Partial("sum"), Partial("max")])


def test_equal_layouts_are_made_once():
    a = Layout.from_placements([64, 64], [8], [Shard(0)])
    b = Layout.from_placements(torch.Size([64, 64]), (8,), (Shard(0),))
    assert a is b
    assert a.as_dtype(torch.bfloat16) != a
    assert hash(a.as_dtype(torch.int8)) == hash(b.as_dtype(torch.int8))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Layout.from_placements([4], [2], [Replicate()], ranks=[1, 1]),
        lambda: Layout.from_placements([4], [2], [Replicate()], order=[1]),
        lambda: Layout.from_boxes([4], {0: [Box((3,), (9,))]}),
    ],
)
def test_what_does_not_fit_is_refused(make):
    with pytest.raises(LayoutError):
        make()
