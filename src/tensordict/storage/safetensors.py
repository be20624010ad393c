"""Safetensors files: the header alone, and the tensors through the ``safetensors`` library.

A file is 8 bytes (little endian: the header's size), a JSON header in UTF-8 that gives each
tensor's dtype, shape and byte range, and the data.  `read_header` reads the first two only and
believes nothing: whatever the header claims is checked against the file's size.
Format: https://huggingface.co/docs/safetensors (version 0.8 of the library).
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..errors import EntryTypeError, FileFormatError
from .buffer import why_not_bytes

MAX_HEADER_NBYTES = 100_000_000  # the library's own limit
_MAX_NBYTES = 2**63 - 1

# name in the file -> (dtype, elements of the file's shape that one torch element holds)
DTYPES: dict[str, tuple[torch.dtype, int]] = {
    "BOOL": (torch.bool, 1),
    "U8": (torch.uint8, 1),
    "I8": (torch.int8, 1),
    "F8_E4M3": (torch.float8_e4m3fn, 1),
    "F8_E4M3FNUZ": (torch.float8_e4m3fnuz, 1),
    "F8_E5M2": (torch.float8_e5m2, 1),
    "F8_E5M2FNUZ": (torch.float8_e5m2fnuz, 1),
    "F8_E8M0": (torch.float8_e8m0fnu, 1),
    "F4": (torch.float4_e2m1fn_x2, 2),
    "I16": (torch.int16, 1),
    "U16": (torch.uint16, 1),
    "F16": (torch.float16, 1),
    "BF16": (torch.bfloat16, 1),
    "I32": (torch.int32, 1),
    "U32": (torch.uint32, 1),
    "F32": (torch.float32, 1),
    "I64": (torch.int64, 1),
    "U64": (torch.uint64, 1),
    "F64": (torch.float64, 1),
    "C64": (torch.complex64, 1),
}
_NAMES = frozenset(dtype for dtype, _ in DTYPES.values())


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file: its name, what it is, and its bytes ``[start, stop)`` in the file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """The bytes of the tensor."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Header:
    """What a safetensors file says about itself, checked.

    Attributes:
        path: the file.
        entries: one per tensor, in the order of their bytes.
        metadata: the free ``__metadata__`` strings.
        file_nbytes: the size of the file.
    """

    path: Path
    entries: tuple[Entry, ...]
    metadata: Mapping[str, str] = field(default_factory=dict)
    file_nbytes: int = 0

    def meta_tensors(self) -> dict[str, Tensor]:
        """The tensors of the file on the meta device, by name."""
        return {e.name: torch.empty(e.shape, dtype=e.dtype, device="meta") for e in self.entries}

    def stand_ins(self) -> dict[str, Tensor]:
        """Tensors on the CPU of the dtypes and shapes of the file, one element of memory each.

        A plan made of them is that of the loaded file; their values mean nothing.
        """
        return {e.name: torch.empty((), dtype=e.dtype).expand(e.shape) for e in self.entries}


def read_header(path: str | os.PathLike[str]) -> Header:
    """Read and check the header of a safetensors file; the data is never read.

    Raises:
        FileNotFoundError, PermissionError: as ``open`` does.
        FileFormatError: when the file is not a regular file, is cut short, or when anything in
            its header is not what the format allows; the message gives the reason.
    """
    path = Path(path)
    # A pipe would block `open` for ever, and a device has no size to check against.
    if not stat.S_ISREG(os.stat(path).st_mode):
        _refuse(path, "it is not a regular file")
    with open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        first = file.read(8)
        if len(first) < 8:
            _refuse(path, f"it has {size} bytes, and a header needs 8 at least")
        n = int.from_bytes(first, "little")
        if n > min(MAX_HEADER_NBYTES, size - 8):
            _refuse(path, _size_lie(first, n, size))
        text = _read_exactly(file, n, path)
    entries, metadata = _parse(text, size - 8 - n, path)
    base = 8 + n
    placed = tuple(Entry(e.name, e.dtype, e.shape, e.start + base, e.stop + base) for e in entries)
    return Header(path, placed, metadata, size)


def _read_exactly(file: Any, n: int, path: Path) -> bytes:
    parts = []
    while n:
        part = file.read(n)
        if not part:
            _refuse(path, "it was cut short while it was read")
        parts.append(part)
        n -= len(part)
    return b"".join(parts)


def _size_lie(first: bytes, n: int, size: int) -> str:
    if first.startswith(b"version "):
        return "it looks like a git-lfs pointer. Fetch the file itself (git lfs pull)"
    if first.startswith(b"PK"):
        return "it looks like a zip archive (a torch.save file?)"
    if n > MAX_HEADER_NBYTES:
        return f"its header claims {n} bytes, and {MAX_HEADER_NBYTES} are allowed"
    return f"its header claims {n} bytes, and the file has {size - 8} after the size field"


def _refuse(path: Path, reason: str) -> NoReturn:
    raise FileFormatError(f"Cannot read {path} as a safetensors file: {reason}.")


def _parse(text: bytes, data_nbytes: int, path: Path) -> tuple[list[Entry], dict[str, str]]:
    """The entries, with byte ranges relative to the data, and the metadata."""
    if not text.startswith(b"{"):
        _refuse(path, "its header does not begin with '{'")
    try:
        header = json.loads(
            text.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant
        )
    except UnicodeDecodeError as err:
        _refuse(path, f"its header is not UTF-8 (byte {8 + err.start})")
    except RecursionError:
        _refuse(path, "its header is nested too deeply")
    except ValueError as err:
        _refuse(path, f"its header is not valid JSON: {_short(str(err))}")
    metadata = _metadata_of(header.pop("__metadata__", None), path)
    entries = [_entry_of(name, value, path) for name, value in header.items()]
    entries.sort(key=lambda e: (e.start, e.stop))
    at = 0
    for e in entries:
        if e.start != at:
            kind = "overlaps the tensor before it" if e.start < at else "leaves a hole before it"
            _refuse(path, f"{_short(e.name)} begins at byte {e.start} of the data and {kind}")
        at = e.stop
    if at > data_nbytes:
        _refuse(path, f"it is cut short: its tensors take {at} bytes, and it has {data_nbytes}")
    if at < data_nbytes:
        _refuse(path, f"{data_nbytes - at} of its last bytes belong to no tensor")
    return entries, metadata


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) < len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {_short(twice)} stands twice")
    return out


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")


def _metadata_of(value: Any, path: Path) -> dict[str, str]:
    if value is None:
        return {}
    if type(value) is not dict or any(type(v) is not str for v in value.values()):
        _refuse(path, "its __metadata__ is not a map from strings to strings")
    return value


def _entry_of(name: str, value: Any, path: Path) -> Entry:
    who = _short(name)
    if type(value) is not dict:
        _refuse(path, f"{who} has no dtype, shape and data_offsets")
    code: Any = value.get("dtype")
    shape: Any = value.get("shape")
    offsets: Any = value.get("data_offsets")
    found = DTYPES.get(code) if type(code) is str else None
    if found is None:
        _refuse(path, f"{who} has the dtype {_short(str(code))}, which torch does not have")
    if not _is_sizes(shape):
        _refuse(path, f"the shape of {who} is not a list of sizes: {_short(str(shape))}")
    if not _is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        _refuse(path, f"the data_offsets of {who} are no range: {_short(str(offsets))}")
    dtype, per_element = found
    if per_element > 1:
        if not shape or shape[-1] % per_element:
            _refuse(path, f"the last size of {who} is not a multiple of {per_element}")
        shape = [*shape[:-1], shape[-1] // per_element]
    # torch counts the strides of empty tensors too, as if each size were 1 at least.
    if math.prod(max(size, 1) for size in shape) * dtype.itemsize > _MAX_NBYTES:
        _refuse(path, f"{who} has more elements than can be counted")
    start, stop = offsets
    expected = math.prod(shape) * dtype.itemsize
    if stop - start != expected:
        _refuse(
            path,
            f"{who} has {stop - start} bytes, and its dtype and shape need {expected}",
        )
    return Entry(name, dtype, tuple(shape), start, stop)


def _is_sizes(value: Any) -> bool:
    # `bool` is an int to isinstance.
    return type(value) is list and all(type(x) is int and 0 <= x <= _MAX_NBYTES for x in value)


def _short(text: str, limit: int = 80) -> str:
    """One printable line of bounded length for text that came from a file."""
    text = repr(text)
    return text if len(text) <= limit else f"{text[: limit - 4]}...{text[-1]}"


def load_tensors(
    path: str | os.PathLike[str], *, device: torch.device | str | None = None
) -> dict[str, Tensor]:
    """The tensors of a safetensors file by name.

    On the CPU nothing is copied: each tensor is a view of the mapped file, and its pages are
    read when they are touched.  The map is private: writing to a tensor leaves the file as it is.

    Raises:
        FileFormatError: as `read_header` does.
        ImportError: when ``safetensors`` is not installed.
    """
    torch_io = _library()
    header = read_header(path)
    found = torch_io.load_file(header.path, device=str(device or "cpu"))
    return {e.name: found[e.name] for e in header.entries}


def save_tensors(
    tensors: Mapping[str, Tensor],
    path: str | os.PathLike[str],
    *,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write tensors to a safetensors file, all or nothing.

    Tensors that share memory are each written out: every name has its own bytes in the file.

    Args:
        tensors: by name, of any strides, on any device that holds data.
        path: the file; an existing one is replaced.
        metadata: free strings for the header; ``{"format": "pt"}`` by default, which other
            readers ask for.

    Raises:
        EntryTypeError: for a tensor that the format cannot hold, before anything is written.
        ImportError: when ``safetensors`` is not installed.
    """
    torch_io = _library()
    for name, x in tensors.items():
        _check_storable(name, x)
    plain = _apart({name: x.detach().contiguous() for name, x in tensors.items()})
    path = Path(path)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        torch_io.save_file(plain, part, metadata=dict(metadata or {"format": "pt"}))
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Replace tensors that overlap another one by copies; the library refuses to guess."""
    by_address = sorted((x.data_ptr(), x.nbytes, name) for name, x in tensors.items() if x.nbytes)
    reached = 0
    for start, nbytes, name in by_address:
        if start < reached:
            tensors[name] = tensors[name].clone()
        reached = max(reached, start + nbytes)
    return tensors


def _check_storable(name: str, x: Tensor) -> None:
    why = why_not_bytes(x)
    if not why and x.is_meta:
        why = "a tensor on the meta device, which has no data"
    if not why and x.dtype not in _NAMES:
        why = f"a tensor of dtype {x.dtype}"
    if why:
        raise EntryTypeError(
            f"Cannot write the entry {name!r} to a safetensors file: it is {why}. "
            f"Convert it or leave it out."
        )


def _library() -> Any:
    try:
        import safetensors.torch
    except ImportError as err:
        raise ImportError(
            "Cannot read or write tensors of safetensors files: the package safetensors is "
            "not installed. Run `pip install 'tensordict[safetensors]'`."
        ) from err
    return safetensors.torch
