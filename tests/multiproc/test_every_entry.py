"""Every dtype of torch and every kind of entry on real ranks: bits and metadata arrive as they left."""

import numpy as np
import pytest
import torch
from tests.multiproc.pictures import differences, picture, unlocked
from torch import nn

from tensordict import (
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictParams,
    UnbatchedTensor,
    lazy_stack,
    tensorclass,
)
from tensordict.core.traverse import leaves
from tensordict.distributed import all_gather, broadcast, recv, send
from tensordict.distributed.testing import run_ranks
from tensordict.errors import UnsupportedLeaf

pytestmark = pytest.mark.ranks

QUANTIZED = {torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4}
DTYPES = sorted(
    {d for d in vars(torch).values() if isinstance(d, torch.dtype)} - QUANTIZED, key=str
)


@tensorclass
class Sample:
    x: torch.Tensor
    y: torch.Tensor
    label: str = "p"


# --- dtypes -------------------------------------------------------------------------------


def of_dtype(dtype, seed):
    """Without a dimension, without an element, packed, alone."""
    generator = torch.Generator().manual_seed(seed)

    def leaf(*shape):
        n = torch.Size(shape).numel() * dtype.itemsize
        high = 2 if dtype is torch.bool else 120
        raw = torch.randint(0, high, (n,), generator=generator, dtype=torch.uint8)
        return raw.view(dtype).reshape(shape)

    return TensorDict(
        {
            "scalar": leaf(),
            "none": leaf(0, 3),
            "n": {"small": leaf(2, 3), **{f"k{i}": leaf(5) for i in range(5)}},
            "large": leaf(70_000),
        }
    )


def _dtypes(rank, size):
    assert len(DTYPES) > 30
    for dtype in DTYPES:
        td, want = of_dtype(dtype, 1), picture(of_dtype(dtype, 1))
        for form in ("new", "into", "one message", "broadcast", "all_gather"):
            out = of_dtype(dtype, 2)
            got = None
            if form == "broadcast":
                got = broadcast(td if rank == 0 else None, 0)
            elif form == "all_gather":
                got = all_gather(td)[1 - rank]
            elif rank == 0:
                td.send(dst=1, consolidated=form == "one message")
            elif form == "new":
                got = recv(0)
            else:
                out.recv(src=0, consolidated=form == "one message")
                got = out
            if got is not None:
                assert picture(got) == want, (dtype, form)


def test_every_dtype_in_every_form():
    run_ranks(_dtypes, 2)


# --- structures ---------------------------------------------------------------------------


def _jagged(seed):
    torch.manual_seed(seed)
    parts = [torch.randn(2, 3), torch.randn(4, 3)]
    return torch.nested.as_nested_tensor(parts, layout=torch.jagged)


def _holes(seed):
    torch.manual_seed(seed)
    return torch.nested.nested_tensor_from_jagged(
        torch.randn(10, 3), torch.tensor([0, 4, 10]), torch.tensor([2, 5])
    )


def _eye(seed):
    return torch.eye(4) * (seed + 1)


def _complex(n, seed):
    torch.manual_seed(seed)
    return torch.randn(n, dtype=torch.complex64).conj()


def _twice(seed):
    return torch.sparse_coo_tensor(
        torch.tensor([[0, 0], [1, 1]]), torch.tensor([1.0, 2.0 + seed]), (2, 2)
    )


VALUES = [
    *(None, True, 0, -5, 2**70, 1.5, float("inf"), 2j, "s", "", "\ud800", b"b\0"),
    *([1, [2]], (1, [2]), {1, 2}, frozenset([1]), {"k": (1,), 3: 4}, slice(1, 2), range(3)),
    *(torch.float8_e5m2, torch.device("cpu"), torch.Size([1, 2])),
    *(np.float32(1.5), np.arange(3), np.array(["a", "bc"]), np.datetime64("2020-01-01")),
]


def _alone(leaf):
    """One leaf and nothing beside it: no plain leaf hides how it is found."""
    return TensorDict({"x": leaf})


def _ragged_stack(seed):
    return lazy_stack([TensorDict({"a": torch.full((n,), float(seed))}) for n in (1, 2, 3)])


def _odd_keys(seed):
    td = TensorDict()
    for key in ("", "a.b", "\0", "\ud800", "ключ", "a" * 500):
        td._store(key, torch.full((1,), float(seed)))
    return td


def _deep(seed):
    td = TensorDict({"x": torch.full((1,), float(seed))})
    for _ in range(60):
        td = TensorDict({"n": td, "x": torch.full((1,), float(seed))})
    return td


def _params(seed):
    torch.manual_seed(seed)
    shared = nn.Parameter(torch.randn(3), requires_grad=False)
    return TensorDictParams(
        TensorDict({"w": torch.randn(3), "n": {"b": nn.Buffer(torch.randn(2)), "f": shared}})
    )


STRUCTURES = {
    "no entry": lambda s: TensorDict({}, [3, 0]),
    "no leaf": lambda s: TensorDict({"a": {"b": {"c": {}}}}),
    "no element": lambda s: TensorDict(
        {"x": torch.zeros(0, 4), "n": TensorDict({"y": torch.zeros(0, 2, 3)}, [0, 2])}, [0]
    ),
    "2,000 leaves": lambda s: TensorDict({f"k{i}": torch.full((2,), s + i) for i in range(2000)}),
    "60 levels": _deep,
    "keys of all kinds": _odd_keys,
    "conjugate": lambda s: TensorDict({"small": _complex(5, s), "large": _complex(60_000, s)}),
    "negative": lambda s: TensorDict(
        {"small": _complex(5, s).imag, "large": _complex(60_000, s).imag}
    ),
    "strided": lambda s: TensorDict(
        {
            "a": (torch.arange(24.0) + s).view(4, 6)[::2, 1::2],
            "t": (torch.arange(60_000.0) + s).view(300, 200).t(),
        }
    ),
    "channels last": lambda s: TensorDict(
        {
            "2d": (torch.arange(120.0) + s)
            .view(2, 3, 4, 5)
            .contiguous(memory_format=torch.channels_last),
            "3d": (torch.arange(240.0) + s)
            .view(2, 3, 4, 5, 2)
            .contiguous(memory_format=torch.channels_last_3d),
            "large": (torch.arange(60_000.0) + s)
            .view(2, 30, 25, 40)
            .contiguous(memory_format=torch.channels_last),
        },
        [2],
    ),
    "jagged": lambda s: TensorDict({"j": _jagged(s), "x": torch.full((2,), s)}, [2]),
    "jagged, of common offsets": lambda s: TensorDict(
        {"j": (rows := _jagged(s)), "k": rows * 2, "values": rows.values()}, []
    ),
    "jagged with holes": lambda s: TensorDict({"j": _holes(s)}, [2]),
    "jagged in another dimension": lambda s: TensorDict({"j": _jagged(s).transpose(1, 2)}, [2]),
    "jagged with grad": lambda s: TensorDict({"j": _jagged(s).requires_grad_()}, [2]),
    "sparse coo": lambda s: _alone(_eye(s).to_sparse()),
    "sparse coo with grad": lambda s: _alone(_eye(s).to_sparse().requires_grad_()),
    "sparse coo, not coalesced": lambda s: _alone(_twice(s)),
    "sparse csr": lambda s: _alone(_eye(s).to_sparse_csr()),
    "sparse csc": lambda s: _alone(_eye(s).to_sparse_csc()),
    "sparse bsr": lambda s: _alone(_eye(s).to_sparse_bsr((2, 2))),
    "sparse bsc": lambda s: TensorDict({"x": _eye(s).to_sparse_bsc((2, 2)), "y": torch.ones(3)}),
    "grad": lambda s: TensorDict(
        {"w": torch.full((3,), float(s), requires_grad=True), "p": nn.Parameter(torch.ones(2) * s)}
    ),
    "parameters": _params,
    "names": lambda s: TensorDict(
        {"n": TensorDict({"y": torch.full((2, 3, 4), s)}, [2, 3, 4], names=["a", "b", "c"])},
        [2, 3],
        names=["a", None],
    ),
    "values": lambda s: TensorDict({f"v{i}": NonTensorData(v) for i, v in enumerate(VALUES)}),
    "rows of values": lambda s: TensorDict(
        {
            "one": NonTensorData("x", batch_size=[3]),
            "each": NonTensorStack("a", (s, 2), None),
            "grid": NonTensorStack(*[NonTensorStack("a", s) for _ in range(3)]),
            "table": UnbatchedTensor(torch.arange(5) + s),
        },
        [3],
    ),
    "class": lambda s: Sample(x=torch.full((2,), s), y=torch.zeros(2), label=f"{s}", batch_size=2),
    "stack": _ragged_stack,
    "stack in dimension 1": lambda s: lazy_stack(
        [TensorDict({"a": torch.full((2, n), s)}, [2]) for n in (1, 2, 3)], 1
    ),
    "stack of other keys": lambda s: lazy_stack(
        [TensorDict({"a": torch.full((1,), s)}), TensorDict({"b": torch.zeros(1), "v": f"{s}"})]
    ),
    "stack of stacks": lambda s: lazy_stack([_ragged_stack(s), _ragged_stack(s + 1)]),
    "stack of classes": lambda s: lazy_stack(
        [Sample(x=torch.full((n,), s), y=torch.zeros(()), batch_size=[]) for n in (1, 2)]
    ),
    "locked stack": lambda s: _ragged_stack(s).lock_(),
    "consolidated": lambda s: TensorDict(
        {"a": torch.arange(5) + s, "n": {"b": torch.ones(3)}, "s": f"{s}"}
    ).consolidate(),
    "rows of another": lambda s: TensorDict(
        {"a": torch.arange(6).view(3, 2) + s, "n": {"b": torch.ones(3)}}, [3]
    )[1:],
}

FORMS = {
    "new": lambda td, out, rank: send(td, 1) if rank == 0 else recv(0),
    "new, known": lambda td, out, rank: send(td, 1) if rank == 0 else recv(0),
    "into": lambda td, out, rank: send(td, 1) if rank == 0 else recv(0, out=out),
    "into, by key": lambda td, out, rank: send(td, 1) if rank == 0 else recv(0, out=_turned(out)),
    "into, in place": lambda td, out, rank: (
        send(td, 1) if rank == 0 else recv(0, out=out, atomic=False)
    ),
    "one message": lambda td, out, rank: (
        td.send(dst=1, consolidated=True) if rank == 0 else _into(out)
    ),
    "unasked": lambda td, out, rank: send(td, 1, strict=False) if rank == 0 else recv(0),
    "summed": lambda td, out, rank: send(td, 1, checksum="sum64") if rank == 0 else recv(0),
    "one of a list": lambda td, out, rank: (
        send([td, TensorDict(a=1)], 1) if rank == 0 else recv(0)[0]
    ),
    "init_remote": lambda td, out, rank: (
        td.init_remote(dst=1) if rank == 0 else TensorDict.from_remote_init(src=0)
    ),
    "broadcast": lambda td, out, rank: broadcast(td if rank == 0 else None, 0),
    "all_gather": lambda td, out, rank: all_gather(td)[1 - rank],
}
UNLOCKED = {"init_remote", "broadcast", "all_gather"}


def _into(out):
    out.recv(src=0, consolidated=True)
    return out


def _turned(node):
    """The same entries, those of plain tensordicts in the opposite order."""
    if type(node) is not TensorDict:
        return node
    out = TensorDict({}, node.batch_size, names=node.names)
    for name, entry in reversed(list(node._items())):
        out._store(name, _turned(entry))
    return out.lock_() if node.is_locked else out


def _every_form(rank, size, name):
    make = STRUCTURES[name]
    td = make(1)
    want = picture(td)
    assert name in ("no entry", "no leaf", "no element", "values") or picture(make(2)) != want
    for form, call in FORMS.items():
        got = call(td, make(2), rank)
        shown = want
        if got is not None:
            mine = picture(got)
            if form in UNLOCKED:
                mine, shown = unlocked(mine), unlocked(want)
            assert not differences(mine, shown), (name, form)
            for x, y in zip(leaves(got), leaves(td)):
                assert x.is_leaf or not x.requires_grad
                assert name != "parameters" or type(x) is type(y)
    assert not differences(picture(td), want)


@pytest.mark.parametrize("name", list(STRUCTURES))
def test_every_structure_in_every_form(name):
    run_ranks(_every_form, 2, name)


# --- what cannot travel -------------------------------------------------------------------

UNSUPPORTED = {
    "a quantized tensor": lambda: torch._empty_affine_quantized(
        (2, 3), scale=1.0, zero_point=0, dtype=torch.qint8
    ),
    "a nested tensor of strided layout": lambda: torch.nested.nested_tensor([torch.ones(2)] * 2),
    "a tensor on the meta device": lambda: torch.ones(3, device="meta"),
    "a value of type builtins.object": lambda: NonTensorData(object()),
    "a NumPy value of dtype object": lambda: NonTensorData(np.array([object()])),
}


def _unsupported(rank, size, reason):
    td = TensorDict({"n": {"bad": UNSUPPORTED[reason]()}, "x": torch.ones(3)})
    texts = []
    for form in FORMS:
        with pytest.raises(UnsupportedLeaf) as caught:
            FORMS[form](td, TensorDict({"x": torch.zeros(3)}), rank)
        at = ("0", "n", "bad") if form == "one of a list" else ("n", "bad")
        assert caught.value.path == at and reason in str(caught.value), form
        texts.append(str(caught.value))
    assert FORMS["new"](TensorDict(x=1), None, rank) is None or rank == 1
    return texts


@pytest.mark.parametrize("reason", list(UNSUPPORTED))
def test_what_cannot_travel_is_the_same_error_on_both_ranks(reason):
    first, second = run_ranks(_unsupported, 2, reason)
    assert first == second
