"""Processes that exchange over gloo on the loopback interface, watched by the parent.

Whatever happens to a rank (it raises, dies, says nothing) ends in one `RankError` here, within
the timeout, with no process left behind.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from ..errors import TensorDictError

HOST = "127.0.0.1"
# After one rank failed, the others get this long to say what they saw.
_GRACE = 3.0

# What a rank runs: its number, a function that sends an event to the parent, the arguments.
Task = Callable[..., Any]


class RankError(TensorDictError, RuntimeError):
    """A rank failed, died or was too slow."""


def run_ranks(
    task: Task,
    size: int,
    args: tuple[Any, ...] = (),
    *,
    port: int = 0,
    timeout: float = 120.0,
    on_event: Callable[[int, Any], None] = lambda rank, event: None,
) -> list[Any]:
    """Call ``task(rank, emit, *args)`` on ``size`` ranks of one gloo group.

    Args:
        task: a function at the top level of a module.
        size: the number of ranks.
        args: what else it is called with.
        port: where the ranks meet; 0 takes a free one.
        timeout: seconds for everything.
        on_event: called here with the rank and each object given to ``emit``.

    Returns:
        What the ranks returned, by rank.

    Raises:
        RankError: when the port is in use, or a rank raises, dies or is too slow.
    """
    store = _store(port, timeout)
    context = _context(task)
    pipes: list[Connection] = []
    processes: list[Any] = []
    try:
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_rank_main,
                args=(theirs, rank, size, store.port, timeout, task, args),
                daemon=True,
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        return _collect(pipes, processes, timeout, on_event)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _context(task: Task) -> Any:
    """Processes that never inherit threads; from a server that imported everything once."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, task.__module__])
    return context


def _store(port: int, timeout: float) -> Any:
    """The place where ranks meet, served by this process."""
    if port:
        try:
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((HOST, port))
        except (OSError, OverflowError) as err:
            reason = getattr(err, "strerror", None) or str(err)
            raise RankError(
                f"Cannot use port {port} of {HOST}: {reason}. Choose another one, or 0 for any."
            ) from None
    try:
        return dist.TCPStore(  # type: ignore[attr-defined]
            HOST,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout),
        )
    except RuntimeError as err:
        first = str(err).splitlines()[0]
        raise RankError(f"Cannot let ranks meet on port {port} of {HOST}: {first}") from None


def _rank_main(
    pipe: Connection,
    rank: int,
    size: int,
    port: int,
    timeout: float,
    task: Task,
    args: tuple[Any, ...],
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it, and ends the ranks
    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    limit = timedelta(seconds=timeout)
    try:
        store = dist.TCPStore(  # type: ignore[attr-defined]
            HOST, port, is_master=False, timeout=limit
        )
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
        result = task(rank, lambda event: pipe.send(("event", event)), *args)
        pipe.send(("done", result))
        pipe.recv()  # leaving earlier would close connections that the others still use
    except EOFError:
        pass  # the parent is done with this rank
    except BaseException as err:
        pipe.send(("failed", f"failed: {type(err).__name__}: {err}"))


def _collect(
    pipes: list[Connection],
    processes: list[Any],
    timeout: float,
    on_event: Callable[[int, Any], None],
) -> list[Any]:
    results: dict[int, Any] = {}
    died: dict[int, str] = {}
    failed: dict[int, str] = {}
    waiting: dict[Any, int] = {pipe: rank for rank, pipe in enumerate(pipes)}
    end = time.monotonic() + timeout
    while waiting:
        ready: Any = wait(list(waiting), max(0.0, end - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            rank = waiting[pipe]
            try:
                what, value = pipe.recv()
            except (EOFError, OSError):
                what, value = "died", _end_of(processes[rank])
            if what == "event":
                on_event(rank, value)
                continue
            del waiting[pipe]
            {"done": results, "failed": failed, "died": died}[what][rank] = value
            if what != "done":
                end = min(end, time.monotonic() + _GRACE)
    # A rank that died explains what the others complain about.
    for rank, reason in [*died.items(), *failed.items()]:
        raise RankError(f"rank {rank} {reason}")
    if waiting:
        ranks = ", ".join(str(rank) for rank in sorted(waiting.values()))
        raise RankError(f"rank {ranks} was not done after {timeout:g} s")
    return [results[rank] for rank in range(len(pipes))]


def _end_of(process: Any) -> str:
    process.join(_GRACE)
    code = process.exitcode
    if code is not None and code < 0:
        return f"died: killed by {signal.Signals(-code).name}"
    return f"died: exit status {code}"
