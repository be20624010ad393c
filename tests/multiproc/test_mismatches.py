"""Structures that differ: the same error on both ranks, before any payload, in every form."""

import time

import pytest
import torch

from tensordict import NonTensorData, TensorDict, UnbatchedTensor, lazy_stack, tensorclass
from tensordict.core.traverse import leaves
from tensordict.distributed import irecv, isend, recv, send, sendrecv
from tensordict.distributed.testing import run_ranks
from tensordict.errors import SchemaMismatch

pytestmark = pytest.mark.ranks


@tensorclass
class One:
    c: torch.Tensor


@tensorclass
class Other:
    c: torch.Tensor


def base():
    return TensorDict(
        {
            "a": torch.zeros(4),
            "b": torch.zeros(4, 2),
            "n": TensorDict({"c": torch.zeros(3)}, []),
            "t": One(c=torch.zeros(3)),
            "v": "text",
            "big": torch.zeros(60_000),
            "j": torch.nested.as_nested_tensor([torch.zeros(2)] * 2, layout=torch.jagged),
            "s": torch.eye(3).to_sparse() * 0,
        }
    )


def put(*path_and_value):
    *path, value = path_and_value

    def change(td):
        td[tuple(path)] = value

    return change


def _renamed(td):
    td["z"] = td.pop("a")


def _rows(td):
    for key in ("n", "t", "v", "j", "s", "big"):
        td.pop(key)
    td.batch_size = [4]


CHANGES = {
    "renamed": _renamed,
    "missing": lambda td: td.pop("a"),
    "extra": put("q", torch.zeros(1)),
    "many extra": lambda td: [put(f"k{i}", torch.zeros(1))(td) for i in range(300)],
    "same bytes, other dtype": lambda td: put("a", td["a"].view(torch.int32))(td),
    "same bytes, other dtype, large": lambda td: put("big", td["big"].view(torch.int32))(td),
    "other shape of as many": put("b", torch.zeros(2, 4)),
    "another dimension": put("a", torch.zeros(4, 1)),
    "shorter": put("a", torch.zeros(3)),
    "longer": put("a", torch.zeros(5)),
    "shorter, large": put("big", torch.zeros(29_999)),
    "longer, large": put("big", torch.zeros(30_001)),
    "large instead of small": put("a", torch.zeros(100_000)),
    "small instead of large": put("big", torch.zeros(1)),
    "empty": put("a", torch.zeros(0)),
    "tensor instead of node": put("n", torch.zeros(3)),
    "node instead of tensor": put("a", TensorDict({"x": torch.zeros(4)})),
    "sparse instead of dense": put("a", torch.zeros(4).to_sparse()),
    "csr instead of dense": put("b", torch.zeros(4, 2).to_sparse_csr()),
    "csr instead of coo": put("s", (torch.eye(3) * 0).to_sparse_csr()),
    "jagged instead of dense": put(
        "b", torch.nested.as_nested_tensor([torch.zeros(2)] * 4, layout=torch.jagged)
    ),
    "more rows, ragged": put(
        "j", torch.nested.as_nested_tensor([torch.zeros(2)] * 3, layout=torch.jagged)
    ),
    "more elements, sparse": put("s", torch.ones(3, 3).to_sparse()),
    "value instead of tensor": put("a", NonTensorData("x")),
    "tensor instead of value": put("v", torch.zeros(1)),
    "tensor apart from the batch instead of value": put("v", UnbatchedTensor(torch.zeros(1))),
    "stack instead of dense": put("n", lazy_stack([TensorDict({"c": torch.zeros(3)})])),
    "class instead of dense": put("n", One(c=torch.zeros(3))),
    "dense instead of class": put("t", TensorDict({"c": torch.zeros(3)})),
    "another class": put("t", Other(c=torch.zeros(3))),
    "other lock": lambda td: td.lock_(),
    "other batch size": put("n", TensorDict({"c": torch.zeros(3)}, [3])),
    "other batch size of the root": _rows,
}

FORMS = {
    "methods": lambda td, rank: td.send(dst=1) if rank == 0 else td.recv(src=0),
    "one message": lambda td, rank: (
        td.send(dst=1, consolidated=True) if rank == 0 else td.recv(src=0, consolidated=True)
    ),
    "in place": lambda td, rank: send(td, 1) if rank == 0 else recv(0, out=td, atomic=False),
    "handles": lambda td, rank: (isend(td, 1) if rank == 0 else irecv(0, out=td)).wait(),
    "list": lambda td, rank: send([td], 1) if rank == 0 else recv(0, out=[td]),
    "summed": lambda td, rank: send(td, 1, checksum="crc32") if rank == 0 else recv(0, out=td),
}


def _zero(td):
    plain = [x.values() if x.is_nested else x.to_dense() for x in leaves(td)]
    return all(x.eq(0).all() for x in plain)


def _mismatch(rank, size, name):
    said = []
    for form, call in FORMS.items():
        td = base()
        if rank == 0:
            for key in ("a", "b", "big", ("n", "c")):
                td[key].fill_(7.0)
            CHANGES[name](td)
        start = time.monotonic()
        with pytest.raises(SchemaMismatch) as caught:
            call(td, rank)
        assert time.monotonic() - start < 2, form
        if rank == 1:
            assert _zero(td), form
        said.append((str(caught.value), caught.value.differences))
        # the group is usable at once, in the same form
        ok = base()
        if rank == 0:
            ok["big"].fill_(3.0)
        call(ok, rank)
        assert ok["big"].eq(3).all(), form
    return said


@pytest.mark.parametrize("name", list(CHANGES))
def test_a_mismatch_is_the_same_error_on_both_ranks(name):
    first, second = run_ranks(_mismatch, 2, name)
    assert first == second and all(differences for _, differences in first)
    if name == "many extra":
        assert len(first[0][1]) == 300


def _both_ways(rank, size):
    """Each of the two structures is wrong for the other: both errors reach both ranks."""
    mine, other = TensorDict({"a": torch.zeros(3)}), TensorDict({"b": torch.zeros(3)})
    start = time.monotonic()
    with pytest.raises(SchemaMismatch, match="'a'"):
        sendrecv(mine, 1 - rank, 1 - rank, out=other)
    assert time.monotonic() - start < 2 and other["b"].eq(0).all()
    got = sendrecv(mine, 1 - rank, 1 - rank, out=mine.clone())
    assert got["a"].eq(0).all()


def test_a_mismatch_in_both_directions():
    run_ranks(_both_ways, 2)


def _tied(n):
    x = torch.full((n,), 5.0)
    rows = torch.nested.as_nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    # One memory, by another name, and the offsets of one ragged leaf in another.
    return TensorDict({"a": x, "b": x, "j": rows, "k": rows * 2}, [])


def _apart(n):
    x = torch.zeros(n)
    rows = torch.nested.as_nested_tensor([torch.zeros(3), torch.zeros(2)], layout=torch.jagged)
    return TensorDict({"k": rows.clone(), "b": x + 1, "a": x, "j": rows.clone()}, [])


def _ties(rank, size):
    for n in (3, 60_000):
        for options in ({}, {"atomic": False}):
            tied, apart = _tied(n), _apart(n)
            if rank == 0:
                send(tied, 1)
            else:
                recv(0, out=apart, **options)
                assert apart["a"].eq(5).all() and apart["b"].eq(5).all()
                assert apart["a"].data_ptr() != apart["b"].data_ptr()
                assert [x.tolist() for x in apart["j"].unbind()] == [[1, 1], [1, 1, 1]]
                assert [x.tolist() for x in apart["k"].unbind()] == [[2, 2], [2, 2, 2]]
            tied["a"].zero_()
            two = _apart(n)
            with pytest.raises(SchemaMismatch, match="two values at the sender") as caught:
                send(two, 1) if rank == 0 else recv(0, out=tied, **options)
            assert [path for path, _ in caught.value.differences] in ([("a",)], [("b",)])
            assert tied["a"].eq(0).all()


def test_ties_of_the_sender_are_written_twice_and_those_of_the_receiver_refused():
    run_ranks(_ties, 2)
