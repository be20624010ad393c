"""Joining the entries of one tensordict."""

from __future__ import annotations

import pytest
import torch

from tensordict import TensorDict


def make(**kwargs):
    entries = {"b": torch.zeros(2, 3), "a": torch.ones(2, 3), "n": {"c": torch.ones(2, 3)}}
    return TensorDict(entries, [2], **kwargs)


def test_entries_are_replaced_by_their_stack():
    td = make()
    assert td.stack_tensors("a", ("n", "c"), out_key=("n", "z"), dim=1) is td
    assert td["n", "z"].shape == (2, 2, 3) and set(td.keys(True, True)) == {"b", ("n", "z")}
    kept = make().stack_tensors("a", "b", out_key="z", dim=-1, keep_entries=True)
    assert kept["z"].shape == (2, 3, 2) and "a" in kept and "b" in kept


def test_entries_are_replaced_by_their_concatenation():
    td = make().cat_tensors("a", "b", out_key="a", dim=1)
    assert torch.equal(td["a"], torch.tensor([[1.0] * 3 + [0.0] * 3] * 2)) and "b" not in td
    assert make().cat_tensors("a", "a", out_key="z", dim=1)["z"].shape == (2, 6)


def test_all_leaves_as_one_tensor():
    td = make()
    assert torch.equal(td.stack_from_tensordict(), torch.stack([td["b"], td["a"], td["n", "c"]]))
    assert td.cat_from_tensordict(1, sorted=True)[0].tolist() == [1] * 3 + [0] * 3 + [1] * 3
    order = [("n", "c"), "b", "a"]
    assert td.cat_from_tensordict(1, sorted=order)[0].tolist() == [1] * 3 + [0] * 3 + [1] * 3
    out = torch.empty(3, 2, 3)
    assert td.stack_from_tensordict(out=out) is out and out[0].sum() == 0


BAD = {
    "missing": (lambda td: td.cat_tensors("a", "q", out_key="z"), KeyError, '"q" not found'),
    "nothing": (lambda td: td.cat_tensors(out_key="z"), ValueError, "one key or more"),
    "node": (lambda td: td.stack_tensors("a", "n", out_key="z"), TypeError, "'n'.*a TensorDict"),
    "batch": (lambda td: td.cat_tensors("a", "b", out_key="z"), RuntimeError, "mismatch.*'z'"),
    "shapes": (
        lambda td: td.set("d", torch.ones(2, 4)).stack_tensors("a", "d", out_key="z"),
        RuntimeError,
        r"Cannot join the entries \{'a': \[2, 3\], 'd': \[2, 4\]\}",
    ),
    "dim": (lambda td: td.stack_tensors("a", "b", out_key="z", dim=7), RuntimeError, "dim 7"),
    "through a tensor": (
        lambda td: td.stack_tensors("a", "b", out_key=("a", "z")),
        KeyError,
        "'a' is a Tensor",
    ),
    "order": (
        lambda td: td.cat_from_tensordict(sorted=["a"]),
        KeyError,
        "differs from the tensordict",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_call_that_fails_changes_nothing(name):
    call, error, text = BAD[name]
    td = make()
    before = dict(td.items(True, True))
    with pytest.raises(error, match=text):
        call(td)
    after = dict(td.items(True, True))
    assert all(after[key] is x for key, x in before.items())


def test_locked_trees_keep_their_entries():
    td = make()
    td["n"].lock_()
    for call in (
        lambda: td.stack_tensors("a", ("n", "c"), out_key="z"),
        lambda: make(lock=True).stack_tensors("a", "b", out_key="z"),
    ):
        with pytest.raises(RuntimeError, match="Cannot modify locked TensorDict"):
            call()
    assert set(td.keys()) == {"a", "b", "n"}
