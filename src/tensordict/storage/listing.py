"""What a folder holds, printed as a tree."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_UNITS = ("B", "kB", "MB", "GB", "TB")


def directory_size(path: str | os.PathLike[str]) -> int:
    """Bytes of all files below a folder."""
    return sum(x.stat().st_size for x in Path(path).rglob("*") if x.is_file())


def directory_lines(path: str | os.PathLike[str], indent: str = "") -> Iterator[str]:
    """One line per file and folder below a path, folders with a slash, sorted."""
    root = Path(path)
    yield f"{indent}{root.name}/"
    for child in sorted(root.iterdir(), key=lambda x: (x.is_dir(), x.name)):
        if child.is_dir():
            yield from directory_lines(child, indent + "    ")
        else:
            yield f"{indent}    {child.name}"


def print_directory_tree(
    path: str | os.PathLike[str], indent: str = "", display_metadata: bool = True
) -> None:
    """Print a folder as a tree, after its size in bytes (``display_metadata``).

    Args:
        path: the folder.
        indent: put before every line.
        display_metadata: whether the size is printed first.

    Raises:
        FileNotFoundError: no such folder.
    """
    if display_metadata:
        size: float = directory_size(path)
        unit = 0
        while size >= 1024 and unit + 1 < len(_UNITS):
            size /= 1024
            unit += 1
        print(f"{indent}Directory size: {size:.2f} {_UNITS[unit]}")
    for line in directory_lines(path, indent):
        print(line)
