"""Where a received tensordict goes: into one that is there, or into fresh memory.

A target is looked at before the sender has spoken, says what it would not take, and hands
out a *landing*: buffers for the messages, and a commit that is called when every byte has
arrived and was verified.  Until then nothing that the user sees has changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from ..core.leaf import Leaf
from ..core.lock import touched
from ..core.node import Node
from ..core.registry import known_node, node_class
from ..errors import SchemaMismatch, TransferError
from ..storage.buffer import fill
from ..storage.consolidate import buffer_of
from . import composite
from .describe import Described, alike, build, same_shapes
from .endpoint import Known
from .link import Link, Request
from .one_buffer import consolidated, left_buffer, written
from .packing import Stage, formatted, take_apart
from .schema import COMPOSITE, NODE, TENSOR, VALUE, Composite, Schema, differences, places, unlocked

# A guess that is wrong costs its memory, untouched, for the length of one exchange.
_GUESS_BELOW: Final = 256 << 20


class Landing(Protocol):
    """Buffers for the messages of one payload, and what to do when they are full."""

    packed: Tensor
    large: list[Tensor]

    def messages(self) -> list[Tensor]: ...

    def prepare(self) -> None: ...

    def commit(self, values: Sequence[Leaf]) -> Node: ...

    def release(self) -> None: ...


class Target(Protocol):
    """Where a tensordict is received.

    Attributes:
        version: the number of what has arrived, on a channel; 0 before.
    """

    version: int

    def look(self, request: Request) -> Exception | None: ...

    def mismatch(self, entry: Known, link: Link) -> Exception | None: ...

    def landing(self, entry: Known, values_nbytes: int) -> Landing: ...


def bundled(td: Any) -> tuple[Any, int | None]:
    """One tensordict that carries a list of them, and how many; anything else as it is."""
    if not isinstance(td, (list, tuple)):
        return td, None
    header: dict[str, Any] = {"batch_size": [], "device": None, "names": None}
    entries = {str(k): part for k, part in enumerate(td)}
    return node_class("dense")._from_header(header, entries), len(td)


# --- a new tensordict ---------------------------------------------------------------------


def no_device(device: torch.device | None) -> TransferError | None:
    """Why nothing can be received on a device: it is not there."""
    if device is None or device.type in ("cpu", "meta"):
        return None
    try:
        torch.empty(0, device=device)
    except Exception as error:
        return TransferError(f"Cannot receive on the device {device}: {error}")
    return None


class New:
    """Receive as a new tensordict; packed leaves share one buffer.

    Args:
        device: where its leaves go, the CPU by default.
        locks: whether nodes that were locked at the sender are locked.
        mesh: the device mesh of shards (`DTensor` leaves).
    """

    version = 0

    def __init__(
        self, device: torch.device | None = None, *, locks: bool = True, mesh: Any = None
    ) -> None:
        self.device = torch.device("cpu") if device is None else device
        self.locks = locks
        self.mesh = mesh
        self._guess: tuple[Known, Landing] | None = None

    def look(self, request: Request) -> Exception | None:
        """Lay out what the peer will probably send, since there is nothing else to do."""
        trouble = no_device(self.device)
        if trouble is not None:
            return trouble
        entry = request.endpoint.expected(request.peer)
        if entry is None or entry.schema.values:
            return None
        if entry.packing.nbytes <= min(_GUESS_BELOW, request.limits.max_payload_nbytes):
            with suppress(RuntimeError, MemoryError):  # told to the sender, if it comes to that
                landing = _NewLanding(self, entry, 0)
                landing.prepare()
                self._guess = entry, landing
        return None

    def mismatch(self, entry: Known, link: Link) -> Exception | None:
        """A new tensordict takes everything but shards of a mesh that is not given."""
        strange = [k for k in dict.fromkeys(entry.schema.kinds) if known_node(k) is None]
        if strange:
            return TransferError(
                f"{link.me} cannot receive nodes of kind {strange[0]!r} from {link.peer}: nothing "
                "registered it. Import the module that defines it first."
            )
        shards = [c for c in entry.schema.composites if c.kind == composite.DTENSOR]
        if shards and self.mesh is None:
            return TransferError(
                f"{link.me} cannot receive {len(shards)} shards of distributed tensors from "
                f"{link.peer} as new leaves: pass mesh=, or receive into a tensordict."
            )
        for shard in shards:
            if list(self.mesh.shape) != shard.params.get("mesh"):
                return TransferError(
                    f"{link.me} cannot receive a shard of a mesh {shard.params.get('mesh')} from "
                    f"{link.peer} for a mesh {list(self.mesh.shape)}. Pass a mesh of that shape."
                )
        return None

    def landing(self, entry: Known, values_nbytes: int) -> Landing:
        guess, self._guess = self._guess, None
        if guess is not None and guess[0] is entry:
            return guess[1]
        return _NewLanding(self, entry, values_nbytes)


class _NewLanding:
    def __init__(self, target: New, entry: Known, values_nbytes: int) -> None:
        self._target = target
        self._entry = entry
        schema, plan = entry.schema, entry.packing
        self.packed = torch.empty(plan.packed_nbytes + values_nbytes, dtype=torch.uint8)
        self._buffer = self.packed[: plan.packed_nbytes] if values_nbytes else self.packed
        self.large = [torch.empty(schema.shapes[i], dtype=schema.dtypes[i]) for i in plan.large]
        self._parts: list[Any] = []
        self._early: Node | None = None

    def messages(self) -> list[Tensor]:
        return [*self.large, *self._entry.packing.messages(self.packed)]

    def prepare(self) -> None:
        schema, plan = self._entry.schema, self._entry.packing
        here = self._target.device.type == "cpu"
        if self._parts or not (here or plan.one_buffer is None):
            return
        self._take_apart(self.packed)
        # What only arranges memory is done while the bytes are under way.
        plain = not (schema.composites or schema.values or schema.formats or schema.grad)
        if plain and here:
            self._early = self._build(())

    def _take_apart(self, packed: Tensor) -> None:
        plan = self._entry.packing
        parts = self._parts = [None] * len(self._entry.schema.dtypes)
        take_apart(packed, plan, parts)
        for i, x in zip(plan.large, self.large):
            parts[i] = x

    def commit(self, values: Sequence[Leaf]) -> Node:
        if self._early is not None:
            return self._early
        schema, device = self._entry.schema, self._target.device
        if not self._parts:  # one buffer moves as one
            self._buffer = self._buffer.to(device)
            self._take_apart(self._buffer)
        elif device.type != "cpu":
            self._parts[:] = [None if x is None else x.to(device) for x in self._parts]
        parts = self._parts
        for i, name in schema.formats.items():
            if i not in schema.ties:
                parts[i] = formatted(parts[i], name)
        for i in schema.grad:
            if i not in schema.ties:
                parts[i].requires_grad_()
        return self._build(values)

    def _build(self, values: Sequence[Leaf]) -> Node:
        schema, target = self._entry.schema, self._target
        for i, j in schema.ties.items():
            self._parts[i] = self._parts[j]
        out = build(
            schema, self._parts, values, target.device, locks=target.locks, mesh=target.mesh
        )
        plan = self._entry.packing.one_buffer
        apart = schema.composites or schema.formats or not all(schema.locked)
        if plan is not None and target.locks and not apart:
            consolidated(out, plan, self._buffer, self._parts)
        return out

    def release(self) -> None:
        """The memory belongs to the result."""


# --- into a tensordict --------------------------------------------------------------------


class Into:
    """Receive into the memory of a tensordict.

    Args:
        node: the tensordict; its leaves are written in place, also when it is locked.  Ragged
            and sparse leaves are replaced, after which it is not consolidated any more.
        atomic: whether large leaves are received beside and written when all is there.
            Without it they are received in place, which saves a copy and their memory, and
            leaves them half written when the peer dies.
    """

    version = 0

    def __init__(self, node: Node, *, atomic: bool = True) -> None:
        self.node = node
        self.atomic = atomic
        self._described: Described | None = None
        self._entry: Known | None = None
        self._unwritable: list[tuple[Any, str]] = []

    def look(self, request: Request) -> Exception | None:
        """Take the tensordict apart; what is wrong with it is told to the sender as well."""
        try:
            self._described, self._entry = request.endpoint.describe(
                self.node,
                pack_below=request.pack_below,
                bundle=request.bundle,
                still=same_shapes,  # which leaves require grad makes no difference here
            )
            self._unwritable = unwritable(self._described)
        except Exception as error:  # the sender waits for an answer, whatever went wrong
            return error
        return None

    def mismatch(self, entry: Known, link: Link) -> Exception | None:
        """The error that lists every path that differs."""
        return self.refusal(entry.schema, link, one_buffer=entry.packing.one_buffer is not None)

    def refusal(self, sent: Schema, link: Link, *, one_buffer: bool = False) -> Exception | None:
        """The error that lists every path at which this tensordict is not of a structure.

        Args:
            sent: the structure.
            link: the two sides.
            one_buffer: whether the sender's tree is consolidated.  Such trees are always locked,
                which is then no difference.
        """
        assert self._entry is not None
        here = self._entry.schema
        rows: list[tuple[Any, str]] = []
        if one_buffer or buffer_of(self.node) is not None:
            sent, here = unlocked(sent), unlocked(here)
        if not (alike(sent, here) and sent.locked == here.locked):
            rows = differences(sent, here)
            rows += _tied_here(sent, here)
        rows += self._unwritable
        if not rows:
            return None
        what = "1 entry differs" if len(rows) == 1 else f"{len(rows)} entries differ"
        return SchemaMismatch(f"{link.me} cannot receive from {link.peer}: {what}:", rows)

    def landing(self, entry: Known, values_nbytes: int) -> Landing:
        assert self._entry is not None and self._described is not None
        mine, here = self._described, self._entry.schema
        if not alike(entry.schema, here):
            mine = reordered(entry.schema, here, mine)
        buffer = None
        same = entry.packing.one_buffer is not None and here.alignment == entry.schema.alignment
        if same and all(composite.writes_in_place(c.kind) for c in here.composites):
            buffer = self._entry.buffer_under(self.node, mine)
        return _IntoLanding(self.node, mine, entry, values_nbytes, buffer, atomic=self.atomic)


class _IntoLanding:
    def __init__(
        self,
        node: Node,
        mine: Described,
        entry: Known,
        values_nbytes: int,
        buffer: Tensor | None,
        *,
        atomic: bool,
    ) -> None:
        self._node = node
        self._mine = mine
        self._entry = entry
        self._buffer = buffer
        self._stage: Stage | None = None
        if buffer is not None and not (atomic or values_nbytes):
            self.packed = buffer
        else:
            self._stage = entry.stage()
            self.packed = self._stage.message(values_nbytes)
        self._replaced: list[tuple[tuple[Node, str], Composite]] = []
        self._parts = mine.parts
        if entry.schema.composites:
            self._make_room_for_wholes()
        self._fills: list[tuple[Tensor, Tensor]] = []
        self._direct: list[Tensor] = []
        self.large = self._land_large(atomic)

    def _make_room_for_wholes(self) -> None:
        """Ragged and sparse leaves are replaced: their parts land in memory of their own."""
        self._parts = list(self._parts)
        for whole, site in zip(self._entry.schema.composites, self._mine.whole_sites):
            if not composite.writes_in_place(whole.kind):
                self._replaced.append((site, whole))
                for i in range(whole.first, whole.first + whole.n):
                    self._parts[i] = torch.empty_like(self._parts[i])

    def _land_large(self, atomic: bool) -> list[Tensor]:
        plan, schema = self._entry.packing, self._entry.schema
        out: list[Tensor] = []
        spare = self._stage.large_buffers() if atomic and self._stage is not None else None
        for k, i in enumerate(plan.large):
            part = self._parts[i]
            if spare is None and _direct(part):
                out.append(part.detach())
                self._direct.append(part)
                continue
            if spare is None:
                raw = torch.empty(plan.large_nbytes[k], dtype=torch.uint8)
            else:
                raw = spare[k]
            view = raw.view(schema.dtypes[i]).view(schema.shapes[i])
            out.append(view)
            self._fills.append((part, view))
        return out

    def messages(self) -> list[Tensor]:
        return [*self.large, *self._entry.packing.messages(self.packed)]

    def prepare(self) -> None:
        """Everything is ready."""

    def commit(self, values: Sequence[Leaf]) -> Node:
        parts = self._parts
        self._unpack()
        with torch.inference_mode():  # memory of the user may have been made in it
            fill([part for part, _ in self._fills], [view for _, view in self._fills])
            self._write_ties(parts)
        written(self._direct)
        fresh: list[tuple[tuple[Node, str], Any]] = [
            (site, composite.join(w.kind, parts[w.first : w.first + w.n], w.params))
            for site, w in self._replaced
        ]
        for (node, name), entry in fresh:
            entry.requires_grad_(node._fetch(name).requires_grad)  # type: ignore[union-attr]
        for (node, name), entry in [*fresh, *zip(self._mine.sites, values)]:
            node._store(name, entry)
            touched(node)
        for (node, _), _ in fresh:
            left_buffer(node)
        return self._node

    def _write_ties(self, parts: Sequence[Tensor]) -> None:
        """What is one memory at the sender came once, and may be several here."""
        loose = [
            (parts[i], parts[j])
            for i, j in self._entry.schema.ties.items()
            if parts[i].data_ptr() != parts[j].data_ptr() or parts[i].stride() != parts[j].stride()
        ]
        fill([target for target, _ in loose], [source for _, source in loose])

    def _unpack(self) -> None:
        if self._buffer is None:
            assert self._stage is not None
            self._stage.unpack_into(self._parts)
            return
        if self._stage is not None:
            with torch.inference_mode():
                self._buffer.copy_(self.packed[: self._buffer.numel()])
        written(self._parts)

    def release(self) -> None:
        if self._stage is not None:
            self._entry.give_back(self._stage)


def _direct(part: Tensor) -> bool:
    plain = part.device.type == "cpu" and part.is_contiguous() and part.numel() != 1
    return plain and not part.is_conj() and not part.is_neg()


def unwritable(mine: Described) -> list[tuple[Any, str]]:
    """The parts whose elements share memory with each other (expanded tensors)."""
    parts = mine.parts
    if False not in [x.is_contiguous() for x in parts]:
        return []
    bad = [
        i
        for i, x in enumerate(parts)
        if not x.is_contiguous() and any(s == 0 and n > 1 for s, n in zip(x.stride(), x.shape))
    ]
    if not bad:
        return []
    paths = {place.first: path for path, place in places(mine.schema) if place.letter in "tc"}
    return [(paths.get(i, ()), "expanded here: its elements share memory") for i in bad]


def _tied_here(sent: Schema, here: Schema) -> list[tuple[Any, str]]:
    """The leaves that are one memory here and two values at the sender."""
    if not here.ties:
        return []
    theirs = {path: place.first for path, place in places(sent) if place.letter == TENSOR}
    mine = {place.first: path for path, place in places(here) if place.letter == TENSOR}
    out = []
    for i, j in here.ties.items():
        a, b = theirs.get(mine.get(i, ())), theirs.get(mine.get(j, ()))
        if a is not None and b is not None and sent.ties.get(a, a) != sent.ties.get(b, b):
            out.append((mine[i], f"two values at the sender, the memory of {mine[j]!r} here"))
    return out


def reordered(sent: Schema, here: Schema, mine: Described) -> Described:
    """The same tensordict in the order of the sender's schema: leaves are matched by key.

    Its values stay in their order; ``sites`` are those of the sender's.
    """
    found = {path: place.first for path, place in places(here) if place.letter != NODE}
    parts: list[Tensor] = []
    sites, whole_sites = [], []
    spans = {c.first: c.n for c in here.composites}
    order = {c.first: k for k, c in enumerate(here.composites)}
    for path, place in places(sent):
        if place.letter == NODE:
            continue
        first = found[path]
        if place.letter == VALUE:
            sites.append(mine.sites[first])
        elif place.letter == COMPOSITE:
            parts += mine.parts[first : first + spans[first]]
            whole_sites.append(mine.whole_sites[order[first]])
        else:
            parts.append(mine.parts[first])
    return Described(sent, parts, mine.values, sites, whole_sites, [])


def values_of(sent: Schema, here: Schema, values: Sequence[Leaf]) -> Sequence[Leaf]:
    """The values of one schema in the order of another one."""
    if sent.keys == here.keys:
        return values
    found = {path: place.first for path, place in places(sent) if place.letter == VALUE}
    return [values[found[path]] for path, place in places(here) if place.letter == VALUE]
