"""Kinds of moves and the normal form of devices."""

import itertools

import pytest
import torch

from tensordict.device.kinds import MoveKind, classify, normal_device
from tensordict.device.ops import HostOps, ops_for, using_device_ops

DEVICES = ("cpu", "meta", "cuda:0", "cuda:1", "xpu:0", "mps:0")


def expected(src: str, dst: str) -> MoveKind:
    """The same table, written the slow way."""
    if src == dst:
        return MoveKind.ALIAS
    table = {("cpu", "meta"): MoveKind.TO_META, ("meta", "cpu"): MoveKind.FROM_META}
    host_src, host_dst = src.split(":")[0], dst.split(":")[0]
    if (host_src, host_dst) in table:
        return table[host_src, host_dst]
    if host_dst in ("meta",):
        return MoveKind.TO_META
    if host_src == "meta":
        return MoveKind.FROM_META
    if host_src == "cpu":
        return MoveKind.H2D
    if host_dst == "cpu":
        return MoveKind.D2H
    return MoveKind.D2D


@pytest.mark.parametrize(("src", "dst"), list(itertools.product(DEVICES, DEVICES)))
def test_every_pair_has_its_kind(src, dst):
    assert classify(src, dst) is expected(src, dst)


def test_an_index_that_is_left_out_is_the_current_device(monkeypatch):
    assert normal_device("cuda") == torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert normal_device("cuda") == torch.device("cuda", 1)
    assert classify("cuda", "cuda:1") is MoveKind.ALIAS
    assert classify("cuda", "cuda:0") is MoveKind.D2D


def test_host_and_meta_lose_their_index():
    assert normal_device("cpu:0") == torch.device("cpu")
    assert normal_device(torch.device("meta", 0)) == torch.device("meta")
    assert normal_device(None) is None


def test_an_unknown_backend_works_by_the_torch_module_of_its_name():
    ops = ops_for("privateuseone")
    assert ops.type == "privateuseone" and not ops.is_available()
    assert ops.record(torch.device("cpu")) is None


def test_operations_come_back_after_a_with_block_that_raises():
    before = ops_for("meta")
    with pytest.raises(ValueError, match="stop"), using_device_ops(HostOps("meta")):
        assert ops_for("meta") is not before
        raise ValueError("stop")
    assert ops_for("meta") is before
