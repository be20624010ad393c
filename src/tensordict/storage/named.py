"""Trees as flat dotted names, the form of state dicts and safetensors files."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from .._keys import dotted, short
from ..core.node import Node
from ..core.registry import node_class
from ..core.traverse import entries_with_path
from ..errors import UnsupportedLeaf
from .safetensors import load_tensors, save_tensors

MAX_DEPTH = 64  # far above any model; a name made of dots must not become a tree of a million nodes


def paths_of(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """The path of each dotted name.

    Where some name is also the way to another one, as ``a`` and ``a.b``, no tree has all of them:
    every name is then a path of one level, and so it is where one has more than `MAX_DEPTH` levels.

    >>> paths_of(["a.b", "c"]), paths_of(["a.b", "a"])
    ({'a.b': ('a', 'b'), 'c': ('c',)}, {'a.b': ('a.b',), 'a': ('a',)})
    """
    names = list(names)
    if any(name.count(".") >= MAX_DEPTH for name in names):
        return {name: (name,) for name in names}
    split = {name: tuple(name.split(".")) for name in names}
    whole = set(split.values())
    for path in whole:
        if any(path[:i] in whole for i in range(1, len(path))):
            return {name: (name,) for name in split}
    return split


def tree_of(tensors: Mapping[str, Tensor]) -> Any:
    """A tensordict without batch size of tensors by dotted name, nested at the dots.

    >>> import torch
    >>> tree_of({"layer.w": torch.zeros(2), "layer.b": torch.zeros(1)})["layer", "w"].shape
    torch.Size([2])
    """
    paths = paths_of(tensors)
    return node_class("dense")({paths[name]: x for name, x in tensors.items()})


def named_tensors(node: Node) -> dict[str, Tensor]:
    """The tensors of a tree by dotted name.

    Raises:
        UnsupportedLeaf: for an entry that is no tensor, or whose name another one has too.
    """
    out: dict[str, Tensor] = {}
    for path, x in entries_with_path(node):
        if not isinstance(x, Tensor):
            raise UnsupportedLeaf(
                short(path),
                f"a {type(x).__name__}",
                "Exclude it, or save the tensordict as a folder.",
            )
        name = dotted(path)
        if name in out:
            raise UnsupportedLeaf(short(path), f"a second tensor named {name!r}", "Rename one.")
        out[name] = x
    return out


def from_safetensors(
    path: str | os.PathLike[str], *, device: torch.device | str | None = None
) -> Any:
    """The tensordict of a safetensors file: names are nested at their dots.

    On the CPU the tensors are views of the mapped file: nothing is read before it is used, and
    writing to them leaves the file as it is.

    Args:
        path: the file.
        device: where the tensors go; the CPU by default.

    Raises:
        FileFormatError: (a ``ValueError``) when the file is not what its header says.
        ImportError: when ``safetensors`` is not installed.

    >>> import tempfile, torch
    >>> from tensordict import TensorDict
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     to_safetensors(TensorDict({"n": {"w": torch.ones(2)}}), f"{folder}/x.safetensors")
    ...     from_safetensors(f"{folder}/x.safetensors")["n", "w"]
    tensor([1., 1.])
    """
    return tree_of(load_tensors(path, device=device))


def to_safetensors(data: Node, path: str | os.PathLike[str]) -> None:
    """Write a tensordict to a safetensors file, under dotted names, all or nothing.

    Raises:
        UnsupportedLeaf: for an entry that is no tensor.
        EntryTypeError: for a tensor that the format cannot hold.
        ImportError: when ``safetensors`` is not installed.

    >>> import tempfile, torch
    >>> from tensordict import TensorDict
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     to_safetensors(TensorDict({"w": torch.ones(2)}), f"{folder}/x.safetensors")
    """
    save_tensors(named_tensors(data), path)
