"""Geometries made once and kept, and the choice among equal ones by the bytes ranks send."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from .layout import Layout
from .reshard_geometry import Geometry, Request, make_geometry
from .reshard_options import ReshardOptions
from .views import Block

# Rows kept over all geometries in the cache (about 16 bytes each).
_MAX_ROWS = 1 << 25
_MAX_KEPT = 4096
# Alternatives are tried while they have no more rows than this together.
_MAX_TRIED = 1 << 17
_MAX_TURNS = 8


class _Cache:
    """Geometries by request, the least recently used dropped first."""

    def __init__(self) -> None:
        self._known: OrderedDict[Request, Geometry] = OrderedDict()
        self._rows = 0

    def get(self, request: Request) -> Geometry:
        found = self._known.get(request)
        if found is not None:
            self._known.move_to_end(request)
            return found
        found = self._known[request] = make_geometry(request)
        self._rows += len(found)
        while len(self._known) > 1 and (self._rows > _MAX_ROWS or len(self._known) > _MAX_KEPT):
            self._rows -= len(self._known.popitem(last=False)[1])
        return found


_cache = _Cache()


class Chooser:
    """Picks a geometry for each tensor in turn, so that ranks send about as many bytes each.

    Where several ranks hold the same boxes, plans differ in who comes first.  A few of them are
    made for each pair of layouts; each tensor takes the one that leaves the busiest rank least
    busy.  The same order of tensors gives the same choice on every rank.
    """

    def __init__(self, ranks: Sequence[int], options: ReshardOptions) -> None:
        self._at = {rank: i for i, rank in enumerate(ranks)}
        self._loads = np.zeros(len(ranks), np.int64)
        self._options = options
        self._known: dict[tuple[Layout, Layout, Block | None], list[Geometry]] = {}
        self._sent: dict[int, np.ndarray] = {}

    def geometry(self, src: Layout, dst: Layout, block: Block | None, itemsize: int) -> Geometry:
        """The geometry for the next tensor, and the bytes of its senders on the account."""
        # Names and dtypes do not matter for where boxes lie.
        key = (src.as_dtype(None), dst.as_dtype(None), _nameless(block))
        choices = self._known.get(key)
        if choices is None:
            choices = self._known[key] = self._choices(*key)
        if len(choices) == 1:
            best = choices[0]
        else:
            busiest = [(self._loads + itemsize * self._sends(g)).max() for g in choices]
            best = choices[int(np.argmin(busiest))]
        self._loads += itemsize * self._sends(best)
        return best

    def _choices(self, src: Layout, dst: Layout, block: Block | None) -> list[Geometry]:
        options = self._options
        balanced = options.sources == "balanced"
        first = _cache.get(Request(src, dst, block, options.hosts, balanced))
        room = max(1, _MAX_TRIED // max(1, len(first)))
        turns = min(first.n_choices, room, _MAX_TURNS)
        more = (Request(src, dst, block, options.hosts, balanced, t) for t in range(1, turns))
        return [first, *map(_cache.get, more)]

    def _sends(self, geometry: Geometry) -> np.ndarray:
        found = self._sent.get(id(geometry))
        if found is None:
            found = np.zeros(len(self._at), np.int64)
            for rank, numel in geometry.per_rank("src").items():
                found[self._at[rank]] = numel
            self._sent[id(geometry)] = found
        return found


def _nameless(block: Block | None) -> Block | None:
    if block is None:
        return None
    return Block(block.start, block.stop, "", block.offset, block.dims)
