"""Padding batch dimensions, and stacking what has several lengths."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Size, Tensor

from .._keys import short
from .._typing import Path
from ..core import write
from ..core.leaf import Leaf, join
from ..core.node import Entry, Node
from ..core.registry import node_class
from ..core.traverse import entries_with_path
from ..errors import (
    BatchSizeError,
    DimError,
    EntryTypeError,
    MissingKeyError,
    ShapeError,
    StructureError,
)
from .reshaping import become
from .shape import Narrow, Pad
from .update import fill_out

if TYPE_CHECKING:
    from typing_extensions import Self


class PaddingMethods(Node):
    """pad."""

    __slots__ = ()

    def pad(
        self, pad_size: Sequence[int], value: float = 0.0, inplace: bool = False, safe: bool = True
    ) -> Self:
        """Rows of ``value`` around the leading batch dimensions; see `pad`."""
        result = pad(self, pad_size, value)
        if not inplace:
            return result
        become(self, result)
        return self


def pad(
    tensordict: Any,
    pad_size: Sequence[int],
    value: float = 0.0,
    inplace: bool = False,
    safe: bool = True,
) -> Any:
    """A tensordict with rows of ``value`` around its leading batch dimensions.

    Args:
        tensordict: what to pad.
        pad_size: (before, after) of the first dimension, then of the second, and so on, in one
            list; negative numbers take rows away.
        value: what the new rows hold; non-tensor entries hold None there.
        inplace: make ``tensordict`` the result.
        safe: accepted for compatibility of calls; every call is checked.

    Raises:
        RuntimeError: an odd number of sizes, or more than there are dimensions.

    >>> from tensordict import TensorDict
    >>> pad(TensorDict({"a": torch.ones(2)}, [2]), [0, 1])["a"]
    tensor([1., 1., 0.])
    """
    if inplace:
        return tensordict.pad(pad_size, value, True)
    batch = tensordict._batch_size
    if len(pad_size) % 2:
        raise ShapeError(
            f"pad_size must have an even number of dimensions: (before, after) for each, got "
            f"{list(pad_size)}."
        )
    if len(pad_size) > 2 * len(batch):
        raise ShapeError(
            f"The length of pad_size must be <= 2 * the number of batch dimensions "
            f"({len(batch)}), got {list(pad_size)}."
        )
    pads = tuple(zip(pad_size[::2], pad_size[1::2]))
    if any(before + n + after < 0 for n, (before, after) in zip(batch, pads)):
        raise ShapeError(
            f"Cannot pad: {list(pad_size)} takes more rows away than batch size {list(batch)} has."
        )
    return tensordict._restructure(Pad(pads, value))


def pad_sequence(
    list_of_tensordicts: Iterable[Any],
    pad_dim: int = 0,
    padding_value: float = 0.0,
    out: Any = None,
    return_mask: bool | str = False,
    padding_side: str = "right",
) -> Any:
    """Tensordicts of several lengths, padded to the longest and stacked.

    Args:
        list_of_tensordicts: tensordicts with the same keys.
        pad_dim: dimension of each leaf along which lengths differ (a negative one counts
            from the end of each leaf); a batch dimension or a later one.
        padding_value: what fills up.
        out: a tensordict to fill.
        return_mask: also booleans, true where a value is not padding, under ``("masks", key)``
            or, for a str, under ``(return_mask, key)``.
        padding_side: ``"right"`` or ``"left"``.

    Returns:
        A tensordict of batch size ``[n, *B]``; a batch dimension that is padded has the
        longest size.

    Raises:
        RuntimeError: an empty list, or leaves that differ in another dimension.
        KeyError: other keys.

    >>> from tensordict import TensorDict
    >>> rows = [TensorDict(a=torch.ones(n)) for n in (1, 2)]
    >>> pad_sequence(rows)["a"]
    tensor([[1., 0.],
            [1., 1.]])
    """
    nodes = list(list_of_tensordicts)
    if not nodes:
        raise ShapeError("list_of_tensordicts cannot be empty.")
    for node in nodes:
        if not isinstance(node, Node):
            raise EntryTypeError(
                f"Cannot pad a {type(node).__name__}: expected a list of tensordicts."
            )
    if padding_side not in ("left", "right"):
        raise EntryTypeError(
            f"Cannot pad on the side {padding_side!r}: expected 'left' or 'right'."
        )
    padding = _Padding(pad_dim, padding_value, padding_side == "left")
    result = padding.node(nodes, ())
    if return_mask:
        name = return_mask if isinstance(return_mask, str) else "masks"
        masks = result._child()
        for path, mask in padding.masks:
            write.assign(masks, path, mask)
        result._store(name, masks)
    if out is None:
        return result
    fill_out(out, result)
    return out


def unpad_sequence(padded: Any, mask: Any = None, *, pad_dim: int = 0) -> Any:
    """The tensordicts that `pad_sequence` padded and stacked, in a lazy stack.

    Args:
        padded: a tensordict of batch size ``[n, *B]``.
        mask: true where a value is not padding: a tensor for all leaves (or a tensordict
            with one for each), of the shape that a leaf has up to its padded dimension; the
            entry ``"masks"`` of ``padded`` without it.
        pad_dim: dimension that was padded, counted without the first one.

    Raises:
        ValueError: there is no mask.
        KeyError: there is no mask for some leaf.

    >>> from tensordict import TensorDict
    >>> rows = [TensorDict(a=torch.ones(n)) for n in (1, 2)]
    >>> [row["a"] for row in unpad_sequence(pad_sequence(rows, return_mask=True))]
    [tensor([1.]), tensor([1., 1.])]
    """
    masks = padded._fetch("masks") if mask is None else mask
    if masks is None:
        raise EntryTypeError(
            "unpad_sequence needs a mask: pass mask=..., or pad with "
            "pad_sequence(..., return_mask=True)."
        )
    tree = padded._like({k: e for k, e in padded._items() if mask is not None or k != "masks"})
    out = []
    for row, one in zip(tree.unbind(0), masks.unbind(0)):
        out.append(_unpadded(row, one, pad_dim))
    return node_class("lazy_stack")(*out, stack_dim=0)


class _Padding:
    """One call of `pad_sequence`: its arguments, and the masks it collects."""

    def __init__(self, dim: int, value: float, left: bool) -> None:
        self.dim = dim
        self.value = value
        self.left = left
        self.masks: list[tuple[Path, Tensor]] = []

    def node(self, nodes: Sequence[Any], path: Path) -> Any:
        first = nodes[0]
        names = set(first._names())
        for node in nodes:
            if names.symmetric_difference(node._names()):
                raise StructureError(
                    f"Cannot pad tensordicts with different keys"
                    f"{f' at {short(path)!r}' if path else ''}: exclusive keys are "
                    f"{sorted(names.symmetric_difference(node._names()))}."
                )
        batch = self.batch(nodes, path)
        entries: dict[str, Entry] = {}
        for name in first._names():
            column = [node._fetch(name) for node in nodes]
            here = (*path, name)
            if all(isinstance(x, Tensor) for x in column):
                entries[name] = self.tensor(column, here)
            elif all(isinstance(x, Node) for x in column):
                entries[name] = self.node(column, here)
            elif all(isinstance(x, Leaf) for x in column):
                entries[name] = self.leaf(column, batch)
            else:
                raise StructureError(f"Cannot pad the entries {short(here)!r}: kinds differ.")
        dim_names = first._dim_names
        if dim_names is not None:
            dim_names = (
                [None, *dim_names] if all(n._dim_names == dim_names for n in nodes) else None
            )
        return first._like(entries, Size([len(nodes), *batch]), dim_names)

    def batch(self, nodes: Sequence[Node], path: Path) -> Size:
        sizes = [node._batch_size for node in nodes]
        longest = list(sizes[0])
        for size in sizes:
            if len(size) != len(longest) or any(
                a != b and i != self.dim for i, (a, b) in enumerate(zip(size, longest))
            ):
                raise BatchSizeError(
                    f"Cannot pad along dim {self.dim}: expected batch sizes that differ only there, "
                    f"got {[list(s) for s in sizes]}{f' at {short(path)!r}' if path else ''}."
                )
            longest = [max(a, b) for a, b in zip(size, longest)]
        return Size(longest)

    def tensor(self, column: Sequence[Any], path: Path) -> Tensor:
        ndim = column[0].ndim
        dim = self.dim if self.dim >= 0 else self.dim + ndim
        if not 0 <= dim < ndim:
            raise DimError(
                f"Cannot pad {short(path)!r} along dim {self.dim}: it has {ndim} dimensions."
            )
        shapes = [x.shape for x in column]
        rest = {(*shape[:dim], None, *shape[dim + 1 :]) for shape in shapes}
        if len(rest) > 1 or any(len(shape) != ndim for shape in shapes):
            raise ShapeError(
                f"pad_sequence failed for key {short(path)!r}: expected shapes that differ only in "
                f"dim {dim}, got {[list(shape) for shape in shapes]}."
            )
        longest = max(shape[dim] for shape in shapes)
        lengths = torch.tensor([shape[dim] for shape in shapes], device=column[0].device)
        steps = torch.arange(longest, device=column[0].device)
        real = steps >= longest - lengths[:, None] if self.left else steps < lengths[:, None]
        shape = (len(column), *shapes[0][:dim], longest)
        self.masks.append(
            (path, real.view(len(column), *(1,) * dim, longest).expand(shape).clone())
        )
        return torch.stack([self.filled(x, dim, longest - x.shape[dim]) for x in column])

    def filled(self, x: Tensor, dim: int, missing: int) -> Tensor:
        if not missing:
            return x
        widths = [0, 0] * (x.ndim - 1 - dim) + ([missing, 0] if self.left else [0, missing])
        return torch.nn.functional.pad(x, widths, value=self.value)

    def leaf(self, column: Sequence[Any], batch: Size) -> Leaf:
        fitted = []
        for leaf in column:
            gaps = [n - m for n, m in zip(batch, leaf._batch_size)]
            pads = tuple([(gap, 0) if self.left else (0, gap) for gap in gaps])
            fitted.append(leaf._restructure(Pad(pads, 0)) if any(gaps) else leaf)
        return join(fitted, 0, new_dim=True)


def _unpadded(row: Any, mask: Any, dim: int) -> Any:
    batch = row._batch_size
    lengths: set[int] = set()
    for path, x in entries_with_path(row):
        if isinstance(x, Leaf):
            continue
        one = mask if isinstance(mask, Tensor) else write.fetch(mask, path)
        if not isinstance(one, Tensor):
            raise MissingKeyError(f"There is no mask for {short(path)!r}.")
        at = dim if dim >= 0 else dim + x.ndim
        real = one.reshape(-1, one.shape[at])[0]
        kept = real.nonzero().flatten()
        start = int(kept[0]) if kept.numel() else 0
        lengths.add(kept.numel())
        if at >= len(batch):
            write.commit(row, path, x.narrow(at, start, kept.numel()))
    if 0 <= dim < len(batch):
        if len(lengths) != 1:
            raise ShapeError(
                f"Cannot unpad dim {dim}: leaves have lengths {sorted(lengths)} there."
            )
        return row._restructure(Narrow(dim, start, lengths.pop()))
    return row
