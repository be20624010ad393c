"""Allocation from shapes and dtypes."""

from __future__ import annotations

import pytest
import torch

from tensordict import TensorDict

SCHEMA = {"a": ((3,), torch.float32), ("n", "b"): ((), torch.int64), "c": ([2, 2], torch.bool)}


@pytest.mark.parametrize("storage", [None, "shared"])
def test_zeros_of_the_given_shapes(storage):
    td = TensorDict.from_schema(SCHEMA, batch_size=[4], storage=storage)
    assert td.batch_size == (4,) and td["n"].batch_size == (4,)
    assert (
        td["a"].shape == (4, 3) and td["n", "b"].dtype is torch.int64 and td["c"].shape == (4, 2, 2)
    )
    assert all(not x.any() for x in td.values(True, True))
    assert td.is_shared() is (storage == "shared") and td.is_locked is (storage == "shared")
    td["a"][0] = 1
    assert td["a"].sum() == 3


def test_devices_and_no_batch():
    td = TensorDict.from_schema(SCHEMA, device="meta")
    assert td.batch_size == () and td["a"].is_meta and td.device.type == "meta"


@pytest.mark.parametrize(
    ("schema", "kwargs", "text"),
    [
        (SCHEMA, {"storage": "zz"}, "'zz'"),
        (SCHEMA, {"storage": "redis"}, "not part"),
        (SCHEMA, {"prefix": "x"}, "prefix"),
        ({"a": {"b": ((), torch.int64)}}, {}, "'a'"),
        ({"a": torch.float32}, {}, "pair"),
        ({("n", "a"): ((), "float32")}, {}, r"\('n', 'a'\)"),
        ({"a": ("x", torch.float32)}, {}, "shape"),
    ],
)
def test_what_cannot_be_allocated(schema, kwargs, text):
    with pytest.raises(ValueError, match=text):
        TensorDict.from_schema(schema, **kwargs)
