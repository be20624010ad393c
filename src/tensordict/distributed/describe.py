"""From a tensordict to its schema and parts, and back.

The walk is the hot part of a steady exchange: it reads each attribute of all leaves in one
comprehension, and compares the columns with those of a known schema instead of encoding
and hashing them again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.nn import Buffer, Parameter

from .._typing import Path
from ..core import registry
from ..core.leaf import Leaf, NonTensorData, NonTensorStack
from ..core.lock import lock
from ..core.node import Node
from ..core.traverse import parts as parts_of
from ..core.unbatched import UnbatchedTensor
from ..errors import EntryTypeError, TensorDictError, UnsupportedLeaf, WireError
from ..storage import values as codec
from ..storage.buffer import why_not_bytes
from . import composite
from .packing import PACK_BELOW
from .schema import COMPOSITE, FORMATS, NODE, TENSOR, VALUE, Composite, Schema, places

_PLAIN: Final = {Tensor, Parameter, Buffer}


@dataclass(slots=True)
class Described:
    """A tensordict taken apart.

    Attributes:
        schema: its structure.
        parts: one plain tensor per part of the schema; they share its memory, except
            for composite leaves of kinds that have to be computed.
        values: its non-tensor leaves.
        sites: the node and the name of each value.
        whole_sites: the node and the name of each composite leaf.
        pointers: the address of each part.
        recalled: whether it is what was seen the last time, as far as that was looked at.
        shared: whether some parts start at one address; not looked at where it is recalled.
    """

    schema: Schema
    parts: list[Tensor]
    values: list[Leaf]
    sites: list[tuple[Node, str]]
    whole_sites: list[tuple[Node, str]]
    pointers: list[int]
    recalled: bool = False
    shared: bool = False


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A structure, and where the parts of the last tensordict that had it lay.

    Attributes:
        schema, pointers: the structure, and the address of each part.
        views: how some parts read their memory: those that start where another does (which makes
            ties), and those that may have a memory format.
        apart: the parts whose shapes `packing.Stage.pack_alike` does not look at; None when it
            cannot tell whether anything else has changed.
    """

    schema: Schema
    pointers: list[int]
    views: list[tuple[int, Any]]
    apart: Sequence[int] | None = None

    @staticmethod
    def of(described: Described, apart: Sequence[int] | None) -> Snapshot:
        """What is remembered of a tensordict, beside the shapes of its parts."""
        parts, pointers = described.parts, described.pointers
        dims = list(map(len, described.schema.shapes))
        watched = []
        if 4 in dims or 5 in dims:
            watched = [i for i, n in enumerate(dims) if n in (4, 5)]
        if described.shared:
            often = Counter(pointers)
            del often[0]  # of parts without elements
            watched += [i for i, at in enumerate(pointers) if often[at] > 1]
        views = [(i, _view_of(parts[i])) for i in watched]
        return Snapshot(described.schema, pointers, views, apart)


def same_shapes(seen: Snapshot, parts: Sequence[Tensor]) -> bool:
    """Whether all parts have the shapes that were seen."""
    # A list of shapes would be a list of new containers, which start garbage collections.
    return False not in [x.shape == shape for x, shape in zip(parts, seen.schema.shapes)]


def same_parts(seen: Snapshot, parts: Sequence[Tensor]) -> bool:
    """Whether all parts have the shapes that were seen, and the same ones require grad."""
    return same_shapes(seen, parts) and _grads(parts) == seen.schema.grad


def same_apart(seen: Snapshot, parts: Sequence[Tensor]) -> bool:
    """`same_parts` for who calls `packing.Stage.pack_alike` next: what that looks at is left out."""
    if seen.apart is None:
        return same_parts(seen, parts)
    shapes, grad = seen.schema.shapes, seen.schema.grad
    alone = [parts[i] for i in seen.apart]
    if _grads(parts if grad else alone) != grad:
        return False
    return all(x.shape == shapes[i] for i, x in zip(seen.apart, alone))


def _grads(parts: Sequence[Tensor]) -> list[int]:
    """The indices of the parts that require grad."""
    flags = [x.requires_grad for x in parts]
    return [i for i, flag in enumerate(flags) if flag] if True in flags else []


def describe(
    node: Node,
    *,
    alignment: int = 64,
    pack_below: int = PACK_BELOW,
    bundle: int | None = None,
    near: Callable[[Schema, Sequence[Tensor]], Snapshot | None] | None = None,
    still: Callable[[Snapshot, Sequence[Tensor]], bool] = same_parts,
) -> Described:
    """Take a tensordict apart.

    Args:
        node: the tensordict.
        alignment: of the groups of a packed message, in bytes.
        pack_below: parts of fewer bytes are packed.
        bundle: number of tensordicts that ``node`` was only made to carry.
        near: finds what was seen at the last tensordict of a structure.  When this one has
            the same keys, dtypes, shapes and addresses, the rest is the same too.
        still: what is looked at beside keys, dtypes and addresses to tell that.

    Raises:
        UnsupportedLeaf: a leaf that cannot travel, with its path.

    >>> from tensordict import TensorDict
    >>> d = describe(TensorDict({"a": torch.zeros(3), "n": {"b": torch.ones(2)}}))
    >>> d.schema.keys, d.schema.entries, [tuple(p.shape) for p in d.parts]
    ([['a', 'n'], ['b']], ['tn', 't'], [(3,), (2,)])
    """
    _check_given(node, bundle)
    new = partial(Schema, alignment=alignment, pack_below=pack_below)
    out = _walk(node, new(), bundle, careful=False)
    parts = out.parts
    out.schema.dtypes = [x.dtype for x in parts]
    try:
        out.pointers = [x.data_ptr() for x in parts]
        seen = None if near is None or not parts else near(out.schema, parts)
        if seen is not None and _unchanged(seen, out) and still(seen, parts):
            out.schema, out.recalled = seen.schema, True
            return out
        _add_columns(out.schema, parts)
    except RuntimeError:
        # Sparse and nested leaves are plain tensors by class, but have no one memory or no one
        # shape: look at each entry.
        out = _walk(node, new(), bundle, careful=True)
        out.schema.dtypes = [x.dtype for x in out.parts]
        _add_columns(out.schema, out.parts)
    _add_memory(out)
    return out


def _check_given(node: Any, bundle: int | None) -> None:
    given = [node] if bundle is None else [part for _, part in node._items()]
    for part in given:
        if not isinstance(part, Node):
            raise EntryTypeError(
                f"Cannot exchange a value of type {type(part).__name__}. Expected a tensordict, or "
                "for send and recv a list of tensordicts."
            )


def _walk(node: Node, schema: Schema, bundle: int | None, *, careful: bool) -> Described:
    """The keys, letters and parts of a tree, nodes depth first.

    This does the work of `core.traverse.nodes_with_path` without its test of every entry: the
    classes of all entries of a node are looked at in one call.
    """
    out = Described(schema, [], [], [], [], [])
    parts = out.parts
    coming: list[tuple[Path, Node]] = [((), node)]
    while coming:
        path, child = coming.pop()
        schema.kinds.append(child.kind)
        schema.headers.append(child._header())
        schema.locked.append(child._lock is not None)
        flat = None if careful else child._flat_tensors()
        if flat is not None:
            schema.keys.append(list(flat))
            schema.entries.append(TENSOR * len(flat))
            parts.extend(flat.values())
            continue
        items = parts_of(child)
        if child._members() is None:
            schema.keys.append(list(child._names()))
        else:
            schema.keys.append([name for name, _ in items])
        entries = [entry for _, entry in items]
        if not careful and _PLAIN.issuperset(map(type, entries)):
            schema.entries.append(TENSOR * len(entries))
            parts.extend(entries)  # type: ignore[arg-type]
            continue
        letters = [_add_entry(out, child, name, entry, path) for name, entry in items]
        schema.entries.append("".join(letters))
        inner = [(name, entry) for name, entry in items if isinstance(entry, Node)]
        coming += [((*path, name), entry) for name, entry in reversed(inner)]
    if bundle is not None:
        schema.headers[0]["bundle"] = bundle
    return out


def _unchanged(seen: Snapshot, out: Described) -> bool:
    return (
        seen.pointers == out.pointers
        and _same_nodes(seen.schema, out.schema)
        and all(_view_of(out.parts[i]) == view for i, view in seen.views)
    )


def _view_of(part: Tensor) -> Any:
    return part.stride(), part.is_conj(), part.is_neg()


def _add_entry(out: Described, node: Node, name: str, entry: Any, path: tuple[str, ...]) -> str:
    if isinstance(entry, Node):
        return NODE
    if isinstance(entry, Leaf):
        out.values.append(entry)
        out.sites.append((node, name))
        out.schema.values.append(entry.kind)
        return VALUE
    whole = composite.split(entry, (*path, name))
    if whole is None:
        out.parts.append(_plain(entry, (*path, name)))
        return TENSOR
    kind, parts, params = whole
    out.schema.composites.append(Composite(kind, len(out.parts), len(parts), params))
    out.parts.extend(parts)
    out.whole_sites.append((node, name))
    return COMPOSITE


def _plain(leaf: Tensor, path: tuple[str, ...]) -> Tensor:
    kind = type(leaf)
    if kind in _PLAIN:
        return leaf
    if kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
        raise UnsupportedLeaf(path, f"a tensor of class {kind.__name__}")
    with torch._C.DisableTorchFunctionSubclass():
        return leaf.as_subclass(Tensor)


def _add_columns(schema: Schema, parts: list[Tensor]) -> None:
    schema.shapes = [x.shape for x in parts]
    schema.grad = _grads(parts)


def _add_memory(out: Described) -> None:
    """The columns that depend on strides and addresses."""
    schema, parts = out.schema, out.parts
    if not _QUANTIZED.isdisjoint(schema.dtypes):
        _refuse(schema, parts)
    if False in [x.is_contiguous() for x in parts]:
        schema.formats = _formats(parts)
    if not out.pointers:
        out.pointers = [x.data_ptr() for x in parts]
    distinct = set(out.pointers)
    if 0 in distinct:
        _refuse(schema, parts)
    out.shared = len(distinct) < len(out.pointers)
    if out.shared:
        schema.ties = _ties(parts, out.pointers)


_QUANTIZED: Final = {torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4}


def _refuse(schema: Schema, parts: list[Tensor]) -> None:
    paths = {place.first: path for path, place in places(schema) if place.letter == TENSOR}
    for i, part in enumerate(parts):
        reason = "a tensor on the meta device" if part.is_meta else why_not_bytes(part)
        if reason:
            raise UnsupportedLeaf(paths.get(i, ()), reason)


def _formats(parts: list[Tensor]) -> dict[int, str]:
    out = {}
    for i, part in enumerate(parts):
        if part.dim() in (4, 5) and not part.is_contiguous():
            name = "channels_last" if part.dim() == 4 else "channels_last_3d"
            if part.is_contiguous(memory_format=FORMATS[name]):
                out[i] = name
    return out


def _ties(parts: list[Tensor], pointers: list[int]) -> dict[int, int]:
    first: dict[Any, int] = {}
    out = {}
    for i, (part, pointer) in enumerate(zip(parts, pointers)):
        if not pointer or not part.numel():  # nothing to share, or no memory (meta)
            continue
        key = (pointer, part.dtype, part.shape, _view_of(part))
        j = first.setdefault(key, i)
        if j != i:
            out[i] = j
    return out


def _same_entries(a: Schema, b: Schema) -> bool:
    return (
        a.keys == b.keys
        and a.entries == b.entries
        and a.dtypes == b.dtypes
        and a.headers == b.headers
        and a.kinds == b.kinds
        and a.values == b.values
        and a.composites == b.composites
    )


def _same_nodes(a: Schema, b: Schema) -> bool:
    return (
        _same_entries(a, b)
        and a.locked == b.locked
        and a.alignment == b.alignment
        and a.pack_below == b.pack_below
    )


def equal(a: Schema, b: Schema) -> bool:
    """Whether two schemas have the same bytes, without making them."""
    return a is b or (
        _same_nodes(a, b)
        and a.shapes == b.shapes
        and a.grad == b.grad
        and a.formats == b.formats
        and a.ties == b.ties
    )


def alike(a: Schema, b: Schema) -> bool:
    """Whether two schemas have equal parts and values in one order; only locks may differ.

    False says nothing: `schema.differences` and `receive.reordered` look at each path.
    """
    return a is b or (_same_entries(a, b) and a.shapes == b.shapes and a.ties == b.ties)


def encode_values(described: Described, paths: Sequence[Any]) -> list[Any]:
    """The JSON forms of the values of a tensordict, with their batch sizes.

    Raises:
        UnsupportedLeaf: a value without an encoding.
    """
    out = []
    for leaf, path in zip(described.values, paths):
        if isinstance(leaf, NonTensorStack):
            data: Any = [codec.encode(v, path) for v in leaf._rows().reshape(-1)]
        elif isinstance(leaf, NonTensorData):
            data = codec.encode(leaf.data, path)
        elif isinstance(leaf, UnbatchedTensor):
            data = codec.encode(leaf.data.detach(), path)
        else:
            plain = leaf._encoded()
            if plain is None:
                raise UnsupportedLeaf(path, f"a leaf of kind {leaf.kind!r}")
            data = codec.encode(plain, path)
        out.append([list(leaf.batch_size), data])
    return out


def decode_values(schema: Schema, forms: Any) -> list[Leaf]:
    """The leaves that `encode_values` stood for.

    Raises:
        WireError: on forms that it cannot have made.
    """
    try:
        if type(forms) is not list or len(forms) != len(schema.values):
            raise ValueError(f"expected {len(schema.values)} values")
        return [_value(kind, *form) for kind, form in zip(schema.values, forms)]
    except (ValueError, TypeError, RuntimeError, TensorDictError) as error:
        raise WireError(f"the values are malformed: {error}") from None


def _value(kind: str, batch: Any, form: Any) -> Leaf:
    size = torch.Size(batch)
    if any(n < 0 for n in size):
        raise ValueError("a batch size is negative")
    cls = registry.leaf_class(kind)
    if issubclass(cls, NonTensorStack):
        if type(form) is not list or len(form) != size.numel():
            raise ValueError("a stack of values does not fit its batch size")
        rows = np.empty(len(form), dtype=object)
        for i, part in enumerate(form):
            rows[i] = codec.decode(part)
        return cls._new(rows.reshape(tuple(size)), None)
    if issubclass(cls, UnbatchedTensor):
        value = codec.decode(form)
        if not isinstance(value, Tensor):
            raise ValueError("an unbatched tensor is none")
        return cls._new(value, size)
    if not issubclass(cls, NonTensorData):
        made: Leaf = cls._from_encoded(codec.decode(form))
        return made
    return cls._new(codec.decode(form), size, None)


def build(
    schema: Schema,
    parts: Sequence[Tensor],
    values: Sequence[Leaf],
    device: torch.device | None,
    *,
    locks: bool = True,
    mesh: Any = None,
) -> Node:
    """A tensordict from its schema, parts and values.

    Args:
        schema: the structure.
        parts: one plain tensor per part.
        values: one leaf per value.
        device: what nodes that had a device report.
        locks: whether nodes that were locked are locked again.
        mesh: the device mesh of the shards among the leaves.

    Raises:
        WireError: a node of a kind that is not known here, or a header it cannot read.
    """
    nodes: list[Node | None] = [None] * len(schema.keys)
    wholes = [
        composite.join(c.kind, parts[c.first : c.first + c.n], c.params, mesh)
        for c in schema.composites
    ]
    starts = _starts(schema)
    for i in range(len(nodes) - 1, -1, -1):
        names, letters = schema.keys[i], schema.entries[i]
        part, value, whole, children = starts[i]
        if letters == TENSOR * len(letters):
            entries: dict[str, Any] = dict(zip(names, parts[part : part + len(names)]))
        else:
            entries = {}
            sources = {TENSOR: part, VALUE: value, COMPOSITE: whole, NODE: 0}
            for name, letter in zip(names, letters):
                at = sources[letter]
                sources[letter] += 1
                if letter == TENSOR:
                    entries[name] = parts[at]
                elif letter == VALUE:
                    entries[name] = values[at]
                elif letter == COMPOSITE:
                    entries[name] = wholes[at]
                    sources[TENSOR] += schema.composites[at].n
                else:
                    entries[name] = nodes[children[at]]
        header = _placed(schema.headers[i], device)
        try:
            nodes[i] = registry.node_class(schema.kinds[i])._from_header(header, entries)
        except Exception as error:  # whatever a kind of node thinks of a foreign header
            raise WireError(f"node {i} cannot be made: {error}") from None
    if locks:
        for node, locked in zip(nodes, schema.locked):
            if locked:
                lock(node)  # type: ignore[arg-type]
    root = nodes[0]
    assert root is not None
    return root


def _placed(header: dict[str, Any], device: torch.device | None) -> dict[str, Any]:
    """A header for leaves that came to lie on ``device``; that of a view has another inside."""
    if header.get("device") is not None:
        header = {**header, "device": None if device is None else str(device)}
    inner = header.get("header")
    return header if inner is None else {**header, "header": _placed(inner, device)}


def _starts(schema: Schema) -> list[tuple[int, int, int, list[int]]]:
    """Per node: its first part, value and composite, and the indices of its children."""
    out: list[tuple[int, int, int, list[int]]] = []
    part = value = whole = 0
    stack: list[int] = []
    for i, letters in enumerate(schema.entries):
        while stack and len(out[stack[-1]][3]) == schema.entries[stack[-1]].count(NODE):
            stack.pop()
        if stack:
            out[stack[-1]][3].append(i)
        out.append((part, value, whole, []))
        stack.append(i)
        n = letters.count(COMPOSITE)
        part += letters.count(TENSOR) + sum(c.n for c in schema.composites[whole : whole + n])
        value += letters.count(VALUE)
        whole += n
    return out
