from __future__ import annotations

import pickle

import pytest
import torch

from tensordict import TensorDict
from tensordict.errors import LockedError


def tree():
    return TensorDict({"a": torch.zeros(3), "n": {"b": torch.ones(3, 2)}, "word": "x"}, [3])


def test_leaves_stay_the_same_objects_in_shared_memory():
    td = tree()
    a = td["a"]
    assert td.share_memory_() is td and td["a"] is a
    assert a.is_shared() and td["n", "b"].is_shared()
    assert td.is_shared() and td["n"].is_shared() and td.is_locked and td.device is None
    assert td["word"] == "x"
    a[0] = 5
    assert td["a"].tolist() == [5, 0, 0]
    with pytest.raises(LockedError):
        td["c"] = torch.zeros(3)


def test_what_else_looks_at_the_memory_follows():
    base = torch.zeros(4)
    TensorDict({"row": base[1:3]}).share_memory_()
    assert base.is_shared()
    layer = torch.nn.Linear(2, 2)
    td = TensorDict(dict(layer.named_parameters())).share_memory_()
    assert layer.weight.is_shared() and td["weight"] is layer.weight


def test_the_tree_is_shared_as_long_as_it_is_locked():
    td = tree().share_memory_()
    assert td.share_memory_() is td
    assert not td.unlock_().is_shared() and td["a"].is_shared()
    assert not TensorDict({"a": td["a"]}).is_shared()
    assert not tree().share_memory_().clone().is_shared()


def test_a_locked_tree_can_be_shared():
    td = tree().lock_().share_memory_()
    assert td.is_shared() and td["n"].is_shared() and td["n", "b"].is_shared()


def test_other_devices_stay_where_they_are():
    td = TensorDict({"a": torch.zeros(2), "m": torch.zeros(2, device="meta")}).share_memory_()
    assert td.is_shared() and td["a"].is_shared() and td["m"].is_meta


def test_jagged_and_sparse_leaves_are_shared_by_their_parts():
    nt = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    td = TensorDict({"t": nt, "s": torch.eye(2).to_sparse()}, [2]).share_memory_()
    assert td["t"].values().is_shared() and td["t"].offsets().is_shared()
    assert td["s"]._values().is_shared()


def test_pickled_it_comes_back_shared():
    back = pickle.loads(pickle.dumps(tree().share_memory_()))
    assert back.is_shared() and back["a"].is_shared() and back.is_locked


def write(td, queue):
    td.set_("a", torch.ones(3))
    td["a"][0] = 5
    td["n", "b"].fill_(2)
    queue.put((td.is_shared(), td.is_locked, td["word"]))


@pytest.mark.ranks
@pytest.mark.parametrize("prepare", ["share_memory_", "consolidate"])
def test_a_spawned_child_writes_into_it(prepare):
    td = tree()
    td = td.share_memory_() if prepare == "share_memory_" else td.consolidate(share_memory=True)
    ctx = torch.multiprocessing.get_context("forkserver")
    queue = ctx.Queue()
    child = ctx.Process(target=write, args=(td, queue))
    child.start()
    seen = queue.get(timeout=60)
    child.join(60)
    assert child.exitcode == 0 and seen == (prepare == "share_memory_", True, "x")
    assert td["a"].tolist() == [5, 1, 1] and (td["n", "b"] == 2).all()


class Sub(TensorDict):
    """A user's class."""


@pytest.mark.ranks
def test_a_subclass_is_handed_over_by_handle_too():
    td = Sub({"a": torch.zeros(3), "n": Sub({"b": torch.ones(3)}), "word": "x"}).share_memory_()
    ctx = torch.multiprocessing.get_context("fork")
    queue = ctx.Queue()
    # A queue pickles whatever way the processes are started.
    queue.put(td)
    back = queue.get(timeout=60)
    back["a"].fill_(7)
    assert type(back) is Sub and type(back["n"]) is Sub and td["a"].tolist() == [7, 7, 7]
