"""Point to point on real gloo ranks, the methods and the functions."""

import pytest
import torch
import torch.distributed as dist

from tensordict import NonTensorData, NonTensorStack, TensorDict, UnbatchedTensor
from tensordict.distributed import irecv, isend, recv, sendrecv
from tensordict.distributed.testing import run_ranks
from tensordict.errors import TransferError, UnsupportedLeaf

pytestmark = pytest.mark.ranks

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.uint64,
    torch.bool,
    torch.complex64,
    torch.complex128,
]


def sample(seed=0):
    g = torch.Generator().manual_seed(seed)
    td = TensorDict(
        {
            "w": torch.randn(4, 3, generator=g),
            "scalar": torch.randn((4,), generator=g)[:, None],
            "empty": torch.zeros(4, 0),
            "nested": TensorDict({"deep": TensorDict({"x": torch.arange(4)}, [4])}, [4]),
            "big": torch.randn(4, 160, 160, generator=g),
            "tag": "hello",
        },
        [4],
        names=["batch"],
    )
    for i, dtype in enumerate(DTYPES):
        bits = torch.randint(0, 2, (4, 3), generator=g)
        td["dtypes", f"d{i}"] = bits.to(dtype)
    return td


def same(a, b):
    assert sorted(map(str, a.keys(True, True))) == sorted(map(str, b.keys(True, True)))
    assert a.batch_size == b.batch_size and a.names == b.names and a.is_locked == b.is_locked
    for key, x in a.items(True, True):
        y = b.get(key)
        if isinstance(x, torch.Tensor):
            assert x.dtype is y.dtype and x.shape == y.shape and x.requires_grad == y.requires_grad
            left, right = (t.detach().contiguous().view(-1).view(torch.uint8) for t in (x, y))
            assert torch.equal(left, right), key
        else:
            assert x.tolist() == y.tolist() and x.batch_size == y.batch_size
    return True


def _new(rank, size):
    for _ in range(3):  # the second and third time by digest
        if rank == 0:
            sample().send(dst=1)
        else:
            assert same(recv(0), sample())


def test_a_new_tensordict_is_bit_equal():
    run_ranks(_new, 2)


def _into(rank, size):
    for seed in (1, 2):
        if rank == 0:
            assert sample(seed).send(dst=1) is None
        else:
            out = sample()
            big, w = out["big"], out["w"]
            n = len(list(out.filter_non_tensor_data().keys(True, True)))
            assert out.recv(src=0) == n - 1
            assert same(out, sample(seed)) and out["big"] is big and out["w"] is w


def test_an_existing_tensordict_is_written_in_place():
    run_ranks(_into, 2)


def _methods(rank, size):
    data = TensorDict({"a": torch.full((), float(rank)), ("b", "c"): torch.ones(())}, [])
    if rank == 1:
        assert data.isend(dst=0, init_tag=5) == 6
        works = data.isend(dst=0, return_early=True, pseudo_rand=True)
        assert isinstance(works, list)
        for work in works:
            work.wait()
        data.isend(dst=0, consolidated=True)
    else:
        assert data.irecv(src=1, init_tag=5) is None and data["a"] == 1
        data["a"].zero_()
        works = data.irecv(src=1, return_premature=True, pseudo_rand=True)
        for work in works:
            work.wait()
        assert data["a"] == 1
        data["a"].zero_()
        data.irecv(src=1, consolidated=True)
        assert data["a"] == 1


def test_the_methods_return_what_users_know():
    run_ranks(_methods, 2)


def _functions(rank, size):
    td = TensorDict({"a": torch.full((3,), float(rank))})
    if rank == 0:
        pending = [isend(td, 1, init_tag=t) for t in range(5)]
        assert [p.wait() for p in pending] == [None] * 5 and pending[0].done()
    else:
        pending = [irecv(0, init_tag=t) for t in range(5)]
        assert all(p.wait()["a"].eq(0).all() for p in pending)
    other = sendrecv(td, 1 - rank, 1 - rank)
    assert other["a"].eq(1 - rank).all()


def test_functions_return_handles_and_sendrecv_does_not_deadlock():
    run_ranks(_functions, 2)


def _group(rank, size):
    group = dist.new_group([1, 2])
    if rank == 1:
        TensorDict({"a": torch.ones(4)}, [4]).isend(dst=2, group=group)
    elif rank == 2:
        td = TensorDict({"a": torch.zeros(4)}, [4])
        td.irecv(src=1, group=group)
        assert td["a"].eq(1).all()
        td["a"].zero_()
    if rank == 1:
        TensorDict({"a": torch.ones(4)}, [4]).send(group=group, group_dst=1)
    elif rank == 2:
        td.recv(group=group, group_src=0)
        assert td["a"].eq(1).all()
    if rank == 1:
        with pytest.raises(ValueError, match="not one of the 2 ranks"):
            td = TensorDict({"a": torch.ones(4)}, [4]).send(dst=0, group=group)
    dist.barrier()


def test_subgroups_take_world_ranks_and_group_ranks():
    run_ranks(_group, 3)


def _mesh(rank, size):
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    td = TensorDict({"a": torch.full((2,), float(rank))})
    axis = mesh["tp"]
    if rank in (0, 2):
        td.send(group=axis, group_dst=1)
    else:
        td.recv(group=axis, group_src=0)
        assert td["a"].eq(rank - 1).all()
    with pytest.raises(TransferError, match="name an axis"):
        td.send(dst=0, group=mesh)


def test_a_mesh_axis_is_a_group():
    run_ranks(_mesh, 4, reuse=False)


def _by_key(rank, size):
    if rank == 0:
        TensorDict({"a": torch.ones(3), "b": torch.full((3,), 2.0), "s": "x"}).send(dst=1)
    else:
        td = TensorDict({"s": "y", "b": torch.zeros(3), "a": torch.zeros(3)})
        td.recv(src=0)
        assert td["a"].eq(1).all() and td["b"].eq(2).all() and td["s"] == "x"


def test_leaves_are_matched_by_key():
    run_ranks(_by_key, 2)


def _unsupported(rank, size):
    with pytest.raises(UnsupportedLeaf, match="type builtins") as caught:
        if rank == 0:
            TensorDict({"n": {"bad": NonTensorData(object())}}).send(dst=1)
        else:
            recv(0)
    assert caught.value.path == ("n", "bad")


def test_an_entry_that_cannot_travel_is_the_same_error_on_both_ranks():
    run_ranks(_unsupported, 2)


def _strided(rank, size):
    if rank == 0:
        grid = torch.arange(24.0).view(4, 6)
        TensorDict({"l": grid[:, :2], "t": grid.t()}).send(dst=1)
    else:
        grid = torch.zeros(4, 6)
        td = TensorDict({"l": grid[:, :2], "t": torch.zeros(4, 6).t()})
        td.recv(src=0)
        want = torch.arange(24.0).view(4, 6)
        assert torch.equal(td["l"], want[:, :2]) and torch.equal(td["t"], want.t())
        assert grid[:, 2:].eq(0).all()


def test_strided_leaves_are_read_and_written_through_their_strides():
    run_ranks(_strided, 2)


def _values(rank, size):
    values = [None, True, 2**70, 1.5, 2j, "s", b"b", [1], (1, [2]), {1}, {"k": (1,)}, slice(1, 2)]
    td = TensorDict({f"v{i}": NonTensorData(v) for i, v in enumerate(values)}, [])
    td["rows"] = NonTensorStack("a", ("b",), None)
    td["table"] = UnbatchedTensor(torch.arange(5, dtype=torch.bfloat16))
    if rank == 0:
        td.send(dst=1)
        for i in range(3):  # another value needs no other schema
            TensorDict({"step": i}).send(dst=1)
    else:
        got = recv(0)
        for i, value in enumerate(values):
            assert got[f"v{i}"] == value and type(got[f"v{i}"]) is type(value)
        assert got.get("rows").tolist() == ["a", ("b",), None]
        assert isinstance(got.get("table"), UnbatchedTensor)
        assert got["table"].dtype is torch.bfloat16 and got["table"].tolist() == [0, 1, 2, 3, 4]
        out = TensorDict({"step": 7})
        for i in range(3):
            out.recv(src=0)
            assert out["step"] == i


def test_non_tensor_values_travel():
    run_ranks(_values, 2)
