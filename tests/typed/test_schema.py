"""Declared keys, shapes and dtypes."""

from typing import Annotated, ClassVar

import pytest
import torch
from torch import Tensor
from typing_extensions import NotRequired

from tensordict import TensorDict, TypedTensorDict, is_tensorclass
from tensordict.typed.schema import TensorSpec


class State(TypedTensorDict):
    pos: Annotated[Tensor, TensorSpec(shape=("n", 3), dtype=torch.float32)]
    mass: Annotated[Tensor, TensorSpec(shape=("n",))]
    tag: NotRequired[str]
    extra: NotRequired[Annotated[Tensor, TensorSpec(shape=(None, 2))]]
    version: ClassVar[int] = 3


class More(State):
    vel: Tensor


def state(**kwargs):
    return State(pos=torch.zeros(2, 5, 3), mass=torch.ones(2, 5), batch_size=[2], **kwargs)


def test_entries_are_attributes_and_keys():
    s = state(tag="a")
    assert s.pos is s["pos"] and s.tag == "a" and State.version == 3
    s.mass = torch.zeros(2, 5)
    assert s["mass"].sum() == 0
    with pytest.raises(KeyError):
        s.extra
    with pytest.raises(RuntimeError, match="batch dimension"):
        s.pos = torch.zeros(3)


def test_the_constructor_wants_what_is_declared():
    assert State.__required_keys__ == {"pos", "mass"} and State.__optional_keys__ == {
        "tag",
        "extra",
    }
    assert More.__required_keys__ == {"pos", "mass", "vel"}
    with pytest.raises(TypeError, match=r"State\(\) missing required field\(s\): mass, pos"):
        State()
    with pytest.raises(TypeError, match=r"unexpected field\(s\): q"):
        state(q=1)
    with pytest.raises(TypeError):
        State({"pos": 1})
    with pytest.raises(AttributeError, match="can't be used"):
        type("Bad", (TypedTensorDict,), {"__annotations__": {"values": Tensor}})


def test_results_keep_the_class():
    s = state()
    for out in (s[0], s + 1, s.clone(), torch.stack([s, s]), s.reshape(2, 1), s.to(torch.float64)):
        assert type(out) is State
    assert isinstance(s, TensorDict) and not is_tensorclass(s)
    assert type(State.from_tensordict(TensorDict(pos=1, mass=1))) is State
    with pytest.raises(TypeError, match="missing"):
        State.from_tensordict(TensorDict(pos=1))


def test_check_lists_every_difference():
    s = state(extra=torch.zeros(2, 7, 2))
    assert s.check() is s and s[0].check().batch_size == ()
    s["pos"] = torch.zeros(2, 5, 4, dtype=torch.float64)
    s["mass"] = torch.zeros(2, 6)
    s["extra"] = torch.zeros(2, 7)
    s["odd"] = torch.zeros(2)
    with pytest.raises(KeyError) as error:
        s.check()
    text = str(error.value)
    for part in (
        "5 differences",
        "'odd'    not declared",
        "expected torch.float32, got torch.float64",
        "expected size 3, got 4",
        "expected n=5 as in 'pos', got 6",
        "'extra'  expected shape [*B, None, 2]",
    ):
        assert part in text, (part, text)
    s = state()
    del s["mass"]
    s["pos"] = "text"
    with pytest.raises(KeyError, match="missing"):
        s.check()
