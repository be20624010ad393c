from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from tensordict import NonTensorStack, TensorDict, lazy_stack, tensorclass
from tensordict.core.traverse import leaves_with_path
from tensordict.errors import FileFormatError, UnsupportedLeaf

DATA = Path(__file__).parent / "data"


@tensorclass
class Sample:
    a: torch.Tensor
    word: str


def tree():
    w = torch.randn(3)
    return TensorDict(
        {
            "n": {"b": torch.tensor([True, False, True]), "m": {}},
            "a": torch.arange(6.0).view(3, 2),
            "tie": w,
            "w": w,
            "h": torch.ones(3, dtype=torch.bfloat16),
            "z": torch.randn(3, dtype=torch.complex128),
            "word": "hello",
            "words": NonTensorStack("x", ("y", 1), b"z"),
            "empty": torch.zeros(3, 0),
        },
        batch_size=[3],
        names=["time"],
        device="cpu",
    )


def description(path):
    blob = path.read_bytes()
    n = int.from_bytes(blob[-8:], "little")
    return blob[: -8 - n], json.loads(blob[-8 - n : -8])


def bits(td):
    return {path: (x.dtype, x.shape, x.tolist()) for path, x in leaves_with_path(td)}


def test_round_trip(tmp_path):
    td, path = tree(), tmp_path / "x.td"
    assert td.consolidate(path).is_consolidated() and os.listdir(tmp_path) == ["x.td"]
    back = TensorDict.from_consolidated(path)
    assert type(back) is TensorDict and back.is_consolidated() and back.is_locked
    assert bits(back) == bits(td)
    assert back.batch_size == (3,) and back.names == ["time"] and back.device.type == "cpu"
    assert back["word"] == "hello" and back["words"] == ["x", ("y", 1), b"z"]
    assert back["w"].data_ptr() == back["tie"].data_ptr()
    assert ("n", "m") in back.keys(True)


def test_the_form_of_the_file(tmp_path):
    path = tmp_path / "x.td"
    td = TensorDict({"a": torch.arange(3.0), "n": {"i": torch.arange(3).char()}, "s": "t"}, [3])
    td.consolidate(path)
    data, form = description(path)
    assert len(data) == 128
    assert data[:12] == torch.arange(3.0).numpy().tobytes() and data[64:67] == b"\0\1\2"
    metadata = {"batch_size": [3], "device": None, "names": [None], "is_locked": True}
    assert form == {
        "cls": "TensorDict",
        "non_tensors": {"s": ["t", [3], None]},
        "leaves": {"a": ["torch.float32", [3], 0, 64, 52]},
        "cls_metadata": metadata,
        "n": {
            "cls": "TensorDict",
            "non_tensors": {},
            "leaves": {"i": ["torch.int8", [3], 64, 128, 61]},
            "cls_metadata": metadata,
        },
    }


def test_the_file_is_mapped_and_stays_as_it_is(tmp_path):
    path = tmp_path / "x.td"
    TensorDict({"a": torch.ones(1000)}).consolidate(path)
    before = path.read_bytes()
    back = TensorDict.from_consolidated(path)
    with open("/proc/self/maps") as file:
        assert str(path) in file.read()
    back["a"].zero_()
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "make",
    [
        lambda: lazy_stack([TensorDict({"a": torch.ones(n), "w": "x"}) for n in (2, 3)]),
        lambda: Sample(a=torch.ones(3), word="hi", batch_size=[3]),
        lambda: TensorDict(
            {"t": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)},
            [2],
        ),
        lambda: TensorDict({}, [4]),
        lambda: TensorDict(
            {"s": NonTensorStack(NonTensorStack("a", "b"), NonTensorStack("c", "d"))}
        ),
    ],
    ids=["lazy", "tensorclass", "jagged", "empty", "stack"],
)
def test_every_kind(tmp_path, make):
    td, path = make(), tmp_path / "x.td"
    td.consolidate(path)
    back = TensorDict.from_consolidated(path)
    assert type(back) is type(td) and back.batch_size == td.batch_size
    for (key, x), (other, y) in zip(leaves_with_path(td), leaves_with_path(back)):
        assert key == other and x.layout is y.layout
        pairs = zip(x.unbind(), y.unbind()) if x.is_nested else [(x, y)]
        assert all(torch.equal(a, b) for a, b in pairs)
    assert str(back.tolist() if hasattr(back, "tolist") else back)


def test_files_of_0_15():
    td = TensorDict.from_consolidated(DATA / "consolidated_0_15_plain.td")
    assert td.is_consolidated() and td.names == ["t"] and td["s"] == "hello"
    assert td["a"].tolist() == [[0, 1], [2, 3], [4, 5]] and td["h"].dtype is torch.bfloat16
    assert td["n", "b"].tolist() == [True, False, True] and td["i"].tolist() == [0, 1, 2]
    td = TensorDict.from_consolidated(DATA / "consolidated_0_15_values.td")
    assert td["l"] == ["x", "y"] and td["num"] == 3 and td["a"].tolist() == [0, 0]
    td = TensorDict.from_consolidated(DATA / "consolidated_0_15_jagged.td")
    assert [x.tolist() for x in td["a"].unbind()] == [[1, 1], [1, 1, 1]]
    td = TensorDict.from_consolidated(DATA / "consolidated_0_15_lazy.td")
    assert td[0]["a"].tolist() == [0, 0] and td[1]["a"].tolist() == [1, 1, 1]


def test_what_the_file_has_no_place_for_is_refused_before_writing(tmp_path):
    path = tmp_path / "x.td"
    path.write_bytes(b"old")
    for source, what in (
        ({"o": object()}, "'o'"),
        ({"leaves": {"a": torch.ones(1)}}, "'leaves'"),
        ({"n": {"cls": NonTensorStack("a")}}, "cls"),
        ({"s": torch.eye(2).to_sparse()}, "sparse_coo"),
    ):
        with pytest.raises(UnsupportedLeaf, match=what):
            TensorDict(source).consolidate(path)
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["x.td"]


def write(path, form, data=b""):
    text = form if isinstance(form, bytes) else json.dumps(form).encode()
    path.write_bytes(data + text + len(text).to_bytes(8, "little"))


def node(leaves=(), **more):
    metadata = {"batch_size": [], "device": None, "names": [], "is_locked": False}
    return {
        "cls": "TensorDict",
        "non_tensors": {},
        "leaves": dict(leaves),
        "cls_metadata": metadata,
        **more,
    }


@pytest.mark.parametrize(
    ("form", "why"),
    [
        (b"{nope}", "JSON"),
        (b"[" * 100_000, "JSON"),
        ([], "wrong"),
        ({}, "wrong"),
        (node(cls_metadata={}), "wrong"),
        (node(n=3), "wrong"),
        (node({"a": ["torch.float32", [2], 0, 8, 1]}), "lies at"),
        (node({"a": ["torch.float32", [2], 8, 16, 0]}), "lies at"),
        (node({"a": ["torch.float32", [-2], 8, 0, 0]}), "lies at"),
        (node({"a": ["torch.nonsense", [2], 0, 8, 0]}), "wrong"),
        (node({"a": ["os.system", [2], 0, 8, 0]}), "wrong"),
        (node({"a": []}), "wrong"),
        (
            {
                **node({"a": ["torch.float32", [2], 0, 8, 0]}),
                "cls_metadata": {"batch_size": [3], "device": None, "names": [None]},
            },
            "batch of",
        ),
    ],
)
def test_a_file_that_lies_is_refused(tmp_path, form, why):
    path = tmp_path / "x.td"
    write(path, form, bytes(8))
    with pytest.raises(FileFormatError, match=why):
        TensorDict.from_consolidated(path)


def test_leaves_at_any_byte_are_copied_into_place(tmp_path):
    z = torch.tensor([1 + 2j], dtype=torch.complex128)
    data = b"\7" + bytes(7) + z.numpy().tobytes()
    leaves = {"i": ["torch.int8", [1], 0, 8, 7], "z": ["torch.complex128", [1], 8, 24, 0]}
    write(tmp_path / "x.td", node(leaves), data)
    td = TensorDict.from_consolidated(tmp_path / "x.td")
    assert td.is_consolidated() and td["i"].tolist() == [7] and torch.equal(td["z"], z)


def test_an_unknown_class_is_named(tmp_path):
    write(tmp_path / "x.td", {**node(), "cls": "os:system"})
    with pytest.raises(TypeError, match="os:system"):
        TensorDict.from_consolidated(tmp_path / "x.td")


def test_a_cut_file_is_refused(tmp_path):
    path = tmp_path / "x.td"
    tree().consolidate(path)
    blob = path.read_bytes()
    for cut in (0, 5, 100, len(blob) - 1):
        path.write_bytes(blob[:cut])
        with pytest.raises(FileFormatError):
            TensorDict.from_consolidated(path)
