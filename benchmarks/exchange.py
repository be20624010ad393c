"""Exchanges between two gloo ranks, as ratios to one flat message of as many bytes.

    python benchmarks/exchange.py [--rounds N] [--json]

Each row alternates the flat form and the tensordict form and takes the minimum of each, so a
ratio is of one run on one machine.  The base of a point-to-point row is a flat send with a
64-byte answer; that of a reduction is a flat all_reduce.  "By hand" are the same messages as
"new", over torch.distributed and without a word about what they are: what is left above it is
ours.  Rows are measured with the garbage collector off and on, because a collection in the
middle of 10,000 new tensors is not noise to a user.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tensordict import TensorDict
from tensordict.distributed import recv, send
from tensordict.distributed.testing import run_ranks

KIB, MIB = 1 << 10, 1 << 20


def leaves_of(nbytes: int, n: int, prefix: str = "k") -> dict[str, torch.Tensor]:
    return {f"{prefix}{i}": torch.randn(max(1, nbytes // n // 4)) for i in range(n)}


def trees() -> dict[str, TensorDict]:
    """The tensordicts that are sent, by the name of their row."""
    return {
        "1 MiB in 1,000": TensorDict(leaves_of(MIB, 1_000)),
        "1 MiB in 10,000": TensorDict(leaves_of(MIB, 10_000)),
        "64 MiB in 100": TensorDict(leaves_of(64 * MIB, 100)),
        "60 x 1 MiB + 1,000 x 4 KiB": TensorDict(
            {**leaves_of(60 * MIB, 60, "big"), **leaves_of(1_000 * 4 * KIB, 1_000, "small")}
        ),
    }


BARS = {
    ("1 MiB in 1,000", "new"): 6,
    ("1 MiB in 1,000", "into"): 7,
    ("1 MiB in 1,000", "cold"): 12,
    ("1 MiB in 1,000", "all_reduce"): 4,
    ("1 MiB in 10,000", "new"): 25,
    ("1 MiB in 10,000", "into"): 30,
    ("1 MiB in 10,000", "cold"): 60,
    ("1 MiB in 10,000", "all_reduce"): 18,
    ("1 MiB in 1,000", "consolidated new"): None,
    ("1 MiB in 1,000", "consolidated all_reduce"): None,
    ("1 MiB in 10,000", "consolidated new"): None,
    ("1 MiB in 10,000", "consolidated all_reduce"): None,
    ("64 MiB in 100", "consolidated new"): None,
    ("64 MiB in 100", "new"): 1.05,
    ("64 MiB in 100", "in place"): 1.05,
    ("64 MiB in 100", "into"): None,
    ("64 MiB in 100", "by hand"): None,
    ("60 x 1 MiB + 1,000 x 4 KiB", "new"): 1.1,
    ("60 x 1 MiB + 1,000 x 4 KiB", "in place"): 1.1,
    ("60 x 1 MiB + 1,000 x 4 KiB", "into"): None,
    ("60 x 1 MiB + 1,000 x 4 KiB", "by hand"): None,
}


def best_of(base: Callable[[], Any], ours: Callable[[], Any], rounds: int) -> tuple[float, float]:
    """The minima, in seconds, of two functions called in turn."""
    minima = [float("inf"), float("inf")]
    for _ in range(rounds):
        for k, fn in enumerate((base, ours)):
            dist.barrier()
            start = time.perf_counter()
            result = fn()
            minima[k] = min(minima[k], time.perf_counter() - start)
            del result
    return minima[0], minima[1]


def flat_send(nbytes: int, rank: int) -> Callable[[], None]:
    data, ack = torch.ones(nbytes // 4), torch.zeros(64, dtype=torch.uint8)

    def run() -> None:
        if rank == 0:
            dist.send(data, 1, tag=1)
            dist.recv(ack, 1, tag=2)
        else:
            dist.recv(data, 0, tag=1)
            dist.send(ack, 0, tag=2)

    return run


def form(name: str, td: TensorDict, rank: int) -> Callable[[], Any]:
    """One exchange of a tensordict in the form of a row."""
    if name.startswith("consolidated "):
        return form(name.removeprefix("consolidated "), td.consolidate(), rank)
    out = td.clone()
    ack = torch.zeros(64, dtype=torch.uint8)

    def acked(fn: Callable[[], Any]) -> Callable[[], Any]:
        # A sender is done when its bytes are gone; the row ends when the receiver has them, which
        # large payloads are confirmed for anyway.
        if sum(x.nbytes for x in td.values()) > 2 * MIB:
            return fn

        def run() -> Any:
            result = fn()
            dist.recv(ack, 1, tag=2) if rank == 0 else dist.send(ack, 0, tag=2)
            return result

        return run

    if name == "new":
        return acked(lambda: send(td, 1) if rank == 0 else recv(0))
    if name == "into":
        return acked(lambda: send(td, 1) if rank == 0 else recv(0, out=out))
    if name == "in place":
        return acked(lambda: send(td, 1) if rank == 0 else recv(0, out=out, atomic=False))
    if name == "by hand":
        return by_hand(td, rank)
    if name == "cold":
        # Ranks are used again and remember structures: no name may come twice.
        count = iter(range(gc.isenabled() << 30, 1 << 40))

        def cold() -> Any:
            # Another name makes another schema.
            key = f"x{next(count)}"
            td[key] = td.pop(next(k for k in list(td.keys())[-1:]))
            return send(td, 1) if rank == 0 else recv(0)

        return acked(cold)
    return lambda: td.all_reduce()


def by_hand(td: TensorDict, rank: int) -> Callable[[], Any]:
    """The messages of a new tensordict whose small leaves are alike."""
    small = [x for x in td.values() if x.nbytes < 64 * KIB]
    large = [x for x in td.values() if x.nbytes >= 64 * KIB]
    go, ack = torch.zeros(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    packed = torch.empty(len(small), *small[0].shape) if small else torch.empty(0)

    def sends() -> None:
        dist.recv(go, 1, tag=1)
        works = [dist.isend(x, 1, tag=3) for x in large]
        if small:
            works.append(dist.isend(torch.stack(small, out=packed), 1, tag=3))
        for work in works:
            work.wait()
        dist.recv(ack, 1, tag=2)

    def receives() -> list[torch.Tensor]:
        new = [torch.empty_like(x) for x in large]
        room = torch.empty_like(packed)
        messages = [*new, room] if small else new
        works = [dist.irecv(x, 0, tag=3) for x in messages]
        dist.send(go, 0, tag=1)
        leaves = [*new, *room.unbind()]
        for work in works:
            work.wait()
        dist.send(ack, 0, tag=2)
        return leaves

    return sends if rank == 0 else receives


def measure(rank: int, size: int, rounds: int, collect: bool, only: str) -> list[dict[str, Any]]:
    """All rows on one rank; rank 0's are reported."""
    gc.collect()
    (gc.enable if collect else gc.disable)()
    rows = []
    for (tree, name), bar in BARS.items():
        if only and only not in f"{tree} {name}":
            continue
        td = trees()[tree]
        nbytes = sum(x.nbytes for x in td.values())
        data = torch.zeros(nbytes // 4)
        base = flat_send(nbytes, rank)
        if name.endswith("all_reduce"):
            base = lambda data=data: dist.all_reduce(data)  # noqa: E731
        n = max(3, rounds // 2) if nbytes > 8 * MIB else rounds
        flat, ours = best_of(base, form(name, td, rank), n)
        rows.append(
            {
                "row": tree,
                "form": name,
                "flat_ms": flat * 1e3,
                "ms": ours * 1e3,
                "ratio": ours / flat,
                "bar": bar,
                "gc": collect,
            }
        )
    gc.enable()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--json", action="store_true", help="one JSON object per row")
    parser.add_argument("--fresh", action="store_true", help="malloc as it is by default")
    parser.add_argument("--only", default="", help="rows whose name contains this")
    args = parser.parse_args()
    # Fresh pages cost as much as the transfer: memory that was freed stays with the ranks, so
    # that a row says what the exchange costs (``--fresh`` leaves malloc as it is).
    if not args.fresh:
        os.environ.update(MALLOC_MMAP_THRESHOLD_=str(1 << 30), MALLOC_TRIM_THRESHOLD_=str(4 << 30))
    for collect in (False, True):
        rows, _ = run_ranks(measure, 2, args.rounds, collect, args.only, timeout=600)
        for row in rows:
            if args.json:
                print(json.dumps(row))
                continue
            print(
                f"{row['row']:28} {row['form']:23} gc {'on ' if collect else 'off'} "
                f"{row['flat_ms']:8.2f} ms flat {row['ms']:8.2f} ms "
                f"{row['ratio']:6.2f}x" + (f" (bar {row['bar']}x)" if row["bar"] else "")
            )


if __name__ == "__main__":
    main()
