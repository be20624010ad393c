"""Values per row: whatever moves rows moves the values with them."""

import copy
import dataclasses
import pickle

import numpy as np
import pytest
import torch

from tensordict import (
    LinkedList,
    MetaData,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    capture_non_tensor_stack,
    get_defaults_to_none,
    is_non_tensor,
    lazy_legacy,
    list_to_stack,
    set_capture_non_tensor_stack,
    set_get_defaults_to_none,
    set_lazy_legacy,
    set_list_to_stack,
)
from tensordict.core.leaf import same


@dataclasses.dataclass
class Point:
    x: int
    y: int


VALUES = [
    "text",
    b"bytes",
    {"k": [1, 2]},
    None,
    Point(1, 2),
    np.arange(3),
    (1, "a"),
    {1, 2},
    3j,
    int,
]


@pytest.mark.parametrize("value", VALUES, ids=lambda v: type(v).__name__)
def test_any_value_is_kept_as_it_is(value):
    td = TensorDict({"x": torch.zeros(3)}, [3])
    td.set_non_tensor("v", value)
    assert td["v"] is value and is_non_tensor(td.get("v"))
    assert td[1]["v"] is value and td[:2]["v"] is value
    assert td.clone()["v"] is value and td.to(torch.float64)["v"] is value
    assert torch.stack([td, td]).get("v").tolist()[1][2] is value
    assert same(td.to_dict()["v"], value)


def column(n=6):
    return [f"row {i}" for i in range(n)]


def table(n=6):
    return TensorDict({"i": torch.arange(n), "s": column(n)}, [n])


ROWS = {
    "int": (lambda x: x[2]),
    "slice": (lambda x: x[1:4]),
    "list": (lambda x: x[[4, 0, 0]]),
    "mask": (lambda x: x[torch.arange(6) % 2 == 0]),
    "split": (lambda x: x.split([1, 5])[1]),
    "chunk": (lambda x: x.chunk(4)[1]),
    "unbind": (lambda x: x.unbind(0)[5]),
    "reshape": (lambda x: x.reshape(2, 3)),
    "permute": (lambda x: x.reshape(2, 3).permute(1, 0)),
    "transpose": (lambda x: x.reshape(2, 3).transpose(0, 1)),
    "expand": (lambda x: x.expand(2, 6)),
    "flip": (lambda x: x.flip(0)),
    "roll": (lambda x: x.roll(2, 0)),
    "repeat_interleave": (lambda x: x.repeat_interleave(2, dim=0)),
    "gather": (lambda x: x.gather(0, torch.tensor([5, 0, 3]))),
    "cat": (lambda x: torch.cat([x[:2], x[4:]])),
    "stack": (lambda x: torch.stack([x[:2], x[4:]], 1)),
    "masked_select": (lambda x: x.masked_select(torch.arange(6) > 3)),
}


@pytest.mark.parametrize("name", ROWS)
def test_values_move_with_their_rows(name):
    out = ROWS[name](table())
    numbers = out["i"].tolist()

    def named(i):
        return [named(j) for j in i] if isinstance(i, list) else f"row {i}"

    assert out["s"] == named(numbers), name
    assert out.get("s").batch_size == out.batch_size


def test_new_rows_hold_none():
    out = table(2).pad([1, 2])
    assert out["s"] == [None, "row 0", "row 1", None, None]


def test_one_row_is_written():
    td = TensorDict({"x": torch.zeros(3)}, [3])
    td["s"] = "all"
    assert td["s"] == "all"
    td[1] = TensorDict(s="one")
    assert td["s"] == ["all", "one", "all"]
    td[torch.tensor([True, False, True])] = TensorDict({"s": ["a", "b"]}, [2])
    assert td["s"] == ["a", "one", "b"]
    td[0] = TensorDict(s=None)
    assert td["s"] == [None, "one", "b"]


def test_what_is_put_reads_back():
    stack = NonTensorStack("a", "b", "a")
    td = TensorDict({"s": stack}, [3])
    assert td["s"] == ["a", "b", "a"] and td.get("s").tolist() == ["a", "b", "a"]
    nested = [["a", "b"], ["c", "d"]]
    assert TensorDict({"s": nested}, [2, 2])["s"] == nested
    assert TensorDict({"s": nested}, [2])[1]["s"] == ["c", "d"]
    assert TensorDict(s=["a", "b"]).get("s").batch_size == (2,)
    with pytest.raises(RuntimeError, match="batch dimension mismatch"):
        TensorDict({"s": ["a", "b"]}, [3])


def test_equal_values_do_not_collapse_in_a_stack():
    out = torch.stack([NonTensorData("a"), NonTensorData("a")])
    assert type(out) is NonTensorStack and out.tolist() == ["a", "a"]
    with set_capture_non_tensor_stack(True):
        assert capture_non_tensor_stack()
        out = torch.stack([NonTensorData("a"), NonTensorData("a")])
        assert type(out) is NonTensorData and out.batch_size == (2,) and out.data == "a"
        assert type(torch.stack([NonTensorData("a"), NonTensorData("b")])) is NonTensorStack
    assert not capture_non_tensor_stack()
    assert type(torch.stack([MetaData("a"), MetaData("a")])) is MetaData
    assert torch.stack([MetaData("a"), MetaData("b")]).tolist() == ["a", "b"]


ALMOST = [
    (1, True), (1, 1.0), (0.0, -0.0), ([1], [True]), ((1,), [1]), ({"a": 1}, {"a": True}),
    (np.zeros(2), np.zeros(2, dtype=int)), (torch.zeros(2), torch.zeros(2).double()),
    ("1", 1), (b"a", "a"), ({"a": 1, "b": 2}, {"b": 2, "a": 1}), (float("nan"), float("nan")),
]  # fmt: skip


@pytest.mark.parametrize("a, b", ALMOST, ids=repr)
def test_values_that_only_look_equal_are_kept_apart(a, b):
    assert not same(a, b)
    out = torch.cat([NonTensorData(a, batch_size=[1]), NonTensorData(b, batch_size=[1])])
    assert type(out) is NonTensorStack
    assert type(out.tolist()[0]) is type(a) and type(out.tolist()[1]) is type(b)


@pytest.mark.parametrize("value", VALUES, ids=lambda v: type(v).__name__)
def test_equal_values_stay_one_in_cat(value):
    parts = [NonTensorData(copy.deepcopy(value), batch_size=[n]) for n in (1, 2)]
    out = torch.cat(parts)
    assert type(out) is NonTensorData and out.batch_size == (3,)


def test_an_equality_that_raises_is_no_equality():
    class Odd:
        def __eq__(self, other):
            raise ValueError("no")

        __hash__ = None

    class Array:
        def __eq__(self, other):
            return np.array([True])

        __hash__ = None

    assert not same(Odd(), Odd()) and not same(Array(), Array())
    odd = Odd()
    assert same(odd, odd)


def test_a_linked_list_reaches_the_rows():
    td = TensorDict({"s": ["a", "b", "c"]}, [3])
    rows = td["s"]
    assert isinstance(rows, LinkedList) and isinstance(rows, list)
    rows[0] = "z"
    rows[-1] = ["a", "list"]
    assert td["s"] == ["z", "b", ["a", "list"]] == rows
    rows[0:2] = ["p", "q"]
    assert td["s"] == ["p", "q", ["a", "list"]]
    with pytest.raises(ValueError, match="number of rows"):
        rows[0:2] = ["one"]
    with pytest.raises(IndexError):
        rows[7] = "x"
    rows.append("only in the list")
    assert len(td["s"]) == 3
    assert type(copy.deepcopy(td["s"])) is list and pickle.loads(pickle.dumps(td["s"])) == td["s"]


def test_a_nested_linked_list_reaches_the_rows():
    td = TensorDict({"s": [["a", "b"], ["c", "d"]]}, [2, 2])
    td["s"][1][0] = "z"
    assert td["s"] == [["a", "b"], ["z", "d"]]
    td["s"][0] = ["x", "y"]
    assert td["s"] == [["x", "y"], ["z", "d"]]


def test_an_expanded_column_is_copied_before_a_row_is_set():
    td = table(2).expand(3, 2)
    td["s"][0][1] = "changed"
    assert td["s"][0] == ["row 0", "changed"] and td["s"][2] == ["row 0", "row 1"]


def test_leaves_by_themselves():
    stack = NonTensorStack("a", "b", "c", "d")
    assert stack[1].data == "b" and stack[1:3].tolist() == ["b", "c"]
    assert stack[torch.tensor([3, 0])].tolist() == ["d", "a"]
    assert stack.reshape(2, 2).tolist() == [["a", "b"], ["c", "d"]]
    assert stack.view(2, 2).permute(1, 0).tolist() == [["a", "c"], ["b", "d"]]
    assert [x.data for x in stack] == list("abcd") and len(stack) == 4
    assert stack.unsqueeze(0).squeeze(0).tolist() == list("abcd")
    assert [x.tolist() for x in stack.reshape(2, 2).unbind(1)] == [["a", "c"], ["b", "d"]]
    one = NonTensorData("a", batch_size=[2, 3])
    assert one[0].batch_size == (3,) and one.reshape(6).batch_size == (6,)
    assert one[:, torch.tensor([True, False, True])].batch_size == (2, 2)
    assert one.maybe_to_stack().tolist() == [["a"] * 3] * 2 == one.tolist()
    assert NonTensorData("x", batch_size=[2]).expand(4, 2).batch_size == (4, 2)
    with pytest.raises(TypeError, match="without a batch dimension"):
        iter(NonTensorData("a"))
    with pytest.raises(ValueError, match="nothing"):
        NonTensorStack()
    with pytest.raises(RuntimeError, match="one batch size"):
        NonTensorStack(NonTensorData("a", batch_size=[1]), NonTensorData("b"))
    assert NonTensorStack.from_nontensordata(one).tolist() == one.tolist()
    assert NonTensorData(NonTensorData("a")).data == "a"


def test_comparison_is_by_row():
    a, b = NonTensorStack("a", "b"), NonTensorStack("a", "c")
    assert (a == b).tolist() == [True, False]
    assert (NonTensorData("a", batch_size=[2]) == a).tolist() == [True, False]
    assert (NonTensorData("a") == "a") is False
    with pytest.raises(TypeError):
        hash(a)


@pytest.mark.parametrize("leaf", [NonTensorData({"a": 1}, batch_size=[2]), MetaData("m"), NonTensorStack("a", None)], ids=repr)  # fmt: skip
def test_leaves_pickle(leaf):
    again = pickle.loads(pickle.dumps(leaf))
    assert type(again) is type(leaf) and again.batch_size == leaf.batch_size
    assert again.tolist() == leaf.tolist()


def test_printed_forms():
    assert repr(NonTensorData("a", batch_size=[2])) == (
        "NonTensorData(data=a, batch_size=torch.Size([2]), device=None)"
    )
    assert repr(MetaData("x")) == "MetaData(data=x, batch_size=torch.Size([]), device=None)"
    assert repr(NonTensorStack("a", "b")) == (
        "NonTensorStack(\n    ['a', 'b'],\n    batch_size=torch.Size([2]),\n    device=None)"
    )


def test_lists_can_be_one_value():
    @set_list_to_stack(False)
    def make():
        assert not list_to_stack()
        return TensorDict(s=["a", "b"])

    assert make().get("s").data == ["a", "b"] and list_to_stack()
    try:
        set_list_to_stack(False).set()
        assert make().get("s").data == ["a", "b"] and not list_to_stack()
    finally:
        set_list_to_stack(True).set()
    with set_list_to_stack(False), set_list_to_stack(True):
        assert list_to_stack()


def test_other_options():
    assert get_defaults_to_none() and TensorDict().get("a") is None
    try:
        set_get_defaults_to_none(False)
        with pytest.raises(KeyError):
            TensorDict().get("a")
    finally:
        set_get_defaults_to_none(True)
    assert lazy_legacy() is False
    set_lazy_legacy(False).set()
    with pytest.raises(NotImplementedError):
        set_lazy_legacy(True)


def test_set_underscore_replaces_values_also_when_locked():
    td = table(2).lock_()
    td.set_("s", "new")
    assert td["s"] == "new"
    td.update_({"s": ["a", "b"]})
    assert td["s"] == ["a", "b"]


def test_random_rows_against_numpy():
    from hypothesis import given
    from hypothesis import strategies as st

    from strategies import gate

    @gate
    @given(st.lists(st.integers(0, 23), min_size=1, max_size=8), st.permutations(range(3)))
    def run(picks, order):
        values = np.array([f"v{i}" for i in range(24)], dtype=object).reshape(2, 3, 4)
        td = TensorDict({"s": NonTensorStack._new(values, None)}, [2, 3, 4]).permute(*order)
        expected = values.transpose(order).reshape(-1)[picks]
        assert td.reshape(-1)[torch.tensor(picks)]["s"] == expected.tolist()

    run()
