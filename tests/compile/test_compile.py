"""``torch.compile(fullgraph=True)``: one graph, the values of eager mode, no recompilation."""

from __future__ import annotations

import operator

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.nn import functional as F
from torch.testing import assert_close

from tensordict import TensorDict, TensorDictBase

from ._limits import needs_traced


def tree(seed=0):
    g = torch.Generator().manual_seed(seed)
    return TensorDict(
        {
            "a": torch.rand(3, 4, generator=g),
            "n": {"b": torch.rand(3, generator=g), "c": torch.rand(3, 2, generator=g)},
        },
        [3],
        names=["x"],
    )


def set_row(td):
    td[0] = td[1]
    return td


def set_item(td):
    td["z"] = td["a"] + 1
    td["n", "z"] = td["n", "b"] * 2
    return td


def inplace_operator(td):
    td += 1
    td *= td
    return td


FLOAT_OPERATORS = [
    *(operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv),
    *(operator.mod, operator.pow),
    *(operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge),
]
INT_OPERATORS = [operator.and_, operator.or_, operator.xor, operator.lshift, operator.rshift]
INPLACE_OPERATORS = [
    *(operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ipow),
]


def operators(td, tensor, ops):
    """Every operator with a tensor on the right, then on the left."""
    return [op(td, tensor) for op in ops] + [op(tensor, td) for op in ops]


# Each gets a tree of its own, and returns a tensordict, a tensor or a sequence of them.
FUNCTIONS = {
    # construction
    "construct": lambda td: TensorDict({"a": td["a"], "n": {"b": td["n", "b"]}}, batch_size=[3]),
    "construct_names": lambda td: TensorDict({"a": td["a"]}, [3], names=["t"]) + 1,
    "construct_keywords": lambda td: TensorDict(a=td["a"], b=td["n", "b"]),
    "construct_device": lambda td: TensorDict({"a": td["a"]}, [3], device="cpu"),
    # get and set
    "get": lambda td: td["a"] + td["n", "b"][:, None],
    "get_method": lambda td: td.get("a") + td.get(("n", "b"))[:, None],
    "set": lambda td: td.set("z", td["a"] + 1).set(("q", "z"), td["a"] * 2),
    "setitem": set_item,
    "set_": lambda td: td.set_("a", td["a"] + 1),
    "update": lambda td: td.update({"a": td["a"] * 2, "n": {"new": td["n", "b"]}}),
    "update_": lambda td: td.update_({"a": td["a"] * 2}),
    "pop": lambda td: (td.pop("a"), td),
    "select": lambda td: td.select(("n", "b")),
    "exclude": lambda td: td.exclude("a"),
    "flatten_keys": lambda td: td.flatten_keys("."),
    "items": lambda td: [x.sum() for _, x in td.items(True, True)],
    # rows
    "int": lambda td: td[0],
    "slice": lambda td: td[1:],
    "none": lambda td: td[:, None],
    "index_tensor": lambda td: td[torch.tensor([0, 2])],
    "set_row": set_row,
    # shapes
    "view": lambda td: td.view(-1),
    "unsqueeze": lambda td: td.unsqueeze(0),
    "expand": lambda td: td.expand(2, 3),
    "stack": lambda td: torch.stack([td, td * 2]),
    "stack_dim": lambda td: torch.stack([td, td * 2], 1),
    "cat": lambda td: torch.cat([td, td * 2]),
    "unbind": lambda td: td.unbind(0),
    "split": lambda td: td.split(2),
    # arithmetic
    "add_number": lambda td: td + 1,
    "reflected": lambda td: 1 - td,
    "add_tree": lambda td: td * td + td,
    "sub_tensor": lambda td: td - torch.arange(3.0),
    "tensor_sub": lambda td: torch.arange(3.0) - td,
    "add_scalar_tensor": lambda td: td + torch.tensor(2.0),
    "broadcast": lambda td: td[:, None] + td[None],
    "inplace": lambda td: td.add_(1).mul_(td),
    "inplace_operator": inplace_operator,
    "default": lambda td: td.add(td.select("a"), default=1.0),
    "intersection": lambda td: td.add(td.select("a"), default="intersection"),
    "unary": lambda td: torch.exp(td).sqrt(),
    "clamp": lambda td: td.clamp(0.1, 0.5),
    "lerp": lambda td: td.lerp(td * 2, 0.5),
    "addcmul": lambda td: td.addcmul(td, td, value=2),
    "compare": lambda td: (td == td) & (td < 0.5),
    "locked": lambda td: td.clone().lock_() + 1,
    "loss": lambda td: F.mse_loss(td, td * 2),
    "float_operators": lambda td: operators(td + 1, torch.tensor([1.0, 2.0, 3.0]), FLOAT_OPERATORS),
    "int_operators": lambda td: operators(
        (td * 4).ceil().to(torch.int64), torch.tensor([1, 2, 3]), INT_OPERATORS
    ),
    "inplace_operators": lambda td: [
        op(td.clone() + 1, torch.tensor([1.0, 2.0, 3.0])) for op in INPLACE_OPERATORS
    ],
    # reductions
    "sum": lambda td: td.sum(0),
    "sum_all": lambda td: td.sum(),
    "sum_feature": lambda td: td.sum(dim="feature"),
    "sum_reduce": lambda td: td.sum(reduce=True),
    "max": lambda td: td.max(0).indices,
    "norm": lambda td: td.norm(),
    "quantile": lambda td: td.quantile(0.5, dim=0),
    "softmax": lambda td: td.softmax(0),
    # apply, copies
    "apply": lambda td: td.apply(lambda x: x + 1),
    "apply_filter": lambda td: td.apply(lambda x: x if x.ndim > 1 else None),
    "apply_batch_size": lambda td: td.apply(lambda x: x.sum(), batch_size=[]),
    "apply_others": lambda td: td.apply(lambda x, y: x * y, td),
    "apply_": lambda td: td.apply_(lambda x: x * 2),
    "named_apply": lambda td: td.named_apply(lambda key, x: x * len(key), nested_keys=True),
    "clone": lambda td: td.clone().zero_(),
    "copy_": lambda td: td.copy_(td * 2),
    "detach": lambda td: td.detach(),
    # device and dtype
    "to_dtype": lambda td: td.to(torch.float64),
    "to_device": lambda td: td.to("cpu"),
    # transforms
    "vmap": lambda td: torch.vmap(lambda row: row * 2 + row)(td),
}


# Functions of torch that not every supported version traces.
NEEDED = {"quantile": lambda x: torch.quantile(x, 0.5, dim=0)}


def same(a, b):
    if isinstance(a, TensorDictBase):
        assert a.batch_size == b.batch_size and a.names == b.names and a.device == b.device
        assert list(a.keys(True)) == list(b.keys(True))
        for key, x in a.items(True, True):
            assert_close(x, b.get(key))
    elif isinstance(a, torch.Tensor):
        assert_close(a, b)
    else:
        assert len(a) == len(b)
        for x, y in zip(a, b):
            same(x, y)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_one_graph_that_holds_for_other_values(name):
    if name in NEEDED:
        needs_traced(f"torch.{name}", NEEDED[name])
    fn = FUNCTIONS[name]
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(fn, fullgraph=True, backend=counter)
    for seed in range(3):
        same(compiled(tree(seed)), fn(tree(seed)))
    assert counter.frame_count <= 1  # 0: nothing to compute


def test_writes_reach_the_tree_that_was_passed():
    td = tree()
    a = td["a"]
    expected = (a + 1) * (a + 1)
    torch.compile(inplace_operator, fullgraph=True, backend="eager")(td)
    assert td["a"] is a
    assert_close(a, expected)


def test_gradients():
    @torch.compile(fullgraph=True, backend="aot_eager")
    def loss(td):
        return ((td * 2 + td).exp() / td.clamp(0.1)).sum(reduce=True)

    td = tree().requires_grad_()
    loss(td).backward()
    grads = td.grad.clone()
    td.zero_grad()
    ((td * 2 + td).exp() / td.clamp(0.1)).sum(reduce=True).backward()
    same(grads, td.grad)


def test_a_number_that_changes_does_not_recompile_for_ever():
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(lambda td, k: td * k, fullgraph=True, backend=counter)
    for k in (2, 3, 4, 5, 6):
        same(compiled(tree(), k), tree() * k)
    assert counter.frame_count <= 2


def test_structure_and_metadata_are_guarded():
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(lambda td: td + 1, fullgraph=True, backend=counter)
    same(compiled(tree()), tree() + 1)
    other = tree().exclude("a")
    same(compiled(other), other + 1)
    unnamed = tree()
    unnamed.names = None
    same(compiled(unnamed), unnamed + 1)
    assert counter.frame_count == 3


def test_a_batch_size_that_changes():
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(lambda td: (td * td).sum(0), fullgraph=True, backend=counter)
    for n in (3, 4, 5, 6, 7):
        td = TensorDict({"a": torch.rand(n, 2), "b": torch.rand(n)}, [n])
        same(compiled(td), (td * td).sum(0))
    assert counter.frame_count <= 2  # the second time the size is a symbol
