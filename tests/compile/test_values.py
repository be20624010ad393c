"""Values that are no tensors in compiled graphs: moved there, read afterwards."""

import pickle

import pytest
import torch

from tensordict import MetaData, NonTensorStack, TensorDict, UnbatchedTensor, lazy_stack, pad


def compiled(fn):
    torch._dynamo.reset()
    return torch.compile(fn, fullgraph=True, backend="eager")


def one(i):
    """One value for all rows, and beside it things that have nothing to do with rows."""
    return TensorDict(
        {"x": torch.full((2,), float(i)), "s": f"v{i}", "m": MetaData("m", batch_size=[2])}, [2]
    )


def each(i):
    """One value for each row, nested ones and two per row too."""
    return TensorDict(
        {
            "x": torch.full((2,), float(i)),
            "s": [f"a{i}", {"i": i}],
            "n": {"t": NonTensorStack(None, b"b")},
            "two": TensorDict({"v": [["p", "q"], ["r", i]]}, [2, 2]),
        },
        [2],
    )


OPS = {
    "stack": lambda a, b: torch.stack([a, b]),
    "stack last": lambda a, b: torch.stack([a, b], -1),
    "cat": lambda a, b: torch.cat([a, b]),
    "stack and index": lambda a, b: torch.stack([a, b])[1],
    "reshape": lambda a, b: torch.stack([a, b]).view(-1).reshape(2, 1, 2),
    "slice": lambda a, b: a[1:],
    "gather": lambda a, b: torch.cat([a, b])[torch.tensor([3, 0])],
    "permute": lambda a, b: torch.stack([a, b]).permute(1, 0).flip(0),
    "expand": lambda a, b: a.unsqueeze(0).expand(3, 2),
    "split": lambda a, b: a.split(1)[1],
    "pad": lambda a, b: pad(a, [1, 0]),
    "arithmetic": lambda a, b: torch.stack([a + 1, b * 2]),
    "set": lambda a, b: TensorDict({"held": torch.stack([a, b])}, [2]),
    "lazy": lambda a, b: lazy_stack([a, b]).clone(),
}


@pytest.mark.parametrize("make", [one, each])
@pytest.mark.parametrize("name", OPS)
def test_rows_go_where_they_go_without_a_graph(name, make):
    fn = OPS[name]
    out, want = compiled(fn)(make(1), make(2)), fn(make(1), make(2))
    assert str(out) == str(want)
    assert out.batch_size == want.batch_size and str(out.to_dict()) == str(want.to_dict())


def test_one_row_reads_as_its_value():
    out = compiled(lambda a: torch.stack(list(a.unbind(0))[::-1]))(each(1))
    assert out["s"] == [{"i": 1}, "a1"]
    row = compiled(lambda a: a[0])(each(1))
    assert row["s"] == "a1" and row["n", "t"] is None and row["two", "v"] == ["p", "q"]
    assert torch.stack([row, each(1)[1]])["s"] == ["a1", {"i": 1}]


def test_a_result_does_not_follow_its_sources():
    a, b = each(1), each(2)
    out = compiled(lambda a, b: torch.stack([a, b]))(a, b)
    a["s"][0] = "changed"
    out["s"][1][0] = "too"
    assert out["s"][0] == ["a1", {"i": 1}] and out["s"][1][0] == "too"
    assert a["s"] == ["changed", {"i": 1}] and b["s"] == ["a2", {"i": 2}]


def test_results_are_pickled_copied_and_compiled_again():
    fn = compiled(lambda a, b: torch.cat([a, b])[1:])
    out = fn(each(1), each(2))
    want = torch.cat([each(1), each(2)])[1:]
    assert pickle.loads(pickle.dumps(out))["s"] == want["s"] == out.clone()["s"]
    again = compiled(lambda a, b: torch.cat([a, b]))(out, out)
    assert again["s"] == want["s"] * 2 and (again == torch.cat([want, want])).all()


def test_other_leaves_stay_as_they_are():
    td = TensorDict({"u": UnbatchedTensor(torch.ones(3)), "s": "v"}, [2])
    out = compiled(lambda td: torch.stack([td, td]))(td)
    assert torch.equal(out["u"], torch.ones(3)) and out["s"] == [["v", "v"], ["v", "v"]]
