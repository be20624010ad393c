from __future__ import annotations

import io
import multiprocessing
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tensordict import NonTensorData, TensorDict
from tensordict.core.lock import origin_of
from tensordict.errors import EntryTypeError, LockedError
from tensordict.storage.consolidate import buffer_of, over_buffer, packing_of

from ._counting import CountCopies


def tree():
    return TensorDict(
        {
            "f": torch.randn(3),
            "n": {
                "i": torch.arange(6).view(3, 2),
                "deep": {"b": torch.tensor([True, False, True])},
            },
            "h": torch.randn(3, 4).to(torch.bfloat16),
            "word": "hello",
            "empty": torch.zeros(3, 0),
        },
        batch_size=[3],
        names=["time"],
    )


def leaf_bits(td):
    return {
        k: (v.dtype, v.shape, v.contiguous().reshape(-1).view(torch.uint8).tolist())
        for k, v in td.items(True, True)
    }


def storages(td):
    return {x.untyped_storage().data_ptr() for x in td.values(True, True) if x.numel()}


def test_all_leaves_are_views_of_one_buffer():
    td = tree()
    c = td.consolidate()
    assert c is not td and type(c) is TensorDict
    assert c.is_consolidated() and c.is_locked and not td.is_consolidated() and not td.is_locked
    assert len(storages(c)) == 1 and storages(c) == {buffer_of(c).untyped_storage().data_ptr()}
    assert leaf_bits(c) == leaf_bits(td) and c.names == ["time"] and c["word"] == "hello"
    assert list(c.keys(True, True)) == list(td.keys(True, True))
    # Values are copies: neither side sees writes to the other.
    c["f"].zero_()
    assert td["f"].abs().sum() > 0


def test_layout_is_in_the_order_of_the_walk_at_64_bytes():
    td = TensorDict(
        {"a": torch.zeros(3), "n": {"b": torch.zeros(3, dtype=torch.int8)}, "c": torch.zeros(20)}
    )
    c = td.consolidate()
    start = buffer_of(c).data_ptr()
    places = [c[k].data_ptr() - start for k in ("a", ("n", "b"), "c")]
    assert places == [0, 64, 128] and buffer_of(c).numel() == 256


def test_one_copy_into_torch_packs_everything():
    td = TensorDict({str(i): torch.ones(3) for i in range(50)})
    with CountCopies() as seen:
        td.consolidate()
    assert seen.calls == ["aten::_foreach_copy_"]


def test_unlock_ends_it_and_set_keeps_it():
    c = tree().consolidate()
    c.set_("f", torch.ones(3))
    assert c.is_consolidated() and (c["f"] == 1).all()
    assert buffer_of(c)[:12].view(torch.float32).tolist() == [1, 1, 1]
    with pytest.raises(LockedError):
        c["new"] = torch.zeros(3)
    assert not c.unlock_().is_consolidated() and not c.is_locked
    assert not c["n"].is_locked


def test_derived_trees_are_not_consolidated():
    c = tree().consolidate()
    for other in (c.clone(), c.copy(), c.select("f"), c[0], c[:2], c.flatten_keys()):
        assert not other.is_consolidated()
    assert not c["n"].is_consolidated()


def test_again_returns_the_same():
    c = tree().consolidate()
    assert c.consolidate() is c and c.consolidate(device="cpu") is c
    assert c.consolidate(inplace=True) is c


def test_inplace_replaces_the_entries_of_the_same_tree():
    td = tree()
    before, inner = td.clone(), td["n"]
    assert td.consolidate(inplace=True) is td
    assert td.is_consolidated() and td["n"] is inner and inner.is_locked
    assert len(storages(td)) == 1 and leaf_bits(td) == leaf_bits(before)


def test_inplace_of_a_locked_tree_is_refused_untouched():
    td = tree().lock_()
    f = td["f"]
    with pytest.raises(LockedError):
        td.consolidate(inplace=True)
    assert td["f"] is f and not td.is_consolidated()


def test_ties_are_stored_once_and_stay_ties():
    w = torch.randn(1000)
    td = TensorDict({"a": w, "n": {"b": w}, "c": torch.zeros(10), "part": w[1:], "conj": w})
    c = td.consolidate()
    assert c["a"] is c["n", "b"] and c["a"].untyped_storage().nbytes() < 2.5 * w.nbytes
    c["a"].fill_(3)
    assert (c["n", "b"] == 3).all() and (c["part"] == w[1:]).all()


def test_a_conjugate_is_not_a_tie():
    z = torch.randn(3, dtype=torch.cfloat)
    c = TensorDict({"z": z, "conj": z.conj()}).consolidate()
    assert torch.equal(c["conj"], z.conj().resolve_conj()) and torch.equal(c["z"], z)


def test_meta_leaves_are_not_ties():
    td = TensorDict({"a": torch.zeros(3, device="meta"), "b": torch.zeros(3, device="meta")})
    c = td.consolidate()
    assert c["a"] is not c["b"] and c["a"].storage_offset() != c["b"].storage_offset()


def test_grad_history_is_dropped():
    td = TensorDict(
        {"p": torch.nn.Parameter(torch.ones(2)), "g": torch.ones(2, requires_grad=True)}
    )
    c = td.consolidate()
    assert not c.requires_grad and type(c["p"]) is torch.Tensor


@pytest.mark.parametrize("batch", [[], [4], [0]])
def test_nothing_to_store(batch):
    for td in (
        TensorDict({}, batch),
        TensorDict({"n": TensorDict({}, batch)}, batch),
        TensorDict({"a": torch.zeros(*batch, 0)}, batch),
        TensorDict({"word": "x"}, batch),
    ):
        c = td.consolidate()
        assert c.is_consolidated() and c.batch_size == td.batch_size
        back = pickle.loads(pickle.dumps(c))
        assert back.is_consolidated() and set(back.keys(True)) == set(td.keys(True))


def test_meta_moves_the_layout_alone():
    c = tree().consolidate(device="meta")
    assert c.is_consolidated() and c["f"].is_meta and buffer_of(c).is_meta
    assert c.device is None
    d = TensorDict({"a": torch.ones(2), "n": {"b": torch.ones(2)}}, device="cpu")
    moved = d.consolidate(device="meta")
    assert moved.device == moved["n"].device == torch.device("meta")


def test_over_buffer_moves_a_consolidated_tree():
    td = tree()
    c = td.consolidate()
    with CountCopies() as seen:
        moved = over_buffer(c, packing_of(c), buffer_of(c).clone())
    assert (
        seen.calls == ["aten::clone"]
        and moved.is_consolidated()
        and leaf_bits(moved) == leaf_bits(td)
    )
    assert storages(moved).isdisjoint(storages(c))


def test_leaves_on_several_devices_need_a_device():
    td = TensorDict({"a": torch.zeros(2), "b": torch.zeros(2, device="meta")})
    with pytest.raises(TypeError, match=r"cpu, meta.*device="):
        td.consolidate()
    assert td.consolidate(device="meta").is_consolidated()


def test_leaves_that_are_no_bytes_are_all_named_and_nothing_is_touched():
    quantized = torch.quantize_per_tensor(torch.zeros(2), 0.1, 0, torch.qint8)
    td = TensorDict(
        {
            "a": torch.ones(2),
            "n": {"q": quantized, "csr": torch.eye(2).to_sparse_csr()},
        }
    )
    a = td["a"]
    with pytest.raises(EntryTypeError) as caught:
        td.consolidate(inplace=True)
    text = str(caught.value)
    assert "2 of 3" in text and "('n', 'q')" in text and "qint8" in text
    assert "('n', 'csr')" in text and "sparse_csr" in text
    assert td["a"] is a and not td.is_locked


def test_jagged_leaves_stay_jagged():
    ts = [torch.randn(4, 3, i) for i in range(1, 6)]
    nt = torch.nested.as_nested_tensor(ts, layout=torch.jagged)
    c = TensorDict({"t": nt, "x": torch.ones(5)}, batch_size=[5]).consolidate()
    got = c["t"]
    assert got.layout is torch.jagged
    assert all(torch.equal(x, y) for x, y in zip(got.unbind(), ts))
    assert got.values().untyped_storage().data_ptr() == c["x"].untyped_storage().data_ptr()
    back = pickle.loads(pickle.dumps(c))
    assert all(torch.equal(x, y) for x, y in zip(back["t"].unbind(), ts))


def test_jagged_leaves_with_one_offsets_still_add_up():
    a = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    td = TensorDict({"a": a, "b": a * 2}, batch_size=[2])
    c = td.consolidate()
    assert [x.tolist() for x in (c["a"] + c["b"]).unbind()] == [[3, 3], [3, 3, 3]]


def test_sparse_coo_leaves_stay_sparse():
    dense = torch.tensor([[0.0, 2], [3, 0]])
    c = TensorDict({"s": dense.to_sparse(), "x": torch.ones(2)}).consolidate()
    assert c["s"].layout is torch.sparse_coo and torch.equal(c["s"].to_dense(), dense)


def test_non_contiguous_leaves():
    base = torch.arange(24.0).view(4, 6)
    td = TensorDict(
        {
            "t": base.t(),
            "s": base[:, ::2],
            "e": torch.ones(1).expand(5),
            "cl": torch.randn(1, 3, 2, 2).to(memory_format=torch.channels_last),
        }
    )
    c = td.consolidate()
    assert all(torch.equal(c[k], td[k]) and c[k].is_contiguous() for k in td.keys())


def test_shared_buffer():
    c = tree().consolidate(share_memory=True)
    assert c["f"].is_shared() and c.is_consolidated() and not c.is_shared()
    assert "is_shared=True)}" in repr(c["n", "deep"])
    d = tree().consolidate().share_memory_()
    assert d.is_shared() and d.is_consolidated() and d["n", "i"].is_shared()
    with pytest.raises(TypeError, match="host memory"):
        tree().consolidate(share_memory=True, device="meta")


dtypes = st.sampled_from(
    [torch.float32, torch.int64, torch.bool, torch.complex64, torch.float8_e5m2]
)
leaf = st.tuples(dtypes, st.lists(st.integers(0, 3), max_size=2).map(tuple)).map(
    lambda c: torch.randint(0, 2, c[1]).to(c[0])
)
trees = st.recursive(
    st.dictionaries(st.sampled_from("abcdef"), leaf, max_size=4),
    lambda inner: st.dictionaries(st.sampled_from("abcdef"), leaf | inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=40, deadline=None)
@given(trees)
def test_any_tree_survives_consolidation_pickle_and_torch_save(source):
    td = TensorDict(source)
    c = td.consolidate()
    buf = io.BytesIO()
    torch.save(c, buf)
    buf.seek(0)
    for other in (
        c,
        pickle.loads(pickle.dumps(c)),
        pickle.loads(pickle.dumps(c, protocol=5)),
        torch.load(buf, weights_only=True),
    ):
        assert other.is_consolidated() and other.is_locked
        assert leaf_bits(other) == leaf_bits(td)
        assert list(other.keys(True)) == list(td.keys(True))
        assert origin_of(other).detail == packing_of(c)


def add_one(td):
    td["f"].add_(1)
    assert td.is_consolidated()


@pytest.mark.ranks
def test_a_child_writes_into_the_shared_buffer():
    td = TensorDict({"f": torch.zeros(3), "v": NonTensorData("x")}).consolidate(share_memory=True)
    child = multiprocessing.get_context("fork").Process(target=add_one, args=(td,))
    child.start()
    child.join(60)
    assert child.exitcode == 0 and td["f"].tolist() == [1, 1, 1]
