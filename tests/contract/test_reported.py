"""What users of such packages reported, in short: stacks, values per row, typed classes."""

import pytest
import torch

import tensordict
from tensordict import (
    MetaData,
    NonTensorData,
    NonTensorStack,
    TensorClass,
    TensorDict,
    lazy_stack,
    set_list_to_stack,
    tensorclass,
)


@pytest.mark.parametrize(
    "index",
    [(2, 2), (slice(None), 1), (..., 0), (1, slice(0, 2), 3), torch.tensor([0, 2]), (None, 1)],
    ids=str,
)
def test_a_lazy_stack_is_indexed_through_its_stack_dimension(index):
    parts = [TensorDict({"a": torch.rand(3, 4)}, [3, 4]) for _ in range(3)]
    lazy, whole = lazy_stack(parts, 1), torch.stack([t["a"] for t in parts], 1)
    assert torch.equal(lazy[index]["a"], whole[index])
    assert lazy[index].shape == torch.zeros(3, 3, 4)[index].shape


@pytest.mark.parametrize("n", [3, 4, 15])
def test_chunks_align_tensors_and_values(n):
    td = TensorDict({"v": torch.arange(10)}, [10])
    td["id"] = NonTensorStack(*[NonTensorData(str(i)) for i in range(10)])
    parts, expected = td.chunk(n, 0), torch.arange(10).chunk(n)
    assert len(parts) == len(expected)
    for part, rows in zip(parts, expected):
        assert torch.equal(part["v"], rows) and part["id"] == [str(int(i)) for i in rows]


def test_joins_keep_a_typed_class():
    class E(TensorClass):
        m: torch.Tensor

    x = E(m=torch.rand(2, 10, 3), batch_size=[2, 10])
    for out in (torch.cat([x, x]), tensordict.cat([x, x], dim=0), tensordict.stack([x, x], dim=0)):
        assert type(out) is E
    assert torch.cat([x, x], 1).shape == (2, 20)


def test_one_value_and_values_per_row_join():
    one = torch.cat([NonTensorData("a", batch_size=[1]), NonTensorData("a", batch_size=[1])])
    out = torch.cat([one, NonTensorStack(NonTensorData("b"), NonTensorData("c"))], dim=0)
    assert out.batch_size == (4,) and out.tolist() == ["a", "a", "b", "c"]
    left = torch.stack([NonTensorData("a"), NonTensorData("a")])
    out = torch.stack([left, NonTensorStack("b", "b")], dim=1)
    assert out.tolist() == [["a", "b"], ["a", "b"]]
    ragged = torch.stack([NonTensorData(torch.zeros(2)), NonTensorData(torch.zeros(3))])
    assert ragged.batch_size == (2,)


def test_a_list_of_strings_is_a_column():
    d = {"k": {"s": torch.randn(5, 4)}, "names": ["a", "b", "c", "d", "e"]}
    back = TensorDict.from_dict(d, batch_size=[5]).to_dict()
    assert back["names"] == list("abcde") and torch.equal(back["k"]["s"], d["k"]["s"])
    with set_list_to_stack(True):
        td = TensorDict({"x": torch.arange(3)}, batch_size=(3,))
        td["a"] = ["u", "v", "w"]
        assert td[0]["a"] == "u" and td["a"][2] == "w"
        assert td[torch.tensor([2, 0])]["a"] == ["w", "u"]


def test_metadata_is_not_expanded_by_a_stack():
    class T(TensorClass):
        m: MetaData

    assert torch.stack([T(m=MetaData("abc"))] * 2).m == "abc"


def test_defaults_of_nested_reads():
    @tensorclass
    class Data:
        td: TensorDict

    d = Data(td=TensorDict({}))
    assert d.get(("td", "missing"), default=None) is None and d.get(("td", "missing"), 3) == 3


def test_a_typed_entry_survives_operations():
    @tensorclass
    class C:
        t: torch.Tensor
        order: tuple
        tag: str

    parts = [
        TensorDict({"t": torch.ones(1), "c": C(torch.ones(1), ("a", "b"), "hi", batch_size=[])})
        for _ in range(3)
    ]
    td = torch.stack(parts)
    for x in (td.to(torch.float64), td[0:2], td.clone(), td.to("cpu")):
        assert type(x["c"]) is C and x[0]["c"].tag == "hi" and x[0]["c"].order == ("a", "b")


def test_compiled_functions_use_defaults_and_construct():
    @tensorclass
    class Foo:
        x: torch.Tensor
        cache: torch.Tensor = None

        def total(self):
            return self.x if self.cache is None else self.x + self.cache

    class Labelled(TensorClass):
        x: torch.Tensor
        label: str

    total = torch.compile(lambda x: Foo(x=x).total(), backend="eager", fullgraph=True)
    made = torch.compile(
        lambda x: Labelled(x=x, label="hello", batch_size=[3]).x + 1,
        backend="eager",
        fullgraph=True,
    )
    assert torch.equal(total(torch.ones(3)), torch.ones(3))
    assert torch.equal(made(torch.zeros(3)), torch.ones(3))


def test_ragged_specs_round_trip():
    lazy = lazy_stack([TensorDict({"a": torch.ones(n)}) for n in (2, 3)])
    spec = lazy.to(torch.float64).attrs()
    assert [x.dtype for x in lazy.to(spec).get("a", as_list=True)] == [torch.float64] * 2
