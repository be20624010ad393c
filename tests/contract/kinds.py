"""The same content in every kind of node, and what it is compared with.

`dense()` makes the truth: a `TensorDict` of batch size [3, 4].  ``KINDS`` maps the name
of a kind to a function that makes the same content of it.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorClass,
    TensorDict,
    lazy_stack,
)
from tensordict.core.leaf import NonTensorDataBase
from tensordict.core.node import Node

BATCH = (3, 4)


class Inner(TensorClass):
    b: Tensor
    m: Tensor


class Whole(TensorClass):
    a: Tensor
    i: Tensor
    n: TensorDict
    s: list
    tag: str


def dense() -> TensorDict:
    rows = np.empty(BATCH, dtype=object)
    for where in np.ndindex(BATCH):
        rows[where] = f"row{where}"
    return TensorDict(
        {
            "a": torch.arange(60.0).view(3, 4, 5) / 7 - 3,
            "i": torch.arange(12).view(3, 4),
            "n": {
                "b": torch.linspace(-1, 1, 24).view(3, 4, 2),
                "m": torch.arange(12).view(3, 4) % 3 == 0,
            },
            "s": NonTensorStack._new(rows, None),
            "tag": NonTensorStack._new(np.full(BATCH, "tag", dtype=object), None),
        },
        batch_size=BATCH,
    )


def lazy(dim: int):
    return lambda: lazy_stack([row.clone() for row in dense().unbind(dim)], dim)


def lazy_of_lazy():
    return lazy_stack([lazy_stack(list(row.unbind(0))) for row in dense().unbind(0)])


def dense_over_lazy():
    td = dense()
    td["n"] = lazy_stack([row.clone() for row in td["n"].unbind(1)], 1)
    return td


def typed():
    td = dense()
    td["n"] = Inner.from_tensordict(td["n"])
    return Whole.from_tensordict(td)


def typed_over_lazy():
    return lazy_stack([row.clone() for row in typed().unbind(0)])


def dense_with_typed():
    td = dense()
    td["n"] = Inner.from_tensordict(td["n"])
    return td


KINDS = {
    "dense": dense,
    "lazy0": lazy(0),
    "lazy1": lazy(1),
    "lazy_of_lazy": lazy_of_lazy,
    "dense_over_lazy": dense_over_lazy,
    "typed": typed,
    "typed_over_lazy": typed_over_lazy,
    "dense_with_typed": dense_with_typed,
}

# What the class of a result that keeps the batch must be.
CLASSES = {
    "dense": TensorDict,
    "lazy0": LazyStackedTensorDict,
    "lazy1": LazyStackedTensorDict,
    "lazy_of_lazy": LazyStackedTensorDict,
    "dense_over_lazy": TensorDict,
    "typed": Whole,
    "typed_over_lazy": Whole,
    "dense_with_typed": TensorDict,
}


def content(value):
    """A value without its kind: trees as dicts of tensors and nested lists."""
    if isinstance(value, Node):
        return {
            "batch": tuple(value.batch_size),
            "names": value.names,
            "entries": {name: content(entry) for name, entry in sorted(value._items())},
        }
    if isinstance(value, NonTensorDataBase):
        return tuple(value.batch_size), value.tolist()
    if isinstance(value, (tuple, list)):
        return [content(part) for part in value]
    return value


def check_same(got, expected, where=()):
    """Assert that two contents are equal, NaN included."""
    if isinstance(expected, Tensor):
        assert isinstance(got, Tensor), where
        assert got.shape == expected.shape, (where, got.shape, expected.shape)
        assert got.dtype == expected.dtype, (where, got.dtype, expected.dtype)
        assert torch.allclose(got, expected, rtol=1e-6, atol=1e-6, equal_nan=True), (
            where,
            got,
            expected,
        )
    elif isinstance(expected, dict):
        assert isinstance(got, dict) and got.keys() == expected.keys(), (where, got, expected)
        for key, value in expected.items():
            check_same(got[key], value, (*where, key))
    elif isinstance(expected, list):
        assert isinstance(got, list) and len(got) == len(expected), (where, got, expected)
        for i, (x, y) in enumerate(zip(got, expected)):
            check_same(x, y, (*where, i))
    else:
        assert got == expected, (where, got, expected)


def same_as_dense(kind: str, op):
    """Run ``op`` on a kind and on the dense truth; compare and return both results."""
    node, truth = KINDS[kind](), dense()
    got, expected = op(node), op(truth)
    check_same(content(got), content(expected))
    check_same(content(node), content(truth))  # what it did to the node itself
    return got, expected


__all__ = ["BATCH", "CLASSES", "KINDS", "NonTensorData", "check_same", "content", "dense"]
