"""Each leaf requires grad as if it had been computed alone, whatever the others do."""

from __future__ import annotations

import pytest
import torch

from tensordict import TensorDict


def tree():
    return TensorDict(
        {
            "w": torch.ones(3, requires_grad=True),
            "b": torch.ones(3),
            "n": {"c": torch.ones(3), "d": torch.ones(3)},
        },
        batch_size=[3],
    )


OPS = {
    "clone": lambda x, y: x.clone(),
    "exp": lambda x, y: x.exp(),
    "mul number": lambda x, y: x * 2,
    "one minus": lambda x, y: 1 - x,
    "add": lambda x, y: x + y,
    "plain add mixed": lambda x, y: x.detach() + y,
    "lerp": lambda x, y: x.lerp(y, 0.5),
    "in place, mixed operand": lambda x, y: x.detach().clone().add_(y),
    "sum": lambda x, y: x.sum(),
}


@pytest.mark.parametrize("name", OPS)
def test_results_require_grad_leaf_by_leaf(name):
    op = OPS[name]
    x, y = tree(), tree()
    out = op(x, y)
    for key, leaf in out.items(True, True):
        assert leaf.requires_grad == op(x[key], y[key]).requires_grad, key


def test_writes_require_grad_leaf_by_leaf():
    wanted = {"w": True, "b": False, ("n", "c"): False, ("n", "d"): False}
    for write in (
        lambda td: td.update_(tree()),
        lambda td: td.copy_(tree()),
        lambda td: td.__setitem__(slice(0, 3), tree()),
    ):
        td = tree().detach().clone()
        write(td)
        assert {key: x.requires_grad for key, x in td.items(True, True)} == wanted


def leaf_of_a_view():
    return torch.ones(3, 2, requires_grad=True).view(3, 2)


def one_of_many():
    return (torch.ones(2, 3, 2, requires_grad=True) * 1).unbind(0)[0]


def made_without_gradients():
    x = torch.ones(3, 2, requires_grad=True) * 1
    with torch.no_grad():
        return x[:]


WRITES = {
    "add_": lambda td: td.add_(1),
    "mul_": lambda td: td.mul_(td.detach().clone()),
    "zero_": lambda td: td.zero_(),
    "update_": lambda td: td.update_(td.detach().clone()),
    "update of a dict": lambda td: td.update_(td.detach().clone().to_dict()),
    "copy_": lambda td: td.copy_(td.detach().clone()),
    "masked_fill_": lambda td: td.masked_fill_(torch.tensor([True, False, True]), 0.0),
    "row": lambda td: td.__setitem__(0, td.detach().clone()[1]),
    "rows": lambda td: td.__setitem__([0, 2], td.detach().clone()[[1, 1]]),
    "mask": lambda td: td.__setitem__(torch.tensor([True, False, True]), td.detach().clone()[:2]),
    "number": lambda td: td.__setitem__(slice(0, 2), 0.0),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("made", [leaf_of_a_view, one_of_many, made_without_gradients])
def test_nothing_is_written_where_autograd_refuses_the_last_leaf(write, made):
    last = made()
    with pytest.raises(RuntimeError):
        last.add_(1)
    td = TensorDict({"n": {"a": torch.ones(3, 2)}, "b": torch.ones(3), "c": made()}, [3])
    versions = [x._version for x in td.values(True, True)]
    with pytest.raises(RuntimeError):
        WRITES[write](td)
    assert [x._version for x in td.values(True, True)] == versions
    assert (td == 1).all()
    for mode in (torch.no_grad, torch.inference_mode):
        td["c"] = leaf_of_a_view()
        with mode():
            WRITES[write](td)


def test_a_filled_leaf_that_requires_grad_leaves_the_others():
    td = TensorDict({"a": torch.ones(3), "w": torch.ones(3, requires_grad=True)}, [3])
    with pytest.raises(RuntimeError, match="leaf"):
        td.masked_fill_(torch.tensor([True, False, True]), 0.0)
    assert (td["a"] == 1).all()


@pytest.mark.parametrize("write", WRITES)
def test_expanded_leaves_without_elements_are_written(write):
    empty = torch.ones(1, 0).expand(3, 0)
    td = TensorDict({"a": torch.ones(3, 2), "b": empty, "c": torch.ones(3).double()}, [3])
    if write in ("row", "rows", "mask", "number"):
        td["b"] = empty.clone()
    WRITES[write](td)
    assert td["b"].shape == (3, 0)
