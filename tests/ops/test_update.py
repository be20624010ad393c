"""Merging mappings: which keys, which batch size, and nothing half done."""

from __future__ import annotations

import pytest
import torch

from tensordict import NonTensorData, TensorDict, lazy_stack
from tensordict.ops import update


def _nested(c: int = 1, d: int = 2) -> TensorDict:
    return TensorDict({"a": {"b": {"c": c, "d": d}}})


@pytest.mark.parametrize("verb", ["update", "update_"])
@pytest.mark.parametrize("nested", [False, True])
def test_keys_to_update_at_any_depth(verb, nested):
    td = _nested()
    source = _nested(7, 8) if nested else {"a": {"b": {"c": 7, "d": 8}}}
    getattr(td, verb)(source, keys_to_update=[("a", "b", "c")])
    assert td["a", "b", "c"] == 7
    assert td["a", "b", "d"] == 2


def test_a_key_whose_parent_is_named_too_is_updated_with_all_of_it():
    for keys in ([("a", "b", "c"), "a"], ["a", ("a", "b", "c")]):
        td = _nested().update_(_nested(7, 8), keys_to_update=keys)
        assert td["a", "b"].to_dict() == {"c": 7, "d": 8}


@pytest.mark.parametrize("nested", [False, True])
def test_only_keys_to_update_reach_a_place_where_nothing_nested_was(nested):
    source = {"a": {"b": {"e": 1, "f": 1}, "c": 2}, "d": 3}
    td = TensorDict().update(
        TensorDict(source) if nested else source, keys_to_update=[("a", "b", "e")]
    )
    assert list(td.keys(True, True)) == [("a", "b", "e")]


def test_a_key_below_a_tensor_of_the_source_is_not_there():
    td = _nested()
    td.update_({"a": torch.ones(2)}, keys_to_update=[("a", "b")])
    td.update({"a": torch.ones(2)}, keys_to_update=[("a", "b")])
    assert td["a", "b", "c"] == 1


def test_keys_to_update_are_looked_at_once_each(monkeypatch):
    steps = 0

    class Counted(dict):
        def get(self, *args):
            nonlocal steps
            steps += 1
            return super().get(*args)

    monkeypatch.setattr(update, "_keep", lambda keys, real=update._keep: Counted(real(keys)))
    td = TensorDict({f"n{i}": {"x": i} for i in range(100)})
    td.update(td.clone(), keys_to_update=[(f"n{i}", "x") for i in range(100)])
    assert steps == 100


def _batched() -> TensorDict:
    return TensorDict(
        {"a": torch.zeros(3, 4), "n": {"x": torch.zeros(3, 4, 2)}}, [3, 4], names=["x", "y"]
    )


def test_update_batch_size_reaches_nested_tensordicts():
    td = _batched()
    td.update(
        TensorDict({"a": torch.ones(5), "n": {"x": torch.ones(5)}}, [5]), update_batch_size=True
    )
    assert td.batch_size == td["n"].batch_size == (5,)
    assert td.names == td["n"].names == [None]
    assert td["n", "x"].shape == (5,)


@pytest.mark.parametrize("inplace", [False, True])
def test_update_batch_size_leaves_everything_as_it_was_on_an_error(inplace):
    td = _batched()
    source = TensorDict({"a": torch.ones(5), "n": torch.ones(5), "z": torch.ones(5)}, [5])
    source["n"] = TensorDict({"x": torch.ones(5)}, [5])
    td["n", "other"] = torch.zeros(3, 4)  # does not fit the new batch size
    with pytest.raises(RuntimeError):
        td.update(source, update_batch_size=True, inplace=inplace)
    del td["n", "other"]
    if inplace:
        with pytest.raises(RuntimeError):  # found while the writes are checked
            td.update(source, update_batch_size=True, inplace=True)
    assert td.batch_size == td["n"].batch_size == (3, 4)
    assert td.names == td["n"].names == ["x", "y"]
    assert td["a"].shape == (3, 4)
    assert "z" not in td


def test_update_batch_size_with_keys_checks_the_entries_that_stay():
    td = _batched()
    source = TensorDict({"a": torch.ones(5), "n": {"x": torch.ones(5)}}, [5])
    with pytest.raises(RuntimeError):
        td.update(source, update_batch_size=True, keys_to_update=["a"])
    assert td.batch_size == (3, 4)


def test_get_below_a_tensor_gives_the_default():
    td = TensorDict(a=0, s="text")
    assert td.get(("a", "q"), 5) == 5
    assert td.get(("s", "q"), None) is None
    with pytest.raises(KeyError, match="'a' is a Tensor"):
        td.get(("a", "q"))


def test_auto_batch_size_limits_nested_tensordicts_too():
    td = TensorDict({"a": torch.zeros(3, 4), "n": {"x": torch.zeros(3, 4, 5)}})
    assert td.auto_batch_size_(1)["n"].batch_size == (3,)
    assert td.auto_batch_size_(0)["n"].batch_size == ()
    assert td.auto_batch_size_()["n"].batch_size == (3, 4, 5)


def _mixed() -> dict:
    x = torch.ones(3, 2)
    return {"z": x, "s": "text", "b": x.int(), "n": {"y": x, "k": "deep", "c": x}, "a": x.long()}


@pytest.mark.parametrize("batch", [[], [3]])
@pytest.mark.parametrize("known", [False, True])
def test_update_keeps_the_order_of_a_source_of_many_kinds(batch, known):
    td = TensorDict({"n": {}} if known else {}, batch)
    td.update(_mixed())
    expected = list(_mixed())
    if known:
        expected = ["n", *(key for key in expected if key != "n")]
    assert list(td.keys()) == expected
    assert list(td["n"].keys()) == ["y", "k", "c"]


def test_a_later_key_of_the_source_wins():
    x = torch.ones(3)
    td = TensorDict({}, [3]).update({("y", "b"): x, "y": x, "n": {"b": x}, ("n", "b"): x * 2})
    assert td["y"] is x
    assert td["n", "b"].sum() == 6


@pytest.mark.parametrize(
    "spoil",
    [
        lambda d: d.update(w=torch.ones(4)),
        lambda d: d.update(w=1.0),
        lambda d: d["n"].update(w=torch.ones(4)),
        lambda d: d["n"].update({("y", "below"): torch.ones(3)}),
        lambda d: d.update({("a", "below"): torch.ones(3)}),  # where the source puts a leaf
        lambda d: d.update({("n", "y", "below"): torch.ones(3)}),
        lambda d: d.update({0: torch.ones(3)}),
    ],
)
def test_a_failed_update_changes_nothing(spoil):
    td = TensorDict({"b": torch.zeros(3), "n": {"c": torch.zeros(3)}}, [3])
    before = {**td, "n": dict(td["n"])}
    source = _mixed()
    spoil(source)
    with pytest.raises((RuntimeError, KeyError)):
        td.update(source)
    assert list(td.keys()) == ["b", "n"]
    assert list(td["n"].keys()) == ["c"]
    assert td["b"] is before["b"]
    assert td["n", "c"] is before["n"]["c"]


def test_update_moves_what_is_elsewhere_to_the_device():
    td = TensorDict({}, [3], device="cpu")
    here, elsewhere = torch.ones(3), torch.ones(3, device="meta")
    td.update({"here": here})
    assert td["here"] is here
    meta = TensorDict({}, [3], device="meta").update({"a": elsewhere, "b": here})
    assert meta["a"] is elsewhere
    assert meta["b"].device.type == "meta"


def test_update_with_clone_shares_no_memory():
    x = torch.ones(3)
    td = TensorDict({}, [3]).update({"a": x, "n": {"b": x}, "s": "text"}, clone=True)
    x.zero_()
    assert td["a"].sum() == td["n", "b"].sum() == 3
    assert td["s"] == "text"


def test_a_locked_nested_tensordict_is_not_updated():
    td = TensorDict({"a": torch.zeros(3), "n": {"b": torch.zeros(3)}}, [3])
    td["n"].lock_()
    with pytest.raises(RuntimeError):
        td.update({"a": torch.ones(3), "n": {"b": torch.ones(3)}})
    assert not td["a"].any()
    assert not td["n", "b"].any()


@pytest.mark.parametrize(
    "value",
    [
        "text",
        None,
        ["a", "b", "c"],
        {"x": 1},
        [[1], [2, 3]],
        NonTensorData("x"),
        TensorDict({}, [2, 3]),
    ],
)
def test_what_holds_no_numbers_is_not_written_into_a_tensor(value):
    for td in (
        TensorDict({"a": torch.zeros(2, 3)}, [2, 3]),
        lazy_stack([TensorDict({"a": torch.zeros(3)})] * 2),
    ):
        for write in (
            lambda td: td.set("a", value, inplace=True),
            lambda td: td.set_("a", value),
            lambda td: td.update_({"a": value}),
            lambda td: td.update({"a": value}, inplace=True),
        ):
            with pytest.raises(
                ValueError, match="Cannot write into the tensor 'a': expected a tensor"
            ):
                write(td)
        assert td["a"].sum() == 0


def _forest(fill: float) -> dict:
    def x(*shape):
        return torch.full(shape, fill)

    return {
        "a": x(3),
        "n": {"b": x(3, 2), "m": {"c": x(3), "d": x(3)}},
        "e": x(3),
        "o": {"f": x(3)},
    }


def _reordered(tree: dict) -> dict:
    return {k: _reordered(v) if isinstance(v, dict) else v for k, v in reversed(tree.items())}


@pytest.mark.parametrize("verb", ["update_", "copy_"])
@pytest.mark.parametrize("arrange", [dict, _reordered])
def test_values_go_into_the_memory_that_is_there(verb, arrange):
    td = TensorDict(_forest(0), [3])
    memory = {key: x.data_ptr() for key, x in td.items(True, True)}
    getattr(td, verb)(TensorDict(arrange(_forest(1)), [3]))
    assert (td == TensorDict(_forest(1), [3])).all()
    assert {key: x.data_ptr() for key, x in td.items(True, True)} == memory


def _spoiled():
    yield "shape", lambda d: d["n"]["m"].update(d=torch.ones(3, 4))
    yield "last shape", lambda d: d["o"].update(f=torch.ones(3, 4))
    yield "new key", lambda d: d["o"].update(z=torch.ones(3))
    yield "a node for a leaf", lambda d: d.update(e={"x": torch.ones(3)})
    yield "a leaf for a node", lambda d: d.update(o=torch.ones(3))
    # The same names one after the other, in other nodes.
    yield (
        "moved",
        lambda d: (
            d["n"].update(m={"d": torch.ones(3)}),
            d.update(o={"f": torch.ones(3), "c": torch.ones(3)}),
        ),
    )


@pytest.mark.parametrize(("name", "spoil"), list(_spoiled()))
@pytest.mark.parametrize("verb", ["update_", "copy_"])
def test_a_failed_write_into_memory_changes_nothing(name, spoil, verb):
    td = TensorDict(_forest(0), [3])
    source = _forest(1)
    spoil(source)
    with pytest.raises((RuntimeError, KeyError, ValueError)):
        getattr(td, verb)(TensorDict(source, [3]))
    assert (td == 0).all()


@pytest.mark.parametrize("break_", ["expand", "grad"])
def test_what_torch_would_refuse_is_found_before_the_first_write(break_):
    td = TensorDict({"a": torch.zeros(3), "b": torch.zeros(3), "c": torch.zeros(3)}, [3])
    td["b"] = torch.zeros(1).expand(3) if break_ == "expand" else torch.zeros(3, requires_grad=True)
    with pytest.raises(RuntimeError):
        td.update_(TensorDict({"a": torch.ones(3), "b": torch.ones(3), "c": torch.ones(3)}, [3]))
    assert not td["a"].any()
    assert not td["c"].any()


ODD = {
    "meta": lambda x: x.to("meta"),
    "sparse": lambda x: x.to_sparse(),
    "quantized": lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
}
ALL_ROWS = torch.arange(3)


@pytest.mark.filterwarnings("ignore:.*deprecated")
@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize(
    "write",
    [
        lambda td, source: td.update_(source),
        lambda td, source: td.copy_(source),
        lambda td, source: td.update_(source.to_dict()),
        lambda td, source: td.__setitem__(slice(None), source),
        lambda td, source: td.__setitem__(slice(0, 3), source.to_dict()),
        lambda td, source: td.__setitem__(ALL_ROWS, source),
        lambda td, source: td.__setitem__(ALL_ROWS, source.to_dict()),
        lambda td, source: td.__setitem__(ALL_ROWS == ALL_ROWS, source),
    ],
)
def test_a_value_that_cannot_be_copied_is_found_before_the_first_write(odd, requires_grad, write):
    td = TensorDict({"a": torch.zeros(3), "n": {"b": torch.zeros(3)}, "z": torch.zeros(3)}, [3])
    ones = torch.ones(3, requires_grad=requires_grad)
    source = TensorDict({"a": ones, "n": {"b": torch.ones(3)}, "z": ODD[odd](torch.ones(3))}, [3])
    with pytest.raises(RuntimeError):
        write(td, source)
    assert (td == 0).all()


@pytest.mark.parametrize("verb", ["update_", "copy_"])
@pytest.mark.parametrize("tree", [{}, {"a": {}}, {"a": {"b": {}}, "c": {}}])
def test_trees_without_leaves_are_copied(verb, tree):
    td = TensorDict(tree)
    assert getattr(td, verb)(td.clone()) is td


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("verb", ["update_", "copy_"])
def test_gradients_reach_the_values_that_were_written(n, verb):
    td = TensorDict({f"k{i}": torch.zeros(3) for i in range(n)}, [3])
    source = TensorDict({f"k{i}": torch.ones(3, requires_grad=True) for i in range(n)}, [3])
    getattr(td, verb)(source)
    sum(x.sum() * (i + 1) for i, x in enumerate(td.values())).backward()
    for i in range(n):
        assert source[f"k{i}"].grad.tolist() == [i + 1.0] * 3


def test_parts_and_broadcast_values_are_written_too():
    td = TensorDict(_forest(0), [3])
    td.update_(TensorDict({"n": {"m": {"d": torch.ones(3)}}}, [3]))
    assert td["n", "m", "d"].sum() == 3
    assert not td["n", "m", "c"].any()
    td.update_({"n": {"b": torch.tensor([1.0, 2.0])}})
    assert td["n", "b"].tolist() == [[1.0, 2.0]] * 3


def test_the_members_of_a_stack_are_written():
    stack = lazy_stack([TensorDict(_forest(0), [3]), TensorDict(_forest(0), [3])])
    tree = TensorDict({"s": stack, "x": torch.zeros(2)}, [2])
    values = torch.stack([TensorDict(_forest(1), [3]), TensorDict(_forest(2), [3])])
    tree.update_(TensorDict({"s": values, "x": torch.ones(2)}, [2]))
    assert (stack[0] == 1).all()
    assert (stack[1] == 2).all()
    assert (tree["x"] == 1).all()


@pytest.mark.parametrize("key", ["a", ("n", "m", "c")])
@pytest.mark.parametrize("how", ["set_", "set inplace", "update inplace"])
def test_one_entry_is_written_into_its_memory(key, how):
    td = TensorDict(_forest(0), [3]).lock_()
    memory = td[key]
    if how == "set_":
        td.set_(key, torch.ones(3))
    elif how == "set inplace":
        td.set(key, torch.ones(3), inplace=True)
    else:
        td.update({key: torch.ones(3)}, inplace=True)
    assert td[key] is memory
    assert memory.tolist() == [1, 1, 1]
    assert sum(x.sum() for x in td.values(True, True)) == 3
    with pytest.raises(KeyError):
        td.set_(("n", "q"), torch.ones(3))


def test_a_failed_update_into_memory_changes_nothing():
    for bad in ({"a": torch.ones(3), "e": torch.ones(4)}, {"a": torch.ones(3), "z": torch.ones(4)}):
        td = TensorDict(_forest(0), [3])
        with pytest.raises(RuntimeError):
            td.update(bad, inplace=True)
        assert (td == 0).all()
        assert "z" not in td


@pytest.mark.parametrize(
    "write",
    [
        lambda td, other: td.update_(other),
        lambda td, other: td.copy_(other),
        lambda td, other: td.update(other, inplace=True),
        lambda td, other: td.update_(other.to_dict()),
        lambda td, other: td.__setitem__(0, other[1]),
        lambda td, other: td.__setitem__(slice(0, 2), other[:2]),
        lambda td, other: td.__setitem__([0, 2], other[[0, 1]]),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_values_without_data_are_found_before_the_first_write(write, nested):
    td = TensorDict({"a": torch.ones(3), "b": torch.ones(3), "c": torch.ones(3)}, [3])
    other = TensorDict({**td * 2, "c": torch.ones(3, device="meta")}, [3])
    if nested:
        td, other = TensorDict({"n": td}, [3]), TensorDict({"n": other}, [3])
    leaves = list(td.values(True, True))
    versions = [x._version for x in leaves]
    with pytest.raises(RuntimeError):
        write(td, other)
    assert [x._version for x in leaves] == versions and (td == 1).all()
    empty = td.to("meta")
    write(empty, other.to("meta"))
