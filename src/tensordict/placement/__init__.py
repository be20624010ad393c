"""Where leaves are and of which dtype: plans, moves, mixed precision."""

from ..device.kinds import MoveKind, classify
from ..device.staging import StagingPool
from .attrs import TensorAttrs
from .casts import Loss, can_lose, is_exact, measure_cast
from .layout import Box, Layout, Placement
from .names import parse_dtype
from .plan import MovePlan
from .planning import plan_moves
from .policy import CastPolicy
from .routes import Move, Route
from .rules import Rule, Spec, Target

__all__ = [
    "Box",
    "CastPolicy",
    "Layout",
    "Loss",
    "Move",
    "MoveKind",
    "MovePlan",
    "Placement",
    "Route",
    "Rule",
    "Spec",
    "StagingPool",
    "Target",
    "TensorAttrs",
    "can_lose",
    "classify",
    "is_exact",
    "measure_cast",
    "parse_dtype",
    "plan_moves",
]
