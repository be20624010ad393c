"""Every kind of node travels: consolidated, pickled, saved, and to another rank."""

import io
import pickle

import pytest
import torch

from tensordict import LazyStackedTensorDict, TensorClass, TensorDict, lazy_stack
from tensordict.core.traverse import leaves
from tensordict.distributed import recv, send
from tensordict.distributed.loopback import LoopbackGroup

from .kinds import CLASSES, KINDS, check_same, content


class Row(TensorClass):
    ids: torch.Tensor
    text: str


def ragged():
    rows = [Row(torch.arange(n), text=f"text {n}") for n in (2, 3)]
    return TensorDict({"rows": lazy_stack(rows), "x": torch.ones(2)}, [2])


KINDS_THAT_TRAVEL = {**KINDS, "ragged": ragged}


def check_ragged(out):
    assert type(out["rows"]) is Row
    assert isinstance(out["rows"]._tensordict, LazyStackedTensorDict)
    assert [row.ids.tolist() for row in out["rows"].unbind(0)] == [[0, 1], [0, 1, 2]]
    assert out["rows"].text == ["text 2", "text 3"]


def check(kind, out):
    if kind == "ragged":
        check_ragged(out)
    else:
        assert type(out) is CLASSES[kind]
        check_same(content(out), content(KINDS[kind]()))


@pytest.mark.parametrize("kind", KINDS_THAT_TRAVEL)
def test_consolidated(kind):
    out = KINDS_THAT_TRAVEL[kind]().consolidate()
    assert out.is_consolidated() and out.is_locked
    assert len({x.untyped_storage().data_ptr() for x in leaves(out)}) == 1
    check(kind, out)
    check(kind, pickle.loads(pickle.dumps(out)))
    moved = out.to("meta")
    assert moved.is_consolidated() and all(x.is_meta for x in leaves(moved))


@pytest.mark.parametrize("kind", KINDS_THAT_TRAVEL)
@pytest.mark.parametrize("protocol", [2, 5])
def test_pickled(kind, protocol):
    check(kind, pickle.loads(pickle.dumps(KINDS_THAT_TRAVEL[kind](), protocol)))
    locked = pickle.loads(pickle.dumps(KINDS_THAT_TRAVEL[kind]().lock_(), protocol))
    assert locked.is_locked and all(p.is_locked for p in locked._children())


@pytest.mark.parametrize("kind", KINDS_THAT_TRAVEL)
@pytest.mark.parametrize("weights_only", [True, False])
def test_saved_by_torch(kind, weights_only):
    file = io.BytesIO()
    torch.save(KINDS_THAT_TRAVEL[kind](), file)
    file.seek(0)
    check(kind, torch.load(file, weights_only=weights_only))


@pytest.mark.parametrize("kind", KINDS_THAT_TRAVEL)
def test_sent_to_another_rank(kind):
    def rank(transport):
        if transport.rank == 0:
            send(KINDS_THAT_TRAVEL[kind](), 1, transport=transport)
            return None
        return recv(0, transport=transport)

    _, out = LoopbackGroup(2).run(rank)
    check(kind, out)


def test_received_into_a_lazy_stack():
    def rank(transport):
        td = lazy_stack(
            [TensorDict(a=torch.full((n,), float(n * (1 - transport.rank)))) for n in (2, 3)]
        )
        if transport.rank == 0:
            send(td, 1, transport=transport)
            return None
        before = leaves(td)
        recv(0, out=td, transport=transport)
        assert all(x is y for x, y in zip(before, leaves(td)))
        return td

    _, out = LoopbackGroup(2).run(rank)
    assert [x.tolist() for x in out.get("a", as_list=True)] == [[2, 2], [3, 3, 3]]


def test_an_unknown_class_is_named_and_not_imported(monkeypatch):
    from tensordict.core import registry

    td = ragged()

    def rank(transport):
        if transport.rank == 0:
            send(td, 1, transport=transport)
            return None
        return recv(0, transport=transport)

    kinds = dict(registry._nodes)
    kinds.pop(Row.kind)
    original = registry._nodes
    monkeypatch.setattr(registry, "_nodes", kinds)
    with pytest.raises(Exception, match="Import the module that defines it first"):
        LoopbackGroup(2).run(rank)
    monkeypatch.setattr(registry, "_nodes", original)
