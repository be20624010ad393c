"""Random trees for property tests: nested, without batch, of size zero, of mixed dtypes.

``trees()`` draws tensordicts; `check_tree` says that one is consistent; `per_leaf` is the
truth that operations are compared with: the same operation on every tensor by itself.
"""

from __future__ import annotations

import os

import numpy as np
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import Tensor

from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.complex64,
)
FLOATS = (torch.float32, torch.float64)
KEYS = ("a", "b", "c", "d", "e")

_CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large]
# One profile for the gate, one for runs marked slow: the same tests, more examples.
gate = settings(max_examples=25, deadline=None, suppress_health_check=_CHECKS)
slow = settings(
    max_examples=int(os.environ.get("SLOW_EXAMPLES", "300")),
    deadline=None,
    suppress_health_check=_CHECKS,
)


def sizes(min_dims: int = 0, max_dims: int = 3, min_side: int = 0, max_side: int = 3):
    """Shapes as tuples."""
    side = st.integers(min_side, max_side)
    return st.lists(side, min_size=min_dims, max_size=max_dims).map(tuple)


def numbered(shape, dtype=torch.float32) -> Tensor:
    """A tensor whose elements tell where they were (as far as the dtype can)."""
    n = int(np.prod(shape, dtype=np.int64))
    return (torch.arange(n) % 127).reshape(tuple(shape)).to(dtype)


@st.composite
def dim_names(draw, ndim: int):
    """Names for some of the dimensions, or None."""
    if not draw(st.booleans()):
        return None
    return [name if draw(st.booleans()) else None for name in "xyzuvw"[:ndim]]


@st.composite
def trees(
    draw,
    batch=None,
    dtypes=DTYPES,
    depth: int = 2,
    names: bool = True,
    non_tensor: bool = True,
    min_leaves: int = 0,
    min_dims: int = 0,
    max_dims: int = 3,
    min_side: int = 0,
    max_side: int = 3,
):
    """A `TensorDict` of random structure.

    Args:
        batch: the batch size, a tuple or a strategy; drawn when None.
        dtypes: the leaves' dtypes.
        depth: levels below the root.
        names: whether some dimensions may have names.
        non_tensor: whether non-tensor entries may occur.
        min_leaves: tensors that the root has at least.
        min_dims, max_dims, min_side, max_side: of the drawn batch.
    """
    if batch is None:
        batch = sizes(min_dims, max_dims, min_side, max_side)
    if isinstance(batch, st.SearchStrategy):
        batch = draw(batch)
    entries = {}
    keys = draw(st.lists(st.sampled_from(KEYS), unique=True, min_size=min_leaves, max_size=4))
    for i, key in enumerate(keys):
        kinds = ["tensor"] * 3 + ["node"] * (depth > 0) + ["value", "values"] * non_tensor
        kind = "tensor" if i < min_leaves else draw(st.sampled_from(kinds))
        if kind == "tensor":
            shape = (*batch, *draw(sizes(0, 2, 0, 2)))
            entries[key] = numbered(shape, draw(st.sampled_from(dtypes)))
        elif kind == "node":
            inner = (*batch, *draw(sizes(0, 1, 0, 2)))
            entries[key] = draw(trees(inner, dtypes, depth - 1, names, non_tensor))
        elif kind == "value":
            entries[key] = NonTensorData(f"value of {key}", batch_size=batch)
        else:
            values = np.empty(batch, dtype=object)
            for where in np.ndindex(values.shape):
                values[where] = f"{key}{where}"
            entries[key] = (
                NonTensorStack._new(values, None)
                if batch
                else NonTensorData(values[()], batch_size=[])
            )
    given = draw(dim_names(len(batch))) if names else None
    return TensorDict(entries, batch_size=batch, names=given)


@st.composite
def indices(draw, batch):
    """A valid index on a batch shape: (as a user may write it, as torch reads it)."""
    shape = draw(st.sampled_from([(), (2,), (1,), (0,), (2, 2)]))  # of all index tensors in it
    items, plain = [], []
    dim = 0
    advanced = False
    while dim < len(batch):
        n = batch[dim]
        kinds = ["slice", "full", "none", "stop"] + ["int", "tensor", "mask", "long mask"] * (n > 0)
        kind = draw(st.sampled_from(kinds))
        if kind == "stop":
            break
        if kind == "none":
            items.append(None)
            plain.append(None)
            continue
        if kind == "int":
            i = draw(st.integers(-n, n - 1))
            items.append(draw(st.sampled_from([i, np.int64(i), torch.tensor(i)])))
            plain.append(i)
            dim += 1
        elif kind in ("slice", "full"):
            s = slice(None)
            if kind == "slice":
                bound = st.none() | st.integers(-n - 1, n + 1)
                s = slice(draw(bound), draw(bound), draw(st.sampled_from([None, 1, 2])))
            items.append(s)
            plain.append(s)
            dim += 1
        elif kind == "tensor":
            count = int(np.prod(shape, dtype=int))
            flat = [draw(st.integers(-n, n - 1)) for _ in range(count)]
            rows = torch.tensor(flat, dtype=torch.int64).view(shape)
            items.append(draw(st.sampled_from(_forms(rows))))
            plain.append(rows)
            dim += 1
            advanced = True
        else:
            k = 1 if kind == "mask" else min(2, len(batch) - dim)
            sizes = batch[dim : dim + k]
            count = int(np.prod(sizes, dtype=int))
            mask = torch.tensor([draw(st.booleans()) for _ in range(count)], dtype=torch.bool)
            mask = mask.view(sizes)
            if advanced or int(mask.sum()) not in (1, int(np.prod(shape, dtype=int))):
                continue  # would not broadcast with the index tensors
            items.append(
                draw(st.sampled_from([mask, mask.numpy(), mask.tolist() if count else mask]))
            )
            plain.append(mask)
            dim += k
    if draw(st.booleans()):
        # In front of other items it must stand for no dimension: they were drawn for the first ones.
        at = len(items) if dim < len(batch) else draw(st.integers(0, len(items)))
        items.insert(at, ...)
    if len(items) == len(plain) == 1 and draw(st.booleans()):
        return items[0], plain[0]
    return tuple(items), tuple(plain)


def _forms(rows):
    """The ways to write the same positions."""
    out = [rows, rows.to(torch.int32), rows.numpy()]
    if rows.numel() or rows.ndim == 1:
        out.append(rows.tolist() if rows.ndim else rows)
    if rows.ndim == 1:
        out.append(tuple(rows.tolist()) if rows.numel() else rows)
    return out


def check_tree(td: TensorDictBase) -> None:
    """Assert what holds for every tree: sizes, names, devices of what is below fit."""
    batch = td.batch_size
    assert type(batch) is torch.Size
    assert len(td.names) == len(batch)
    assert td._dim_names is None or any(name is not None for name in td._dim_names)
    for key, entry in td.items():
        shape = entry.shape
        assert shape[: len(batch)] == batch, (key, shape, batch)
        if isinstance(entry, TensorDictBase):
            assert entry.device == td.device
            check_tree(entry)


def flat(td: TensorDictBase) -> dict:
    """Path -> tensor or non-tensor entry, for comparing."""
    out = {}
    for key, entry in td.items():
        if isinstance(entry, TensorDictBase):
            out.update({(key, *path): x for path, x in flat(entry).items()})
        else:
            out[(key,)] = entry
    return out


def same_tensor(a: Tensor, b: Tensor) -> bool:
    """Equal in shape, dtype and every element; NaN equals NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.allclose(a, b, rtol=0, atol=0, equal_nan=True) if a.numel() else True


def check_per_leaf(td: TensorDictBase, result: TensorDictBase, fn) -> None:
    """Assert that ``result`` is ``fn(tensor)`` of every tensor of ``td``, with the same keys."""
    before, after = flat(td), flat(result)
    assert list(before) == list(after)
    for path, x in before.items():
        if isinstance(x, Tensor):
            assert same_tensor(after[path], fn(x)), (path, after[path], fn(x))
    check_tree(result)


def check_batch_op(td: TensorDictBase, result: TensorDictBase, op, names=None) -> None:
    """Assert that ``result`` is ``op(x, trailing sizes)`` of every leaf, and of the batch shape.

    Args:
        td: the source.
        result: what the operation under test made of it.
        op: the operation in plain torch, for ``x`` of shape ``[*B, *tail]``.
        names: the names that the result must have; not checked when None.
    """
    n = td.ndim
    assert result.batch_size == op(torch.zeros(td.batch_size), ()).shape
    assert result.device == td.device
    if names is not None:
        assert result.names == names
    check_per_leaf(td, result, lambda x: op(x, x.shape[n:]))
    numbers = torch.arange(td.batch_size.numel()).view(td.batch_size)
    rows = op(numbers, ())
    for path, entry in flat(result).items():
        before = td.get(path)
        if isinstance(before, NonTensorStack) and before.batch_size == td.batch_size:
            values = before._rows().reshape(-1)
            expected = [values[i] for i in rows.reshape(-1).tolist()]
            assert list(np.asarray(entry._rows()).reshape(-1)) == expected
