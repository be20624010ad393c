"""Methods on rows: read by list, write into those of entries that exist."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from .._keys import path_of, short
from .._typing import NestedKey, Path
from ..core import write
from ..core.node import Node
from ..errors import MissingKeyError
from .indexing import read_rows
from .row_writes import ExistingRowWrites, rows_of, update_rows

if TYPE_CHECKING:
    from typing_extensions import Self


class RowMethods(Node):
    """Rows by list, and writes into rows of entries that exist."""

    __slots__ = ()

    def __getitems__(self, index: Any) -> Self:
        """The rows of a list of positions, in one operation; used by ``DataLoader``."""
        result: Self = read_rows(self, index)
        return result

    def set_at_(
        self, key: NestedKey, value: Any, index: Any, *, non_blocking: bool = False
    ) -> Self:
        """Write into rows of an entry that exists; allowed when locked.

        Args:
            key: the entry.
            value: a tensor, number or tensordict that broadcasts to the rows.
            index: the rows, as in ``td[index]``.
            non_blocking: how the value is copied to the entry's device.

        Raises:
            KeyError: the key is not there.
            RuntimeError: the value does not fit.

        >>> import torch
        >>> from tensordict import TensorDict
        >>> TensorDict({"a": torch.zeros(3)}, [3]).set_at_("a", 1, slice(1, None))["a"]
        tensor([0., 1., 1.])
        """
        path = path_of(key)
        holder = _holder(self, path)
        if holder is None:
            update_rows(self, index, {path: value}, non_blocking)
            return self
        writes = ExistingRowWrites(rows_of(self, index), non_blocking=non_blocking)
        writes.entry(holder, path[-1:], value, path[:-1])
        writes.run()
        return self

    def update_at_(
        self,
        input_dict_or_td: Any,
        idx: Any,
        clone: bool = False,
        *,
        non_blocking: bool = False,
        keys_to_update: Iterable[NestedKey] | None = None,
    ) -> Self:
        """Write a tensordict or mapping into rows of entries that exist; allowed when locked.

        Args:
            input_dict_or_td: what to write.
            idx: the rows, as in ``td[idx]``.
            clone: accepted for compatibility of calls; rows are always copied.
            non_blocking: how values are copied to the entries' devices.
            keys_to_update: only these keys of the input.

        Raises:
            KeyError: a key of the input is not there; nothing has changed then.
            RuntimeError: a value does not fit; nothing has changed then.

        >>> import torch
        >>> from tensordict import TensorDict
        >>> td = TensorDict({"a": torch.zeros(3)}, [3])
        >>> td.update_at_({"a": torch.ones(())}, 1)["a"]
        tensor([0., 1., 0.])
        """
        if keys_to_update is not None:
            input_dict_or_td = _only(input_dict_or_td, keys_to_update)
        update_rows(self, idx, input_dict_or_td, non_blocking)
        return self

    def copy_at_(
        self, tensordict: Any, idx: Any, non_blocking: bool = False, *, fast: bool = True
    ) -> Self:
        """As `update_at_` (``fast`` is accepted for compatibility of calls)."""
        update_rows(self, idx, tensordict, non_blocking)
        return self


def _holder(node: Node, path: Path) -> Node | None:
    """The node that holds an entry itself; None when a stack is on the way to it."""
    for name in path[:-1]:
        if node._members() is not None:
            return None
        below = node._fetch(name)
        if not isinstance(below, Node):
            return None
        node = below
    return None if node._members() is not None else node


def _only(source: Any, keys: Iterable[NestedKey]) -> dict[Path, Any]:
    out: dict[Path, Any] = {}
    for key in [keys] if isinstance(keys, str) else keys:
        path = path_of(key)
        if isinstance(source, Node):
            out[path] = write.require(source, path)
        else:
            out[path] = _item(source, path)
    return out


def _item(source: Mapping[Any, Any], path: Path) -> Any:
    item: Any = source
    for i, name in enumerate(path):
        if not isinstance(item, Mapping) or name not in item:
            raise MissingKeyError(f"key {short(path[: i + 1])!r} not found in the values to write.")
        item = item[name]
    return item
