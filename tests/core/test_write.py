"""The one checked write: what a value becomes, and that a refused write changes nothing."""

import numpy as np
import pytest
import torch

from tensordict import NonTensorData, NonTensorStack, TensorDict
from tensordict.core import write
from tensordict.core.leaf import NonTensorDataBase


def batch():
    return TensorDict({"x": torch.zeros(2, 3), "n": {"y": torch.zeros(2)}}, [2])


NUMBERS = [(1, torch.int64), (1.5, torch.float32), (True, torch.bool), (np.float64(1), torch.float64), (np.int32(1), torch.int32), (np.bool_(True), torch.bool)]  # fmt: skip


@pytest.mark.parametrize("value, dtype", NUMBERS)
def test_numbers_become_tensors(value, dtype):
    td = TensorDict(a=value)
    assert td["a"].dtype is dtype and td["a"].shape == ()
    if isinstance(value, (bool, int, float)):
        with pytest.raises(RuntimeError, match="A number has no batch"):
            batch()["a"] = value


@pytest.mark.parametrize(
    "value", ["s", b"b", None, 1j, {1, 2}, int, print, object()], ids=lambda v: type(v).__name__
)
def test_other_values_stay_what_they_are(value):
    td = batch()
    td["a"] = value
    assert td["a"] is value and isinstance(td.get("a"), NonTensorData)
    assert td.get("a").batch_size == (2,)


def test_arrays_share_memory_where_they_can():
    array = np.zeros((2, 3), dtype=np.float32)
    td = TensorDict({"a": array}, [2])
    array[0, 0] = 7
    assert td["a"][0, 0] == 7
    backwards = TensorDict(a=array[::-1])
    assert backwards["a"][1, 0] == 7
    fixed = np.arange(3)
    fixed.flags.writeable = False
    TensorDict(a=fixed)["a"].zero_()
    assert fixed.tolist() == [0, 1, 2]
    swapped = np.arange(3).astype(">i4")
    assert TensorDict(a=swapped)["a"].tolist() == [0, 1, 2]
    assert isinstance(TensorDict(a=np.array(["x", "y"]))["a"], np.ndarray)


def test_lists():
    td = batch()
    td["ints"] = [1, 2]
    td["tensors"] = [torch.zeros(3), torch.ones(3)]
    td["words"] = ["a", "b"]
    td["tuple"] = ("a", 1)
    td["mixed"] = [1, "a"]
    td["ragged"] = [[1], [2, 3]]
    td["deep"] = [[1.0, 2.0], [3.0, 4.0]]
    assert td["ints"].tolist() == [1, 2] and td["tensors"].shape == (2, 3)
    assert td["words"] == ["a", "b"] and td["tuple"] == ("a", 1) and td["mixed"] == [1, "a"]
    assert td["ragged"] == [[1], [2, 3]] and td["deep"].shape == (2, 2)
    for bad in ([1, 2, 3], ["a", "b", "c"], [torch.zeros(3)]):
        with pytest.raises(RuntimeError, match="batch dimension mismatch"):
            td["bad"] = bad
    with pytest.raises(RuntimeError, match="do not stack"):
        td["bad"] = [torch.zeros(3), torch.zeros(4)]
    assert "bad" not in td


def test_mappings_become_nodes_like_their_parent():
    td = TensorDict({"x": torch.zeros(2)}, [2], names=["t"])
    td["n"] = {"a": torch.zeros(2), "m": {"b": "text"}, ("p", "q"): torch.ones(2)}
    assert td["n"].batch_size == (2,) and td["n"].names == ["t"] and td["n", "p", "q"].sum() == 2
    assert td["n", "m", "b"] == "text"
    before = td["n"]
    with pytest.raises(RuntimeError):
        td["n"] = {"a": torch.zeros(2), "b": torch.zeros(3)}
    assert td["n"] is before


def test_nodes_keep_a_longer_batch_and_get_a_longer_one():
    td = TensorDict(batch_size=[2])
    longer = TensorDict({"a": torch.zeros(2, 3)}, [2, 3])
    td["longer"] = longer
    assert td["longer"] is longer
    shorter = TensorDict({"a": torch.zeros(2), "m": {"b": torch.zeros(2)}, "s": "x"})
    td["shorter"] = shorter
    assert td["shorter"].batch_size == (2,) and td["shorter", "m"].batch_size == (2,)
    assert shorter.batch_size == () and td["shorter"]["a"] is shorter["a"]
    for bad in (
        TensorDict(batch_size=[3]),
        TensorDict({"a": torch.zeros(3)}),
        TensorDict(m={"b": 1}),
    ):
        with pytest.raises(RuntimeError):
            td["bad"] = bad
    assert "bad" not in td


def test_a_node_cannot_contain_itself():
    td = TensorDict(n={"m": {}})
    for key, value in (("a", td), (("n", "m", "a"), td), (("n", "m", "a"), td["n"])):
        with pytest.raises((TypeError, ValueError), match="contain itself"):
            td[key] = value
    assert list(td["n", "m"].keys()) == []


def test_devices():
    td = TensorDict(batch_size=[2], device="meta")
    td["a"] = torch.zeros(2)
    td["n"] = TensorDict({"b": torch.zeros(2), "s": "x"}, [2])
    td["d"] = {"c": [1, 2]}
    assert td["a"].is_meta and td["n", "b"].is_meta and td["d", "c"].is_meta
    assert td["n"].device == td["d"].device == torch.device("meta")
    assert td.get(("n", "s")).device == torch.device("meta")


def test_leaves_fit_the_batch():
    td = batch()
    td["s"] = NonTensorData("a")
    td["t"] = NonTensorStack("a", "b")
    assert td.get("s").batch_size == td.get("t").batch_size == (2,)
    with pytest.raises(RuntimeError):
        td["u"] = NonTensorStack("a", "b", "c")
    with pytest.raises(RuntimeError):
        td["u"] = NonTensorData("a", batch_size=[3])
    two = TensorDict(batch_size=[2, 3])
    two["t"] = NonTensorStack("a", "b")
    assert two["t"] == [["a"] * 3, ["b"] * 3] and isinstance(two.get("t"), NonTensorDataBase)


def test_ways_that_lead_nowhere():
    td = batch()
    for key in (("x", "y"), ("n", "y", "z"), ("x", "y", "z")):
        with pytest.raises(KeyError, match="so it has no entry"):
            td[key] = 1
        with pytest.raises(KeyError, match="so it has no entry"):
            td[key]
        assert not write.contains(td, key) and key not in td
    for key in (1, (), ("a", 1), None, 1.5):
        with pytest.raises((KeyError, IndexError, RuntimeError, TypeError, ValueError)):
            td.set(key, 1)
    assert td.get(("n", "q", "r")) is None and td.get("q") is None


def test_all_of_an_update_or_nothing():
    td = batch()
    for bad in (
        {"x": torch.ones(2, 3), "z": torch.zeros(3)},
        {"x": torch.ones(2, 3), "n": {"y": torch.zeros(5)}},
        {"x": torch.ones(2, 3), ("x", "q"): 1},
    ):
        with pytest.raises((RuntimeError, KeyError)):
            td.update(bad)
        with pytest.raises((RuntimeError, KeyError)):
            td.update(bad, inplace=True)
        with pytest.raises((RuntimeError, KeyError)):
            td.update_(bad)
        assert td["x"].sum() == 0 and set(td.keys(True, True)) == {"x", ("n", "y")}


def test_write_into_broadcasts_and_casts():
    target = torch.zeros(2, 3, dtype=torch.int64)
    td = TensorDict({"a": target}, [2])
    td.set_("a", 1.7)
    assert td["a"] is target and target.eq(1).all()
    td.set_("a", torch.tensor([[5], [6]]))
    assert target.tolist() == [[5] * 3, [6] * 3]
    with pytest.raises(RuntimeError, match="does not fit the entry of shape"):
        td.set_("a", torch.zeros(4))
    with pytest.raises(KeyError):
        td.set_("b", 1)


def test_a_list_of_tensordicts_is_stacked():
    rows = [TensorDict(x=1, s="a"), TensorDict(x=2, s="b")]
    for td in (TensorDict(e=rows), TensorDict({"e": rows}, [2]), TensorDict().set("e", rows)):
        assert type(td["e"]) is TensorDict
        assert td["e"].batch_size == (2,)
        assert td["e", "x"].tolist() == [1, 2]
        assert td["e", "s"] == ["a", "b"]
    with pytest.raises(RuntimeError, match="list of tensordicts that do not stack"):
        TensorDict(e=[TensorDict(x=1), TensorDict(y=1)])
    with pytest.raises(RuntimeError, match=r"batch dimensions|batch size"):
        TensorDict({"e": rows}, [3])


def test_a_list_of_wrapped_values_holds_the_values():
    td = TensorDict(e=[NonTensorData("a"), NonTensorData({"k": 1})])
    assert td["e"] == ["a", {"k": 1}]
