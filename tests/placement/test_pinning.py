"""Pinned memory, with fake accelerators."""

import pytest
import torch

from tensordict import TensorDict
from tensordict.device.fake import FakeDevices
from tensordict.errors import EntryTypeError, LockedError

CUDA = torch.device("cuda:0")

needs_none = pytest.mark.skipif(torch.accelerator.is_available(), reason="an accelerator is there")


def tree():
    w = torch.ones(3)
    return TensorDict({"a": w, "tied": w, "n": {"b": torch.arange(3)}, "s": "x"}, batch_size=[3])


@needs_none
def test_without_an_accelerator_pinning_raises():
    with pytest.raises(RuntimeError, match="expected an accelerator"):
        tree().pin_memory()
    with pytest.raises(RuntimeError, match="expected an accelerator"):
        tree().to("cpu", non_blocking_pin=True)


@pytest.mark.parametrize("num_threads", [None, 0, 2])
def test_every_leaf_is_pinned_once(num_threads):
    with FakeDevices() as world:
        td = tree()
        out = td.pin_memory(num_threads)
        assert out is not td and world.n_pins == 2
        assert all(world.is_pinned(x) for x in out.values(True, True))
        assert not any(world.is_pinned(x) for x in td.values(True, True))
        assert out["a"] is out["tied"] and out["n", "b"].tolist() == [0, 1, 2]
        again = out.pin_memory(num_threads)
        assert again["a"] is out["a"] and world.n_pins == 2


def test_in_place_replaces_the_leaves():
    with FakeDevices() as world:
        td = tree()
        assert td.pin_memory(inplace=True) is td
        assert all(world.is_pinned(x) for x in td.values(True, True))
        with pytest.warns(DeprecationWarning, match=r"removed in version 0\.17"):
            assert td.pin_memory_() is td
        with pytest.raises(LockedError):
            tree().lock_().pin_memory(inplace=True)


def test_leaves_elsewhere_are_named_and_nothing_is_pinned():
    with FakeDevices() as world:
        td = tree().set("m", torch.zeros(3, device="meta")).set("c", torch.zeros(3).to(CUDA))
        with pytest.raises(EntryTypeError) as error:
            td.pin_memory()
        assert "'m'" in str(error.value) and "'c'" in str(error.value)
        assert world.n_pins == 0


@pytest.mark.parametrize("num_threads", [0, 3])
def test_pinning_while_copying_gives_the_right_values(num_threads):
    with FakeDevices() as world:
        td = tree()
        out = td.to(CUDA, non_blocking_pin=True, num_threads=num_threads)
        assert out.device == CUDA and world.n_pins == 2
        assert [copy.non_blocking for copy in world.copies] == [True, True]
        back = out.to("cpu")
        assert back["a"].tolist() == [1, 1, 1] and back["n", "b"].tolist() == [0, 1, 2]
