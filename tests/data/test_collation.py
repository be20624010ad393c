"""Samples to a batch, with and without a DataLoader."""

from collections import namedtuple
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, default_collate

from tensordict import (
    LazyStackedTensorDict,
    TensorClass,
    TensorDict,
    collate,
    lazy_stack,
)


class Sample(TensorClass):
    features: Tensor


class Longer(Sample):
    pass


class Wider(Sample):
    more: Tensor = None


def clouds():
    return [TensorDict({"points": torch.randn(n, 3)}) for n in (5, 2, 7, 3)]


def keep(batch):
    return batch


def test_the_examples_of_the_documentation():
    torch.manual_seed(0)
    data = TensorDict(
        {"image": torch.randn(10, 1, 8, 8), "label": torch.arange(10)}, batch_size=[10]
    )
    loader = DataLoader(data, batch_size=4, shuffle=True, collate_fn=keep)
    batches = list(loader)
    assert [b["label"].tolist() for b in batches] == [[5, 1, 2, 7], [9, 4, 6, 3], [0, 8]]
    assert type(batches[0]) is TensorDict and batches[0].batch_size == (4,)
    assert next(iter(DataLoader(data, batch_size=4))).batch_size == (4,)
    samples = [TensorDict({"features": torch.randn(3), "label": i}) for i in range(10)]
    for fn in (None, torch.stack, collate):
        batch = next(iter(DataLoader(samples, batch_size=4, collate_fn=fn)))
        assert batch.batch_size == (4,) and batch["label"].tolist() == [0, 1, 2, 3]
    typed = [Sample(features=torch.randn(3)) for _ in range(10)]
    batch = next(iter(DataLoader(typed, batch_size=4)))
    assert type(batch) is Sample and batch.features.shape == (4, 3)
    batch = next(iter(DataLoader(clouds(), batch_size=4, collate_fn=lazy_stack)))
    assert type(batch) is LazyStackedTensorDict and batch.batch_size == (4,)
    assert [c["points"].shape[0] for c in batch.unbind(0)] == [5, 2, 7, 3]
    pairs = [(TensorDict({"features": torch.randn(3)}), i) for i in range(10)]
    for fn in (None, collate):
        features, labels = next(iter(DataLoader(pairs, batch_size=4, collate_fn=fn)))
        assert type(features) is TensorDict and labels.tolist() == [0, 1, 2, 3]
        batch = next(iter(DataLoader(clouds(), batch_size=4, collate_fn=fn)))
        assert type(batch) is LazyStackedTensorDict
    tokens = [
        TensorDict({"ids": torch.ones(n, dtype=torch.long), "points": torch.randn(n, 3)})
        for n in (2, 4, 3)
    ]
    fn = partial(collate, pad_keys={"ids": 7}, nested_keys=["points"], mask_key="mask")
    batch = next(iter(DataLoader(tokens, batch_size=3, collate_fn=fn)))
    assert batch["ids"].shape == (3, 4) and batch["ids"][0].tolist() == [1, 1, 7, 7]
    assert batch["mask", "ids"].sum(-1).tolist() == [2, 4, 3] and batch["points"].is_nested
    sampler = BatchSampler(SequentialSampler(data), batch_size=4, drop_last=True)
    got = [b["label"].tolist() for b in DataLoader(data, batch_sampler=sampler, collate_fn=keep)]
    assert got == [[0, 1, 2, 3], [4, 5, 6, 7]]
    for fn in (keep, None):
        loader = DataLoader(data, sampler=sampler, batch_size=None, collate_fn=fn)
        assert [b["label"].tolist() for b in loader] == got


def test_a_batch_is_read_with_one_index_operation(monkeypatch):
    calls = []
    original = TensorDict.__getitems__
    monkeypatch.setattr(
        TensorDict, "__getitems__", lambda self, index: calls.append(index) or original(self, index)
    )
    data = TensorDict({"x": torch.arange(10)}, [10])
    assert [b["x"].tolist() for b in DataLoader(data, batch_size=5)] == [
        [0, 1, 2, 3, 4],
        [5, 6, 7, 8, 9],
    ]
    assert calls == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]


def test_workers_get_tensordicts_and_typed_classes():
    data = TensorDict({"x": torch.arange(8), "s": [str(i) for i in range(8)]}, [8])
    got = list(DataLoader(data, batch_size=4, num_workers=1))
    assert [b["x"].tolist() for b in got] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert got[1]["s"] == ["4", "5", "6", "7"]


def test_classes_that_may_meet_and_classes_that_may_not():
    a, b, c = Sample(torch.zeros(3)), Longer(torch.ones(3)), Wider(torch.ones(3), torch.ones(3))
    assert type(collate([a, b])) is Sample and type(collate([b, a])) is Longer
    for batch in ([a, c], [c, a], [a, TensorDict(features=torch.ones(3))], [TensorDict(), a]):
        with pytest.raises(TypeError, match="Cannot collate a batch of different tensorclasses"):
            default_collate(batch)
    with pytest.raises(TypeError, match=r"got \['Sample', 'Wider'\]"):
        next(iter(DataLoader([a, c], batch_size=2)))
    with pytest.raises(TypeError, match="a TensorDict and a int"):
        collate([TensorDict(a=1), 3])


def test_ragged_typed_samples_stay_in_their_class():
    batch = collate([Sample(torch.zeros(n)) for n in (2, 3)])
    assert type(batch) is Sample and batch.batch_size == (2,)
    assert [row.features.shape[0] for row in batch.unbind(0)] == [2, 3]


def test_containers_are_kept():
    Pair = namedtuple("Pair", "td label")
    td = TensorDict(a=torch.zeros(2))
    out = collate([Pair(td, 1), Pair(td, 2)])
    assert type(out) is Pair and out.td.batch_size == (2,) and out.label.tolist() == [1, 2]
    out = collate([{"x": [td, "s"]}, {"x": [td, "t"]}])
    assert out["x"][0].batch_size == (2,) and list(out["x"][1]) == ["s", "t"]
    assert collate([]) == [] and collate(["a", "b"]) == ["a", "b"]
    with pytest.raises(TypeError, match="NoneType"):
        collate([None, None])
    assert collate(td) is td


def test_other_keys_give_a_lazy_stack():
    out = collate([TensorDict(a=1), TensorDict(b=1)])
    assert type(out) is LazyStackedTensorDict and list(out.keys()) == []
    assert [sorted(row.keys()) for row in out.unbind(0)] == [["a"], ["b"]]


def test_what_is_neither_padded_nor_nested_makes_it_lazy():
    samples = [TensorDict({"p": torch.ones(n), "q": torch.ones(n)}) for n in (2, 3)]
    out = collate(samples, pad_keys={"p": 0}, mask_key="m")
    assert type(out) is LazyStackedTensorDict
    assert out["p"].tolist() == [[1, 1, 0], [1, 1, 1]] and out["m", "p"].sum(-1).tolist() == [2, 3]
    assert [row["q"].shape[0] for row in out.unbind(0)] == [2, 3]


def test_masks_exist_also_when_nothing_was_padded():
    out = collate([TensorDict(a=torch.ones(2, 3))] * 2, pad_keys={"a": 0}, mask_key=("m", "k"))
    assert out["m", "k", "a"].dtype is torch.bool and out["m", "k", "a"].shape == (2, 2)
    assert out["m", "k", "a"].all()


def test_every_dimension_is_padded():
    rows = [torch.ones(1, 4), torch.ones(3, 2)]
    out = collate([TensorDict(a=x) for x in rows], pad_keys={"a": -1}, mask_key="m")
    assert out["a"].shape == (2, 3, 4) and out["m", "a"].shape == (2, 3, 4)
    assert torch.equal(out["m", "a"], out["a"] == 1)
    assert (out["a"][0, 1:] == -1).all() and (out["a"][1, :, 2:] == -1).all()


def test_wrong_options():
    samples = [TensorDict(a=torch.ones(n)) for n in (2, 3)]
    with pytest.raises(KeyError, match="'zz': sample 0"):
        collate(samples, pad_keys={"zz": 0})
    with pytest.raises(ValueError, match="both pad and nest"):
        collate(samples, pad_keys={"a": 0}, nested_keys=["a"])
    with pytest.raises(ValueError, match="no pad_keys"):
        collate(samples, mask_key="m")
    with pytest.raises(TypeError, match="expected tensors"):
        collate([TensorDict(a="x")] * 2, pad_keys={"a": 0})


def test_padding_is_differentiable():
    x = torch.ones(2, requires_grad=True)
    out = collate([TensorDict(a=x), TensorDict(a=torch.ones(3))], pad_keys={"a": 0})
    out["a"].sum().backward()
    assert x.grad.tolist() == [1, 1]
