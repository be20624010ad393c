"""Functions called on what a lazy stack reads and takes by key."""

import torch

from tensordict import LazyStackedTensorDict, TensorDict


def stack(**hooks):
    rows = [TensorDict({"x": torch.full((2,), i), "n": {"y": torch.full((3,), i)}}) for i in (1, 2)]
    return LazyStackedTensorDict(*rows, **hooks)


def test_what_is_read_goes_through_hook_out():
    seen = []
    td = stack(hook_out=lambda x: seen.append(x.shape) or x * 10)
    assert td["x"].tolist() == [[10, 10], [20, 20]] and td["n", "y"][1, 0] == 20
    assert td["n"].hook_out is td.hook_out and td.hook_in is None
    assert td.to_tensordict()["x"][0, 0] == 10 and td.get("x").shape == (2, 2)
    assert set(seen) == {(2, 2), (2, 3)}


def test_members_lists_padding_and_operations_stay_as_they_are():
    td = stack(hook_out=lambda x: x * 10)
    assert td[0]["x"].tolist() == [1, 1] and td.unbind(0)[1]["x"][0] == 2
    assert td.get("x", as_list=True)[1].tolist() == [2, 2]
    assert td.get("x", as_padded_tensor=True)[1].tolist() == [2, 2]
    for out in (td.clone(), td + 0, td.unsqueeze(0).squeeze(0)):
        assert out.hook_out is None and out["x"][1, 0] == 2
    td.append(td[0].clone())
    assert td["x"].tolist() == [[10, 10], [20, 20], [10, 10]]


def test_what_is_set_goes_through_hook_in():
    td = stack(hook_in=lambda x: x + 1)
    td["x"] = torch.zeros(2, 2)
    td.set(("n", "z"), torch.zeros(2, 4))
    td.update({"w": torch.zeros(2, 1)})
    assert [m["x"].tolist() for m in td.tensordicts] == [[1, 1], [1, 1]]
    assert td["n", "z"].tolist() == [[1] * 4] * 2 and td["w"].tolist() == [[1], [1]]
    td.set_("x", torch.full((2, 2), 5.0))  # in place: into the members as it is
    td.set("s", "text")
    assert td["x"].tolist() == [[5, 5], [5, 5]] and td["s"] == ["text", "text"]
    td.hook_in = None
    td["x"] = torch.zeros(2, 2)
    assert td["x"].sum() == 0
