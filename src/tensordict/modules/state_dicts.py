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
from ..core.traverse import (
    entries_with_path,
    leaves_with_path,
    nodes_with_path,
    refuse_exclusive,
)
from ..errors import LockedError, MissingKeyError, ShapeError, StructureError, table_of
from ..ops import keysets
from ..ops.convert import value_of
from ..ops.inplace import copy_each
from ..ops.update import Writes
from .state import named_values, nested


def make_state_dict(
    node: Node, destination: Any, prefix: str, keep_vars: bool, flatten: bool
) -> OrderedDict[str, Any]:
    """`ModuleMethods.state_dict`."""
    for _, part in nodes_with_path(node):
        refuse_exclusive(part)
    out: OrderedDict[str, Any] = OrderedDict() if destination is None else destination
    metadata: dict[str, Any] = getattr(out, "_metadata", None) or OrderedDict()
    if isinstance(out, OrderedDict):
        out._metadata = metadata  # type: ignore[attr-defined]
    if flatten:
        _flat(node, prefix, keep_vars, out, metadata)
    else:
        tree = _nested(node, prefix, keep_vars, metadata)
        out.update({prefix + name: value for name, value in tree.items()})
    return out


def _flat(node: Node, prefix: str, keep_vars: bool, out: Any, metadata: dict[str, Any]) -> None:
    metadata[prefix[:-1]] = _facts(node)
    for name, entry in node._items():
        full = prefix + name
        if isinstance(entry, Tensor):
            if full in out:
                raise MissingKeyError(
                    f"Cannot make a flat state dict: two entries would be {full!r}, one of them a "
                    f"key with dots. Pass flatten=False."
                )
            out[full] = entry if keep_vars else entry.detach()
        elif isinstance(entry, Node):
            _flat(entry, full + ".", keep_vars, out, metadata)
        elif isinstance(entry, NonTensorDataBase):
            metadata[full] = _value_facts(entry)


def _nested(
    node: Node, prefix: str, keep_vars: bool, metadata: dict[str, Any]
) -> OrderedDict[str, Any]:
    metadata[prefix[:-1]] = _facts(node)
    out: OrderedDict[str, Any] = OrderedDict()
    for name, entry in node._items():
        if isinstance(entry, Tensor):
            out[name] = entry if keep_vars else entry.detach()
        elif isinstance(entry, Node):
            out[name] = _nested(entry, f"{prefix}{name}.", keep_vars, metadata)
        elif isinstance(entry, NonTensorDataBase):
            metadata[prefix + name] = _value_facts(entry)
    return out


def _facts(node: Node) -> dict[str, Any]:
    return {"batch_size": node._batch_size, "device": node._device, "names": node._dim_names}


def _value_facts(leaf: NonTensorDataBase) -> dict[str, Any]:
    return {
        "batch_size": leaf._batch_size,
        "device": leaf._device,
        "_type": type(leaf).__name__,
        "_non_tensor": {"data": value_of(leaf)},
    }


def load_state_dict(
    node: Any,
    source: Mapping[str, Any],
    strict: bool,
    assign: bool,
    from_flatten: bool | None,
) -> None:
    """`ModuleMethods.load_state_dict`: check everything, then write."""
    if not assign and _copied(node, source):
        return
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


def _copied(node: Node, source: Mapping[str, Any]) -> bool:
    """Copy a flat state dict of exactly this tree; False, with nothing done, for any other."""
    known: dict[str, Any] = {}
    metadata: dict[str, Any] = {}
    try:
        _flat(node, "", True, known, metadata)
    except MissingKeyError:
        return False
    if known.keys() != source.keys():
        return False
    if any("_non_tensor" in facts for facts in metadata.values()):
        return False
    given = getattr(source, "_metadata", None)
    # A module's metadata says nothing about batch sizes.
    if given is not None and "batch_size" in given.get("", ()) and given != metadata:
        return False
    targets, values = [], []
    for name, target in known.items():
        value = source[name]
        if not isinstance(value, Tensor) or value.shape != target.shape:
            return False
        targets.append(target)
        values.append(value)
    with torch.no_grad():
        copy_each(targets, values, False)
    return True


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
    new: set[Path] = set()
    for path, below in nodes_with_path(fresh):
        if path and write.fetch(node, path) is None and not _within(path, new):
            writes.replace(node, path, below)  # as a whole: it has a batch size of its own
            new.add(path)
    for path, value in entries_with_path(fresh):
        if _within(path, new):
            continue
        present = write.fetch(node, path)
        if isinstance(present, Tensor):
            fits = not assign and present.shape == value.shape
        else:
            fits = present is not None and isinstance(value, NonTensorDataBase)
        if fits:
            writes.into(node, path, value)
        else:
            writes.replace(node, path, value)
    with torch.no_grad():
        writes.run()


def _within(path: Path, roots: set[Path]) -> bool:
    return any(path[:i] in roots for i in range(1, len(path)))


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
