"""Keys that only some members of a stack hold are never left out in silence."""

from __future__ import annotations

import pytest

from tensordict import TensorDict, lazy_stack

AS_ONE = {
    "to_dict": lambda td: td.to_dict(),
    "to_tensordict": lambda td: td.to_tensordict(),
    "numpy": lambda td: td.numpy(),
    "densify": lambda td: td.densify(),
    "contiguous": lambda td: td.contiguous(),
    "state_dict": lambda td: td.state_dict(),
}


@pytest.mark.parametrize("name", AS_ONE)
@pytest.mark.parametrize("nested", [False, True])
def test_reading_a_stack_as_one_names_the_keys_that_would_be_lost(name, nested):
    td = lazy_stack([TensorDict(a=1), TensorDict(a=2, e=3)])
    if nested:
        if name == "contiguous":
            return  # a stack below stays a stack, with all its keys
        td = TensorDict({"n": td, "x": [0, 1]}, batch_size=[2])
    with pytest.raises(KeyError, match="'e'"):
        AS_ONE[name](td)


def test_members_keep_their_own_keys():
    td = lazy_stack([TensorDict(a=1), TensorDict(a=2, e=3)])
    assert td.tolist()[1]["e"] == 3
    assert [set(m.keys()) for m in td.flatten_keys().unbind(0)] == [{"a"}, {"a", "e"}]
