"""Typed classes, lazy stacks and values per row, against plain Python and the released package.

    python benchmarks/typed.py [--released PYTHON] [--json]

``--released`` names an interpreter in which another tensordict is installed: the same
measurements run there, the two in turn, and the ratio of the minima (each in units of a dict
read in its own process) is shown beside the ratio to plain Python or torch.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

ROUNDS = 30

# Row -> (bar against plain Python or torch, bar against the released package).
BARS: dict[str, tuple[float | None, float | None]] = {
    "field read": (6.0, 0.3),
    "forward": (None, None),  # plain: the dense call; the bar is 0.6 us over it
    "lazy_stack of 16": (None, 0.35),
    "lazy read of a key": (1.3, None),
    "lazy int index": (None, 0.25),
    "ragged text batch": (None, None),
    "collate 64 x 10": (None, None),
}


def fastest(fns: Sequence[Callable[[], Any]], number: int) -> list[float]:
    """Microseconds of one call of each: the fastest of several runs in turn, the collector off."""
    best = [float("inf")] * len(fns)
    for fn in fns:
        fn()
    gc.disable()
    for _ in range(ROUNDS):
        for i, fn in enumerate(fns):
            start = time.perf_counter()
            for _ in range(number):
                fn()
            best[i] = min(best[i], time.perf_counter() - start)
    gc.enable()
    return [x / number * 1e6 for x in best]


def rows() -> dict[str, tuple[Callable[[], Any], Callable[[], Any] | None, int]]:
    """Row -> (tensordict, plain form, calls per run)."""
    from tensordict import TensorClass, TensorDict, lazy_stack

    class Sample(TensorClass):
        x: torch.Tensor
        y: torch.Tensor

    x = torch.zeros(4, 3)
    plain = {"x": x, "y": x}
    typed = Sample(x=x, y=x, batch_size=[4])
    dense = TensorDict(plain, [4])
    parts = [TensorDict({"a": torch.randn(8), "b": torch.randn(8)}) for _ in range(16)]
    lazy = lazy_stack(parts)
    samples = [{f"k{i}": torch.randn(8) for i in range(10)} for _ in range(64)]
    tds = [TensorDict(sample) for sample in samples]
    keys = list(samples[0])
    return {
        "dict read": (lambda: plain["x"], None, 20_000),
        "field read": (lambda: typed.x, lambda: plain["x"], 20_000),
        "forward": (lambda: typed.clone(), lambda: dense.clone(), 1_000),
        "lazy_stack of 16": (lambda: lazy_stack(parts), None, 2_000),
        "lazy read of a key": (
            lambda: lazy["a"],
            lambda: torch.stack([t["a"] for t in parts]),
            300,
        ),
        "lazy int index": (lambda: lazy[3], None, 20_000),
        "collate 64 x 10": (
            lambda: torch.stack(tds),
            lambda: {k: torch.stack([s[k] for s in samples]) for k in keys},
            10,
        ),
        "ragged text batch": (*text(), 1),
    }


def text() -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Stack 512 ragged samples, shuffle, split and concatenate: tensordicts and plain lists."""
    from tensordict import TensorDict, lazy_stack

    rng = random.Random(0)
    samples = [
        {"ids": torch.arange(rng.randint(1, 64)), "prompt": f"prompt {i}", "meta": {"id": i}}
        for i in range(512)
    ]
    order = list(range(512))
    rng.shuffle(order)

    def ours() -> Any:
        tds = []
        for s in samples:
            td = TensorDict({"ids": s["ids"], "prompt": s["prompt"]})
            td.set_non_tensor("meta", s["meta"])
            tds.append(td)
        shuffled = lazy_stack(tds)[torch.tensor(order)]
        return torch.cat(list(shuffled.split(64)), 0)

    def theirs() -> Any:
        columns = {k: [s[k] for s in samples] for k in samples[0]}
        shuffled = {k: [v[i] for i in order] for k, v in columns.items()}
        micro = [
            {k: v[at : at + 64] for k, v in shuffled.items()} for at in range(0, len(order), 64)
        ]
        return {k: [x for part in micro for x in part[k]] for k in shuffled}

    return ours, theirs


def measure() -> dict[str, dict[str, float]]:
    out: dict[str, dict[str, float]] = {}
    for name, (ours, plain, number) in rows().items():
        times = fastest([ours] if plain is None else [ours, plain], number)
        out[name] = dict(zip(("us", "plain_us"), times))
    return out


def _elsewhere(python: str) -> dict[str, dict[str, float]]:
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [python, os.path.abspath(__file__), "--json"], env=env, capture_output=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--released", help="a Python in which another tensordict is installed")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    mine = measure()
    if args.json:
        print(json.dumps(mine))
        return
    other: dict[str, dict[str, float]] = {}
    if args.released:
        for _ in range(2):  # in turn
            for name, row in _elsewhere(args.released).items():
                known = other.setdefault(name, row)
                known["us"] = min(known["us"], row["us"])
            for name, row in measure().items():
                mine[name] = {k: min(v, row[k]) for k, v in mine[name].items()}
    print(f"{'':22} {'us':>10} {'plain':>8} {'bar':>6} {'released':>9} {'bar':>6}")
    for name, row in mine.items():
        bars = BARS.get(name, (None, None))
        ratio = row["us"] / row["plain_us"] if "plain_us" in row else None
        # Each side in units of its own dict read: the machine may be busier for one of them.
        released = None
        if name in other:
            mine_units = row["us"] / mine["dict read"]["us"]
            released = mine_units / (other[name]["us"] / other["dict read"]["us"])
        cells = [f"{v:.2f}" if v is not None else "" for v in (ratio, bars[0], released, bars[1])]
        print(
            f"{name:22} {row['us']:10.3f} {cells[0]:>8} {cells[1]:>6} {cells[2]:>9} {cells[3]:>6}"
        )
    over = mine["forward"]["us"] - mine["forward"]["plain_us"]
    print(f"a forward costs {over:.2f} us over the dense call (bar 0.6)")


if __name__ == "__main__":
    sys.exit(main())
