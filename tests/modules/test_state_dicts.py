"""State dicts round-trip: values, batch sizes, names, non-tensor entries; all or nothing."""

from __future__ import annotations

import io
from collections import OrderedDict

import pytest
import torch
from torch import nn

from tensordict import TensorDict


def tree():
    return TensorDict(
        {
            "a": torch.arange(6.0).view(3, 2),
            "n": {"b": torch.ones(3, 4, dtype=torch.int64), "s": "text"},
            "rows": ["x", "y", "z"],
            "deep": TensorDict({"c": torch.zeros(3, 2, 5)}, [3, 2]),
            "empty": {},
        },
        [3],
        names=["t"],
    )


def blank():
    out = tree()._map(torch.zeros_like)
    out["n", "s"] = "other"
    out["rows"] = ["", "", ""]
    return out


def same(a, b):
    assert a.batch_size == b.batch_size and set(a.keys(True)) == set(b.keys(True))
    for key, value in a.items(True, True):
        assert torch.equal(value, b[key]) and value.dtype == b[key].dtype, key


def test_the_names_are_those_of_a_module():
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    ours = TensorDict.from_module(module).state_dict()
    theirs = module.state_dict()
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[k], theirs[k]) for k in theirs)
    assert not ours["0.weight"].requires_grad
    assert TensorDict.from_module(module).state_dict(keep_vars=True)["0.weight"] is module[0].weight
    module.load_state_dict(ours)


@pytest.mark.parametrize("flatten", [True, False])
@pytest.mark.parametrize("saved", [False, True])
def test_round_trip(flatten, saved):
    state = tree().state_dict(flatten=flatten)
    if saved:
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        state = torch.load(file, weights_only=True)
    target = blank()
    before = target["a"]
    assert target.load_state_dict(state) is target
    same(target, tree())
    assert target["a"] is before, "copied into the entry"
    assert target["n", "s"] == "text" and target["rows"] == ["x", "y", "z"]
    assert target.names == ["t"] and target["deep"].batch_size == (3, 2)


def test_assign_stores_the_given_tensors():
    state = tree().state_dict()
    target = blank().load_state_dict(state, assign=True)
    assert target["a"] is state["a"]


def test_prefix_and_destination():
    out = OrderedDict()
    td = TensorDict(a=1, n={"b": 2})
    assert td.state_dict(destination=out, prefix="p.") is out
    td.state_dict(destination=out, prefix="q.")
    assert list(out) == ["p.a", "p.n.b", "q.a", "q.n.b"]
    nested = td.state_dict(prefix="p.", flatten=False)
    assert set(nested) == {"p.a", "p.n"} and set(nested["p.n"]) == {"b"}


def test_names_that_would_collide():
    td = TensorDict({"a.b": 1, "a": {"b": 2}})
    with pytest.raises(KeyError, match=r"'a\.b'"):
        td.state_dict()
    assert td.state_dict(flatten=False)["a.b"] == 1


def test_a_dotted_key_of_the_target_is_found():
    td = TensorDict({"x.y": torch.zeros(2), "n": {"p.q": torch.zeros(2)}})
    td.load_state_dict({"x.y": torch.ones(2), "n.p.q": torch.ones(2)})
    assert set(td.keys(True, True)) == {"x.y", ("n", "p.q")} and bool((td["x.y"] == 1).all())


def test_other_keys_are_all_listed_and_nothing_changes():
    td = TensorDict(a=torch.zeros(2), n={"b": torch.zeros(2)})
    with pytest.raises(RuntimeError) as err:
        td.load_state_dict({"a": torch.ones(2), "z.w": torch.ones(2)})
    assert "('n', 'b')" in str(err.value) and "('z', 'w')" in str(err.value)
    assert bool((td["a"] == 0).all())


def test_not_strict_adds_and_keeps():
    td = TensorDict(a=torch.zeros(2), n={"b": torch.zeros(2)})
    td.load_state_dict({"a": torch.ones(2), "n.c": torch.ones(3)}, strict=False)
    assert bool((td["a"] == 1).all()) and bool((td["n", "b"] == 0).all())
    td.load_state_dict({"n": {"d": torch.ones(1)}}, strict=False)
    assert td["n", "c"].shape == (3,) and ("n", "d") in td


def test_other_shapes_replace_the_entry():
    td = TensorDict(a=torch.zeros(2))
    td.load_state_dict({"a": torch.ones(1)})
    assert td["a"].shape == (1,), "never broadcast"


def test_another_batch_size_is_taken():
    td = TensorDict({"a": torch.zeros(2), "n": {"b": torch.zeros(2)}}, [2])
    source = TensorDict({"a": torch.ones(5), "n": TensorDict({"b": torch.ones(5, 3)}, [5, 3])}, [5])
    td.load_state_dict(source.state_dict())
    assert td.batch_size == (5,) and td["n"].batch_size == (5, 3)
    same(td, source)
    with pytest.raises(RuntimeError, match="batch size"):
        td.load_state_dict(TensorDict({"a": torch.ones(4)}, [4]).state_dict(), strict=False)


def test_locked_targets_take_values_but_no_entries():
    td = TensorDict({"a": torch.zeros(2), "s": "x"}, lock=True)
    td.load_state_dict(TensorDict({"a": torch.ones(2), "s": "y"}).state_dict())
    assert bool((td["a"] == 1).all()) and td["s"] == "y" and td.is_locked
    for state, strict in (({"a": torch.ones(3)}, True), ({"b": torch.ones(1)}, False)):
        with pytest.raises(RuntimeError, match="locked"):
            td.load_state_dict(state, strict=strict)
    bigger = TensorDict({"a": torch.ones(2), "s": "y"}, [2]).state_dict()
    with pytest.raises(RuntimeError, match="locked"):
        td.load_state_dict(bigger)


def test_parameters_are_loaded_in_place():
    module = nn.Linear(2, 2)
    td = TensorDict.from_module(module)
    weight = module.weight
    td.load_state_dict({"weight": torch.ones(2, 2), "bias": torch.ones(2)})
    assert module.weight is weight and bool((weight == 1).all())
