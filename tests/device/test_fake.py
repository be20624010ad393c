"""The fake devices really are late, so tests that rest on them mean something."""

import pytest
import torch

from tensordict.device.fake import FakeDevices, FakeDeviceTensor
from tensordict.device.ops import ops_for
from tensordict.device.sync import Barrier, wait_for

CUDA0, CUDA1, MPS = torch.device("cuda:0"), torch.device("cuda:1"), torch.device("mps:0")


@pytest.mark.parametrize("device", [CUDA0, CUDA1, MPS, torch.device("xpu:0")])
def test_reading_before_the_wait_gives_a_wrong_value_and_after_it_the_right_one(device):
    with FakeDevices() as world:
        x = torch.arange(4.0).to(device)
        host = x.to("cpu", non_blocking=True)
        assert not torch.equal(host, torch.arange(4.0))
        assert wait_for([device]) == (device,)
        assert torch.equal(host, torch.arange(4.0))
        assert world.waits == [device]


def test_a_pinned_source_is_read_late_and_a_pageable_one_at_once():
    with FakeDevices() as world:
        pageable, pinned = torch.ones(2), ops_for(CUDA0).pin(torch.ones(2))
        a = pageable.to(CUDA0, non_blocking=True)
        b = pinned.to(CUDA0, non_blocking=True)
        pageable.fill_(5)
        pinned.fill_(5)
        world.run_all()
        assert a.to("cpu").tolist() == [1, 1]
        assert b.to("cpu").tolist() == [5, 5]


def test_blocking_copies_are_done_on_return_and_counted_as_blocking():
    with FakeDevices() as world:
        x = torch.arange(3).to(CUDA0)
        assert torch.equal(x.to("cpu"), torch.arange(3))
        assert [copy.non_blocking for copy in world.copies] == [False, False]
        assert world.waits == []


def test_operations_wait_for_the_queue_of_their_device():
    with FakeDevices():
        x = ops_for(CUDA0).pin(torch.ones(3)).to(CUDA0, non_blocking=True)
        y = x + 1
        assert type(y) is FakeDeviceTensor and y.device == CUDA0
        assert y.to("cpu").tolist() == [2, 2, 2]


def test_a_copy_between_devices_is_ordered_after_the_source():
    with FakeDevices():
        x = ops_for(CUDA0).pin(torch.ones(3)).to(CUDA0, non_blocking=True)
        y = x.to(CUDA1, non_blocking=True)
        assert (y * 2).to("cpu").tolist() == [2, 2, 2]


def test_a_barrier_covers_what_was_queued_before_it_and_nothing_later():
    with FakeDevices():
        x = torch.ones(2).to(CUDA0)
        first = x.to("cpu", non_blocking=True)
        barrier = Barrier([CUDA0])
        second = x.to("cpu", non_blocking=True)
        assert not barrier.done()
        assert barrier.wait()
        assert first.tolist() == [1, 1] and second.tolist() != [1, 1]


def test_a_timeout_tells_and_does_not_wait():
    with FakeDevices() as world:
        torch.ones(2).to(CUDA0).to("cpu", non_blocking=True)
        assert Barrier([CUDA0]).wait(timeout=0.01) is False
        assert world.waits == []


def test_outside_of_the_world_a_fake_tensor_refuses():
    with FakeDevices():
        x = torch.ones(2).to(CUDA0)
    with pytest.raises(RuntimeError, match="outside of FakeDevices"):
        x + 1
