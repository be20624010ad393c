"""Every row of the op table against torch, leaf by leaf."""

from __future__ import annotations

import operator

import pytest
import torch

from tensordict import TensorDict
from tensordict.ops.build import torch_name
from tensordict.ops.table import BINARY, COMPARISONS, TERNARY, UNARY, Binary, Ternary, Unary

# Values on which an operation is defined.
DOMAINS = {
    "real": lambda *s: torch.randn(*s),
    "positive": lambda *s: torch.rand(*s) + 1.1,
    "unit": lambda *s: torch.rand(*s) * 0.8 + 0.1,
    "int": lambda *s: torch.randint(1, 9, s),
    "shift": lambda *s: torch.randint(1, 4, s),
}

ids = {"ids": lambda row: row.name}


def tree(domain="real", extra=True):
    make = DOMAINS[domain]
    td = TensorDict({"a": make(3, 2), "n": {"b": make(3), "deep": {"c": make(3, 2, 2)}}}, [3])
    td.names = ["t"]
    if extra:
        td["s"] = "text"
    return td


def flat(td):
    return dict(td.items(True, True))


def check(out, expected, td):
    """The leaves of ``out`` are ``expected``; the rest is as in ``td``."""
    got = flat(out)
    assert got.keys() == expected.keys()
    for key, x in expected.items():
        torch.testing.assert_close(got[key], x, rtol=0, atol=0, equal_nan=True)
    assert out.batch_size == td.batch_size and out.names == td.names and out.device == td.device
    assert out["s"] == "text" and not out.is_locked


@pytest.mark.parametrize("row", UNARY, **ids)
def test_unary(row):
    td = tree(row.domain)
    fn = getattr(torch, row.name)
    expected = {k: fn(x) for k, x in flat(td).items()}
    check(getattr(td, row.name)(), expected, td)
    check(fn(td), expected, td)
    if row.dunder:
        check(getattr(operator, row.dunder)(td), expected, td)
    if row.inplace:
        copy = td.clone()
        before = flat(copy)
        assert getattr(copy.lock_(), f"{row.name}_")() is copy
        assert all(flat(copy)[k] is x for k, x in before.items())
        check(
            copy.unlock_(),
            {k: getattr(x.clone(), f"{row.name}_")() for k, x in flat(td).items()},
            td,
        )


@pytest.mark.parametrize("row", BINARY, **ids)
def test_binary(row):
    td, other = tree(row.domain), tree(row.domain, extra=False)
    fn = getattr(torch, torch_name(row))
    ys = flat(other)
    expected = {k: fn(x, ys[k]) for k, x in flat(td).items()}
    check(getattr(td, row.name)(other), expected, td)
    check(fn(td, other), expected, td)
    # a tensor of the batch shape meets the batch dimensions of every leaf
    value = DOMAINS[row.domain](3)
    expected = {k: fn(x, value.reshape([3] + [1] * (x.ndim - 1))) for k, x in flat(td).items()}
    check(getattr(td, row.name)(value), expected, td)
    swapped = {k: fn(value.reshape([3] + [1] * (x.ndim - 1)), x) for k, x in flat(td).items()}
    check(fn(value, td), swapped, td)
    if row.inplace:
        copy = td.clone()
        before = flat(copy)
        assert getattr(copy.lock_(), f"{row.name}_")(other) is copy
        assert all(flat(copy)[k] is x for k, x in before.items())
        expected = {k: fn(x, ys[k]).to(x.dtype) for k, x in flat(td).items()}
        check(copy.unlock_(), expected, td)


@pytest.mark.parametrize("row", BINARY, **ids)
def test_binary_with_a_number(row):
    td = tree(row.domain)
    fn = getattr(torch, torch_name(row))
    number = 2 if row.domain in ("int", "shift") else 2.5
    expected = {
        k: fn(x, number if row.numbers else torch.tensor(number)) for k, x in flat(td).items()
    }
    check(getattr(td, row.name)(number), expected, td)
    if row.inplace:
        copy = td.clone()
        getattr(copy, f"{row.name}_")(number)
        check(copy, {k: v.to(td.get(k).dtype) for k, v in expected.items()}, td)


@pytest.mark.parametrize("row", [row for row in BINARY if row.dunder], **ids)
@pytest.mark.parametrize("kind", ["number", "tensor", "tensordict"])
def test_operators(row, kind):
    td = tree(row.domain)
    op = getattr(operator, {"and": "and_", "or": "or_"}.get(row.dunder, row.dunder))
    other = {
        "number": 2,
        "tensor": DOMAINS[row.domain](3),
        "tensordict": tree(row.domain, extra=False),
    }[kind]

    def of(key, x):
        if kind == "tensordict":
            return other[key]
        return other.reshape([3] + [1] * (x.ndim - 1)) if kind == "tensor" else other

    check(op(td, other), {k: op(x, of(k, x)) for k, x in flat(td).items()}, td)
    if kind != "tensordict":
        check(op(other, td), {k: op(of(k, x), x) for k, x in flat(td).items()}, td)
    copy = td.clone()
    inplace = getattr(operator, f"i{row.dunder}")
    expected = {k: inplace(x.clone(), of(k, x)) for k, x in flat(td).items()}
    same = copy
    copy = inplace(copy, other)
    assert copy is same
    check(copy, expected, td)


@pytest.mark.parametrize("row", TERNARY, **ids)
def test_ternary(row):
    td, a, b = (tree(row.domain) for _ in range(3))
    fn = getattr(torch, row.name)
    ys, zs = flat(a), flat(b)
    expected = {k: fn(x, ys[k], zs[k]) for k, x in flat(td).items()}
    check(getattr(td, row.name)(a, b), expected, td)
    check(fn(td, a, b), expected, td)
    check(getattr(td, row.name)(**dict(zip(row.operands, (a, b)))), expected, td)
    if row.numbers:
        check(
            getattr(td, row.name)(a, 0.5), {k: fn(x, ys[k], 0.5) for k, x in flat(td).items()}, td
        )
    for param in row.params:
        given = {param.name: 0.5}
        expected = {k: fn(x, ys[k], zs[k], **given) for k, x in flat(td).items()}
        check(getattr(td, row.name)(a, b, **given), expected, td)
        check(getattr(td, row.name)(a, b, 0.5), expected, td)
    copy = td.clone()
    assert getattr(copy, f"{row.name}_")(a, b) is copy
    check(copy, {k: fn(x, ys[k], zs[k]) for k, x in flat(td).items()}, td)


@pytest.mark.parametrize("row", COMPARISONS, **ids)
def test_comparison(row):
    td, other = tree("int", extra=False), tree("int", extra=False)
    fn = getattr(torch, row.name)
    op = getattr(operator, row.name)
    for kind, y in (("td", other), ("number", 4), ("tensor", torch.tensor([1, 4, 8]))):
        for result in (getattr(td, row.name)(y), op(td, y), fn(td, y)):
            assert result.batch_size == td.batch_size and result.names == td.names
            for key, x in flat(td).items():
                z = y[key] if kind == "td" else y
                if kind == "tensor":
                    z = z.reshape([3] + [1] * (x.ndim - 1))
                assert torch.equal(flat(result)[key], op(x, z))
    right = op(torch.tensor([1, 4, 8]), td)
    assert torch.equal(right["n", "b"], op(torch.tensor([1, 4, 8]), td["n", "b"]))


INPLACE = [row for row in (*UNARY, *BINARY) if row.inplace and hasattr(torch, f"{row.name}_")]


@pytest.mark.parametrize("row", INPLACE, **ids)
def test_in_place_functions_of_torch(row):
    td = tree(row.domain)
    others = () if row in UNARY else (tree(row.domain, extra=False),)
    expected = getattr(td.clone(), f"{row.name}_")(*others)
    assert getattr(torch, f"{row.name}_")(td, *others) is td
    check(td, flat(expected), td)


# Rows whose torch function has a gradient, on the domain of the row.
SMOOTH = [
    row
    for row in (*UNARY, *BINARY, *TERNARY)
    if row.domain not in ("int", "shift")
    and not row.name.startswith(("is", "logical", "signbit", "heaviside", "nextafter", "angle"))
    and row.name != "floor_divide"
]


@pytest.mark.parametrize("row", SMOOTH, **ids)
def test_gradients(row):
    n = {Unary: 0, Binary: 1, Ternary: 2}[type(row)]
    td = tree(row.domain, extra=False).update({"d": DOMAINS[row.domain](3)}).requires_grad_()
    others = [tree(row.domain, extra=False).update({"d": DOMAINS[row.domain](3)}) for _ in range(n)]
    out = getattr(td, row.name)(*others)
    out.backward(out.apply(torch.ones_like))
    for key, x in flat(td).items():
        leaf = x.detach().clone().requires_grad_()
        y = getattr(torch, torch_name(row))(leaf, *[o.get(key) for o in others])
        y.backward(torch.ones_like(y))
        torch.testing.assert_close(x.grad, leaf.grad, rtol=0, atol=0, equal_nan=True)


def test_table_has_no_name_twice():
    names = [row.name for row in (*UNARY, *BINARY, *TERNARY, *COMPARISONS)]
    assert len(set(names)) == len(names)


def three_leaves():
    tensors = {"a": torch.rand(3, 4), "b": torch.rand(3), "n": {"c": torch.rand(3, 2)}}
    return TensorDict(tensors, [3])


@pytest.mark.parametrize("row", TERNARY, ids=lambda row: row.name)
@pytest.mark.parametrize("flat", [True, False])
def test_results_go_into_out(row, flat):
    td = three_leaves()
    if flat:
        td = td.flatten_keys(".")
    low, high = td * 0.5, td * 0.75
    expected = getattr(td, row.name)(low, high)
    out = td.clone().lock_()
    leaves = list(out.values(True, True))
    assert getattr(td, row.name)(low, high, out=out) is out
    assert all(x is y for x, y in zip(out.values(True, True), leaves))
    for key in td.keys(True, True):
        assert torch.equal(out[key], expected[key])
        assert torch.equal(out[key], getattr(torch, row.name)(td[key], low[key], high[key]))


def test_results_are_cast_to_out():
    td = TensorDict({"a": torch.rand(3), "b": torch.rand(3), "c": torch.rand(3)}, [3])
    out = td.to(torch.float64)
    assert torch.clamp(td, 0.25, 0.5, out=out) is out
    for key in td.keys():
        assert torch.equal(out[key], torch.clamp(td[key], 0.25, 0.5).double())
    assert td.clamp(0.25, out=td) is td and (td >= 0.25).all()


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (lambda out: out.set(("n", "c"), out["n", "c"].long()), RuntimeError, r"\('n', 'c'\)"),
        (
            lambda out: out.set(("n", "c"), torch.rand(3, 5)),
            RuntimeError,
            r"\('n', 'c'\).*\[3, 5\]",
        ),
        (lambda out: out.exclude(("n", "c")), KeyError, r"\('n', 'c'\)"),
        (lambda out: out[:2], RuntimeError, "batch size"),
        (lambda out: {"a": 1}, TypeError, "expected a tensordict"),
    ],
)
def test_an_out_that_does_not_fit_stays_as_it_is(change, error, text):
    td = three_leaves()
    out = change(td.clone())
    before = out.clone() if isinstance(out, TensorDict) else dict(out)
    with pytest.raises(error, match=f"(?s){text}"):
        td.clamp(0.4, 0.6, out=out)
    if isinstance(out, TensorDict):
        assert (out == before).all()
