from __future__ import annotations

import json

import pytest
import safetensors.torch
import torch

from tensordict.errors import FileFormatError
from tensordict.storage.weight_files import new_file, read_weights

TENSORS = {
    "w": torch.randn(3, 4),
    "ü": torch.randn(4).to(torch.bfloat16),
    "h": torch.randn(2).half(),
    "i": torch.arange(3),
    "i32": torch.arange(3, dtype=torch.int32),
    "u64": torch.arange(3).to(torch.uint64),
    "empty": torch.zeros(0, 7),
    "scalar": torch.tensor(1.5, dtype=torch.float64),
    "mask": torch.tensor([True, False]),
    "f8": torch.ones(5).to(torch.float8_e4m3fn),
    "f8b": torch.ones(5).to(torch.float8_e5m2),
    "f4": torch.arange(8, dtype=torch.uint8).view(2, 4).view(torch.float4_e2m1fn_x2),
    "z": torch.randn(2, dtype=torch.complex64),
    "b": torch.arange(5, dtype=torch.uint8),
    "i8": torch.arange(5, dtype=torch.int8),
}


def raw(x):
    return x.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("metadata", [{}, {"format": "pt"}])
@pytest.mark.parametrize("names", [[], ["w"], list(TENSORS)], ids=["none", "one", "all"])
def test_a_new_file_is_laid_out_byte_for_byte_as_by_the_library(names, metadata):
    tensors = {name: TENSORS[name] for name in names}
    made = new_file([(k, x.dtype, x.shape) for k, x in tensors.items()], metadata)
    blob = made.head + b"".join(raw(tensors[name]) for name in made.names)
    assert blob == safetensors.torch.save(tensors, metadata or None)
    assert made.total_nbytes == len(blob)


def shards(folder, **index):
    safetensors.torch.save_file({"a": torch.zeros(2)}, folder / "m-1.safetensors")
    safetensors.torch.save_file({"b": torch.zeros(3)}, folder / "m-2.safetensors")
    where = {"a": "m-1.safetensors", "b": "m-2.safetensors", **index}
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {"total_size": 20}, "weight_map": where}))
    return path


def test_a_set_is_found_by_index_and_by_folder(tmp_path):
    path = shards(tmp_path)
    for given in (path, tmp_path):
        found = read_weights(given)
        assert found.path == path and list(found.headers) == ["m-1.safetensors", "m-2.safetensors"]
        assert [e.name for e in found.entries()] == ["a", "b"]
        assert found.index_metadata == {"total_size": 20}
        assert {k: x.shape for k, x in found.stand_ins().items()} == {"a": (2,), "b": (3,)}


def test_a_single_file_is_found_in_its_folder(tmp_path):
    path = tmp_path / "x.safetensors"
    safetensors.torch.save_file({"a": torch.zeros(2)}, path)
    for given in (path, tmp_path):
        assert read_weights(given).path == path and read_weights(given).index is None
    safetensors.torch.save_file({"a": torch.zeros(2)}, tmp_path / "y.safetensors")
    with pytest.raises(FileFormatError, match=r"x\.safetensors, y\.safetensors"):
        read_weights(tmp_path)


def test_nothing_to_find(tmp_path):
    with pytest.raises(FileNotFoundError, match="no safetensors file"):
        read_weights(tmp_path)


@pytest.mark.parametrize(
    ("index", "why"),
    [
        ({"a": "../m-1.safetensors"}, "no file beside it"),
        ({"a": "/etc/passwd"}, "no file beside it"),
        ({"a": 3}, "no file beside it"),
        ({"c": "m-1.safetensors"}, "'c' is not in m-1"),
        ({"a": "m-2.safetensors"}, "'a' is not in m-2"),
    ],
)
def test_an_index_that_lies_is_refused(tmp_path, index, why):
    with pytest.raises(FileFormatError, match=why):
        read_weights(shards(tmp_path, **index))


def test_an_index_that_leaves_tensors_out_is_refused(tmp_path):
    path = shards(tmp_path)
    path.write_text(json.dumps({"weight_map": {"a": "m-1.safetensors"}}))
    read_weights(path)  # a file that the index does not name is not of the set
    safetensors.torch.save_file(
        {"a": torch.zeros(2), "more": torch.zeros(1)}, tmp_path / "m-1.safetensors"
    )
    with pytest.raises(FileFormatError, match="'more' is in the index not under"):
        read_weights(path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": {}}', "[" * 100_000])
def test_an_index_that_is_none_is_refused(tmp_path, text):
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(text)
    with pytest.raises(FileFormatError, match="as an index"):
        read_weights(path)
