"""Samples to one batch: dense where shapes agree, lazy where not, padded or nested on request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data._utils import collate as torch_collate

from .._keys import path_of, short
from .._typing import NestedKey, Path
from ..core import write
from ..core.node import Node
from ..errors import EntryTypeError, MissingKeyError
from ..ops.ragged import nested, padded
from ..ops.stacking import maybe_dense_stack


def collate(
    batch: Any,
    *,
    pad_keys: Mapping[NestedKey, float] | None = None,
    nested_keys: Iterable[NestedKey] | None = None,
    mask_key: NestedKey | None = None,
) -> Any:
    """A list of samples as one batch; a ``collate_fn`` of a ``DataLoader``.

    Args:
        batch: samples: tensordicts, tensorclasses, or tuples, dicts and lists that hold
            them; what is neither is collated as torch does by default.  A tensordict is
            a batch already and comes back as it is.
        pad_keys: entries to pad to the largest size, each with its value.
        nested_keys: entries to read as jagged nested tensors.
        mask_key: where masks of the padded entries go: under ``(mask_key, key)``, true
            where a value is; shape ``[len(batch), *padded sizes]``.

    Returns:
        A tensordict of batch size ``[len(batch), *B]``: dense when keys and shapes agree,
        else a lazy stack.

    Raises:
        TypeError: samples of different tensorclasses (a class and its subclass with the
            same fields are collated to the class of the first sample).
        KeyError: an entry to pad or nest is missing in a sample.
        ValueError: a key to pad and to nest, or ``mask_key`` with nothing to pad.

    >>> from tensordict import TensorDict
    >>> samples = [TensorDict({"ids": torch.arange(n)}) for n in (2, 3)]
    >>> collate(samples, pad_keys={"ids": -1})["ids"]
    tensor([[ 0,  1, -1],
            [ 0,  1,  2]])
    """
    pads = {path_of(key): value for key, value in (pad_keys or {}).items()}
    nests = [path_of(key) for key in nested_keys or ()]
    both = [short(path) for path in nests if path in pads]
    if both:
        raise EntryTypeError(f"Cannot both pad and nest the entries {both}: choose one for each.")
    if mask_key is not None and not pads:
        raise EntryTypeError("Cannot make masks: mask_key is given, and no pad_keys.")
    if isinstance(batch, Node) or not len(batch):
        return batch
    mask = None if mask_key is None else path_of(mask_key)
    rule = partial(_collated, pads=pads, nests=nests, mask=mask)
    rules: Any = {**torch_collate.default_collate_fn_map, Node: rule}
    return torch_collate.collate(batch, collate_fn_map=rules)


def collate_default(batch: Any, *, collate_fn_map: Any = None) -> Any:
    """The rule of torch's ``default_collate`` for tensordicts."""
    return _collated(batch, {}, [], None)


def _collated(
    batch: Any,
    pads: Mapping[Path, float],
    nests: Sequence[Path],
    mask: Path | None,
    collate_fn_map: Any = None,
) -> Any:
    if isinstance(batch, Node):
        return batch
    _check_classes(batch)
    if not pads and not nests:
        return maybe_dense_stack(batch)
    columns = {path: _column(batch, path) for path in (*pads, *nests)}
    rest = [sample.exclude(*columns) for sample in batch]
    out = maybe_dense_stack(rest)
    for path, value in pads.items():
        rows = columns[path]
        write.assign(out, path, padded(rows, 0, value, path=path))
        if mask is not None:
            write.assign(out, (*mask, *path), _mask(rows))
    for path in nests:
        write.assign(out, path, nested(columns[path], 0, path=path))
    return out


def _check_classes(batch: Sequence[Any]) -> None:
    """Refuse samples of several typed classes, or typed and plain ones together."""
    first = type(batch[0])
    for sample in batch:
        cls = type(sample)
        if cls is first:
            continue
        if not isinstance(sample, Node):
            raise EntryTypeError(
                f"Cannot collate a {first.__name__} and a {cls.__name__}: expected tensordicts only."
            )
        typed = sample._bare() is not sample or batch[0]._bare() is not batch[0]
        if not typed or _alike(first, cls):
            continue
        names = [cls.__name__ for cls in dict.fromkeys(type(s) for s in batch)]
        raise EntryTypeError(f"Cannot collate a batch of different tensorclasses: got {names}.")


def _alike(a: Any, b: Any) -> bool:
    spec, other = getattr(a, "_spec", None), getattr(b, "_spec", None)
    if spec is None or other is None or not (issubclass(a, b) or issubclass(b, a)):
        return False
    return set(spec.names) == set(other.names)


def _column(samples: Sequence[Any], path: Path) -> list[Tensor]:
    column: list[Any] = []
    for i, sample in enumerate(samples):
        entry = write.fetch(sample, path)
        if entry is None:
            raise MissingKeyError(
                f"Cannot collate {short(path)!r}: sample {i} has no such entry, only "
                f"{sorted(sample._names())}."
            )
        if not isinstance(entry, Tensor):
            raise EntryTypeError(
                f"Cannot pad or nest {short(path)!r}: expected tensors, got a {type(entry).__name__}."
            )
        column.append(entry)
    return column


def _mask(rows: Sequence[Tensor]) -> Tensor:
    """Where rows have values: over the first dimension, or up to the last that differs."""
    shapes = [row.shape for row in rows]
    ragged = [d for d, sizes in enumerate(zip(*shapes)) if len(set(sizes)) > 1]
    ndim = max([1, *(d + 1 for d in ragged)])
    ones = [torch.ones(shape[:ndim], dtype=torch.bool, device=rows[0].device) for shape in shapes]
    return padded(ones, 0, 0.0)
