from __future__ import annotations

import pytest
import safetensors.torch
import torch

from tensordict import TensorDict
from tensordict.errors import UnsupportedLeaf
from tensordict.storage.named import from_safetensors, named_tensors, to_safetensors, tree_of


def test_round_trip_with_the_library(tmp_path):
    td = TensorDict({"a": torch.randn(3), "n": {"b": torch.arange(3), "m": {"c": torch.ones(1)}}})
    to_safetensors(td, tmp_path / "x.safetensors")
    flat = safetensors.torch.load_file(tmp_path / "x.safetensors")
    assert set(flat) == {"a", "n.b", "n.m.c"} and torch.equal(flat["n.b"], td["n", "b"])
    back = from_safetensors(tmp_path / "x.safetensors")
    assert type(back) is TensorDict and back.batch_size == ()
    assert set(back.keys(True, True)) == {"a", ("n", "b"), ("n", "m", "c")}
    assert torch.equal(back["a"], td["a"])


def test_names_that_no_tree_has_stay_flat(tmp_path):
    flat = {"a": torch.zeros(2), "a.b": torch.ones(2), "c.d": torch.ones(1)}
    assert set(tree_of(flat).keys(True, True)) == set(flat)


def test_a_name_made_of_dots_is_no_tree():
    name = "." * 1_000_000
    assert list(tree_of({name: torch.zeros(1), "a.b": torch.zeros(1)}).keys()) == [name, "a.b"]


def test_odd_names():
    td = tree_of({"": torch.zeros(1), "x..y": torch.ones(1), ".": torch.ones(1)})
    assert named_tensors(td).keys() == {"", "x..y", "."}


def test_what_is_no_tensor_is_refused_before_writing(tmp_path):
    with pytest.raises(UnsupportedLeaf, match=r"\('n', 's'\).*NonTensorData"):
        to_safetensors(TensorDict({"n": {"s": "text"}}), tmp_path / "x.safetensors")
    td = TensorDict({"a": {"b": torch.zeros(1)}, "a.b": torch.zeros(1)})
    with pytest.raises(UnsupportedLeaf, match="second tensor"):
        to_safetensors(td, tmp_path / "x.safetensors")
    assert not list(tmp_path.iterdir())


def test_a_consolidated_tree_is_written_from_its_buffer(tmp_path):
    td = TensorDict({"a": torch.randn(3), "n": {"b": torch.arange(3)}}).consolidate()
    to_safetensors(td, tmp_path / "x.safetensors")
    assert torch.equal(from_safetensors(tmp_path / "x.safetensors")["n", "b"], td["n", "b"])
