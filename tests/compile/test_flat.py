"""``torch.compile(fullgraph=True)`` of flat trees, which take short ways through most operations."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from tensordict import TensorDict

CALLS = {
    "add": lambda td: td + td,
    "number": lambda td: td * 2,
    "swapped": lambda td: 1 - td,
    "tensor": lambda td: td * torch.arange(4),
    "exp": lambda td: td.exp(),
    "lerp": lambda td: td.lerp(td, 0.5),
    "addcmul": lambda td: td.addcmul(td, td),
    "clamp": lambda td: td.clamp(0.2, 0.8),
    "eq": lambda td: td == td,
    "lt": lambda td: td < 1,
    "clone": lambda td: td.clone(),
    "apply": lambda td: td.apply(lambda x: x + 1),
    "apply two": lambda td: td.apply(torch.add, td),
    "apply_": lambda td: td.clone().apply_(lambda x: x.add_(1)),
    "named_apply": lambda td: td.named_apply(lambda key, x: x + len(key)),
    "norm": lambda td: td.norm(),
    "sum": lambda td: td.sum(),
    "sum(0)": lambda td: td.sum(0),
    "std(0)": lambda td: td.std(0),
    "max(0)": lambda td: td.max(0)[1],
    "softmax": lambda td: td.softmax(0),
    "mean of all": lambda td: td.mean(reduce=True),
    "row": lambda td: td[0],
    "None": lambda td: td[None],
    "list": lambda td: td[[0, 2]],
    "positions": lambda td: td[torch.tensor([0, 2])],
    "roll": lambda td: td.roll(1, 0),
    "flip": lambda td: td.flip(0),
    "view": lambda td: td.view(2, 2),
    "stack": lambda td: torch.stack([td, td]),
    "cat": lambda td: torch.cat([td, td]),
    "unbind": lambda td: td.unbind(0)[1],
    "build": lambda td: TensorDict({"n": {"a": td["k0"], "m": {"b": td["k1"]}}}, [4]),
    "to_dict": lambda td: td.to_dict()["k1"],
    "tolist": lambda td: td.tolist()[2]["k1"],
}


@pytest.mark.parametrize("name", CALLS)
def test_a_flat_tree_is_traced_whole(name):
    td = TensorDict({f"k{i}": torch.rand(4, 3) for i in range(4)}, [4], names=["x"])
    call = CALLS[name]
    found = torch.compile(call, backend="eager", fullgraph=True)(td)
    expected = call(td)
    if isinstance(expected, torch.Tensor):
        assert_close(found, expected)
        return
    assert found.batch_size == expected.batch_size and found.names == expected.names
    assert list(found.keys(True, True)) == list(expected.keys(True, True))
    for key in expected.keys(True, True):
        assert_close(found[key], expected[key])
