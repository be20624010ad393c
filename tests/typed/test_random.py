"""Random trees seen through a typed class: every operation as on the plain tensordict."""

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from contract.kinds import check_same, content
from strategies import gate, sizes, trees
from tensordict import TensorClass, lazy_stack


class Tree(TensorClass):
    a: Any
    b: Any
    c: Any
    d: Any
    e: Any


OPS = {
    "clone": lambda td: td.clone(),
    "zeros": lambda td: torch.zeros_like(td),
    "eq": lambda td: td == td,
    "unsqueeze": lambda td: td.unsqueeze(0),
    "reshape": lambda td: td.reshape(-1),
    "stack": lambda td: torch.stack([td, td], -1),
    "flatten_keys": lambda td: td.flatten_keys("."),
    "apply": lambda td: td.apply(lambda x: x.clone(), filter_empty=False),
    "permute": lambda td: td.permute(*reversed(range(td.ndim))),
    "split": lambda td: td.split(1, 0)[-1] if td.ndim and td.batch_size[0] else td,
    "empty": lambda td: td.empty(recurse=True),
    "index": lambda td: td[..., :1] if td.ndim else td,
    "row": lambda td: td[-1] if td.ndim and td.batch_size[0] else td,
    "mask": lambda td: td[torch.arange(td.batch_size[0]) % 2 == 0] if td.ndim else td,
}


@gate
@given(trees(batch=sizes(0, 3, 0, 3)), st.lists(st.sampled_from(sorted(OPS)), max_size=4))
def test_operations_one_after_another(td, names):
    typed = Tree.from_tensordict(td.clone())
    for name in names:
        td, typed = OPS[name](td), OPS[name](typed)
        assert type(typed) is Tree
        check_same(content(typed), content(td))


@gate
@given(trees(batch=(2, 3), names=False), st.lists(st.sampled_from(sorted(OPS)), max_size=3))
def test_over_a_lazy_stack(td, names):
    typed = lazy_stack([Tree.from_tensordict(row.clone()) for row in td.unbind(0)])
    expected = lazy_stack([row.clone() for row in td.unbind(0)])
    for name in names:
        expected, typed = OPS[name](expected), OPS[name](typed)
        assert type(typed) is Tree
        check_same(content(typed), content(expected))
