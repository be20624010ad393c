"""Consolidated trees on real gloo ranks: every form of every structure is bit-equal."""

import pytest
import torch
from tests.multiproc import test_structures
from tests.multiproc.test_structures import DTYPES, STRUCTURES, picture, ties

from tensordict import TensorDict
from tensordict.distributed import (
    Channel,
    all_gather,
    all_reduce,
    broadcast,
    gather,
    recv,
    reduce,
    scatter,
    send,
)
from tensordict.distributed.testing import run_ranks
from tensordict.errors import ChannelClosed, SchemaMismatch

pytestmark = pytest.mark.ranks


def unlocked(pic):
    return {key: what[:3] if key[0] == "node" else what for key, what in pic.items()}


def _forms(rank, size, name):
    make = getattr(test_structures, name)
    for dtype in DTYPES:
        td = make(dtype, 1).consolidate()
        want = picture(td)
        for checksum in ("none", "crc32"):
            if rank == 0:
                send(td, 1, checksum=checksum)
            else:
                got = recv(0)
                assert picture(got) == want and got.is_consolidated() and ties(got) == ties(td)
        for there, here, atomic in ((1, 1, True), (1, 1, False), (1, 0, True), (0, 1, True)):
            source, out = make(dtype, 1), make(dtype, 5)
            if rank == 0:
                send(td if there else source, 1)
            else:
                out = out.consolidate() if here else out
                recv(0, out=out, atomic=atomic)
                assert unlocked(picture(out)) == unlocked(want), (dtype, there, here)
        out = make(dtype, 6).consolidate()
        if rank == 0:
            td.send(dst=1, consolidated=True, init_tag=7)
        else:
            out.recv(src=0, consolidated=True, init_tag=7)
            assert picture(out) == want
        for got in (
            broadcast(td if rank == 0 else None, 0),
            scatter([td, td] if rank == 0 else None, 0),
            *all_gather(td),
            *(gather(td, 1) or ()),
        ):
            assert unlocked(picture(got)) == unlocked(want)
    return True


@pytest.mark.parametrize("name", [make.__name__ for make in STRUCTURES])
def test_every_form_of_every_dtype_is_bit_equal(name):
    assert run_ranks(_forms, 2, name) == [True, True]


def tree(rank, n=10_000):
    leaves = {f"k{i}": torch.full((i % 7,), float(rank + i % 3)) for i in range(n)}
    nested = TensorDict({"i": torch.full((5, 2), rank), "b": torch.tensor([rank == 1, False])})
    return TensorDict({**leaves, "n": nested, "big": torch.full((300_000,), float(rank))})


def _reductions(rank, size):
    trees = [tree(r) for r in range(size)]
    sums = {k: sum(x[k] for x in trees) for k in trees[0].keys() if k != "n"}
    for whole in ((1, 1, 1), (1, 0, 1), (0, 1, 1)):
        td = tree(rank)
        td = td.consolidate() if whole[rank] else td
        all_reduce(td)
        for k, x in sums.items():
            assert torch.equal(td[k], x), (whole, k)
        assert td["n", "i"].tolist() == [[3, 3]] * 5 and td["n", "b"].tolist() == [True, False]
        assert bool(whole[rank]) == td.is_consolidated()
    td = tree(rank).consolidate()
    reduce(td, 2, "max")
    want = tree(2 if rank == 2 else rank)
    assert all(torch.equal(td[k], want[k]) for k in td.keys() if k != "n")
    assert td["n", "b"].tolist() == ([True, False] if rank == 2 else want["n", "b"].tolist())
    pending = all_reduce(tree(rank).consolidate(), async_op=True)
    pending.wait()
    return True


def test_reductions_of_any_sides():
    assert run_ranks(_reductions, 3) == [True] * 3


def _refusals(rank, size):
    td = tree(rank, 50)
    if rank == 1:
        td["k3"] = td["k3"].double()
    td = td.consolidate()
    before = td.clone()
    for call in (
        lambda: send(td, 1) if rank == 0 else recv(0, out=td),
        lambda: all_reduce(td),
        lambda: all_gather(td),
    ):
        with pytest.raises(SchemaMismatch, match="'k3'"):
            call()
    assert (td == before).all()
    if rank == 0:
        send(td, 1)
    else:
        got = recv(0)
        assert got.is_consolidated() and torch.equal(got["big"], tree(0)["big"])
    return True


def test_mismatches_are_refused_on_both_ranks_and_the_group_goes_on():
    assert run_ranks(_refusals, 2) == [True, True]


def _publications(rank, size):
    with Channel(0, 1) as channel:
        if rank == 0:
            td = tree(0, 100).consolidate()
            for k in range(1, 4):
                td["big"].fill_(float(k))
                channel.publish(td if k < 3 else td.clone())
        else:
            while channel.version < 3:
                got = channel.recv()
                assert got["big"][0] == channel.version and torch.equal(
                    got["k5"], torch.full((5,), 2.0)
                )
                assert got.is_consolidated() == (channel.version < 3)
            with pytest.raises(ChannelClosed):  # only then the tag is free for the next test
                channel.recv(timeout=20)
    return True


def test_publications_of_a_consolidated_tree():
    assert run_ranks(_publications, 2) == [True, True]
