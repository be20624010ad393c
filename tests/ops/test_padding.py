"""pad, pad_sequence, pack, the new_* family and torch.*_like."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from strategies import FLOATS, check_batch_op, check_per_leaf, flat, gate, slow, trees
from tensordict import (
    LazyStackedTensorDict,
    MetaData,
    NonTensorStack,
    PackLayout,
    TensorDict,
    lazy_stack,
    pad,
    pad_sequence,
    unpad_sequence,
)

LIKE = ["zeros_like", "ones_like", "empty_like", "rand_like", "randn_like"]


# --- pad ---------------------------------------------------------------------------------


def padded(td, data):
    k = data.draw(st.integers(0, td.ndim))
    pads = []
    for n in td.batch_size[:k]:
        before = data.draw(st.integers(-n, 2))
        pads += [before, data.draw(st.integers(-n - min(before, 0), 2))]
    result = data.draw(st.sampled_from([lambda: td.pad(pads, 1), lambda: pad(td, pads, 1)]))()

    def op(x, tail):
        torch_pads = [0, 0] * (x.ndim - k)
        for i in reversed(range(k)):
            torch_pads += pads[2 * i : 2 * i + 2]
        return torch.nn.functional.pad(x, torch_pads, value=1)

    assert result.batch_size == op(torch.zeros(td.batch_size), ()).shape
    assert result.names == td.names
    check_per_leaf(td, result, lambda x: op(x, ()))


@given(td=trees(), data=st.data())
@gate
def test_pad_agrees_with_torch(td, data):
    padded(td, data)


@pytest.mark.slow
@given(td=trees(), data=st.data())
@slow
def test_pad_agrees_with_torch_long(td, data):
    padded(td, data)


def test_padded_non_tensor_rows_hold_none():
    td = TensorDict({"s": NonTensorStack("p", "q"), "v": "same"}, [2])
    assert td.pad([1, 1]).get("s").tolist() == [None, "p", "q", None]
    assert td.pad([1, 1])["v"] == [None, "same", "same", None]


def test_pad_in_place_and_locks():
    td = TensorDict({"a": torch.zeros(2)}, [2])
    assert td.pad([0, 1], inplace=True) is td and td["a"].shape == (3,)
    assert not td.lock_().pad([0, 1]).is_locked
    with pytest.raises(RuntimeError, match="Cannot modify locked"):
        td.pad([0, 1], inplace=True)
    assert td.batch_size == (3,)


# --- pad_sequence ------------------------------------------------------------------------


def rows(*lengths, batch=False):
    return [
        TensorDict(
            {"a": torch.full((n, 2), float(n)), "n": {"b": torch.full((n,), n)}, "s": str(n)},
            [n] if batch else [],
        )
        for n in lengths
    ]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("batch", [False, True])
def test_pad_sequence_agrees_with_torch(side, batch):
    parts = rows(2, 0, 3, batch=batch)
    out = pad_sequence(parts, padding_value=7, padding_side=side, return_mask=True)
    for key in ("a", ("n", "b")):
        truth = torch.nn.utils.rnn.pad_sequence(
            [part[key] for part in parts], batch_first=True, padding_value=7, padding_side=side
        )
        assert torch.equal(out[key], truth)
        real = torch.tensor([[True, True, False], [False] * 3, [True] * 3])
        mask = out["masks", key] if isinstance(key, str) else out[("masks", *key)]
        assert torch.equal(mask, real.flip(1) if side == "left" else real)
    assert out.batch_size == out["n"].batch_size == ((3, 3) if batch else (3,))
    values = out.get("s").tolist()
    padded = [["2", "2", None], [None] * 3, ["3"] * 3]
    if side == "left":
        padded = [row[::-1] for row in padded]
    assert values == (padded if batch else ["2", "0", "3"])


def test_pad_sequence_along_later_dimensions():
    parts = [TensorDict({"a": torch.ones(2, n, 3)}, [2]) for n in (1, 4)]
    for dim in (1, -2):
        out = pad_sequence(parts, pad_dim=dim, return_mask="real")
        assert out.batch_size == (2, 2) and out["a"].shape == (2, 2, 4, 3)
        assert out["real", "a"].shape == (2, 2, 4)
        assert out["real", "a"][0].sum() == 2 and out["real", "a"][1].all()
    assert "masks" not in pad_sequence(parts, pad_dim=1)


def test_pad_sequence_into_out():
    parts = rows(1, 2)
    out = pad_sequence(rows(2, 2))
    a = out["a"]
    assert pad_sequence(parts, out=out) is out and out["a"] is a and a[0, 1, 0] == 0


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("batch", [False, True])
def test_unpad_sequence_gives_the_parts_back(side, batch):
    parts = rows(2, 0, 3, batch=batch)
    out = unpad_sequence(pad_sequence(parts, padding_side=side, return_mask=True))
    assert type(out) is LazyStackedTensorDict and len(out.tensordicts) == 3
    for part, back in zip(parts, out.tensordicts):
        assert back.batch_size == part.batch_size and "masks" not in back
        assert torch.equal(back["a"], part["a"])
        assert torch.equal(back["n", "b"], part["n", "b"])
        assert batch or back["s"] == part["s"]


def test_unpad_sequence_with_a_mask_of_its_own():
    padded = pad_sequence(rows(1, 2, batch=True))
    mask = torch.tensor([[True, False], [True, True]])
    assert [len(x) for x in unpad_sequence(padded, mask).tensordicts] == [1, 2]
    later = [TensorDict({"a": torch.ones(2, n)}, [2]) for n in (1, 3)]
    out = unpad_sequence(pad_sequence(later, pad_dim=1, return_mask=True), pad_dim=1)
    assert [x["a"].shape for x in out.tensordicts] == [(2, 1), (2, 3)]
    with pytest.raises(ValueError, match="needs a mask"):
        unpad_sequence(padded)
    with pytest.raises(KeyError, match="no mask for 'a'"):
        unpad_sequence(padded, TensorDict({"n": {"b": mask}}, [2]))


# --- pack --------------------------------------------------------------------------------


def packed(td, data):
    dim = data.draw(st.integers(-td.ndim - 1, td.ndim))
    tensors = list(flat(td).values())
    if len({x.dtype for x in tensors}) > 1:
        with pytest.raises(TypeError, match="different dtypes"):
            td.pack(dim)
        return
    flat_tensor, layout = td.pack(dim)
    at = dim % (td.ndim + 1)
    assert flat_tensor.shape == (*td.batch_size[:at], layout.numel, *td.batch_size[at:])
    back = layout.unpack(flat_tensor)
    assert back.batch_size == td.batch_size
    check_per_leaf(td, back, lambda x: x)
    nodes = {path: x for path, x in td.items(True) if not isinstance(x, Tensor)}
    assert all(back[path].batch_size == x.batch_size for path, x in nodes.items())
    again, same = td.pack(dim, layout=layout)
    assert same is layout and torch.equal(again, flat_tensor)


@given(td=trees(dtypes=FLOATS[:1], non_tensor=False), data=st.data())
@gate
def test_pack_is_undone(td, data):
    packed(td, data)


@pytest.mark.slow
@given(td=trees(dtypes=FLOATS, non_tensor=False), data=st.data())
@slow
def test_pack_is_undone_long(td, data):
    packed(td, data)


def test_unpack_takes_other_batch_sizes_and_gives_views():
    td = TensorDict({"a": torch.zeros(2, 3), "n": TensorDict({"b": torch.ones(2, 4)}, [2, 4])}, [2])
    flat_tensor, layout = td.pack()
    assert layout.keys == ("a", ("n", "b")) and layout.offsets == (0, 3) and layout.numel == 7
    out = layout.unpack(torch.arange(35.0).view(5, 7))
    assert out.batch_size == (5,) and out["n"].batch_size == (5, 4) and out["n", "b"][0, 0] == 3
    view = layout.unpack(flat_tensor)
    view["a"].fill_(9)
    assert (flat_tensor[:, :3] == 9).all()


# --- new_* and *_like ----------------------------------------------------------------------


def renewed(td, data):
    size = tuple(data.draw(st.lists(st.integers(0, 3), max_size=4)))
    name = data.draw(st.sampled_from(["new_zeros", "new_ones", "new_full", "new_empty"]))
    dtype = data.draw(st.sampled_from([None, torch.float64]))
    if name == "new_full":
        out = td.new_full(size, 1, dtype=dtype)
    else:
        out = getattr(td, name)(*data.draw(st.sampled_from([size, (size,)])), dtype=dtype)
    n = len(size)
    head = [*[None] * n, *td.names]
    assert out.batch_size == size and out.names == head[len(head) - n :]
    assert out.device == td.device and not out.is_locked
    for path, x in flat(td).items():
        if isinstance(x, Tensor):
            new = flat(out)[path]
            assert new.shape == (*size, *x.shape[td.ndim :]) and new.dtype == (dtype or x.dtype)
            if name != "new_empty":
                assert (new == (name != "new_zeros")).all()


@given(td=trees(non_tensor=False), data=st.data())
@gate
def test_new_trees_of_another_batch_size(td, data):
    renewed(td, data)


@pytest.mark.slow
@given(td=trees(non_tensor=False), data=st.data())
@slow
def test_new_trees_of_another_batch_size_long(td, data):
    renewed(td, data)


def test_new_tensor_copies_with_the_dtypes_of_self():
    td = TensorDict({"a": torch.zeros(2, 3), "n": {"b": torch.zeros(2, dtype=torch.int32)}}, [2])
    data = TensorDict({"n": {"b": torch.ones(4)}, "a": torch.ones(4, 5, dtype=torch.int64)}, [4])
    out = td.new_tensor(data)
    assert out.batch_size == (4,) and out["a"].dtype == torch.float32
    assert out["n", "b"].dtype == torch.int32 and out["n", "b"].tolist() == [1] * 4
    out = td.new_tensor([1, 2, 3])
    assert out.batch_size == (3,) and out["a"].tolist() == [1.0, 2.0, 3.0]
    assert out["n"].batch_size == (3,) and out["n", "b"].dtype == torch.int32
    with pytest.raises(KeyError):
        td.new_tensor(TensorDict(a=0))


@pytest.mark.parametrize("name", LIKE)
def test_like_functions(name):
    nested = TensorDict({"b": torch.ones(2, 3)}, [2, 3])
    td = TensorDict({"a": torch.ones(2), "n": nested, "s": "text"}, [2], names=["x"])
    out = getattr(torch, name)(td)
    assert out.batch_size == (2,) and out.names == ["x"] and out["n"].batch_size == (2, 3)
    assert out["a"].shape == (2,) and out["s"] == "text" and out["a"] is not td["a"]
    assert getattr(torch, name)(td, dtype=torch.float64)["n", "b"].dtype == torch.float64
    there = getattr(torch, name)(td, device="meta")
    assert there.device == there["n"].device == torch.device("meta") == there["a"].device


def test_like_values():
    td = TensorDict({"a": torch.full((2,), 5.0)}, [2])
    assert torch.zeros_like(td)["a"].tolist() == [0, 0]
    assert torch.ones_like(td)["a"].tolist() == [1, 1]
    assert torch.full_like(td, 7)["a"].tolist() == [7, 7]


def test_contiguous():
    td = TensorDict({"a": torch.zeros(2, 3, 4), "b": torch.zeros(2, 3)}, [2, 3])
    turned = td.permute(1, 0)
    kept = turned.contiguous()
    assert kept.is_contiguous() and not turned.is_contiguous()
    assert td.contiguous()["a"] is td["a"]
    odd = TensorDict({"a": torch.zeros(3, 1).as_strided((1, 3), (7, 1))}, [1])
    assert odd.contiguous()["a"].stride() == (7, 1)
    assert odd.contiguous(canonical=True)["a"].stride() == (3, 1)
    assert turned.contiguous(inplace=True) is turned and turned.is_contiguous()
    with pytest.raises(RuntimeError, match="Cannot modify locked"):
        td.lock_().contiguous(inplace=True)


# --- malformed -----------------------------------------------------------------------------

TD = TensorDict({"a": torch.zeros(2, 3), "b": torch.zeros(2, 3, dtype=torch.int64)}, [2, 3])
ONE = TensorDict({"a": torch.zeros(2, 3), "n": {"b": torch.zeros(2, 3, 4)}}, [2, 3])
LAYOUT = ONE.pack()[1]
BAD = {
    "pad odd": (lambda: pad(TD, [1]), RuntimeError, "even"),
    "pad long": (lambda: pad(TD, [0, 1] * 3), RuntimeError, "batch dimensions"),
    "pad below zero": (lambda: pad(TD, [-2, -1]), RuntimeError, "takes more rows away"),
    "sequence empty": (lambda: pad_sequence([]), RuntimeError, "cannot be empty"),
    "sequence of tensors": (lambda: pad_sequence([torch.ones(2)]), TypeError, "a Tensor"),
    "sequence keys": (
        lambda: pad_sequence([TD, TD.select("a")]),
        KeyError,
        r"exclusive keys are \['b'\]",
    ),
    "sequence dim": (lambda: pad_sequence([TD, TD], pad_dim=2), IndexError, "'a' along dim 2"),
    "sequence side": (lambda: pad_sequence([TD], padding_side="up"), ValueError, "'up'"),
    "sequence shapes": (
        lambda: pad_sequence([TensorDict(a=torch.ones(2, 3)), TensorDict(a=torch.ones(2, 4))]),
        RuntimeError,
        "pad_sequence failed for key 'a'",
    ),
    "sequence batches": (
        lambda: pad_sequence([TensorDict({}, [2, 3]), TensorDict({}, [2, 4])]),
        RuntimeError,
        "differ only there",
    ),
    "sequence kinds": (
        lambda: pad_sequence([TensorDict(a=torch.ones(1)), TensorDict(a={"b": 0})]),
        KeyError,
        "'a': kinds differ",
    ),
    "pack dtypes": (lambda: TD.pack(), TypeError, "different dtypes.*'b'"),
    "pack dim": (lambda: ONE.pack(3), IndexError, "dim 3"),
    "pack values": (lambda: TensorDict(s="x").pack(), TypeError, "'s'"),
    "pack layout keys": (lambda: ONE.select("a").pack(layout=LAYOUT), KeyError, "differ from"),
    "pack layout shapes": (
        lambda: TensorDict({"a": torch.zeros(2, 3), "n": {"b": torch.zeros(2, 3)}}, [2, 3]).pack(
            layout=LAYOUT
        ),
        RuntimeError,
        r"\('n', 'b'\)",
    ),
    "unpack dims": (lambda: LAYOUT.unpack(torch.zeros(())), IndexError, "0 dimensions"),
    "unpack size": (lambda: LAYOUT.unpack(torch.zeros(4)), RuntimeError, "Expected 5 entries"),
    "new size": (lambda: TD.new_zeros("x"), ValueError, "size"),
    "new full size": (lambda: TD.new_full(1.5, 0), ValueError, "size"),
}


@pytest.mark.parametrize("name", BAD)
def test_malformed_calls_say_what_is_wrong(name):
    call, error, text = BAD[name]
    with pytest.raises(error, match=text):
        call()
    assert TD.batch_size == ONE.batch_size == (2, 3)


def test_the_layout_is_public_and_frozen():
    assert isinstance(LAYOUT, PackLayout)
    with pytest.raises(AttributeError):
        LAYOUT.dim = 0


def test_check_batch_op_notices_other_rows():
    td = TensorDict({"a": torch.arange(3)}, [3])
    with pytest.raises(AssertionError):
        check_batch_op(td, td.flip(0), lambda x, tail: x)


def test_stacks_are_packed_as_one_tensor():
    rows = lazy_stack([TensorDict({"a": torch.full((2, 3), i)}, [2]) for i in range(3)])
    for td in (rows, TensorDict({"n": rows}, [3])):
        flat_tensor, layout = td.pack()
        assert flat_tensor[:, -1].reshape(-1).unique().tolist() == [0, 1, 2]
        back = layout.unpack(flat_tensor)
        key = "a" if td is rows else ("n", "a")
        assert torch.equal(back[key], rows["a"]) and back.batch_size == td.batch_size


def test_a_subclass_is_unpacked_as_it_was():
    class Mine(TensorDict):
        pass

    flat_tensor, layout = Mine({"a": torch.zeros(2, 3)}, [2]).pack()
    assert layout.cls is Mine and type(layout.unpack(flat_tensor)) is Mine
    assert ONE.pack()[1].cls is None


def test_a_value_for_all_rows_is_none_in_rows_that_are_added():
    td = TensorDict({"a": torch.ones(2), "b": "v", "m": MetaData("q", batch_size=[2])}, [2])
    out = pad(td, [1, 1])
    assert out["b"] == [None, "v", "v", None] and out["m"] == "q"
    assert pad(td, [0, 0])["b"] == pad(td, [0, -1])["b"] == "v"

    rows = [
        TensorDict({"a": torch.ones(n), "b": f"v{n}", "m": MetaData("q", batch_size=[n])}, [n])
        for n in (1, 2)
    ]
    out = pad_sequence(rows)
    assert out["b"] == [["v1", None], ["v2", "v2"]] and out["m"] == "q"
    assert pad_sequence(rows, padding_side="left")["b"][0] == [None, "v1"]
    assert pad_sequence([row.exclude("a").auto_batch_size_() for row in rows[:1] * 2])["b"] == [
        "v1",
        "v1",
    ]


def test_values_move_with_their_rows_where_tensors_are_faked():
    td = TensorDict({"a": torch.ones(3), "s": "x", "q": NonTensorStack("a", "b", "c")}, [3])
    with FakeTensorMode(allow_non_fake_inputs=True):
        padded, flipped, rows = td.pad([1, 1]), td.flip(0), td[1:]
    assert padded["q"] == [None, "a", "b", "c", None] and padded["s"] == [None, "x", "x", "x", None]
    assert flipped["q"] == ["c", "b", "a"] and rows["q"] == ["b", "c"]
