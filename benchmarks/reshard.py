"""Resharding: plans by the second, runs as ratios to what torch offers.

    python benchmarks/reshard.py [--rounds N] [--plans-only] [--json]

Runs are on two gloo ranks.  Each row alternates both forms and takes the minimum of each, so a
ratio is of one run on one machine.  Bars are those of the project: a row says whether it holds.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from tensordict.distributed import reshard
from tensordict.distributed.testing import run_ranks
from tensordict.placement import Layout, Placement, layouts_of, plan_reshard

SHAPES = [
    (4096, 4096),
    (1024, 4096),
    (4096, 1024),
    (14336, 4096),
    (4096, 14336),
    (4096,),
    (32000, 4096),
    (4096, 2048),
    (2048, 4096),
    (128,),
]
REPLICATE = Placement("replicate")


def shard(dim: int) -> Placement:
    return Placement("shard", dim)


# --- plans ---------------------------------------------------------------------------------


def parameters(n_src: int, mesh: tuple[int, int]) -> tuple[dict[str, Layout], dict[str, Layout]]:
    """1,000 parameters of 10 shapes: FSDP on the first ranks, replicas x tensor parallel after."""
    src, dst = {}, {}
    ranks = range(n_src, n_src + mesh[0] * mesh[1])
    for i in range(1000):
        shape = SHAPES[i % len(SHAPES)]
        name = f"layers.{i // 10}.p{i % 10}"
        split = [REPLICATE, shard(i % 2) if len(shape) > 1 else REPLICATE]
        src[name] = Layout.from_placements(shape, [n_src], [shard(0)], dtype=torch.float32)
        dst[name] = Layout.from_placements(shape, mesh, split, ranks=ranks)
    return src, dst


def plan_rows() -> list[dict[str, Any]]:
    out = []
    for label, n_src, mesh, bar in (
        ("64 -> TP 8 x DP 8", 64, (8, 8), 1.0),
        ("FSDP 1,024 -> TP 8 x DP 128", 1024, (128, 8), 10.0),
    ):
        start = time.perf_counter()
        src, dst = parameters(n_src, mesh)
        plan = plan_reshard(src, dst, dtype=torch.bfloat16)
        plan.hash  # noqa: B018
        planned = time.perf_counter()
        again = plan_reshard(dict(src), dict(dst), dtype=torch.bfloat16)
        cached = time.perf_counter() - planned
        assert again is plan and plan.efficiency == 1.0
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)
        out.append({"row": f"plan of {label}", "s": planned - start, "bar": bar})
        out.append({"row": f"... again, from the cache ({label})", "s": cached, "bar": 0.05})
        out.append({"row": f"... GiB of the process ({label})", "s": peak, "bar": 2.0})
    return out


# --- runs ----------------------------------------------------------------------------------


def fastest(rounds: int, *forms: Callable[[], Any]) -> list[float]:
    """The least time of each form, in turn, all ranks starting together."""
    best = [float("inf")] * len(forms)
    for _ in range(rounds + 1):
        for i, form in enumerate(forms):
            dist.barrier()
            start = time.perf_counter()
            form()
            best[i] = min(best[i], time.perf_counter() - start)
    return best


def small_leaves(rank: int, size: int, rounds: int) -> dict[str, float]:
    """1,000 tensors of 64 x 64, rows to columns."""
    mesh = DeviceMesh("cpu", list(range(size)))
    tensors = {
        f"k{i}": DTensor.from_local(torch.randn(64 // size, 64), mesh, [Shard(0)])
        for i in range(1000)
    }
    src = layouts_of(tensors)
    dst = {n: Layout.from_placements(x.shape, [size], [shard(1)]) for n, x in src.items()}
    plan = plan_reshard(src, dst)
    out: dict[str, Any] = {}

    def ours() -> None:
        out["ours"] = reshard(tensors, plan).wait()

    def by_dtensor() -> None:
        out["dtensor"] = {n: x.redistribute(mesh, [Shard(1)]) for n, x in tensors.items()}

    def by_gathering() -> None:
        mine = slice(rank * 64 // size, (rank + 1) * 64 // size)
        found = {}
        for name, x in tensors.items():
            whole = torch.empty(64, 64)
            dist.all_gather_into_tensor(whole, x._local_tensor)
            found[name] = whole[:, mine].contiguous()
        out["gathered"] = found

    seconds = fastest(rounds, ours, by_dtensor, by_gathering)
    for name, x in out["ours"].items():
        assert torch.equal(x, out["gathered"][name])
        assert torch.equal(x, out["dtensor"][name].to_local())
    return dict(zip(("ours", "dtensor", "gathered"), seconds))


def large_leaves(rank: int, size: int, rounds: int, dims: tuple[int, int]) -> dict[str, float]:
    """256 MiB in 50 tensors; the base is one flat exchange of the bytes that must move."""
    side = 1158  # 1158^2 float32 are 5.1 MiB
    shape = (side, side)
    make = Layout.from_placements
    src = {f"k{i}": make(shape, [size], [shard(dims[0])], dtype=torch.float32) for i in range(50)}
    dst = {name: make(shape, [size], [shard(dims[1])]) for name in src}
    if dims[0] == dims[1]:  # everything moves: to the other rank
        dst = {n: make(shape, [size], [shard(dims[1])], ranks=[1, 0]) for n in src}
    plan = plan_reshard(src, dst)
    tensors = {name: torch.randn(x.local_shape(rank)) for name, x in src.items()}
    out = {name: torch.empty(x.local_shape(rank)) for name, x in plan.dst.items()}
    flat = torch.randn(plan.sent_bytes(rank) // 4)
    other = torch.empty(plan.recv_bytes(rank) // 4)

    def base() -> None:
        for work in [dist.isend(flat, 1 - rank), dist.irecv(other, 1 - rank)]:
            work.wait()

    seconds = fastest(
        rounds,
        base,
        lambda: reshard(tensors, plan, out=out, partial=True).wait(),
        lambda: reshard(tensors, plan).wait(),
        lambda: reshard(tensors, plan, out=out).wait(),
    )
    return dict(zip(("flat", "into", "new", "atomic"), seconds))


def run_rows(rounds: int) -> list[dict[str, Any]]:
    small = run_ranks(small_leaves, 2, rounds, timeout=600)
    worst = {name: max(times[name] for times in small) for name in small[0]}
    out = [
        {"row": "1,000 of 64 x 64, rows to columns (s)", "s": worst["ours"], "bar": None},
        {"row": "... redistribute over ours", "s": worst["dtensor"] / worst["ours"], "least": 5},
        {"row": "... gather, slice over ours", "s": worst["gathered"] / worst["ours"], "least": 3},
    ]
    for label, dims in (("rows to columns", (0, 1)), ("all rows to the other rank", (0, 0))):
        large = run_ranks(large_leaves, 2, max(3, rounds // 2), dims, timeout=600)
        worst = {name: max(times[name] for times in large) for name in large[0]}
        for form in ("into", "new", "atomic"):
            bar = 1.5 if form == "into" else None
            row = f"256 MiB in 50, {label}, {form}, over flat"
            out.append({"row": row, "s": worst[form] / worst["flat"], "bar": bar})
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--plans-only", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = plan_rows() + ([] if args.plans_only else run_rows(args.rounds))
    if args.json:
        print(json.dumps(rows, indent=1))
        return
    for row in rows:
        verdict = ""
        if row.get("bar") is not None:
            verdict = f"<= {row['bar']}: {'holds' if row['s'] <= row['bar'] else 'MISSED'}"
        elif "least" in row:
            verdict = f">= {row['least']}: {'holds' if row['s'] >= row['least'] else 'MISSED'}"
        print(f"{row['row']:<55} {row['s']:>9.3f}  {verdict}")


if __name__ == "__main__":
    main()
