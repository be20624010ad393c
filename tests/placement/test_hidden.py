"""Tensors inside of non-tensor values are reported by plans, and moved when asked."""

import torch

from tensordict import NonTensorData, NonTensorStack, TensorDict
from tensordict.device.fake import FakeDevices
from tensordict.placement import CastPolicy, plan_moves, spec

CUDA = torch.device("cuda:0")


def tree():
    rows = NonTensorStack({"x": torch.ones(1)}, {"x": torch.zeros(1)})
    return TensorDict(
        {
            "w": torch.ones(2, 3),
            "n": {
                "cache": NonTensorData(
                    {"k": torch.ones(2), "deep": (torch.zeros(3), "text")}, batch_size=[2]
                )
            },
            "rows": rows,
            "plain": NonTensorData({"a": 1}, batch_size=[2]),
        },
        batch_size=[2],
    )


def test_they_are_reported_and_left_alone():
    td = tree()
    plan = plan_moves(td, torch.float16)
    assert [(item.path, item.inner) for item in plan.hidden] == [
        (("n", "cache"), ("k",)),
        (("n", "cache"), ("deep", "0")),
        (("rows",), ("0", "x")),
        (("rows",), ("1", "x")),
    ]
    assert sum(item.nbytes for item in plan.hidden) == 4 * (2 + 3 + 1 + 1)
    assert "4 tensors inside of non-tensor values (4 stay)" in plan.summary()
    assert plan.run(td)["n", "cache"]["k"].dtype is torch.float32
    assert td.to(torch.float16)["n", "cache"]["k"] is td["n", "cache"]["k"]


def test_they_move_when_asked_and_the_source_is_not_changed():
    with FakeDevices():
        td = tree()
        out = plan_moves(td, CUDA, non_tensors="move").run(td)
        assert out["n", "cache"]["k"].device == CUDA and out["n", "cache"]["deep"][0].device == CUDA
        assert out["n", "cache"]["deep"][1] == "text" and out["plain"] == {"a": 1}
        assert [row["x"].device for row in out["rows"]] == [CUDA, CUDA]
        assert out["n", "cache"]["k"].to("cpu").tolist() == [1, 1]
        assert td["n", "cache"]["k"].device == torch.device("cpu")
        assert td["rows"][0]["x"].device == torch.device("cpu")


def test_rules_and_policies_name_them_by_their_whole_path():
    td = tree()
    out = plan_moves(td, spec(rules={"n.cache.k": torch.float64}), non_tensors="move").run(td)
    assert out["n", "cache"]["k"].dtype is torch.float64
    assert out["n", "cache"]["deep"][0] is td["n", "cache"]["deep"][0]
    policy = CastPolicy({"*.deep.*": None}, default="bf16")
    plan_moves(td, policy=policy, non_tensors="move").run(td, inplace=True)
    assert td["n", "cache"]["k"].dtype is torch.bfloat16
    assert td["n", "cache"]["deep"][0].dtype is torch.float32
    assert td["w"].dtype is torch.bfloat16
