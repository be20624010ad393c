"""What ``td[key]`` gives for one value per row: a list whose items reach the rows."""

from __future__ import annotations

from typing import Any

import numpy as np


class LinkedList(list):
    """The rows of a non-tensor entry as (nested) lists.

    Setting an item sets the row of the entry.  Methods that change the length act on the
    list alone: the number of rows is the entry's.

    >>> from tensordict import TensorDict
    >>> td = TensorDict({"name": ["a", "b"]}, [2])
    >>> td["name"][1] = "c"
    >>> td["name"]
    ['a', 'c']
    """

    __slots__ = ("_at", "_leaf")

    _leaf: Any
    _at: tuple[int, ...]

    def __init__(self, *args: Any, td: Any = None) -> None:
        super().__init__(*args)
        self._leaf = None
        self._at = ()

    @classmethod
    def _of(cls, leaf: Any, at: tuple[int, ...] = ()) -> LinkedList:
        """The rows of a `NonTensorStack` under a position in its leading dimensions."""
        values: np.ndarray = leaf._values[at]
        if values.ndim > 1:
            out = cls([cls._of(leaf, (*at, i)) for i in range(len(values))])
        else:
            out = cls(values.tolist())
        out._leaf = leaf
        out._at = at
        return out

    def __setitem__(self, index: Any, value: Any) -> None:
        changed: list[Any] = list(self)
        changed[index] = value
        if self._leaf is None:
            super().__setitem__(index, value)
            return
        if len(changed) != len(self):
            raise ValueError(
                f"Cannot set {len(changed)} rows where there are {len(self)}: the number of rows is "
                f"that of the batch. Make a list() of this one to change its length."
            )
        where = range(len(self))[index]
        for i in [where] if isinstance(where, int) else where:
            self._leaf._set_row((*self._at, i), changed[i])
        fresh = type(self)._of(self._leaf, self._at)
        super().__setitem__(slice(None), fresh)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return list, (list(self),)
