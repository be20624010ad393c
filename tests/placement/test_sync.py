"""Copies, flags and waits, with fake devices whose copies are late: the rules are proven.

Every test reads values right after the call.  A wait that is missing gives a wrong value.
"""

import pytest
import torch

from tensordict import TensorDict
from tensordict.device.fake import FakeDevices
from tensordict.device.ops import ops_for
from tensordict.device.staging import StagingPool
from tensordict.device.sync import Barrier
from tensordict.errors import TransferTimeout
from tensordict.placement import Spec, Target, TensorAttrs, plan_moves
from tensordict.placement.coalesce import _own_storages, groups_of
from tensordict.placement.routes import make_route

CPU, META = torch.device("cpu"), torch.device("meta")
CUDA0, CUDA1 = torch.device("cuda:0"), torch.device("cuda:1")
XPU, MPS = torch.device("xpu:0"), torch.device("mps:0")
ACCELERATORS = (CUDA0, CUDA1, XPU, MPS)


def value(i):
    return torch.arange(4.0) + 10 * i


def tree_on(*devices):
    return TensorDict({f"k{i}": value(i).to(device) for i, device in enumerate(devices)})


def fresh(world):
    world.copies.clear()
    world.waits.clear()
    return world


def assert_values(td):
    """The values are there now, without any further wait."""
    for i, x in enumerate(td.values()):
        host = x if x.device == CPU else x.host
        assert torch.equal(host.float(), value(i)), (i, x)


# --- to(device): source kind x target kind x non_blocking ------------------------------


def waits_expected(sources, target, non_blocking):
    """The table of the guide, for ``to(device)``."""
    moved = [src for src in sources if src != target]
    if non_blocking is not None or not moved or target.type in ("cuda", "meta"):
        return set()
    waits = {src for src in moved if src.type != "cpu"}
    return waits | ({target} if target != CPU else set())


SOURCES = [
    (CPU,), (CUDA0,), (CUDA1,), (XPU,), (MPS,), (CPU, CUDA0), (CUDA0, CUDA1), (CPU, CUDA0, CUDA1, XPU),
]  # fmt: skip


@pytest.mark.parametrize("non_blocking", [None, True, False])
@pytest.mark.parametrize("target", [CPU, META, *ACCELERATORS], ids=str)
@pytest.mark.parametrize("sources", SOURCES, ids=lambda s: "+".join(map(str, s)))
def test_to_device(sources, target, non_blocking):
    with FakeDevices() as world:
        td = tree_on(*sources)
        fresh(world)
        out = td.to(target, non_blocking=non_blocking)
        moved = [src for src in sources if src != target]
        assert [copy.non_blocking for copy in world.copies] == [non_blocking is not False] * len(
            moved
        )
        assert sorted(map(str, world.waits)) == sorted(
            map(str, waits_expected(sources, target, non_blocking))
        )
        if target == CPU and non_blocking is not True:
            assert_values(out)
        for i, src in enumerate(sources):
            if src == target:
                assert out[f"k{i}"] is td[f"k{i}"]


@pytest.mark.parametrize("non_blocking", [None, True, False])
@pytest.mark.parametrize("target", [CPU, META, *ACCELERATORS], ids=str)
@pytest.mark.parametrize("sources", SOURCES, ids=lambda s: "+".join(map(str, s)))
def test_to_spec_waits_for_copies_to_the_host_alone(sources, target, non_blocking):
    with FakeDevices() as world:
        td = tree_on(*sources)
        spec = TensorDict({f"k{i}": torch.empty(4, device="meta") for i in range(len(sources))})
        records = spec.attrs(fields=("dtype",))
        spec = plan_spec(records, target)
        fresh(world)
        out = td.to(spec, non_blocking=non_blocking)
        moved = [src for src in sources if src != target]
        expected = {src for src in moved if target == CPU and non_blocking is None}
        assert len(world.copies) == len(moved)
        assert {copy.non_blocking for copy in world.copies} <= {non_blocking is not False}
        assert sorted(map(str, world.waits)) == sorted(map(str, expected))
        if target == CPU and non_blocking is not True:
            assert_values(out)


def plan_spec(records, target):
    return TensorDict(
        {key: TensorAttrs(target, record.tgt_dtype) for key, record in records.items()}
    )


def test_reading_without_the_wait_would_be_wrong():
    with FakeDevices():
        out = tree_on(CUDA0).to("cpu", non_blocking=True)
        assert not torch.equal(out["k0"], value(0))


def test_each_source_device_is_covered_by_the_one_wait():
    with FakeDevices() as world:
        td = tree_on(CUDA0, CUDA1, XPU, MPS)
        plan = plan_moves(td, "cpu")
        assert plan.n_syncs == 1 and set(plan.sync_devices) == set(ACCELERATORS)
        fresh(world)
        assert_values(plan.run(td))
        assert sorted(map(str, world.waits)) == sorted(map(str, ACCELERATORS))


def test_casts_and_nothing_to_do_never_wait():
    with FakeDevices() as world:
        td = tree_on(CUDA0, XPU)
        fresh(world)
        td.to(torch.float16)
        td.to(td.attrs())
        td.to(td.to(torch.float64).attrs(fields=("dtype",)))
        assert world.copies == [] and world.waits == []


def test_a_chain_of_devices_arrives_right():
    with FakeDevices():
        td = tree_on(CPU, CPU)
        for device in (CUDA0, CUDA1, XPU, CUDA0):
            td = td.to(device)
        assert_values(td.to("cpu"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
@pytest.mark.parametrize("device", ACCELERATORS, ids=str)
def test_casts_on_the_way_cross_with_fewer_bytes(device, dtype):
    with FakeDevices() as world:
        td = TensorDict({"a": value(0)})
        fresh(world)
        out = td.to(device, dtype)
        assert [copy.nbytes for copy in world.copies] == [4 * min(4, dtype.itemsize)]
        fresh(world)
        back = out.to("cpu", torch.float32)
        assert [copy.nbytes for copy in world.copies] == [4 * min(4, dtype.itemsize)]
        assert torch.equal(back["a"], value(0))


def test_copies_within_a_compiled_graph_are_blocking():
    flags = []

    def step(td):
        out = td.to("meta")
        flags.append(torch.compiler.is_compiling())
        return out["a"] * 2

    seen = []

    def backend(graph, inputs):
        seen.extend((node.args, node.kwargs) for node in graph.graph.nodes if node.target == "to")
        return graph.forward

    torch.compile(step, fullgraph=True, backend=backend)(TensorDict({"a": value(0)}))
    assert seen
    for args, kwargs in seen:
        assert True not in [arg for arg in args if isinstance(arg, bool)]
        assert not kwargs.get("non_blocking", False)


# --- pinned sources and pending moves ----------------------------------------------


def test_pinned_sources_are_read_late_so_the_handle_says_when_they_are_free():
    with FakeDevices():
        source = TensorDict({"a": ops_for(CUDA0).pin(value(1))})
        plan = plan_moves(source, CUDA0)
        assert plan["a"].route.pinned
        pending = plan.start(source)
        assert not pending.done() and pending.synced == ()
        out = pending.wait()
        assert pending.done() and pending.synced == (CUDA0,)
        source["a"].fill_(-1)
        assert torch.equal(out.to("cpu")["a"], value(1))
        # The same without the wait reads what was written too early.
        source["a"].copy_(value(1))
        early = plan.start(source).result
        source["a"].fill_(-1)
        assert not torch.equal(early.to("cpu")["a"], value(1))


def test_pending_moves_time_out_and_can_be_waited_for_again():
    with FakeDevices():
        td = tree_on(CUDA0, CUDA1)
        pending = plan_moves(td, "cpu").start(td)
        with pytest.raises(TransferTimeout, match="cuda:0, cuda:1"):
            pending.wait(timeout=0.01)
        out = pending.wait()
        assert out is pending.result and out is pending.wait()
        assert_values(out)
        assert set(pending.synced) == {CUDA0, CUDA1}


def test_sources_stay_alive_until_the_moves_are_done():
    import gc
    import weakref

    with FakeDevices() as world:
        td = TensorDict({"a": ops_for(CUDA0).pin(value(0))})
        alive = weakref.ref(td["a"])
        pending = plan_moves(td, CUDA0).start(td)
        del td
        gc.collect()
        assert alive() is not None
        pending.wait()
        world.run_all()
        gc.collect()
        assert alive() is None


def test_pinned_output_is_written_by_the_device():
    with FakeDevices() as world:
        td = tree_on(CUDA0, CUDA0)
        fresh(world)
        out = td.to(Spec(default=Target("cpu", pin=True)))
        assert_values(out)
        assert all(world.is_pinned(x) for x in out.values())
        assert [copy.non_blocking for copy in world.copies] == [True, True]
        assert world.waits == [CUDA0]


# --- shared copies of small leaves ------------------------------------------------


def many(n=100, device=CPU, dtype=torch.float32):
    tensors = {f"k{i}": torch.full((3, 5), float(i), dtype=dtype).to(device) for i in range(n)}
    return TensorDict(tensors)


def assert_many(td, dtype=torch.float32):
    for i, x in enumerate(td.values()):
        assert x.dtype is dtype and x.shape == (3, 5) and bool((x.float() == i).all()), (i, x)


@pytest.mark.parametrize("dtype", [None, torch.float16, torch.float64])
def test_small_leaves_cross_together(dtype):
    with FakeDevices() as world:
        td = many()
        fresh(world)
        there = td.to(CUDA0, dtype)
        assert len(world.copies) == 1 and world.waits == []
        back = there.to("cpu")
        assert len(world.copies) == 2 and world.waits == [CUDA0]
        assert_many(back, dtype or torch.float32)


def test_groups_are_of_one_route_and_at_most_one_mebibyte():
    with FakeDevices() as world:
        td = TensorDict({f"a{i}": torch.full((30_000,), i) for i in range(20)})
        td.update({f"b{i}": torch.full((10,), float(i)) for i in range(20)})
        td["large"] = torch.zeros(200_000)
        fresh(world)
        out = td.to(CUDA0)
        sizes = [copy.nbytes for copy in world.copies]
        assert sum(size <= 1 << 20 for size in sizes) == len(sizes)
        assert (
            len(sizes) == 1 + 1 + 20
        )  # the large one, the floats, and integers of 240 kB that pair up badly
        back = out.to("cpu")
        assert all(torch.equal(back[key], x) for key, x in td.items())


def test_staging_is_not_reused_before_its_copy_is_done():
    with FakeDevices() as world:
        pool = StagingPool(1 << 16, device="cuda")
        first, second = many(20), many(20) + 100
        plan = plan_moves(first, CUDA0, staging=pool)
        a = plan.start(first)
        b = plan.start(second)
        assert world.is_pinned(pool.take(1).data)
        assert_many(a.wait().to("cpu"))
        assert bool((b.wait().to("cpu")["k3"] == 103).all())
        assert pool.stats().n_allocated >= 2


def test_a_bound_for_staging_is_kept_by_waiting():
    with FakeDevices() as world:
        td = many(200)
        plan = plan_moves(td, CUDA0, max_staging_bytes=64 << 10)
        fresh(world)
        out = plan.run(td)
        assert plan.staging.stats().peak_nbytes <= 64 << 10
        assert_many(out.to("cpu"))


def test_leaves_that_share_a_copy_are_saved_alone():
    import io

    td = many()
    flat = torch.arange(100 * 64.0)
    starts = [64 * i for i in range(100)]
    parts = _own_storages(flat, list(td.values()), starts)
    buffer = io.BytesIO()
    torch.save(parts[3], buffer)
    assert len(buffer.getvalue()) < 4000
    assert all(torch.equal(x.view(-1), flat[s : s + 15]) for x, s in zip(parts, starts))
    assert parts[3].untyped_storage().nbytes() == 15 * 4


def test_packing_can_be_switched_off():
    with FakeDevices() as world:
        td = many(10)
        plan = plan_moves(td, CUDA0, pack_below=0)
        fresh(world)
        plan.run(td)
        assert len(world.copies) == 10


def test_leaves_with_history_or_gaps_go_alone():
    plain = [torch.zeros(3) for _ in range(10)]
    odd = [
        torch.zeros(3, requires_grad=True),
        torch.zeros(3, 3).t(),
        torch.zeros(6)[::2],
        torch.zeros(0),
        torch.zeros(3, 3).to_sparse(),
    ]
    tensors = [*plain, *odd]
    routes = [make_route(x, CUDA0, None) for x in tensors]
    assert groups_of(tensors, routes, range(len(tensors)), 1 << 18) == [list(range(10))]
    assert groups_of(plain[:7], routes[:7], range(7), 1 << 18) == []
    assert groups_of(plain, routes[:10], range(10), 12) == []


def test_a_barrier_needs_no_devices():
    assert Barrier([]).wait() and Barrier([CPU, META]).done()
