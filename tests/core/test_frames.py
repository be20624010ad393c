"""`taken_apart` and `put_together`: the two ways through a tree agree."""

from __future__ import annotations

import pytest
import torch

from tensordict import LazyStackedTensorDict, TensorDict, tensorclass
from tensordict.core.traverse import leaves, put_together, taken_apart


@tensorclass
class Pair:
    x: torch.Tensor
    y: torch.Tensor | None = None


def flat(**more):
    td = TensorDict({"b": torch.rand(3, 2), "a": torch.arange(3)}, [3], names=["rows"])
    return td.update(more)


TREES = {
    "flat": (flat, True),
    "locked": (lambda: flat().lock_(), True),
    "typed": (lambda: Pair(x=torch.rand(3), batch_size=[3]), True),
    "nested": (lambda: flat(n={"c": torch.rand(3)}), False),
    "value": (lambda: flat(s="text"), False),
    "parameter": (lambda: flat(p=torch.nn.Parameter(torch.rand(3))), False),
    "empty": (lambda: TensorDict(batch_size=[3]), False),
    "stack": (lambda: LazyStackedTensorDict(flat()[0], flat()[1], stack_dim=0), False),
}


@pytest.mark.parametrize("kind", TREES)
def test_a_tree_comes_back(kind):
    make, is_flat = TREES[kind]
    td = make()
    frame, xs = taken_apart(td)
    assert (type(frame) is dict) is is_flat
    assert [id(x) for x in xs] == [id(x) for x in leaves(td)]
    out = put_together(td, frame, [x + 1 for x in xs])
    assert type(out) is type(td) and not out.is_locked
    assert out.batch_size == td.batch_size and out.names == td.names
    assert list(out.keys()) == list(td.keys())
    for x, y in zip(xs, leaves(out)):
        assert torch.equal(x + 1, y)


def test_a_frame_does_not_see_later_writes():
    td = flat()
    frame, xs = taken_apart(td)
    td["c"] = torch.zeros(3)
    assert sorted(put_together(td, frame, xs).keys()) == ["a", "b"]
