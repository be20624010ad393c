"""Consolidated trees in one file: the bytes of the leaves, a JSON description, its length.

The description nests as the tree does.  Each node says its class (``cls``), its attributes
(``cls_metadata``), its ``leaves`` (dtype, shape, first byte, last byte, padding) and its
``non_tensors`` (value, batch size, device); every other member is a nested node.  Files of
tensordict 0.15 have the same form.  Class names are compared with a table, never imported.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Size, Tensor

from .._keys import short
from .._typing import Path as KeyPath
from ..core.leaf import NonTensorData, NonTensorStack
from ..core.node import Node
from ..core.registry import node_class
from ..core.traverse import entries_with_path, nodes_with_path, rebuild
from ..errors import EntryTypeError, FileFormatError, UnsupportedLeaf
from .buffer import BufferLayout
from .consolidate import buffer_of, consolidate, over_buffer, packing_of
from .packing import Packing
from .values import decode, dtype_named, encode

MAX_JSON_NBYTES = 100_000_000

_CLASSES = {"dense": "TensorDict", "lazy_stack": "LazyStackedTensorDict"}
_KINDS = {name: kind for kind, name in _CLASSES.items()}
_STACK = "NonTensorStack"
_RESERVED = ("cls", "cls_metadata", "leaves", "non_tensors")
_JAGGED = ("<NJT_VALUES>", "<NJT_OFFSETS>", "<NJT_LENGTHS>")


# --- writing -----------------------------------------------------------------------------


def write_consolidated(node: Node, path: str | os.PathLike[str]) -> None:
    """Write a consolidated tree to a file, all or nothing.

    Raises:
        UnsupportedLeaf: for what the form has no place for, before anything is written.
    """
    buffer = buffer_of(node)
    assert buffer is not None
    text = json.dumps(description_of(node), separators=(",", ":")).encode()
    data: Any = buffer.cpu().numpy()
    path = Path(path)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(part, "wb") as file:
            file.write(memoryview(data))
            file.write(text)
            file.write(len(text).to_bytes(8, "little"))
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def description_of(node: Node) -> dict[str, Any]:
    """The JSON description of a consolidated tree."""
    leaves = _leaf_rows(packing_of(node))
    made: dict[KeyPath, dict[str, Any]] = {}
    for path, part in nodes_with_path(node):
        made[path] = out = {
            "cls": _CLASSES.get(part.kind, part.kind),
            "non_tensors": {},
            "leaves": {},
            "cls_metadata": _metadata_of(part),
        }
        if path:
            _add(made[path[:-1]], path, out)
    # Leaves are packed in the order of the walk, in which nested ones stand in place.
    for path, entry in entries_with_path(node):
        owner, name = made[path[:-1]], path[-1]
        if isinstance(entry, Tensor):
            for prefix, row in next(leaves):
                if name.startswith(_JAGGED):
                    raise UnsupportedLeaf(short(path), "a name of this form", "Rename it.")
                owner["leaves"][prefix + name] = row
        elif isinstance(entry, NonTensorStack):
            _add(owner, path, _stack_form(entry._rows(), path))
        elif isinstance(entry, NonTensorData):
            device = None if entry.device is None else str(entry.device)
            form = encode(entry._value(), short(path))
            owner["non_tensors"][name] = [form, list(entry.batch_size), device]
        else:
            raise UnsupportedLeaf(short(path), f"a {type(entry).__name__}")
    return made[()]


def _add(owner: dict[str, Any], path: KeyPath, form: dict[str, Any]) -> None:
    if path[-1] in _RESERVED:
        raise UnsupportedLeaf(short(path), "a nested entry of this name", "Rename it.")
    owner[path[-1]] = form


def _metadata_of(node: Node) -> dict[str, Any]:
    header = dict(node._header())
    if node.kind == "lazy_stack":
        dim, names = header["stack_dim"], header.get("names")
        name = None if names is None else names[dim]
        return {"stack_dim": dim, "stack_dim_name": name, "is_locked": True}
    if node.kind == "dense":
        names = header["names"] or [None] * len(header["batch_size"])
        return {**header, "names": names, "is_locked": True}
    return {"header": header, "is_locked": True}


def _stack_form(rows: np.ndarray, path: KeyPath) -> dict[str, Any]:
    nested = rows.ndim > 1
    return {
        "cls": _STACK,
        "non_tensors": {}
        if nested
        else {str(i): [encode(value, short(path)), [], None] for i, value in enumerate(rows)},
        "leaves": {},
        "cls_metadata": {"stack_dim": 0, "stack_dim_name": None, "is_locked": False},
        **({str(i): _stack_form(row, path) for i, row in enumerate(rows)} if nested else {}),
    }


def _leaf_rows(packing: Packing) -> Iterator[list[tuple[str, list[Any]]]]:
    """For each leaf, in the order of the walk, a name prefix and a row for each of its parts."""
    layout = packing.layout
    slots = list(range(len(layout))) if packing.slots is None else list(packing.slots)
    joins = {index: (count, recipe) for index, count, recipe in packing.joins}
    ends = [*layout.offsets[1:], layout.total_nbytes]
    at = leaf = 0
    while at < len(slots):
        count, recipe = joins.get(leaf, (1, ("", None)))
        if recipe[0] not in ("", "jagged"):
            raise UnsupportedLeaf(f"leaf {leaf}", f"a {recipe[0]} tensor")
        rows = []
        for k, slot in enumerate(slots[at : at + count]):
            start, nbytes, end = layout.offsets[slot], layout.nbytes[slot], ends[slot]
            row = [str(layout.dtypes[slot]), list(layout.shapes[slot]), start, end]
            row.append(end - start - nbytes)
            if recipe[0] and k == 1:
                row.append(recipe[1]["jagged_dim"])
            rows.append((_JAGGED[k] if recipe[0] else "", row))
        yield rows
        at += count
        leaf += 1


# --- reading -----------------------------------------------------------------------------


def read_consolidated(path: str | os.PathLike[str]) -> Any:
    """The consolidated tree of a file.

    The file is mapped: leaves are read when they are used, and writing to them leaves it as it is.

    Raises:
        FileFormatError: when the file is not what it should be.
        EntryTypeError: for a class that no module has registered.
    """
    path = Path(path)
    size = path.stat().st_size
    with open(path, "rb") as file:
        if size < 10:
            _refuse(path, f"it has {size} bytes only")
        file.seek(size - 8)
        n = int.from_bytes(file.read(8), "little")
        if n > min(MAX_JSON_NBYTES, size - 8):
            _refuse(path, f"its description claims {n} bytes")
        file.seek(size - 8 - n)
        text = file.read(n)
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError) as err:
        _refuse(path, f"its description is not valid JSON: {str(err)[:80]}")
    reader = _Reader(path, size - 8 - n)
    try:
        return reader.tree(tree)
    except (FileFormatError, EntryTypeError):
        raise
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as err:
        _refuse(path, f"its description is wrong: {type(err).__name__} {str(err)[:80]}")


def _refuse(path: Path, reason: str) -> NoReturn:
    raise FileFormatError(f"Cannot read {path} as a consolidated tensordict: {reason}.")


class _Reader:
    """Collects the parts of a description, then makes the tree."""

    def __init__(self, path: Path, data_nbytes: int) -> None:
        self._path = path
        self._data_nbytes = data_nbytes
        self._rows: list[list[Any]] = []
        self._joins: list[tuple[int, int, Any]] = []
        self._leaves = 0

    def tree(self, form: Any) -> Any:
        node = self._node(form, ())
        layout, aligned = self._layout_of(self._rows)
        packing = Packing(layout, None, tuple(self._joins))
        buffer = torch.empty(0, dtype=torch.uint8)
        if self._data_nbytes:
            buffer = torch.from_file(
                str(self._path), shared=False, size=self._data_nbytes, dtype=torch.uint8
            )
        if aligned:
            return over_buffer(node, packing, buffer)
        # A leaf that does not begin at a multiple of its item size has to be copied.
        pieces = [
            buffer[start : start + nbytes].clone().view(dtype).view(shape)
            for dtype, shape, start, nbytes in zip(
                layout.dtypes, layout.shapes, layout.offsets, layout.nbytes
            )
        ]
        return consolidate(rebuild(node, packing.join(pieces)))

    def _node(self, form: dict[str, Any], path: KeyPath) -> Node:
        kind = _KINDS.get(form["cls"], form["cls"])
        cls, metadata = node_class(str(kind)), form["cls_metadata"]
        entries: dict[str, Any] = {}
        for name, (value, size, device) in form["non_tensors"].items():
            device = None if device is None else torch.device(device)
            entries[name] = NonTensorData._new(_value_of(value), Size(size), device)
        for name, row in form["leaves"].items():
            if not name.startswith(_JAGGED[1:]):
                entries[name.removeprefix(_JAGGED[0])] = self._leaf(name, row, form["leaves"])
        for name, below in form.items():
            if name in _RESERVED:
                continue
            if below["cls"] == _STACK:
                entries[name] = NonTensorStack._new(_stack_rows(below), None)
            else:
                entries[name] = self._node(below, (*path, name))
        node: Node = cls._from_header(_header_of(kind, metadata), entries)
        self._check_sizes(node, form, path)
        return node

    def _check_sizes(self, node: Node, form: dict[str, Any], path: KeyPath) -> None:
        batch = list(node._batch_size)
        sizes = [(name, row[1]) for name, row in form["leaves"].items() if "<" not in name[:1]]
        sizes += [(name, entry[1]) for name, entry in form["non_tensors"].items()]
        sizes += [(name, list(below._batch_size)) for name, below in _nodes_of(node)]
        for name, size in sizes:
            if node.kind == "dense" and list(size[: len(batch)]) != batch:
                key = short((*path, name))
                _refuse(self._path, f"{key!r} has shape {size} in a batch of {batch}")

    def _leaf(self, name: str, row: list[Any], leaves: dict[str, Any]) -> Tensor:
        """A stand-in; the real leaf is made when all are known."""
        self._rows.append(row)
        if name.startswith(_JAGGED[0]):
            key = name.removeprefix(_JAGGED[0])
            offsets = leaves[_JAGGED[1] + key]
            more = [offsets] + ([leaves[_JAGGED[2] + key]] if _JAGGED[2] + key in leaves else [])
            self._rows += more
            dim = int(offsets[5]) if len(offsets) > 5 else 1
            self._joins.append((self._leaves, 1 + len(more), ("jagged", {"jagged_dim": dim})))
        self._leaves += 1
        return torch.empty(0)

    def _layout_of(self, rows: list[list[Any]]) -> tuple[BufferLayout, bool]:
        dtypes, shapes, offsets, nbytes = [], [], [], []
        aligned = True
        for dtype_text, shape, start, stop, pad, *_ in rows:
            dtype = dtype_named(str(dtype_text).removeprefix("torch."))
            size = Size(shape).numel() * dtype.itemsize
            bad = min([0, *shape]) < 0 or not 0 <= start <= stop <= self._data_nbytes
            if bad or stop - start - pad != size or pad < 0:
                _refuse(self._path, f"a leaf of {dtype} {list(shape)} lies at {start} to {stop}")
            dtypes.append(dtype)
            shapes.append(tuple(shape))
            offsets.append(start)
            nbytes.append(size)
            aligned = aligned and not start % dtype.itemsize
        total = self._data_nbytes
        aligned = aligned and all(not total % dtype.itemsize for dtype in dtypes)
        layout = BufferLayout(tuple(dtypes), tuple(shapes), tuple(offsets), tuple(nbytes), 1, total)
        return layout, aligned


def _nodes_of(node: Node) -> list[tuple[str, Node]]:
    return [(path[0], below) for path, below in nodes_with_path(node) if len(path) == 1]


def _header_of(kind: str, metadata: dict[str, Any]) -> dict[str, Any]:
    if kind == "lazy_stack":
        return {"stack_dim": int(metadata["stack_dim"]), "names": None}
    if kind == "dense":
        names = metadata.get("names")
        return {
            "batch_size": list(metadata["batch_size"]),
            "device": metadata.get("device"),
            "names": list(names) if names and any(names) else None,
        }
    return dict(metadata["header"])


def _value_of(form: Any) -> Any:
    try:
        return decode(form)
    except ValueError:
        return form  # a JSON object of an older file


def _stack_rows(form: dict[str, Any]) -> np.ndarray:
    below = {int(k): v for k, v in form.items() if k not in _RESERVED}
    if below:
        return np.stack([_stack_rows(below[i]) for i in range(len(below))])
    values = form["non_tensors"]
    out = np.empty(len(values), dtype=object)
    for i in range(len(values)):
        out[i] = _value_of(values[str(i)][0])
    return out
