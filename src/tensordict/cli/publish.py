"""The second half of the demo: row shards on two ranks become tensor-parallel ones on two others."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..distributed.exchange import reshard
from ..distributed.golden import shard
from ..errors import PlanMismatch, TensorDictError
from ..placement import Layout, Placement, ReshardPlan, plan_reshard
from ..placement.names import size_text
from ..storage.named import named_tensors
from . import source
from .rank_side import same_bits

TRAINERS, SERVERS = (0, 1), (2, 3)
ROUNDS = 3
_ROWS_SHOWN = 12


@dataclass(frozen=True, slots=True)
class Published:
    """What a rank measured and found.

    Attributes:
        first_s, best_s: seconds until all ranks were through: the first time, and the best.
        equal: tensors that have exactly the bits of the slice of the converted whole.
        different: names of those that have not.
    """

    first_s: float
    best_s: float
    equal: int = 0
    different: tuple[str, ...] = ()


def plan_publication(tensors: dict[str, Tensor]) -> ReshardPlan:
    """Rows over two trainers in the dtype of the file, to bfloat16 over two servers.

    Tall weights are split by rows there, wide ones by columns, and vectors are on both.

    >>> plan = plan_publication({"w": torch.zeros(4, 2), "b": torch.zeros(4)})
    >>> plan.total_bytes, plan.gathered_bytes
    (32, 48)
    """
    src, dst = {}, {}
    for name, x in tensors.items():
        rows = [Placement("shard", 0) if x.dim() else Placement("replicate")]
        src[name] = Layout.from_placements(x.shape, [2], rows, ranks=TRAINERS, dtype=x.dtype)
        split = Placement("replicate")
        if x.dim() > 1:
            split = Placement("shard", 0 if x.shape[0] >= x.shape[1] else 1)
        dst[name] = Layout.from_placements(x.shape, [2], [split], ranks=SERVERS)
    return plan_reshard(src, dst, dtype=torch.bfloat16)


def rank_main(
    rank: int, emit: Callable[[Any], None], path: Path | None, plan_hash: str
) -> Published:
    """Publish from the trainers to the servers, and compare there.

    Args:
        rank: 0 and 1 train, 2 and 3 serve.
        emit: not used.
        path: the weights; None for the small model.
        plan_hash: of the plan that was printed; each rank makes the same one of the file.
    """
    tensors = named_tensors(source.load(path))
    plan = plan_publication(tensors)
    if plan.hash != plan_hash:
        raise PlanMismatch("the file changed after the plan was made. Run the demo again.")
    side = plan.src if rank in TRAINERS else plan.dst
    mine = {name: shard(layout, tensors[name])[rank] for name, layout in side.items()}
    times = []
    got: Any = None
    for _ in range(1 + ROUNDS):
        dist.barrier()
        start = time.perf_counter()
        got = reshard(mine if rank in TRAINERS else None, plan).wait()
        times.append(time.perf_counter() - start)
    if rank in TRAINERS:
        return Published(times[0], min(times))
    found = named_tensors(got)
    expected = {name: x.to(plan.dst[name].dtype) for name, x in mine.items()}
    different = [name for name, x in expected.items() if not same_bits(x, found.get(name))]
    return Published(times[0], min(times), len(expected) - len(different), tuple(different))


def show_plan(plan: ReshardPlan) -> None:
    """Print the plan, and what it saves against gathering."""
    print(plan.table(_ROWS_SHOWN))
    print(plan.summary())
    saved = plan.gathered_bytes - plan.total_bytes
    print(f"saved against gathering whole tensors: {size_text(saved)}")


def report(plan: ReshardPlan, results: list[Published]) -> None:
    """Print the figures and the verdict.

    Raises:
        TensorDictError: when some tensor has other bits.
    """
    for rank in SERVERS:
        different = results[rank].different
        if different:
            names = ", ".join(different[:5])
            raise TensorDictError(f"{len(different)} tensors on rank {rank} differ: {names}")
    first, best = (max(getattr(r, which) for r in results) for which in ("first_s", "best_s"))
    print(
        f"{results[SERVERS[0]].equal} tensors bit-equal to slices of the whole on ranks 2 and 3: "
        f"{size_text(plan.total_bytes)} in {best * 1e3:.1f} ms (first {first * 1e3:.1f} ms)"
    )
