"""Every row of the op table on random trees: torch leaf by leaf, or the error torch gives."""

from __future__ import annotations

import math
import operator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from strategies import check_tree, flat, gate, same_tensor, slow, trees
from tensordict import NonTensorStack, TensorDict
from tensordict.ops.build import torch_name
from tensordict.ops.table import BINARY, COMPARISONS, REDUCTIONS, SCANS, TERNARY, UNARY

pytestmark = pytest.mark.filterwarnings("ignore")
ids = {"ids": lambda row: row.name}


def tensors(td):
    return {path: x for path, x in flat(td).items() if isinstance(x, Tensor)}


def attempt(fn):
    """The result of a call, or the exception."""
    try:
        return fn()
    except Exception as err:
        return err


def compare(td, got, truth):
    """The tree is the truth of every leaf; it failed if torch fails on some leaf."""
    failed = any(isinstance(x, Exception) for x in truth.values())
    if failed:
        assert isinstance(got, Exception), "torch refuses a leaf, the tensordict does not"
        return
    if isinstance(got, Exception):
        raise got
    assert got.batch_size == td.batch_size and got.names == td.names and got.device == td.device
    after = flat(got)
    for path, want in truth.items():
        assert same_tensor(after[path], want), (path, after[path], want)
    for path, value in flat(td).items():
        if not isinstance(value, Tensor):
            assert after[path]._value() == value._value()
    check_tree(got)


def compare_inplace(td, call, truth):
    """As `compare`, for a write: all leaves in their memory, or none."""
    copy = td.clone()
    memory = tensors(copy)
    got = attempt(lambda: call(copy))
    if isinstance(got, Exception):
        compare(td, got, truth)
        assert all(same_tensor(x, tensors(td)[path]) for path, x in memory.items())
        return
    assert got is copy and all(tensors(copy)[path] is x for path, x in memory.items())
    compare(td, got, truth)


def per_leaf(td, fn):
    return {path: attempt(lambda x=x, path=path: fn(path, x)) for path, x in tensors(td).items()}


@st.composite
def operands(draw, td):
    """An operand, and how it meets a leaf: ``of(path, x)``."""
    kind = draw(st.sampled_from(["number", "tensor", "tree"]))
    if kind == "number":
        value = draw(st.sampled_from([0, 1, 3, True, 0.5, -2.0]))
        return value, lambda path, x: value
    if kind == "tensor":
        n = td.ndim
        shape = [draw(st.sampled_from([1, size])) for size in td.batch_size]
        shape = shape[draw(st.integers(0, n)) :] if n else []
        dtype = draw(st.sampled_from([torch.float32, torch.int64]))
        value = (torch.arange(max(1, torch.Size(shape).numel())) + 1).to(dtype)
        value = value[: torch.Size(shape).numel()].reshape(shape)
        return value, lambda path, x: value.reshape(
            [*value.shape] + [1] * (x.ndim - n if value.ndim else 0)
        )
    dtype = draw(st.sampled_from([None, torch.float32, torch.int64]))
    other = td.apply(lambda x: (x == 0).to(dtype or x.dtype), filter_empty=False)
    found = tensors(other)
    return other, lambda path, x: found[path]


def number_as_torch_takes_it(row, x, y):
    if isinstance(y, Tensor) or row.numbers:
        return y
    return torch.full((), y, dtype=torch.result_type(x, y))


def unary(row, data):
    td = data.draw(trees())
    fn, name = getattr(torch, row.name), row.name
    compare(td, attempt(getattr(td, name)), per_leaf(td, lambda path, x: fn(x)))
    if row.inplace:
        write = getattr(Tensor, f"{name}_")
        truth = per_leaf(td, lambda path, x: write(x.clone()))
        compare_inplace(td, lambda copy: getattr(copy, f"{name}_")(), truth)


def binary(row, data):
    td = data.draw(trees())
    other, of = data.draw(operands(td))
    fn, name = getattr(torch, torch_name(row)), row.name

    def right(path, x):
        return number_as_torch_takes_it(row, x, of(path, x))

    truth = per_leaf(td, lambda path, x: fn(x, right(path, x)))
    compare(td, attempt(lambda: getattr(td, name)(other)), truth)
    if row.inplace:
        write = {"maximum": Tensor.clamp_min_, "minimum": Tensor.clamp_max_}.get(name)
        write = write or getattr(Tensor, f"{torch_name(row)}_")
        truth = per_leaf(td, lambda path, x: write(x.clone(), right(path, x)))
        compare_inplace(td, lambda copy: getattr(copy, f"{name}_")(other), truth)
    if row.dunder and not isinstance(other, TensorDict):
        op = getattr(operator, {"and": "and_", "or": "or_"}.get(row.dunder, row.dunder))
        truth = per_leaf(td, lambda path, x: op(of(path, x), x))
        compare(td, attempt(lambda: op(other, td)), truth)


def ternary(row, data):
    td = data.draw(trees())
    (a, of_a), (b, of_b) = data.draw(operands(td)), data.draw(operands(td))
    fn, name = getattr(torch, row.name), row.name

    def both(path, x):
        y, z = of_a(path, x), of_b(path, x)
        if row.optional and not isinstance(y, Tensor) and not isinstance(z, Tensor):
            return y, z
        full = lambda v: (  # noqa: E731
            v if isinstance(v, Tensor) else torch.full((), v, dtype=torch.result_type(x, v))
        )
        return full(y), (z if row.numbers else full(z))

    truth = per_leaf(td, lambda path, x: fn(x, *both(path, x)))
    compare(td, attempt(lambda: getattr(td, name)(a, b)), truth)
    write = getattr(Tensor, f"{name}_")
    truth = per_leaf(td, lambda path, x: write(x.clone(), *both(path, x)))
    compare_inplace(td, lambda copy: getattr(copy, f"{name}_")(a, b), truth)


def comparison(row, data):
    td = data.draw(trees())
    other, of = data.draw(operands(td))
    op = getattr(operator, row.name)
    got = attempt(lambda: op(td, other))
    truth = per_leaf(td, lambda path, x: op(x, of(path, x)))
    if any(isinstance(x, Exception) for x in truth.values()):
        assert isinstance(got, Exception)
        return
    assert got.batch_size == td.batch_size and got.names == td.names
    for path, want in truth.items():
        assert same_tensor(flat(got)[path], want)
    for path, value in flat(td).items():
        if isinstance(value, Tensor) or row.name not in ("eq", "ne"):
            continue
        # The operand's tree shares these values, a number or tensor equals none of them.
        equal = isinstance(other, TensorDict)
        want = torch.full(value.batch_size, equal if row.name == "eq" else not equal)
        assert same_tensor(flat(got)[path], want)
    check_tree(got)


def reduction(row, data):
    td = data.draw(trees(dtypes=(torch.float32, torch.float64, torch.int64), min_side=1))
    fn, n = getattr(torch, row.name), td.ndim
    args = (0.5,) if row.first else ()
    dims = tuple(sorted(data.draw(st.sets(st.integers(0, n - 1))))) if n else ()
    keepdim = data.draw(st.booleans())
    whole = not dims and not row.batch
    if not dims and row.batch:
        return

    def one(path, x):
        if whole and row.indices and not keepdim:
            return fn(x)  # as torch, which has NaN for the median of nothing
        over = tuple(range(x.ndim)) if whole else dims
        rest = [i for i in range(x.ndim) if i not in over]
        shape = [*[x.shape[i] for i in rest], math.prod(x.shape[i] for i in over)]
        out = fn(x.permute([*rest, *over]).reshape(shape), *args, dim=-1)
        out = out.values if row.indices else out
        kept = [1 if i in over else s for i, s in enumerate(x.shape)]
        return out.reshape(kept) if keepdim else out

    given = {} if whole else {"dim": dims if data.draw(st.booleans()) or len(dims) > 1 else dims[0]}
    got = attempt(lambda: getattr(td, row.name)(*args, **given, keepdim=keepdim))
    truth = per_leaf(td, one)
    if any(isinstance(x, Exception) for x in truth.values()):
        assert isinstance(got, Exception)
        return
    if row.indices and isinstance(got, tuple):
        got = got.values
    if isinstance(got, Exception):
        raise got
    over = range(n) if whole else dims
    kept = [1 if i in over else size for i, size in enumerate(td.batch_size)]
    assert list(got.batch_size) == [s for i, s in enumerate(kept) if keepdim or i not in over]
    for path, want in truth.items():
        torch.testing.assert_close(flat(got)[path], want, equal_nan=True, rtol=1e-4, atol=1e-4)
    check_tree(got)


def scan(row, data):
    td = data.draw(trees(dtypes=(torch.float32, torch.float64, torch.int64), min_dims=1))
    fn = getattr(torch, row.name)
    dim = data.draw(st.integers(-td.ndim, td.ndim - 1))
    truth = per_leaf(td, lambda path, x: fn(x, dim % td.ndim))
    got = attempt(lambda: getattr(td, row.name)(dim))
    if row.indices and not isinstance(got, Exception):
        failed = any(isinstance(x, Exception) for x in truth.values())
        assert not failed
        compare(td, got.indices, {path: x.indices for path, x in truth.items()})
        got, truth = got.values, {path: x.values for path, x in truth.items()}
    compare(td, got, truth)


CASES = [
    *((unary, row) for row in UNARY),
    *((binary, row) for row in BINARY),
    *((ternary, row) for row in TERNARY),
    *((comparison, row) for row in COMPARISONS),
    *((reduction, row) for row in REDUCTIONS),
    *((scan, row) for row in SCANS),
]
every_row = pytest.mark.parametrize(("check", "row"), CASES, ids=lambda x: getattr(x, "name", ""))


@every_row
@gate
@given(data=st.data())
def test_random_trees(check, row, data):
    check(row, data)


@pytest.mark.slow
@every_row
@slow
@given(data=st.data())
def test_many_random_trees(check, row, data):
    check(row, data)


@gate
@given(trees())
def test_copies_and_apply(td):
    leaves = tensors(td)
    for copy in (td.clone(), td.apply(torch.clone, filter_empty=False), td.detach(), td.data):
        compare(td, copy, leaves)
    zeros = td.clone().zero_()
    assert all(not x.any() for x in tensors(zeros).values())
    compare(td, zeros.copy_(td), leaves)
    keep = td.apply(lambda x: x if x.ndim > td.ndim else None, filter_empty=False)
    kept = {path for path, x in leaves.items() if x.ndim > td.ndim}
    assert set(tensors(keep)) == kept
    seen = []
    td.named_apply(lambda key, x: seen.append(key), nested_keys=True)
    assert seen == [path if len(path) > 1 else path[0] for path in leaves]


@gate
@given(trees(min_side=1))
def test_values_survive_a_reduction(td):
    for path, value in flat(td).items():
        if isinstance(value, NonTensorStack):
            out = flat(td.sum())[path]
            assert out._value() == value.tolist()
