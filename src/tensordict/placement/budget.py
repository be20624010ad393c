"""Spreading a tree over devices under memory budgets."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .._keys import dotted, short
from .._typing import Path
from ..core.node import Node
from ..core.traverse import leaves_with_path
from ..device.kinds import normal_device
from ..errors import EntryTypeError, MemoryBudgetError
from .memory import free_memory
from .names import size_text
from .policy import CastPolicy, PolicyMatcher
from .routes import ties_of
from .rules import Spec, Target, predicate

Budget = int | str | None
_UNITS = {"B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
_UNITS |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def fit(
    td: Node,
    budgets: Mapping[Any, Budget],
    *,
    keep_together: Iterable[str] = (),
    policy: CastPolicy | None = None,
) -> Spec:
    """A device for each leaf so that no device holds more than its budget.

    Leaves are placed in the order of the tree, the first device first, so that neighbours stay
    neighbours.  A group that does not fit on the present device opens the next one; what is left
    on the earlier ones is filled with later groups only when nothing else has room.

    Args:
        td: Any tree; meta tensors are enough.
        budgets: Bytes for each device, in order of preference: a number, a text such as
            ``"10GiB"`` or ``"80%"`` (of what is free), or ``None`` for all that is free
            (`torch.cuda.mem_get_info`, and psutil for the host).
        keep_together: Patterns over dotted prefixes: everything below a prefix that matches stays
            on one device (``"layers.*"`` keeps every layer whole).
        policy: Count leaves in the dtype that they will be cast to, and put it into the spec.

    Returns:
        A spec with an entry for every leaf; tied leaves get the same device and count once.

    Raises:
        MemoryBudgetError: when there is no room; says how much is missing, and for what.

    >>> from tensordict import TensorDict
    >>> td = TensorDict({"a": torch.empty(4, device="meta"), "b": torch.empty(4, device="meta")})
    >>> spec = fit(td, {"cuda:0": 16, "cpu": "1GiB"})
    >>> [str(spec.target((key,)).device) for key in "ab"]
    ['cuda:0', 'cpu']
    """
    room = dict(_room(budgets))
    pairs = leaves_with_path(td)
    paths = [path for path, _ in pairs]
    tensors = [x for _, x in pairs]
    dtypes = _dtypes(paths, tensors, policy)
    ties = ties_of(tensors) or {}
    groups = _groups(paths, ties, [predicate(pattern) for pattern in keep_together])
    order = list(room)
    chosen: dict[int, torch.device] = {}
    current = 0
    total = dict(room)
    for group in groups:
        nbytes = sum(
            tensors[index].numel() * dtypes[index].itemsize for index in group if index not in ties
        )
        at = _first_with_room(order, room, nbytes, current)
        if at is None:
            raise _no_room(paths[group[0]], len(group), nbytes, room, total)
        current = max(current, at)
        room[order[at]] -= nbytes
        for index in group:
            chosen[index] = order[at]
    entries = {
        path: Target(chosen[index], None if policy is None else dtypes[index])
        for index, path in enumerate(paths)
    }
    return Spec(entries)


def _dtypes(
    paths: Sequence[Path], tensors: Sequence[Tensor], policy: CastPolicy | None
) -> list[torch.dtype]:
    if policy is None:
        return [x.dtype for x in tensors]
    matcher = PolicyMatcher(policy)
    return [matcher.dtype_for(path, x.dtype) or x.dtype for path, x in zip(paths, tensors)]


def _first_with_room(
    order: Sequence[torch.device], room: Mapping[torch.device, int], nbytes: int, current: int
) -> int | None:
    """The present device or a later one; an earlier one only when none of these has room."""
    for at in [*range(current, len(order)), *range(current)]:
        if room[order[at]] >= nbytes:
            return at
    return None


def _groups(
    paths: Sequence[Path], ties: Mapping[int, int], tests: Sequence[Any]
) -> list[list[int]]:
    """Leaves that must stay together: below one matching prefix, or tied to one that is."""
    parent = list(range(len(paths)))

    def find(index: int) -> int:
        while parent[index] != index:
            parent[index] = parent[parent[index]]
            index = parent[index]
        return index

    def join(a: int, b: int) -> None:
        low, high = sorted((find(a), find(b)))
        parent[high] = low

    first_below: dict[str, int] = {}
    if tests:
        for index, path in enumerate(paths):
            prefix = _matching_prefix(dotted(path).split("."), tests)
            if prefix is not None:
                join(first_below.setdefault(prefix, index), index)
    for index, first in ties.items():
        join(first, index)
    groups: dict[int, list[int]] = {}
    for index in range(len(paths)):
        groups.setdefault(find(index), []).append(index)
    return list(groups.values())


def _matching_prefix(names: Sequence[str], tests: Sequence[Any]) -> str | None:
    """The shortest proper prefix of a dotted path that a pattern matches."""
    text = ""
    for name in names[:-1]:
        text = f"{text}.{name}" if text else name
        if any(test(text.lower()) for test in tests):
            return text
    return None


def _room(budgets: Mapping[Any, Budget]) -> Iterable[tuple[torch.device, int]]:
    for name, budget in budgets.items():
        device = normal_device(name)
        assert device is not None
        yield device, parse_budget(budget, device)


def parse_budget(budget: Budget, device: torch.device) -> int:
    """A budget in bytes.

    Raises:
        EntryTypeError: (a ``ValueError``) when it is none, or the device does not tell how much
            is free.

    >>> parse_budget("1.5KiB", torch.device("cpu"))
    1536
    """
    if isinstance(budget, int) and not isinstance(budget, bool) and budget >= 0:
        return budget
    match = None
    if isinstance(budget, str):
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(%|[A-Za-z]*)\s*", budget)
    unit = "%" if budget is None else ("" if match is None else match[2].upper() or "B")
    share = 100.0 if budget is None else (0.0 if match is None else float(match[1]))
    if unit == "%" and share <= 100:
        free = free_memory(device)
        if free is None:
            raise EntryTypeError(
                f"Cannot use a share of the memory of {device}: it does not tell how much is "
                f"free. Give a number of bytes."
            )
        return int(free * share / 100)
    if match is None or unit not in _UNITS:
        raise EntryTypeError(
            f"Cannot use {budget!r} as a budget for {device}: expected bytes, a text such as "
            f"'10GiB' or '80%', or None for all that is free."
        )
    return int(share * _UNITS[unit])


def _no_room(
    path: Path,
    n: int,
    nbytes: int,
    room: Mapping[torch.device, int],
    total: Mapping[torch.device, int],
) -> MemoryBudgetError:
    best = max(room.values(), default=0)
    what = repr(short(path)) if n == 1 else f"{short(path)!r} and the {n - 1} leaves kept with it"
    lines = [
        f"    {device}  {size_text(left)} of {size_text(total[device])} left"
        for device, left in room.items()
    ]
    return MemoryBudgetError(
        f"Cannot fit the tree: {what} need {size_text(nbytes)}; {size_text(nbytes - best)} are "
        f"missing on the device with most room.\n" + "\n".join(lines)
    )
