"""Modules sharded by FSDP2: their DTensor parameters in and out, against the unsharded module."""

import pytest
import torch
from torch import nn

from tensordict import TensorDict
from tensordict.distributed.testing import run_ranks

pytestmark = pytest.mark.ranks


def _model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 1))


def _sharded(size):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (size,))
    module = _model()
    for layer in (module[0], module[2], module):
        fully_shard(layer, mesh=mesh)
    return module


def _whole(td):
    return td.apply(lambda x: x.full_tensor())


def _from_and_to(rank, size):
    from torch.distributed.tensor import DTensor

    plain, module = _model(), _sharded(size)
    x = torch.ones(3, 7)
    expected = plain(x)
    td = TensorDict.from_module(module)
    assert all(isinstance(v, DTensor) for v in td.values(True, True))
    assert td["0", "weight"] is module[0].weight
    reference = TensorDict.from_module(plain)
    for key, value in _whole(td.data).items(True, True):
        assert torch.equal(value, reference[key]), key

    # In place: the parameters stay the optimiser's objects.
    weight = module[0].weight
    doubled = td.data.apply(lambda v: v * 2)
    with doubled.to_module(module, inplace=True):
        assert module[0].weight is weight
        assert torch.equal(weight.full_tensor(), 2 * plain[0].weight)
    assert torch.equal(module(x), expected)

    # State dicts of DTensors round trip.
    state = td.state_dict()
    assert list(state) == list(plain.state_dict())
    td.load_state_dict({name: value * 0 for name, value in state.items()})
    assert bool((module[0].weight.full_tensor() == 0).all())
    return float(expected.sum())


def test_parameters_sharded_by_fsdp2():
    one, two = run_ranks(_from_and_to, 2)
    assert one == two


def _swap(rank, size):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (size,))
    module = nn.Linear(4, 6)
    before = module.weight
    x = distribute_tensor(torch.ones(2, 4), mesh, [Replicate()])
    params = TensorDict(
        weight=distribute_tensor(torch.ones(6, 4), mesh, [Shard(0)]),
        bias=distribute_tensor(torch.zeros(6), mesh, [Shard(0)]),
    )
    with params.to_module(module):
        out = module(x)
        assert module.weight is params["weight"]
    assert isinstance(out, DTensor) and torch.equal(out.full_tensor(), torch.full((2, 6), 4.0))
    assert module.weight is before
    params.to_module(module)
    assert isinstance(module.weight, nn.Parameter) and isinstance(module.weight.data, DTensor)
    return True


def test_dtensors_in_a_plain_module():
    assert all(run_ranks(_swap, 2))
