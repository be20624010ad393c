"""Leaves that are shards of a larger tensor."""

import pytest
import torch

from tensordict import TensorDict
from tensordict.distributed.testing import run_ranks
from tensordict.errors import LayoutError
from tensordict.placement import Layout, Placement, TensorAttrs, plan_moves

pytestmark = pytest.mark.ranks


def _layouts(rank, size):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (size,))
    full = torch.arange(15.0).view(5, 3)
    td = TensorDict(
        {
            "w": distribute_tensor(full, mesh, [Shard(0)]),
            "r": distribute_tensor(full, mesh, [Replicate()]),
            "p": full,
        }
    )
    spec = td.attrs(fields=("dtype", "shape", "layout"))
    expected = Layout.from_placements([5, 3], [size], [Placement("shard", 0)])
    assert spec["w"].tgt_layout == expected, (spec["w"].tgt_layout, expected)
    assert spec["w"].tgt_shape == (5, 3), spec["w"]
    assert spec["p"].tgt_layout is None
    assert TensorAttrs._from_encoded(spec["w"]._encoded()) == spec["w"]

    low = td.to(torch.bfloat16)
    assert isinstance(low["w"], DTensor) and low["w"].placements == (Shard(0),)
    assert torch.equal(low["w"].full_tensor(), full.bfloat16())

    # The same sharding moves, another one is refused on every rank, and nothing is changed.
    out = low.to(spec)
    assert out["w"].dtype is torch.float32 and torch.equal(out["w"].full_tensor(), full)
    other = TensorDict({"w": distribute_tensor(full, mesh, [Shard(1)])}).attrs(
        fields=("dtype", "layout")
    )
    for call in (lambda: td.to(other), lambda: plan_moves(td, other)):
        with pytest.raises(LayoutError, match=r"'w'.*Use reshard"):
            call()
    with pytest.raises(LayoutError):
        TensorDict({"w": full}).to(spec)

    with td.to(torch.float64) as wide:
        wide["w"] = wide["w"] * 2
    assert td["w"].dtype is torch.float32 and torch.equal(td["w"].full_tensor(), full * 2)


def test_dtensors_keep_their_sharding_and_another_one_is_refused():
    run_ranks(_layouts, 2)
