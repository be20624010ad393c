"""Weights converted from file to file, a piece at a time, in bounded memory.

The output is written beside its destination, in a folder ``.NAME.part`` with a journal, and
swapped in at the end: the destination is old or new, never half.  A run that was interrupted is
taken up again by the same call.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import FileFormatError, TensorDictError
from ..placement.casts import CastCounts, Loss, can_lose, measure_cast
from ..storage.safetensors import Entry, Header
from ..storage.weight_files import NewFile, WeightFiles, new_file

try:
    import fcntl
except ImportError:  # not a Unix: two conversions at once are the caller's to avoid
    fcntl = None  # type: ignore[assignment]

# Bytes at work for each byte read: the piece, its cast, and what measuring makes of it.
_WORK = 24
# Code of the program that is read when the first piece is cast, and counts as resident then.
_CODE = 8 << 20
_LEAST, _MOST = 64 << 10, 4 << 20
_JOURNAL_EVERY = 1.0  # seconds


@dataclass(frozen=True, slots=True)
class Conversion:
    """What to convert into what.

    Attributes:
        weights: the files to read.
        dtypes: the dtype of each tensor by name, as planned.
        target: the file, or the folder of a set, to make.
        measure: whether values that casts lose are counted.
        piece_nbytes: bytes read at a time.
        key: what must be equal for an interrupted run to be taken up.
    """

    weights: WeightFiles
    dtypes: Mapping[str, torch.dtype]
    target: Path
    measure: bool
    piece_nbytes: int
    key: str

    @property
    def folder(self) -> Path:
        """Where the output grows."""
        return self.target.with_name(f".{self.target.name}.part")

    def layout(self, header: Header) -> NewFile:
        """The output file of one input file."""
        return new_file(
            [(e.name, self.dtypes[e.name], e.shape) for e in header.entries], header.metadata
        )


@dataclass(slots=True)
class Journal:
    """How far a conversion is, saved so that it can be taken up.

    Attributes:
        key: of the conversion.
        done: tensors written of each file.
        lost: what casts lost, by tensor name.
    """

    key: str
    done: dict[str, int] = field(default_factory=dict)
    lost: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path, key: str) -> Journal:
        """The journal of an interrupted run of the same conversion, else an empty one."""
        try:
            data = json.loads(path.read_bytes())
            found = cls(str(data["key"]), dict(data["done"]), dict(data["lost"]))
        except (OSError, ValueError, KeyError, TypeError):
            return cls(key)
        return found if found.key == key else cls(key)

    def save(self, path: Path) -> None:
        """Write it, all or nothing."""
        part = path.with_suffix(".new")
        part.write_text(json.dumps(asdict(self)))
        os.replace(part, path)

    def counts(self) -> dict[str, CastCounts]:
        """What casts lost, by tensor name."""
        return {name: CastCounts(**counts) for name, counts in self.lost.items()}


def piece_nbytes(room: int) -> int:
    """The bytes to read at a time when ``room`` bytes may be used.

    Raises:
        TensorDictError: when that is too little.

    >>> piece_nbytes(1 << 30)
    4194304
    """
    piece = (room - _CODE) // _WORK
    if piece < _LEAST:
        need = _LEAST * _WORK + _CODE - room
        raise TensorDictError(
            f"--max-memory is too small: the program itself needs {need >> 20} MiB more than that"
        )
    return min(piece, _MOST) & ~0xFFF


def convert(job: Conversion, progress: Callable[[int], None]) -> dict[str, CastCounts]:
    """Convert into ``job.folder``; returns what casts lost, by tensor name.

    Args:
        job: the conversion.
        progress: told the bytes read, and at once those of an interrupted run.
    """
    folder = job.folder
    folder.mkdir(exist_ok=True)
    with _only_one(folder):
        path = folder / "journal.json"
        journal = Journal.load(path, job.key)
        for file, header in job.weights.headers.items():
            _convert_file(job, header, folder / file, journal, path, progress)
        journal.save(path)
        return journal.counts()


def _convert_file(
    job: Conversion,
    header: Header,
    out: Path,
    journal: Journal,
    journal_path: Path,
    progress: Callable[[int], None],
) -> None:
    layout = job.layout(header)
    by_name = {e.name: e for e in header.entries}
    entries = [by_name[name] for name in layout.names]
    sizes = [torch.Size(e.shape).numel() * job.dtypes[e.name].itemsize for e in entries]
    done = journal.done.get(header.path.name, 0)
    at = len(layout.head) + sum(sizes[:done])
    if not done or not out.exists() or out.stat().st_size < at:
        done, at = 0, len(layout.head)
    progress(sum(e.nbytes for e in entries[:done]))
    pieces = _Pieces(job.piece_nbytes, job.measure)
    saved = time.monotonic()
    with (
        open(out, "r+b" if done else "wb", buffering=0) as target,
        open(header.path, "rb") as source,
    ):
        if not done:
            _write(target.fileno(), memoryview(layout.head))
        target.truncate(at)
        target.seek(at)
        for entry in entries[done:]:
            dtype = job.dtypes[entry.name]
            counts = pieces.convert(source.fileno(), entry, dtype, target.fileno(), progress)
            if counts.lost & (Loss.RANGE | Loss.KIND):
                journal.lost[entry.name] = asdict(counts)
            done += 1
            journal.done[header.path.name] = done
            if time.monotonic() - saved > _JOURNAL_EVERY:
                journal.save(journal_path)
                saved = time.monotonic()


class _Pieces:
    """Two buffers through which every tensor passes."""

    def __init__(self, nbytes: int, measure: bool) -> None:
        self._nbytes = nbytes
        self._measure = measure
        self._source = torch.empty(nbytes, dtype=torch.uint8)
        self._target = torch.empty(0, dtype=torch.uint8)

    def convert(
        self, source: int, entry: Entry, dtype: torch.dtype, target: int, progress: Any
    ) -> CastCounts:
        """Read, cast and write one tensor; what the cast lost."""
        counts = CastCounts()
        risky = self._measure and bool(can_lose(entry.dtype, dtype) & (Loss.RANGE | Loss.KIND))
        for start in range(entry.start, entry.stop, self._nbytes):
            piece = self._source[: min(self._nbytes, entry.stop - start)]
            _read(source, piece, start, entry)
            if dtype is not entry.dtype:
                values = piece.view(entry.dtype)
                if risky:
                    counts += measure_cast(values, dtype)
                piece = self._cast(values, dtype)
            _write(target, _view_of(piece))
            progress(min(self._nbytes, entry.stop - start))
        # What was read once is not read again: leave the page cache to others.
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(source, entry.start, entry.nbytes, os.POSIX_FADV_DONTNEED)
        return counts

    def _cast(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        nbytes = values.numel() * dtype.itemsize
        if self._target.numel() < nbytes:
            self._target = torch.empty(nbytes, dtype=torch.uint8)
        out = self._target[:nbytes]
        out.view(dtype).copy_(values)
        return out


def _read(fd: int, into: Tensor, start: int, entry: Entry) -> None:
    view = _view_of(into)
    while view:
        n = os.preadv(fd, [view], start)
        if not n:
            raise FileFormatError(f"Cannot read {entry.name!r}: the file ends within it.")
        view, start = view[n:], start + n


def _view_of(x: Tensor) -> memoryview:
    array: Any = x.numpy()
    return memoryview(array)


def _write(fd: int, view: memoryview) -> None:
    while view:
        view = view[os.write(fd, view) :]


@contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    with open(folder / "lock", "w") as lock:
        try:
            if fcntl is not None:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise TensorDictError(f"{folder}: another conversion is writing there") from None
        yield


# --- the end -----------------------------------------------------------------------------


def finish(job: Conversion, dtype: torch.dtype | None) -> None:
    """Complete the output and swap it in.

    Args:
        job: a conversion whose `convert` has returned.
        dtype: what ``config.json`` of a set is told; None leaves it as it is.
    """
    folder, weights = job.folder, job.weights
    if weights.index is None:
        (file,) = weights.headers
        os.replace(folder / file, job.target)
        shutil.rmtree(folder)
        return
    for name in ("journal.json", "lock"):
        (folder / name).unlink(missing_ok=True)
    _write_index(job)
    copy_companions(weights.index.parent, folder, dtype)
    _swap(folder, job.target)


def _write_index(job: Conversion) -> None:
    assert job.weights.index is not None
    where = {e.name: file for file, h in job.weights.headers.items() for e in h.entries}
    total = sum(
        torch.Size(e.shape).numel() * job.dtypes[e.name].itemsize for e in job.weights.entries()
    )
    metadata = {**job.weights.index_metadata, "total_size": total}
    text = json.dumps({"metadata": metadata, "weight_map": where}, indent=2, sort_keys=True)
    (job.folder / job.weights.index.name).write_text(text + "\n")


_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf"}


def copy_companions(source: Path, target: Path, dtype: torch.dtype | None) -> None:
    """Copy what stands beside the weights (tokenizer, configuration), with the new dtype told."""
    for path in sorted(source.iterdir()):
        if path.suffix in _WEIGHTS or path.name.endswith(".index.json") or not path.is_file():
            continue
        shutil.copyfile(path, target / path.name)
    config = target / "config.json"
    if dtype is None or not config.exists():
        return
    try:
        data = json.loads(config.read_bytes())
    except ValueError:
        return  # not a configuration of the kind we know: it stays as it is
    if isinstance(data, dict):
        for key in ("torch_dtype", "dtype"):
            if key in data:
                data[key] = str(dtype).removeprefix("torch.")
        config.write_text(json.dumps(data, indent=2) + "\n")


def _swap(folder: Path, target: Path) -> None:
    """Put a folder in the place of another one, which is then removed."""
    old = target.with_name(f".{target.name}.old")
    if target.exists():
        os.rename(target, old)
    os.rename(folder, target)
    shutil.rmtree(old, ignore_errors=True)
