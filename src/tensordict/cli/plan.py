"""``tensordict plan``: what a conversion would do, from the headers of files alone."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

import torch

from ..core.traverse import leaves_with_path
from ..errors import CastError, MissingKeyError
from ..placement import CastPolicy, MovePlan, parse_dtype, plan_moves
from ..placement.names import size_text
from ..placement.rules import RuleSet
from ..storage.named import tree_of
from ..storage.weight_files import WeightFiles, read_weights


def add_command(commands: Any) -> None:
    """Add ``plan`` to the command line."""
    p = commands.add_parser(
        "plan",
        help="show what a conversion would do, without reading the data",
        description="Read the header of a safetensors file and show which leaves a conversion "
        "would cast, move and keep. The data is not read.",
    )
    p.add_argument(
        "file",
        metavar="FILE.safetensors",
        help="or the index of a sharded set, or a folder of either",
    )
    add_policy_arguments(p)
    p.add_argument("--device", help="where the leaves would go, as cuda:0")
    p.add_argument("--json", action="store_true", help="print the whole plan as JSON")
    p.set_defaults(run=run)


def add_policy_arguments(p: argparse.ArgumentParser) -> None:
    """Add ``--dtype`` and ``--keep``."""
    p.add_argument("--dtype", help="dtype of the floating leaves, as bf16 or float16")
    p.add_argument(
        "--keep",
        action="extend",
        nargs="+",
        default=[],
        metavar="PATTERN=DTYPE",
        help="dtype of the leaves whose dotted name matches, as '*norm*=fp32'; the last match wins",
    )


def run(args: argparse.Namespace) -> int:
    """Print the plan."""
    policy = policy_of(args.dtype, args.keep)
    weights = read_weights(args.file)
    plan = plan_of(weights, policy, device_of(args.device))
    if args.json:
        print(json.dumps({"file": str(weights.path), "plan": plan.to_json()}))
        return 0
    print(f"{weights.path}: {len(plan)} tensors, {size_text(plan.nbytes(after=False))}")
    print(plan.table())
    print(plan.summary())
    return 0


def policy_of(dtype: str | None, keep: Sequence[str]) -> CastPolicy:
    """The policy of ``--dtype`` and ``--keep``.

    Raises:
        CastError: for a text that names no dtype, or is not ``PATTERN=DTYPE``.
    """
    rules: list[tuple[str, torch.dtype]] = []
    for text in keep:
        pattern, equals, name = text.rpartition("=")
        if not (equals and pattern):
            raise CastError(
                f"Cannot use --keep {text!r}: expected PATTERN=DTYPE, as '*norm*=fp32'."
            )
        rules.append((pattern, parse_dtype(name)))
    return CastPolicy(rules, default=None if dtype is None else parse_dtype(dtype))


def device_of(text: str | None) -> torch.device | None:
    """The device of ``--device``.

    Raises:
        CastError: for a text that names none.
    """
    if text is None:
        return None
    try:
        return torch.device(text)
    except RuntimeError:
        raise CastError(
            f"Cannot use {text!r} as a device: it names none. Use a torch name like cuda:0."
        ) from None


def plan_of(
    weights: WeightFiles, policy: CastPolicy, device: torch.device | None = None
) -> MovePlan:
    """The plan of a conversion, from headers alone.

    Raises:
        MissingKeyError: when a pattern matches no leaf; names each of them.
    """
    td = tree_of(weights.stand_ins())
    rules = RuleSet(policy.rules)
    paths = [path for path, _ in leaves_with_path(td)]
    for path in paths:
        rules.matching(path)
    unmatched = rules.unmatched(paths)
    if unmatched:
        raise MissingKeyError(f"{weights.path}: {'; '.join(map(str, unmatched))}")
    return plan_moves(td, device, policy=policy, on_unused="ignore")
