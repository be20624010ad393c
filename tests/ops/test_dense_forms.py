"""densify and to_padded_tensor: the same content without lazy stacks and ragged entries."""

from __future__ import annotations

import pytest
import torch

from tensordict import LazyStackedTensorDict, TensorDict, lazy_stack


def jagged(*lengths):
    return torch.nested.as_nested_tensor(
        [torch.full((n,), n) for n in lengths], layout=torch.jagged
    )


def test_densify_leaves_no_stack():
    rows = [TensorDict({"a": torch.full((2,), i), "s": str(i)}) for i in range(3)]
    td = TensorDict({"n": lazy_stack(rows), "y": torch.arange(3)}, [3], names=["x"])
    out = td.densify()
    assert type(out["n"]) is TensorDict and out.names == ["x"]
    assert out["n", "a"][:, 0].tolist() == [0, 1, 2] and list(out["n", "s"]) == ["0", "1", "2"]
    assert out["y"] is td["y"] and type(td["n"]) is LazyStackedTensorDict


def test_densify_makes_ragged_entries_nested():
    rows = lazy_stack([TensorDict(a=torch.full((n,), n)) for n in (1, 3)])
    out = rows.densify(layout=torch.jagged)
    assert [x.tolist() for x in out["a"].unbind()] == [[1], [3, 3, 3]]


def test_nested_tensors_are_padded():
    td = TensorDict({"ids": jagged(3, 1), "n": {"z": jagged(1, 2)}, "y": torch.arange(2)}, [2])
    out = td.to_padded_tensor(7)
    assert out["ids"].tolist() == [[3, 3, 3], [1, 7, 7]]
    assert out["n", "z"].tolist() == [[1, 7], [2, 2]] and out["y"] is td["y"]
    with pytest.raises(RuntimeError, match="mask_key"):
        td.to_padded_tensor(mask_key="m")


def test_ragged_rows_of_a_stack_are_padded():
    rows = lazy_stack([TensorDict({"a": torch.full((n, 2), n), "s": str(n)}) for n in (1, 2)])
    out = rows.to_padded_tensor(-1)
    assert type(out) is TensorDict and out.batch_size == (2,)
    assert out["a"][..., 0].tolist() == [[1, -1], [2, 2]] and list(out["s"]) == ["1", "2"]


def test_ragged_batches_are_padded_with_a_mask():
    parts = [TensorDict({"a": torch.ones(n), "n": {"b": torch.ones(n, n)}}, [n]) for n in (1, 3)]
    rows = lazy_stack(parts)
    assert -1 in rows.batch_size
    out = rows.to_padded_tensor(9.0, mask_key=("masks", "real"))
    assert out.batch_size == out["n"].batch_size == (2, 3)
    assert out["a"].tolist() == [[1, 9, 9], [1, 1, 1]]
    assert out["masks", "real"].tolist() == [[True, False, False], [True] * 3]
    assert out["n", "b"].shape == (2, 3, 3) and (out["n", "b"][0, 1:] == 9).all()
    assert out["n", "b"][0, 0].tolist() == [1, 9, 9]
