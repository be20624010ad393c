"""Where leaves are and of which dtype: plans, moves, mixed precision, layouts, resharding."""

from ..device.kinds import MoveKind, classify
from ..device.staging import StagingPool
from . import views
from .attrs import TensorAttrs
from .budget import fit
from .casts import Loss, can_lose, is_exact, measure_cast
from .convert import ConversionReport, LeafLoss, convert
from .families import guess_family, policy_for
from .layout import Box, Layout, Placement
from .masters import Masters, convert_module
from .models import follow, layouts_of, model_layouts, optimizer_tensors
from .names import parse_dtype
from .pending import PendingMoves
from .plan import MovePlan
from .planning import plan_moves
from .policy import CastPolicy
from .renames import strip_wrappers
from .reshard import Layouts, ReshardPlan, plan_reshard
from .reshard_options import ReshardOptions
from .reshard_scales import ScaledPlan, plan_scaled_reshard
from .routes import Move, Route
from .rules import Rule, Spec, Target
from .specs import spec
from .views import View

__all__ = [
    "Box",
    "CastPolicy",
    "ConversionReport",
    "Layout",
    "Layouts",
    "LeafLoss",
    "Loss",
    "Masters",
    "Move",
    "MoveKind",
    "MovePlan",
    "PendingMoves",
    "Placement",
    "ReshardOptions",
    "ReshardPlan",
    "Route",
    "Rule",
    "ScaledPlan",
    "Spec",
    "StagingPool",
    "Target",
    "TensorAttrs",
    "View",
    "can_lose",
    "classify",
    "convert",
    "convert_module",
    "fit",
    "follow",
    "guess_family",
    "is_exact",
    "layouts_of",
    "measure_cast",
    "model_layouts",
    "optimizer_tensors",
    "parse_dtype",
    "plan_moves",
    "plan_reshard",
    "plan_scaled_reshard",
    "policy_for",
    "spec",
    "strip_wrappers",
    "views",
]
