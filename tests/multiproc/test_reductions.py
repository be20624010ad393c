"""Reductions of leaves that share memory, of every dtype and stride, and what is refused."""

import pytest
import torch
import torch.distributed as dist

from tensordict import TensorDict
from tensordict.distributed import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    gather,
    reduce,
    reduce_scatter,
    scatter,
)
from tensordict.distributed.testing import run_ranks
from tensordict.errors import SchemaMismatch, TransferError, UnsupportedLeaf

pytestmark = pytest.mark.ranks


# --- memory that leaves share -------------------------------------------------------------

# What several leaves read of one tensor of n elements.
SHARED = {
    "the same": lambda x: {"a": x, "b": x},
    "another shape": lambda x: {"a": x, "b": x.view(-1, 2)},
    "transposed": lambda x: {"a": x.view(-1, 4), "b": x.view(-1, 4).t()},
    "halves that overlap": lambda x: {"a": x[: 3 * len(x) // 4], "b": x[len(x) // 4 :]},
    "a small part": lambda x: {"b": x[7:9], "a": x},
    "a small part in front": lambda x: {"a": x[:5], "b": x[2:]},
    "every other": lambda x: {"a": x, "b": x[::2]},
    "three": lambda x: {"a": x, "b": x[1:], "c": x[:1], "n": {"d": x.view(2, -1)}},
    "whole and complex": lambda x: {"a": torch.view_as_complex(x.view(-1, 2)), "b": x},
}


def _to_one(td):
    return reduce(td, 1)


def _shared(rank, size):
    for name, leaves in SHARED.items():
        for n in (40, 40_000):  # packed, and alone
            for options in ({}, {"op": "avg"}, {"scale": 0.5}, {"async_op": True}):
                for verb in (all_reduce, *([] if options else [_to_one])):
                    x = torch.arange(float(n)) % 64 + rank
                    want = sum(torch.arange(float(n)) % 64 + r for r in range(size))
                    if "op" in options:
                        want = want / size
                    want = want * options.get("scale", 1)
                    pending = verb(TensorDict(leaves(x)), **options)
                    if pending is not None:
                        pending.wait()
                    if verb is not all_reduce and rank != 1:
                        want = torch.arange(float(n)) % 64 + rank
                    assert torch.equal(x, want), (name, n, options)


def test_memory_that_leaves_share_is_reduced_once():
    run_ranks(_shared, 2)


def _one_for_all(rank, size):
    td = TensorDict({"small": torch.full((3,), 1.0 + rank), "big": torch.full((300_000,), 1.0)})
    got = reduce_scatter([td] * size)
    assert got is td
    assert td["small"].eq(sum(range(1, size + 1))).all() and td["big"].eq(size).all()


def test_one_tensordict_for_every_rank():
    run_ranks(_one_for_all, 3)


# --- dtypes and strides -------------------------------------------------------------------

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool),
    *(torch.complex32, torch.complex64, torch.complex128),
]
OPS = {
    "sum": lambda x: x.sum(0),
    "avg": lambda x: x.sum(0) / len(x),
    "max": lambda x: x.amax(0),
    "min": lambda x: x.amin(0),
    "product": lambda x: x.prod(0),
}


def _values(dtype, n, rank):
    """Small numbers whose sums, products and means are exact in every dtype."""
    x = (torch.arange(n, dtype=torch.float64) + rank) % 2 * 2
    return x.to(torch.complex128 if dtype.is_complex else torch.float64)


def _want(op, dtype, n, size):
    each = torch.stack([_values(dtype, n, rank) for rank in range(size)])
    if dtype is torch.bool:
        return (each != 0).all(0) if op in ("min", "product") else (each != 0).any(0)
    return OPS[op](each)


def _dtypes(rank, size):
    for dtype in DTYPES:
        for op in OPS:
            td = TensorDict({str(n): _values(dtype, n, rank).to(dtype) for n in (1, 6, 70_000)})
            impossible = dtype.is_complex and op not in ("sum", "avg")
            if impossible or (dtype is torch.uint64 and op in ("min", "max")):
                with pytest.raises(UnsupportedLeaf) as caught:
                    all_reduce(td, op)
                assert caught.value.path == ("1",)
                continue
            all_reduce(td, op)
            for key, x in td.items():
                assert x.dtype is dtype
                want = _want(op, dtype, int(key), size).to(dtype)
                wide = torch.complex128 if dtype.is_complex else torch.float64
                assert torch.equal(x.to(wide), want.to(wide)), (dtype, op, key)


def test_every_dtype_by_every_operation():
    run_ranks(_dtypes, 2)


def _views(rank, size):
    """Leaves that read their memory in their own way are written through it."""

    def leaves(x):
        c = torch.view_as_complex(x.view(-1, 2))
        return {
            "conj": c.conj(),
            "neg": c.conj().imag,
            "cols": x.view(-1, 8)[:, 1:3],
            "t": x.view(-1, 8).t()[::2],
        }

    for n in (64, 64_000):
        for key in ("conj", "neg", "cols", "t"):
            x, y = torch.arange(float(n)) % 8 + rank, torch.arange(float(n)) % 8 + rank
            all_reduce(TensorDict({key: leaves(x)[key], "other": torch.ones(2)}))
            part = leaves(y)[key]
            part.copy_(
                sum(leaves(torch.arange(float(n)) % 8 + r)[key].resolve_conj() for r in range(size))
            )
            assert torch.equal(x, y), (key, n)


def test_views_are_written_through():
    run_ranks(_views, 2)


def _wider(rank, size):
    td = TensorDict({"a": torch.tensor([256.0, 1.0, 1.0][rank]).bfloat16().expand(5).clone()})
    td["big"] = td["a"].repeat(60_000)
    all_reduce(td, accumulate_dtype=torch.float32)
    assert td["a"].dtype is td["big"].dtype is torch.bfloat16
    assert td["a"].eq(258).all() and td["big"].eq(258).all()  # 256 + 1 is 256 in bfloat16
    with pytest.raises(ValueError, match="Expected a floating dtype"):
        all_reduce(td, accumulate_dtype=torch.int32)
    td = TensorDict({"a": torch.full((3,), 2.0 ** (rank + 1)), "big": torch.ones(70_000)})
    op = dist._make_nccl_premul_sum(2.0**-rank)  # another factor on each rank
    all_reduce(td, op)
    assert td["a"].eq(2.0 * size).all()
    assert td["big"].eq(sum(2.0**-r for r in range(size))).all()


def test_sums_in_a_wider_dtype_and_with_a_factor_of_each_rank():
    run_ranks(_wider, 3)


# --- what is refused ----------------------------------------------------------------------

REFUSED = {
    "expanded": (lambda: torch.ones(1).expand(4), SchemaMismatch, {}),
    "expanded, large": (lambda: torch.ones(1).expand(70_000), SchemaMismatch, {}),
    "sparse_coo": (lambda: torch.eye(3).to_sparse(), UnsupportedLeaf, {}),
    "sparse_csr": (lambda: torch.eye(3).to_sparse_csr(), UnsupportedLeaf, {}),
    "jagged": (
        lambda: torch.nested.as_nested_tensor([torch.ones(2)] * 2, layout=torch.jagged),
        UnsupportedLeaf,
        {},
    ),
    "int4": (lambda: torch.ones(3, dtype=torch.uint8).view(torch.int4), UnsupportedLeaf, {}),
    "int64": (lambda: torch.ones(3, dtype=torch.int64), UnsupportedLeaf, {"scale": 0.5}),
    "complex64": (lambda: torch.ones(3, dtype=torch.complex64), UnsupportedLeaf, {"op": "max"}),
}


def _refused(rank, size, name, only_one):
    make, error, options = REFUSED[name]
    td = TensorDict({"x": torch.ones(3), "big": torch.ones(70_000), "n": {"bad": make()}})
    if only_one and rank > 0:
        td["n", "bad"] = torch.ones(4 if name == "expanded" else 70_000)
    texts = []
    for _ in range(2):  # what was seen before is refused again
        with pytest.raises(TransferError) as caught:
            all_reduce(td, **options)
        assert isinstance(caught.value, (error, SchemaMismatch)) and "bad" in str(caught.value)
        assert td["x"].eq(1).all() and td["big"].eq(1).all()
        texts.append(str(caught.value))
    ok = TensorDict({"a": torch.ones(2)})
    all_reduce(ok)
    assert ok["a"].eq(size).all()
    return texts


@pytest.mark.parametrize("only_one", [False, True])
@pytest.mark.parametrize("name", list(REFUSED))
def test_what_cannot_be_reduced_is_refused_on_every_rank(name, only_one):
    texts = run_ranks(_refused, 2, name, only_one)
    assert texts[0] == texts[1]


def _other_call(rank, size):
    td = TensorDict({"a": torch.ones(3), "big": torch.ones(70_000)})
    calls = [
        (lambda: all_reduce(td, "max"), lambda: all_reduce(td)),
        (lambda: all_reduce(td, "avg"), lambda: all_reduce(td)),
        (lambda: all_reduce(td, bucket_bytes=64), lambda: all_reduce(td)),
        (lambda: reduce(td, 0), lambda: all_reduce(td)),
        (lambda: reduce(td, 0), lambda: reduce(td, 1)),
        (lambda: all_gather(td), lambda: all_reduce(td)),
    ]
    for mine, others in calls:
        with pytest.raises(TransferError, match="Let every rank make the same calls"):
            mine() if rank == 1 else others()
        assert td["a"].eq(1).all() and td["big"].eq(1).all()
    all_reduce(td)
    assert td["a"].eq(size).all()


def test_another_call_on_one_rank_is_an_error_on_all():
    run_ranks(_other_call, 3)


# --- groups -------------------------------------------------------------------------------


def mine(rank):
    return TensorDict({"a": torch.full((2,), float(rank)), "big": torch.full((70_000,), rank)})


def is_of(td, number):
    return td["a"].eq(number).all().item() and td["big"].eq(number).all().item()


def _part(group, rank, ranks):
    """Every collective over a part of the world; ranks are those of the world."""
    first, last = ranks[0], ranks[-1]
    td = mine(rank)
    all_reduce(td, group=group)
    assert is_of(td, sum(ranks))
    td = mine(rank)
    reduce(td, last, group=group)
    assert is_of(td, sum(ranks) if rank == last else rank)
    td.reduce(last, group=group)
    assert is_of(broadcast(mine(rank) if rank == last else None, last, group=group), last)
    assert [is_of(x, r) for x, r in zip(all_gather(mine(rank), group=group), ranks)] == [True] * 2
    got = gather(mine(rank), first, group=group)
    assert got is None or [is_of(x, r) for x, r in zip(got, ranks)] == [True] * 2
    parts = [mine(10 + r) for r in ranks] if rank == first else None
    assert is_of(scatter(parts, first, group=group), 10 + rank)
    swapped = all_to_all([mine(100 * rank + r) for r in ranks], group=group)
    assert [is_of(x, 100 * r + rank) for x, r in zip(swapped, ranks)] == [True] * 2
    assert is_of(reduce_scatter([mine(r) for r in ranks], group=group), rank * len(ranks))
    if rank == last:
        rows = TensorDict({"a": torch.zeros(1, 2), "big": torch.zeros(1, 70_000)}, [1])
        rows["big"] = rows["big"].long()
        assert is_of(rows.gather_and_stack(last, group=group)[0], first)
    else:
        assert mine(rank).gather_and_stack(last, group=group) is None
    with pytest.raises(ValueError, match="not one of the 2 ranks"):
        outside = next(r for r in range(4) if r not in ranks)
        broadcast(None, outside, group=group)


def _groups(rank, size):
    from torch.distributed.device_mesh import init_device_mesh

    for ranks in ([1, 3], [2, 0]):
        group = dist.new_group(ranks)
        if rank in ranks:
            _part(group, rank, sorted(ranks))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    _part(mesh["dp"], rank, [rank % 2, rank % 2 + 2])
    _part(mesh["tp"], rank, [rank // 2 * 2, rank // 2 * 2 + 1])


def test_every_collective_over_groups_and_axes():
    run_ranks(_groups, 4, reuse=False)
