"""On a real GPU: values are there when they may be read, and few copies do the work."""

import pytest
import torch

from tensordict import TensorDict
from tensordict.placement import StagingPool, plan_moves

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_values_are_right_after_the_default_copy_under_a_busy_stream():
    work = torch.randn(1024, 1024, device="cuda")
    for i in range(1000):
        for _ in range(3):
            work = (work @ work).clamp_(-1, 1)
        td = TensorDict({"a": torch.full((1 << 16,), float(i), device="cuda"), "b": work * 0 + i})
        out = td.to("cpu")
        assert bool((out["a"] == i).all()) and bool((out["b"] == i).all())


def test_small_leaves_cross_together_and_come_back_equal():
    td = TensorDict({f"k{i}": torch.full((8, 8), float(i)) for i in range(1000)})
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        there = td.to("cuda")
        torch.cuda.synchronize()
    copies = [event for event in seen.events() if "Memcpy HtoD" in event.name]
    assert len(copies) <= 4
    assert len({x.untyped_storage().data_ptr() for x in there.values()}) == 1000
    back = there.to("cpu")
    assert all(torch.equal(back[key], x) for key, x in td.items())


def test_staging_is_pinned_once():
    pool = StagingPool(8 << 20)
    td = TensorDict({f"k{i}": torch.full((64,), float(i)) for i in range(200)})
    plan = plan_moves(td, "cuda", staging=pool)
    for _ in range(10):
        out = plan.run(td)
    torch.cuda.synchronize()
    stats = pool.stats()
    assert stats.n_allocated <= 2 and stats.n_reused >= 8
    assert float(out["k7"].sum()) == 64 * 7


def test_free_memory_is_asked_before_anything_moves():
    free, _ = torch.cuda.mem_get_info()
    td = TensorDict({"a": torch.empty(1, dtype=torch.uint8).expand(2 * free)})
    with pytest.raises(MemoryError, match="are missing"):
        plan_moves(td, "cuda").run(td)
