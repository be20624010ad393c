"""Where leaves are and of which dtype: plans, moves, mixed precision, layouts, resharding."""

from ..device.kinds import MoveKind, classify
from ..device.staging import StagingPool
from . import views
from .attrs import TensorAttrs
from .casts import Loss, can_lose, is_exact, measure_cast
from .layout import Box, Layout, Placement
from .models import follow, layouts_of, model_layouts, optimizer_tensors
from .names import parse_dtype
from .plan import MovePlan
from .planning import plan_moves
from .policy import CastPolicy
from .renames import strip_wrappers
from .reshard import Layouts, ReshardPlan, plan_reshard
from .reshard_options import ReshardOptions
from .routes import Move, Route
from .rules import Rule, Spec, Target
from .views import View

__all__ = [
    "View",
    "views",
    "strip_wrappers",
    "plan_reshard",
    "optimizer_tensors",
    "model_layouts",
    "layouts_of",
    "follow",
    "ReshardPlan",
    "ReshardOptions",
    "Layouts",
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
