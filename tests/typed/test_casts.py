"""Classes that choose which leaves a cast takes, and annotations of jaxtyping."""

import typing

import pytest
import torch
from torch import Tensor

from tensordict import TensorClass, TensorDict, TypedTensorDict, lazy_stack, tensorclass

try:
    import jaxtyping
except ImportError:  # needs a newer Python than this package does
    jaxtyping = None
else:
    Ids = jaxtyping.Int[Tensor, "batch"]
    Position = jaxtyping.Float[Tensor, "batch 3"]

LOW = torch.float16


def keep_y(path, x):
    return x.is_floating_point() and path not in (("y",), ("n", "y"))


@tensorclass(cast_filter=keep_y)
class Decorated:
    x: Tensor
    y: Tensor
    n: TensorDict | None = None
    name: str = "name"


class Based(TensorClass, cast_filter=keep_y):
    x: Tensor
    y: Tensor


class Below(Based):
    n: TensorDict | None = None


def dtypes(td):
    return {key: x.dtype for key, x in td.to_tensordict().items(True, True)}


@pytest.mark.parametrize("cls", [Decorated, Below])
@pytest.mark.parametrize(
    "cast",
    [
        lambda c: c.half(),
        lambda c: c.to(LOW),
        lambda c: c.type(LOW),
        lambda c: c.to("cpu", LOW),
        lambda c: c.to(dtype=LOW, memory_format=torch.contiguous_format),
        lambda c: c.to(LOW, inplace=True),
        lambda c: c.to("cpu", LOW, inplace=True),
        lambda c: c.consolidate().to(LOW),
        lambda c: c.lock_().half(),
    ],
)
def test_casts_of_an_instance_take_the_chosen_leaves(cls, cast):
    inner = TensorDict({"y": torch.ones(2), "z": torch.ones(2)}, [2])
    c = cls(torch.zeros(2), torch.zeros(2), n=inner, batch_size=[2])
    out = cast(c)
    assert type(out) is cls
    f32 = torch.float32
    assert dtypes(out) == {"x": LOW, "y": f32, ("n", "y"): f32, ("n", "z"): LOW}


def test_the_filter_of_a_call_and_of_a_holder_come_first():
    c = Based(torch.zeros(2), torch.zeros(2), batch_size=[2])
    assert dtypes(c.half(cast_filter=lambda path, x: path == ("y",))) == {
        "x": torch.float32,
        "y": LOW,
    }
    assert set(dtypes(TensorDict({"c": c}).half()).values()) == {LOW}
    assert set(dtypes(c.to(c.to_tensordict().half().attrs())).values()) == {LOW}


def test_members_of_a_stack_are_asked_by_the_keys_of_the_stack():
    keys = []
    td = lazy_stack([TensorDict({"x": torch.zeros(n)}) for n in (1, 2)])
    assert (
        td.half(cast_filter=lambda key, x: keys.append(key) or x.numel() == 2)[0]["x"].dtype
        is torch.float32
    )
    assert keys == [("x",), ("x",)]
    stack = lazy_stack([Based(torch.zeros(n), torch.zeros(n)) for n in (1, 2)]).half()
    assert [(m.x.dtype, m.y.dtype) for m in stack.unbind(0)] == [(LOW, torch.float32)] * 2


def test_a_block_on_a_filtered_cast_goes_back():
    c = Based(torch.zeros(2), torch.zeros(2), batch_size=[2])
    with c.to(LOW) as low:
        low.x = low.x + 1
    assert c.x.dtype is torch.float32 and c.x.tolist() == [1, 1]


@pytest.mark.skipif(jaxtyping is None, reason="jaxtyping is not installed")
def test_jaxtyping_annotations():
    Batch = jaxtyping.Float[Tensor, "batch features"]

    @tensorclass(tensor_only=True)
    class Only:
        x: Batch
        y: "Ids"
        z: jaxtyping.Shaped[Tensor, "..."] | None = None

    class Cast(TensorClass["autocast"]):
        x: Batch
        n: int = 0

    class Plain(TensorClass):
        x: Batch
        name: str = "a"

    only = Only([[1.0, 2.0]], [3], batch_size=[1])
    assert only.x.tolist() == [[1, 2]] and only.y.tolist() == [3] and only.z is None
    cast = Cast([[1.0]], "3")
    assert torch.equal(cast.x, torch.ones(1, 1)) and cast.n == 3
    both = torch.stack([Plain(torch.zeros(2, 3), batch_size=[2])] * 2)
    assert type(both) is Plain and both.x.shape == (2, 2, 3)
    assert isinstance(both[0].x, Batch) and not isinstance(only.y, Batch)
    with pytest.raises(TypeError, match="tensor_only"):

        @tensorclass(tensor_only=True)
        class _Wrong:
            x: jaxtyping.Float[typing.Any, "..."]


@pytest.mark.skipif(jaxtyping is None, reason="jaxtyping is not installed")
def test_declared_keys_are_checked_against_jaxtyping_annotations():
    class State(TypedTensorDict):
        pos: Position

    assert State(pos=torch.zeros(2, 3), batch_size=[2]).check()["pos"].shape == (2, 3)
    with pytest.raises(KeyError, match=r"expected Float\[Tensor, 'batch 3'\], got torch.int64"):
        State(pos=torch.zeros(2, 3, dtype=torch.int64), batch_size=[2]).check()
