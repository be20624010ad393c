"""What the users' page shows for GPUs: on fake devices always, on real ones where there are two."""

import pytest
import torch

from tensordict import TensorDict
from tensordict.device.fake import FakeDevices
from tensordict.placement import plan_moves


@pytest.fixture(params=["fake", pytest.param("real", marks=pytest.mark.gpu)])
def world(request):
    if request.param == "real":
        if torch.cuda.device_count() < 2:
            pytest.skip("needs two CUDA devices")
        yield None
    else:
        with FakeDevices() as fake:
            yield fake


def test_one_step_on_the_gpu_keeps_its_results_on_the_host(world):
    td_cpu = TensorDict({"x": torch.zeros(3)}, batch_size=[3], device="cpu")
    with td_cpu.to("cuda:0") as td_gpu:
        td_gpu.update(td_gpu + 1)
    assert td_cpu.device == torch.device("cpu")
    assert bool((td_cpu == 1).all())


def test_each_leaf_moves_to_its_own_device(world):
    td0 = TensorDict(
        {"a": torch.zeros(3, device="cuda:0"), "b": torch.zeros(3, device="cpu")}, batch_size=[3]
    )
    td2 = TensorDict(
        {"a": torch.zeros(3, device="cpu"), "b": torch.zeros(3, device="cuda:1")}, batch_size=[3]
    )
    plan = plan_moves(td0, td2.attrs())
    assert [str(device) for device in plan.sync_devices] == ["cuda:0"]
    td3 = td0.to(td2.attrs())
    assert str(td3["a"].device) == "cpu" and str(td3["b"].device) == "cuda:1"


def test_pinned_memory_moves_without_the_host(world):
    td = TensorDict({"pos": torch.zeros(64, 3)}, batch_size=[64])
    on_gpu = td.pin_memory().to("cuda", non_blocking=True)
    assert on_gpu.device == torch.device("cuda:0")
    if world is not None:
        assert [copy.non_blocking for copy in world.copies] == [True] and world.waits == []
