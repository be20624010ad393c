"""split, chunk, tensor_split, unbind, iteration: against torch on each leaf."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from strategies import check_batch_op, gate, slow, trees
from tensordict import NonTensorStack, TensorDict


def draw_sizes(draw, n):
    sizes = []
    while n:
        sizes.append(draw(st.integers(0 if len(sizes) < 6 else n, n)))
        n -= sizes[-1]
    return sizes or [0]


def pieces_of(td, draw):
    """What td gives, and the same call in torch for a tensor."""
    dim = draw(st.integers(-td.ndim, td.ndim - 1))
    at = dim % td.ndim
    n = td.batch_size[at]
    kind = draw(st.sampled_from(["size", "sizes", "chunk", "tensor_split", "indices", "unbind"]))
    if kind == "size":
        size = draw(st.integers(1, 4))
        return td.split(size, dim), lambda x: x.split(size, at), td.names
    if kind == "sizes":
        sizes = draw_sizes(draw, n)
        return td.split(sizes, dim), lambda x: x.split(sizes, at), td.names
    if kind == "chunk":
        chunks = draw(st.integers(1, 5))
        return td.chunk(chunks, dim), lambda x: x.chunk(chunks, at), td.names
    if kind == "tensor_split":
        sections = draw(st.integers(1, 5))
        return td.tensor_split(sections, dim), lambda x: x.tensor_split(sections, at), td.names
    if kind == "indices":
        cuts = tuple(draw(st.lists(st.integers(-4, 4), max_size=3)))
        return td.tensor_split(cuts, dim), lambda x: x.tensor_split(cuts, at), td.names
    names = [name for i, name in enumerate(td.names) if i != at]
    return td.unbind(dim), lambda x: x.unbind(at), names


def check(td, data):
    got, op, names = pieces_of(td, data.draw)
    assert type(got) is tuple
    assert len(got) == len(op(torch.zeros(td.batch_size)))
    for i, piece in enumerate(got):
        check_batch_op(td, piece, lambda x, tail, i=i: op(x)[i], names)


@given(td=trees(min_dims=1), data=st.data())
@gate
def test_agrees_with_torch_on_each_leaf(td, data):
    check(td, data)


@pytest.mark.slow
@given(td=trees(min_dims=1), data=st.data())
@slow
def test_agrees_with_torch_on_each_leaf_long(td, data):
    check(td, data)


def test_pieces_are_views():
    td = TensorDict({"a": torch.zeros(4, 2), "n": {"b": torch.zeros(4)}}, [4])
    for piece in (*td.split(2), *td.chunk(2), *td.tensor_split(2), *td.unbind(0)):
        assert piece["a"].untyped_storage().data_ptr() == td["a"].untyped_storage().data_ptr()


def test_one_call_for_each_leaf(monkeypatch):
    calls = []
    for name in ("split_with_sizes", "unbind", "narrow", "select", "__getitem__"):
        real = getattr(torch.Tensor, name)

        def counted(self, *args, _name=name, _real=real, **kwargs):
            calls.append(_name)
            return _real(self, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, counted)
    td = TensorDict({"a": torch.zeros(8), "n": {"b": torch.zeros(8)}}, [8])
    assert len(td.split(1)) == 8 and calls == ["split_with_sizes"] * 2
    calls.clear()
    assert len(td.unbind(0)) == 8 and calls == ["unbind"] * 2


def test_iteration_gives_the_rows():
    td = TensorDict({"a": torch.arange(3), "s": NonTensorStack("x", "y", "z")}, [3])
    assert [(row["a"].item(), row["s"]) for row in td] == [(0, "x"), (1, "y"), (2, "z")]
    assert [row.batch_size for row in td] == [torch.Size([])] * 3
    with pytest.raises(TypeError, match="Cannot iterate"):
        iter(TensorDict(a=0))


def test_pieces_of_a_locked_tree():
    td = TensorDict({"a": torch.zeros(4), "n": {"b": torch.zeros(4)}}, [4], lock=True)
    assert all(p.is_locked and p["n"].is_locked for p in (*td.split(2), *td.chunk(2)))
    assert not any(p.is_locked for p in td.unbind(0))


def test_torch_functions():
    td = TensorDict({"a": torch.arange(6).view(3, 2)}, [3])
    for got, want in [
        (torch.split(td, 2), td["a"].split(2)),
        (torch.split(td, [1, 2]), td["a"].split([1, 2])),
        (torch.chunk(td, 2), td["a"].chunk(2)),
        (torch.tensor_split(td, 2), td["a"].tensor_split(2)),
        (torch.unbind(td), td["a"].unbind()),
        (torch.unbind(td, 0), td["a"].unbind()),
    ]:
        assert all(torch.equal(p["a"], q) for p, q in zip(got, want, strict=True))


def jagged(lengths=(3, 5, 2, 4)):
    rows = [torch.arange(n) + 10 * i for i, n in enumerate(lengths)]
    nested = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    return rows, TensorDict({"ids": nested, "y": torch.arange(len(rows))}, [len(rows)])


@pytest.mark.parametrize(
    "op",
    [
        lambda x: x.chunk(2),
        lambda x: x.split(3),
        lambda x: x.split([1, 0, 3]),
        lambda x: x.tensor_split(3),
        lambda x: [x[1:3], x[::2], x[2:2]],
        lambda x: [x[[3, 0]], x[torch.tensor([1, 1])], x[torch.tensor([True, False, True, True])]],
        lambda x: [x.roll(1, 0), x.flip(0), x.narrow(0, 1, 2)],
    ],
)
def test_jagged_leaves_follow(op):
    rows, td = jagged()
    for piece, expected in zip(op(td), op(torch.arange(4)), strict=True):
        assert piece.batch_size == expected.shape and torch.equal(piece["y"], expected)
        got = piece["ids"].unbind()
        assert [x.tolist() for x in got] == [rows[i].tolist() for i in expected.tolist()]


def test_jagged_rows():
    rows, td = jagged()
    assert [row["ids"].tolist() for row in td.unbind(0)] == [x.tolist() for x in rows]
    assert td[2]["ids"].tolist() == rows[2].tolist() == td[-2]["ids"].tolist()
    span = td[1:3]["ids"]
    assert span.values().data_ptr() == td["ids"].values()[3:].data_ptr()  # neighbours: a view
    with pytest.raises(RuntimeError, match="Cannot apply Reshape to a jagged tensor"):
        td.reshape(2, 2)


TD = TensorDict({"a": torch.zeros(2, 3)}, [2, 3])
MALFORMED = {
    "split zero": (lambda td: td.split(0), ValueError, "must be positive, got 0"),
    "split negative": (lambda td: td.split(-1), ValueError, "must be positive, got -1"),
    "split sum": (lambda td: td.split([1, 2]), RuntimeError, r"size 2.*\[1, 2\]"),
    "split below zero": (lambda td: td.split([-1, 3]), RuntimeError, r"\[-1, 3\]"),
    "split dim": (lambda td: td.split(1, 2), IndexError, "got 2"),
    "split text": (lambda td: td.split("ab"), TypeError, "'a'"),
    "chunk zero": (lambda td: td.chunk(0), ValueError, "got 0"),
    "chunk text": (lambda td: td.chunk("2"), TypeError, "'2'"),
    "chunk dim": (lambda td: td.chunk(2, -3), IndexError, "got -3"),
    "sections zero": (lambda td: td.tensor_split(0), ValueError, "larger than 0"),
    "sections dim": (lambda td: td.tensor_split(1, 4), IndexError, "got 4"),
    "unbind dim": (lambda td: td.unbind(2), IndexError, "got 2"),
    "unbind nothing": (lambda td: TensorDict(a=0).unbind(0), IndexError, "no batch dimension"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_calls_say_what_is_wrong(name):
    call, error, text = MALFORMED[name]
    with pytest.raises(error, match=text):
        call(TD)
