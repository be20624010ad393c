"""Reductions and scans against torch, leaf by leaf."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from tensordict import TensorDict, lazy_stack
from tensordict.ops.table import REDUCTIONS, SCANS

ids = {"ids": lambda row: row.name}
plain = [row for row in REDUCTIONS if not row.indices and not row.first]
paired = [row for row in REDUCTIONS if row.indices]


def tree():
    return TensorDict(
        {
            "a": torch.rand(3, 4, 5) + 0.5,
            "n": TensorDict({"b": torch.rand(3, 4, 2)}, [3, 4, 2], names=["x", "y", "z"]),
            "s": "text",
        },
        [3, 4],
        names=["x", "y"],
    )


def by_hand(row, x, dims, keepdim=False, args=()):
    """One tensor reduced over dims, through one flat dimension."""
    fn = getattr(torch, row.name)
    rest = [i for i in range(x.ndim) if i not in dims]
    flat = x.permute([*rest, *dims]).flatten(len(rest)) if dims else x.unsqueeze(-1)
    out = fn(flat, *args, dim=-1)
    out = out.values if row.indices else out
    if keepdim:
        out = out.reshape([1 if i in dims else n for i, n in enumerate(x.shape)])
    return out


def leaf_checks(td, out, expected):
    for key, x in td.items(True, True):
        assert_close(out[key], expected(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("row", plain, **ids)
def test_everything(row):
    td = tree()
    if row.batch:
        out = getattr(td, row.name)()
        assert out.batch_size == () and out["a"].shape == (5,)
        leaf_checks(td, out, lambda x: by_hand(row, x, (0, 1)))
        return
    out = getattr(td, row.name)()
    assert out.batch_size == () and out["n"].batch_size == () and out["s"] == "text"
    leaf_checks(td, out, lambda x: by_hand(row, x, tuple(range(x.ndim))))
    out = getattr(td, row.name)(keepdim=True)
    assert out.batch_size == (1, 1) and out["n"].batch_size == (1, 1, 1)
    leaf_checks(td, out, lambda x: by_hand(row, x, tuple(range(x.ndim)), True))


@pytest.mark.parametrize("row", plain, **ids)
@pytest.mark.parametrize("dim", [0, 1, -1, (0,), (0, 1), (1, 0), (-1, -2), [0]])
@pytest.mark.parametrize("keepdim", [False, True])
def test_batch_dims(row, dim, keepdim):
    td = tree()
    dims = tuple(sorted(d % 2 for d in ([dim] if isinstance(dim, int) else dim)))
    out = getattr(td, row.name)(dim, keepdim)
    leaf_checks(td, out, lambda x: by_hand(row, x, dims, keepdim))
    proxy = torch.zeros(3, 4).sum(dims, keepdim=keepdim)
    assert out.batch_size == proxy.shape and out["n"].batch_size == (*proxy.shape, 2)
    left = ["x", "y"] if keepdim else [n for i, n in enumerate(["x", "y"]) if i not in dims]
    assert out.names == left and out.get("s").batch_size == proxy.shape
    if row.name != "count_nonzero" and (row.dims or isinstance(dim, int)):
        again = getattr(torch, row.name)(td, dim, keepdim=keepdim)
        leaf_checks(td, again, lambda x: by_hand(row, x, dims, keepdim))


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@pytest.mark.parametrize("row", plain, **ids)
def test_features(row):
    td = tree()
    out = getattr(td, row.name)(dim="feature")
    assert out.batch_size == (3, 4) and out["n"].batch_size == (3, 4, 2) and out.names == ["x", "y"]
    assert_close(out["a"], by_hand(row, td["a"], (2,)))
    assert_close(out["n", "b"], by_hand(row, td["n", "b"], ()), equal_nan=True)
    with pytest.raises(TypeError, match="keepdim"):
        getattr(td, row.name)(dim="feature", keepdim=True)


@pytest.mark.parametrize("row", plain, **ids)
def test_reduce(row):
    td = tree()
    if not row.batch:
        flat = torch.cat([td["a"].reshape(-1), td["n", "b"].reshape(-1)])
        assert_close(getattr(td, row.name)(reduce=True), by_hand(row, flat, (0,)))
    both = torch.cat([td["a"], td["n", "b"]], 2)
    assert_close(getattr(td, row.name)(dim="feature", reduce=True), by_hand(row, both, (2,)))
    with pytest.raises(RuntimeError, match="one shape"):
        getattr(td, row.name)(dim=0, reduce=True)
    same = TensorDict({"a": torch.rand(3, 4), "b": torch.rand(3, 4)}, [3])
    both = torch.cat([same["a"], same["b"]])
    assert_close(getattr(same, row.name)(dim=0, reduce=True), by_hand(row, both, (0,)))
    with pytest.raises(RuntimeError, match="no tensor leaves"):
        getattr(TensorDict({}, [3]), row.name)(0, reduce=True)


def test_dtype_and_correction():
    td = tree()
    for name in ("sum", "mean", "nansum", "nanmean", "prod"):
        assert getattr(td, name)(dim=0, dtype=torch.float64)["a"].dtype == torch.float64
        assert getattr(td, name)(reduce=True, dtype=torch.float64).dtype == torch.float64
    for name in ("std", "var"):
        fn = getattr(torch, name)
        out = getattr(td, name)(dim=0, correction=0)
        assert_close(out["a"], fn(td["a"], 0, correction=0))
        assert_close(fn(td, 0, correction=0)["a"], out["a"])
        assert_close(getattr(td, name)(correction=2)["a"], fn(td["a"], correction=2))
    with pytest.raises(RuntimeError):
        TensorDict(a=torch.ones(3, dtype=torch.int64)).mean()


@pytest.mark.parametrize("row", paired, **ids)
def test_values_and_indices(row):
    td = tree()
    fn = getattr(torch, row.name)
    leaf_checks(td, getattr(td, row.name)(), fn)
    flat = torch.cat([x.flatten() for x in td.values(True, True)])
    assert_close(getattr(td, row.name)(reduce=True), fn(flat))
    values = getattr(td, row.name)(1, return_indices=False)
    leaf_checks(td, values, lambda x: fn(x, 1).values)
    pair = getattr(td, row.name)(dim=(0, 1), keepdim=True)
    leaf_checks(td, pair.values, lambda x: by_hand(row, x, (0, 1), True))
    assert pair.indices["a"].shape == (1, 1, 5)
    pair = getattr(td, row.name)("feature")
    assert_close(pair.values["a"], fn(td["a"], -1).values)
    assert_close(pair.indices["a"], fn(td["a"], -1).indices)
    both = torch.cat([td["a"], td["n", "b"]], 2)
    pair = getattr(td, row.name)(dim="feature", reduce=True)
    assert_close(tuple(pair), tuple(fn(both, -1)))


@pytest.mark.parametrize("row", paired, **ids)
@pytest.mark.parametrize("keepdim", [False, True])
def test_values_and_indices_of_one_dim(row, keepdim):
    td = tree()
    fn = getattr(torch, row.name)
    for pair in (getattr(td, row.name)(0, keepdim), fn(td, 0, keepdim)):
        assert type(pair) is getattr(torch.return_types, row.name)
        assert pair.values.batch_size == pair.indices.batch_size == ((1, 4) if keepdim else (4,))
        leaf_checks(td, pair.values, lambda x: fn(x, 0, keepdim).values)
        leaf_checks(td, pair.indices, lambda x: fn(x, 0, keepdim).indices)


class Other(torch.Tensor):
    pass


@pytest.mark.parametrize("row", paired, **ids)
@pytest.mark.parametrize("dim", [0, None, (0, 1)])
def test_values_and_indices_where_plain_tensors_come_last(row, dim):
    """Each leaf keeps its own, in whatever order a tree is walked."""
    first = torch.rand(3, 4).as_subclass(Other)
    td = TensorDict({"n": {"b": torch.rand(3, 4)}, "s": first, "a": torch.rand(3, 4)}, [3, 4])
    pair = getattr(td, row.name)(dim=dim, keepdim=True)
    dims = (0, 1) if dim is None else (dim,) if dim == 0 else dim
    leaf_checks(td, pair.values, lambda x: by_hand(row, x, dims, True))
    if dim == 0:
        fn = getattr(torch, row.name)
        leaf_checks(td, pair.indices, lambda x: fn(x, 0, True).indices)
        leaf_checks(td, getattr(td, row.name)(0).indices, lambda x: fn(x, 0).indices)


@pytest.mark.parametrize("extra", [0, 3])
def test_norm_where_plain_tensors_come_last(extra):
    first = torch.rand(3).as_subclass(Other)
    td = TensorDict({"n": {"b": torch.rand(3)}, "s": first, "a": torch.rand(3)}, [3])
    leaf_checks(td, td.norm(), lambda x: x.norm())
    td = TensorDict({"n": {"b": torch.rand(3)}, **{str(i): torch.rand(3) for i in range(extra)}})
    leaf_checks(td, td.norm(), lambda x: x.norm())


def test_keys_that_are_set_meanwhile_do_not_matter():
    td = TensorDict({"b": torch.rand(3), "c": torch.rand(3)}, [3])

    class Meanwhile(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            if func in (torch.max, torch.linalg.vector_norm):
                td[str(len(td.keys()))] = torch.rand(3)
            return super().__torch_function__(func, types, args, kwargs or {})

    td["a"] = torch.rand(3).as_subclass(Meanwhile)
    assert list(td.max(dim=0).indices.keys()) == ["b", "c", "a"]
    keys = list(td.keys())
    assert list(td.norm().keys()) == keys


def test_torch_reduces_jagged_leaves():
    rows = [torch.rand(2, 2), torch.rand(3, 2)]
    td = TensorDict({"j": torch.nested.nested_tensor(rows, layout=torch.jagged)}, [2])
    assert_close(td.sum()["j"], torch.cat(rows).sum())
    with pytest.raises(RuntimeError, match="batch dimension"):
        td.sum(0)


@pytest.mark.parametrize("name", ["quantile", "nanquantile"])
def test_quantile(name):
    td = tree()
    fn = getattr(torch, name)
    leaf_checks(td, getattr(td, name)(0.5), lambda x: fn(x, 0.5))
    leaf_checks(td, getattr(td, name)(0.3, dim=0, keepdim=True), lambda x: fn(x, 0.3, 0, True))
    leaf_checks(
        td,
        getattr(td, name)(0.3, 0, interpolation="nearest"),
        lambda x: fn(x, 0.3, 0, interpolation="nearest"),
    )
    leaf_checks(td, fn(td, 0.3, 0), lambda x: fn(x, 0.3, 0))
    q = torch.tensor([0.1, 0.9])
    out = getattr(td, name)(q, dim=0)
    assert (
        out.batch_size == (2, 4) and out["n"].batch_size == (2, 4, 2) and out.names == [None, "y"]
    )
    assert out.get("s").batch_size == (2, 4)
    leaf_checks(td, out, lambda x: fn(x, q, 0))
    out = getattr(td, name)(q, dim=(0, 1), keepdim=True)
    assert out.batch_size == (2, 1, 1)
    leaf_checks(td, out, lambda x: fn(x.flatten(0, 1), q, 0)[:, None, None])
    out = getattr(td, name)(q)
    assert out.batch_size == ()
    leaf_checks(td, out, lambda x: fn(x, q))
    out = getattr(td, name)(0.5, dim="feature")
    assert_close(out["a"], fn(td["a"], 0.5, 2))
    flat = torch.cat([x.flatten() for x in td.values(True, True)])
    assert_close(getattr(td, name)(0.5, reduce=True), fn(flat, 0.5))


@pytest.mark.parametrize("row", SCANS, **ids)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_scan(row, dim):
    td = tree()
    fn = getattr(torch, row.name)
    d = dim % 2
    for out in (getattr(td, row.name)(dim), fn(td, dim)):
        if row.indices:
            assert type(out) is getattr(torch.return_types, row.name)
            leaf_checks(td, out.indices, lambda x: fn(x, d).indices)
            out = out.values
        leaf_checks(td, out, lambda x: fn(x, d).values if row.indices else fn(x, d))
        assert out.batch_size == (3, 4) and out.names == ["x", "y"] and out["s"] == "text"


@pytest.mark.parametrize("row", SCANS, **ids)
def test_options_of_scans(row):
    td = tree()
    fn = getattr(torch, row.name)
    for param in row.params:
        out = getattr(td, row.name)(0, **{param.name: torch.float64})
        assert out["a"].dtype == torch.float64
        assert getattr(td, row.name)(0, torch.float64)["a"].dtype == torch.float64
    with pytest.raises(IndexError):
        getattr(td, row.name)(2)
    if row.indices:
        values = getattr(td, row.name)(1, return_indices=False)
        leaf_checks(td, values, lambda x: fn(x, 1).values)
        same = TensorDict({"a": torch.rand(3, 4), "b": torch.rand(3, 4)}, [3])
        both = torch.cat([same["a"], same["b"]])
        pair = getattr(same, row.name)(0, reduce=True)
        assert_close(pair.values, fn(both, 0).values)
        assert_close(pair.indices, fn(both, 0).indices)


def test_softmax_through_nn_functional():
    td = tree()
    out = torch.nn.functional.softmax(td, 0)
    assert_close(out["a"], td["a"].softmax(0))
    out = torch.nn.functional.log_softmax(td, -1)
    assert_close(out["n", "b"], td["n", "b"].log_softmax(1))


def test_norm():
    td = tree()
    for out in (td.norm(), torch.norm(td), torch.linalg.vector_norm(td)):
        assert out.batch_size == () and out["s"] == "text"
        leaf_checks(td, out, lambda x: x.norm())
    leaf_checks(td, td.norm(p=1), lambda x: x.norm(1))
    assert td.norm(dtype=torch.float64)["a"].dtype == torch.float64
    many = TensorDict({str(i): torch.rand(3) for i in range(6)})
    leaf_checks(many, many.norm(), lambda x: x.norm())
    out = many.norm() * 0
    assert many.norm(out=out) is out and out["3"] == many["3"].norm()


def test_out_of_logsumexp():
    td = tree()
    out = td.sum(0)
    assert td.logsumexp(0, out=out) is out
    leaf_checks(td, out, lambda x: x.logsumexp(0))


def test_all_and_any():
    td = TensorDict({"a": torch.tensor([[1, 0], [1, 1]]), "s": "text"}, [2])
    assert td.all() is False and td.any() is True
    assert td.all(0)["a"].tolist() == [True, False] and td.all(0)["s"] == "text"
    assert td.any(dim=-1, keepdim=True).batch_size == (1,)
    assert torch.all(td) is False and torch.any(td, 0)["a"].tolist() == [True, True]
    assert TensorDict().all() is True and TensorDict().any() is False
    with pytest.raises(IndexError):
        td.all(1)


def test_key_transform():
    td = tree()
    out = td.sum(key_transform=str.upper)
    assert set(out.keys(True, True)) == {"A", ("N", "B")}
    assert set(td.norm(key_transform=lambda k: k + "_norm").keys(True, True)) == {
        "a_norm",
        ("n_norm", "b_norm"),
    }


def test_values_along_a_reduced_dimension_become_a_list():
    td = TensorDict({"a": torch.rand(2, 3)}, [2, 3])
    td["s"] = [["a", "b", "c"], ["d", "e", "f"]]
    assert td.sum()["s"] == [["a", "b", "c"], ["d", "e", "f"]]
    assert td.sum(0)["s"] == [["a", "d"], ["b", "e"], ["c", "f"]]
    assert td.sum(1, keepdim=True)["s"] == [[["a", "b", "c"]], [["d", "e", "f"]]]
    assert td.sum(1).get("s").batch_size == (2,)
    assert td.sum("feature")["s"] == td["s"]


@pytest.mark.parametrize("dim", [2, -3, (0, 0), "features", 1.0, (0, "x"), None])
def test_dims_that_cannot_be(dim):
    td = tree()
    if dim is None:
        assert td.sum(None).batch_size == ()
        return
    with pytest.raises((IndexError, TypeError)):
        td.sum(dim)


def test_zero_size_batch():
    td = TensorDict({"a": torch.ones(0, 3), "b": torch.ones(0)}, [0])
    assert td.sum(0)["a"].tolist() == [0, 0, 0]
    assert td.sum("feature")["a"].shape == (0,) and td.sum("feature")["b"].shape == (0,)
    assert td.prod()["a"] == 1
    assert td.sum("feature", reduce=True).shape == (0,)


def test_autograd():
    td = tree().exclude("s").requires_grad_()
    td.var(0).sum(reduce=True).backward()
    expected = td["a"].detach().requires_grad_()
    expected.var(0).sum().backward()
    assert_close(td.grad["a"], expected.grad)


@pytest.mark.parametrize(
    "name", ["sum", "mean", "amax", "amin", "std", "var", "nansum", "count_nonzero"]
)
def test_an_empty_tuple_of_dimensions_is_all_of_each_leaf_as_in_torch(name):
    td = TensorDict({"a": torch.randn(3, 4), "n": {"b": torch.randn(3)}}, [3])
    out = getattr(td, name)(())
    assert out.batch_size == () and set(out.keys(True, True)) == {"a", ("n", "b")}
    for key in out.keys(True, True):
        assert torch.equal(out[key], getattr(torch, name)(td[key], ()))
    if name == "sum":
        assert torch.equal(td.sum((), keepdim=True)["a"], td["a"].sum((), keepdim=True))
        assert torch.equal(td.sum((), reduce=True), td.sum(reduce=True))
        assert td.quantile(torch.tensor([0.5, 1.0]), ())["a"].shape == (2,)
        assert torch.equal(td.max(())["a"], td["a"].max())


def test_any_and_all_over_no_dimension_are_refused():
    td = TensorDict({"a": torch.ones(3, dtype=torch.bool)}, [3])
    for name in ("any", "all"):
        with pytest.raises(ValueError, match="over no dimension"):
            getattr(td, name)(())


@pytest.mark.parametrize(
    "name", ["sum", "mean", "prod", "amax", "amin", "std", "var", "nansum", "median", "argmax"]
)
def test_ragged_stacks_are_reduced_whole(name):
    values = [torch.randn(2, 3), torch.randn(4, 3)]
    rows = [TensorDict({"a": x, "n": {"b": x[0], "c": x[:, 0]}, "s": "text"}) for x in values]
    td = lazy_stack(rows)
    out = getattr(td, name)()
    assert out.batch_size == () and out["n"].batch_size == ()
    flat = {
        "a": torch.cat([x.reshape(-1) for x in values]),
        ("n", "b"): torch.stack([x[0] for x in values]).reshape(-1),
        ("n", "c"): torch.cat([x[:, 0] for x in values]),
    }
    for key, x in flat.items():
        torch.testing.assert_close(out[key], getattr(x, name)())
    if name == "sum":
        assert td.sum(keepdim=True)["a"].shape == (1, 1, 1)
        two = lazy_stack([td, td])
        torch.testing.assert_close(two.sum()["a"], 2 * out["a"])
        torch.testing.assert_close(td.norm()["a"], flat["a"].norm())
        with pytest.raises(
            RuntimeError, match="Cannot reduce along the stack dimension 0 of a rag"
        ):
            td.sum(0)


@pytest.mark.parametrize("n", [1, 2, 5])
def test_all_and_any_look_at_every_leaf(n):
    leaves = {f"k{i}": torch.ones(3, dtype=torch.bool) for i in range(n)}
    td = TensorDict(leaves, [3])
    assert td.all() is True and td.any() is True
    assert (~td).any() is False
    td[f"k{n - 1}"][2] = False
    assert td.all() is False and (~td).any() is True


def test_all_and_any_of_leaves_that_do_not_go_together():
    td = TensorDict(a=torch.ones(2), b=torch.ones(2, dtype=torch.int64), c=torch.zeros(0), d=1j)
    assert td.all() is True and td.any() is True
    td["d"] = torch.tensor(0j)
    assert td.all() is False
    large = TensorDict({name: torch.ones(40_000, dtype=torch.bool) for name in "abc"}, [])
    large["c"][-1] = False
    assert large.all() is False and large.any() is True


@pytest.mark.parametrize("name", ["sum", "mean", "amax", "std", "prod", "argmax", "count_nonzero"])
def test_one_dimension_is_reduced_as_by_torch(name):
    td = TensorDict(
        {"a": torch.rand(3, 2, 4), "b": torch.rand(3, 2), "n": {"c": torch.rand(3, 2)}}, [3, 2]
    )
    fn = getattr(torch, name)
    for dim in (0, 1, -1):
        out = getattr(td, name)(dim)
        assert out.batch_size == fn(torch.rand(3, 2), dim).shape
        assert_close(out["a"], fn(td["a"], dim % 2))
        assert_close(out["n", "c"], fn(td["n", "c"], dim))
    whole = getattr(td, name)()
    assert whole.batch_size == () and torch.equal(whole["a"], fn(td["a"]))
