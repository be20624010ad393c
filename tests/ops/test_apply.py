"""`apply`, `named_apply`, `apply_`, copies and fills."""

from __future__ import annotations

import threading

import pytest
import torch

from tensordict import NonTensorData, TensorDict, is_leaf_nontensor


def tree():
    td = TensorDict(
        {
            "a": torch.ones(3, 4),
            "n": TensorDict({"b": torch.ones(3, 2, 5)}, [3, 2], names=["t", "q"]),
            "e": {},
            "s": "text",
        },
        [3],
        names=["t"],
    )
    return td


def test_keeps_metadata_and_values():
    td = tree()
    out = td.apply(lambda x: x + 1)
    assert torch.equal(out["a"], td["a"] + 1) and torch.equal(out["n", "b"], td["n", "b"] + 1)
    assert out.names == ["t"] and out["n"].names == ["t", "q"] and out["n"].batch_size == (3, 2)
    assert out["s"] == "text" and "e" in out and not out.is_locked


def test_none_drops_the_leaf_and_the_parents_it_empties():
    td = tree()

    def only_a(x):
        return x if x.ndim == 2 else None

    assert set(td.apply(only_a).keys()) == {"a", "e", "s"}
    assert set(td.apply(only_a, filter_empty=True).keys()) == {"a", "s"}
    assert set(td.apply(only_a, filter_empty=False).keys()) == {"a", "n", "e", "s"}


def test_a_result_without_leaves_is_none():
    td = TensorDict(a=1, n={"b": 1})
    assert td.apply(lambda x: None) is None
    assert td.apply(lambda x: None, filter_empty=True) is None
    assert "n" in td.apply(lambda x: None, filter_empty=False)
    assert TensorDict().apply(lambda x: None).is_empty()
    assert TensorDict().apply(lambda x: x, filter_empty=True) is None


def test_batch_size():
    td = tree()
    out = td.apply(lambda x: x.sum(), batch_size=[])
    assert out.batch_size == () and out["n"].batch_size == () and out["n", "b"] == 30
    assert out.get("s").batch_size == ()
    out = td.apply(lambda x: x.unsqueeze(0), batch_size=[1, 3])
    assert out.names == [None, None] and out["n"].batch_size == (1, 3)
    with pytest.raises(RuntimeError, match="batch dimension mismatch"):
        td.apply(lambda x: x[0])
    with pytest.raises(RuntimeError, match=r"'n', 'b'"):
        td.apply(lambda x: x.sum((1, 2), keepdim=True)[..., 0] if x.ndim == 3 else x)


def test_names_and_device():
    td = tree()
    assert td.apply(lambda x: x, names=["u"]).names == ["u"]
    assert td.apply(lambda x: x, names=["u"])["n"].names == ["u", None]
    assert td.apply(lambda x: x, names=None).names == [None]
    meta = td.apply(lambda x: x, device="meta")
    assert meta.device.type == "meta" and meta["n", "b"].is_meta and meta["n"].device == meta.device
    assert td.apply(lambda x: x.to("meta"))["a"].is_meta
    here = TensorDict({"a": torch.ones(3)}, [3], device="cpu")
    assert here.apply(lambda x: x, device=None).device is None


def test_results_that_are_not_tensors():
    td = TensorDict(a=1, b=2)
    out = td.apply(lambda x: str(int(x)))
    assert out["a"] == "1" and isinstance(out.get("a"), NonTensorData)
    assert td.apply(lambda x: {"p": x})["a", "p"] == 1


def test_others():
    td, other = tree(), tree()
    out = td.apply(lambda x, y, z: x + y * z, other, other)
    assert (out["n", "b"] == 2).all()
    short = TensorDict({"a": torch.ones(3, 4), "z": torch.ones(3)}, [3])
    with pytest.raises(KeyError, match=r"\('n', 'b'\)"):
        td.apply(lambda x, y: x, short)
    seen = []
    td.apply(lambda x, y: seen.append(y), short, default=7)
    assert seen[0] is short["a"] and seen[1] == 7
    # keys that only the other has are ignored
    assert set(short.select("a").apply(lambda x, y: y, short).keys()) == {"a"}
    with pytest.raises(TypeError, match="dict"):
        td.apply(lambda x, y: x, {"a": 1})


def test_named_apply():
    td = tree()
    seen = []
    td.named_apply(lambda key, x: seen.append(key))
    td.named_apply(lambda key, x: seen.append(key), nested_keys=True)
    td.named_apply(lambda key, x, y: seen.append(y.ndim), td)
    assert seen == ["a", "b", "a", ("n", "b"), 2, 3]


def test_call_on_nested_and_is_leaf():
    td = tree()
    seen = []
    td.apply(lambda x: seen.append(type(x).__name__), call_on_nested=True)
    assert seen == ["Tensor", "TensorDict", "TensorDict", "NonTensorData"]
    assert td.apply(lambda x: x, call_on_nested=True)["n"] is td["n"]
    seen.clear()
    td.named_apply(lambda key, x: seen.append(key), is_leaf=is_leaf_nontensor)
    assert seen == ["a", "b", "s"]


def test_inplace():
    td = tree().lock_()
    a = td["a"]
    assert td.apply_(lambda x: x + 1) is td and td["a"] is a and (a == 2).all()
    assert td.apply(lambda x: x.double(), inplace=True)["a"].dtype == torch.float32
    assert td.apply_(lambda x: None)["a"] is a
    assert td.apply_(lambda x: x.zero_())["a"] is a and (a == 0).all()


def test_inplace_writes_nothing_when_a_result_does_not_fit():
    td = tree()
    with pytest.raises(RuntimeError):
        td.apply_(lambda x: x + 1 if x.ndim == 2 else x.sum())
    assert (td["a"] == 1).all()


def test_out():
    td, out = tree(), TensorDict(batch_size=[3])
    assert td.apply(lambda x: x * 3, out=out) is out and (out["n", "b"] == 3).all()
    with pytest.raises(RuntimeError, match="locked"):
        td.apply(lambda x: x, out=out.lock_())


def test_propagate_lock():
    td = tree().lock_()
    assert td.apply(lambda x: x, propagate_lock=True).is_locked
    assert not td.apply(lambda x: x).is_locked


def test_threads():
    td = TensorDict({str(i): torch.tensor(i) for i in range(20)})
    names = set()

    def fn(x):
        names.add(threading.current_thread().name)
        return x + 1

    out = td.apply(fn, num_threads=2)
    assert [int(x) for x in out.values()] == list(range(1, 21))
    assert threading.current_thread().name not in names


def test_unknown_option():
    with pytest.raises(TypeError, match="batchsize"):
        TensorDict(a=1).apply(lambda x: x, batchsize=[3])


def test_the_function_is_called_once_for_each_leaf():
    calls = []
    tree().apply(lambda x: calls.append(x) or x.sum(), batch_size=[])
    tree().apply(lambda x: calls.append(x) or (x if x.ndim == 2 else None))
    assert len(calls) == 4


# --- copies and fills ------------------------------------------------------------------


def test_clone_and_copy():
    td = tree().lock_()
    deep, flat = td.clone(), td.copy()
    assert deep["a"].data_ptr() != td["a"].data_ptr() and torch.equal(deep["a"], td["a"])
    assert flat["n", "b"] is td["n", "b"] and flat["n"] is not td["n"]
    assert td.clone(False)["a"] is td["a"]
    assert not deep.is_locked and not flat.is_locked and deep.names == ["t"]
    many = TensorDict({str(i): torch.full((2,), i) for i in range(5)})
    assert all(torch.equal(many[k], many.clone()[k]) for k in many.keys())
    assert many.clone()["1"].data_ptr() != many["1"].data_ptr()


def test_copy_():
    td, source = tree().lock_(), tree() * 5
    a = td["a"]
    assert td.copy_(source) is td and td["a"] is a and (a == 5).all()
    td.copy_(TensorDict({"a": torch.zeros(3, 4)}, [3]))
    assert (td["a"] == 0).all() and (td["n", "b"] == 5).all()
    source["s"] = "other"
    assert td.copy_(source)["s"] == "other"
    nested = TensorDict(n={"b": 1, "c": 2}, s="x")
    assert TensorDict(n={"b": 0, "c": 0}, s="y").copy_(nested)["s"] == "x"
    with pytest.raises(KeyError):
        td.copy_(TensorDict({"a": torch.ones(3, 4), "z": torch.ones(3)}, [3]))
    assert (td["a"] == 5).all()


def test_fill_and_zero():
    td = tree().lock_()
    td.fill_("a", 4).fill_("n", 5).fill_("s", "z")
    assert (td["a"] == 4).all() and (td["n", "b"] == 5).all() and td["s"] == "z"
    b = td["n", "b"]
    assert td.zero_() is td and (b == 0).all() and (td["a"] == 0).all()
    with pytest.raises(KeyError):
        td.fill_("missing", 1)
