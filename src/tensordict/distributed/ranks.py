"""Pools of real ranks: processes that were preloaded, are in one gloo group, and are reused.

Starting an interpreter that imports torch costs seconds; a pool costs them once.  The
processes come from a forkserver that has imported torch, so a further pool starts in a
fraction of a second.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any, Final

from ..errors import TensorDictError

_PRELOAD: Final = ["torch", "torch.distributed", "tensordict", "tensordict.distributed"]
_GROUP_TIMEOUT: Final = 60.0


class RankFailed(TensorDictError, RuntimeError):
    """A function that `run_ranks` ran raised, died or did not return on some ranks.

    Attributes:
        tracebacks: the traceback or the end of each rank that failed, by rank.
        errors: the exceptions themselves, by rank, where they could be carried over.
    """

    def __init__(self, tracebacks: dict[int, str], errors: dict[int, BaseException]) -> None:
        self.tracebacks = tracebacks
        self.errors = errors
        text = "\n".join(f"--- rank {rank}:\n{text}" for rank, text in tracebacks.items())
        super().__init__(f"{len(tracebacks)} ranks failed.\n{text}")


class _Pool:
    """``size`` processes in one default process group."""

    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOAD)
        self._folder = tempfile.TemporaryDirectory(prefix="tensordict-ranks-")
        init = os.path.join(self._folder.name, "init")
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_rank_main, args=(theirs, rank, size, init), daemon=True
            )
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        self._is_ready = False

    def get_ready(self, timeout: float) -> None:
        """Wait until every rank is in the group: one that failed at once would stop the others."""
        if self._is_ready:
            return
        end = time.monotonic() + timeout
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(max(0.0, end - time.monotonic())):
                raise RankFailed({rank: f"not in the group after {timeout} s"}, {})
            with contextlib.suppress(EOFError, OSError):  # `_collect` says how it ended
                pipe.recv()
        self._is_ready = True

    def close(self) -> None:
        for pipe in self.pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
            pipe.close()
        end = time.monotonic() + 0.5
        for process in self.processes:
            process.join(max(0.0, end - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()


def _rank_main(pipe: Connection, rank: int, size: int, init: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo",
        rank=rank,
        world_size=size,
        init_method=f"file://{init}",
        timeout=timedelta(seconds=_GROUP_TIMEOUT),
    )
    pipe.send("ready")
    while True:
        try:
            task = pipe.recv()
        except (EOFError, OSError):
            return
        if task is None:
            return
        try:
            pipe.send(_run_task(task, rank, size))
        except OSError:  # nobody waits for it any more
            return


def _run_task(task: Any, rank: int, size: int) -> tuple[str, Any, Any]:
    fn, args = task
    try:
        return "done", fn(rank, size, *args), None
    except BaseException as error:
        text = traceback.format_exc()
        error.__traceback__ = None
        try:
            multiprocessing.reduction.ForkingPickler.dumps(error)
        except Exception:  # an exception that does not pickle is reported as text alone
            return "failed", text, None
        return "failed", text, error


_pools: dict[int, list[_Pool]] = {}


def run_ranks(
    fn: Callable[..., Any],
    size: int,
    *args: Any,
    timeout: float = 60.0,
    reuse: bool = True,
    may_die: Iterable[int] = (),
) -> list[Any]:
    """Call ``fn(rank, size, *args)`` on ``size`` processes that form a gloo group.

    The processes are kept for the next call, with their default group; they are replaced
    when a rank failed, and after a call with ``reuse=False`` (for functions that leave the
    group unusable).

    Args:
        fn: a function at the top level of a module.
        size: number of ranks.
        *args: what else to call it with; they and the results travel by pickle.
        timeout: seconds to wait for all ranks.
        reuse: whether the processes serve further calls.
        may_die: ranks whose process may end in the call; their result is None.

    Returns:
        The result of each rank, by rank.

    Raises:
        RankFailed: some ranks raised, died, or were not done in time.
        TypeError: the function or an argument does not pickle.
    """
    try:
        task = multiprocessing.reduction.ForkingPickler.dumps((fn, args))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"Cannot run {fn!r} on ranks: {error}. Expected a function at the top level of a "
            "module, and arguments that pickle."
        ) from None
    idle = _pools.setdefault(size, [])
    pool = idle.pop() if idle and reuse and not may_die else _Pool(size)
    keep = reuse
    try:
        pool.get_ready(timeout)
        for pipe in pool.pipes:
            with contextlib.suppress(BrokenPipeError):  # `_collect` says how it ended
                pipe.send_bytes(task)
        results, bad, errors = _collect(pool, timeout, frozenset(may_die))
        if bad or any(not process.is_alive() for process in pool.processes):
            keep = False
        if bad:
            raise RankFailed(dict(sorted(bad.items())), errors)
        return results
    except BaseException:
        keep = False
        raise
    finally:
        if keep:
            idle.append(pool)
        else:
            pool.close()


def _collect(
    pool: _Pool, timeout: float, may_die: frozenset[int]
) -> tuple[list[Any], dict[int, str], dict[int, BaseException]]:
    results: list[Any] = [None] * len(pool.pipes)
    bad: dict[int, str] = {}
    errors: dict[int, BaseException] = {}
    open_pipes: dict[Any, int] = {pipe: rank for rank, pipe in enumerate(pool.pipes)}
    start = time.monotonic()
    end = start + timeout
    while open_pipes:
        ready = wait(list(open_pipes), max(0.0, end - time.monotonic()))
        if not ready:
            waited = f"not done after {time.monotonic() - start:.1f} s"
            bad.update((rank, waited) for rank in open_pipes.values())
            break
        pipe: Any
        for pipe in ready:
            rank = open_pipes.pop(pipe)
            try:
                state, value, error = pipe.recv()
            except (EOFError, OSError):
                pool.processes[rank].join(1.0)
                if rank not in may_die:
                    code = pool.processes[rank].exitcode
                    bad[rank] = f"the process ended with exit code {code}"
                continue
            if state == "done":
                results[rank] = value
                continue
            bad[rank] = value
            if error is not None:
                errors[rank] = error
            # The others may wait for this one: they get a moment to say what they saw.
            end = min(end, time.monotonic() + 5.0)
    return results, bad, errors


@atexit.register
def close_pools() -> None:
    """End the processes of all idle pools."""
    for pools in _pools.values():
        while pools:
            pools.pop().close()
