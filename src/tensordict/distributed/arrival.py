"""Receiving by a policy: leaves are cast when they have arrived.

A receiver that casts expects of its own tensordict the dtypes that the policy makes of what
was sent, and says so before any payload travels, as every receiver does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ..core.node import Node
from ..core.traverse import leaves_with_path
from ..errors import EntryTypeError
from ..placement.convert import convert
from ..placement.policy import CastPolicy, PolicyMatcher
from .endpoint import Known
from .link import Link, Request
from .receive import Into, New, bundled
from .schema import COMPOSITE, TENSOR, Schema, places


class Cast(New):
    """Receive as new leaves that `finish` casts, moves, and writes where they belong.

    Args:
        policy: how they are cast.
        out: the tensordict that they are written into, in place.
        mesh: the device mesh of shards (`DTensor` leaves).

    Raises:
        EntryTypeError: a policy that adds leaves (``scale=``), together with ``out``.
    """

    def __init__(self, policy: CastPolicy, out: Node | None = None, *, mesh: Any = None) -> None:
        super().__init__(mesh=mesh)
        if out is not None and policy.scale is not None:
            raise EntryTypeError(
                "Cannot receive into a tensordict by a policy with scale=: it adds a leaf for each "
                "factor. Receive a new tensordict."
            )
        self.policy = policy
        self._into = None if out is None else Into(out)

    def look(self, request: Request) -> Exception | None:
        if self._into is not None:
            return self._into.look(request)
        return super().look(request)

    def mismatch(self, entry: Known, link: Link) -> Exception | None:
        error = super().mismatch(entry, link)
        if error is not None or self._into is None:
            return error
        one_buffer = entry.packing.one_buffer is not None
        return self._into.refusal(
            after_cast(entry.schema, self.policy), link, one_buffer=one_buffer
        )

    def finish(self, td: Any, out: Any, device: torch.device | None) -> Any:
        """What the caller gets of what has arrived: one tensordict, or a list of them.

        Raises:
            LossyCast: the policy refuses what a cast loses; ``out`` is as it was.
        """
        node, n = bundled(td)  # patterns meet the paths that they meet at a sender
        cast = self._cast(node)
        if n is None:
            return _moved(cast, device) if out is None else out.update_(cast)
        parts = [part for _, part in cast._items()]
        for target, part in zip(out or (), parts):
            target.update_(part)
        return [_moved(part, device) for part in parts] if out is None else list(out)

    def _cast(self, td: Any) -> Any:
        """What requires grad goes on to, as a leaf of its own graph and not of the cast's."""
        out = convert(td.detach(), self.policy)
        grad = [path for path, x in leaves_with_path(td) if x.requires_grad]
        if grad:
            cast = dict(leaves_with_path(out))
            for path in grad:
                cast[path].requires_grad_(cast[path].is_floating_point())
        return out


def _moved(td: Any, device: torch.device | None) -> Any:
    return td if device is None else td.to(device)


def after_cast(schema: Schema, policy: CastPolicy) -> Schema:
    """The structure that a policy makes of one: the same but for dtypes."""
    matcher = PolicyMatcher(policy)
    sizes = {whole.first: whole.n for whole in schema.composites}
    dtypes = list(schema.dtypes)
    for path, place in places(schema):
        if place.letter == TENSOR:
            parts: Sequence[int] = (place.first,)
        elif place.letter == COMPOSITE:  # its indices and offsets are not cast
            parts = [
                i
                for i in range(place.first, place.first + sizes[place.first])
                if dtypes[i].is_floating_point
            ]
        else:
            continue
        for i in parts:
            dtypes[i] = matcher.dtype_for(path, dtypes[i]) or dtypes[i]
    return replace(schema, dtypes=dtypes)
