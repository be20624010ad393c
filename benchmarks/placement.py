"""Planning, casting and packing, beside the plain loops over torch that they replace.

    python benchmarks/placement.py [--rounds N] [--only TEXT] [--json]

Each row alternates the base and the tensordict form and takes the minimum of each, so that a
ratio is of one run on one machine.  Rows are measured with the garbage collector off and on.
The rows that copy 25 MiB run in processes of their own with fixed thresholds of the allocator, since
left alone it decides by what was freed before whether a copy pays for its pages: *fresh*, every large
block is new pages, which cost more than the copy; *warm*, freed memory is kept and used again.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tensordict import TensorDict
from tensordict.placement import CastPolicy, Spec, StagingPool, Target, fit, plan_moves

BF16, CPU = torch.bfloat16, torch.device("cpu")
MIB = 1 << 20
# What the allocator (glibc) does with large blocks.
MEMORY = {
    "fresh": {"MALLOC_MMAP_THRESHOLD_": str(1 << 16)},
    "warm": {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 31)},
}


@dataclass(frozen=True)
class Row:
    """One line: what is timed, what it is compared with, and the bar.

    Attributes:
        name: What is timed.
        base: The plain form, in the units of which the bar is, or None for a bar in ms.
        ours: The tensordict form.
        bar: The largest ratio, or the largest time in ms; None where there is none.
    """

    name: str
    base: Callable[[], Any] | None
    ours: Callable[[], Any]
    bar: float | None


def small(n: int) -> TensorDict:
    return TensorDict({f"layer{i}": torch.randn(4, 8) for i in range(n)})


def rows_of_many(n: int = 10_000) -> list[Row]:
    """Rows of many small leaves, in ms."""
    td = small(n)
    spec = td.attrs()
    low = td.to(BF16).attrs()
    policy = CastPolicy.mixed()
    locked = small(n).lock_()
    frozen = Spec(default=Target(dtype=BF16))
    plan = plan_moves(td, td.attrs())
    return [
        Row("attrs()", None, lambda: td.attrs(), 9),
        Row("to(attrs), nothing to do", None, lambda: td.to(spec), 5),
        Row("plan_moves, all leaves cast", None, lambda: plan_moves(td, low), 18),
        Row("plan_moves, mixed policy", None, lambda: plan_moves(td, policy=policy), 40),
        Row("plan_moves, nothing to move", None, lambda: plan_moves(td, spec), 5),
        Row("plan_moves, cached", None, lambda: plan_moves(locked, frozen), 0.1),
        Row("run() of a plan with nothing to do", None, lambda: plan.run(td), 5),
        Row("consolidate", None, lambda: td.consolidate(), 35),
    ]


def rows_of_casts(n: int = 100) -> list[Row]:
    """Rows of a hundred small leaves, as ratios to the loop."""
    td = small(n)
    spec = td.to(BF16).attrs()
    leaves = list(td.values())
    loop = lambda: [x.to(BF16) for x in leaves]  # noqa: E731
    told = lambda: [x.to(CPU, BF16) for x in leaves]  # noqa: E731
    return [
        Row("to(dtype) / loop of to(dtype)", loop, lambda: td.to(BF16), 0.9),
        Row("to(dtype) / loop of to(device, dtype)", told, lambda: td.to(BF16), 1.2),
        Row("to(attrs) / loop of to(dtype)", loop, lambda: td.to(spec), 0.9),
        Row("to(attrs) / loop of to(device, dtype)", told, lambda: td.to(spec), 1.2),
        Row("consolidate 100 small", None, lambda: td.consolidate(), 0.3),
    ]


def rows_of_copies(memory: str, nbytes: int = 25 * MIB, n: int = 100) -> list[Row]:
    """Rows of large copies, as ratios to one flat copy or cast into memory of the same kind."""
    td = TensorDict({f"k{i}": torch.zeros(nbytes // n // 4) for i in range(n)})
    flat = torch.zeros(nbytes // 4)
    whole = td.consolidate()
    # The bars are for fresh memory; on warm pages the work of a hundred leaves shows.
    bars = (1.1, 1.2) if memory == "fresh" else (None, None)
    return [
        Row(f"consolidate 25 MiB / one copy, {memory}", flat.clone, td.consolidate, bars[0]),
        Row(
            f"to(dtype) of it / flat cast, {memory}",
            lambda: flat.to(BF16),
            lambda: whole.to(BF16),
            bars[1],
        ),
    ]


def rows_of_plans() -> list[Row]:
    """A model of 2 B parameters that is not there: plan under budgets, in ms."""
    width = 2048

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, device="meta")

    def layer() -> dict[str, torch.Tensor]:
        square = {f"attn.{name}.weight": empty(width, width) for name in "qkvo"}
        wide = {f"mlp.{name}.weight": empty(4 * width, width) for name in ("gate", "up", "down")}
        return {**square, **wide, "norm1.weight": empty(width), "norm2.weight": empty(width)}

    td = TensorDict(
        {"embed": empty(128_000, width), "layers": {str(i): layer() for i in range(28)}}
    )
    budgets = {"cuda:0": "2GiB", "cuda:1": "2GiB", "cpu": "16GiB"}
    policy = CastPolicy.mixed()

    def plan() -> Any:
        where = fit(td, budgets, keep_together=["layers.*"], policy=policy)
        return where, plan_moves(td, policy=policy)

    return [Row("fit and plan 2 B parameters on meta", None, plan, 300)]


def rows_of_gpu(n: int = 1000) -> list[Row]:
    """Rows that need a CUDA device, as ratios to the loop per leaf."""
    if not torch.cuda.is_available():
        return []
    td = small(n)
    leaves = list(td.values())
    pool = StagingPool(64 * MIB)
    plan = plan_moves(td, "cuda", staging=pool)

    def synced(fn: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            result = fn()
            torch.cuda.synchronize()
            return result

        return run

    one_by_one = synced(lambda: [x.to("cuda", non_blocking=True) for x in leaves])
    pinned = synced(lambda: [x.pin_memory().to("cuda", non_blocking=True) for x in leaves])
    return [
        Row("to(cuda) of 1,000 small / loop", one_by_one, synced(lambda: td.to("cuda")), 1 / 3),
        Row("pinned pool / fresh pinning", pinned, synced(lambda: plan.run(td)), 1),
    ]


def best(row: Row, rounds: int) -> tuple[float | None, float]:
    """The minima of base and ours in ms, called in turn."""
    minima = [float("inf"), float("inf")]
    forms = [row.base, row.ours]
    for _ in range(rounds):
        for k, fn in enumerate(forms):
            if fn is None:
                continue
            start = time.perf_counter()
            result = fn()
            minima[k] = min(minima[k], (time.perf_counter() - start) * 1e3)
            del result
    return (None if row.base is None else minima[0]), minima[1]


def measure(rows: list[Row], rounds: int, only: str) -> list[dict[str, Any]]:
    out = []
    for collect in (False, True):
        gc.collect()
        (gc.enable if collect else gc.disable)()
        for row in rows:
            if only and only not in row.name:
                continue
            base, ours = best(row, rounds)
            value = ours if base is None else ours / base
            out.append(
                {
                    "row": row.name,
                    "base_ms": base,
                    "ms": ours,
                    "value": value,
                    "unit": "ms" if base is None else "x",
                    "bar": row.bar,
                    "gc": collect,
                }
            )
    gc.enable()
    return out


def copies_in_a_process(memory: str, rounds: int, only: str) -> list[dict[str, Any]]:
    """The rows of large copies, in a process whose allocator is told what to do."""
    command = [sys.executable, __file__, "--copies", memory, "--json", "--rounds", str(rounds)]
    done = subprocess.run(
        [*command, "--only", only],
        env={**os.environ, **MEMORY[memory]},
        capture_output=True,
        text=True,
        check=True,
    )
    return list(json.loads(done.stdout))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--only", default="")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--copies", choices=MEMORY, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.copies:
        results = measure(rows_of_copies(args.copies), args.rounds, args.only)
    else:
        results = measure(rows_of_many(), max(5, args.rounds // 3), args.only)
        results += measure(rows_of_plans(), max(5, args.rounds // 3), args.only)
        results += measure(rows_of_gpu(), args.rounds, args.only)
        results += measure(rows_of_casts(), args.rounds * 10, args.only)
        for memory in MEMORY:
            results += copies_in_a_process(memory, args.rounds, args.only)
    if args.json:
        print(json.dumps(results))
        return
    for r in results:
        bar = r["bar"]
        mark = "" if bar is None else f"bar {bar:5g} {'ok' if r['value'] <= bar else 'OVER'}"
        collector = "gc on" if r["gc"] else "gc off"
        print(f"{r['row']:48} {collector:6} {r['value']:9.3f} {r['unit']:2} {mark}")


if __name__ == "__main__":
    main()
