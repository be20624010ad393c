"""The figures of the README, as ratios to plain torch, measured in turn on one machine.

    python benchmarks/first_light.py [--rounds N] [--json]

Every row alternates a base in plain torch and ours and takes the minimum of each; a ratio is
of one run.  Rows on trees are measured with the garbage collector off and on, in a process in
which every large allocation is fresh memory (``MALLOC_MMAP_THRESHOLD_``): glibc would otherwise
change its mind in the middle.  Rows that start interpreters run a byte-compiled copy of the
package, as an installed one is.
"""

from __future__ import annotations

import argparse
import compileall
import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._utils import _flatten_dense_tensors

import tensordict
from tensordict import TensorDict
from tensordict.cli.source import installed_model, small_transformer
from tensordict.core.traverse import leaves
from tensordict.distributed import recv, send
from tensordict.distributed.testing import run_ranks
from tensordict.storage.safetensors import save_tensors

MIB = 1 << 20


@dataclass(frozen=True)
class Row:
    """One measured line: seconds, the ratio, and the bar it is held to."""

    name: str
    base: str
    base_s: float
    ours_s: float
    bar: str
    met: bool

    @property
    def ratio(self) -> float:
        return self.ours_s / self.base_s


def best_of(base: Callable[[], Any], ours: Callable[[], Any], rounds: int) -> tuple[float, float]:
    """The minima, in seconds, of two functions called in turn."""
    minima = [float("inf"), float("inf")]
    for _ in range(rounds):
        for k, fn in enumerate((base, ours)):
            start = time.perf_counter()
            result = fn()
            minima[k] = min(minima[k], time.perf_counter() - start)
            del result
    return minima[0], minima[1]


# --- interpreters ------------------------------------------------------------------------


def compiled_copy(folder: str) -> dict[str, str]:
    """An environment in which the package is byte-compiled, as pip installs it."""
    copy = Path(folder) / "tensordict"
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(tensordict.__file__).parent, copy, ignore=ignore)
    compileall.compile_dir(copy, quiet=1)
    return {**os.environ, "PYTHONPATH": folder}


def interpreter_rows(rounds: int) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        env = compiled_copy(folder)
        path = installed_model() or Path(folder) / "small.safetensors"
        if not path.exists():
            save_tensors(small_transformer(), path)

        def runner(*args: str) -> Callable[[], Any]:
            return lambda: subprocess.run(
                [sys.executable, *args], env=env, check=True, stdout=subprocess.DEVNULL
            )

        torch_alone = runner("-c", "import torch")
        base, ours = best_of(torch_alone, runner("-c", "import torch, tensordict"), rounds)
        rows = [
            Row(
                "import tensordict",
                "import torch",
                base,
                ours,
                "adds <= 0.25 s",
                ours - base <= 0.25,
            )
        ]
        plan = runner("-m", "tensordict", "plan", str(path), "--dtype", "bf16")
        base, ours = best_of(torch_alone, plan, rounds)
        rows.append(
            Row("tensordict plan", "import torch", base, ours, "<= 1.3x", ours <= 1.3 * base)
        )
    return rows


# --- trees -------------------------------------------------------------------------------


def nested(n: int, numel: int) -> TensorDict:
    """``n`` float32 leaves in nodes of at most 100."""
    wide = min(n, 100)
    return TensorDict(
        {
            f"n{i}": {f"k{j}": torch.randn(numel) for j in range(wide)}
            for i in range(max(1, n // wide))
        }
    )


def tree_rows(rounds: int, collector: str) -> list[Row]:
    td = nested(10_000, 10)
    flat = leaves(td)
    spec = td.attrs()
    plain = [(x.device, x.dtype, x.shape) for x in flat]
    small, large = nested(100, 10), nested(100, 65_536)
    one = torch.randn(100 * 65_536)

    def in_ms(name: str, base: str, pair: tuple[float, float], limit: float) -> Row:
        return Row(f"{name}, gc {collector}", base, *pair, f"<= {limit} ms", pair[1] * 1e3 <= limit)

    rows = [
        in_ms(
            "attrs(), 10,000 leaves",
            "list of (device, dtype, shape)",
            best_of(lambda: [(x.device, x.dtype, x.shape) for x in flat], td.attrs, rounds),
            9,
        ),
        in_ms(
            "to(spec), nothing to do, 10,000",
            "compare device and dtype",
            best_of(
                lambda: all(x.device == a[0] and x.dtype is a[1] for x, a in zip(flat, plain)),
                lambda: td.to(spec),
                rounds,
            ),
            5,
        ),
        in_ms(
            "consolidate(), 10,000 leaves",
            "_flatten_dense_tensors",
            best_of(lambda: _flatten_dense_tensors(flat), td.consolidate, rounds),
            35,
        ),
        in_ms(
            "consolidate(), 100 small leaves",
            "_flatten_dense_tensors",
            best_of(lambda: _flatten_dense_tensors(leaves(small)), small.consolidate, rounds * 10),
            0.3,
        ),
    ]
    base, ours = best_of(one.clone, large.consolidate, rounds)
    rows.append(
        Row(
            f"consolidate(), 25 MiB in 100, gc {collector}",
            "clone of one tensor",
            base,
            ours,
            "<= 1.1x",
            ours <= 1.1 * base,
        )
    )
    return rows


# --- exchange ----------------------------------------------------------------------------


def exchange_rank(rank: int, size: int, rounds: int) -> tuple[float, float]:
    """1 MiB in 1,000 leaves to a new tensordict, against a flat send; both acknowledged."""
    td = TensorDict({f"k{i}": torch.randn(MIB // 4 // 1_000) for i in range(1_000)})
    flat = torch.zeros(td.bytes(), dtype=torch.uint8)
    ack = torch.zeros(64, dtype=torch.uint8)

    def acked(send_it: Callable[[], Any], receive_it: Callable[[], Any]) -> Callable[[], None]:
        def run() -> None:
            dist.barrier()
            if rank == 0:
                send_it()
                dist.recv(ack, 1, tag=2)
            else:
                receive_it()
                dist.send(ack, 0, tag=2)

        return run

    base = acked(lambda: dist.send(flat, 1), lambda: dist.recv(flat, 0))
    ours = acked(lambda: send(td, 1), lambda: recv(0))
    ours()  # the schema travels once
    return best_of(base, ours, rounds)


def exchange_row(rounds: int) -> Row:
    base, ours = run_ranks(exchange_rank, 2, rounds)[0]
    name = "send to a new td, 1 MiB in 1,000"
    return Row(name, "one flat send", base, ours, "<= 6x", ours <= 6 * base)


def trees_in_fresh_memory(rounds: int) -> list[Row]:
    out = subprocess.run(
        [sys.executable, __file__, "--trees", "--rounds", str(rounds)],
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": str(MIB)},
        check=True,
        stdout=subprocess.PIPE,
    )
    return [Row(**row) for row in json.loads(out.stdout)]


# --- output ------------------------------------------------------------------------------


def table(rows: list[Row]) -> str:
    cells = [("row", "base", "base ms", "ours ms", "ratio", "bar", "")]
    for row in rows:
        base, ours = f"{row.base_s * 1e3:.2f}", f"{row.ours_s * 1e3:.2f}"
        verdict = "met" if row.met else "MISSED"
        cells.append((row.name, row.base, base, ours, f"{row.ratio:.2f}", row.bar, verdict))
    widths = [max(map(len, column)) for column in zip(*cells)]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths)).rstrip() for line in cells)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--rounds", type=int, default=15)
    p.add_argument("--json", action="store_true")
    p.add_argument("--trees", action="store_true", help="only the rows on trees, as JSON")
    args = p.parse_args()
    torch.set_num_threads(1)
    if args.trees:
        gc.disable()
        rows = tree_rows(args.rounds, "off")
        gc.enable()
        rows += tree_rows(args.rounds, "on")
    else:
        rows = interpreter_rows(max(3, args.rounds // 3))
        rows += trees_in_fresh_memory(args.rounds)
        rows.append(exchange_row(args.rounds * 4))
    if args.json or args.trees:
        print(json.dumps([asdict(row) for row in rows]))
    else:
        print(table(rows))


if __name__ == "__main__":
    main()
