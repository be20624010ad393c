from __future__ import annotations

import copy
import io
import pickle
import pickletools

import pytest
import torch

from tensordict import (
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictParams,
    UnbatchedTensor,
    lazy_stack,
    tensorclass,
)
from tensordict.core.traverse import leaves_with_path
from tensordict.errors import FileFormatError
from tensordict.storage.reduce import rebuild


def tree(**more):
    return TensorDict(
        {
            "a": torch.randn(3),
            "n": {"b": torch.arange(3), "m": {}},
            "word": "hello",
            "words": NonTensorStack("x", "y", "z"),
            **more,
        },
        batch_size=[3],
        names=["time"],
        device="cpu",
    )


def saved(td, weights_only):
    buf = io.BytesIO()
    torch.save(td, buf)
    buf.seek(0)
    return torch.load(buf, weights_only=weights_only)


WAYS = {
    **{f"protocol {n}": lambda td, n=n: pickle.loads(pickle.dumps(td, n)) for n in range(2, 6)},
    "torch.save": lambda td: saved(td, False),
    "weights_only": lambda td: saved(td, True),
    "deepcopy": copy.deepcopy,
}


@pytest.fixture(params=WAYS)
def way(request):
    return WAYS[request.param]


def test_everything_comes_back(way):
    td = tree()
    back = way(td)
    assert type(back) is TensorDict and type(back["n"]) is TensorDict
    assert back.batch_size == (3,) and back.names == ["time"] and back.device.type == "cpu"
    assert back["n"].batch_size == (3,) and back["n"].names == td["n"].names
    assert list(back.keys(True)) == list(td.keys(True))
    assert torch.equal(back["a"], td["a"]) and torch.equal(back["n", "b"], td["n", "b"])
    assert back["word"] == "hello" and back["words"] == ["x", "y", "z"]
    assert back.get("word").batch_size == (3,)
    back["a"].zero_()
    assert td["a"].abs().sum() > 0


def test_ties_stay_ties_and_flags_stay(way):
    w = torch.randn(3)
    td = tree(
        w=w,
        tie=w,
        p=torch.nn.Parameter(torch.ones(3)),
        g=torch.ones(3, requires_grad=True),
        t=torch.randn(4, 3).t(),
        half=torch.ones(3).bfloat16(),
    )
    back = way(td)
    assert back["w"].data_ptr() == back["tie"].data_ptr()
    assert type(back["p"]) is torch.nn.Parameter and back["g"].requires_grad
    assert not back["w"].requires_grad
    assert torch.equal(back["t"], td["t"]) and back["half"].dtype is torch.bfloat16


@pytest.mark.parametrize("name", [w for w in WAYS if w != "deepcopy"])
def test_locks_come_back(name):
    back = WAYS[name](tree().lock_())
    assert back.is_locked and back["n"].is_locked
    td = tree()
    td["n"].lock_()
    back = WAYS[name](td)
    assert not back.is_locked and back["n"].is_locked


@pytest.mark.parametrize("name", [w for w in WAYS if w != "deepcopy"])
def test_consolidation_comes_back(name):
    back = WAYS[name](tree().consolidate())
    assert back.is_consolidated() and back.is_locked
    places = {back[k].untyped_storage().data_ptr() for k in ("a", ("n", "b"))}
    assert len(places) == 1


@tensorclass
class Sample:
    a: torch.Tensor
    word: str


KINDS = {
    "lazy": lambda: lazy_stack(
        [TensorDict({"a": torch.zeros(n), "w": "x"}) for n in (2, 3)]  # a ragged one
    ),
    "tensorclass": lambda: Sample(a=torch.ones(3), word="hi", batch_size=[3]),
    "params": lambda: TensorDictParams(TensorDict({"a": torch.ones(3), "n": {"b": torch.ones(1)}})),
    "mixed": lambda: TensorDict(
        {
            "l": lazy_stack([TensorDict({"a": torch.zeros(2)}) for _ in range(2)]),
            "s": Sample(a=torch.ones(2), word="hi", batch_size=[2]),
        },
        [2],
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_node_comes_back(kind, way):
    td = KINDS[kind]()
    back = way(td)
    assert type(back) is type(td) and back.batch_size == td.batch_size
    assert bits(back) == bits(td)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [w for w in WAYS if w != "deepcopy"])
def test_every_kind_of_node_comes_back_consolidated(kind, name):
    td = KINDS[kind]()
    back = WAYS[name](td.consolidate())
    assert back.is_consolidated() and back.batch_size == td.batch_size
    assert bits(back) == bits(td)
    same = KINDS[kind]()
    assert same.consolidate(inplace=True) is same and same.is_consolidated()
    assert bits(same) == bits(td)


def test_tensors_beside_the_batch_and_attributes_come_back(way):
    td = TensorDict({"u": UnbatchedTensor(torch.arange(5.0)), "a": torch.zeros(3)}, [3])
    back = way(td)
    assert back["u"].tolist() == [0, 1, 2, 3, 4] and back.get("u").batch_size == (3,)
    assert way(td.attrs())["a"] == td.attrs()["a"]


def bits(td):
    return [(path, x.dtype, x.shape, x.tolist()) for path, x in leaves_with_path(td)]


def test_copies_are_unlocked_and_not_consolidated():
    for td in (tree().lock_(), tree().consolidate()):
        for other in (copy.copy(td), copy.deepcopy(td)):
            assert not other.is_locked and not other.is_consolidated()
    td = tree()
    assert copy.copy(td)["a"] is td["a"] and copy.copy(td)["n"] is not td["n"]


def test_deepcopy_shares_its_memo():
    w, values = torch.ones(3), [1, 2]
    td = TensorDict({"w": w, "v": NonTensorData(values)})
    td2, w2, v2 = copy.deepcopy((td, w, values))
    assert td2["w"] is w2 and td2["w"] is not w and td2["v"] is v2


@pytest.mark.parametrize("make", [lambda td: td, lambda td: td.consolidate()])
def test_a_pickle_holds_one_block_of_bytes_and_no_storage(make):
    td = make(TensorDict({str(i): torch.full((10,), i) for i in range(200)}))
    data = pickle.dumps(td)
    names = [arg for _, arg, _ in pickletools.genops(data) if isinstance(arg, str)]
    assert "tensordict.storage.reduce" in names
    assert not any("_rebuild" in name or "torch.storage" in name for name in names)
    payload = 200 * 128  # 80 bytes each, aligned to 64
    assert len(data) < payload + 200 * 60
    buffers = []
    data = pickle.dumps(td, 5, buffer_callback=buffers.append)
    assert len(buffers) == 1 and buffers[0].raw().nbytes == payload and len(data) < 200 * 60
    back = pickle.loads(data, buffers=buffers)
    assert torch.equal(back["7"], td["7"])


def test_read_only_and_unaligned_buffers_are_copied():
    td = TensorDict({"z": torch.randn(4, dtype=torch.complex128)})
    buffers = []
    data = pickle.dumps(td, 5, buffer_callback=buffers.append)
    raw = buffers[0].raw().tobytes()
    for buffer in (raw, memoryview(bytearray(b"x" + raw))[1:]):
        back = pickle.loads(data, buffers=[buffer])
        assert torch.equal(back["z"], td["z"])
        back["z"].zero_()
        assert bytes(buffer) == raw


def test_torch_save_keeps_sharing_with_the_rest_of_a_checkpoint():
    w = torch.randn(1000)
    back = saved({"td": TensorDict({"w": w}), "w": w}, True)
    assert back["td"]["w"].data_ptr() == back["w"].data_ptr()


def test_rows_that_name_no_node_are_refused():
    with pytest.raises(FileFormatError, match="not a class of nodes"):
        rebuild([(dict, {}, False, {})], [])
