"""Plans run by threads over a loopback group: results, bytes on the wire, faults."""

import itertools

import pytest
import torch

from tensordict import TensorDict
from tensordict.distributed import DoubleBuffer, reshard, share_layouts
from tensordict.distributed.golden import contributions, golden_reshard, shard
from tensordict.distributed.testing import CountingTransport, Fault, FaultyTransport, LoopbackGroup
from tensordict.errors import (
    LayoutError,
    PeerLost,
    PlanMismatch,
    TransferError,
    TransferTimeout,
)
from tensordict.placement import Layout, Layouts, Placement, plan_reshard, views

R = Placement("replicate")
SUM = Placement("partial", reduce_op="sum")


def S(dim, factor=1):
    return Placement("shard", dim, factor)


def lay(shape, mesh, placements, first=0, dtype=torch.float32):
    size = torch.Size(mesh).numel()
    return Layout.from_placements(
        shape, mesh, placements, ranks=range(first, first + size), dtype=dtype
    )


def world():
    """Source layouts and whole tensors of a small model on ranks 0 to 3."""
    src = Layouts(
        {
            "q": lay((8, 6), [2, 2], [S(0, 2), S(0)]),
            "k": lay((4, 6), [4], [S(0)]),
            "embed": lay((10, 6), [4], [S(0)]),
            "head": lay((10, 6), [4], [S(0)]),
            "scale": lay((), [4], [R], dtype=torch.float64),
            "grad": lay((6, 4), [2, 2], [SUM, S(0)]),
        },
        ties={"head": "embed"},
    )
    full = {
        name: torch.randn(layout.shape, generator=torch.Generator().manual_seed(i)).to(layout.dtype)
        for i, (name, layout) in enumerate(src.items())
    }
    full["head"] = full["embed"]
    local = {name: shard(layout, full[name]) for name, layout in src.items()}
    local["grad"], full["grad"] = contributions(src["grad"], full["grad"])
    sources = [{name: parts[rank] for name, parts in local.items()} for rank in range(4)]
    return src, full, sources


def target(first):
    two = {"qk": views.interleave(["q", "k"], 2), "vocab": views.pad("embed", 16, fill=-1)}
    dst = {
        "qk": lay((12, 6), [2], [S(0)], first, torch.bfloat16),
        "vocab": lay((16, 6), [2], [S(0)], first),
        "embed": lay((10, 6), [2], [S(1)], first),
        "head": lay((10, 6), [2], [S(1)], first),
        "scale": lay((), [2], [R], first),
        "grad": lay((6, 4), [2], [S(1)], first),
    }
    return dst, two


def equal(tree, expected):
    assert sorted(tree.keys()) == sorted(expected)
    for name, value in expected.items():
        assert tree[name].dtype is value.dtype
        assert torch.equal(tree[name], value), name


@pytest.mark.parametrize("first", [0, 2, 4], ids=["within", "overlapping", "disjoint"])
@pytest.mark.parametrize(
    "options",
    [{}, {"bucket_bytes": 64, "max_staging_bytes": 128}, {"pack_below": 0}],
    ids=["one bucket", "bounded", "in place"],
)
def test_every_rank_gets_its_slices(first, options):
    src, full, sources = world()
    dst, made = target(first)
    plan = plan_reshard(src, dst, views=made, **options)
    golden = golden_reshard(plan, full)
    size = max(4, first + 2)

    def main(transport):
        counting = CountingTransport(transport)
        mine = sources[transport.rank] if transport.rank < 4 else None
        out = reshard(mine, plan, transport=counting, verify=True).wait(20)
        sent = sum(m.nbytes for m in counting.messages if m.verb == "send" and not m.control)
        return out, sent

    for rank, (out, sent) in enumerate(LoopbackGroup(size).run(main)):
        assert sent == plan.sent_bytes(rank)
        if rank in golden:
            equal(out, golden[rank])
            assert out["head"] is out["embed"]
        else:
            assert out is None


def test_a_box_is_passed_on_within_a_host():
    src = {"w": lay((8, 6), [2], [S(0)])}
    dst = {"w": lay((8, 6), [4], [R], 2, torch.bfloat16)}
    plan = plan_reshard(src, dst, hosts={0: 0, 1: 0, 2: 1, 3: 1, 4: 2, 5: 2})
    assert 1 in plan.transfers["stage"]
    whole = torch.randn(8, 6)
    parts = shard(src["w"], whole)

    def main(transport):
        mine = {"w": parts[transport.rank]} if transport.rank < 2 else None
        return reshard(mine, plan, transport=transport).wait(20)

    for out in LoopbackGroup(6).run(main)[2:]:
        assert torch.equal(out["w"], whole.to(torch.bfloat16))


@pytest.mark.parametrize("partial", [False, True])
def test_live_tensors_are_written_in_place(partial):
    src, full, sources = world()
    dst, made = target(0)
    plan = plan_reshard(src, dst, views=made)
    golden = golden_reshard(plan, full)

    def main(transport):
        rank = transport.rank
        if rank > 1:
            return reshard(sources[rank], plan, transport=transport).wait(20)
        flat = {n: torch.full_like(x, 7).requires_grad_() for n, x in golden[rank].items()}
        out = TensorDict(flat).lock_()
        back = reshard(sources[rank], plan, transport=transport, out=out, partial=partial).wait(20)
        assert back is out and all(out[name] is flat[name] for name in flat)
        equal(out.detach(), golden[rank])
        return None

    assert LoopbackGroup(4).run(main) == [None] * 4


@pytest.mark.parametrize("partial", [False, True])
def test_inference_tensors_are_written_and_read(partial):
    src, full, sources = world()
    dst, made = target(0)
    plan = plan_reshard(src, dst, views=made)
    golden = golden_reshard(plan, full)

    def main(transport):
        rank = transport.rank
        with torch.inference_mode():
            mine = {name: x.clone() for name, x in sources[rank].items()}
            out = {name: torch.zeros_like(x) for name, x in golden.get(rank, {}).items()}
        reshard(mine, plan, transport=transport, out=out, partial=partial).wait(20)
        for name, x in golden.get(rank, {}).items():
            assert out[name].is_inference() and torch.equal(out[name], x)

    LoopbackGroup(4).run(main)


def test_in_place_onto_the_source_itself():
    src = {"w": lay((4, 4), [2], [S(0)])}
    dst = {"w": lay((4, 4), [2], [S(1)])}
    plan = plan_reshard(src, dst)
    whole = torch.arange(16.0).view(4, 4)
    memory = [whole[:2].reshape(-1).clone(), whole[2:].reshape(-1).clone()]

    def main(transport):
        mine = memory[transport.rank]
        out = {"w": mine.view(4, 2)}
        with pytest.raises(PlanMismatch, match="shares its memory"):
            reshard({"w": mine.view(2, 4)}, plan, transport=transport, out=out, partial=True).wait()
        reshard({"w": mine.view(2, 4)}, plan, transport=transport, out=out).wait(20)
        return out["w"]

    left, right = LoopbackGroup(2).run(main)
    assert torch.equal(torch.cat([left, right], 1), whole)


def test_loader_and_double_buffer():
    src = {"w": lay((4, 4), [2], [S(0)]), "b": lay((4,), [2], [S(0)])}
    plan = plan_reshard(src, {n: lay(x.shape, [2], [R]) for n, x in src.items()})

    def main(transport):
        seen = []
        buffer = DoubleBuffer(plan, transport.rank)
        front = buffer.front
        mine = {"w": torch.ones(2, 4), "b": torch.ones(2)}
        reshard(
            mine, plan, transport=transport, out=buffer.back, partial=True,
            loader=lambda name, x: seen.append((name, x.sum().item())),
        ).wait(20)  # fmt: skip
        assert front["w"].sum() == 0
        assert buffer.swap()["w"].sum() == 16
        return seen

    assert LoopbackGroup(2).run(main) == [[("w", 16.0), ("b", 4.0)]] * 2


def test_several_at_once_do_not_mix():
    src = {"w": lay((8, 4), [2], [S(0)])}
    plan = plan_reshard(src, {"w": lay((8, 4), [2], [S(1)])})

    def main(transport):
        parts = [{"w": torch.full((4, 4), 10.0 * i + transport.rank)} for i in range(4)]
        under_way = [reshard(part, plan, transport=transport) for part in parts]
        return [pending.wait(20)["w"][::4, 0].tolist() for pending in reversed(under_way)]

    expected = [[10.0 * i, 10.0 * i + 1] for i in reversed(range(4))]
    assert LoopbackGroup(2).run(main) == [expected] * 2


class InFlight:
    """A transport that knows how many bytes of payload are under way."""

    def __init__(self, inner):
        self.inner = inner
        self.now = self.peak = 0

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def isend(self, tensor, dst, tag, *, control=False):
        return self._count(self.inner.isend(tensor, dst, tag, control=control), tensor, control)

    def irecv(self, tensor, src, tag, *, control=False):
        return self._count(self.inner.irecv(tensor, src, tag, control=control), tensor, control)

    def _count(self, work, tensor, control):
        if control:
            return work
        self.now += tensor.numel()
        self.peak = max(self.peak, self.now)
        outer = self

        class Counted:
            def wait(self, timeout=None):
                work.wait(timeout)
                outer.now -= tensor.numel()

        return Counted()


@pytest.mark.parametrize("limit", [512, 2048, 100_000])
def test_no_more_bytes_are_under_way_than_the_plan_says(limit):
    src = {f"p{i}": lay((24, 12), [4], [S(0)]) for i in range(5)}
    dst = {name: lay((24, 12), [4], [S(1)]) for name in src}
    plan = plan_reshard(src, dst, bucket_bytes=256, pack_below=128, max_staging_bytes=limit)

    def main(transport):
        counted = InFlight(transport)
        mine = {name: torch.ones(6, 12) for name in src}
        reshard(mine, plan, transport=counted).wait(20)
        return counted.peak

    for rank, peak in enumerate(LoopbackGroup(4).run(main)):
        assert peak == plan.peak_bytes(rank) <= limit


def test_entries_that_are_no_tensors_stay_where_they_are():
    layout = lay((4,), [1], [R])
    plan = plan_reshard({"a.w": layout}, {"a.w": layout})
    td = TensorDict({"a": {"w": torch.ones(4), "note": "hello"}, "step": 3})

    def main(transport):
        out = td.clone()
        reshard(td, plan, transport=transport, out=out).wait(20)
        return out["a", "note"]

    assert LoopbackGroup(1).run(main) == ["hello"]


def test_ranks_outside_of_the_plan_get_nothing():
    plan = plan_reshard({"w": lay((4,), [1], [R], 1)}, {"w": lay((4,), [1], [R], 2)})

    def main(transport):
        mine = {"w": torch.ones(4)} if transport.rank == 1 else None
        out = reshard(mine, plan, transport=transport).wait(20)
        return None if out is None else out["w"].sum().item()

    assert LoopbackGroup(3).run(main) == [None, None, 4.0]


# --- faults ------------------------------------------------------------------------------


def errors_of(group, main):
    def caught(transport):
        try:
            main(transport)
        except Exception as error:
            return error
        return None

    return group.run(caught)


def two_rank_plan(**options):
    src = {"w": lay((4, 4), [2], [S(0)]), "b": lay((4,), [2], [S(0)])}
    dst = {"w": lay((4, 4), [2], [S(1)]), "b": lay((4,), [2], [R])}
    return plan_reshard(src, dst, **options)


def test_what_does_not_fit_is_told_to_all_ranks_before_the_first_byte():
    plan = two_rank_plan()
    sent = []

    def main(transport):
        counting = CountingTransport(transport)
        mine = {"w": torch.ones(2, 4), "b": torch.ones(2)}
        out = {"w": torch.zeros(4, 2), "b": torch.zeros(4)}
        if transport.rank == 0:
            mine = {"w": torch.ones(2, 5, dtype=torch.float64)}
            del out["b"]
        try:
            reshard(mine, plan, transport=counting, out=out).wait(20)
        finally:
            sent.extend(m for m in counting.messages if not m.control)
            assert not any(x.any() for x in out.values())

    errors = errors_of(LoopbackGroup(2), main)
    assert {type(error) for error in errors} == {PlanMismatch}
    assert str(errors[0]) == str(errors[1]) and not sent
    for part in (
        "rank 0: missing in the source", "local shape [2, 4] in the plan, [2, 5]",
        "float32 in the plan, float64", "rank 0: missing in out",
    ):  # fmt: skip
        assert part in str(errors[0])


def test_tensors_that_cannot_be_read_or_written_are_told_before_the_first_byte():
    plan = two_rank_plan()

    def main(transport, mine, out):
        good = {"w": torch.ones(2, 4), "b": torch.ones(2)}
        reshard(mine if transport.rank else good, plan, transport=transport, out=out).wait(20)

    meta = {"w": torch.ones(2, 4, device="meta"), "b": torch.ones(2)}
    for error in errors_of(LoopbackGroup(2), lambda t: main(t, meta, None)):
        assert isinstance(error, PlanMismatch) and "without data (meta)" in str(error)
    for error in errors_of(LoopbackGroup(2), lambda t: main(t, [torch.ones(2, 4)], None)):
        assert isinstance(error, TransferError) and "from 'list'" in str(error)

    def into_expanded(transport):
        out = {"w": torch.zeros(4, 1).expand(4, 2), "b": torch.zeros(4)}
        good = {"w": torch.ones(2, 4), "b": torch.ones(2)}
        reshard(good, plan, transport=transport, out=out).wait(20)

    for error in errors_of(LoopbackGroup(2), into_expanded):
        assert isinstance(error, PlanMismatch) and "share their memory" in str(error)


def test_other_plans_and_other_groups_are_refused():
    plans = [two_rank_plan(), two_rank_plan(bucket_bytes=4096)]
    mine = {"w": torch.ones(2, 4), "b": torch.ones(2)}
    errors = errors_of(
        LoopbackGroup(2), lambda t: reshard(mine, plans[t.rank], transport=t).wait(20)
    )
    assert {type(error) for error in errors} == {PlanMismatch}
    assert all(plan.hash in str(error) for plan, error in itertools.product(plans, errors))
    wide = plan_reshard({"w": lay((4,), [5], [S(0)])}, {"w": lay((4,), [1], [R])})
    errors = errors_of(LoopbackGroup(2), lambda t: reshard(mine, wide, transport=t))
    assert {type(error) for error in errors} == {LayoutError}
    assert all(f"rank {rank}" in str(errors[0]) for rank in (2, 3, 4))
    with pytest.raises(TypeError, match="verfy"):
        reshard(mine, plans[0], transport=LoopbackGroup(2).transport(0), verfy=True)


def test_the_group_can_be_used_after_a_refusal():
    plan = two_rank_plan()
    good = {"w": torch.ones(2, 4), "b": torch.ones(2)}

    def main(transport):
        with pytest.raises(PlanMismatch):
            reshard(good if transport.rank else {}, plan, transport=transport).wait(20)
        return reshard(good, plan, transport=transport).wait(20)["w"].sum().item()

    assert LoopbackGroup(2).run(main) == [8.0, 8.0]


def test_bytes_that_changed_are_found_and_nothing_is_written():
    plan = two_rank_plan()

    def flip(raw):
        raw[0] ^= 1
        return raw

    def main(transport):
        if transport.rank == 1:  # its record to rank 0 is the first message
            transport = FaultyTransport(transport, Fault(at=1, kind="change", change=flip))
        out = {"w": torch.zeros(4, 2), "b": torch.zeros(4)}
        try:
            mine = {"w": torch.ones(2, 4), "b": torch.ones(2)}
            reshard(mine, plan, transport=transport, out=out, verify=True).wait(20)
        finally:
            assert not any(x.any() for x in out.values())

    errors = errors_of(LoopbackGroup(2), main)
    assert all(isinstance(error, TransferError) for error in errors)
    assert all("arrived with other bytes" in str(error) for error in errors)


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("dead", [0, 1, 2])
def test_a_rank_that_dies_is_named_by_all_others(dead, partial):
    src = {"w": lay((6, 6), [3], [S(0)]), "b": lay((3,), [3], [S(0)])}
    plan = plan_reshard(src, {"w": lay((6, 6), [3], [S(1)]), "b": lay((3,), [3], [S(0)])})
    group = LoopbackGroup(3, timeout=3)

    def die():
        group.lose(dead)
        raise SystemExit

    def main(transport):
        out = {"w": torch.zeros(6, 2), "b": torch.zeros(1)}
        mine = {"w": torch.ones(2, 6), "b": torch.ones(1)}
        if transport.rank == dead:
            # The first messages are those of the agreement.
            at = 2 if dead == 0 else 1
            transport = FaultyTransport(transport, Fault(at=at, kind="call", call=die))
        try:
            reshard(mine, plan, transport=transport, out=out, partial=partial).wait(20)
        except TransferError as error:
            if partial:
                # b, which is copied only, may be done or not.
                assert error.incomplete in (["w"], ["b", "w"])
            else:
                assert not any(x.any() for x in out.values())
            raise
        finally:
            if transport.rank == dead:
                raise SystemExit

    def caught(transport):
        try:
            main(transport)
        except (Exception, SystemExit) as error:
            return error

    errors = group.run(caught)
    assert isinstance(errors[dead], SystemExit)
    for rank, error in enumerate(errors):
        if rank != dead:
            assert isinstance(error, PeerLost), error
            assert f"rank {dead}" in str(error)


def test_silence_is_a_timeout():
    plan = two_rank_plan()
    mine = {"w": torch.ones(2, 4), "b": torch.ones(2)}

    def main(transport):
        if transport.rank == 0:
            reshard(mine, plan, transport=transport, timeout=0.2).wait(20)

    errors = errors_of(LoopbackGroup(2), main)
    assert isinstance(errors[0], TransferTimeout) and "rank 1" in str(errors[0])


# --- layouts of other ranks ------------------------------------------------------------------


def test_ranks_tell_each_other_their_layouts():
    # Ranks 0 and 1 each know their own copy of a norm, and are the stages of a pipeline too.
    def main(transport):
        rank = transport.rank
        if rank == 2:
            whole = {n: Layout.replicated((4,), [2]) for n in ("norm", "stage0", "stage1")}
            mine = {"dst": whole}
        else:
            own = Layout.replicated((4,), [rank], dtype=torch.float32)
            mine = {"src": Layouts({"norm": own, f"stage{rank}": own})}
        both = share_layouts(mine, transport=transport)
        plan = plan_reshard(both["src"], both["dst"])
        data = {"norm": torch.ones(4), f"stage{rank}": torch.full((4,), float(rank))}
        out = reshard(data if rank < 2 else None, plan, transport=transport).wait(20)
        return None if out is None else {n: x.tolist() for n, x in out.items()}

    first, second, third = LoopbackGroup(3).run(main)
    assert first is second is None
    assert third == {"norm": [1.0] * 4, "stage0": [0.0] * 4, "stage1": [1.0] * 4}


def test_ranks_that_disagree_about_a_tensor_are_told():
    def main(transport):
        dtype = (torch.float32, torch.float16)[transport.rank]
        mine = {
            "w": Layout.replicated((4,), [transport.rank], dtype=dtype),
            "x": lay((4,), [2], [S(0)], dtype=None)
            if transport.rank
            else lay((4,), [2], [R], dtype=None),
        }
        share_layouts({"src": mine}, transport=transport)

    errors = errors_of(LoopbackGroup(2), main)
    assert {type(error) for error in errors} == {LayoutError}
    assert "torch.float32 and torch.float16" in str(errors[0])
    assert "'x'" in str(errors[0]) and "rank 1 holds" in str(errors[0])
