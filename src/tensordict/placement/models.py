"""Layouts of what engines hold: modules, state dicts, optimisers; and of what they will hold.

`layouts_of` reads tensors that are there.  `model_layouts` says what ``fully_shard`` and
``parallelize_module`` will make of a module, which may be on the meta device: no processes are
needed to plan for a world that does not exist yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatch
from typing import Any

import torch
from torch import Tensor, nn

from .._keys import dotted
from ..core.node import Node
from ..core.traverse import leaves_with_path
from ..errors import EntryTypeError, LayoutError
from .layout import Layout, Placement
from .reshard import Layouts


def tensors_of(tree: Any) -> dict[str, Tensor]:
    """The tensors of a tensordict, a mapping or a module, by dotted name.

    Of a module: what its ``state_dict()`` has, the parameters themselves.

    >>> sorted(tensors_of(nn.Linear(2, 2)))
    ['bias', 'weight']
    """
    if tree is None:
        return {}
    if isinstance(tree, Node):
        # What is no tensor stays where it is.
        return {dotted(path): x for path, x in leaves_with_path(tree)}
    if isinstance(tree, nn.Module):
        tree = tree.state_dict(keep_vars=True)
    if not isinstance(tree, Mapping):
        raise EntryTypeError(
            f"Cannot take tensors by name from {type(tree).__name__!r}: expected a tensordict, a "
            f"mapping or a module."
        )
    return {name: value for name, value in tree.items() if isinstance(value, Tensor)}


def local_tensor(tensor: Tensor) -> Tensor:
    """The part of a DTensor that this rank holds, without grad history; other tensors as are."""
    local = getattr(tensor, "_local_tensor", None)
    if local is not None and hasattr(tensor, "device_mesh"):
        wait = getattr(local, "wait", None)  # still being gathered
        return (wait() if callable(wait) else local).detach()
    return tensor.detach()


def optimizer_tensors(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The state of an optimiser by name of the parameter and of the state.

    >>> layer = nn.Linear(2, 2)
    >>> optimizer = torch.optim.AdamW(layer.parameters())
    >>> layer(torch.ones(1, 2)).sum().backward(); optimizer.step()
    >>> sorted(optimizer_tensors(layer, optimizer))[:3]
    ['bias.exp_avg', 'bias.exp_avg_sq', 'bias.step']
    """
    out = {}
    for name, parameter in module.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                out[f"{name}.{key}"] = value
    return out


def layouts_of(tree: Any, *, ranks: Sequence[int] | None = None) -> Layouts:
    """The layouts of the tensors of a tensordict, mapping or module, by dotted name.

    Communicates nothing: a DTensor knows its mesh.  Tensors that share their memory are ties.  A
    DTensor on some axes only of the widest mesh beside it is taken to be copied over the others,
    as FSDP over tensor parallelism does with parameters that are not split.  What one rank cannot
    know, pipeline stages say, `tensordict.distributed.share_layouts` finds out.

    Args:
        tree: What holds the tensors.
        ranks: The ranks that hold plain tensors, all of them whole; by default those of the
            DTensors beside them, else all ranks of the default group.

    >>> layouts_of({"w": torch.zeros(2, 3)}, ranks=[0, 1])["w"].of_rank(1)
    (Box(start=(0, 0), stop=(2, 3)),)
    """
    tensors = tensors_of(tree)
    # Under FSDP a strided shard is a shard of a shard; the tensor does not say so, the module does.
    engine = isinstance(tree, nn.Module) and any(_is_fsdp(m) for m in tree.modules())
    widest = _widest_mesh(tensors)
    out = Layouts()
    plain: list[str] = []
    seen: dict[Any, str] = {}
    for name, tensor in tensors.items():
        local = local_tensor(tensor)
        if hasattr(tensor, "device_mesh"):
            layout = Layout.from_dtensor(tensor)
            if tensor.device_mesh is not widest:
                layout = _widened(layout, tensor.device_mesh, widest)
            if engine and any(p.split_factor > 1 for p in layout.placements):
                layout = layout.innermost_first()
            out[name] = layout
        else:
            plain.append(name)
            out[name] = Layout.replicated(tensor.shape, [0], dtype=tensor.dtype)
        key = _memory(local)
        if key is not None and key in seen:
            out.ties[name] = seen[key]
        elif key is not None:
            seen[key] = name
    holders = _holders(out, plain) if ranks is None else tuple(ranks)
    for name in plain:
        out[name] = Layout.replicated(out[name].shape, holders, dtype=out[name].dtype)
    return out


def _widest_mesh(tensors: Mapping[str, Any]) -> Any:
    meshes = [x.device_mesh for x in tensors.values() if hasattr(x, "device_mesh")]
    return max(meshes, key=lambda mesh: mesh.ndim, default=None)


def _widened(layout: Layout, mesh: Any, widest: Any) -> Layout:
    """The layout on the whole mesh, copied over the axes that its own does not have."""
    names, all_names = mesh.mesh_dim_names, widest.mesh_dim_names
    ranks = widest.mesh.reshape(-1).tolist()
    known = names and all_names and set(names) < set(all_names)
    if not known or not set(layout.ranks) <= set(ranks):
        return layout
    by_name = dict(zip(names, layout.placements))
    return Layout.from_placements(
        layout.shape,
        tuple(widest.mesh.shape),
        [by_name.get(name, Placement("replicate")) for name in all_names],
        ranks=ranks,
        dtype=layout.dtype,
    )


def _memory(local: Tensor) -> Any:
    """Equal for tensors that are one and the same memory; ``None`` where there is none."""
    if local.device.type == "meta" or not local.numel():
        return None
    start = (local.untyped_storage().data_ptr(), local.storage_offset())
    return (start, local.dtype, tuple(local.shape), local.stride())


def _holders(layouts: Layouts, plain: list[str]) -> tuple[int, ...]:
    ranks = {r for name, layout in layouts.items() if name not in plain for r in layout.ranks}
    if ranks:
        return tuple(sorted(ranks))
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return tuple(range(distributed.get_world_size()))
    return (0,)


def _is_fsdp(module: nn.Module) -> bool:
    return any(cls.__name__ == "FSDPModule" for cls in type(module).__mro__)


AXES = ("replicate", "fsdp", "tp")


def model_layouts(
    module: nn.Module,
    *,
    ranks: Sequence[int],
    mesh_shape: Sequence[int] | None = None,
    axes: Sequence[str] = ("fsdp",),
    plan: Mapping[str, Any] | None = None,
    dtype: torch.dtype | None = None,
) -> Layouts:
    """The layouts that ``fully_shard`` and ``parallelize_module`` give a module.

    Args:
        module: The module before it is parallelised; the meta device will do.
        ranks: The ranks of the mesh in row-major order.
        mesh_shape: Extent of each axis; by default one axis of all ranks.
        axes: What each axis does: ``"replicate"``, ``"fsdp"`` (shards dimension 0) or ``"tp"``
            (as ``plan`` says).  ``("fsdp",)`` is plain FSDP2, ``("replicate", "fsdp")`` HSDP,
            ``("fsdp", "tp")`` FSDP2 over tensor parallelism.
        plan: Module names, with ``*`` for one part of a name, and ``ColwiseParallel`` or
            ``RowwiseParallel`` styles of torch (or ``"colwise"``, ``"rowwise"``).
        dtype: The dtype of floating-point tensors; as they are by default.

    Raises:
        LayoutError: for an unknown axis or style, or a plan that matches no module.

    >>> module = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 8))
    >>> plan = {"0": "colwise", "1": "rowwise"}
    >>> layouts = model_layouts(module, ranks=[2, 3], axes=["tp"], plan=plan)
    >>> layouts["0.weight"].local_shape(3), layouts["1.weight"].local_shape(3)
    ((2, 8), (8, 2))
    """
    extents = (len(ranks),) if mesh_shape is None else tuple(mesh_shape)
    unknown = sorted(set(axes) - set(AXES))
    if unknown or len(axes) != len(extents):
        raise LayoutError(
            f"Cannot lay out a module on a mesh {extents}: expected one of {AXES} for each axis, "
            f"got {tuple(axes)}."
        )
    split = _split_by_plan(module, plan or {})
    out = Layouts()
    seen: dict[int, str] = {}
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    for name, tensor in module.state_dict(keep_vars=True).items():
        dim = split.get(name)
        # Buffers are not sharded by FSDP.
        sharded = name in parameters
        placements = [_placement(axis, dim, sharded, tensor.dim()) for axis in axes]
        order = sorted(range(len(axes)), key=lambda i: axes[i] == "fsdp")
        kept = dtype is None or not tensor.dtype.is_floating_point
        out[name] = Layout.from_placements(
            tensor.shape,
            extents,
            placements,
            ranks=ranks,
            order=order,
            dtype=tensor.dtype if kept else dtype,
        )
        first = seen.setdefault(id(tensor), name)
        if first != name and out[first] == out[name]:  # laid out otherwise, they come apart
            out.ties[name] = first
    return out


def _placement(axis: str, dim: int | None, sharded: bool, ndim: int) -> Placement:
    if axis == "tp" and dim is not None:
        return Placement("shard", dim)
    if axis == "fsdp" and sharded and ndim:
        return Placement("shard", 0)
    return Placement("replicate")


def _split_by_plan(module: nn.Module, plan: Mapping[str, Any]) -> dict[str, int]:
    """The dimension in which tensor parallelism splits a parameter, by name."""
    out: dict[str, int] = {}
    for pattern, style in plan.items():
        met = False
        for name, child in module.named_modules(remove_duplicate=False):
            if _matches(name, pattern):
                met = True
                for parameter, dim in _split_of(child, style).items():
                    out[f"{name}.{parameter}" if name else parameter] = dim
        if not met:
            raise LayoutError(f"Cannot follow the plan: no module is named {pattern!r}.")
    return out


def _matches(name: str, pattern: str) -> bool:
    have, want = name.split("."), pattern.split(".")
    return len(have) == len(want) and all(map(fnmatch, have, want))


# Styles that concern inputs and outputs alone.
_SPLIT_NOTHING = ("sequence", "prepare", "noparallel", "replicate")


def _split_of(module: nn.Module, style: Any) -> dict[str, int]:
    # A style derived from one of torch does what that does.
    names = [style] if isinstance(style, str) else [cls.__name__ for cls in type(style).__mro__]
    embedding = isinstance(module, nn.Embedding)
    for name in map(str.lower, names):
        if name.startswith("colwise"):
            return {"weight": 1} if embedding else {"weight": 0, "bias": 0}
        if name.startswith("rowwise"):
            return {"weight": 0} if embedding else {"weight": 1}
        if name.startswith(_SPLIT_NOTHING):
            return {}
    raise LayoutError(
        f"Cannot follow the plan: what {names[0]!r} does to parameters is not known. Expected "
        f"'colwise', 'rowwise' or a style of torch; leave the module out, and lay it out by hand."
    )


def follow(
    layouts: Mapping[str, Layout],
    states: Iterable[str],
    *,
    scalars: Iterable[str] = (),
    dtype: torch.dtype | None = None,
) -> Layouts:
    """Layouts of optimiser states: each as its parameter, scalars whole on every rank of it.

    Args:
        layouts: Layouts of the parameters.
        states: Names of states that have the shape of the parameter.
        scalars: Names of states that are one number.
        dtype: The dtype of the states; that of the parameter by default.

    >>> layouts = {"w": Layout.replicated([4], [0, 1], dtype=torch.bfloat16)}
    >>> list(follow(layouts, ["exp_avg"], scalars=["step"], dtype=torch.float32))
    ['w.exp_avg', 'w.step']
    """
    out = Layouts()
    for name, layout in layouts.items():
        for state in states:
            out[f"{name}.{state}"] = layout.as_dtype(dtype or layout.dtype)
        for state in scalars:
            ranks = layout.ranks
            out[f"{name}.{state}"] = Layout.replicated((), ranks, dtype=torch.float32)
    return out
