"""float32 masters beside a converted copy, and live modules converted in place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .._keys import dotted
from .._typing import Path
from ..core.traverse import leaves_with_path
from ..errors import StructureError
from .casts import measure_cast
from .convert import ConversionReport, LeafLoss, convert, judge
from .plan import MovePlan
from .policy import CastPolicy, PolicyMatcher
from .routes import make_route


class Masters:
    """A tree in full precision and its converted copy, paired by name.

    Args:
        td: The tree in full precision; it is kept, not copied.
        policy: What the working copy is converted by.

    Attributes:
        master: ``td``.
        working: The converted copy.  A leaf that the policy keeps is the same tensor in both.

    >>> from tensordict import TensorDict
    >>> pair = Masters(TensorDict({"w": torch.ones(2)}), CastPolicy.mixed())
    >>> pair.master["w"].add_(1e-3)
    tensor([1.0010, 1.0010])
    >>> pair.refresh().working["w"].dtype
    torch.bfloat16
    """

    __slots__ = ("master", "policy", "working")

    def __init__(self, td: Any, policy: CastPolicy | torch.dtype | str) -> None:
        self.master = td
        self.policy = CastPolicy.of(policy)
        self.working = convert(td, self.policy)

    def pairs(self) -> Iterator[tuple[Path, Tensor, Tensor]]:
        """Path, master leaf and working leaf, by name.

        Raises:
            StructureError: (a ``KeyError``) when the two no longer have the same keys.
        """
        working = dict(leaves_with_path(self.working))
        for path, master in leaves_with_path(self.master):
            if path not in working:
                raise StructureError(f"The working copy has no leaf {dotted(path)!r}.")
            yield path, master, working[path]

    def refresh(self) -> Masters:
        """Write the master values into the working copy, in place."""
        pairs = [(low, high) for _, high, low in self.pairs() if low is not high]
        if pairs:
            with torch.no_grad():
                torch._foreach_copy_([low for low, _ in pairs], [high for _, high in pairs])
        return self

    def take_gradients(self) -> Masters:
        """Add the gradients of working leaves to the masters', in the masters' dtype."""
        for _, high, low in self.pairs():
            if low is high or low.grad is None:
                continue
            grad = low.grad.to(high.dtype)
            high.grad = grad if high.grad is None else high.grad + grad
            low.grad = None
        return self


def convert_module(
    module: nn.Module,
    policy: CastPolicy | torch.dtype | str,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    report: bool = False,
) -> Any:
    """Convert a live module in place; parameters stay the same objects.

    Tied parameters stay tied; the first name decides their dtype.  Gradients and the optimiser's
    state (tensors of the shape of their parameter) follow.  Every check is done before the first
    cast.

    Args:
        module: Its parameters and buffers are cast, named by their dotted paths.
        policy: Which dtype for which, what to check and what to refuse.
        optimizer: Its state follows; it goes on working, since parameters stay the same objects.
        report: Return ``(module, ConversionReport)``.

    Raises:
        LossyCast: as of `convert`; nothing is changed.

    >>> net = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    >>> weight = net[0].weight
    >>> convert_module(net, CastPolicy({"1.*": None}, default="bf16"))[0].weight is weight
    True
    >>> weight.dtype, net[1].weight.dtype
    (torch.bfloat16, torch.float32)
    """
    policy = CastPolicy.of(policy)
    parameters = _named(module.named_parameters(remove_duplicate=False))
    buffers = _named(module.named_buffers(remove_duplicate=False))
    named = {**parameters, **buffers}
    found = _report_for(named, policy)
    judge(found, policy)
    matcher = PolicyMatcher(policy)
    done: dict[int, Tensor] = {}
    with torch.no_grad():
        for path, parameter in parameters.items():
            dtype = matcher.dtype_for(path, parameter.dtype)
            if id(parameter) not in done:
                done[id(parameter)] = parameter
                if dtype is not None:
                    _cast_parameter(parameter, dtype, optimizer)
        for path, buffer in buffers.items():
            if id(buffer) not in done:
                dtype = matcher.dtype_for(path, buffer.dtype)
                done[id(buffer)] = buffer if dtype is None else buffer.to(buffer.device, dtype)
            owner = module.get_submodule(".".join(path[:-1]))
            owner._buffers[path[-1]] = done[id(buffer)]
    return (module, found) if report else module


def _named(pairs: Any) -> dict[Path, Tensor]:
    return {tuple(name.split(".")): x for name, x in pairs}


def _cast_parameter(
    parameter: Tensor, dtype: torch.dtype, optimizer: torch.optim.Optimizer | None
) -> None:
    if parameter.dtype is dtype:
        return
    grad, parameter.grad = parameter.grad, None
    parameter.data = parameter.data.to(parameter.device, dtype)
    if grad is not None:
        parameter.grad = grad.to(grad.device, dtype)
    state: Mapping[str, Any] = {} if optimizer is None else optimizer.state.get(parameter, {})
    for name, value in list(state.items()):
        follows = isinstance(value, Tensor) and value.is_floating_point()
        if follows and value.shape == parameter.shape and value.ndim:
            state[name] = value.to(value.device, dtype)  # type: ignore[index]


def _report_for(named: Mapping[Path, Tensor], policy: CastPolicy) -> ConversionReport:
    matcher = PolicyMatcher(policy)
    paths, tensors = list(named), list(named.values())
    routes = [make_route(x, None, matcher.dtype_for(path, x.dtype)) for path, x in named.items()]
    ties: dict[int, int] = {}
    first: dict[int, int] = {}
    for index, x in enumerate(tensors):
        ties |= {} if first.setdefault(id(x), index) == index else {index: first[id(x)]}
    losses = []
    for index, (path, x) in enumerate(named.items()):
        route = routes[index]
        if index in ties or not route.loss:
            continue
        counts = None
        if policy.check != "none":
            counts = measure_cast(x, route.dtype, sample=policy.check == "sample")
        losses.append(LeafLoss(path, route.src_dtype, route.dtype, x.numel(), route.loss, counts))
    return ConversionReport(MovePlan(paths, [x.shape for x in tensors], routes, ties), losses)
