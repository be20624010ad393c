"""stack and cat: against torch on each leaf; what does not fit is said, `out` stays as it was."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import tensordict
from strategies import check_tree, flat, gate, same_tensor, slow, trees
from tensordict import NonTensorData, NonTensorStack, TensorDict


def others(td, draw, n):
    """Trees of the structure of ``td`` with other numbers, some of another key order."""
    out = []
    for i in range(n):
        new = td._map(lambda x, i=i: x.roll(i, 0) if x.ndim else x.logical_not().to(x.dtype))
        if draw(st.booleans()):
            new = new._like(dict(reversed(list(new._items()))))
        out.append(new)
    return out


def check(td, data, join):
    n = data.draw(st.integers(1, 3))
    dim = data.draw(st.integers(0, td.ndim if join == "stack" else td.ndim - 1))
    ndim = td.ndim + (join == "stack")
    parts = others(td, data.draw, n)
    given_dim = data.draw(st.sampled_from([dim, dim - ndim]))
    fn = data.draw(
        st.sampled_from(
            [getattr(torch, join), getattr(tensordict, join), getattr(TensorDict, join)]
        )
    )
    result = fn(parts, given_dim)
    truth = getattr(torch, join)
    assert result.batch_size == truth([torch.zeros(td.batch_size)] * n, dim).shape
    names = list(td.names)
    assert result.names == (names if join == "cat" else [*names[:dim], None, *names[dim:]])
    if join == "stack":
        assert list(result.keys()) == sorted(result.keys())
    check_tree(result)
    leaves = [flat(part) for part in parts]
    assert set(flat(result)) == set(leaves[0])
    for path, x in flat(result).items():
        if isinstance(x, Tensor):
            assert same_tensor(x, truth([part[path] for part in leaves], dim)), path
    size = td.batch_size.numel()
    numbers = torch.arange(size).view(td.batch_size)
    source = truth([numbers + i * size for i in range(n)], dim).reshape(-1).tolist()
    for path, x in flat(result).items():
        if isinstance(x, NonTensorStack) and leaves[0][path].batch_size == td.batch_size:
            values = [leaves[j // size][path]._rows().reshape(-1)[j % size] for j in source]
            assert list(x._rows().reshape(-1)) == values


@given(td=trees(), data=st.data())
@gate
def test_stack_agrees_with_torch(td, data):
    check(td, data, "stack")


@given(td=trees(min_dims=1), data=st.data())
@gate
def test_cat_agrees_with_torch(td, data):
    check(td, data, "cat")


@pytest.mark.slow
@given(td=trees(), data=st.data())
@slow
def test_stack_agrees_with_torch_long(td, data):
    check(td, data, "stack")


@pytest.mark.slow
@given(td=trees(min_dims=1), data=st.data())
@slow
def test_cat_agrees_with_torch_long(td, data):
    check(td, data, "cat")


def make(n=2, value=0.0, **kwargs):
    nested = TensorDict({"b": torch.full((n, 3), value + 1)}, [n])
    entries = {"a": torch.full((n, 4), value), "n": nested, "s": "text"}
    return TensorDict(entries, [n], **{"names": ["x"], **kwargs})


def test_cat_of_several_sizes():
    out = torch.cat([make(2), make(3, 5.0)])
    assert out.batch_size == (5,) and out["n"].batch_size == (5,)
    assert out["a"][:, 0].tolist() == [0, 0, 5, 5, 5] and out["s"] == "text"
    assert torch.concat([make(1), make(1)]).batch_size == (2,)


def test_metadata_of_results():
    a, b = make(device="cpu"), make()
    assert torch.stack([a, b]).device == torch.device("cpu")
    assert torch.cat([a, b]).device is None and torch.cat([a, a]).device == torch.device("cpu")
    assert torch.stack([a, make(names=["y"])]).names == [None, None]
    assert torch.cat([a, make(names=["y"])]).names == [None]
    assert not torch.stack([a.lock_(), a]).is_locked and not torch.cat([a, a]).is_locked
    low, high = TensorDict(a=torch.ones(2, dtype=torch.float16)), TensorDict(a=torch.ones(2))
    assert torch.stack([low, high])["a"].dtype == torch.float32


def test_non_tensor_entries():
    one, two = (TensorDict({"s": s}, [2]) for s in "pq")
    assert torch.stack([one, two]).get("s").tolist() == [["p", "p"], ["q", "q"]]
    assert torch.cat([one, two]).get("s").tolist() == ["p", "p", "q", "q"]
    same = torch.cat([one, one]).get("s")
    assert type(same) is NonTensorData and same.batch_size == (4,)
    assert torch.stack([NonTensorData("p"), NonTensorData("q")]).tolist() == ["p", "q"]


def test_jagged_leaves_are_concatenated():
    def rows(*lengths):
        parts = [torch.full((n,), n) for n in lengths]
        jagged = torch.nested.as_nested_tensor(parts, layout=torch.jagged)
        return TensorDict({"ids": jagged}, [len(parts)])

    out = torch.cat([rows(1, 3), rows(2)])
    assert [x.tolist() for x in out["ids"].unbind()] == [[1], [3, 3, 3], [2, 2]]


@pytest.mark.parametrize("join", [torch.stack, torch.cat])
def test_out_is_filled_in_place(join, monkeypatch):
    parts = [make(2, 1.0), make(2, 2.0)]
    expected = join(parts)
    out = join([make(), make()])
    before = dict(out.items(True, True))
    assert join(parts, 0, out=out) is out
    assert torch.equal(out["a"], expected["a"]) and torch.equal(out["n", "b"], expected["n", "b"])
    assert all(out.get(path) is x for path, x in before.items())


def test_out_of_plain_tensors_is_written_by_torch_itself(monkeypatch):
    calls = []
    real = torch.stack
    monkeypatch.setattr(torch.Tensor, "copy_", lambda *a, **k: calls.append("copy_"))
    parts = [TensorDict({"a": torch.full((3,), i), "n": {"b": torch.zeros(2)}}) for i in range(2)]
    out = TensorDict({"a": torch.zeros(2, 3, dtype=torch.int64), "n": {"b": torch.ones(2, 2)}}, [2])
    real(parts, out=out)
    assert not calls and out["a"][:, 0].tolist() == [0, 1] and (out["n", "b"] == 0).all()


def test_out_of_another_dtype_or_stride_is_cast():
    parts = [TensorDict(a=torch.ones(3)), TensorDict(a=torch.ones(3) * 2)]
    for target in (torch.zeros(2, 3, dtype=torch.float64), torch.zeros(3, 2).T):
        out = TensorDict({"a": target}, [2])
        assert torch.stack(parts, out=out)["a"] is target and target[:, 0].tolist() == [1, 2]


BAD_OUT = {
    "batch size": lambda: TensorDict({"a": torch.zeros(3, 4), "b": torch.zeros(3, 4)}, [3]),
    "second shape": lambda: TensorDict({"a": torch.zeros(2, 4), "b": torch.zeros(2, 5)}, [2]),
    "second kind": lambda: TensorDict({"a": torch.zeros(2, 4), "b": {"c": torch.zeros(2)}}, [2]),
    "locked": lambda: TensorDict({"a": torch.zeros(2, 4)}, [2], lock=True),
}


@pytest.mark.parametrize("name", BAD_OUT)
def test_an_out_that_does_not_fit_stays_as_it_was(name):
    parts = [TensorDict(a=torch.ones(4), b=torch.ones(4)) for _ in range(2)]
    out = BAD_OUT[name]()
    with pytest.raises(RuntimeError) as caught:
        torch.stack(parts, out=out)
    assert type(caught.value).__module__ == "tensordict.errors"
    assert all((x == 0).all() for x in out.values(True, True))


def nested(**entries):
    return TensorDict({"n": TensorDict(entries, [2])}, [2])


STACK = {
    "empty": ([], 0, "empty list"),
    "batch sizes": ([make(2), make(3)], 0, r"congruent batch sizes, got.*td\[1\]"),
    "keys": ([make(), make().exclude("a")], 0, "exclusive keys are .'a'"),
    "nested keys": (
        [nested(a=torch.zeros(2)), nested(b=torch.zeros(2))],
        0,
        "In 'n'.*exclusive keys",
    ),
    "shapes": ([TensorDict(a=torch.zeros(2)), TensorDict(a=torch.zeros(3))], 0, "for key a"),
    "nested shapes": (
        [nested(a=torch.zeros(2, 1)), nested(a=torch.zeros(2, 2))],
        0,
        "In 'n'.*for key a",
    ),
    "nested batch sizes": (
        [
            TensorDict({"n": TensorDict({}, [2])}, []),
            TensorDict({"n": TensorDict({}, [3])}, []),
        ],
        0,
        "congruent batch sizes.*for key n",
    ),
    "kinds": ([TensorDict(a=0), TensorDict(a={"b": 0})], 0, "'a'.*Tensor and a TensorDict"),
    "tensor and value": ([TensorDict(a=0), TensorDict(a="x")], 0, "'a'"),
    "dim": ([make(), make()], 2, "dim 2"),
    "negative dim": ([make(), make()], -3, "dim -3"),
    "not a tensordict": ([make(), 3], 0, "a int"),
}
CAT = {
    "empty": ([], 0, "empty list"),
    "no batch": ([TensorDict(a=0)] * 2, 0, "dim must be in the range"),
    "dim": ([make(), make()], 1, "dim must be in the range"),
    "batch sizes": ([TensorDict({}, [2, 3]), TensorDict({}, [2, 4])], 0, "differ only there"),
    "ranks": ([TensorDict({}, [2, 3]), TensorDict({}, [2])], 0, "differ only there"),
    "shapes": (
        [TensorDict({"a": torch.zeros(2, 3)}, [2]), TensorDict({"a": torch.zeros(2, 4)}, [2])],
        0,
        "Cannot join the entries 'a'",
    ),
    "kinds": (
        [TensorDict({"a": torch.zeros(2)}, [2]), TensorDict({"a": {"b": torch.zeros(2)}}, [2])],
        0,
        "'a'.*Tensor and a TensorDict",
    ),
    "not a tensordict": ([make(), "x"], 0, "a str"),
}


@pytest.mark.parametrize("name", STACK)
def test_malformed_stacks_say_what_is_wrong(name):
    parts, dim, text = STACK[name]
    with pytest.raises((RuntimeError, TypeError), match=text) as caught:
        tensordict.stack(parts, dim)
    assert type(caught.value).__module__ == "tensordict.errors"


@pytest.mark.parametrize("name", CAT)
def test_malformed_cats_say_what_is_wrong(name):
    parts, dim, text = CAT[name]
    with pytest.raises((RuntimeError, TypeError), match=text) as caught:
        tensordict.cat(parts, dim)
    assert type(caught.value).__module__ == "tensordict.errors"


def test_cat_of_other_keys_is_a_key_error():
    with pytest.raises(KeyError, match=r"exclusive keys are \['a'\]"):
        torch.cat([make(), make().exclude("a")])
