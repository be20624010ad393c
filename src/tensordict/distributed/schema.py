"""The schema of a tensordict: its structure as columns, without its values.

Columns hold one item per *node* (parents before children), per *part* (a plain tensor;
a jagged or sparse leaf is several) or per *value* (a non-tensor entry).  A schema is UTF-8
JSON on the wire and is known by the digest of those bytes afterwards.  Nothing here touches
a tensor or a node, so every rule can be tested alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import Size

from .._keys import short
from .._typing import Path
from ..errors import WireError
from ..storage.values import dtype_name, dtype_named
from .wire import DEFAULT_LIMITS, Limits, schema_digest

TENSOR: Final = "t"
NODE: Final = "n"
VALUE: Final = "v"
COMPOSITE: Final = "c"

FORMATS: Final = {
    "channels_last": torch.channels_last,
    "channels_last_3d": torch.channels_last_3d,
}


@dataclass(frozen=True, slots=True)
class Composite:
    """A leaf made of several plain tensors.

    Attributes:
        kind: name in `composite`'s table.
        first: index of its first part.
        n: number of parts.
        params: plain values that the kind needs to put them together.
    """

    kind: str
    first: int
    n: int
    params: dict[str, Any]


@dataclass(slots=True, eq=False)
class Schema:
    """Structure as columns.  Treat it as immutable: digests and plans are cached with it.

    Attributes:
        kinds, headers, locked, keys, entries: per node; ``entries`` has one letter per key
            (``t`` tensor, ``c`` composite tensor, ``n`` node, ``v`` value).
        dtypes, shapes: per part, in node order.
        composites: the leaves of several parts, in order.
        grad: indices of parts that require grad.
        formats: memory format of the parts that are not row-major.
        ties: part index to the earlier part whose memory it is.
        values: the leaf kind of each value.
        alignment, pack_below: bytes; how the sender packs.
    """

    kinds: list[str] = field(default_factory=list)
    headers: list[dict[str, Any]] = field(default_factory=list)
    locked: list[bool] = field(default_factory=list)
    keys: list[list[str]] = field(default_factory=list)
    entries: list[str] = field(default_factory=list)
    dtypes: list[torch.dtype] = field(default_factory=list)
    shapes: list[Size] = field(default_factory=list)
    composites: list[Composite] = field(default_factory=list)
    grad: list[int] = field(default_factory=list)
    formats: dict[int, str] = field(default_factory=dict)
    ties: dict[int, int] = field(default_factory=dict)
    values: list[str] = field(default_factory=list)
    alignment: int = 64
    pack_below: int = 192 << 10

    @property
    def n_leaves(self) -> int:
        """Number of tensors, a composite counted once."""
        return len(self.dtypes) - sum(c.n - 1 for c in self.composites)


# A column that says which item of a table each row has is text, a letter a row, as long as there
# are enough of them: that is read and written several times faster than a list of integers.
_LETTERS: Final = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"


def encode(schema: Schema) -> bytes:
    """The bytes of a schema; equal schemas have equal bytes."""
    kinds, kind = _intern(schema.kinds)
    headers, header = _intern([_dumps(h) for h in schema.headers])
    dtypes, dtype = _intern(schema.dtypes)
    shapes, shape = _intern(schema.shapes)
    document = {
        "kinds": kinds,
        "kind": kind,
        "headers": [json.loads(h) for h in headers],
        "header": header,
        "locked": "".join("1" if flag else "0" for flag in schema.locked),
        "keys": schema.keys,
        "entries": schema.entries,
        "dtypes": [dtype_name(d) for d in dtypes],
        "dtype": dtype,
        "shapes": [list(s) for s in shapes],
        "shape": shape,
        "composites": [[c.kind, c.first, c.n, c.params] for c in schema.composites],
        "grad": schema.grad,
        "formats": [[i, name] for i, name in schema.formats.items()],
        "ties": [[i, j] for i, j in schema.ties.items()],
        "values": schema.values,
        "alignment": schema.alignment,
        "pack_below": schema.pack_below,
    }
    return _dumps(document).encode()


def _dumps(value: Any) -> str:
    # Escapes keep lone surrogates, which a key may contain, representable.
    return json.dumps(value, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def _intern(column: list[Any]) -> tuple[list[Any], str | list[int]]:
    """The distinct items of a column in order, and for each row which one it has."""
    table = list(dict.fromkeys(column))
    if len(table) <= 1:
        return table, _LETTERS[0] * len(column)
    if len(table) <= len(_LETTERS):
        letters = dict(zip(table, _LETTERS))
        return table, "".join(map(letters.__getitem__, column))
    indices = {value: i for i, value in enumerate(table)}
    return table, [indices[value] for value in column]


def decode(data: bytes, limits: Limits = DEFAULT_LIMITS) -> Schema:
    """The schema in some bytes, with every column checked against the others.

    Raises:
        WireError: for anything that `encode` cannot have made, or whose text, depth or number of
            entries is above the limits; how many bytes it describes is for its packing to say.
    """
    if len(data) > limits.max_schema_nbytes:
        raise WireError(f"a schema of {len(data)} bytes is above {limits.max_schema_nbytes}")
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise WireError(f"the schema is not JSON: {error}") from None
    if type(document) is not dict:
        raise WireError("the schema is not a JSON object")
    try:
        schema = _read(document, limits)
    except WireError:
        raise
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError) as error:
        raise WireError(f"the schema is malformed: {error!r}") from None
    _check_tree(schema, limits)
    _check_parts(schema)
    return schema


def _read(document: dict[str, Any], limits: Limits) -> Schema:
    _need(len(document["keys"]) <= limits.max_entries, "too many nodes")
    kinds = _strings(document["kinds"])
    headers = document["headers"]
    _need(type(headers) is list, "headers is not a list")
    for header in headers:
        _check_header(header)
    dtypes = [dtype_named(name) for name in _strings(document["dtypes"])]
    shapes = [Size(_sizes(s)) for s in document["shapes"]]
    keys = [_strings(names) for names in document["keys"]]
    entries = _strings(document["entries"])
    n = len(document["dtype"])
    _need(n <= limits.max_entries, "too many parts")
    composites = []
    for kind, first, count, params in document["composites"]:
        _need(type(kind) is str and type(params) is dict, "a composite is malformed")
        composites.append(Composite(kind, _index(first, n), _index(count, n + 1), params))
    formats = {_index(i, n): name for i, name in document["formats"]}
    _need(all(name in FORMATS for name in formats.values()), "unknown memory format")
    alignment = _index(document["alignment"], 1 << 16)
    _need(alignment > 0 and alignment & (alignment - 1) == 0, "alignment is no power of two")
    locked = document["locked"]
    _need(type(locked) is str and not locked.strip("01"), "locked is malformed")
    return Schema(
        kinds=_looked_up(kinds, document["kind"]),
        headers=_looked_up(headers, document["header"]),
        locked=[flag == "1" for flag in locked],
        keys=keys,
        entries=entries,
        dtypes=_looked_up(dtypes, document["dtype"]),
        shapes=_looked_up(shapes, document["shape"]),
        composites=composites,
        grad=_indices(document["grad"], n),
        formats=formats,
        ties={_index(i, n): _index(j, n) for i, j in document["ties"]},
        values=_strings(document["values"]),
        alignment=alignment,
        pack_below=_index(document["pack_below"], 1 << 62),
    )


def _need(condition: bool, text: str) -> None:
    if not condition:
        raise WireError(f"the schema is malformed: {text}")


def _strings(column: Any) -> list[str]:
    _need(type(column) is list and {str}.issuperset(map(type, column)), "expected strings")
    return column


def _indices(column: Any, stop: int) -> list[int]:
    # Columns are long: types and bounds are checked by the set and the extremes.
    _need(type(column) is list and {int}.issuperset(map(type, column)), "expected integers")
    _need(
        not column or (min(column) >= 0 and max(column) < stop), f"expected integers below {stop}"
    )
    return column


def _looked_up(table: list[Any], column: Any) -> list[Any]:
    """The column that `_intern` made ``table`` and ``column`` of."""
    if len(table) > len(_LETTERS):
        return [table[i] for i in _indices(column, len(table))]
    _need(type(column) is str, "expected a letter for each row")
    letters = dict(zip(_LETTERS, table))
    _need(letters.keys() >= set(column), "a letter is not in the table")
    if len(table) == 1:
        return table * len(column)
    return list(map(letters.__getitem__, column))


def _index(value: Any, stop: int) -> int:
    _need(type(value) is int and 0 <= value < stop, f"expected an integer below {stop}")
    return value


def _sizes(shape: Any) -> list[int]:
    _need(type(shape) is list and len(shape) <= 64, "a shape is not a short list")
    # torch multiplies sizes in int64, also those beside a zero.
    product = 1
    for size in shape:
        _need(type(size) is int and 0 <= size < 1 << 62, "a size is not a small integer")
        product *= max(size, 1)
    _need(product < 1 << 62, "a shape has too many elements")
    return shape


def _check_header(header: Any) -> None:
    _need(type(header) is dict, "a header is not an object")
    batch = header.get("batch_size")
    if batch is not None:
        _sizes(batch)
    if "header" in header:
        _need(type(header["header"]) is dict, "an inner header is not an object")
        _need("header" not in header["header"], "a header inside a header inside a header")
        _check_header(header["header"])
    device = header.get("device")
    _need(device is None or type(device) is str, "a device is not a string")
    names = header.get("names")
    if names is not None:
        _need(type(names) is list, "names is not a list")
        _need(batch is None or len(names) == len(batch), "names do not fit the batch")
        _need(all(x is None or type(x) is str for x in names), "a name is not a string")


def _check_tree(schema: Schema, limits: Limits) -> None:
    """Every node is reached exactly once from the root, no deeper than allowed."""
    n = len(schema.keys)
    _need(n > 0, "there is no root")
    columns = (schema.kinds, schema.headers, schema.locked, schema.entries)
    _need(all(len(column) == n for column in columns), "the node columns differ in length")
    left = [0] * n  # children of each node that are still to come
    stack: list[int] = []
    counts = dict.fromkeys((TENSOR, VALUE, COMPOSITE), 0)
    for i, (names, letters) in enumerate(zip(schema.keys, schema.entries)):
        _need(len(names) == len(letters), "keys and entries differ in length")
        _need(len(set(names)) == len(names), "a key comes twice")
        while stack and not left[stack[-1]]:
            stack.pop()
        _need(bool(stack) == (i > 0), "a node has no parent")
        if stack:
            left[stack[-1]] -= 1
        left[i] = letters.count(NODE)
        stack.append(i)
        _need(len(stack) <= limits.max_depth, f"deeper than {limits.max_depth}")
        for letter in counts:
            counts[letter] += letters.count(letter)
        _need(not letters.strip("tnvc"), "unknown letter in entries")
    _need(not any(left), "a node is missing")
    _check_batches(schema)
    _need(counts[VALUE] == len(schema.values), "values and entries differ")
    _need(counts[COMPOSITE] == len(schema.composites), "composites and entries differ")
    parts = counts[TENSOR] + sum(c.n for c in schema.composites)
    _need(parts == len(schema.dtypes) == len(schema.shapes), "parts and entries differ")


def _check_batches(schema: Schema) -> None:
    """Tensors and nodes start with the batch size of the node that holds them."""
    part = whole = 0
    stack: list[tuple[int, list[int]]] = []  # children to come, batch size
    for header, letters in zip(schema.headers, schema.entries):
        while stack and not stack[-1][0]:
            stack.pop()
        batch = header.get("batch_size", header.get("header", {}).get("batch_size")) or []
        if stack:
            count, above = stack.pop()
            stack.append((count - 1, above))
            _need(
                batch[: len(above)] == above or "batch_size" not in header,
                f"a node of batch size {batch} in one of {above}",
            )
        stack.append((letters.count(NODE), batch))
        n, wholes = letters.count(TENSOR), letters.count(COMPOSITE)
        if batch and not wholes:
            for shape in set(schema.shapes[part : part + n]):
                _need(
                    list(shape[: len(batch)]) == batch,
                    f"a leaf of shape {list(shape)} in a node of batch size {batch}",
                )
        part += n + sum(c.n for c in schema.composites[whole : whole + wholes])
        whole += wholes


def _check_parts(schema: Schema) -> None:
    at = 0
    for composite in schema.composites:
        _need(composite.first >= at and composite.n > 0, "composites overlap")
        at = composite.first + composite.n
    _need(at <= len(schema.dtypes), "a composite is too long")
    for i, j in schema.ties.items():
        _need(j < i and j not in schema.ties, "a tie does not point back to a part")
        _need(schema.dtypes[i] == schema.dtypes[j], "tied parts differ in dtype")
        _need(schema.shapes[i] == schema.shapes[j], "tied parts differ in shape")
    for i, name in schema.formats.items():
        _need(len(schema.shapes[i]) == (4 if name == "channels_last" else 5), "format and shape")
    floating = [schema.dtypes[i] for i in schema.grad]
    _need(all(d.is_floating_point or d.is_complex for d in floating), "grad of an integer")


def digest_of(schema: Schema) -> tuple[bytes, bytes]:
    """The bytes of a schema and their digest."""
    data = encode(schema)
    return data, schema_digest(data)


@dataclass(frozen=True, slots=True)
class Place:
    """Where an entry of a schema is.

    Attributes:
        node: index of the node that holds it (of the node itself, for a node).
        letter: what it is.
        first: index of its first part or value; -1 for a node.
    """

    node: int
    letter: str
    first: int


def places(schema: Schema) -> Iterator[tuple[Path, Place]]:
    """Every node and entry with its path: a node before what it holds."""
    part = value = composite = 0
    pending: list[tuple[Path, Iterator[str]]] = []  # node paths, by what is still to come
    for i, (names, letters) in enumerate(zip(schema.keys, schema.entries)):
        path: Path = ()
        while pending:
            prefix, rest = pending[-1]
            name = next(rest, None)
            if name is not None:
                path = (*prefix, name)
                break
            pending.pop()
        yield path, Place(i, NODE, -1)
        for name, letter in zip(names, letters):
            here = (*path, name)
            if letter == TENSOR:
                yield here, Place(i, letter, part)
                part += 1
            elif letter == VALUE:
                yield here, Place(i, letter, value)
                value += 1
            elif letter == COMPOSITE:
                yield here, Place(i, letter, part)
                part += schema.composites[composite].n
                composite += 1
        if NODE in letters:
            children = [name for name, letter in zip(names, letters) if letter == NODE]
            pending.append((path, iter(children)))


def differences(
    sent: Schema, here: Schema, left: str = "at the sender", right: str = "here"
) -> list[tuple[Any, str]]:
    """Every path at which two structures differ, with what each side has there.

    The order of keys, devices, memory formats, gradients and names do not count.

    >>> differences(Schema(["dense"], [{}], [False], [["a"]], ["v"], values=["non_tensor"]),
    ...             Schema(["dense"], [{}], [False], [[]], [""]))
    [('a', 'only at the sender: non-tensor value')]
    """
    mine, theirs = _descriptions(sent), _descriptions(here)
    out: list[tuple[Any, str]] = []
    for path, text in mine.items():
        other = theirs.get(path)
        if other is None:
            out.append((_shown(path), f"only {left}: {text}"))
        elif other != text:
            out.append((_shown(path), f"{text} {left}, {other} {right}"))
    out += [
        (_shown(path), f"only {right}: {text}") for path, text in theirs.items() if path not in mine
    ]
    return out


def unlocked(schema: Schema) -> Schema:
    """The same structure without its locks, which do not count where a tree is consolidated."""
    return replace(schema, locked=[False] * len(schema.locked))


def tie_differences(a: Schema, b: Schema, left: str, right: str) -> list[tuple[Any, str]]:
    """Every path that shares its memory with another leaf in one structure only."""
    mine, theirs = _tied(a), _tied(b)
    rows = [(_shown(p), f"the memory of {q!r} {left} only") for p, q in mine.items()]
    rows += [(_shown(p), f"the memory of {q!r} {right} only") for p, q in theirs.items()]
    same = {_shown(p) for p in mine.keys() & theirs.keys()}
    return [row for row in rows if row[0] not in same]


def _tied(schema: Schema) -> dict[Path, Path]:
    if not schema.ties:
        return {}
    where = {place.first: path for path, place in places(schema) if place.letter == TENSOR}
    groups: dict[int, list[Path]] = {}
    for i, j in schema.ties.items():
        groups.setdefault(j, [where[j]]).append(where[i])
    # The order of keys does not count: the first path by name stands for the memory.
    return {path: min(paths) for paths in groups.values() for path in sorted(paths)[1:]}


def _shown(path: Path) -> Any:
    return short(path) if path else ()


# What of a header is compared by itself, or does not count.
_APART: Final = frozenset({"batch_size", "device", "names", "header", "training"})


def _structure(header: dict[str, Any]) -> dict[str, Any]:
    """What of a header counts beside its batch size; a typed view has a header inside."""
    out = {k: v for k, v in header.items() if k not in _APART}
    if type(header.get("header")) is dict:
        inner = header["header"]
        out["over"] = {"batch_size": inner.get("batch_size"), **_structure(inner)}
    return out


# Values that stand for each other: one for all rows, or one for each.
_PLAIN_VALUES: Final = frozenset({"non_tensor", "non_tensor_stack"})


def _descriptions(schema: Schema) -> dict[Path, str]:
    composites = {c.first: c for c in schema.composites}
    out: dict[Path, str] = {}
    for path, place in places(schema):
        if place.letter == NODE:
            header = schema.headers[place.node]
            text = f"{schema.kinds[place.node]} tensordict"
            if "batch_size" in header:
                text += f" of batch size {header['batch_size']}"
            extra = _structure(header)
            if extra:
                text += f" {_dumps(extra)}"
            if schema.locked[place.node]:
                text += ", locked"
        elif place.letter == VALUE:
            kind = schema.values[place.first]
            text = "non-tensor value" if kind in _PLAIN_VALUES else f"value of kind {kind[:40]!r}"
        else:
            i = place.first
            text = f"{dtype_name(schema.dtypes[i])} {list(schema.shapes[i])}"
            if place.letter == COMPOSITE:
                c = composites[i]
                parts = ", ".join(
                    f"{dtype_name(schema.dtypes[j])} {list(schema.shapes[j])}"
                    for j in range(i, i + c.n)
                )
                text = f"{c.kind} {_dumps(c.params)} ({parts})"
        out[path] = text
    return out
