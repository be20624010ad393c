"""Running a `ReshardPlan` between ranks.

    every rank checks what it has            -> agreement on the plan and on being ready
    messages of the plan, in its order       -> no word about them is needed
    digests of the messages, with verify     -> agreement that all arrived
    results are handed out, or copied into ``out``

Nothing is written to ``out`` before all ranks are through, unless ``partial`` allows it.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypedDict

import torch
from torch import Tensor

from ..device.sync import Barrier, wait_for
from ..errors import (
    LayoutError,
    PeerLost,
    PlanMismatch,
    TransferError,
    TransferTimeout,
    table_of,
)
from ..placement.layout import Layout
from ..placement.models import local_tensor, tensors_of
from ..placement.names import dtype_name
from ..placement.reshard import ReshardPlan
from ..placement.reshard_program import Message
from ..storage.named import tree_of
from .at_exit import in_background
from .consensus import Consensus, Report, Vote
from .pending import Pending
from .resharding import Stage, Workspace
from .torch_work import FOREVER, LOOK_AFTER, pause_after
from .transport import TorchTransport, group_rank
from .transport_protocol import Transport, Work

# Tags far from those that `init_tag` of other exchanges reaches; three for each reshard.
_FIRST_TAG = 1 << 27
_N_TURNS = 1 << 16
_TIMEOUT = 300.0
_GRACE = 2.0
# Bytes of packed messages that a rank has on their way out at a time: enough to keep the link
# busy, few enough that the buffers are kept for the next run.
_MAX_PACKED_NBYTES = 64 << 20


class RunOptions(TypedDict, total=False):
    """How to run a plan.

    Attributes:
        partial: Write to ``out`` as bytes arrive.  Needs no second copy of it; after an error it
            is partly new, and the error says which tensors may be.
        verify: Compare a digest of every message (CPU tensors).
        timeout: Seconds without a message from a rank after which it is given up; 300 by default.
        device: Where new tensors are made; by default where the others are.
        loader: Called with name and tensor of each result, in the order of the plan, once all
            ranks are through: for engines that put weights in their places themselves.
        transport: What to send with instead of a process group.
    """

    partial: bool
    verify: bool
    timeout: float
    device: torch.device | str
    loader: Callable[[str, Tensor], Any]
    transport: Transport


def reshard(
    td: Any, plan: ReshardPlan, *, group: Any = None, out: Any = None, **options: Any
) -> Pending[Any]:
    """Move the tensors of the source ranks to where the plan wants them.

    Every rank of the plan calls it, in the same order relative to other reshards of the group.
    Ranks of the group that are not in the plan may call it, and get ``None``.

    Args:
        td: What this rank holds, by the names of the plan: a tensordict, a mapping or a module;
            local tensors or DTensors.  ``None`` on a rank that only receives.
        plan: The same plan on every rank.
        group: A process group; its ranks are those of the plan.
        out: Tensors to write into, as ``td``: live parameters, say.  New ones by default.
        **options: Fields of `RunOptions`: ``partial``, ``verify``, ``timeout``, ``device``,
            ``loader``, ``transport``.

    Returns:
        A handle; its result is a tensordict of this rank's local tensors (``out`` where given),
        or ``None`` on a rank that receives nothing.  Until it is done ``td`` must stay as it is.

    Raises:
        PlanMismatch: (when the handle is waited for, like all errors, on every rank) plans
            differ, or do not fit what some rank has: lists everything, before the first byte.
        PeerLost, TransferTimeout: a rank died or said nothing; ``out`` is as it was.

    >>> import torch
    >>> from tensordict.distributed.testing import LoopbackGroup
    >>> from tensordict.placement import Layout, Placement, plan_reshard
    >>> rows = Layout.from_placements([4], [2], [Placement("shard", 0)])
    >>> plan = plan_reshard({"w": rows}, {"w": Layout.replicated([4], [0, 1])})
    >>> def main(transport):
    ...     mine = {"w": torch.arange(2.0) + 2 * transport.rank}
    ...     return reshard(mine, plan, transport=transport).wait()["w"].tolist()
    >>> LoopbackGroup(2).run(main)
    [[0.0, 1.0, 2.0, 3.0], [0.0, 1.0, 2.0, 3.0]]
    """
    run = begin(plan, group, options)
    if run is None:
        return Pending(lambda: None, "reshard of other ranks")
    # Hooks of modules run here, and so do the queues that the tensors wait in.
    held = Held.of(td, out)
    return Pending(lambda: run.do(held, out), f"reshard on rank {run.rank}")


def begin(plan: ReshardPlan, group: Any, options: Mapping[str, Any]) -> Run | None:
    """The part of this rank in a reshard, ``None`` where it has none.

    Its place among the reshards of the group is that of this call.
    """
    known = set(RunOptions.__annotations__)
    if not set(options) <= known:
        raise TypeError(f"Cannot reshard with {sorted(set(options) - known)}. Expected {known}.")
    transport = options.get("transport") or TorchTransport.of(group)
    members = _members(plan, transport, group)
    tag = _next_tag(transport)
    me = next((rank for rank, local in members.items() if local == transport.rank), None)
    return None if me is None else Run(plan, me, members, transport, tag, options)


@dataclass(slots=True)
class Held:
    """What a rank passed in: tensors by name, or why there are none."""

    sources: dict[str, Tensor] = field(default_factory=dict)
    targets: dict[str, Tensor] = field(default_factory=dict)
    queued: Barrier | None = None
    error: Exception | None = None
    problems: list[tuple[str, str]] = field(default_factory=list)

    @staticmethod
    def of(td: Any, out: Any) -> Held:
        held = Held()
        try:
            held.sources, held.targets = tensors_of(td), tensors_of(out)
            devices = {x.device for x in (*held.sources.values(), *held.targets.values())}
            held.queued = Barrier(devices)
        except Exception as error:  # the other ranks must hear of it
            held.error = error
        return held


def _members(plan: ReshardPlan, transport: Transport, group: Any) -> dict[int, int]:
    """Ranks of the plan and of the group.

    Raises:
        LayoutError: lists those that are not in the group; on every rank alike.
    """
    out: dict[int, int] = {}
    outside = []
    for rank in plan.ranks:
        local = _local_rank(transport, group, rank)
        if local is None:
            outside.append((f"rank {rank}", f"not one of the {transport.size} of the group"))
        else:
            out[rank] = local
    if outside:
        raise LayoutError(table_of("Cannot reshard: ranks of the plan are missing.", outside))
    return out


def _local_rank(transport: Transport, group: Any, rank: int) -> int | None:
    try:
        return group_rank(transport, group, rank, None)
    except ValueError:
        return None


_turns: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def _next_tag(transport: Any) -> int:
    """The first of three tags for the next reshard: the same on all ranks."""
    while hasattr(transport, "inner"):
        transport = transport.inner
    turns = _turns.get(transport)
    if turns is None:
        turns = _turns[transport] = itertools.count()
    return int(_FIRST_TAG + 3 * (next(turns) % _N_TURNS))


@dataclass(slots=True)
class _Flight:
    """A message under way."""

    message: Message
    data: Tensor
    work: Work
    stage: Stage | None


@dataclass(slots=True)
class Run:
    """One rank's part in one reshard."""

    plan: ReshardPlan
    rank: int
    members: Mapping[int, int]
    transport: Transport
    tag: int
    options: Any
    report: Report = field(init=False)
    lost: set[int] = field(default_factory=set)
    digests: dict[tuple[int, int], list[bytes]] = field(default_factory=dict)
    through: set[Any] = field(default_factory=set)
    ready: dict[Any, tuple[Tensor, Stage | None]] = field(default_factory=dict)
    awaited: int = -1
    given_up: bool = False
    progress: int = 0

    def do(self, held: Held, out: Any) -> Any:
        """Run the plan; the result of the handle."""
        self.report = Report(bytes.fromhex(self.plan.hash))
        space: Workspace | None = None
        targets: dict[str, Tensor] = {}
        try:
            if held.error is not None:
                raise held.error
            sources, targets, problems = self._check(held, out is not None)
            self.report.rows += held.problems + problems
            self.report.kind = PlanMismatch
            if not self.report.rows:
                space = self._workspace(sources, targets)
            if held.queued is not None:
                held.queued.wait()
        except Exception as error:  # the others must hear of it
            self.report.note(error, "preparing")
        Vote(self._consensus()).cast(self.report, "Cannot reshard: the ranks do not agree.")
        assert space is not None
        self.report = Report(bytes(16))
        vote = self._watch(space)
        try:
            vote.cast(self.report, "Cannot reshard: the exchange failed.")
        except TransferError as error:
            raise self._told(error, space) from None
        return self._commit(space, targets, out)

    def _workspace(self, sources: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> Workspace:
        device = self.options.get("device")
        if device is None:
            near = next(iter((*targets.values(), *sources.values())), None)
            device = "cpu" if near is None else near.device
        device = torch.device(device)
        can_carry = device.type in self.transport.capabilities.devices
        written = targets if self.options.get("partial") else {}
        return Workspace(
            self.plan,
            self.rank,
            sources,
            written,
            device=device,
            buffers=device if can_carry else torch.device("cpu"),
        )

    # --- before -----------------------------------------------------------------------

    def _check(
        self, held: Held, writes: bool
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], list[tuple[str, str]]]:
        """Local tensors of both sides, and all that does not fit the plan."""
        problems: list[tuple[str, str]] = []
        needed = {name: x for name, x in self.plan.src.items() if x.has_rank(self.rank)}
        sources = fitting(self.rank, held.sources, needed, "the source", problems)
        targets: dict[str, Tensor] = {}
        if writes:
            wanted = {name: x for name, x in self.plan.dst.items() if x.has_rank(self.rank)}
            targets = fitting(self.rank, held.targets, wanted, "out", problems)
            if self.options.get("partial"):
                problems += _shared(sources, targets)
        return sources, targets, problems

    # --- payload ----------------------------------------------------------------------

    def _watch(self, space: Workspace) -> Vote:
        """Let a thread exchange; give it up when nothing arrives for too long, or all is lost.

        The vote on the outcome listens meanwhile, and whoever hears nothing looks after the
        others: gloo does not wake a rank that waits for the rest of a message.
        """
        over = threading.Event()
        report = self.report
        # A rank may come to the vote late, after it has waited in vain for another one.
        vote = Vote(self._consensus(times=2))

        def run() -> None:
            try:
                self._exchange(space)
            except BaseException as error:  # the others hear of it, and the caller
                report.note(error, "payload")
            finally:
                over.set()
                vote.wake.set()

        in_background(run, f"reshard payload on rank {self.rank}")
        seen, since = self.progress, time.monotonic()
        while True:
            vote.wake.wait(self._pause(time.monotonic() - since))
            vote.wake.clear()
            if over.is_set():
                return vote
            if self.progress != seen:
                seen, since = self.progress, time.monotonic()
            error = self._hopeless(time.monotonic() - since)
            if error is not None or vote.is_lost():
                self.given_up = True
                self.report = Report(report.digest, list(report.rows), report.kind)
                if error is not None:
                    self.report.note(*error)
                return vote

    def _pause(self, quiet: float) -> float:
        """Seconds until the next look after some without news."""
        return min(pause_after(quiet), max(self._patience() - quiet, 0.01))

    def _hopeless(self, quiet: float) -> tuple[TransferError, str] | None:
        """Why there is nothing to wait for after some seconds without news, and where."""
        if quiet >= LOOK_AFTER:
            for local, reason in self.transport.lost(self.members.values()).items():
                return PeerLost(reason), f"payload with {self.transport.name_of(local)}"
        if quiet >= self._patience():
            return TransferTimeout(f"nothing for {quiet:.1f} s"), (
                f"payload with {self._name(self.awaited)}"
            )
        return None

    def _name(self, rank: int) -> str:
        return self.transport.name_of(self.members[rank])

    def _exchange(self, space: Workspace) -> None:
        limit = self.plan.options.max_staging_bytes
        for stage in (0, 1):
            messages = [m for m in space.program.messages if m.stage == stage]
            if limit is None:
                self._move(space, messages)
            else:
                self._move_bounded(space, messages, limit)
        if self.options.get("verify"):
            self._verify()
        space.reduce()

    def _move(self, space: Workspace, messages: list[Message]) -> None:
        """Listen to everyone, so that no sender waits for this rank, and send."""
        flights = [self._start(space, m) for m in messages if m.dst == self.rank]
        sends = [m for m in messages if m.src == self.rank]
        self._pack_first(space, sends)
        packed: deque[_Flight] = deque()
        nbytes = 0
        for message in sends:
            while packed and nbytes + message.nbytes > _MAX_PACKED_NBYTES:
                space.copy_local()  # rather than wait
                nbytes -= packed[0].message.nbytes
                self._finish(space, packed.popleft())
            flight = self._start(space, message)
            if flight is not None and flight.stage is not None:
                packed.append(flight)
                nbytes += message.nbytes
            else:
                flights.append(flight)
        space.copy_local()
        for flight in (*flights, *packed):
            if flight is not None:
                self._finish(space, flight)

    def _pack_first(self, space: Workspace, sends: list[Message]) -> None:
        """Pack what may be under way at once before any of it is sent.

        Packing between sends competes for the cores with the threads that send: with as many ranks
        as cores, that costs a tenth of the time of 64 MiB.
        """
        left = _MAX_PACKED_NBYTES
        for message in sends:
            left -= message.nbytes
            if left < 0:
                return
            self.ready[message.key] = space.outgoing(message)

    def _move_bounded(self, space: Workspace, messages: list[Message], limit: int) -> None:
        """In the common order of all ranks, with a bound on the bytes under way."""
        under_way: deque[_Flight] = deque()
        nbytes = 0
        for message in messages:
            while under_way and nbytes + message.nbytes > limit:
                nbytes -= under_way[0].message.nbytes
                self._finish(space, under_way.popleft())
            flight = self._start(space, message)
            if flight is not None:
                under_way.append(flight)
                nbytes += message.nbytes
        space.copy_local()
        for flight in under_way:
            self._finish(space, flight)

    def _start(self, space: Workspace, message: Message) -> _Flight | None:
        peer = message.dst if message.src == self.rank else message.src
        if peer in self.lost:
            return None
        try:
            if message.src == self.rank:
                made = message.key in self.ready
                data, stage = self.ready.pop(message.key) if made else space.outgoing(message)
                self._note(message, data)
                work = self.transport.isend(data, self.members[peer], self.tag)
            else:
                data, stage = space.incoming(message)
                work = self.transport.irecv(data, self.members[peer], self.tag)
        except TransferError as error:
            self._failed(peer, error)
            return None
        return _Flight(message, data, work, stage)

    def _finish(self, space: Workspace, flight: _Flight) -> None:
        message, stage = flight.message, flight.stage
        peer = message.dst if message.src == self.rank else message.src
        self.awaited = peer
        try:
            flight.work.wait(FOREVER)  # `_watch` knows when it is in vain
        except TransferError as error:
            if not self.given_up:
                self._failed(peer, error)
            return
        finally:
            self.progress += 1
        if self.given_up:  # nobody waits for this any more, so it writes no more
            return
        if message.dst == self.rank:
            self._note(message, flight.data)
            if stage is not None:
                space.unpack(message, stage)
            self.through.add(message.key)
        if stage is not None:
            space.give_back(message, stage)

    def _patience(self) -> float:
        """Seconds to wait for a message: few once a rank is gone, for then it is all in vain."""
        timeout = float(self.options.get("timeout", _TIMEOUT))
        return min(timeout, _GRACE) if self.lost else timeout

    def _failed(self, peer: int, error: TransferError) -> None:
        """Go on with the other peers: they wait for this rank."""
        if peer not in self.lost:
            self.lost.add(peer)
            self.report.note(error, f"payload with {self._name(peer)}")

    # --- verification -------------------------------------------------------------------

    def _note(self, message: Message, data: Tensor) -> None:
        if self.options.get("verify"):
            digest = hashlib.blake2b(data.cpu().numpy().data, digest_size=16).digest()
            self.digests.setdefault((message.src, message.dst), []).append(digest)

    def _verify(self) -> None:
        """Compare the digests of all messages of each pair, in order."""
        pairs = sorted(pair for pair in self.digests if not set(pair) & self.lost)
        works: list[tuple[tuple[int, int], bytes, Tensor, Work]] = []
        for pair in pairs:
            mine = b"".join(self.digests[pair])
            data = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
            if pair[0] == self.rank:
                work = self.transport.isend(data, self.members[pair[1]], self.tag + 2, control=True)
            else:
                data = torch.empty_like(data)
                work = self.transport.irecv(data, self.members[pair[0]], self.tag + 2, control=True)
            works.append((pair, mine, data, work))
        for pair, mine, data, work in works:
            self.awaited = pair[0] if pair[1] == self.rank else pair[1]
            work.wait(FOREVER)
            self.progress += 1
            if pair[1] == self.rank and data.numpy().tobytes() != mine:
                error = TransferError(f"messages of rank {pair[0]} arrived with other bytes")
                self.report.note(error, "verification")

    # --- after --------------------------------------------------------------------------

    def _consensus(self, times: int = 1) -> Consensus:
        return Consensus(
            self.transport,
            list(self.members.values()),
            [self.transport.name_of(local) for local in self.members.values()],
            self.tag + 1,
            times * float(self.options.get("timeout", _TIMEOUT)),
        )

    def _told(self, error: TransferError, space: Workspace) -> TransferError:
        """The error with what it means for ``out``."""
        if not self.options.get("partial"):
            return error
        program = space.program
        missing = [
            piece.cut
            for message in program.messages
            if message.dst == self.rank and message.key not in self.through
            for piece in message.pieces
        ]
        if not space.copied:
            missing += [cut for _, cut in program.copies]
        names = {program.targets[cut.slot].name for cut in missing}
        if not space.copied:
            names.update(space.constant)
        text = ", ".join(sorted(names)) or "none"
        told = type(error)(f"{error}\nTensors of out that are not complete on this rank: {text}.")
        told.incomplete = sorted(names)  # type: ignore[attr-defined]
        return told

    def _commit(self, space: Workspace, targets: Mapping[str, Tensor], out: Any) -> Any:
        results = dict(space.results)
        for name, other in self.plan.aliases.items():
            if other in results:
                results[name] = results[other]
        # In the order of the plan, aliases among the others.
        results = {name: results[name] for name in self.plan.dst if name in results}
        if out is not None:
            pairs = [
                (targets[name], value)
                for name, value in results.items()
                if targets[name].data_ptr() != value.data_ptr() or not value.numel()
            ]
            if pairs:
                with torch.inference_mode():  # as some engines make their weights
                    torch._foreach_copy_([a for a, _ in pairs], [b for _, b in pairs])
        wait_for({value.device for value in results.values()})
        loader = self.options.get("loader")
        if loader is not None:
            for name, value in results.items():
                loader(name, value)
        if out is not None:
            return out
        return tree_of(results) if results else None


def fitting(
    rank: int,
    tensors: Mapping[str, Tensor],
    layouts: Mapping[str, Layout],
    where: str,
    problems: list[tuple[str, str]],
) -> dict[str, Tensor]:
    """The local tensors that layouts ask for; adds to ``problems`` what does not fit."""
    found: dict[str, Tensor] = {}
    for name, layout in layouts.items():
        tensor = tensors.get(name)
        if tensor is None:
            problems.append((name, f"missing in {where}"))
            continue
        local = found[name] = local_tensor(tensor)
        shape = layout.local_shape(rank)
        if tuple(local.shape) != shape:
            text = f"local shape {list(shape)} in the plan, {list(local.shape)} in {where}"
            problems.append((name, text))
        if local.dtype is not layout.dtype and layout.dtype is not None:
            text = f"{dtype_name(layout.dtype)} in the plan, {dtype_name(local.dtype)} in {where}"
            problems.append((name, text))
        if local.layout is not torch.strided:
            problems.append((name, f"a tensor of layout {local.layout} in {where}"))
        elif local.is_meta and local.numel():
            problems.append((name, f"a tensor without data (meta) in {where}"))
        elif where == "out" and any(n > 1 and not by for n, by in zip(local.shape, local.stride())):
            problems.append((name, "expanded in out: its elements share their memory"))
    return found


def _shared(sources: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> list[tuple[str, str]]:
    """Targets whose memory is still to be read."""
    memory = {x.untyped_storage().data_ptr(): name for name, x in sources.items() if x.numel()}
    return [
        (name, f"shares its memory with the source {memory[at]!r}: not with partial=True")
        for name, x in targets.items()
        if x.numel() and (at := x.untyped_storage().data_ptr()) in memory
    ]
