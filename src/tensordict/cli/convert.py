"""``tensordict convert``: weights from file to file, in another dtype."""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import psutil
import torch

from .._keys import dotted
from ..errors import CastError, LossyCast, TensorDictError, table_of
from ..placement import MovePlan
from ..placement.casts import CastCounts
from ..storage.weight_files import WeightFiles, read_weights
from .converting import Conversion, convert, finish, piece_nbytes
from .plan import add_policy_arguments, plan_of, policy_of
from .progress import ProgressBar

_UNITS = {"": 1, "k": 10, "m": 20, "g": 30, "t": 40}


def add_command(commands: Any) -> None:
    """Add ``convert`` to the command line."""
    p = commands.add_parser(
        "convert",
        help="convert a safetensors file or a sharded set to another dtype",
        description="Convert a safetensors file, or a folder with a sharded set and its index, "
        "a piece at a time. The destination appears when it is complete; an interrupted run is "
        "taken up by the same command.",
    )
    p.add_argument("source", metavar="SRC", help="a file, an index, or a folder of either")
    p.add_argument("target", metavar="DST", help="the file, or the folder for a set")
    add_policy_arguments(p)
    p.add_argument(
        "--on-lossy",
        choices=("error", "warn", "allow"),
        default="warn",
        help="what to do about leaves whose values leave the range of the dtype (default: warn)",
    )
    p.add_argument(
        "--max-memory",
        default="1GiB",
        metavar="SIZE",
        help="resident memory of the whole program, as 512MiB (default: 1GiB)",
    )
    p.add_argument("--overwrite", action="store_true", help="replace DST if it exists")
    p.add_argument("--dry-run", action="store_true", help="print the plan and stop")
    p.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Convert."""
    policy = policy_of(args.dtype, args.keep)
    limit = parse_size(args.max_memory)
    weights = read_weights(args.source)
    plan = plan_of(weights, policy)
    if args.dry_run:
        print(plan.table())
        print(plan.summary())
        return 0
    job = job_of(weights, plan, Path(args.target), args, limit)
    total = plan.nbytes(after=False)
    with ProgressBar("convert", total) as bar:
        lost = convert(job, bar.add)
    if lost:
        print(lossy_report(lost), file=sys.stderr)
        if args.on_lossy == "error":
            shutil.rmtree(job.folder)
            raise LossyCast(f"{job.target} was not written: {len(lost)} tensors lose values")
    finish(job, policy.default)
    print(f"{job.target}: {plan.summary()}")
    return 0


def job_of(
    weights: WeightFiles, plan: MovePlan, target: Path, args: argparse.Namespace, limit: int
) -> Conversion:
    """The conversion that the arguments ask for.

    Raises:
        TensorDictError: when the destination is there or cannot be, or the memory is too little.
        CastError: for a cast that torch does not have.
    """
    if target.exists() and not args.overwrite:
        raise TensorDictError(f"{target}: exists. Pass --overwrite to replace it.")
    if target.exists() and target.is_dir() != (weights.index is not None):
        kind = "a folder" if target.is_dir() else "a file"
        raise TensorDictError(f"{target}: is {kind}, and the source is not")
    if not target.absolute().parent.is_dir():
        raise TensorDictError(f"{target}: there is no folder {target.absolute().parent}")
    names = [e.name for e in weights.entries()]
    found = {dotted(path): route.dtype for path, route in zip(plan.paths, plan.routes)}
    dtypes = {name: found[name] for name in names}
    for entry in weights.entries():
        _check_cast(entry.dtype, dtypes[entry.name])
    return Conversion(
        weights,
        dtypes,
        target,
        measure=args.on_lossy != "allow",
        piece_nbytes=piece_nbytes(limit - psutil.Process().memory_info().rss),
        key=_key_of(weights, plan, args.on_lossy),
    )


def _check_cast(src: torch.dtype, dst: torch.dtype) -> None:
    if src is dst:
        return
    try:
        torch.zeros(0, dtype=src).to(dst)
        torch.empty(1, dtype=dst).copy_(torch.empty(1, dtype=src))
    except RuntimeError:
        raise CastError(f"torch has no cast from {src} to {dst}. Keep those tensors.") from None


def _key_of(weights: WeightFiles, plan: MovePlan, on_lossy: str) -> str:
    """Equal for runs whose unfinished output can be used."""
    facts: list[Any] = [plan.hash, on_lossy]
    for header in weights.headers.values():
        stat = header.path.stat()
        facts.append([str(header.path.absolute()), stat.st_size, stat.st_mtime_ns])
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()


def lossy_report(lost: dict[str, CastCounts]) -> str:
    """A headline and one line per tensor that lost values."""
    rows = [(name, counts.describe()) for name, counts in sorted(lost.items())]
    return table_of(f"{len(rows)} tensors lose values:", rows, limit=len(rows))


def parse_size(text: str) -> int:
    """The bytes of a size with a unit (k, M, G, T, with or without ``iB``; powers of two).

    Raises:
        CastError: for anything else.

    >>> parse_size("256MiB"), parse_size("1g"), parse_size("4096")
    (268435456, 1073741824, 4096)
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?\s*", text.lower())
    if found is None:
        raise CastError(f"Cannot use {text!r} as a size. Expected a number and a unit, as 512MiB.")
    return int(float(found[1]) * (1 << _UNITS[found[2]] if found[2] else 1))
