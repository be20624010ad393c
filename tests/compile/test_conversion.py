"""Conversion, pytrees and modules trace as one graph and give what they give untraced."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from tensordict import TensorDict, TensorDictParams, merge_tensordicts

from ._limits import needs_traced

CASES = {
    "from_dict": lambda td: TensorDict.from_dict({"a": td["a"], "n": {"b": td["n", "b"]}})[
        "n", "b"
    ],
    "to_dict": lambda td: td.to_dict()["n"]["b"] + 1,
    "from_any": lambda td: TensorDict.from_any({"a": (td["a"], 1)})["a", "0"],
    "fromkeys": lambda td: TensorDict.fromkeys(["a"], 1.0)["a"] + td["a"],
    "to_tensordict": lambda td: td.to_tensordict()["a"],
    "to_namedtuple": lambda td: td.to_namedtuple().n.b + 1,
    "from_list": lambda td: TensorDict.from_list([{"a": td["a"]}] * 2)["a"],
    "tolist": lambda td: td.select("a").tolist(convert_nodes=False)[1]["a"] + 1,
    "state_dict": lambda td: td.state_dict()["n.b"] + 1,
    "merge": lambda td: merge_tensordicts(td, TensorDict({"z": td["a"]}, [2]))["z"],
    "tree_map": lambda td: pytree.tree_map(lambda x: x + 1, td)["n", "b"],
    "vmap": lambda td: torch.vmap(lambda row: row["a"] * row["n", "b"])(td),
}


def tree():
    return TensorDict({"a": torch.arange(2.0), "n": {"b": torch.ones(2)}, "s": "text"}, [2])


@pytest.mark.parametrize("name", CASES)
def test_one_graph(name):
    if name == "state_dict":
        module = nn.Linear(3, 3)
        needs_traced("nn.Module.state_dict", lambda x: module.state_dict()["bias"] + x)
    torch._dynamo.reset()
    fn = CASES[name]
    compiled = torch.compile(fn, backend="eager", fullgraph=True)
    assert torch.equal(compiled(tree()), fn(tree()))


def test_no_recompilation_when_values_change():
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    fn = torch.compile(lambda td: TensorDict.from_dict(td.to_dict())["n", "b"] + 1, backend=counter)
    for i in range(3):
        assert torch.equal(fn(tree() + i), torch.full((2,), 2.0 + i))
    assert counter.frame_count == 1


def test_functional_calls_do_not_recompile():
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    weight = module[0].weight

    def call(params, x):
        with params.to_module(module):
            return module(x)

    compiled = torch.compile(call, backend=counter, fullgraph=True)
    params = TensorDict.from_module(module).data
    for i in range(3):
        other = params * i
        torch.testing.assert_close(compiled(other, torch.ones(3)), call(other, torch.ones(3)))
    assert counter.frame_count == 1 and module[0].weight is weight


def test_modules_that_hold_tensordicts():
    torch._dynamo.reset()

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.params = TensorDictParams(TensorDict(w=torch.ones(3), n={"b": torch.zeros(3)}))

        def forward(self, x):
            return (self.params * 2)["w"] * x + self.params["n", "b"]

    model = Model()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 2.0))
    with torch.no_grad():
        model.params["n", "b"].fill_(1)
    assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 3.0))
    compiled(torch.ones(3)).sum().backward()
    assert torch.equal(model.params.grad["w"], torch.full((3,), 2.0))
