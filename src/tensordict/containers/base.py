"""`TensorDictBase`: everything that every kind of tensordict can do."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

from ..core.undo import begin, leave
from ..data.methods import DataMethods
from ..distributed.methods import DistributedMethods
from ..modules.methods import ModuleMethods
from ..ops.apply import ApplyMethods
from ..ops.autograd import AutogradMethods
from ..ops.compare import CompareMethods
from ..ops.convert_methods import ConversionMethods
from ..ops.dispatch import DispatchMethods
from ..ops.display import DisplayMethods
from ..ops.mapping import MappingMethods
from ..ops.metadata import MetadataMethods
from ..ops.pointwise import PointwiseMethods
from ..ops.reductions import ReductionMethods
from ..ops.shape_methods import ShapeMethods
from ..placement.methods import PlacementMethods
from ..storage.methods import StorageMethods

if TYPE_CHECKING:
    from typing_extensions import Self


class NodeMethods(
    MappingMethods,
    MetadataMethods,
    ShapeMethods,
    ApplyMethods,
    PointwiseMethods,
    CompareMethods,
    ReductionMethods,
    AutogradMethods,
    ConversionMethods,
    DisplayMethods,
    ModuleMethods,
    DispatchMethods,
    StorageMethods,
    DistributedMethods,
    PlacementMethods,
    DataMethods,
):
    """What tensordicts and typed views of them can do: each concern is a mixin."""

    __slots__ = ()

    def __enter__(self) -> Self:
        begin(self)
        return self

    def __exit__(self, kind: Any, value: Any, traceback: Any) -> None:
        leave(self, failed=kind is not None)


# What tensordicts and tensorclasses have in common, by its public name.
TensorCollection = NodeMethods


class TensorDictBase(NodeMethods):
    """Abstract base of the dict-like classes, which implement the primitives."""

    __slots__ = ()


# Mappings by duty, not by inheritance: ABCMeta would slow every isinstance in a hot loop.
MutableMapping.register(TensorDictBase)  # type: ignore[type-abstract]
