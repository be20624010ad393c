"""A consolidated tree travels as its buffer: no copy per leaf, and never anything but its values."""

import pickle
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from tensordict import NonTensorData, NonTensorStack, TensorDict, lazy_stack
from tensordict.core.traverse import entries_with_path, leaves
from tensordict.distributed import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    gather,
    isend,
    recv,
    reduce,
    reduce_scatter,
    scatter,
    send,
    wire,
)
from tensordict.distributed.describe import describe
from tensordict.distributed.endpoint import endpoint_of, known
from tensordict.distributed.one_buffer import host_buffer_of, plan_one_buffer
from tensordict.distributed.packing import Stage
from tensordict.distributed.schema import digest_of
from tensordict.distributed.testing import (
    CountingTransport,
    Fault,
    FaultyTransport,
    LoopbackGroup,
)
from tensordict.errors import (
    ChecksumMismatch,
    PeerLost,
    SchemaMismatch,
    TransferTimeout,
    UnsupportedLeaf,
    WireError,
)
from tensordict.storage.consolidate import buffer_of, packing_of
from tensordict.storage.values import dtype_named

GOLDEN = Path(__file__).parent / "golden" / "consolidated"

DTYPES = [
    dtype_named(name)
    for name in (
        "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 int64 int32 int16 int8 uint8 "
        "uint16 uint32 uint64 bool complex32 complex64 complex128"
    ).split()
]


def raw(x):
    return x.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def random(shape, dtype, seed):
    g = torch.Generator().manual_seed(seed)
    n = torch.Size(shape).numel()
    if dtype is torch.bool:
        return torch.randint(0, 2, (n,), generator=g).bool().reshape(shape)
    data = torch.randint(0, 255, (n * dtype.itemsize,), generator=g, dtype=torch.uint8)
    return data.view(dtype).reshape(shape)


def of_all_dtypes(seed=0):
    return TensorDict(
        {
            str(dtype): TensorDict(
                {
                    "one": random((3,), dtype, seed),
                    "below": {"two": random((2, 5), dtype, seed + 1)},
                    "scalar": random((), dtype, seed + 2),
                    "none": random((0, 3), dtype, seed),
                }
            )
            for dtype in DTYPES
        }
    )


def mixed(fill=0.0):
    """Two dtypes, a nested node between leaves, and a large leaf."""
    fill = float(fill)
    return TensorDict(
        {
            "a": torch.full((3,), fill),
            "n": TensorDict({"b": torch.full((3, 2), fill), "i": torch.full((3,), int(fill))}, [3]),
            "c": torch.full((3, 40_000), fill),
        },
        [3],
    )


def with_values(fill=0.0):
    td = mixed(fill)
    td["text"] = f"value {fill}"
    td["rows"] = NonTensorStack("x", {"k": fill}, None)
    return td


def with_ties(fill=0.0):
    td = TensorDict({"n": {"tied": torch.full((5,), fill)}, "other": torch.full((2,), fill)})
    td["tied"] = td["n", "tied"]
    return td


def stacked(fill=0.0):
    rows = [TensorDict({"r": torch.full((n,), fill), "c": torch.full((2,), fill)}) for n in (2, 3)]
    return TensorDict({"l": lazy_stack(rows), "a": torch.full((2,), fill)}, [2])


def jagged(fill=0.0):
    rows = [torch.full((2,), fill), torch.full((3,), fill)]
    ragged = torch.nested.nested_tensor(rows, layout=torch.jagged)
    return TensorDict({"a": torch.full((2,), fill), "j": ragged, "z": torch.full((2,), fill)}, [2])


def equal(a, b):
    x, y = leaves(a), leaves(b)
    assert len(x) == len(y)
    for p, q in zip(x, y):
        if p.is_nested:
            p, q = p.values(), q.values()
        assert p.dtype is q.dtype and p.shape == q.shape and torch.equal(raw(p), raw(q))
    return True


class Recording(CountingTransport):
    """Keeps what it was asked to carry, and the headers of frames."""

    def __init__(self, inner):
        super().__init__(inner)
        self.carried, self.frames, self.sent = [], [], []

    def isend(self, tensor, dst, tag, *, control=False):
        data = tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
        self.sent.append((tag, data))
        if control and len(data) == wire.EAGER_NBYTES:
            self.frames.append(wire.parse_header(data))
        elif not control:
            self.carried.append(tensor)
        return super().isend(tensor, dst, tag, control=control)

    def irecv(self, tensor, src, tag, *, control=False):
        if not control:
            self.carried.append(tensor)
        return super().irecv(tensor, src, tag, control=control)

    def broadcast(self, tensor, src, *, control=False):
        if not control:
            self.carried.append(tensor)
        return super().broadcast(tensor, src, control=control)

    def all_gather(self, out, tensor, *, control=False):
        if not control:
            self.carried.append(tensor)
        return super().all_gather(out, tensor, control=control)

    def all_reduce(self, tensor, op):
        self.carried.append(tensor)
        return super().all_reduce(tensor, op)

    def reduce(self, tensor, dst, op):
        self.carried.append(tensor)
        return super().reduce(tensor, dst, op)


def inside(tensor, buffer):
    start = buffer.data_ptr()
    return start <= tensor.data_ptr() < start + max(1, buffer.numel())


def run(main, *args, size=2):
    return LoopbackGroup(size).run(main, *args)


# --- from one to the other ------------------------------------------------------------------


@pytest.mark.parametrize("make", [of_all_dtypes, mixed, with_values, with_ties, stacked])
def test_what_arrives_is_bit_equal_and_travels_on_as_one_buffer(make):
    td = make(3).consolidate()

    def main(transport):
        recording = Recording(transport)
        if transport.rank == 0:
            send(td, 1, transport=recording)
            assert recording.frames[0].one_buffer
            sent = recording.carried
            assert not sent or sent[0].data_ptr() == buffer_of(td).data_ptr()
            return None
        got = recv(0, transport=transport)
        if transport.size > 2 and transport.rank == 1:
            send(got, 2, transport=recording)
        return got

    got = run(main)[1]
    assert equal(got, td) and got.is_consolidated() and got.is_locked
    assert packing_of(got).layout == packing_of(td).layout
    assert not inside(leaves(got)[0], buffer_of(td))
    if make is with_values:
        assert got["text"] == td["text"] and got.get("rows").tolist() == td.get("rows").tolist()
    if make is with_ties:
        assert got["tied"] is got["n", "tied"]
    assert equal(pickle.loads(pickle.dumps(got)), td)

    def forward(transport):
        recording = Recording(transport)
        if transport.rank == 0:
            send(got, 1, transport=recording)
            return recording.frames[0].one_buffer
        return recv(0, transport=transport)

    one_buffer, again = run(forward)
    assert one_buffer and equal(again, td) and again.is_consolidated()


class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.counts = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.counts[name] = self.counts.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def moves(counts):
    copying = ("copy_", "_foreach_copy_", "stack", "cat", "clone", "_to_copy", "index_put_")
    return {name: n for name, n in counts.items() if name in copying}


@pytest.mark.parametrize("verb", ["send", "into", "reduce", "gather"])
def test_work_does_not_grow_with_leaves(verb, monkeypatch):
    packed = []
    monkeypatch.setattr(Stage, "pack", lambda *_: packed.append("pack"))
    monkeypatch.setattr(Stage, "pack_alike", lambda *_, **__: packed.append("pack"))
    monkeypatch.setattr(Stage, "unpack_into", lambda *_: packed.append("unpack"))

    def count(n):
        td = TensorDict({f"k{i}": torch.ones(300) for i in range(n)}).consolidate()
        out = TensorDict({k: torch.zeros(300) for k in td.keys()}).consolidate()

        def main(transport):
            with Operations() as mode:
                if verb == "reduce":
                    all_reduce(td if transport.rank else out, transport=transport)
                elif verb == "gather":
                    all_gather(td, transport=transport)
                elif transport.rank == 0:
                    send(td, 1, transport=transport)
                else:
                    recv(0, out=out, transport=transport)
            return moves(mode.counts)

        one = run(main)
        return sum(one[0].values()) + sum(one[1].values())

    # Frames, answers and buffers; each rank broadcasts its own where all_gather has more than 1 MiB.
    assert count(1000) - count(10) <= (2 if verb == "gather" else 0)
    assert not packed


@pytest.mark.parametrize("make", [mixed, with_values, with_ties, of_all_dtypes, stacked, jagged])
@pytest.mark.parametrize("atomic", [True, False])
def test_both_sides_may_be_consolidated_or_not(make, atomic):
    for there in (False, True):
        for here in (False, True):
            td, out = make(4), make(7)
            td = td.consolidate() if there else td
            out = out.consolidate() if here else out

            def main(transport, td=td, out=out):
                # Ragged leaves are replaced: a locked tree is left, not a consolidated one.
                for _ in range(1 if make is jagged else 2):
                    if transport.rank == 0:
                        send(td, 1, transport=transport)
                    else:
                        assert recv(0, out=out, transport=transport, atomic=atomic) is out

            run(main)
            assert equal(out, td), (there, here)
            assert out.is_consolidated() == (here and make is not jagged)
            if out.is_consolidated():
                assert all(inside(x, buffer_of(out)) for x in leaves(out) if x.numel())
            if make is with_values:
                assert out["text"] == td["text"]
            assert equal(pickle.loads(pickle.dumps(out)), td)


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("here", [False, True])
@pytest.mark.parametrize("atomic", [True, False])
def test_one_memory_there_may_be_two_here(there, here, atomic):
    td, out = with_ties(4.0), with_ties(7.0)
    out["tied"] = out["tied"].clone()
    td = td.consolidate() if there else td
    out = out.consolidate() if here else out

    def main(transport):
        if transport.rank == 0:
            send(td, 1, transport=transport)
        else:
            recv(0, out=out, transport=transport, atomic=atomic)

    run(main)
    assert equal(out, td) and out["tied"] is not out["n", "tied"]


def test_a_buffer_is_received_into_when_that_is_allowed():
    td, out = mixed(4).consolidate(), mixed(7).consolidate()

    def main(transport, atomic):
        recording = Recording(transport)
        if transport.rank == 0:
            send(td, 1, transport=recording)
        else:
            recv(0, out=out, transport=recording, atomic=atomic)
        return [x.data_ptr() for x in recording.carried]

    assert run(main, False) == [[buffer_of(td).data_ptr()], [buffer_of(out).data_ptr()]]
    sent, received = run(main, True)
    assert sent == [buffer_of(td).data_ptr()] and received != [buffer_of(out).data_ptr()]


def test_autograd_notices_what_was_written_through_a_buffer():
    td, out = mixed(4).consolidate(), mixed(7).consolidate()
    loose = recv_of(td)  # its leaves are not views of one another
    for target in (out, loose):
        x = torch.ones(3, requires_grad=True)
        y = (x * target["a"]).sum()

        def main(transport, target=target):
            if transport.rank == 0:
                send(td, 1, transport=transport)
            else:
                recv(0, out=target, transport=transport)

        run(main)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()


def recv_of(td):
    def main(transport):
        return (
            send(td, 1, transport=transport)
            if transport.rank == 0
            else recv(0, transport=transport)
        )

    return run(main)[1]


def test_received_leaves_are_written_and_differentiated_alone():
    got = recv_of(mixed(4).consolidate())
    got["a"].mul_(torch.ones(3, requires_grad=True))
    assert got["a"].requires_grad and not got["n", "b"].requires_grad


def test_buffers_of_another_alignment_hold_their_own():
    from tensordict.storage.consolidate import over_buffer
    from tensordict.storage.packing import plan_packing

    td = mixed(4)
    packing, pieces = plan_packing(leaves(td), 256)
    wide = over_buffer(td, packing, torch.zeros(packing.layout.total_nbytes + 9, dtype=torch.uint8))
    for x, piece in zip(leaves(wide), pieces):
        x.copy_(piece)

    def main(transport, out):
        recording = Recording(transport)
        if transport.rank == 0:
            send(wide, 1, transport=recording)
            return recording.frames[0].one_buffer
        return recv(0, out=out, transport=transport)

    for out in (None, mixed(7), mixed(7).consolidate()):
        one_buffer, got = run(main, out)
        assert one_buffer and equal(got, td)
        if out is None:
            assert packing_of(got).layout.alignment == 256

    def collective(transport):
        mine = (wide, mixed(4).consolidate())[transport.rank].clone().consolidate()
        all_reduce(mine, transport=transport)
        return mine

    for got in run(collective):
        assert equal(got, mixed(8))


# --- trees that are not what their buffer holds -----------------------------------------------


def moved(td):
    td["n", "b"].data = torch.full((3, 2), 9.0)


def transposed(td):
    td["square"].data = td["square"].t()


def conjugated(td):
    td["z"].data = td["z"].conj()


def turned(td):
    td["square"].t_()


def another_leaf(td):
    td["a"].data = td["twin"]


def unlocked_and_changed(td):
    td.unlock_()
    td["a"] = torch.full((3,), 5.0)


@pytest.mark.parametrize(
    "change", [moved, transposed, conjugated, turned, another_leaf, unlocked_and_changed]
)
@pytest.mark.parametrize("warm", [False, True])
def test_values_count_and_not_what_the_buffer_once_held(change, warm):
    def make(fill):
        td = TensorDict(
            {
                "a": torch.full((3,), fill),
                "n": {"b": torch.full((3, 2), fill)},
                "square": torch.arange(9.0).view(3, 3) + fill,
                "z": torch.tensor([1 + 2j, 3 - 1j]) * fill,
                "twin": torch.full((3,), fill + 1),
            }
        )
        return td.consolidate()

    td, out = make(2.0), make(3.0)

    def main(transport, td, out):
        recording = Recording(transport)
        if transport.rank == 0:
            send(td, 1, transport=recording)
            return recording.frames[0].one_buffer
        return recv(0, transport=transport, out=out)

    group = LoopbackGroup(2)
    if warm:
        assert group.run(main, td, None)[0]
    change(td)
    for _ in range(2):
        one_buffer, got = group.run(main, td, None)
        assert not one_buffer and equal(got, td)
    assert equal(group.run(main, td, out)[1], td)
    # the same of the receiver: its leaves are written, wherever they are
    whole, out = make(2.0), make(3.0)
    change(out)
    if change is another_leaf:  # one memory for two values
        with pytest.raises(SchemaMismatch):
            group.run(main, whole, out)
    elif change is not conjugated:  # torch writes to no list of conjugated views
        assert equal(group.run(main, whole, out)[1], whole) and equal(out, whole)


def test_an_address_with_a_negative_bit_is_another_value():
    td = TensorDict({"a": torch.ones(3)}).consolidate()
    td["a"].data = torch._neg_view(td["a"])
    assert recv_of(td)["a"].tolist() == [-1.0] * 3


def test_parts_of_a_consolidated_tree_are_loose():
    td = mixed(4).consolidate()
    for part in (td["n"], td[1:], td.select("a", "c"), td.clone()):
        got = recv_of(part)
        assert equal(got, part) and not got.is_consolidated()


def test_memory_made_in_inference_mode():
    def make(fill):
        return TensorDict({"a": torch.full((3,), fill), "n": {"b": torch.full((2, 2), fill)}})

    with torch.inference_mode():
        td, out = make(4.0).consolidate(), make(7.0).consolidate()
    assert equal(recv_of(td), td)

    def main(transport):
        for atomic in (True, False):
            if transport.rank == 0:
                send(td, 1, transport=transport)
            else:
                recv(0, out=out, transport=transport, atomic=atomic)
        all_reduce(td if transport.rank == 0 else out, "avg", transport=transport)

    run(main)
    assert equal(out, make(4.0)) and equal(td, make(4.0))


def test_a_leaf_that_requires_grad():
    td = mixed(4).consolidate()
    td["a"].requires_grad_()
    got = recv_of(td)
    assert equal(got, td) and got["a"].requires_grad and got.is_consolidated()
    td["n", "b"].mul_(torch.ones(2, requires_grad=True))  # torch makes the whole buffer require it
    assert equal(recv_of(td), td)


# --- memory of the user ---------------------------------------------------------------------


def test_no_stage_keeps_the_buffer_of_a_tree():
    td, out = mixed(4).consolidate(), mixed(7).consolidate()
    before = buffer_of(td).clone()

    def main(transport):
        for atomic in (False, True):
            if transport.rank == 0:
                send(td, 1, transport=transport)
            else:
                recv(0, out=out, transport=transport, atomic=atomic)
        all_gather(out, transport=transport)
        broadcast(td, 0, transport=transport)
        entry = endpoint_of(transport).catalogue.of(describe(td).schema)
        stages = [*entry.stages, *entry.whole().stages]
        rooms = [stage.message() for stage in stages] + [y for s in stages for y in s.large or ()]
        assert stages or transport.rank == 0
        return [inside(x, buffer_of(tree)) for x in rooms for tree in (td, out)]

    version = buffer_of(td)._version
    assert not any(flag for flags in run(main) for flag in flags)
    assert torch.equal(buffer_of(td), before) and buffer_of(td)._version == version


def test_isend_of_a_list_packs_as_ever():
    td = mixed(4).consolidate()

    def main(transport):
        if transport.rank == 0:
            return isend([td, with_values(2)], 1, transport=transport).wait()
        return recv(0, transport=transport)

    first, second = run(main)[1]
    assert equal(first, td) and equal(second, with_values(2)) and not first.is_consolidated()


# --- mismatches -----------------------------------------------------------------------------


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("here", [False, True])
def test_structures_that_differ_are_refused_on_both_sides(there, here):
    td, out = mixed(4), mixed(7)
    out["n", "b"] = torch.zeros(3, 2, dtype=torch.float64)
    del out["a"]
    td = td.consolidate() if there else td
    out = out.consolidate() if here else out
    before = out.clone()

    def main(transport):
        mine = td if transport.rank == 0 else out
        errors = []
        for call in (
            lambda: (
                send(td, 1, transport=transport)
                if transport.rank == 0
                else recv(0, out=out, transport=transport)
            ),
            lambda: all_reduce(mine, transport=transport),
            lambda: all_gather(mine, transport=transport),
        ):
            with pytest.raises(SchemaMismatch) as caught:
                call()
            errors.append(str(caught.value).count(chr(10)))
        return errors

    a, b = run(main)
    assert a == b == [2, 2, 2]
    assert equal(out, before) and equal(td, mixed(4))


# --- collectives ----------------------------------------------------------------------------


def ranked(rank):
    return TensorDict(
        {
            "f": torch.arange(5.0) + rank,
            "n": {"g": torch.full((2, 2), 1.0 + rank), "i": torch.tensor([rank, 3])},
            "b": torch.tensor([rank == 0, False]),
            "z": torch.tensor([1 + 1j * rank]),
        }
    )


@pytest.mark.parametrize("whole", [(0, 0, 0), (1, 1, 1), (1, 0, 0), (0, 1, 1)])
@pytest.mark.parametrize("op", ["sum", "avg"])
def test_all_reduce_of_any_sides(whole, op):
    def main(transport):
        td = ranked(transport.rank)
        td = td.consolidate() if whole[transport.rank] else td
        recording = Recording(transport)
        for _ in range(2):
            td.update_(ranked(transport.rank))
            all_reduce(td, op, transport=recording)
        return td, [inside(x, buffer_of(td)) for x in recording.carried if whole == (1, 1, 1)]

    n = 3.0 if op == "avg" else 1.0
    for td, direct in run(main, size=3):
        assert torch.equal(td["f"], (torch.arange(5.0) * 3 + 3) / n)
        assert torch.equal(td["n", "g"], torch.full((2, 2), 6 / n))
        assert td["n", "i"].tolist() == [int(3 // n), int(9 // n)]
        if op == "sum":
            assert td["b"].tolist() == [True, False] and td["z"].tolist() == [3 + 3j]
        assert all(direct[k] for k in (0, 1, 3) if direct)  # a bool is reduced as another dtype


def test_reduce_changes_nothing_elsewhere():
    def main(transport):
        td = ranked(transport.rank).consolidate()
        reduce(td, 1, "sum", transport=transport)
        td2 = ranked(transport.rank).consolidate()
        reduce(td2, 0, "sum", transport=transport, scale=2)
        return td, td2

    (a0, a1), (b0, b1) = run(main)
    assert equal(a0, ranked(0)) and equal(b1, ranked(1))
    assert torch.equal(a1["f"], torch.arange(5.0) * 4 + 2)
    assert torch.equal(b0["f"], torch.arange(5.0) * 2 + 1)


def test_a_fraction_of_integers_is_refused_before_anything_is_written():
    def main(transport):
        td = ranked(transport.rank).consolidate()
        with pytest.raises(UnsupportedLeaf, match=r"with the scale 0\.5"):
            all_reduce(td, transport=transport, scale=0.5)
        return td

    for rank, td in enumerate(run(main)):
        assert equal(td, ranked(rank))


def test_many_runs_of_dtypes_are_packed():
    def make(rank):
        leaves = {}
        for i in range(4):
            leaves[f"f{i}"], leaves[f"i{i}"] = torch.full((3,), 1.0 + rank), torch.tensor([rank])
        return TensorDict(leaves).consolidate()

    def main(transport):
        td, recording = make(transport.rank), Recording(transport)
        all_reduce(td, transport=recording)
        assert td.is_consolidated()
        return len(recording.carried), td["f3"].tolist(), td["i3"].tolist()

    assert run(main) == [(2, [3.0] * 3, [1])] * 2


def test_options_of_reductions():
    def main(transport):
        td = TensorDict({"h": torch.full((64,), 1.5, dtype=torch.bfloat16), "f": torch.ones(3)})
        td = td.consolidate()
        all_reduce(td, transport=transport, accumulate_dtype=torch.float32, scale=2.0)
        pending = all_reduce(td, "max", transport=transport, async_op=True, bucket_bytes=16)
        pending.wait()
        out = reduce_scatter([td.clone().consolidate() for _ in range(2)], transport=transport)
        return td["h"][0].item(), td["f"].tolist(), out["f"].tolist(), out.is_consolidated()

    assert run(main) == [(6.0, [4.0] * 3, [8.0] * 3, True)] * 2


@pytest.mark.parametrize("make", [mixed, with_values, with_ties, stacked, of_all_dtypes])
@pytest.mark.parametrize("whole", [(1, 1), (1, 0), (0, 1)])
def test_other_collectives(make, whole):
    def tree(rank):
        td = make(rank + 2)
        return td.consolidate() if whole[rank] else td

    def main(transport):
        rank, recording = transport.rank, Recording(transport)
        mine = tree(rank)
        everyone = all_gather(mine, transport=recording)
        if all(whole):
            assert recording.carried[0].data_ptr() == buffer_of(mine).data_ptr() or len(
                recording.carried
            ) >= len(whole)  # large ones are broadcast
        spread = broadcast(mine if rank == 0 else None, 0, transport=transport)
        parts = scatter([tree(0), tree(1)] if rank == 0 else None, 0, transport=transport)
        swapped = all_to_all([mine, mine], transport=transport)
        return everyone, spread, parts, swapped, gather(mine, 0, transport=transport)

    for rank, (everyone, spread, part, swapped, collected) in enumerate(run(main)):
        for k in range(2):
            assert equal(everyone[k], tree(k)) and equal(swapped[k], tree(k))
            assert not everyone[k].is_locked and not everyone[k].is_consolidated()
            if rank == 0:
                assert equal(collected[k], tree(k))
            if make is with_values:
                assert everyone[k]["text"] == tree(k)["text"]
        assert equal(spread, tree(0)) and equal(part, tree(rank))
        if rank == 1:
            assert not spread.is_locked and not part.is_locked


# --- the wire -------------------------------------------------------------------------------


def test_offsets_are_those_of_the_consolidated_tree():
    for make in (of_all_dtypes, mixed, with_values, with_ties, stacked, jagged):
        td = make(1).consolidate()
        described = describe(td)
        plan = plan_one_buffer(described.schema)
        assert plan.layout == packing_of(td).layout and plan.slots == packing_of(td).slots
        assert plan.addresses(buffer_of(td)) == described.pointers


def announce(td, *, one_buffer, payload_nbytes=None):
    """Send a frame with these words, and what the receiver says to it."""
    data, digest = digest_of(describe(td).schema)
    entry = known(describe(td).schema, data, digest)
    form = entry.whole() if one_buffer else entry
    n = form.packing.nbytes if payload_nbytes is None else payload_nbytes
    header = wire.Header(
        wire.Kind.DATA, len(data), n, digest, inline_schema=True, one_buffer=one_buffer
    )
    frame = wire.eager_frame(header, data)

    def main(transport):
        if transport.rank == 1:
            with pytest.raises(WireError) as caught:
                recv(0, transport=transport)
            return str(caught.value)
        answer = torch.empty(wire.REPLY_NBYTES, dtype=torch.uint8)
        work = transport.irecv(answer, 1, 1 << 29, control=True)
        transport.isend(torch.frombuffer(frame, dtype=torch.uint8), 1, 0, control=True).wait()
        work.wait()
        return wire.parse_header(answer.numpy().tobytes()).kind

    return run(main)


def test_a_frame_that_means_the_other_form_is_refused():
    td = TensorDict({"a": torch.ones(3), "b": torch.ones(3)})  # side by side, or 64 bytes apart
    entry = known(*[describe(td).schema, *digest_of(describe(td).schema)])
    loose, whole = entry.packing.nbytes, entry.whole().packing.nbytes
    assert loose < whole
    # As many bytes as the other form has; one too few, one too many (there are no values).
    for one_buffer, n in ((True, loose), (True, whole - 1), (True, whole + 1), (False, whole)):
        kind, text = announce(td, one_buffer=one_buffer, payload_nbytes=n)
        assert kind is wire.Kind.REFUSE and "does not fit a schema" in text


def test_sizes_are_compared_before_anything_is_allocated():
    # 4096 leaves of a byte each, spread over a buffer of their alignment: 128 MiB for a few KiB.
    td = TensorDict({f"{i}": torch.zeros(1, dtype=torch.uint8) for i in range(40)})
    schema = describe(td, alignment=1 << 15).schema
    data, digest = digest_of(schema)
    n = plan_one_buffer(schema).nbytes
    assert n > 1 << 20
    header = wire.Header(wire.Kind.DATA, len(data), n, digest, inline_schema=True, one_buffer=True)
    frame = wire.eager_frame(header, data)

    def main(transport):
        from tensordict.distributed import Limits

        if transport.rank == 1:
            with pytest.raises(WireError, match="above the limit"):
                recv(0, transport=transport, limits=Limits(max_payload_nbytes=1 << 20))
            return
        transport.isend(torch.frombuffer(frame, dtype=torch.uint8), 1, 0, control=True).wait()

    run(main)


def golden_trees():
    td = with_values(2)
    del td["c"]
    td["i8"] = torch.arange(3, dtype=torch.int8)
    large = TensorDict({"w": torch.arange(1500.0), "b": torch.ones(3, dtype=torch.bool)})
    large["text"] = "after the buffer"
    return td.consolidate(), large.consolidate()


def frames():
    """Every message of an exchange of a consolidated tree, by name; values follow the buffer."""

    def main(transport):
        recording = Recording(transport)
        for tree in golden_trees():
            if transport.rank == 0:
                send(tree, 1, transport=recording, init_tag=3, checksum="sum64")
            else:
                assert equal(recv(0, transport=recording, init_tag=3), tree)
        return recording.sent

    return {
        f"rank{rank}-message{k}-tag{tag}.bin": data
        for rank, sent in enumerate(run(main))
        for k, (tag, data) in enumerate(sent)
    }


def test_frames_are_the_golden_ones():
    made = frames()
    assert sorted(made) == sorted(path.name for path in GOLDEN.glob("*.bin"))
    for name, data in made.items():
        assert data == (GOLDEN / name).read_bytes(), f"{name}: the format changed"


def test_the_golden_frames_still_read():
    messages = sorted(path for path in GOLDEN.glob("rank0-*.bin"))

    def main(transport):
        if transport.rank == 1:
            return [recv(0, transport=transport, init_tag=3) for _ in range(2)]
        answers = [torch.empty(wire.REPLY_NBYTES, dtype=torch.uint8) for _ in range(4)]
        works = [transport.irecv(x, 1, 3 + (1 << 29), control=True) for x in answers]
        for path in messages:
            tag = int(path.stem.split("tag")[1])
            data = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
            transport.isend(data, 1, tag, control=tag == 3).wait()
        for work in works:
            work.wait()
        return [wire.parse_header(x.numpy().tobytes()).kind.name for x in answers]

    said, received = run(main)
    assert said == ["ACCEPT", "COMMIT"] * 2
    for got, want in zip(received, golden_trees(), strict=True):
        assert equal(got, want) and got.is_consolidated()
        assert got["text"] == want["text"]


# --- what can go wrong on the way ---------------------------------------------------------------


def test_nothing_is_written_before_everything_is_there():
    td, out = with_values(2).consolidate(), with_values(3).consolidate()

    def main(transport):
        if transport.rank == 0:
            faulty = FaultyTransport(transport, Fault(at=2, kind="drop"))  # frame, buffer, values
            with pytest.raises(PeerLost):
                send(td, 1, transport=faulty, timeout=20, checksum="sum64")
            return
        with pytest.raises(TransferTimeout):
            recv(0, out=out, transport=transport, timeout=0.2)

    run(main)
    assert equal(out, mixed(3)) and out["text"] == "value 3"


def test_a_changed_buffer_is_noticed():
    td, out = mixed(2).consolidate(), mixed(3).consolidate()

    def main(transport):
        with pytest.raises(ChecksumMismatch):
            if transport.rank == 0:
                flipped = FaultyTransport(
                    transport, Fault(at=1, kind="change", change=lambda x: x ^ 1)
                )
                send(td, 1, transport=flipped, checksum="crc32")
            else:
                recv(0, out=out, transport=transport)

    run(main)
    assert equal(out, mixed(3)) and equal(td, mixed(2))


@pytest.mark.parametrize("nested", [False, True])
def test_a_buffer_of_a_file(nested, tmp_path):
    want = mixed(4) if nested else mixed(4).exclude("n")
    want.consolidate(tmp_path / "td")
    td = TensorDict.from_consolidated(tmp_path / "td")

    def main(transport):
        recording = Recording(transport)
        if transport.rank == 0:
            send(td, 1, transport=recording)
            return recording.frames[0].one_buffer
        return recv(0, transport=transport)

    one_buffer, got = run(main)
    assert equal(got, td)
    # A file may order its leaves in another way than the tree that is made of it.
    assert one_buffer is not nested and got.is_consolidated() is not nested


# --- devices --------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [mixed, with_values, with_ties, of_all_dtypes])
def test_a_buffer_moves_to_another_device_as_one(make):
    td = make(4).consolidate()

    def main(transport):
        if transport.rank == 0:
            return send(td, 1, transport=transport)
        with Operations() as mode:
            got = recv(0, device="meta", transport=transport)
        assert mode.counts["_to_copy"] == 1
        return got

    got = run(main)[1]
    assert got.is_consolidated() and buffer_of(got).is_meta
    assert [(x.shape, x.dtype) for x in leaves(got)] == [(x.shape, x.dtype) for x in leaves(td)]


def test_a_buffer_on_an_accelerator_is_none_of_the_host():
    td = mixed(4).consolidate().to("meta")
    assert td.is_consolidated() and host_buffer_of(td) is None


def test_messages_of_a_consolidated_tree():
    small = TensorDict({"a": torch.ones(3), "b": torch.ones(2, dtype=torch.bool)})
    many = TensorDict({f"k{i}": torch.ones(26) for i in range(1000)})
    large = TensorDict({f"k{i}": torch.ones(100_000) for i in range(10)})
    text = TensorDict({"a": torch.ones(3000), "s": "text"})
    for td, cold, steady in ((small, 1, 1), (many, 3, 2), (large, 3, 3), (text, 3, 3)):
        td = td.consolidate()

        def main(transport, td=td):
            out, counting = [], CountingTransport(transport)
            for _ in range(3):
                counting.reset()
                if transport.rank == 0:
                    send(td, 1, transport=counting)
                else:
                    recv(0, transport=counting)
                out.append(counting.sent_messages)
            return out

        assert run(main)[0] == [cold, steady, steady]


# --- any tree ---------------------------------------------------------------------------------

NAMES = st.sampled_from("abcdef")
LEAF = st.tuples(
    st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=3), st.integers(0, 1000)
)
# A tree as plain values: a leaf is a tuple, a node a list of pairs, a tie the number of a leaf.
TREES = st.recursive(
    LEAF | st.integers(0, 3) | st.text(max_size=3),
    lambda inner: st.lists(st.tuples(NAMES, inner), max_size=5, unique_by=lambda kv: kv[0]),
    max_leaves=12,
).filter(lambda drawn: isinstance(drawn, list))


def grown(drawn, shift, tied):
    """The tensordict of drawn values; ``tied`` says whether ties are one memory or copies."""
    made = []

    def node(pairs):
        out = TensorDict()
        for name, what in pairs:
            if isinstance(what, list):
                out[name] = node(what)
            elif isinstance(what, str):
                out[name] = f"{what} {shift}"
            elif isinstance(what, tuple):
                dtype, shape, seed = what
                made.append(random(shape, dtype, seed + shift))
                out[name] = made[-1]
            elif made:
                x = made[what % len(made)]
                out[name] = x if tied else x.clone()
        return out

    return node(drawn)


def texts(td):
    return [leaf.tolist() for _, leaf in entries_with_path(td) if isinstance(leaf, NonTensorData)]


@settings(max_examples=100, deadline=None)
@given(TREES, st.booleans(), st.booleans(), st.booleans(), st.booleans(), st.booleans())
def test_any_tree_between_any_sides(drawn, there, here, atomic, tied, shuffle):
    td, out = grown(drawn, 0, tied=True), grown(drawn, 1, tied=tied)
    want = td.clone()
    if shuffle:
        out = TensorDict(dict(reversed(list(out.items()))))
        want = TensorDict(dict(reversed(list(want.items()))))
    td = td.consolidate() if there else td
    out = out.consolidate() if here else out

    def main(transport):
        if transport.rank == 0:
            for _ in range(2):
                send(td, 1, transport=transport)
            return all_gather(td, transport=transport)
        new = recv(0, transport=transport)
        recv(0, out=out, transport=transport, atomic=atomic)
        same_ties = tied or not describe(td).schema.ties
        everyone = all_gather(out if same_ties else td, transport=transport)
        return new, everyone

    got, (new, everyone) = run(main)
    for x in (new, *got, *everyone[: 1 if shuffle else 2]):
        if not shuffle or x is new:
            assert equal(x, td) and texts(x) == texts(td)
    assert equal(out, want) and texts(out) == texts(want)
    assert new.is_consolidated() == there and out.is_consolidated() == here
    assert equal(pickle.loads(pickle.dumps(new)), td)
