"""Leaves that are cast when they have arrived."""

import pytest
import torch

from tensordict import TensorDict, lazy_stack
from tensordict.distributed import irecv, recv, send, sendrecv
from tensordict.distributed.testing import LoopbackGroup
from tensordict.errors import LossyCast, SchemaMismatch
from tensordict.placement import CastPolicy, convert

POLICY = CastPolicy({"*norm*": None}, default="bf16")


def tree():
    torch.manual_seed(0)
    return TensorDict(
        {
            "w": torch.randn(120_000),
            "norm": torch.randn(3),
            "n": {"x": torch.randn(2, 3), "i": torch.arange(3)},
            "s": "text",
        }
    )


def between(sender, receiver):
    """What the sender raised or returned, and the receiver."""

    def main(transport):
        try:
            return (sender, receiver)[transport.rank](transport)
        except Exception as error:
            return error

    return LoopbackGroup(2).run(main)


def same(a, b):
    assert set(a.keys(True, True)) == set(b.keys(True, True))
    for key, x in b.items(True, True):
        assert a[key].dtype is x.dtype and torch.equal(a[key], x)


@pytest.mark.parametrize("strict", [True, False])
def test_new_tensordicts_are_what_convert_makes_of_them(strict):
    td = tree()
    sent, got = between(
        lambda t: send(td, 1, transport=t, strict=strict),
        lambda t: recv(0, transport=t, policy=POLICY),
    )
    assert sent is None and got["s"] == "text" and got["w"].dtype is torch.bfloat16
    same(got, convert(td, POLICY))
    _, pending = between(
        lambda t: send(td, 1, transport=t), lambda t: irecv(0, transport=t, policy=POLICY).wait()
    )
    same(pending, convert(td, POLICY))
    _, meta = between(
        lambda t: send(td, 1, transport=t),
        lambda t: recv(0, transport=t, policy=POLICY, device="meta"),
    )
    assert meta["w"].is_meta and meta["w"].dtype is torch.bfloat16


def test_into_leaves_of_the_resulting_dtypes():
    td = tree()
    mine = convert(td, POLICY).clone().zero_()
    w = mine["w"]
    sent, got = between(
        lambda t: send(td, 1, transport=t), lambda t: recv(0, transport=t, policy=POLICY, out=mine)
    )
    assert sent is None and got is mine and mine["w"] is w
    same(mine, convert(td, POLICY))


def test_other_dtypes_are_a_mismatch_on_both_ranks_before_any_payload():
    td, mine = tree(), tree().zero_()
    for error in between(
        lambda t: send(td, 1, transport=t), lambda t: recv(0, transport=t, policy=POLICY, out=mine)
    ):
        assert isinstance(error, SchemaMismatch)
        assert "bfloat16 [120000] at the sender, float32 [120000] here" in str(error)
    assert mine["w"].sum() == 0
    plain = convert(td, POLICY)
    for error in between(
        lambda t: send(td, 1, transport=t), lambda t: recv(0, transport=t, out=plain)
    ):
        assert isinstance(error, SchemaMismatch)


def test_a_refused_loss_leaves_the_target_as_it_was():
    strict = CastPolicy(default="fp16", on_lossy="error", check="full")
    td = TensorDict({"a": torch.tensor([1e9]), "b": torch.ones(2)})
    mine = td.half().zero_()
    sent, got = between(
        lambda t: send(td, 1, transport=t), lambda t: recv(0, transport=t, policy=strict, out=mine)
    )
    assert sent is None and isinstance(got, LossyCast) and mine["b"].sum() == 0


def test_lists_stacks_gradients_jagged_leaves_and_scales():
    rows = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    parts = [
        TensorDict({"w": torch.randn(3, requires_grad=True), "norm": torch.ones(2)}),
        TensorDict({"stack": lazy_stack([TensorDict({"x": torch.ones(n)}) for n in (1, 2)])}),
        TensorDict({"rows": rows}, batch_size=[2]),
    ]
    _, got = between(
        lambda t: send(parts, 1, transport=t), lambda t: recv(0, transport=t, policy=POLICY)
    )
    assert got[0]["w"].requires_grad and got[0]["w"].is_leaf and got[0]["w"].dtype is torch.bfloat16
    assert not got[0]["norm"].requires_grad and got[0]["norm"].dtype is torch.float32
    assert (
        got[1]["stack"][1]["x"].dtype is torch.bfloat16 and got[2]["rows"].dtype is torch.bfloat16
    )

    into = [convert(part.detach(), POLICY).clone().zero_() for part in parts[:2]]
    _, got = between(
        lambda t: send(parts[:2], 1, transport=t),
        lambda t: recv(0, transport=t, policy=POLICY, out=into),
    )
    assert got[0] is into[0] and torch.equal(into[0]["w"], parts[0]["w"].bfloat16())
    assert into[1]["stack"][1]["x"].tolist() == [1, 1]

    scaled = CastPolicy(default=torch.float8_e4m3fn, scale="tensor", on_lossy="allow")
    _, got = between(
        lambda t: send(tree(), 1, transport=t), lambda t: recv(0, transport=t, policy=scaled)
    )
    same(got, convert(tree(), scaled))
    _, error = between(
        lambda t: send(tree(), 1, transport=t, timeout=1),
        lambda t: recv(0, transport=t, policy=scaled, out=tree()),
    )
    assert isinstance(error, ValueError)


def test_sendrecv_casts_what_it_sends_alone():
    def swap(t):
        mine = TensorDict({"w": torch.full((2,), float(t.rank))})
        return sendrecv(
            mine, 1 - t.rank, 1 - t.rank, transport=t, policy=POLICY if t.rank == 0 else None
        )

    first, second = between(swap, swap)
    assert first["w"].dtype is torch.float32 and second["w"].dtype is torch.bfloat16
