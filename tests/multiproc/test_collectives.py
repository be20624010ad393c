"""Collectives on real gloo ranks, against plain torch.distributed and against arithmetic."""

import time

import pytest
import torch
import torch.distributed as dist

from tensordict import NonTensorStack, TensorDict
from tensordict.distributed import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    gather,
    reduce_scatter,
)
from tensordict.distributed.testing import run_ranks
from tensordict.errors import SchemaMismatch, TransferError, UnsupportedLeaf

pytestmark = pytest.mark.ranks


def tree(rank):
    return TensorDict(
        {
            "x": torch.arange(6.0).view(3, 2) + rank,
            "n": TensorDict({"b": torch.full((3, 2, 1), float(rank))}, [3, 2]),
            "big": torch.full((3, 50_000), float(rank)),
            "tag": f"from {rank}",
        },
        [3],
        names=["t"],
    )


def equal(a, b):
    assert a.batch_size == b.batch_size and a.names == b.names
    assert torch.equal(a["x"], b["x"]) and torch.equal(a["n", "b"], b["n", "b"])
    assert torch.equal(a["big"], b["big"]) and a["tag"] == b["tag"]
    assert a["n"].batch_size == b["n"].batch_size
    return True


def _remote(rank, size):
    td = tree(7)
    td["rows"] = NonTensorStack("a", "b", "c")
    for use_broadcast in (False, True):
        if rank == 0:
            td.lock_().init_remote(dst=1, use_broadcast=use_broadcast)
        else:
            got = TensorDict.from_remote_init(src=0, use_broadcast=use_broadcast)
            assert equal(got, td) and got.get("rows").tolist() == ["a", "b", "c"]
            assert not got.is_locked
            got["x"].mul_(torch.ones(2, requires_grad=True))  # leaves are ordinary tensors


def test_init_remote_reaches_ranks_that_know_nothing():
    run_ranks(_remote, 2)


def _broadcast(rank, size):
    td = tree(1) if rank == 1 else TensorDict()
    got = td.broadcast(src=1)
    assert equal(got, tree(1)) and (got is td) == (rank == 1)
    fp8 = TensorDict({"w": torch.tensor([1.0, -2.0]).to(torch.float8_e4m3fn)})
    assert broadcast(fp8 if rank == 0 else None, 0)["w"].float().tolist() == [1.0, -2.0]
    assert broadcast(TensorDict({}, [2]) if rank == 0 else None, 0).batch_size == (2,)
    with pytest.raises(UnsupportedLeaf):
        broadcast(TensorDict({"bad": object()}) if rank == 0 else None, 0)
    group = dist.new_group([1, 2])
    if rank > 0:
        got = broadcast(tree(5) if rank == 2 else None, 2, group=group)
        assert equal(got, tree(5))


def test_broadcast_reaches_every_rank():
    run_ranks(_broadcast, 3)


def _all_gather(rank, size):
    td = tree(rank)
    td["tag"] = "x" * (rank * 5)  # values of different lengths
    td["large"] = torch.full((3, 1 << 17), float(rank))
    got = td.all_gather()
    assert len(got) == size
    for r, part in enumerate(got):
        want = tree(r)
        assert part["large"].shape == (3, 1 << 17) and part["large"].eq(r).all()
        del part["large"]
        want["tag"] = "x" * (r * 5)
        assert equal(part, want)


def test_all_gather_lists_every_rank():
    run_ranks(_all_gather, 3)


def _reduce(rank, size):
    base = torch.zeros(4, 6)
    base[:, :2] = rank + 1.0
    w = torch.full((3,), rank + 1.0)
    big = torch.full((40_000,), rank + 1.0, dtype=torch.float64)
    td = TensorDict(
        {
            "l": base[:, :2],
            "n": {"i": torch.full((3,), rank + 1)},
            "h": torch.full((2,), rank + 1.0).to(torch.bfloat16),
            "f8": torch.full((2,), rank + 1.0).to(torch.float8_e4m3fn),
            "i16": torch.full((5,), rank + 1, dtype=torch.int16),
            "bool": torch.tensor([rank == 0, False]),
            "c": torch.full((3,), complex(rank + 1, 1)),
            "embed": w,
            "head": w,
            "big": big,
            "bigt": torch.full((200, 200), rank + 1.0).t()[::2],
            "value": "kept",
        }
    )
    assert td.all_reduce() is None
    total = sum(range(1, size + 1))
    for key in ("l", ("n", "i"), "h", "f8", "i16", "embed", "head", "big", "bigt"):
        assert td[key].float().eq(total).all(), (key, td[key])
    assert td["bool"].tolist() == [True, False] and td["value"] == "kept"
    assert td["c"].eq(complex(total, size)).all()
    assert base[:, :2].eq(total).all() and base[:, 2:].eq(0).all()
    assert td["head"] is w and td["big"] is big


def test_all_reduce_writes_every_leaf_once_in_place():
    run_ranks(_reduce, 2)
    run_ranks(_reduce, 3)


def _ops(rank, size):
    def td():
        return TensorDict({"a": torch.tensor([1.0, 2.0]) * (rank + 1), "b": torch.tensor([rank])})

    want = {"sum": [6, 12], "avg": [2, 4], "max": [3, 6], "min": [1, 2], "product": [6, 48]}
    for op, values in want.items():
        x = td()
        all_reduce(x, op)
        assert x["a"].tolist() == values, op
    x = td()
    (work,) = x.all_reduce(dist.ReduceOp.MAX, async_op=True, bucket_bytes=4)
    work.wait()
    assert x["a"].tolist() == [3, 6] and x["b"].tolist() == [2]
    x = td()
    all_reduce(x.select("a"), scale=0.5)
    assert x["a"].tolist() == [3, 6]
    half = TensorDict({"a": torch.full((4,), 1e-3, dtype=torch.bfloat16)})
    all_reduce(half, accumulate_dtype=torch.float32)
    assert half["a"].dtype is torch.bfloat16
    with pytest.raises(ValueError, match="Expected one of"):
        all_reduce(td(), "median")
    several = [TensorDict({"a": torch.full((3,), float(i))}) for i in range(3)]
    works = [all_reduce(s, async_op=True) for s in several]  # order is kept
    for i, (s, work) in enumerate(zip(several, works)):
        work.wait()
        assert s["a"].eq(3.0 * i).all()


def test_operations_buckets_and_handles():
    run_ranks(_ops, 3)


def _reduce_to(rank, size):
    td = TensorDict({"a": torch.full((3,), rank + 1.0), "big": torch.full((60_000,), rank + 1.0)})
    td.reduce(dst=1)
    want = 6.0 if rank == 1 else rank + 1.0
    assert td["a"].eq(want).all() and td["big"].eq(want).all()
    (work,) = td.reduce(1, "max", return_premature=True)
    work.wait()
    parts = [TensorDict({"a": torch.full((2,), float(rank + 10 * k))}) for k in range(size)]
    mine = reduce_scatter(parts)
    assert mine is parts[rank] and mine["a"].eq(3.0 + 30 * rank).all()


def test_reduce_changes_one_rank_only():
    run_ranks(_reduce_to, 3)


def _fan(rank, size):
    got = gather(tree(rank), 0)
    if rank == 0:
        assert all(equal(part, tree(r)) for r, part in enumerate(got))
    else:
        assert got is None
    mine = TensorDict.scatter(
        TensorDict(), 0, [tree(10 + r) for r in range(size)] if rank == 0 else None
    )
    assert equal(mine, tree(10 + rank))
    with pytest.raises(TransferError, match="Expected one for each"):
        TensorDict().scatter(0, [tree(0)] if rank == 0 else None)
    swapped = all_to_all([TensorDict({"a": torch.tensor([rank, k])}) for k in range(size)])
    assert [x["a"].tolist() for x in swapped] == [[r, rank] for r in range(size)]
    if rank == 0:
        out = TensorDict({"a": torch.zeros(size - 1, 2)}, [size - 1])
        assert out.gather_and_stack(0) is out
        assert out["a"].tolist() == [[float(r)] * 2 for r in range(1, size)]
    else:
        assert TensorDict({"a": torch.full((2,), float(rank))}, []).gather_and_stack(0) is None


def test_gather_scatter_and_all_to_all():
    run_ranks(_fan, 3)


def _unequal(rank, size):
    td = TensorDict({"a": torch.ones(3), "b": torch.ones(2)})
    if rank == 2:
        td["b"] = torch.ones(3)
        td["c"] = torch.ones(1)
    start = time.monotonic()
    texts = []
    for call in (all_reduce, all_gather):
        with pytest.raises(SchemaMismatch) as caught:
            call(td)
        assert td["a"].eq(1).all() and td["b"].eq(1).all()
        texts.append(str(caught.value))
    if rank == 1:
        td["bad"] = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    with pytest.raises((UnsupportedLeaf, SchemaMismatch)) as caught:
        all_reduce(td)
    texts.append(str(caught.value))
    assert time.monotonic() - start < 4
    order = {"a": torch.ones(2), "b": torch.full((3,), 2.0)}
    ok = TensorDict(order if rank else dict(reversed(order.items())))
    all_reduce(ok)  # and the group goes on; keys in another order are the same structure
    assert ok["a"].eq(size).all() and ok["b"].eq(2 * size).all()
    return texts


def test_unequal_structures_are_refused_on_every_rank():
    texts = run_ranks(_unequal, 3)
    assert texts[0] == texts[1] == texts[2]
    assert "'c'" in texts[0][0] and "'b'" in texts[0][0] and "bad" in texts[0][2]


def _ties(rank, size):
    w = torch.ones(3)
    td = TensorDict({"a": w, "b": w if rank == 0 else w.clone()})
    with pytest.raises(SchemaMismatch, match="memory of"):
        all_reduce(td)


def test_a_tie_on_one_rank_only_is_refused():
    run_ranks(_ties, 2)
