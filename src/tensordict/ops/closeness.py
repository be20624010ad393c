"""`assert_close`: two tensordicts compared leaf by leaf, every difference named."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .._keys import short
from .._typing import Path
from ..core.node import Node
from ..errors import EntryTypeError, StructureError, table_of


def assert_close(
    actual: Any,
    expected: Any,
    rtol: float | None = None,
    atol: float | None = None,
    equal_nan: bool = True,
    intersection: bool = False,
    msg: str = "",
    prefix: Path = (),
) -> bool:
    """Check that two tensordicts hold the same keys, and close values of one dtype under each.

    Batch sizes and entries that are no tensors are not compared.

    Args:
        actual, expected: tensordicts.
        rtol, atol: tolerances, as in ``torch.testing.assert_close``: both or none.
        equal_nan: whether NaN equals NaN.
        intersection: compare the keys that both have.
        msg: put into the message of the error.
        prefix: put before the keys in the message.

    Returns:
        True.

    Raises:
        AssertionError: naming every key that differs, and how.
        KeyError: other keys, unless ``intersection``.
        TypeError: not tensordicts.

    >>> from tensordict import TensorDict
    >>> assert_close(TensorDict(a=1.0), TensorDict(a=1.0 + 1e-9))
    True
    """
    if not isinstance(actual, Node) or not isinstance(expected, Node):
        raise EntryTypeError(
            f"assert_close inputs must be of TensorDict type, got {type(actual)} and {type(expected)}"
        )
    mine, theirs = _tensors(actual), _tensors(expected)
    if not intersection and mine.keys() != theirs.keys():
        rows = [(short((*prefix, *p)), "only in the first") for p in mine if p not in theirs]
        rows += [(short((*prefix, *p)), "only in the second") for p in theirs if p not in mine]
        raise StructureError(table_of(f"keys in tensordicts mismatch: {len(rows)} differ.", rows))
    rows = []
    for path, x in mine.items():
        if path in theirs:
            problem = _difference(x, theirs[path], rtol, atol, equal_nan)
            if problem is not None:
                rows.append((short((*prefix, *path)), problem))
    if rows:
        head = f"{msg}: " if msg else ""
        names = ", ".join(repr(path) for path, _ in rows)
        raise AssertionError(table_of(f"{head}key {names} does not match.", rows))
    return True


def assert_allclose_td(
    actual: Any,
    expected: Any,
    rtol: float | None = None,
    atol: float | None = None,
    equal_nan: bool = True,
    intersection: bool = False,
    msg: str = "",
    prefix: Path = (),
) -> bool:
    """The old name of `assert_close`."""
    return assert_close(actual, expected, rtol, atol, equal_nan, intersection, msg, prefix)


def _tensors(node: Node) -> dict[Path, Tensor]:
    """Tensors by path; those of a ragged stack by member."""
    try:
        items = list(node._items())
    except RuntimeError:
        members: Any = node._members()
        if members is None:
            raise
        items = [(str(i), member) for i, member in enumerate(members)]
    out: dict[Path, Tensor] = {}
    for name, entry in items:
        if isinstance(entry, Node):
            out.update(((name, *path), x) for path, x in _tensors(entry).items())
        elif isinstance(entry, Tensor):
            out[(name,)] = entry
    return out


def _difference(
    x: Tensor, y: Tensor, rtol: float | None, atol: float | None, equal_nan: bool
) -> str | None:
    """How two tensors differ, None when they are close."""
    from torch.testing import assert_close as close  # slow to import

    if x.shape != y.shape:
        return f"shape {list(x.shape)} in the first, {list(y.shape)} in the second"
    try:
        close(x, y, rtol=rtol, atol=atol, equal_nan=equal_nan, check_layout=False)
    except AssertionError as err:
        text = " ".join(str(err).split())
        return f"{text} (mean squared error {_mean_squared_error(x, y)})"
    return None


def _mean_squared_error(x: Tensor, y: Tensor) -> str:
    try:
        return f"{float((x.double() - y.double()).pow(2).mean()):.4g}"
    except (RuntimeError, TypeError):
        return "unknown"
