"""Leaves that are several plain tensors: ragged, sparse, and shards of a distributed tensor.

Each kind says how to take a leaf apart and how to put it together.  A shard travels as its
local tensor and the description of its layout; only a receiver with an equal layout, or one
that gives a mesh, can take it.
"""

from __future__ import annotations

import sys
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from ..errors import UnsupportedLeaf, WireError
from ..storage.buffer import why_not_bytes

Pieces: TypeAlias = "tuple[str, list[Tensor], dict[str, Any]]"

JAGGED: Final = "jagged"
DTENSOR: Final = "dtensor"
_COMPRESSED: Final[dict[Any, str]] = {
    torch.sparse_csr: "sparse_csr",
    torch.sparse_csc: "sparse_csc",
    torch.sparse_bsr: "sparse_bsr",
    torch.sparse_bsc: "sparse_bsc",
}
_LAYOUTS: Final[dict[str, Any]] = {name: layout for layout, name in _COMPRESSED.items()}


def split(leaf: Tensor, path: tuple[str, ...]) -> Pieces | None:
    """The kind, the parts and the parameters of a leaf; ``None`` when it is one part.

    Raises:
        UnsupportedLeaf: a layout that cannot travel.
    """
    layout = leaf.layout
    if layout is torch.jagged:
        return _split_jagged(leaf)
    if layout is torch.sparse_coo:
        params = {"shape": list(leaf.shape), "coalesced": leaf.is_coalesced()}
        return "sparse_coo", [leaf._indices(), _like(leaf, leaf._values())], params
    if layout in _COMPRESSED:
        by_rows = layout in (torch.sparse_csr, torch.sparse_bsr)
        outer = leaf.crow_indices() if by_rows else leaf.ccol_indices()
        inner = leaf.col_indices() if by_rows else leaf.row_indices()
        values = _like(leaf, leaf.detach().values())
        return _COMPRESSED[layout], [outer, inner, values], {"shape": list(leaf.shape)}
    if is_dtensor(leaf):
        return _split_dtensor(leaf, path)
    if layout is not torch.strided or leaf.is_nested:
        raise UnsupportedLeaf(path, why_not_bytes(leaf))
    return None


def _like(leaf: Tensor, part: Tensor) -> Tensor:
    """A part that says whether its leaf requires grad."""
    return part.detach().requires_grad_() if leaf.requires_grad else part


def join(kind: str, parts: Any, params: dict[str, Any], mesh: Any = None) -> Tensor:
    """The leaf of a kind from its parts; it requires grad, as a leaf of autograd, if one does.

    Raises:
        WireError: parts or parameters that do not make one.
    """
    if any(part.requires_grad for part in parts):
        return _join(kind, [part.detach() for part in parts], params, mesh).requires_grad_()
    return _join(kind, parts, params, mesh)


def _join(kind: str, parts: Any, params: dict[str, Any], mesh: Any) -> Tensor:
    try:
        if kind == JAGGED:
            lengths = parts[2] if params["lengths"] else None
            return torch.nested.nested_tensor_from_jagged(
                parts[0], parts[1], lengths, jagged_dim=params["dim"]
            )
        if kind == DTENSOR:
            return _join_dtensor(parts[0], params, mesh)
        shape = torch.Size(params["shape"])
        if kind == "sparse_coo":
            indices, values = parts
            return torch.sparse_coo_tensor(
                indices,
                values,
                shape,
                is_coalesced=bool(params["coalesced"]),
                check_invariants=not values.is_meta,
            )
        if kind in _LAYOUTS:
            outer, inner, values = parts
            return torch.sparse_compressed_tensor(
                outer,
                inner,
                values,
                shape,
                layout=_LAYOUTS[kind],
                check_invariants=not values.is_meta,
            )
    except (RuntimeError, ValueError, TypeError, KeyError, IndexError) as error:
        raise WireError(f"a leaf of kind {kind!r} cannot be made: {error}") from None
    raise WireError(f"leaves of kind {kind[:40]!r} are not known here")


def writes_in_place(kind: str) -> bool:
    """Whether the parts of a kind are memory to receive into; else the leaf is replaced."""
    return kind == DTENSOR


def is_dtensor(leaf: Any) -> bool:
    """Whether a tensor is a `DTensor`; imports nothing."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(leaf, getattr(module, "DTensor", ()))


def _split_jagged(leaf: Any) -> Pieces:
    parts, lengths = [leaf.values(), leaf.offsets()], leaf.lengths()
    if lengths is not None:
        parts.append(lengths)
    return JAGGED, parts, {"dim": leaf._ragged_idx, "lengths": lengths is not None}


def _split_dtensor(leaf: Any, path: tuple[str, ...]) -> Pieces:
    mesh = leaf.device_mesh
    params = {
        "shape": list(leaf.shape),
        "mesh": list(mesh.shape),
        "axes": None if mesh.mesh_dim_names is None else list(mesh.mesh_dim_names),
        "placements": [_placement(p, path) for p in leaf.placements],
    }
    return DTENSOR, [_like(leaf, leaf._local_tensor)], params


def _placement(placement: Any, path: tuple[str, ...]) -> list[Any]:
    factor = getattr(placement, "split_factor", None)
    if placement.is_replicate():
        return ["R"]
    if factor is not None:
        return ["SS", placement.dim, factor]
    if placement.is_shard():
        return ["S", placement.dim]
    if placement.is_partial() and isinstance(placement.reduce_op, str):
        return ["P", placement.reduce_op]
    raise UnsupportedLeaf(path, f"a DTensor with the placement {placement}")


def _join_dtensor(local: Tensor, params: dict[str, Any], mesh: Any) -> Tensor:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    if mesh is None:
        raise ValueError("a shard needs the mesh it belongs to: receive with mesh=")
    makers: dict[str, Any] = {
        "R": lambda: Replicate(),
        "S": lambda dim: Shard(dim),
        "SS": lambda dim, factor: _StridedShard(dim, split_factor=factor),
        "P": lambda op: Partial(op),
    }
    placements = [makers[name](*rest) for name, *rest in params["placements"]]
    if list(mesh.shape) != params["mesh"]:
        raise ValueError(f"a shard of a mesh {params['mesh']} for a mesh {list(mesh.shape)}")
    shape = torch.Size(params["shape"])
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
