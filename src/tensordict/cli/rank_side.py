"""What each rank of the demo does."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._keys import dotted
from ..core.traverse import leaves, leaves_with_path
from ..distributed import recv, send
from ..errors import PlanMismatch
from ..placement import CastPolicy, plan_moves
from . import source
from .progress import ReportingTransport

ROUNDS = 5
_ACK_NBYTES = 64


@dataclass(frozen=True, slots=True)
class RankReport:
    """What a rank measured and found.

    Attributes:
        convert_s: seconds that the conversion took.
        first_s, best_s: seconds from the call of send until the receiver said it has
            everything: the first time, and the best of the rounds (at the sender).
        flat_s: the same, best, for one tensor of as many bytes.
        equal: leaves that arrived with exactly the bits of the converted leaf (at the receiver).
        different: dotted names of those that did not.
    """

    convert_s: float
    first_s: float = 0.0
    best_s: float = 0.0
    flat_s: float = 0.0
    equal: int = 0
    different: tuple[str, ...] = ()


def exchange(
    rank: int, emit: Callable[[int], None], path: Path | None, policy: Any, plan_hash: str
) -> RankReport:
    """Convert the weights, send them from rank 0 to rank 1, and compare there.

    Args:
        rank: 0 sends, 1 receives.
        emit: told the bytes of each message that rank 1 received.
        path: the weights; None for the small model.
        policy: JSON of the policy.
        plan_hash: of the plan that was printed; each rank makes the same one of the file.
    """
    td = source.load(path)
    plan = plan_moves(td, policy=CastPolicy.from_json(policy))
    if plan.hash != plan_hash:
        raise PlanMismatch("the file changed after the plan was made. Run the demo again.")
    start = time.perf_counter()
    converted = plan.run(td)
    convert_s = time.perf_counter() - start
    total = sum(x.nbytes for x in leaves(converted))
    dist.barrier()
    return (
        _sender(converted, total, convert_s)
        if rank == 0
        else _receiver(converted, total, convert_s, emit)
    )


def _sender(td: Any, total: int, convert_s: float) -> RankReport:
    flat = torch.zeros(total, dtype=torch.uint8)
    first_s = _timed(lambda: send(td, 1))
    best_s, flat_s = float("inf"), float("inf")
    for _ in range(ROUNDS):  # in turn, so that both see the same machine
        flat_s = min(flat_s, _timed(lambda: dist.send(flat, 1)))
        best_s = min(best_s, _timed(lambda: send(td, 1)))
    return RankReport(convert_s, first_s, best_s, flat_s)


def _timed(transfer: Callable[[], None]) -> float:
    ack = torch.empty(_ACK_NBYTES, dtype=torch.uint8)
    dist.barrier()
    start = time.perf_counter()
    transfer()
    dist.recv(ack, 1)
    return time.perf_counter() - start


def _receiver(
    expected: Any, total: int, convert_s: float, emit: Callable[[int], None]
) -> RankReport:
    got = _acked(lambda: recv(0, transport=ReportingTransport(emit)))
    for _ in range(ROUNDS):
        _acked(lambda: dist.recv(torch.empty(total, dtype=torch.uint8), 0))
        got = _acked(lambda: recv(0))
    found = dict(leaves_with_path(got))
    different = [
        dotted(p) for p, x in leaves_with_path(expected) if not same_bits(x, found.pop(p, None))
    ]
    equal = len(leaves(expected)) - len(different)
    return RankReport(convert_s, equal=equal, different=(*different, *map(dotted, found)))


def _acked(receive: Callable[[], Any]) -> Any:
    dist.barrier()
    out = receive()
    dist.send(torch.empty(_ACK_NBYTES, dtype=torch.uint8), 0)
    return out


def same_bits(a: Tensor, b: Tensor | None) -> bool:
    """Whether two tensors have one dtype, one shape and the same bits (NaN or not).

    >>> same_bits(torch.tensor(float("nan")), torch.tensor(float("nan")))
    True
    >>> same_bits(torch.tensor(0.0), torch.tensor(-0.0)), same_bits(torch.zeros(1), None)
    (False, False)
    """
    if b is None or a.dtype is not b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
