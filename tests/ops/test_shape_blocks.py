"""``with td.op(...) as x``: what a block did to ``x`` is in ``td`` afterwards."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from strategies import flat, gate, same_tensor, slow, trees
from tensordict import TensorDict

OPS = {
    "view": lambda td: td.view(-1),
    "flatten": lambda td: td.flatten(),
    "unflatten": lambda td: td.unflatten(1, (3, 1)),
    "unsqueeze": lambda td: td.unsqueeze(1),
    "squeeze": lambda td: td.squeeze(2),
    "squeeze_two": lambda td: td.squeeze((1, 2)),
    "permute": lambda td: td.permute(1, 2, 0),
    "transpose": lambda td: td.transpose(0, 1),
    "swapdims": lambda td: td.swapdims(0, 2),
    "swapaxes": lambda td: td.swapaxes(0, 2),
    "movedim": lambda td: td.movedim(0, 2),
    "moveaxis": lambda td: td.moveaxis((0, 1), (1, 2)),
}


def source(**kwargs):
    nested = TensorDict({"b": torch.arange(12).view(2, 3, 1, 2)}, [2, 3, 1, 2])
    entries = {"a": torch.arange(6.0).view(2, 3, 1), "n": nested, "s": "text"}
    return TensorDict(entries, [2, 3, 1], names=["x", "y", "z"], **kwargs)


@pytest.mark.parametrize("op", OPS.values(), ids=list(OPS))
def test_a_block_is_written_back(op):
    td = source()
    kept = td["n", "b"]
    a, inner = td["a"].clone(), td["n"]
    with op(td) as x:
        x["a"] = x["a"] + 10
        x["n", "b"] += 1
        x["new"] = torch.arange(6).view(2, 3, 1).to(torch.float64).view(x.batch_size)
        x["made", "below"] = torch.zeros(*x.batch_size, 4)
        x["t"] = "other"
        x["s"] = "new text"
    assert torch.equal(td["a"], a + 10)
    assert td["n", "b"] is kept and td["n"] is inner
    assert torch.equal(kept.flatten(), torch.arange(12) + 1)
    assert td["new"].shape == (2, 3, 1) and td["new"].dtype == torch.float64
    assert td["made", "below"].shape == (2, 3, 1, 4) and td["made"].batch_size == (2, 3, 1)
    assert td["s"] == "new text" and td["t"] == "other"
    assert td.get("s").batch_size == td.get("t").batch_size == (2, 3, 1)
    assert td.names == ["x", "y", "z"]


@pytest.mark.parametrize("op", OPS.values(), ids=list(OPS))
def test_a_block_that_changes_nothing_leaves_the_same_tensors(op):
    td = source()
    before = flat(td)
    with op(td):
        pass
    after = flat(td)
    assert all(after[path] is x for path, x in before.items() if path != ("s",))


@pytest.mark.parametrize("op", OPS.values(), ids=list(OPS))
def test_removed_entries_stay(op):
    td = source()
    with op(td) as x:
        del x["a"]
    assert "a" in td


@pytest.mark.parametrize("op", OPS.values(), ids=list(OPS))
def test_a_failed_block_writes_nothing(op):
    td = source()
    a = td["a"]
    with pytest.raises(ZeroDivisionError):
        with op(td) as x:
            x["a"] = x["a"] + 1
            x["new"] = torch.zeros(x.batch_size)
            1 / 0
    assert td["a"] is a and "new" not in td


@pytest.mark.parametrize("op", OPS.values(), ids=list(OPS))
def test_a_locked_source_is_written_in_place(op):
    td = source(lock=True)
    a = td["a"]
    with op(td) as x:
        assert x.is_locked
        x.set_("a", torch.full(x.batch_size, 7.0))
    assert td["a"] is a and (a == 7).all() and td.is_locked


def roundtrip(td, data):
    names = [n for n, op in OPS.items() if n not in ("squeeze", "squeeze_two", "unflatten")]
    op = OPS[data.draw(st.sampled_from(names))]
    before = {path: x.clone() for path, x in td.items(True, True)}
    kept_names, batch = td.names, td.batch_size
    with op(td) as x:
        for path, value in list(x.items(True, True)):
            x[path] = value.clone()
    after = dict(td.items(True, True))
    assert td.batch_size == batch and td.names == kept_names
    assert list(after) == list(before)
    assert all(same_tensor(after[path], value) for path, value in before.items())


@given(td=trees(min_dims=3), data=st.data())
@gate
def test_replaced_leaves_come_back_in_their_shape(td, data):
    roundtrip(td, data)


@pytest.mark.slow
@given(td=trees(min_dims=3), data=st.data())
@slow
def test_replaced_leaves_come_back_in_their_shape_long(td, data):
    roundtrip(td, data)


def test_squeeze_without_a_dim_has_no_way_back():
    td = source()
    with pytest.raises(RuntimeError, match="Pass dim"):
        with td.squeeze() as x:
            x["new"] = torch.zeros(2, 3)
    assert "new" not in td


def test_blocks_on_one_object_nest():
    td = source()
    with td.view(-1) as x:
        with x.view(-1) as same:  # no other shape: the same object
            assert same is x
            same["inner"] = torch.zeros(6)
        with x.lock_():
            pass
        x["late"] = torch.ones(6)
    assert td["inner"].shape == td["late"].shape == (2, 3, 1)
    assert not td.is_locked and not x.is_locked


def test_an_operation_without_effect_does_not_write_to_an_earlier_source():
    td = source().view(-1)  # the source is gone
    with td.view(-1) as x:
        x["new"] = torch.zeros(6)
    assert x is td and "new" in td


def test_a_plain_block_keeps_what_it_did():
    td = TensorDict(a=0)
    with td:
        td.lock_()
    assert td.is_locked
