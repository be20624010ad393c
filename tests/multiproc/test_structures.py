"""Structures x forms on real ranks: what arrives is bit-equal, with equal metadata."""

import pytest
import torch
from tests.multiproc.pictures import picture, unlocked

from tensordict import NonTensorStack, TensorDict, lazy_stack, tensorclass
from tensordict.distributed import broadcast, recv, send, sendrecv
from tensordict.distributed.testing import run_ranks
from tensordict.errors import SchemaMismatch, TransferError

pytestmark = pytest.mark.ranks


@tensorclass
class Point:
    x: torch.Tensor
    y: torch.Tensor
    label: str = "p"


@tensorclass
class Other:
    x: torch.Tensor
    y: torch.Tensor
    label: str = "p"


def _fill(shape, dtype, seed):
    g = torch.Generator().manual_seed(seed)
    n = torch.Size(shape).numel() * dtype.itemsize
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=g).bool()
    raw = torch.randint(0, 120, (n,), generator=g, dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


def dense(dtype, seed):
    return TensorDict(
        {
            "a": _fill((2, 3), dtype, seed),
            "n": TensorDict({"b": _fill((2, 1), dtype, seed + 1)}, [2, 1], names=["x", None]),
            "e": TensorDict({}, [2]),
        },
        [2],
    )


def scalars(dtype, seed):
    return TensorDict({"s": _fill((), dtype, seed), "zero": _fill((0, 4), dtype, seed)}, [])


def deep(dtype, seed):
    td = TensorDict({"x": _fill((3,), dtype, seed)}, [])
    for k in range(20):
        td = TensorDict({f"level {k}": td, "x": _fill((1,), dtype, k)}, [])
    return td


def large(dtype, seed):
    n = 200_000 // dtype.itemsize
    return TensorDict({"big": _fill((n,), dtype, seed), "small": _fill((3,), dtype, seed)}, [])


def many(dtype, seed):
    return TensorDict({f"k{i}": _fill((i % 5, 2), dtype, seed + i) for i in range(300)}, [])


def strided(dtype, seed):
    grid = _fill((6, 8), dtype, seed)
    return TensorDict({"cols": grid[:, ::2], "t": grid.t(), "rows": grid[1:3]}, [])


def tied(dtype, seed):
    x = _fill((4,), dtype, seed)
    return TensorDict({"embed": x, "n": {"head": x}, "other": x.clone()}, [])


def locked(dtype, seed):
    return dense(dtype, seed).lock_()


def values(dtype, seed):
    td = dense(dtype, seed)
    td["text"] = f"seed {seed}"
    td["rows"] = NonTensorStack("a", {"k": seed})
    return td


def stack(dtype, seed):
    return lazy_stack(
        [
            TensorDict({"r": _fill((n,), dtype, seed + n), "c": _fill((2,), dtype, n)}, [])
            for n in (2, 3, 5)
        ]
    )


def nested_stack(dtype, seed):
    return TensorDict({"l": stack(dtype, seed), "a": _fill((3, 2), dtype, seed)}, [3])


def typed(dtype, seed):
    point = Point(x=_fill((2, 3), dtype, seed), y=_fill((2,), dtype, seed), batch_size=[2])
    return TensorDict({"p": point, "a": _fill((2,), dtype, seed)}, [2])


STRUCTURES = [
    dense,
    scalars,
    deep,
    large,
    many,
    strided,
    tied,
    locked,
    values,
    stack,
    nested_stack,
    typed,
]
DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.bool,
    torch.int64,
    torch.complex64,
    torch.uint16,
]


def ties(node):
    from tensordict.core.traverse import leaves

    pointers = [(x.data_ptr(), x.shape, x.stride()) for x in leaves(node) if x.numel()]
    return len(pointers) - len(set(pointers))


def _forms(rank, size, name):
    make = globals()[name]
    for dtype in DTYPES:
        td = make(dtype, 1)
        want = picture(td)
        # new, twice: cold and by digest
        for _ in range(2):
            if rank == 0:
                send(td, 1)
            else:
                got = recv(0)
                assert picture(got) == want, (name, dtype)
                assert ties(got) == ties(td)
        # into
        out = make(dtype, 5)
        if rank == 0:
            td.send(dst=1)
        else:
            out.recv(src=0)
            assert picture(out) == want, (name, dtype)
        # everything in one message
        out = make(dtype, 6)
        if rank == 0:
            td.send(dst=1, consolidated=True, init_tag=7)
        else:
            out.recv(src=0, consolidated=True, init_tag=7)
            assert picture(out) == want
        # broadcast
        got = broadcast(td if rank == 0 else None, 0)
        assert unlocked(picture(got)) == unlocked(want)
    return True


@pytest.mark.parametrize("name", [make.__name__ for make in STRUCTURES])
def test_every_form_of_every_dtype_is_bit_equal(name):
    assert run_ranks(_forms, 2, name) == [True, True]


def _grads(rank, size):
    td = TensorDict({"w": torch.ones(3, requires_grad=True), "b": torch.ones(2)}, [])
    td["cl"] = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    td["conj"] = torch.tensor([1 + 2j]).conj()
    if rank == 0:
        send(td, 1)
    else:
        got = recv(0)
        assert got["w"].requires_grad and not got["b"].requires_grad and got["w"].is_leaf
        assert got["cl"].is_contiguous(memory_format=torch.channels_last)
        assert got["conj"].tolist() == [1 - 2j]
        (got["w"] * 2).sum().backward()
        assert got["w"].grad.tolist() == [2.0] * 3


def test_grad_flags_memory_formats_and_conjugates():
    run_ranks(_grads, 2)


def _ragged(rank, size):
    jagged = torch.nested.as_nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    td = TensorDict(
        {
            "j": jagged,
            "coo": torch.eye(2).to_sparse(),
            "csr": torch.tensor([[0.0, 1.0], [2.0, 0.0]]).to_sparse_csr(),
        },
        [2],
    )
    if rank == 0:
        send(td, 1)
        td.send(dst=1)
    else:
        other = td.clone()
        for got in (recv(0), recv(0, out=other)):
            assert [x.numel() for x in got["j"].unbind()] == [2, 3]
            assert torch.equal(got["coo"].to_dense(), torch.eye(2))
            assert got["csr"].layout is torch.sparse_csr
            assert got["csr"].to_dense().tolist() == [[0, 1], [2, 0]]


def test_ragged_and_sparse_leaves():
    run_ranks(_ragged, 2)


def _classes(rank, size):
    a = Point(x=torch.ones(2), y=torch.zeros(2), batch_size=[2])
    if rank == 0:
        send(a, 1)
    else:
        got = recv(0)
        assert type(got) is Point and got.x.eq(1).all() and got.label == "p"
    b = Other(x=torch.zeros(2), y=torch.zeros(2), batch_size=[2])
    with pytest.raises(SchemaMismatch, match="Other"):
        send(a, 1) if rank == 0 else recv(0, out=b)
    if rank == 1:
        from tensordict.core import registry

        registry._nodes.pop(Point.kind)  # a program that has not imported it
    with pytest.raises(TransferError, match="Import the module"):
        send(a, 1) if rank == 0 else recv(0)


def test_classes_travel_by_registry():
    run_ranks(_classes, 2, reuse=False)


def _shards(rank, size):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    w = torch.arange(16.0).view(4, 4)
    td = TensorDict({"w": distribute_tensor(w, mesh, [Shard(0)])})
    if rank == 0:
        send(td, 1)
    else:
        got = recv(0, mesh=mesh)["w"]
        assert isinstance(got, DTensor) and got.placements == (Shard(0),)
        assert torch.equal(got.to_local(), w[:2]) and got.shape == (4, 4)
    into = TensorDict({"w": distribute_tensor(torch.zeros(4, 4), mesh, [Shard(0)])})
    if rank == 0:
        send(td, 1)
    else:
        recv(0, out=into)
        assert torch.equal(into["w"].to_local(), w[:2])
    other = TensorDict({"w": distribute_tensor(w, mesh, [Replicate()])})
    with pytest.raises(SchemaMismatch, match="dtensor"):
        send(td, 1) if rank == 0 else recv(0, out=other)
    with pytest.raises(TransferError, match="pass mesh="):
        send(td, 1) if rank == 0 else recv(0)
    square = init_device_mesh("cpu", (2, 1))
    with pytest.raises(TransferError, match=r"a shard of a mesh \[2\]"):
        send(td, 1) if rank == 0 else recv(0, mesh=square)
    weight = torch.nn.Parameter(distribute_tensor(w.clone(), mesh, [Shard(1)]))
    grad = TensorDict({"w": weight})
    if rank == 0:
        send(grad, 1)
    else:
        got = recv(0, mesh=mesh)["w"]
        assert got.requires_grad and got.is_leaf and torch.equal(got.to_local(), w[:, :2])
        recv_into = TensorDict({"w": torch.nn.Parameter(weight.detach().clone() * 0)})
    if rank == 0:
        send(grad, 1)
    else:
        mine = recv_into["w"]
        recv(0, out=recv_into)
        assert recv_into["w"] is mine and torch.equal(mine.to_local(), w[:, :2])


def test_shards_travel_with_their_layout():
    run_ranks(_shards, 2, reuse=False)


def _ring(rank, size, name):
    make = globals()[name]
    mine = make(torch.float32, rank)
    want = make(torch.float32, (rank - 1) % size)
    for _ in range(2):
        got = sendrecv(mine, (rank + 1) % size, (rank - 1) % size)
        assert picture(got) == picture(want)
    out = make(torch.float32, 99)
    sendrecv(mine, (rank + 1) % size, (rank - 1) % size, out=out)
    assert picture(out) == picture(want)
    return True


@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize("name", ["many", "large", "values", "nested_stack", "typed"])
def test_every_rank_of_a_ring_sends_and_receives(name, size):
    assert run_ranks(_ring, size, name) == [True] * size
