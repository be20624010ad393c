"""State dicts of tensordicts: tensors by dotted name, the rest in ``_metadata``."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .._keys import dotted, short
from .._typing import Path
from ..core import write
from ..core.leaf import NonTensorData, NonTensorDataBase, NonTensorStack
from ..core.node import Node
from ..core.registry import node_class
from ..core.traverse import entries_with_path, leaves_with_path, nodes_with_path
from ..errors import LockedError, MissingKeyError, ShapeError, StructureError, table_of
from ..ops import keysets
from ..ops.update import Writes
from .state import named_values, nested


def make_state_dict(
    node: Node, destination: Any, prefix: str, keep_vars: bool, flatten: bool
) -> OrderedDict[str, Any]:
    """`ModuleMethods.state_dict`."""
    out: OrderedDict[str, Any] = OrderedDict() if destination is None else destination
    metadata: dict[str, Any] = getattr(out, "_metadata", None) or OrderedDict()
    if isinstance(out, OrderedDict):
        out._metadata = metadata  # type: ignore[attr-defined]
    for path, below in nodes_with_path(node):
        metadata[(prefix + dotted(path)).rstrip(".") if not path else prefix + dotted(path)] = {
            "batch_size": below._batch_size,
            "device": below._device,
            "names": below._dim_names,
        }
    for path, entry in entries_with_path(node):
        if isinstance(entry, Tensor):
            _place(out, prefix, path, entry if keep_vars else entry.detach(), flatten)
        elif isinstance(entry, NonTensorDataBase):
            metadata[prefix + dotted(path)] = {
                "batch_size": entry._batch_size,
                "device": entry._device,
                "_type": type(entry).__name__,
                "_non_tensor": {"data": entry._plain()},
            }
    return out


def _place(out: Any, prefix: str, path: Path, value: Tensor, flatten: bool) -> None:
    if flatten:
        name = prefix + dotted(path)
        if name in out:
            raise MissingKeyError(
                f"Cannot make a flat state dict: {short(path)!r} and another entry would both be "
                f"{name!r}. Pass flatten=False."
            )
        out[name] = value
        return
    for i, name in enumerate(path[:-1]):
        out = out.setdefault(name if i else prefix + name, OrderedDict())
    out[path[-1] if len(path) > 1 else prefix + path[-1]] = value


def load_state_dict(
    node: Any,
    source: Mapping[str, Any],
    strict: bool,
    assign: bool,
    from_flatten: bool | None,
) -> None:
    """`ModuleMethods.load_state_dict`: check everything, then write."""
    flat = from_flatten
    if flat is None:
        flat = not any(isinstance(value, Mapping) for value in source.values())
    fresh = _tree_of(node, source, flat)
    differences = _differences(node, fresh)
    if strict and differences:
        raise StructureError(
            table_of(
                "Cannot load state-dict because the key sets don't match. "
                "Pass strict=False to load what can be loaded.",
                differences,
            )
        )
    if _batch_sizes_differ(node, fresh):
        if differences:
            raise ShapeError(
                f"Cannot load a state dict of batch size {list(fresh._batch_size)} into a tensordict "
                f"of batch size {list(node._batch_size)} when the keys differ."
            )
        _replace(node, fresh)
        return
    _write(node, fresh, assign)


def _tree_of(node: Node, source: Mapping[str, Any], flat: bool) -> Any:
    """The state dict as a tensordict, batch sizes and non-tensor values from its metadata."""
    # Names of the target win over splitting at dots: its own keys may have dots in them.
    own = {dotted(path): path for path, _ in nodes_with_path(node)}
    own.update((dotted(path), path) for path, _ in entries_with_path(node))

    def path_of(name: str) -> Path:
        return own.get(name) or tuple(name.split("."))

    metadata = getattr(source, "_metadata", {})
    out = node_class("dense")()
    for path, value in _items(source, flat, path_of):
        write.assign(out, path, value)
    sizes: list[tuple[Path, Any]] = []
    for name, info in metadata.items():
        if not isinstance(info, Mapping) or "batch_size" not in info:
            continue  # the metadata of a module, of which there is nothing to take
        path = path_of(name) if name else ()
        if "_non_tensor" in info:
            write.assign(out, path, _leaf(info))
        else:
            sizes.append((path, info))
    if not any(path == () for path, _ in sizes):
        sizes.append(((), {"batch_size": node._batch_size}))
    for path, info in sorted(sizes, key=lambda pair: len(pair[0])):
        if path and write.fetch(out, path) is None:
            write.assign(out, path, {})
        target: Any = write.require(out, path) if path else out
        target.batch_size = info["batch_size"]
        if info.get("names"):
            target.names = info["names"]
    return out


def _items(source: Mapping[str, Any], flat: bool, path_of: Any) -> Iterator[tuple[Path, Any]]:
    for name, value in source.items():
        if flat:
            yield path_of(name), value
        elif isinstance(value, Mapping):
            for below, item in _items(value, False, lambda n: (n,)):
                yield (name, *below), item
        else:
            yield (name,), value


def _leaf(info: Mapping[str, Any]) -> NonTensorDataBase:
    value, size = info["_non_tensor"]["data"], info["batch_size"]
    if info.get("_type") == "NonTensorStack":
        return NonTensorStack.from_list(value, len(size))
    return NonTensorData(value, batch_size=size)


def _differences(node: Node, fresh: Node) -> list[tuple[Any, str]]:
    mine = [path for path, _ in leaves_with_path(node)]
    theirs = [path for path, _ in leaves_with_path(fresh)]
    rows = [(short(p), "missing in the state dict") for p in mine if p not in set(theirs)]
    rows += [(short(p), "only in the state dict") for p in theirs if p not in set(mine)]
    return rows


def _batch_sizes_differ(node: Node, fresh: Node) -> bool:
    sizes = {path: below._batch_size for path, below in nodes_with_path(node)}
    return any(
        sizes.get(path, below._batch_size) != below._batch_size
        for path, below in nodes_with_path(fresh)
    )


def _replace(node: Node, fresh: Node) -> None:
    if node._lock is not None:
        raise LockedError
    moved = write.on_device(fresh, node._device)
    keysets.replace_all(node, lambda _: dict(moved._items()))
    node._batch_size = fresh._batch_size
    node._dim_names = fresh._dim_names


def _write(node: Node, fresh: Node, assign: bool) -> None:
    writes = Writes()
    for path, value in entries_with_path(fresh):
        present = write.fetch(node, path)
        if isinstance(present, Tensor):
            fits = not assign and present.shape == value.shape
        else:
            fits = present is not None and isinstance(value, NonTensorDataBase)
        if fits:
            writes.into(node, path, value)
        else:
            writes.replace(node, path, value)
    for path, below in nodes_with_path(fresh):
        if path and write.fetch(node, path) is None and not len(below._names()):
            writes.replace(node, path, below)
    with torch.no_grad():
        writes.run()


class Load:
    """A plan to load a tree with ``module.load_state_dict``, and the way back."""

    __slots__ = ("former", "inplace", "module", "values")

    def __init__(self, module: nn.Module, values: Any, former: Any, inplace: bool) -> None:
        self.module = module
        self.values = values
        self.former = former
        self.inplace = inplace

    def run(self) -> None:
        """Load the new values."""
        self._load(self.values)

    def __call__(self, source: Any, result: Any) -> None:
        """Load the former values."""
        self._load(self.former)

    def _load(self, values: dict[str, Tensor]) -> None:
        self.module.load_state_dict(values, strict=False, assign=not self.inplace)


def plan_load(node: Node, module: nn.Module, inplace: bool) -> tuple[Any, Load]:
    """What the module's state dict held under the names of the tree, and the plan.

    Raises:
        MissingKeyError: (a ``KeyError``) the state dict lacks an entry of the tree.
    """
    present = module.state_dict(keep_vars=True)
    values = dict(named_values(node))
    unknown = [name for name in values if name not in present]
    if unknown:
        raise MissingKeyError(
            f"Cannot load the tensordict into {type(module).__name__}: its state dict has no "
            f"{unknown}. Use select() to choose entries."
        )
    former = {name: present[name] for name in values}
    if inplace:
        former = {name: value.detach().clone() for name, value in former.items()}
    tree = node_class("dense")(nested(former))
    return tree, Load(module, values, former, inplace)
