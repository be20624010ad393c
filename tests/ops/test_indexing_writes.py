"""``td[index] = value`` and its kin: rows written, all or nothing, allocation on first write."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from strategies import flat, gate, indices, same_tensor, slow, trees
from tensordict import NonTensorData, NonTensorStack, TensorDict, lazy_stack


def write(td, data):
    """Write numbers into rows, and compare with the same write in torch on every leaf."""
    index, plain = data.draw(indices(td.batch_size))
    before = flat(td.clone())
    leaves = dict(td.items(True, True))
    kind = data.draw(st.sampled_from(["number", "tree", "dict", "set_at_", "update_at_"]))
    rows = td[index]
    new = rows._map(lambda x: (x.to(torch.float64) if not x.is_complex() else x).add(3).to(x.dtype))
    if kind == "number":
        td[index] = 3
    elif kind == "tree":
        td[index] = new
    elif kind == "dict":
        td[index] = dict(new.items())
    elif kind == "update_at_":
        td.update_at_(new, index)
    else:
        for path in leaves:
            td.set_at_(path, new[path], index)
    for path, x in before.items():
        if not isinstance(x, Tensor):
            continue
        x[plain] = 3 if kind == "number" else new[path]
        assert td.get(path) is leaves[path if len(path) > 1 else path[0]]
        # A row that is named twice may hold either value.
        if kind == "number" or not named_twice(td.batch_size, plain):
            assert same_tensor(td.get(path), x), path


def named_twice(batch, plain):
    rows = torch.arange(batch.numel()).view(batch)[plain].reshape(-1)
    return rows.unique().numel() != rows.numel()


@given(td=trees(min_dims=1), data=st.data())
@gate
def test_agrees_with_torch_on_each_leaf(td, data):
    write(td, data)


@pytest.mark.slow
@given(td=trees(min_dims=1), data=st.data())
@slow
def test_agrees_with_torch_on_each_leaf_long(td, data):
    write(td, data)


def make(**kwargs):
    entries = {
        "a": torch.zeros(4, 3),
        "b": torch.zeros(4, dtype=torch.int64),
        "n": {"c": torch.zeros(4, 2)},
        "s": "text",
    }
    return TensorDict(entries, [4], names=["t"], **kwargs)


def state(td):
    return {p: x.clone() if isinstance(x, Tensor) else x for p, x in flat(td).items()}


def unchanged(td, before):
    after = flat(td)
    return list(after) == list(before) and all(
        torch.equal(after[p], x) if isinstance(x, Tensor) else after[p] is x
        for p, x in before.items()
    )


MASK = torch.tensor([True, False, False, True])


def test_rows_are_written_in_place():
    td = make()
    a, c = td["a"], td["n", "c"]
    td[1] = TensorDict({"a": torch.ones(3), "n": {"c": torch.ones(2)}})
    td[2:] = {"a": torch.full((2, 3), 2.0), "n": {"c": torch.full((2, 2), 2.0)}}
    assert td["a"] is a and td["n", "c"] is c
    assert a[:, 0].tolist() == c[:, 0].tolist() == [0, 1, 2, 2]
    assert td["b"].tolist() == [0] * 4  # not in the value: left alone
    td[MASK] = {"b": torch.tensor([5, 6])}
    td[[1, 2]] = {"b": 7}
    assert td["b"].tolist() == [5, 7, 7, 6]


def test_a_number_or_a_tensor_goes_into_every_leaf():
    td = make()
    td[0] = 1
    td[1] = torch.tensor(2.5)
    assert td["a"][:, 0].tolist() == [1, 2.5, 0, 0] == td["n", "c"][:, 1].tolist()
    assert td["b"].tolist() == [1, 2, 0, 0] and td["b"].dtype == torch.int64


def test_batch_sizes_broadcast():
    td = TensorDict({"a": torch.zeros(4, 3)}, [4])
    td[:2] = TensorDict({"a": torch.ones(3)})
    td[2:] = TensorDict({"a": torch.full((1, 3), 2.0)}, [1])
    assert td["a"][:, 0].tolist() == [1, 1, 2, 2]
    td[1:3] = TensorDict({"new": torch.ones(5)})
    assert td["new"].shape == (4, 5) and td["new"][:, 0].tolist() == [0, 1, 1, 0]
    with pytest.raises(RuntimeError, match="indexed destination TensorDict batch size is"):
        td[:2] = TensorDict({"a": torch.zeros(3, 3)}, [3])


def test_missing_entries_are_allocated_for_the_whole_batch():
    def row(i):
        return TensorDict({"a": torch.full((3,), i), "b": {"c": torch.full((2,), i + 10.0)}})

    td = TensorDict({}, batch_size=[4])
    for i in (2, 0, 3, 1):
        td[i] = row(i)
    stacked = torch.stack([row(i) for i in range(4)])
    assert td["a"].dtype == torch.int64 and torch.equal(td["a"], stacked["a"])
    assert td["b"].batch_size == (4,) and torch.equal(td["b", "c"], stacked["b", "c"])
    td[1:3] = {("n", "d"): torch.ones(2, 5), "t": "text"}
    assert td["n"].batch_size == (4,) and td["n", "d"][:, 0].tolist() == [0, 1, 1, 0]
    assert td.get("t").tolist() == [None, "text", "text", None]


def test_allocated_nested_batch_sizes_are_kept():
    td = TensorDict({}, batch_size=[3])
    td[0] = TensorDict({"n": TensorDict({"x": torch.ones(2, 5)}, [2])})
    assert td["n"].batch_size == (3, 2) and td["n", "x"].shape == (3, 2, 5)


def test_allocation_goes_to_the_device_of_the_tensordict():
    td = TensorDict({}, batch_size=[2], device="cpu")
    td[0] = TensorDict({"n": {"x": torch.ones(2)}})
    assert td["n"].device == torch.device("cpu")


def test_a_locked_tensordict_takes_rows_but_no_entry():
    td = make(lock=True)
    td[0] = {"b": 3}
    td.update_at_({"b": 4}, 1)
    td.set_at_(("n", "c"), 1.0, 2)
    assert td["b"].tolist() == [3, 4, 0, 0]
    before = state(td)
    for value in ({"b": 5, "new": torch.ones(3)}, {"b": 5, "n": {"new": torch.ones(3)}}):
        with pytest.raises(RuntimeError, match="Cannot modify locked TensorDict"):
            td[0] = value
        assert unchanged(td, before)


def test_non_tensor_entries_change_by_row():
    td = make()
    td[1:3] = {"s": "text"}
    assert td["s"] == "text"  # equal values stay one value
    td[1] = {"s": "other"}
    assert td.get("s").tolist() == ["text", "other", "text", "text"]
    td[2:] = {"s": ["p", "q"]}
    td[0] = TensorDict({"s": "r"})
    assert td.get("s").tolist() == ["r", "other", "p", "q"]
    td.set_at_("s", "z", 0)
    td[[1, 2]] = TensorDict({"s": NonTensorStack("u", "v")}, [2])
    assert td.get("s").tolist() == ["z", "u", "v", "q"]
    assert td.get("s").batch_size == (4,)
    td[0] = {"s": NonTensorData(None)}
    assert td.get("s").tolist()[0] is None


def test_set_at_update_at_and_copy_at_return_self():
    td = make()
    assert td.set_at_("b", 1, 0) is td
    assert td.update_at_({"b": 2}, 1) is td
    assert td.copy_at_(TensorDict({"b": torch.tensor([3, 4])}, [2]), slice(2, None)) is td
    assert td["b"].tolist() == [1, 2, 3, 4]
    td.update_at_({"a": 9.0, "b": 9, "n": {"c": 9.0}}, 0, keys_to_update=["b", ("n", "c")])
    assert td["b"][0] == 9 and td["a"][0, 0] == 0 and td["n", "c"][0, 0] == 9
    rows = TensorDict({"a": torch.ones(3), "b": torch.tensor(8)})
    td.update_at_(rows, 1, keys_to_update="b")
    assert td["b"][1] == 8 and td["a"][1, 0] == 0


def test_dtypes_of_the_destination_stay():
    td = make()
    td[0] = {"b": 1.7, "a": torch.ones(3, dtype=torch.float64)}
    assert td["b"][0] == 1 and td["b"].dtype == torch.int64 and td["a"].dtype == torch.float32
    td[[0, 1]] = {"b": torch.tensor([2.0, 3.9])}
    assert td["b"].tolist() == [2, 3, 0, 0]


ODD = [
    name
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "uint16", "uint32", "uint64")
    if hasattr(torch, name)
]


@pytest.mark.parametrize("name", ODD)
def test_dtypes_without_kernels_to_scatter_are_written_too(name):
    dtype = getattr(torch, name)
    ones = torch.ones(4, 3).to(dtype)
    for index in (0, slice(2), [0, 3], MASK, torch.tensor([[0], [3]]), ([0, 3],)):
        td = TensorDict({"a": torch.full((4, 3), 2.0).to(dtype)}, [4])
        plain = torch.full((4, 3), 2.0)
        td[index] = td._map(lambda x: ones)[index]
        plain[index] = 1
        assert torch.equal(td["a"].to(torch.float32), plain)
        td[index] = 4
        plain[index] = 4
        assert torch.equal(td["a"].to(torch.float32), plain)
    index = torch.tensor([1, 1, 0])
    assert torch.equal(td.gather(0, index)["a"].to(torch.float32), plain[index])


def test_gradients_flow_from_written_values():
    value = torch.ones(3, requires_grad=True)
    td = TensorDict({"a": torch.zeros(4, 3)}, [4])
    td[1] = {"a": value}
    td[[2, 3]] = {"a": value * 2}
    td["a"].sum().backward()
    assert value.grad.tolist() == [5, 5, 5]


BAD = {
    "shape": lambda td: td.__setitem__(0, {"b": 1, "a": torch.ones(7)}),
    "shape of rows": lambda td: td.__setitem__([0, 1], {"b": 1, "a": torch.ones(3, 3)}),
    "nested shape": lambda td: td.__setitem__(0, {"b": 1, "n": {"c": torch.ones(7)}}),
    "tree for a tensor": lambda td: td.__setitem__(0, {"b": 1, "a": {"q": torch.ones(3)}}),
    "text for a tensor": lambda td: td.__setitem__(0, {"b": 1, "a": "text"}),
    "new entry": lambda td: td.__setitem__(slice(2), {"b": 1, "z": torch.ones(3)}),
    "new number": lambda td: td.__setitem__(slice(2), {"b": 1, "z": 1.0}),
    "new nested entry": lambda td: td.__setitem__(slice(2), {"b": 1, "n": {"z": torch.ones(3)}}),
    "bad key": lambda td: td.__setitem__(0, {"b": 1, 3: torch.ones(3)}),
    "batch size": lambda td: td.__setitem__(0, TensorDict({"b": torch.ones(2)}, [2])[None]),
    "for all": lambda td: td.__setitem__(slice(2), torch.ones(5)),
    "nothing for all": lambda td: td.__setitem__(0, None),
    "ragged list": lambda td: td.__setitem__(0, {"b": 1, "a": [[1], [1, 2]]}),
    "text for all": lambda td: td.__setitem__(0, "text"),
    "update: missing": lambda td: td.update_at_({"b": 1, "z": torch.ones(3)}, 0),
    "update: missing nested": lambda td: td.update_at_({"b": 1, "n": {"z": 1}}, 0),
    "update: shape": lambda td: td.update_at_({"b": 1, "a": torch.ones(7)}, 0),
    "update: no mapping": lambda td: td.update_at_(3, 0),
    "update: key missing": lambda td: td.update_at_({"b": 1}, 0, keys_to_update=["b", "z"]),
    "copy: missing": lambda td: td.copy_at_(TensorDict(b=1, z=1), 0),
    "set: missing": lambda td: td.set_at_("z", 1, 0),
    "set: shape": lambda td: td.set_at_("a", torch.ones(7), 0),
    "set: through a tensor": lambda td: td.set_at_(("a", "z"), 1, 0),
    "set: index": lambda td: td.set_at_("a", 1, 9),
}
ERRORS = {
    "update: missing": KeyError,
    "update: missing nested": KeyError,
    "copy: missing": KeyError,
}
ERRORS |= {"update: key missing": KeyError, "set: missing": KeyError, "bad key": KeyError}
ERRORS |= {"update: no mapping": TypeError, "set: through a tensor": RuntimeError}
ERRORS |= {"set: index": IndexError, "nothing for all": TypeError, "ragged list": ValueError}


@pytest.mark.parametrize("name", BAD)
def test_a_failed_write_changes_nothing(name):
    td = make()
    before = state(td)
    with pytest.raises(ERRORS.get(name, RuntimeError)) as caught:
        BAD[name](td)
    assert type(caught.value).__module__ == "tensordict.errors" and str(caught.value)
    assert unchanged(td, before)


@pytest.mark.parametrize("index", [0, slice(2), [0, 1], MASK])
def test_a_second_entry_that_torch_would_refuse_is_found_before_the_first_write(index):
    leaf = torch.zeros(4, requires_grad=True)
    expanded = torch.zeros(1, 3).expand(4, 3)
    jagged = torch.nested.as_nested_tensor([torch.zeros(2)] * 4, layout=torch.jagged)
    for second in (leaf, expanded, jagged):
        td = TensorDict({"b": torch.zeros(4), "z": second}, [4])
        if second is expanded and type(index) is int:
            continue  # one row of an expanded tensor is written as in torch
        with pytest.raises(RuntimeError, match="Cannot write into rows of 'z'"):
            td[index] = 1.0
        assert (td["b"] == 0).all()
    with torch.no_grad():
        td = TensorDict({"z": leaf}, [4])
        td[index] = 1.0
    assert leaf[0] == 1


KINDS = {
    "row": 1,
    "slice": slice(0, 2),
    "column": (slice(None), 0),
    "positions": torch.tensor([2, 0]),
    "list": [0, -1],
    "column positions": (slice(None), torch.tensor([1, 1])),
    "table": torch.tensor([[2, 0], [1, 0]]),
    "mask": torch.tensor([True, False, True]),
    "pairs": (torch.tensor([0, 2]), torch.tensor([1, 3])),
}


def _many() -> dict[str, Tensor]:
    """Leaves of several sorts, more of each than one."""
    out = {}
    for i, dtype in enumerate([torch.float32, torch.int64, torch.uint16, torch.float64]):
        for j, tail in enumerate([(), (2,), (0,)]):
            x = torch.arange(12 * max(1, sum(tail)) if 0 not in tail else 0)
            out[f"{i}{j}"] = x.to(dtype).view(3, 4, *tail)
    out["turned"] = torch.arange(12.0).view(4, 3).t()
    out["part"] = torch.arange(24.0).view(3, 8)[:, ::2]
    return out


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("grad", [False, True])
def test_rows_of_leaves_of_many_sorts(kind, grad):
    index = KINDS[kind]
    leaves = _many()
    td = TensorDict({k: x.clone() for k, x in leaves.items()}, [3, 4])
    td["turned"], td["part"] = leaves["turned"], leaves["part"]
    new = td[index]._map(lambda x: x.clone())
    new = new._map(lambda x: (x.to(torch.float64) + 100).to(x.dtype))
    wanted = {k: x.clone() for k, x in leaves.items()}
    for k, x in wanted.items():
        x.view(torch.int16 if x.dtype is torch.uint16 else x.dtype)[index] = (
            new[k].view(torch.int16) if x.dtype is torch.uint16 else new[k]
        )
    memory = {k: x.data_ptr() for k, x in td.items()}
    with torch.set_grad_enabled(grad):
        td[index] = new
    for k, x in td.items():
        assert torch.equal(x, wanted[k]), k
        assert x.data_ptr() == memory[k]


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_of_rows_is_that_of_torch(kind):
    index = KINDS[kind]
    td = TensorDict({f"k{i}": torch.zeros(3, 4) for i in range(4)}, [3, 4])
    new = td[index]._map(lambda x: (x + 1).requires_grad_())
    new["k3"] = new["k3"].detach()
    td[index] = new
    weights = torch.arange(12.0).view(3, 4)
    sum((x * weights).sum() for x in td.values()).backward()
    value = torch.ones_like(new["k0"]).requires_grad_()
    alone = torch.zeros(3, 4)
    alone[index] = value
    (alone * weights).sum().backward()
    for name in ("k0", "k1", "k2"):
        assert torch.equal(new[name].grad, value.grad)
    assert not td["k3"].requires_grad


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(
    ("to", "source"),
    [
        ([0, 1], [1, 0]),
        (torch.tensor([0, 2]), torch.tensor([1, 0])),
        (slice(1, 3), slice(0, 2)),
        (slice(0, 2), slice(1, 3)),
        (torch.tensor([True, False, True]), [1, 0]),
    ],
)
def test_rows_of_a_stack_change_places(dim, to, source):
    td = TensorDict({"a": torch.rand(3, 3), "n": {"b": torch.rand(3, 3, 2)}}, [3, 3])
    stack = lazy_stack([x.clone() for x in td.unbind(dim)], dim)
    td[to] = td[source].clone()
    stack[to] = stack[source]
    assert (stack == td).all()
