"""`assert_close` against ``torch.testing.assert_close`` leaf by leaf."""

from __future__ import annotations

import pytest
import torch

from tensordict import TensorDict, assert_allclose_td, assert_close, lazy_stack


def pair(**changes):
    a = {"x": torch.arange(3.0), "n": {"y": torch.ones(2, 2)}, "i": torch.arange(2), "s": "text"}
    return TensorDict(a), TensorDict({**a, **changes})


def test_close_trees():
    assert assert_close(*pair()) is True and assert_allclose_td(*pair()) is True
    assert assert_close(*pair(x=torch.arange(3.0) + 1e-7))
    assert assert_close(*pair(x=torch.arange(3.0) + 0.1), rtol=0, atol=0.2)
    nan = TensorDict(a=float("nan"))
    assert assert_close(nan, nan.clone())
    assert assert_close(*pair(s="other")), "only tensors are compared"
    batched = TensorDict({"a": torch.zeros(3)}, [3])
    assert assert_close(batched, TensorDict(a=torch.zeros(3)))


@pytest.mark.parametrize(
    ("changes", "texts"),
    [
        ({"x": torch.zeros(3)}, ["'x'", "Mismatched elements", "mean squared error 1.667"]),
        ({"n": {"y": torch.zeros(2, 2)}}, ["('n', 'y')"]),
        ({"i": torch.arange(2.0)}, ["'i'", "dtype"]),
        ({"x": torch.zeros(4)}, ["'x'", "shape [3] in the first, [4] in the second"]),
        ({"x": torch.zeros(3), "i": torch.ones(2).long()}, ["'x'", "'i'"]),
    ],
)
def test_every_difference_is_named(changes, texts):
    with pytest.raises(AssertionError) as err:
        assert_close(*pair(**changes), msg="while testing")
    assert all(text in str(err.value) for text in ["while testing", *texts])


def test_options():
    a, b = TensorDict(a=1.0, only=2.0), TensorDict(a=1.0)
    with pytest.raises(KeyError, match="only in the first"):
        assert_close(a, b)
    with pytest.raises(KeyError, match="only in the second"):
        assert_close(b, a)
    assert assert_close(a, b, intersection=True)
    with pytest.raises(AssertionError, match=r"\('root', 'a'\)"):
        assert_close(TensorDict(a=1.0), TensorDict(a=2.0), prefix=("root",))
    nan = TensorDict(a=float("nan"))
    with pytest.raises(AssertionError, match="'a'"):
        assert_close(nan, nan.clone(), equal_nan=False)
    for bad in (({"a": 1}, a), (a, {"a": 1})):
        with pytest.raises(TypeError, match="dict"):
            assert_close(*bad)


def test_stacks_of_any_shape():
    ragged = lazy_stack([TensorDict(a=torch.zeros(2)), TensorDict(a=torch.zeros(3))])
    assert assert_close(ragged, ragged.clone())
    other = ragged.clone()
    other[1]["a"][0] = 1
    with pytest.raises(AssertionError, match=r"'a'"):
        assert_close(ragged, other)
    even = lazy_stack([TensorDict(a=torch.zeros(2)), TensorDict(a=torch.ones(2))])
    assert assert_close(even, even.to_tensordict())
