"""Mesh arithmetic: which stretches of each dimension the ranks of a mesh hold.

The rule is that of ``torch.chunk``, one mesh axis after the other.  Integers alone.
"""

from __future__ import annotations

import itertools
from typing import TypeAlias

# Ascending, disjoint stretches of the indices of one dimension.
Runs: TypeAlias = tuple[tuple[int, int], ...]


def runs_on_mesh(
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    splits: tuple[tuple[int, int] | None, ...],
    order: tuple[int, ...],
) -> list[tuple[Runs, ...]]:
    """For each mesh coordinate, row-major: the stretches of each dimension held there.

    Args:
        shape: The global shape.
        mesh_shape: Extent of each mesh axis.
        splits: For each axis the dimension that it splits and its split factor, or ``None``.
        order: The axes in the order in which they split.

    >>> runs_on_mesh((5,), (2,), ((0, 1),), (0,))
    [(((0, 3),),), (((3, 5),),)]
    """
    axes: list[list[tuple[int, int]]] = [[] for _ in shape]
    for axis in order:
        split = splits[axis]
        if split is not None:
            axes[split[0]].append((axis, split[1]))
    # Many ranks share a coordinate on the axes that split a dimension.
    known: list[dict[tuple[int, ...], Runs]] = [{} for _ in shape]
    out: list[tuple[Runs, ...]] = []
    for coordinate in itertools.product(*map(range, mesh_shape)):
        runs = []
        for dim, dim_axes in enumerate(axes):
            at = tuple(coordinate[axis] for axis, _ in dim_axes)
            found = known[dim].get(at)
            if found is None:
                found = ((0, shape[dim]),)
                for axis, factor in dim_axes:
                    found = _split(found, mesh_shape[axis], factor, coordinate[axis])
                found = known[dim][at] = _merge(found)
            runs.append(found)
        out.append(tuple(runs))
    return out


def _split(runs: Runs, size: int, factor: int, at: int) -> Runs:
    """Chunk ``at`` of ``size``; with a factor, that chunk of each of ``factor`` chunks."""
    length = sum(b - a for a, b in runs)
    outer = -(-length // factor)
    out: Runs = ()
    for first in range(0, length, outer) if outer else ():
        last = min(first + outer, length)
        piece = -(-(last - first) // size)
        out += _take(runs, min(first + at * piece, last), min(first + (at + 1) * piece, last))
    return out


def _take(runs: Runs, start: int, stop: int) -> Runs:
    """Positions ``start`` to ``stop`` of the concatenated runs."""
    out: list[tuple[int, int]] = []
    offset = 0
    for a, b in runs:
        low, high = max(start - offset, 0), min(stop - offset, b - a)
        if low < high:
            out.append((a + low, a + high))
        offset += b - a
    return tuple(out)


def _merge(runs: Runs) -> Runs:
    """Join runs that touch; one empty run when there is none, so that a box can say its place."""
    out: list[tuple[int, int]] = []
    for a, b in runs:
        if out and out[-1][1] == a:
            out[-1] = (out[-1][0], b)
        else:
            out.append((a, b))
    return tuple(out) or ((0, 0),)
