"""``tensordict demo``: plan, convert and exchange a real model, and check every bit of it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..errors import TensorDictError
from ..placement import CastPolicy, plan_moves
from ..placement.names import size_text
from ..storage.named import named_tensors, tree_of
from ..storage.weight_files import read_weights
from . import publish, rank_side, source
from .plan import plan_of
from .progress import ProgressBar
from .rank_side import RankReport
from .ranks import run_ranks


def add_command(commands: Any) -> None:
    """Add ``demo`` to the command line."""
    p = commands.add_parser(
        "demo",
        help="convert a model to mixed precision and send it to another process",
        description="Plan a mixed-precision conversion (bf16; norms, embeddings and biases stay "
        "fp32), run it, send the result to a second process and compare every bit.",
    )
    p.add_argument(
        "file",
        nargs="?",
        metavar="FILE.safetensors",
        help="by default the model of the extra 'demo' if it is installed, else a small one",
    )
    p.add_argument("--port", type=int, default=0, help="where the ranks meet (default: a free one)")
    p.add_argument("--timeout", type=float, default=120.0, help="seconds for the exchange")
    p.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the demo; 0 when every leaf arrived bit-equal."""
    path = Path(args.file) if args.file is not None else source.installed_model()
    policy = CastPolicy.mixed()
    if path is None:
        print("The model of the extra 'demo' is not installed: using a small one made here.")
        plan = plan_moves(tree_of(source.small_transformer()), policy=policy)
    else:
        plan = plan_of(read_weights(path), policy)
        print(path)
    print(plan.table())
    print(plan.summary())
    if not len(plan):
        raise TensorDictError(f"{path}: there are no tensors to send")

    total = plan.nbytes(after=True)
    with ProgressBar("rank 0 -> rank 1", total) as bar:
        sender, receiver = run_ranks(
            rank_side.exchange,
            2,
            (path, policy.to_json(), plan.hash),
            port=args.port,
            timeout=args.timeout,
            on_event=lambda rank, nbytes: bar.add(nbytes),
        )
    report(len(plan), total, sender, receiver)
    publish_weights(path, args)
    ratio = sender.best_s / sender.flat_s
    print(
        f"{receiver.equal} of {len(plan)} leaves bit-equal on rank 1: {size_text(total)} in "
        f"{sender.best_s * 1e3:.1f} ms, {ratio:.2f}x one flat send"
    )
    return 0


def publish_weights(path: Path | None, args: argparse.Namespace) -> None:
    """The second half: from shards of two trainers to those of two servers."""
    print("\nRow shards on ranks 0 and 1 become bfloat16 tensor-parallel ones on ranks 2 and 3:")
    plan = publish.plan_publication(named_tensors(source.load(path)))
    publish.show_plan(plan)
    results = run_ranks(
        publish.rank_main, 4, (path, plan.hash), port=args.port, timeout=args.timeout
    )
    publish.report(plan, results)


def report(leaves: int, total: int, sender: RankReport, receiver: RankReport) -> None:
    """Print the figures of the exchange.

    Raises:
        TensorDictError: when a leaf arrived with other bits.
    """
    print(f"converted in {sender.convert_s * 1e3:.1f} ms")
    print(
        f"sent {size_text(total)}: first {sender.first_s * 1e3:.1f} ms, "
        f"best of {rank_side.ROUNDS} {sender.best_s * 1e3:.1f} ms; "
        f"one flat send of as many bytes {sender.flat_s * 1e3:.1f} ms"
    )
    if receiver.different:
        names = ", ".join(receiver.different[:5])
        n = len(receiver.different)
        raise TensorDictError(f"{n} of {leaves} leaves arrived with other bits: {names}")
