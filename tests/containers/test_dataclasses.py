"""Dataclasses to tensorclasses."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from tensordict import TensorDict, from_dataclass, is_tensorclass, tensorclass


@dataclasses.dataclass
class Base:
    x: torch.Tensor

    def double(self):
        return self.x * 2


@dataclasses.dataclass
class Record(Base):
    s: str = "text"
    tag: str = dataclasses.field(default_factory=lambda: "made")
    none: Any = None

    @property
    def length(self):
        return len(self.s)


def test_a_type_gives_a_type():
    cls = from_dataclass(Record)
    assert is_tensorclass(cls) and cls.__name__ == "Record_tc" and cls is from_dataclass(Record)
    assert not is_tensorclass(Record) and not isinstance(Record(1), TensorDict)
    item = cls(torch.ones(2, 3), batch_size=[2])
    assert item.s == "text" and item.tag == "made" and item.none is None and item.length == 4
    assert torch.equal(item[0].double(), torch.full((3,), 2.0)) and type(item[0]) is cls
    assert from_dataclass(cls) is cls and from_dataclass(Record, frozen=True) is not cls
    with pytest.raises(dataclasses.FrozenInstanceError):
        from_dataclass(Record, frozen=True)(torch.ones(1)).x = torch.zeros(1)


def test_an_instance_gives_an_instance():
    item = from_dataclass(Record(torch.zeros(2, 3), s="mine"), auto_batch_size=True)
    assert type(item) is from_dataclass(Record) and item.batch_size == (2, 3) and item.s == "mine"
    assert from_dataclass(Record(torch.zeros(2, 3)), batch_size=[2]).batch_size == (2,)
    assert from_dataclass(Record(torch.zeros(2, 3)), batch_dims=1).batch_size == (2,)

    @tensorclass
    class Dest:
        x: torch.Tensor
        s: str
        tag: str
        none: Any = None

    assert type(from_dataclass(Record(torch.zeros(1)), dest_cls=Dest)) is Dest
    as_class = TensorDict.from_dataclass(Record(torch.zeros(2)), as_tensorclass=True)
    assert type(as_class) is from_dataclass(Record) and as_class.s == "text"


def test_what_is_refused():
    for bad in (3, TensorDict(), dict):
        with pytest.raises(TypeError, match="dataclass"):
            from_dataclass(bad)
    with pytest.raises(NotImplementedError, match="inplace"):
        from_dataclass(Record, inplace=True)
