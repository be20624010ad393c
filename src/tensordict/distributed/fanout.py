"""`gather`, `scatter`, `gather_and_stack`, `all_to_all`: one exchange with each other rank.

Each pair of ranks agrees by itself, as in `p2p`: structures may differ from rank to rank
where the result is a list of tensordicts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

import torch

from .._typing import Path
from ..core.devices import as_device
from ..core.leaf import Leaf
from ..core.lock import touched
from ..core.node import Node
from ..core.traverse import leaves_with_path, nodes_with_path
from ..errors import TransferError, UnsupportedLeaf
from . import protocol
from .endpoint import endpoint_of
from .link import Request
from .pending import Pending
from .receive import Into, New, Target
from .transport import MAX_TAG, TorchTransport, group_rank
from .transport_protocol import Transport

# Collectives have the tags at the end of the range; programs count from 0.
_GATHER = MAX_TAG
_SCATTER = MAX_TAG - 1
_ALL_TO_ALL = MAX_TAG - 2


def _request(transport: Transport, peer: int, tag: int, timeout: float | None) -> Request:
    return Request(transport, endpoint_of(transport), peer, tag, timeout)


def gather(
    td: Node,
    dst: int | None = None,
    *,
    group: Any = None,
    group_dst: int | None = None,
    timeout: float | None = None,
    transport: Transport | None = None,
) -> list[Any] | None:
    """Collect the tensordicts of all ranks on one.

    Args:
        td: this rank's; structures may differ from rank to rank.
        dst: the rank in the world that collects.
        group: a process group or a device mesh of one dimension; the default group if None.
        group_dst: that rank in the group, instead of ``dst``.
        timeout: seconds for each exchange; the group's own by default.
        transport: what to send with instead of a process group.

    Returns:
        On ``dst`` a list in rank order, with ``td`` itself at its own place; else None.
    """
    transport = TorchTransport.of(group) if transport is None else transport
    target = group_rank(transport, group, dst, group_dst)
    if transport.rank != target:
        protocol.run_send(_request(transport, target, _GATHER, timeout), td)
        return None
    others = [rank for rank in range(transport.size) if rank != target]
    out = _receive_all(
        [_request(transport, rank, _GATHER, timeout) for rank in others],
        [New(locks=False) for _ in others],
    )
    return [*out[:target], td, *out[target:]]


_MOMENT: Final = 1.0


def _receive_all(requests: Sequence[Request], targets: Sequence[Target]) -> list[Any]:
    """Receive from one rank after the other.

    When one of them fails, what the later ones send is still taken, and dropped: they wait for
    it, and cannot know of the failure.
    """
    out: list[Any] = []
    try:
        for request, target in zip(requests, targets):
            out.append(protocol.run_recv(request, target))
    except Exception:
        late = [
            Pending(partial(protocol.run_recv, request, New(locks=False)), "what nobody wants")
            for request in requests[len(out) + 1 :]
        ]
        end = time.monotonic() + _MOMENT
        for pending in late:  # else the end of this process could be in their way
            with suppress(TransferError):
                pending.exception(max(0.0, end - time.monotonic()))
        raise
    return out


def gather_and_stack(
    td: Node,
    dst: int | None = None,
    *,
    group: Any = None,
    group_dst: int | None = None,
    timeout: float | None = None,
    transport: Transport | None = None,
) -> Any:
    """Write the tensordicts of the other ranks into the rows of one.

    Args:
        td: on ``dst`` a tensordict of batch size ``[ranks - 1, *B]`` of dense leaves, one row for
            each other rank in order; on the others what they contribute, of batch size ``[*B]``.
        dst, group, group_dst, timeout, transport: see `gather`.

    Returns:
        ``td`` on ``dst``, else None.

    Raises:
        SchemaMismatch: a contribution is not a row of the result; on that rank and ``dst``.
    """
    transport = TorchTransport.of(group) if transport is None else transport
    target = group_rank(transport, group, dst, group_dst)
    if transport.rank != target:
        protocol.run_send(_request(transport, target, _GATHER, timeout), td)
        return None
    others = [rank for rank in range(transport.size) if rank != target]
    requests = [_request(transport, rank, _GATHER, timeout) for rank in others]
    try:
        rows = _rows(td, len(others))
    except Exception as error:
        _refuse_all(requests, error)
        raise
    _receive_all(requests, [Into(row) for row in rows])
    _lift_values(td, rows)
    return td


def _lift_values(td: Node, rows: Sequence[Any]) -> None:
    """Rows share the memory of tensors; their other values are theirs alone."""
    stacks: list[Path] = []  # the rows of a stack are its members
    for path, node in nodes_with_path(td):
        if node._members() is not None:
            stacks.append(path)
        if any(path[: len(stack)] == stack for stack in stacks):
            continue
        for name in [name for name, entry in node._items() if isinstance(entry, Leaf)]:
            stacked: Any = torch.stack([row.select((*path, name)) for row in rows])
            for part in path:
                stacked = stacked._fetch(part)
            node._store(name, stacked._fetch(name))
            touched(node)


class _Refusing(New):
    """Takes nothing, and says why."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error

    def look(self, request: Request) -> Exception | None:
        return self._error


def _refuse_all(requests: Sequence[Request], error: Exception) -> None:
    """Tell those who send why nothing is taken."""
    for request in requests:
        with suppress(Exception):  # what is wrong here matters more than who heard it
            protocol.run_recv(request, _Refusing(error))


def _rows(td: Any, n: int) -> list[Node]:
    if not td._batch_size or td._batch_size[0] != n:
        raise TransferError(
            f"Cannot gather {n} rows into a tensordict of batch size {list(td._batch_size)}. "
            f"Expected one row for each other rank: [{n}, ...]."
        )
    for path, leaf in leaves_with_path(td):
        if leaf.layout not in (torch.strided, torch.jagged):
            raise UnsupportedLeaf(path, f"a leaf of layout {leaf.layout} among rows")
    return [td[k] for k in range(n)]


def scatter(
    tds: Sequence[Node] | None,
    src: int | None = None,
    *,
    group: Any = None,
    group_src: int | None = None,
    device: Any = None,
    timeout: float | None = None,
    transport: Transport | None = None,
) -> Any:
    """Give each rank its own tensordict.

    Args:
        tds: on the source one tensordict per rank; structures may differ.
        src: rank of the source in the world.
        group: a process group or a device mesh of one dimension; the default group if None.
        group_src: rank of the source in the group, instead of ``src``.
        device: where the leaves of received tensordicts go.
        timeout: seconds for each exchange; the group's own by default.
        transport: what to send with instead of a process group.

    Returns:
        The tensordict of this rank: its own object on the source, else a new one.
    """
    transport = TorchTransport.of(group) if transport is None else transport
    source = group_rank(transport, group, src, group_src)
    if transport.rank != source:
        target = New(None if device is None else as_device(device), locks=False)
        return protocol.run_recv(_request(transport, source, _SCATTER, timeout), target)
    others = [rank for rank in range(transport.size) if rank != source]
    if tds is None or len(tds) != transport.size:
        error = TransferError(
            f"Cannot scatter {0 if tds is None else len(tds)} tensordicts. "
            f"Expected one for each of the {transport.size} ranks."
        )
        for rank in others:
            protocol.run_error(_request(transport, rank, _SCATTER, timeout), error)
        raise error
    works = [
        Pending(
            lambda rank=rank: protocol.run_send(  # type: ignore[misc]
                _request(transport, rank, _SCATTER, timeout), tds[rank]
            ),
            f"scatter to rank {rank}",
        )
        for rank in others
    ]
    _wait_all(works)
    return tds[source]


def all_to_all(
    tds: Sequence[Node],
    *,
    group: Any = None,
    timeout: float | None = None,
    transport: Transport | None = None,
) -> list[Any]:
    """Give the k-th tensordict of every rank to rank k.

    Args:
        tds: one per rank of the group; structures may differ.
        group: a process group or a device mesh of one dimension; the default group if None.
        timeout: seconds for each exchange; the group's own by default.
        transport: what to send with instead of a process group.

    Returns:
        What each rank had for this one, in rank order; its own object at its own place.
    """
    transport = TorchTransport.of(group) if transport is None else transport
    n, me = transport.size, transport.rank
    out: list[Any] = [None] * n
    errors: list[BaseException] = []
    if len(tds) != n:  # the others hear of it, each in its turn
        text = f"Cannot exchange {len(tds)} tensordicts. Expected one for each of {n} ranks."
        errors.append(ValueError(text))

    def send_to(dst: int) -> None:
        request = _request(transport, dst, _ALL_TO_ALL, timeout)
        if len(tds) != n:
            protocol.run_error(request, ValueError(text))
        else:
            protocol.run_send(request, tds[dst])

    for shift in range(1, n):
        dst, src = (me + shift) % n, (me - shift) % n
        sending = Pending(partial(send_to, dst), f"all_to_all to rank {dst}")
        request = _request(transport, src, _ALL_TO_ALL, timeout)
        try:
            out[src] = protocol.run_recv(request, New(locks=False))
        except Exception as error:  # the ranks of the other rounds wait for this one
            errors.append(error)
        unsent = sending.exception()
        if unsent is not None:
            errors.append(unsent)
    if errors:
        raise errors[0]
    out[me] = tds[me]
    return out


def _wait_all(works: Sequence[Pending[Any]]) -> None:
    errors = [error for work in works if (error := work.exception()) is not None]
    if errors:
        raise errors[0]
