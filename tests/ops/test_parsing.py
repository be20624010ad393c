"""Printed forms are read back: keys, shapes, dtypes, devices, batch sizes."""

from __future__ import annotations

import pytest
import torch

from tensordict import TensorDict, lazy_stack, parse_tensor_dict_string, set_printoptions

TREES = {
    "nested": lambda: TensorDict(
        {
            "a": torch.zeros(3, 2),
            "n": TensorDict({"b": torch.zeros(3, 4, 5, dtype=torch.int64)}, [3, 4]),
            "e": {},
        },
        [3],
    ),
    "device": lambda: TensorDict({"a": torch.zeros(2)}, [2], device="cpu"),
    "meta": lambda: TensorDict({"a": torch.zeros(2)}, device="meta"),
    "empty": lambda: TensorDict(),
    "names": lambda: TensorDict({"a b": torch.zeros(2).bfloat16(), "c.d": 1, "é": True, "x, y": 1}),
    "stack": lambda: lazy_stack([TensorDict(a=torch.zeros(2)), TensorDict(a=torch.zeros(2))]),
    "long": lambda: TensorDict({c * 30: {d * 40: torch.zeros(1) for d in "de"} for c in "abc"}),
}


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("name", TREES)
def test_round_trip(name, compact):
    td = TREES[name]()
    with set_printoptions(compact=compact):
        out = parse_tensor_dict_string(repr(td))
    assert type(out) is TensorDict and out.batch_size == td.batch_size and out.device == td.device
    assert set(out.keys(True)) == set(td.keys(True))
    for key, value in out.items(True):
        assert value.shape == td.get(key).shape, key
    for key, value in out.items(True, True):
        assert value.dtype is td[key].dtype and value.device == td[key].device, key
        assert value.is_meta or not value.any()


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("xx", "Batch size not found"),
        (repr(TensorDict(s="x")), "'s: NonTensorData"),
        ("TensorDict(batch_size=[2], fields={l: NonTensorStack})", "'l: NonTensorStack"),
        (repr(TensorDict(a=1)) + "rest", "end of the text"),
        (repr(TensorDict(a=1))[:-40], "expected"),
        ("TensorDict(batch_size=[2], fields={a: zz9[2]})", "zz9"),
        ("TensorDict(batch_size=[2], fields={a})", "a key"),
        ("TensorDict(batch_size=[x], fields={})", "batch_size"),
    ],
)
def test_other_texts_are_refused(text, match):
    with pytest.raises(ValueError, match=match):
        parse_tensor_dict_string(text)
