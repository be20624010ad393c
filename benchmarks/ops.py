"""Operations of a tensordict against plain torch on the same leaves, and against another one.

    python benchmarks/ops.py [--peer PYTHON] [--rows WORD ...] [--rounds N] [--gc] [--json]

Plain torch does the least work that gives the same tensors: a dict comprehension, or one foreach
call where there is one.  ``--peer`` runs the same rows with the ``tensordict`` that another
interpreter imports.  The sides take turns, in short samples, and each keeps its minimum, so that
a ratio is of one run on one machine.  The garbage collector is off unless ``--gc`` is given.

Rows marked ``*`` are bound by torch kernels. Bars: no row slower than the peer, geometric mean of
peer / ours at least 2.2, rows marked ``*`` at most 1.4 times plain torch.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tensordict import TensorDict

Call = Callable[[], Any]
SAMPLE_S = 3e-4  # length of one sample
NOISE = 1.05
MEAN_BAR, KERNEL_BAR = 2.2, 1.4


@dataclass
class Row:
    """One operation: a name, the tensordict form and the plain form."""

    name: str
    ours: Call
    plain: Call
    kernel: bool = False


def leaves(n: int = 10, shape: tuple[int, ...] = (4, 3)) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return {f"k{i}": torch.rand(shape, generator=g) for i in range(n)}


def nested(d: dict[str, torch.Tensor]) -> dict[str, Any]:
    items = list(d.items())
    return {"a": dict(items[:4]), "b": {"c": dict(items[4:7])}, **dict(items[7:])}


class Data:
    """What the rows work on: ten leaves of shape [4, 3], flat and nested, and plain dicts."""

    def __init__(self) -> None:
        self.d = leaves()
        self.keys, self.xs = list(self.d), list(self.d.values())
        self.other = {k: v + 1 for k, v in self.d.items()}
        self.ys = list(self.other.values())
        self.td = TensorDict(dict(self.d), batch_size=[4])
        self.td2 = TensorDict(dict(self.other), batch_size=[4])
        self.tree = TensorDict(nested(self.d), batch_size=[4])
        self.square = TensorDict(leaves(shape=(4, 4, 3)), batch_size=[4, 4])
        self.sq = dict(self.square.items())
        self.rows = torch.tensor([0, 2, 3])
        self.mask = torch.tensor([True, False, True, True])
        self.big = TensorDict(leaves(shape=(64, 1024)), batch_size=[64])
        self.bigd = dict(self.big.items())
        self.bigs = list(self.bigd.values())
        self.list = [TensorDict(leaves(), batch_size=[4]) for _ in range(8)]
        self.dicts = [dict(td.items()) for td in self.list]
        self.floats = TensorDict({f"k{i}": torch.rand(4) for i in range(10)}, batch_size=[4])

    def each(self, fn: Callable[[torch.Tensor], Any]) -> Call:
        d = self.d
        return lambda: {k: fn(v) for k, v in d.items()}

    def whole(self, fn: Callable[..., Any], *args: Any) -> Call:
        keys, xs = self.keys, self.xs
        return lambda: dict(zip(keys, fn(xs, *args)))


def construction(s: Data) -> list[Row]:
    d, deep, td = s.d, nested(s.d), s.td
    return [
        Row("construct 10", lambda: TensorDict(d, batch_size=[4]), lambda: dict(d)),
        Row("construct nested", lambda: TensorDict(deep, batch_size=[4]), lambda: nested(d)),
        Row("construct keywords", lambda: TensorDict(**d), lambda: dict(**d)),
        Row("from_dict", lambda: TensorDict.from_dict(deep, batch_size=[4]), lambda: nested(d)),
        Row("to_dict", lambda: s.tree.to_dict(), lambda: nested(d)),
        Row("empty", lambda: td.empty(), dict),
    ]


def access(s: Data) -> list[Row]:
    td, tree, d, deep = s.td, s.tree, s.d, nested(s.d)
    x = d["k0"]
    mine, plain, flat_td, flat = td.copy(), dict(d), s.tree.flatten_keys("."), dict(d)
    names = list(flat_td.keys())
    return [
        Row("td[key]", lambda: td["k3"], lambda: d["k3"]),
        Row("td[nested key]", lambda: tree["b", "c", "k5"], lambda: deep["b"]["c"]["k5"]),
        Row("get", lambda: td.get("k3"), lambda: d.get("k3")),
        Row("get missing", lambda: td.get("z", None), lambda: d.get("z", None)),
        Row("get nested", lambda: tree.get(("a", "k1")), lambda: deep["a"].get("k1")),
        Row("set", lambda: mine.set("k0", x), lambda: plain.__setitem__("k0", x)),
        Row("td[key] = x", lambda: mine.__setitem__("k0", x), lambda: plain.__setitem__("k0", x)),
        Row("set nested", lambda: tree.set(("a", "k1"), x), lambda: deep["a"].update(k1=x)),
        Row("key in td", lambda: "k3" in td, lambda: "k3" in d),
        Row("list(keys)", lambda: list(td.keys()), lambda: list(d.keys())),
        Row("list(items)", lambda: list(td.items()), lambda: list(d.items())),
        Row("nested leaves", lambda: list(tree.items(True, True)), lambda: list(d.items())),
        Row("update", lambda: mine.update(d), lambda: plain.update(d)),
        Row("update nested", lambda: tree.update(deep), lambda: plain.update(d)),
        Row("select 5", lambda: td.select(*s.keys[:5]), lambda: {k: d[k] for k in s.keys[:5]}),
        Row("exclude 5", lambda: td.exclude(*s.keys[:5]), lambda: {k: d[k] for k in s.keys[5:]}),
        Row("flatten_keys", lambda: tree.flatten_keys("."), lambda: dict(zip(names, s.xs))),
        Row("unflatten_keys", lambda: flat_td.unflatten_keys("."), lambda: nested(flat)),
        Row("lock_ unlock_", lambda: mine.lock_().unlock_(), lambda: None),
    ]


def rows(s: Data) -> list[Row]:
    td, sq, r, m = s.td, s.square, s.rows, s.mask
    sqd = s.sq
    i, j = torch.tensor([0, 1, 2]), torch.tensor([1, 2, 3])
    mine, plain = td.clone(), {k: v.clone() for k, v in s.d.items()}
    row, part = td[0].clone(), td[1:3].clone()
    rowd, partd, picked = dict(row.items()), dict(part.items()), td[r].clone()
    pickedd = dict(picked.items())

    def write(index: Any, values: dict[str, torch.Tensor]) -> Call:
        def run() -> None:
            for k, v in plain.items():
                v[index] = values[k]

        return run

    def square(fn: Callable[[torch.Tensor], Any]) -> Call:
        return lambda: {k: fn(v) for k, v in sqd.items()}

    return [
        Row("td[0]", lambda: td[0], s.each(lambda x: x[0])),
        Row("td[1:3]", lambda: td[1:3], s.each(lambda x: x[1:3])),
        Row("td[::2]", lambda: td[::2], s.each(lambda x: x[::2])),
        Row("td[None]", lambda: td[None], s.each(lambda x: x[None])),
        Row("td[:, 0]", lambda: sq[:, 0], square(lambda x: x[:, 0])),
        Row("td[list]", lambda: td[[0, 2, 3]], s.each(lambda x: x.index_select(0, r))),
        Row("td[tensor]", lambda: td[r], s.each(lambda x: x.index_select(0, r))),
        Row("td[mask]", lambda: td[m], s.each(lambda x: x[m])),
        Row("td[i, j]", lambda: sq[i, j], square(lambda x: x[i, j])),
        Row("td[0] = td", lambda: mine.__setitem__(0, row), write(0, rowd)),
        Row(
            "td[1:3] = td",
            lambda: mine.__setitem__(slice(1, 3), part),
            write(slice(1, 3), partd),
        ),
        Row("td[tensor] = td", lambda: mine.__setitem__(r, picked), write(r, pickedd)),
        Row("td[mask] = td", lambda: mine.__setitem__(m, picked), write(m, pickedd)),
        Row("set_", lambda: mine.set_("k0", s.xs[0]), lambda: plain["k0"].copy_(s.xs[0])),
        Row(
            "update_",
            lambda: mine.update_(td),
            lambda: torch._foreach_copy_(list(plain.values()), s.xs),
        ),
        Row(
            "iterate",
            lambda: list(td),
            lambda: [{k: v[n] for k, v in s.d.items()} for n in range(4)],
        ),
        Row("gather", lambda: td.gather(0, r), s.each(lambda x: x.index_select(0, r))),
        Row("masked_select", lambda: td.masked_select(m), s.each(lambda x: x[m])),
    ]


def shapes(s: Data) -> list[Row]:
    td, sq, d = s.td, s.square, s.sq
    one = td.unsqueeze(0)
    oned = dict(one.items())

    def square(fn: Callable[[torch.Tensor], Any]) -> Call:
        return lambda: {k: fn(v) for k, v in d.items()}

    def pieces(fn: Callable[[torch.Tensor], Any]) -> Call:
        def run() -> Any:
            cut = [fn(x) for x in s.xs]
            return [dict(zip(s.keys, part)) for part in zip(*cut)]

        return run

    lists, dicts = s.list, s.dicts
    return [
        Row("view", lambda: sq.view(16), square(lambda x: x.view(16, 3))),
        Row("reshape", lambda: sq.reshape(2, 8), square(lambda x: x.reshape(2, 8, 3))),
        Row("flatten", lambda: sq.flatten(0, 1), square(lambda x: x.flatten(0, 1))),
        Row("unflatten", lambda: td.unflatten(0, (2, 2)), s.each(lambda x: x.unflatten(0, (2, 2)))),
        Row("squeeze", lambda: one.squeeze(0), lambda: {k: v.squeeze(0) for k, v in oned.items()}),
        Row("unsqueeze", lambda: td.unsqueeze(0), s.each(lambda x: x.unsqueeze(0))),
        Row("permute", lambda: sq.permute(1, 0), square(lambda x: x.permute(1, 0, 2))),
        Row("transpose", lambda: sq.transpose(0, 1), square(lambda x: x.transpose(0, 1))),
        Row("expand", lambda: td.expand(5, 4), s.each(lambda x: x.expand(5, 4, 3))),
        Row("repeat", lambda: td.repeat(2), s.each(lambda x: x.repeat(2, 1))),
        Row("roll", lambda: td.roll(1, 0), s.each(lambda x: x.roll(1, 0))),
        Row("flip", lambda: td.flip(0), s.each(lambda x: x.flip(0))),
        Row(
            "stack 8",
            lambda: torch.stack(lists),
            lambda: {k: torch.stack([x[k] for x in dicts]) for k in s.keys},
        ),
        Row(
            "cat 8",
            lambda: torch.cat(lists),
            lambda: {k: torch.cat([x[k] for x in dicts]) for k in s.keys},
        ),
        Row("unbind", lambda: td.unbind(0), pieces(lambda x: x.unbind(0))),
        Row("split", lambda: td.split(2), pieces(lambda x: x.split(2))),
        Row("chunk", lambda: td.chunk(2), pieces(lambda x: x.chunk(2))),
    ]


def arithmetic(s: Data) -> list[Row]:
    td, td2, xs, ys = s.td, s.td2, s.xs, s.ys
    mine, tensor = td.clone(), torch.rand(4)
    zs = list(mine.values())
    column = tensor[:, None]

    def iadd() -> Any:
        out = mine
        out += 1
        return out

    return [
        Row("td * 2", lambda: td * 2, s.whole(torch._foreach_mul, 2)),
        Row("nested * 2", lambda: s.tree * 2, s.whole(torch._foreach_mul, 2)),
        Row("td + td", lambda: td + td2, s.whole(torch._foreach_add, ys)),
        Row("1 - td", lambda: 1 - td, s.each(lambda x: 1 - x)),
        Row("td * tensor", lambda: td * tensor, s.whole(torch._foreach_mul, [column] * 10)),
        Row("td ** 2", lambda: td**2, s.whole(torch._foreach_pow, 2)),
        Row("add_ td", lambda: mine.add_(td2), lambda: torch._foreach_add_(zs, ys)),
        Row("mul_ number", lambda: mine.mul_(1.0), lambda: torch._foreach_mul_(zs, 1.0)),
        Row("td += 1", iadd, lambda: torch._foreach_add_(zs, 1)),
        Row("zero_", lambda: mine.zero_(), lambda: torch._foreach_zero_(zs)),
        Row("exp", lambda: td.exp(), s.whole(torch._foreach_exp)),
        Row("abs", lambda: td.abs(), s.whole(torch._foreach_abs)),
        Row("isnan", lambda: td.isnan(), s.each(torch.isnan)),
        Row("clamp", lambda: td.clamp(0, 1), s.each(lambda x: torch.clamp(x, 0, 1))),
        Row("lerp", lambda: td.lerp(td2, 0.5), s.whole(torch._foreach_lerp, ys, 0.5)),
        Row("addcmul", lambda: td.addcmul(td2, td2), s.whole(torch._foreach_addcmul, ys, ys)),
        Row("td == td", lambda: td == td2, lambda: {k: x == y for k, x, y in zip(s.keys, xs, ys)}),
        Row("td < 1", lambda: td < 1, s.each(lambda x: x < 1)),
        Row(
            "(td == td).all()",
            lambda: (td == td).all(),
            lambda: all(bool((x == x).all()) for x in xs),
        ),
        Row("sum(0)", lambda: td.sum(0), s.each(lambda x: x.sum(0))),
        Row("sum()", lambda: td.sum(), s.each(lambda x: x.sum())),
        Row("mean(reduce)", lambda: td.mean(reduce=True), lambda: torch.cat(xs).mean()),
        Row("max(0)", lambda: td.max(0), s.each(lambda x: x.max(0))),
        Row("norm", lambda: td.norm(), s.whole(torch._foreach_norm)),
        Row("softmax", lambda: td.softmax(0), s.each(lambda x: x.softmax(0))),
    ]


def functions(s: Data) -> list[Row]:
    td, td2, d = s.td, s.td2, s.d
    mine = td.clone()
    zs = list(mine.values())
    add = lambda x: x + 1  # noqa: E731
    both = lambda x, y: x + y  # noqa: E731
    double = lambda x: x * 2  # noqa: E731
    each_double = lambda xs: {k: x * 2 for k, x in xs.items()}  # noqa: E731
    floats = dict(s.floats.items())

    def cut() -> Any:
        return [dict(zip(floats, row)) for row in zip(*[x.unbind(0) for x in floats.values()])]

    return [
        Row("apply", lambda: td.apply(add), s.each(add)),
        Row("apply nested", lambda: s.tree.apply(add), s.each(add)),
        Row(
            "apply td",
            lambda: td.apply(both, td2),
            lambda: {k: v + s.other[k] for k, v in d.items()},
        ),
        Row("apply_", lambda: mine.apply_(lambda x: x.add_(1)), lambda: [x.add_(1) for x in zs]),
        Row(
            "named_apply",
            lambda: td.named_apply(lambda k, x: x + len(k)),
            lambda: {k: v + len(k) for k, v in d.items()},
        ),
        Row("clone", lambda: td.clone(), s.whole(torch._foreach_clone)),
        Row("copy", lambda: td.copy(), lambda: dict(d)),
        Row("copy_", lambda: mine.copy_(td2), lambda: torch._foreach_copy_(zs, s.ys)),
        Row("detach", lambda: td.detach(), s.each(torch.detach)),
        Row("to(float64)", lambda: td.to(torch.float64), s.each(lambda x: x.to(torch.float64))),
        Row("vmap", lambda: torch.vmap(double)(td), lambda: torch.vmap(each_double)(d)),
        Row("tolist", lambda: s.floats.tolist(), cut),
    ]


def large(s: Data) -> list[Row]:
    big, d, xs, r = s.big, s.bigd, s.bigs, torch.arange(0, 64, 2)
    keys = s.keys

    def whole(fn: Callable[..., Any], *args: Any) -> Call:
        return lambda: dict(zip(keys, fn(xs, *args)))

    return [
        Row("large td * 2", lambda: big * 2, whole(torch._foreach_mul, 2), kernel=True),
        Row("large td + td", lambda: big + big, whole(torch._foreach_add, xs), kernel=True),
        Row("large exp", lambda: big.exp(), whole(torch._foreach_exp), kernel=True),
        Row(
            "large sum(0)",
            lambda: big.sum(0),
            lambda: {k: v.sum(0) for k, v in d.items()},
            kernel=True,
        ),
        Row(
            "large stack 4",
            lambda: torch.stack([big, big, big, big]),
            lambda: {k: torch.stack([v, v, v, v]) for k, v in d.items()},
            kernel=True,
        ),
        Row(
            "large cat 4",
            lambda: torch.cat([big, big, big, big]),
            lambda: {k: torch.cat([v, v, v, v]) for k, v in d.items()},
            kernel=True,
        ),
        Row("large clone", lambda: big.clone(), whole(torch._foreach_clone), kernel=True),
        Row(
            "large td[tensor]",
            lambda: big[r],
            lambda: {k: v.index_select(0, r) for k, v in d.items()},
            kernel=True,
        ),
    ]


def table() -> list[Row]:
    s = Data()
    groups = (construction, access, rows, shapes, arithmetic, functions, large)
    return [row for group in groups for row in group(s)]


# --- measuring -----------------------------------------------------------------------------


def seconds(fn: Call, n: int) -> float:
    """The time of one call, from ``n`` of them; caches are warm, whoever ran before."""
    fn()
    start = time.perf_counter()
    for _ in range(n):
        fn()
    return (time.perf_counter() - start) / n


def loops(fn: Call) -> int:
    """How many calls make a sample; 0 when the call fails."""
    try:
        fn()
        once = min(seconds(fn, 1) for _ in range(5))
    except Exception:
        return 0
    return max(1, min(1000, int(SAMPLE_S / once)))


def serve() -> None:
    """Time rows for another process: a line with a row's number in, a line with seconds out."""
    calls = [row.ours for row in table()]
    counts: dict[int, int] = {}
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        k = int(line)
        if k not in counts:
            counts[k] = loops(calls[k])
        print(json.dumps(seconds(calls[k], counts[k]) if counts[k] else None), flush=True)


class Peer:
    """The same rows in another interpreter."""

    def __init__(self, python: str, with_gc: bool) -> None:
        env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        command = [python, "-W", "ignore", os.path.abspath(__file__), "--serve"]
        self.process = subprocess.Popen(
            command + ["--gc"] * with_gc,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
        )
        self.read()

    def read(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def time(self, k: int) -> float | None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{k}\n")
        self.process.stdin.flush()
        return self.read()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)


def measure(
    chosen: list[tuple[int, Row]], peer: Peer | None, rounds: int
) -> dict[str, dict[str, Any]]:
    """Minima in microseconds, by row and side."""
    counts = {k: (loops(row.ours), loops(row.plain)) for k, row in chosen}
    best: dict[str, dict[str, Any]] = {
        row.name: {"ours": math.inf, "plain": math.inf, "peer": math.inf, "kernel": row.kernel}
        for _, row in chosen
    }
    for turn in range(rounds):
        for k, row in chosen:
            n, m = counts[k]
            found = best[row.name]
            sides = [("ours", row.ours, n), ("plain", row.plain, m)]
            # Who comes first finds the caches as the peer left them.
            for side, fn, calls in sides if turn % 2 else reversed(sides):
                if calls:
                    found[side] = min(found[side], seconds(fn, calls) * 1e6)
            theirs = peer.time(k) if peer is not None else None
            if theirs is not None:
                found["peer"] = min(found["peer"], theirs * 1e6)
    return best


def report(best: dict[str, dict[str, Any]], with_peer: bool) -> None:
    head = f"{'row':20s} {'ours':>9s} {'plain':>9s} {'/ plain':>8s}"
    print(head + (f" {'peer':>9s} {'peer / ours':>12s}" if with_peer else "") + "   (microseconds)")
    slow, over, gains = [], [], []
    for name, r in best.items():
        ratio = r["ours"] / r["plain"]
        mark = "*" if r["kernel"] else " "
        line = f"{name:19s}{mark} {r['ours']:9.2f} {r['plain']:9.2f} {ratio:8.2f}"
        if r["kernel"] and ratio > KERNEL_BAR * NOISE:
            over.append(name)
        if math.isfinite(r["peer"]):
            gain = r["peer"] / r["ours"]
            gains.append(gain)
            line += f" {r['peer']:9.2f} {gain:12.2f}"
            if gain * NOISE < 1:
                slow.append(name)
        print(line)
    if gains:
        mean = math.exp(sum(map(math.log, gains)) / len(gains))
        print(f"geometric mean of peer / ours over {len(gains)} rows: {mean:.2f} (bar {MEAN_BAR})")
        print(f"rows slower than the peer: {', '.join(slow) or 'none'}")
    print(f"kernel rows over {KERNEL_BAR} x plain: {', '.join(over) or 'none'}")


def quiet() -> None:
    """One thread, no collector, and the same kind of pages for every large allocation."""
    # Read by the allocator when the process starts.
    limits = {"MALLOC_MMAP_THRESHOLD_": "1073741824", "MALLOC_TRIM_THRESHOLD_": "1073741824"}
    if not limits.keys() <= os.environ.keys():
        os.environ.update(limits)
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    torch.set_num_threads(1)
    gc.collect()
    gc.disable()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", metavar="PYTHON", help="interpreter with another tensordict")
    parser.add_argument("--rows", nargs="*", default=[], help="only rows with one of these words")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--gc", action="store_true", help="leave the garbage collector on")
    parser.add_argument("--json", action="store_true", help="print the minima as JSON")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    quiet()
    if args.serve:
        serve()
        return
    chosen = [
        (k, row)
        for k, row in enumerate(table())
        if not args.rows or any(word in row.name for word in args.rows)
    ]
    if args.gc:
        gc.enable()
    peer = Peer(args.peer, args.gc) if args.peer else None
    best = measure(chosen, peer, args.rounds)
    if peer is not None:
        peer.close()
    if args.json:
        print(json.dumps(best, indent=1))
    else:
        report(best, peer is not None)


if __name__ == "__main__":
    main()
