"""Operands, keys that differ, writes that must not half happen, autograd, transforms."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from tensordict import TensorDict, lazy_stack


def tree(**more):
    td = TensorDict({"a": torch.rand(3, 4), "n": {"b": torch.rand(3)}, "s": "text"}, [3])
    td.names = ["x"]
    return td.update(more)


# --- operands ---------------------------------------------------------------------------


def test_tensor_meets_the_batch_dimensions():
    td = tree()
    out = td * torch.tensor([1.0, 2.0, 3.0])
    assert_close(out["a"], td["a"] * torch.tensor([[1.0], [2.0], [3.0]]))
    assert_close((td + torch.ones(1))["n", "b"], td["n", "b"] + 1)
    assert_close((td + torch.tensor(1.0))["a"], td["a"] + 1)
    wide = td + torch.ones(2, 3)
    assert wide.batch_size == (2, 3) and wide["a"].shape == (2, 3, 4) and wide.names == [None, "x"]
    assert wide.get("s").batch_size == (2, 3)
    with pytest.raises(RuntimeError, match=r"\[3\] does not broadcast with \[3, 4\]"):
        td + torch.ones(3, 4)


def test_tensor_meets_each_leaf_without_batch_dimensions():
    td = TensorDict(a=torch.rand(4), b=torch.rand(2, 4))
    out = td + torch.arange(4)
    assert out.batch_size == ()
    assert_close(out["a"], td["a"] + torch.arange(4))
    assert_close(out["b"], td["b"] + torch.arange(4))


def test_operands_are_matched_by_key_not_by_order():
    td = TensorDict({"a": torch.rand(3), "b": torch.rand(3), "c": torch.rand(3)}, [3])
    other = TensorDict({name: td[name] * 2 for name in "cab"}, [3])
    for out in (td + other, td.add(other), td.lerp(other, 1.0) + td, torch.add(td, other)):
        assert_close(out["a"], td["a"] * 3)
        assert_close(out["c"], td["c"] * 3)
        assert list(out.keys()) == ["a", "b", "c"]
    assert (td * 2 == other).all() and (other >= td).all()
    assert_close(td.addcmul(other, td)["c"], td["c"] + td["c"] * 2 * td["c"])


def test_numbers_keep_their_sign_kind_and_mode():
    td = TensorDict(a=torch.ones(2), b=torch.ones(2), c=torch.ones(2))
    assert torch.signbit((td * 0.0)["a"]).tolist() == [False, False]
    assert torch.signbit((td * -0.0)["a"]).tolist() == [True, True]
    whole = TensorDict(a=torch.ones(2, dtype=torch.int64), b=torch.arange(2), c=torch.arange(2))
    assert (whole * 3)["a"].dtype is torch.int64 and (whole * 3.0)["a"].dtype is torch.float32
    with torch.inference_mode():
        assert (td * 7.25)["a"].tolist() == [7.25, 7.25]
    leaf = td.clone().requires_grad_()
    (leaf * 7.25)["a"].sum().backward()
    assert leaf["a"].grad.tolist() == [7.25, 7.25]


def test_numbers_under_transforms():
    td = TensorDict({"a": torch.rand(3, 2), "b": torch.arange(3), "c": torch.rand(3)}, [3])

    def poly(t):
        return 5 - t * 3 + t**2 * 1.5

    expected = poly(td)
    mapped = torch.vmap(poly)(td)
    for key in td.keys():
        assert mapped[key].dtype is expected[key].dtype
        assert_close(mapped[key], expected[key])

    def loss(x):
        inner = TensorDict({"a": x, "b": x * 1.0, "c": x[0]}, [])
        return sum(poly(inner * 3.5).values(), torch.zeros(2)).sum()

    x = torch.rand(2)
    leaf = x.clone().requires_grad_()
    loss(leaf).backward()
    assert_close(torch.func.grad(loss)(x), leaf.grad)
    assert_close(torch.func.jacfwd(loss)(x), leaf.grad)
    assert_close(torch.func.vmap(torch.func.grad(loss))(x.expand(2, 2))[1], leaf.grad)
    assert_close((td * 3.5)["a"], td["a"] * 3.5)  # after the transforms, none of whose tensors stay


def test_numbers_do_not_follow_the_default_device():
    td = TensorDict(a=torch.ones(2), b=torch.ones(2), c=torch.ones(2))
    with torch.device("meta"):
        assert (td * 11)["a"].tolist() == [11.0, 11.0]
        assert (td < 11)["a"].tolist() == [True, True]


def test_batch_sizes_broadcast():
    td = tree().exclude("s")
    both = td[:, None] * td[None]
    assert both.batch_size == (3, 3)
    assert_close(both["a"], td["a"][:, None] * td["a"][None])
    assert_close((td + td[0])["n", "b"], td["n", "b"] + td["n", "b"][0])
    assert (td[:1] - td).batch_size == (3,)
    for bad in (lambda: td + td[:2], lambda: td == td[:2], lambda: td.addcmul(td, td[:2])):
        with pytest.raises(RuntimeError, match="does not broadcast"):
            bad()


def test_a_feature_dimension_that_meets_a_batch_dimension_is_refused():
    x = TensorDict({"a": torch.ones(2, 1)}, [2, 1])
    y = TensorDict({"a": torch.ones(2, 1, 5)}, [2, 1])
    with pytest.raises(RuntimeError, match=r"'a'.*\[2, 2, 5\]"):
        x + y


@pytest.mark.parametrize("value", [np.float32(2), np.ones(3, "float32"), np.int64(2), True, 2 + 1j])
def test_numbers_and_arrays(value):
    td = tree()
    other = torch.as_tensor(value)
    expected = td["n", "b"] + (value if isinstance(value, (bool, complex)) else other)
    assert_close((td + value)["n", "b"], expected)
    assert_close((value + td)["n", "b"], expected)


@pytest.mark.parametrize("bad", ["text", None, [1, 2], object(), {"a": 1}])
def test_things_that_are_no_operands(bad):
    td = tree()
    before = td["a"].clone()
    for fn in (lambda: td + bad, lambda: bad - td, lambda: td.mul(bad), lambda: td.add_(bad)):
        with pytest.raises(TypeError):
            fn()
    with pytest.raises(TypeError):
        td += bad
    assert torch.equal(td["a"], before)


def test_promotion_is_torchs():
    td = TensorDict(i=torch.tensor([1, 2]), f=torch.tensor([1.0]), h=torch.tensor([1.0]).half())
    assert (td + 1.5)["i"].dtype == torch.float32 and (td + 1.5)["h"].dtype == torch.float16
    assert (td / 2)["i"].dtype == torch.float32 and (td // 2)["i"].dtype == torch.int64
    assert (2**td)["i"].dtype == torch.int64 and (td > 0)["h"].dtype == torch.bool
    assert td.maximum(2.5)["i"].dtype == torch.float32


class Proud(torch.Tensor):
    """A tensor that is not seen with plain ones, as distributed tensors are not."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        flat = [x for a in args for x in (a if isinstance(a, (list, tuple)) else [a])]
        if any(type(x) is torch.Tensor for x in flat):
            raise RuntimeError("plain tensors are below me")
        return super().__torch_function__(func, types, args, kwargs or {})


def test_numbers_with_subclasses():
    td = TensorDict({str(i): torch.ones(3).as_subclass(Proud) for i in range(4)})
    td["p"] = torch.nn.Parameter(torch.ones(3))
    for out in (td * 2, 3 - td, 2 * td.clone(), td.detach().clone().mul_(2)):
        assert [type(x) for x in out.values()] == [Proud] * 4 + [torch.Tensor]
        assert all((x == 2).all() for x in out.values())
    assert (td < 2).all() and not (td == 2).any()


def test_numbers_with_fake_tensors():
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        td = TensorDict({str(i): torch.ones(3) for i in range(4)}, [3])
    for out in (td * 2, 1 - td, td < 2, td.clone().add_(1)):  # outside of the mode
        assert out["2"].shape == (3,)


def test_numbers_that_do_not_fit_a_dtype():
    td = TensorDict(f=torch.ones(2), d=torch.ones(2).double(), i=torch.ones(2, dtype=torch.int64))
    out = td * 1e300
    assert out["f"].isinf().all() and (out["d"] == 1e300).all() and out["i"].dtype == torch.float32
    small = TensorDict(u=torch.tensor([250], dtype=torch.uint8), h=torch.ones(1).half())
    assert (small + 10)["u"] == 4 and (small * 0.1)["h"] == torch.ones(1).half() * 0.1
    large = TensorDict({str(i): torch.ones(5000) for i in range(3)})
    assert ((large * 2) == 2).all()


def test_alpha_and_rounding_mode():
    td = tree()
    assert_close(td.add(td, alpha=2)["a"], td["a"] * 3)
    assert_close(td.sub(1, alpha=2)["a"], td["a"] - 2)
    assert_close(td.rsub(1, alpha=2)["a"], 1 - 2 * td["a"])
    assert_close(torch.sub(td, td, alpha=2)["a"], -td["a"])
    assert_close(td.div(0.3, rounding_mode="floor")["a"], td["a"].div(0.3, rounding_mode="floor"))
    copy = td.clone()
    copy.sub_(td, 2)
    assert_close(copy["a"], -td["a"])
    with pytest.raises(TypeError):
        td.add(1, beta=2)
    with pytest.raises(TypeError):
        td.add(1, 2, 3)


# --- keys that differ -------------------------------------------------------------------


def other_keys():
    return TensorDict({"a": torch.ones(3, 4), "c": torch.full((3,), 5.0)}, [3])


def test_unequal_keys():
    td = tree()
    for fn in (
        lambda: td + other_keys(),
        lambda: td == other_keys(),
        lambda: td.mul_(other_keys()),
    ):
        with pytest.raises(KeyError, match="keys in tensordicts mismatch") as info:
            fn()
        assert "'c'" in str(info.value) and "('n', 'b')" in str(info.value)


def test_default_intersection():
    out = tree().add(other_keys(), default="intersection")
    assert set(out.keys(True, True)) == {"a"} and out["s"] == "text" and "n" not in out


@pytest.mark.parametrize("default", [2.0, torch.tensor(2.0), torch.full((3,), 2.0)])
def test_default_value(default):
    td, other = tree(), other_keys()
    out = td.sub(other, default=default)
    assert set(out.keys(True, True)) == {"a", ("n", "b"), "c"}
    assert_close(out["a"], td["a"] - 1)
    assert_close(out["n", "b"], td["n", "b"] - 2)
    assert_close(out["c"], torch.full((3,), -3.0))
    # equal keys: the default does not matter
    assert_close(td.sub(td, default=default)["a"], torch.zeros(3, 4))


def test_default_that_is_no_value():
    with pytest.raises(TypeError, match="union"):
        tree().add(other_keys(), default="union")


# --- non-tensor entries -----------------------------------------------------------------


def test_comparisons_of_non_tensor_entries():
    td = tree()
    td["v"] = ["p", "q", "r"]
    other = td.clone()
    other["v"] = ["p", "x", "r"]
    assert (td == other)["v"].tolist() == [True, False, True]
    assert (td != other)["v"].tolist() == [False, True, False]
    assert (td == td)["s"].tolist() == [True] * 3
    assert (td == 1)["s"].tolist() == [False] * 3
    assert (td != td.exclude("s"))["s"].tolist() == [True] * 3
    assert (td < other)["s"] == "text"  # values have no order


def test_comparison_with_a_mapping():
    assert (TensorDict(a=1, n={"b": 2}) == {"a": 1, "n": {"b": 3}})["n", "b"].item() is False
    td = TensorDict({"a": torch.ones(3)}, [3])
    assert (td == {"a": 1}).all()
    with pytest.raises(KeyError):
        td.eq({"b": 1})


def test_comparison_with_other_objects():
    td = tree()
    assert (td == None) is False and (td != None) is True  # noqa: E711
    assert (td == "text") is False
    for fn in (lambda: td < None, lambda: td >= "text"):
        with pytest.raises(TypeError):
            fn()
    with pytest.raises(TypeError):
        hash(td)


# --- writes -----------------------------------------------------------------------------


def unchanged(td, fn, error=Exception):
    before = {k: x.clone() for k, x in td.items(True, True)}
    with pytest.raises(error):
        fn(td)
    for key, x in td.items(True, True):
        assert torch.equal(x, before[key]), key


def test_a_dtype_that_a_later_leaf_refuses():
    td = TensorDict(a=torch.ones(3), b=torch.ones(3, dtype=torch.int64), c=torch.ones(3))
    unchanged(td, lambda td: td.add_(1.5), RuntimeError)
    unchanged(td, lambda td: td.div_(2), RuntimeError)
    unchanged(td, lambda td: td.sqrt_(), RuntimeError)
    unchanged(
        td, lambda td: td.mul_(TensorDict(a=torch.ones(3), b=torch.ones(3), c=1)), RuntimeError
    )
    unchanged(td, lambda td: td.addcmul_(td, 1.5), RuntimeError)
    td.add_(1)
    assert td["b"].tolist() == [2, 2, 2]


def test_a_zero_that_a_later_leaf_cannot_divide_by():
    td = TensorDict(a=torch.ones(2), b=torch.tensor([4, 4]), c=torch.ones(2))
    unchanged(td, lambda td: td.floor_divide_(0), RuntimeError)
    zero = TensorDict(a=torch.ones(2), b=torch.tensor([1, 0]), c=torch.ones(2))
    for name in ("floor_divide_", "fmod_", "remainder_", "mod_"):
        unchanged(td, lambda td, name=name: getattr(td, name)(zero), RuntimeError)
    unchanged(td, lambda td: td.div_(zero, rounding_mode="trunc"), RuntimeError)
    td //= 3
    assert td["b"].tolist() == [1, 1]


def test_a_shape_that_a_later_leaf_refuses():
    td = TensorDict(a=torch.ones(3), b=torch.ones(2), c=torch.ones(3))
    unchanged(td, lambda td: td.add_(torch.ones(3)), RuntimeError)
    with pytest.raises(RuntimeError, match=r"'b' +\[3\] does not broadcast to \[2\]"):
        td.add_(torch.ones(3))
    wide = TensorDict(a=torch.ones(3), b=torch.ones(2), c=torch.ones(2, 3))
    unchanged(td, lambda td: td.add_(wide), RuntimeError)


def test_memory_that_overlaps_itself():
    td = TensorDict(a=torch.ones(3), b=torch.ones(1).expand(3))
    unchanged(td, lambda td: td.add_(1), RuntimeError)


def test_a_leaf_that_requires_grad():
    td = TensorDict(a=torch.ones(3), b=torch.ones(3, requires_grad=True))
    unchanged(td, lambda td: td.add_(1), RuntimeError)
    unchanged(td, lambda td: td.zero_(), RuntimeError)
    with torch.no_grad():
        td.add_(1)
    assert td["b"].tolist() == [2, 2, 2]


def test_a_batch_that_would_grow():
    td = tree()
    unchanged(td, lambda td: td.add_(torch.ones(2, 3)), RuntimeError)


def test_unequal_keys_change_nothing():
    unchanged(tree(), lambda td: td.add_(other_keys()), KeyError)
    unchanged(tree(), lambda td: td.lerp_(tree(), other_keys()), KeyError)


def test_in_place_operators_keep_the_object_and_its_memory():
    td = tree().lock_()
    a, same = td["a"], td
    td += 1
    td *= td.clone()
    td -= torch.ones(3)
    assert td is same and td["a"] is a and td.is_locked


# --- clamp ------------------------------------------------------------------------------


def test_clamp():
    td = tree()
    low, high = td * 0 + 0.3, td * 0 + 0.6
    for out in (
        td.clamp(0.3, 0.6),
        td.clamp(low, high),
        td.clamp(low, 0.6),
        td.clamp(torch.full((3,), 0.3), 0.6),
        torch.clamp(td, 0.3, max=high),
        td.clone().clamp_(0.3, 0.6),
        td.clone().clamp_(low, 0.6),
        td.clamp(0.3, 0.6, out=td.clone()),
    ):
        assert_close(out["a"], td["a"].clamp(0.3, 0.6))
        assert_close(out["n", "b"], td["n", "b"].clamp(0.3, 0.6))
    assert_close(td.clamp(min=0.5)["a"], td["a"].clamp(min=0.5))
    assert_close(td.clamp(max=high)["a"], td["a"].clamp(max=0.6))
    with pytest.raises(TypeError):
        td.clamp()


# --- autograd and transforms ------------------------------------------------------------


def test_gradients_flow():
    td = TensorDict({str(i): torch.rand(3, requires_grad=True) for i in range(4)}, [3])
    ((td * 2 + td).exp() / td.clamp(0.1)).sum(reduce=True).backward()
    for i in range(4):
        x = td[str(i)].detach().requires_grad_()
        ((x * 2 + x).exp() / x.clamp(0.1)).sum().backward()
        assert_close(td.grad[str(i)], x.grad)


def test_in_place_operations_are_recorded():
    td = TensorDict({str(i): torch.rand(3, requires_grad=True) for i in range(4)}, [3])
    out = td * 1
    out.mul_(3).add_(td)
    out.sum(reduce=True).backward()
    assert_close(td.grad["2"], torch.full((3,), 4.0))


def test_grad_data_detach():
    td = tree().exclude("s")
    assert td.grad is None and not td.requires_grad
    assert td.requires_grad_() is td and td.requires_grad
    td["a"].sum().backward()
    assert set(td.grad.keys(True, True)) == {"a"} and td.grad.batch_size == (3,)
    assert td.zero_grad(set_to_none=False).grad["a"].sum() == 0
    assert td.zero_grad().grad is None
    for plain in (td.data, td.detach()):
        assert not plain.requires_grad and plain["a"].data_ptr() == td["a"].data_ptr()
        assert plain.names == ["x"] and not plain.is_locked
    td.lock_()
    assert td.data.is_locked and td.detach().is_locked and not (td * 2).is_locked
    out = td * 2
    assert out.detach_() is out and not out.requires_grad
    assert not td.requires_grad_(False).requires_grad


def test_requires_grad_of_integers():
    td = TensorDict(a=torch.ones(2), b=torch.ones(2, dtype=torch.int64))
    with pytest.raises(RuntimeError, match=r"'b' +torch\.int64"):
        td.requires_grad_()
    assert not td["a"].requires_grad


def test_backward():
    td = TensorDict(a=torch.rand(3), b=torch.rand(()), i=torch.tensor(1))
    td["a"].requires_grad_()
    td["b"].requires_grad_()
    (td * 2).sum().backward()
    assert_close(td.grad["a"], torch.full((3,), 2.0))
    td.zero_grad()
    (td * td).backward(td.detach())
    assert_close(td.grad["a"], 2 * td["a"].detach() ** 2)
    td.zero_grad()
    (td * 2).sum().backward(inputs=td.select("b"))
    assert td["a"].grad is None and td["b"].grad == 2
    with pytest.raises(RuntimeError, match="no leaf"):
        td.detach().backward()
    with pytest.raises(TypeError):
        td.backward(torch.ones(3))


FUNCTIONS = {
    "unary": lambda td: td.sin(),
    "number": lambda td: td * 2 + 1,
    "tree": lambda td: td * td,
    "tensor": lambda td: td + torch.tensor(2.0),
    "reflected": lambda td: 1 - td,
    "ternary": lambda td: td.addcmul(td, td),
    "norm": lambda td: td.norm(),
    "sum": lambda td: td.sum(),
    "clone": lambda td: td.clone(),
    "inplace": lambda td: td.clone().mul_(3),
    "inplace_tree": lambda td: td.clone().mul_(td),
    "compare": lambda td: (td > 0) * td,
    "softmax": lambda td: td.softmax(0),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("n", [2, 4])
def test_vmap(name, n):
    fn = FUNCTIONS[name]
    xs = torch.rand(5, 3)

    def call(x):
        td = TensorDict({str(i): x * (i + 1) for i in range(n)}, [3])
        return tuple(fn(td).values())

    out = torch.vmap(call)(xs)
    for i in range(5):
        for got, want in zip(out, call(xs[i])):
            assert_close(got[i], want)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("transform", [torch.func.jacrev, torch.func.jacfwd])
def test_jacobians(name, transform):
    fn = FUNCTIONS[name]
    x = torch.rand(3)

    def call(x):
        td = TensorDict({str(i): x * (i + 1) for i in range(4)}, [3])
        return fn(td)["2"]

    def by_hand(x):
        td = TensorDict({"2": x * 3}, [3])
        return fn(td)["2"]

    assert_close(transform(call)(x), transform(by_hand)(x))


@pytest.mark.parametrize("n", [1, 4])
def test_stacks_with_a_batch_dimension_of_one(n):
    members = [TensorDict({"a": torch.rand(3, 2), "n": {"b": torch.rand(3)}}, [3])]
    td = TensorDict({"l": lazy_stack(members)}, [1, 3])
    td.update({str(i): torch.rand(1, 3) for i in range(n)})
    for out in (td + 1, 1 + td, td.lerp(td + 2, 0.5), td + torch.ones(1, 3)):
        for key in [("l", "a"), ("l", "n", "b"), "0"]:
            torch.testing.assert_close(out[key], td[key] + 1)
    with pytest.raises(RuntimeError, match=r"\('l', '0', 'a'\)"):
        TensorDict(
            {"l": lazy_stack([TensorDict(a=torch.rand(2, 1, 3)).auto_batch_size_(2)])}, [1, 2, 1]
        ) + (
            TensorDict(
                {"l": lazy_stack([TensorDict(a=torch.rand(2, 1, 2, 3)).auto_batch_size_(2)])},
                [1, 2, 1],
            )
        )
