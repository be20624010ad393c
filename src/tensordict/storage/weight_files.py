"""Weights on disk as one safetensors file or a sharded set with an index, and writing them anew.

An index (``model.safetensors.index.json``) maps each tensor to the file that holds it.  It is
checked against the headers both ways, and names files beside itself only.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch

from ..errors import EntryTypeError, FileFormatError
from .safetensors import DTYPES, MAX_HEADER_NBYTES, Entry, Header, read_header

INDEX_SUFFIX = ".safetensors.index.json"

# The order in which the library writes dtypes, the last first: wide ones before narrow ones, so
# that each tensor is aligned.
_ORDER = [
    "BOOL",
    "F4",
    "F6_E2M3",
    "F6_E3M2",
    "U8",
    "I8",
    "F8_E5M2",
    "F8_E4M3",
    "F8_E8M0",
    "F8_E4M3FNUZ",
    "F8_E5M2FNUZ",
    "I16",
    "U16",
    "F16",
    "BF16",
    "I32",
    "U32",
    "F32",
    "C64",
    "F64",
    "I64",
    "U64",
]
_CODES = {dtype: code for code, (dtype, _) in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """A safetensors file, or a sharded set of them.

    Attributes:
        headers: one per file, by file name.
        index: the index of a set; None for a single file.
        index_metadata: the free metadata of the index.
    """

    headers: Mapping[str, Header]
    index: Path | None = None
    index_metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        """What to call it: the file, or the index."""
        return next(iter(self.headers.values())).path if self.index is None else self.index

    def entries(self) -> Iterator[Entry]:
        """The tensors of all files."""
        for header in self.headers.values():
            yield from header.entries

    def stand_ins(self) -> dict[str, torch.Tensor]:
        """As `Header.stand_ins`, of all files."""
        return {k: x for header in self.headers.values() for k, x in header.stand_ins().items()}


def read_weights(path: str | os.PathLike[str]) -> WeightFiles:
    """Read the headers of a safetensors file, of the set of an index, or of a folder of either.

    Raises:
        FileNotFoundError: when something is not there.
        FileFormatError: when a header or the index is wrong, or they do not agree.
    """
    path = Path(path)
    if path.is_dir():
        path = _weights_in(path)
    if path.name.endswith(".json"):
        return _read_set(path)
    return WeightFiles({path.name: read_header(path)})


def _weights_in(folder: Path) -> Path:
    for pattern in (f"*{INDEX_SUFFIX}", "*.safetensors"):
        found = sorted(folder.glob(pattern))
        if len(found) == 1:
            return found[0]
        if found:
            names = ", ".join(x.name for x in found[:4])
            raise FileFormatError(f"Cannot tell which file of {folder} is meant: {names}. Name it.")
    raise FileNotFoundError(2, "There is no safetensors file in the folder", str(folder))


def _read_set(path: Path) -> WeightFiles:
    data = _read_json(path)
    where = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(where, dict) or not where:
        _refuse(path, "it has no weight_map")
    for name, file in where.items():
        plain = isinstance(file, str) and Path(file).name == file and file.endswith(".safetensors")
        if not plain:
            _refuse(
                path, f"it puts {name[:80]!r} into {str(file)[:80]!r}, which is no file beside it"
            )
    headers = {file: read_header(path.parent / file) for file in sorted(set(where.values()))}
    held = {(e.name, file) for file, header in headers.items() for e in header.entries}
    named = set(where.items())
    for pairs, text in ((named - held, "is not in"), (held - named, "is in the index not under")):
        if pairs:
            name, file = min(pairs)
            _refuse(
                path, f"{len(pairs)} tensors differ from the files: {name[:80]!r} {text} {file}"
            )
    metadata = data.get("metadata")
    return WeightFiles(headers, path, metadata if isinstance(metadata, dict) else {})


def _read_json(path: Path) -> Any:
    if path.stat().st_size > MAX_HEADER_NBYTES:
        _refuse(path, f"it has more than {MAX_HEADER_NBYTES} bytes")
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as err:
        _refuse(path, f"it is not valid JSON: {str(err)[:80]}")


def _refuse(path: Path, reason: str) -> NoReturn:
    raise FileFormatError(f"Cannot read {path} as an index of safetensors files: {reason}.")


# --- writing -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NewFile:
    """A safetensors file to be written from front to back.

    Attributes:
        head: the size field and the header.
        names: the tensors in the order of their bytes.
        total_nbytes: the size of the whole file.
    """

    head: bytes
    names: tuple[str, ...]
    total_nbytes: int


def new_file(
    tensors: Sequence[tuple[str, torch.dtype, tuple[int, ...]]],
    metadata: Mapping[str, str],
) -> NewFile:
    """Lay out a safetensors file, byte for byte as the library does.

    Args:
        tensors: name, dtype and shape of each.
        metadata: the free strings of the header.

    Raises:
        EntryTypeError: for a dtype that the format has no name for.

    >>> new_file([("b", torch.int8, (3,)), ("a", torch.float32, (2,))], {}).names
    ('a', 'b')
    """
    rows = []
    for name, dtype, shape in tensors:
        code = _CODES.get(dtype)
        if code is None:
            raise EntryTypeError(f"Cannot write {name!r}: safetensors files have no {dtype}.")
        rows.append((_ORDER.index(code), name, code, dtype, shape))
    rows.sort(key=lambda row: (-row[0], row[1]))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for _, name, code, dtype, shape in rows:
        size = torch.Size(shape).numel() * dtype.itemsize
        stored = [*shape[:-1], shape[-1] * 2] if code == "F4" else list(shape)
        header[name] = {"dtype": code, "shape": stored, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    return NewFile(head, tuple(row[1] for row in rows), len(head) + at)
