"""Indexing, shapes and joins trace whole under torch.compile, and map under torch.vmap."""

from __future__ import annotations

import pytest
import torch

from strategies import flat, same_tensor
from tensordict import TensorDict, TensorDictBase

ROWS = torch.tensor([1, 0])
GRID = torch.tensor([[0, 1], [1, 0]])
MASK = torch.tensor([True, False])


def make():
    nested = TensorDict({"b": torch.arange(24.0).view(2, 3, 4)}, [2, 3, 4], names=["x", "y", "z"])
    return TensorDict({"a": torch.arange(6.0).view(2, 3), "n": nested}, [2, 3], names=["x", "y"])


def written(td, index, value):
    out = td.clone()
    out[index] = value
    return out


def in_block(td):
    with td.view(-1) as x:
        return x["a"] + 1


GATE = {
    "int": lambda td: td[1],
    "slice": lambda td: td[:, 1:],
    "rows": lambda td: td[ROWS],
    "two tensors": lambda td: td[ROWS, ROWS],
    "write rows": lambda td: written(td, ROWS, td),
    "view": lambda td: td.view(-1),
    "unflatten": lambda td: td.unflatten(1, (3, 1)),
    "permute": lambda td: td.permute(1, 0),
    "squeeze": lambda td: td.unsqueeze(0).squeeze(),
    "expand": lambda td: td.expand(4, 2, 3),
    "split": lambda td: td.split(1),
    "unbind": lambda td: td.unbind(1),
    "stack": lambda td: torch.stack([td, td], 1),
    "cat": lambda td: torch.cat([td, td]),
    "where": lambda td: td.where(MASK, td),
}
MORE = {
    "list": lambda td: td[[0, 1]],
    "grid": lambda td: td[GRID],
    "none": lambda td: td[None],
    "ellipsis": lambda td: td[..., 0],
    "write row": lambda td: written(td, 0, 1.0),
    "set_at_": lambda td: td.clone().set_at_("a", 1.0, 0),
    "reshape": lambda td: td.reshape(3, 2),
    "flatten": lambda td: td.flatten(),
    "transpose": lambda td: td.transpose(0, 1),
    "movedim": lambda td: td.movedim(0, 1),
    "chunk": lambda td: td.chunk(2, 1),
    "tensor_split": lambda td: td.tensor_split(2),
    "iterate": lambda td: list(td),
    "roll": lambda td: td.roll(1, 0),
    "flip": lambda td: td.flip(0),
    "rot90": lambda td: td.rot90(),
    "repeat": lambda td: td.repeat(2, 1),
    "repeat_interleave": lambda td: td.repeat_interleave(2, 0),
    "tile": lambda td: td.tile((2,)),
    "gather": lambda td: td.gather(0, torch.zeros(1, 3, dtype=torch.int64)),
    "narrow": lambda td: td.narrow(1, 0, 2),
    "masked_fill": lambda td: td.masked_fill(MASK, 1.0),
    "where number": lambda td: td.where(MASK, 0.0),
    "pad": lambda td: td.pad([0, 1]),
    "new_zeros": lambda td: td.new_zeros(5),
    "zeros_like": lambda td: torch.zeros_like(td),
    "contiguous": lambda td: td.permute(1, 0).contiguous(),
    "pack": lambda td: td.pack()[0],
    "stack method": lambda td: TensorDict.stack([td, td]),
    "block": in_block,
}


def equal(a, b):
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b))
    if not isinstance(a, TensorDictBase):
        return same_tensor(a, b)
    left, right = flat(a), flat(b)
    return (
        a.batch_size == b.batch_size
        and a.names == b.names
        and list(left) == list(right)
        and all(same_tensor(x, right[path]) for path, x in left.items())
    )


def check(op):
    torch._dynamo.reset()
    compiled = torch.compile(op, fullgraph=True, backend="eager")
    td = make()
    assert equal(compiled(td), op(td))


@pytest.mark.parametrize("name", GATE)
def test_traces_whole(name):
    check(GATE[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_traces_whole_long(name):
    check(MORE[name])


def test_other_values_do_not_compile_again():
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    counter = CompileCounter()

    def step(td, rows):
        picked = torch.stack([td[rows], td.view(3, 2).permute(1, 0)])
        picked[0] = td
        return picked.unsqueeze(1).flatten()["a"]

    compiled = torch.compile(step, fullgraph=True, backend=counter)
    for i in range(4):
        td = make() * 1.0
        td["a"].add_(i)
        rows = ROWS.roll(i)
        assert torch.equal(compiled(td, rows), step(td, rows))
    assert counter.frame_count == 1


def test_operations_map_under_vmap():
    td = make()

    def inner(x, shift):
        assert x.batch_size == (3,)
        y = torch.stack([x[1:], x[:2]]).permute(1, 0).reshape(-1).unsqueeze(0)
        return y.roll(1, 1).squeeze(0)["a"] + shift

    got = torch.vmap(inner)(td, torch.tensor([0.0, 10.0]))
    assert torch.equal(got, torch.stack([inner(td[0], 0.0), inner(td[1], 10.0)]))


def test_rows_are_chosen_under_vmap():
    td = make()
    index = torch.tensor([[0, 1], [2, 2]])
    got = torch.vmap(lambda x, i: x[i]["a"])(td, index)
    assert torch.equal(got, td["a"].gather(1, index))
    out = torch.vmap(lambda x: x.view(3, 1))(td)
    assert out.batch_size == (2, 3, 1) and out["n"].batch_size == (2, 3, 1, 4)
