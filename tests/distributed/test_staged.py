"""The rules of nccl, enforced by a stand-in: device tensors only, equal counts, no tags."""

import pytest
import torch

from tensordict import TensorDict
from tensordict.distributed import (
    StagedTransport,
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    gather,
    gather_and_stack,
    isend,
    recv,
    reduce,
    reduce_scatter,
    scatter,
    send,
    sendrecv,
)
from tensordict.distributed.loopback import LoopbackGroup
from tensordict.distributed.testing import CountingTransport
from tensordict.distributed.transport_protocol import Capabilities
from tensordict.errors import TransferError


class Device:
    """Memory that only `to_device` makes."""

    def __init__(self):
        self.held = {}

    def to_device(self, x):
        out = x.detach().clone()
        self.held[id(out)] = out
        return out

    def is_there(self, x):
        return id(x) in self.held


class LikeNccl(CountingTransport):
    """Payloads in device memory, one tag for all; frames and answers on the side."""

    def __init__(self, inner, device):
        super().__init__(inner)
        self.device = device

    @property
    def capabilities(self):
        return Capabilities(frozenset({"cuda"}), exact_counts=True, side_channel=True, tags=False)

    def check(self, tensor, control):
        if not control and not self.device.is_there(tensor):
            raise RuntimeError("No backend type associated with device type cpu")

    def isend(self, tensor, dst, tag, *, control=False):
        self.check(tensor, control)
        return super().isend(tensor, dst, tag if control else 1 << 30, control=control)

    def irecv(self, tensor, src, tag, *, control=False):
        self.check(tensor, control)
        return super().irecv(tensor, src, tag if control else 1 << 30, control=control)

    def broadcast(self, tensor, src, *, control=False):
        self.check(tensor, control)
        return super().broadcast(tensor, src, control=control)

    def all_gather(self, out, tensor, *, control=False):
        for x in (*out, tensor):
            self.check(x, control)
        return super().all_gather(out, tensor, control=control)

    def all_reduce(self, tensor, op):
        self.check(tensor, False)
        return super().all_reduce(tensor, op)

    def reduce(self, tensor, dst, op):
        self.check(tensor, False)
        return super().reduce(tensor, dst, op)


def staged(transport):
    device = Device()
    inner = LikeNccl(transport, device)
    return StagedTransport(
        inner, torch.device("cuda", 0), to_device=device.to_device, is_there=device.is_there
    )


def tree(fill):
    return TensorDict(
        {
            "small": torch.full((3,), fill),
            "many": TensorDict({f"k{i}": torch.full((50,), fill) for i in range(40)}, []),
            "big": torch.full((700_000,), fill),
            "text": f"{fill}",
        }
    )


def test_the_stand_in_refuses_what_nccl_refuses():
    def main(transport):
        inner = LikeNccl(transport, Device())
        with pytest.raises(RuntimeError, match="No backend type"):
            inner.isend(torch.zeros(2), 1 - transport.rank, 0)

    LoopbackGroup(2).run(main)


@pytest.mark.parametrize("form", [lambda td: td, lambda td: td.consolidate()])
def test_every_payload_goes_through_the_device(form):
    def main(transport):
        transport = staged(transport)
        if transport.rank == 0:
            for _ in range(2):
                send(form(tree(2.0)), 1, transport=transport)
        else:
            new, into = recv(0, transport=transport), form(tree(0.0))
            recv(0, out=into, transport=transport)
            for got in (new, into):
                assert got["big"].eq(2).all() and got["many", "k7"].eq(2).all()
                assert got["text"] == "2.0" and got["small"].eq(2).all()
        mine = form(tree(float(transport.rank)))
        got = broadcast(mine if transport.rank == 1 else None, 1, transport=transport)
        assert got["big"].eq(1).all() and got["small"].eq(1).all()
        parts = all_gather(mine, transport=transport)
        assert [float(x["big"][0]) for x in parts] == [0.0, 1.0]
        all_reduce(mine, transport=transport)
        assert mine["big"].eq(1).all() and mine["many", "k3"].eq(1).all()

    LoopbackGroup(2, timeout=10).run(main)


def test_every_collective_and_form_goes_through_the_device():
    def main(transport):
        transport = staged(transport)
        n, me = transport.size, transport.rank
        mine = tree(float(me))
        got = sendrecv(mine, (me + 1) % n, (me - 1) % n, transport=transport)
        assert got["big"].eq((me - 1) % n).all() and got["many", "k3"].eq((me - 1) % n).all()
        into = tree(9.0)
        sendrecv(mine, (me + 1) % n, (me - 1) % n, out=into, transport=transport)
        assert into["big"].eq((me - 1) % n).all()
        parts = gather(mine, 0, transport=transport)
        assert (me > 0) == (parts is None)
        assert parts is None or [x["big"][0].item() for x in parts] == list(range(n))
        sent = [tree(10.0 + r) for r in range(n)] if me == 1 else None
        assert scatter(sent, 1, transport=transport)["big"].eq(10 + me).all()
        swapped = all_to_all([tree(float(10 * me + r)) for r in range(n)], transport=transport)
        assert [x["small"][0].item() for x in swapped] == [10 * r + me for r in range(n)]
        reduce(mine, 2, transport=transport)
        assert mine["big"].eq(sum(range(n)) if me == 2 else me).all()
        summed = reduce_scatter([tree(float(r)) for r in range(n)], transport=transport)
        assert summed["big"].eq(n * me).all() and summed["many", "k7"].eq(n * me).all()
        pending = all_reduce(summed, "avg", transport=transport, async_op=True)
        pending.wait()
        assert summed["big"].eq(n * sum(range(n)) / n).all()
        rows = tree(0.0).expand(n - 1).clone() if me == 0 else tree(float(me))
        rows = gather_and_stack(rows, 0, transport=transport)
        assert rows is None or [x["big"][0].item() for x in rows] == list(range(1, n))

    LoopbackGroup(3, timeout=10).run(main)


def test_one_exchange_at_a_time_without_tags():
    def main(transport):
        transport = staged(transport)
        if transport.rank == 0:
            first = isend(tree(1.0), 1, transport=transport, init_tag=1)
            while "under way" not in repr(first):
                pass
            import time

            time.sleep(0.1)
            with pytest.raises(TransferError, match="earlier send"):
                send(tree(1.0), 1, transport=transport, init_tag=2)
            go.set()
            first.wait()
        else:
            go.wait(5)
            assert recv(0, transport=transport, init_tag=1)["big"].eq(1).all()

    import threading

    go = threading.Event()
    LoopbackGroup(2, timeout=10).run(main)
