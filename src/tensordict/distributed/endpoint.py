"""What a rank remembers between exchanges: schemas by digest, what peers know, buffers.

One `Endpoint` per transport.  Everything here is a cache or a guard: losing it costs time,
never correctness.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from torch import Size, Tensor

from ..core.node import Node
from ..errors import EntryTypeError, TransferError, WireError
from ..storage.buffer import HOST_ALIGNMENT
from . import describe
from .describe import Described, Snapshot, same_apart, same_parts
from .one_buffer import alignment_of, host_buffer_of
from .packing import Packing, Stage, plan_packing, plan_whole
from .schema import VALUE, Schema, decode, digest_of, places
from .transport_protocol import Transport
from .wire import Limits, schema_digest

_MAX_SCHEMAS: Final = 64
_MAX_STAGES: Final = 2  # of each direction, for each schema
_MAX_STAGED_NBYTES: Final = 256 << 20  # in all
_MAX_ACKED: Final = 256


@dataclass(slots=True, eq=False)
class Known:
    """A schema with everything that was derived from it."""

    schema: Schema
    data: bytes
    digest: bytes
    packing: Packing
    value_paths: list[Any]
    apart: tuple[int, ...] | None
    snapshot: Snapshot | None = None
    stages: list[Stage] = field(default_factory=list)
    _whole: Known | None = None
    _laid: tuple[int, list[int]] | None = None  # a buffer seen last, and where its parts lie

    def whole(self) -> Known:
        """The same schema for a payload that is the buffer of a consolidated tree.

        Raises:
            WireError: a part that cannot lie in such a buffer.
        """
        if self._whole is None:
            try:
                packing = plan_whole(self.schema)
            except EntryTypeError as error:
                raise WireError(f"the payload cannot be one buffer: {error}", 6) from None
            self._whole = Known(
                self.schema, self.data, self.digest, packing, self.value_paths, None
            )
        return self._whole

    def buffer_under(self, node: Node, described: Described) -> Tensor | None:
        """The buffer of a consolidated tree of this schema, if all its leaves still lie there.

        Args:
            node: the tree.
            described: what it is made of.

        Returns:
            uint8 ``[n]``, of the bytes that `whole` says; None for any other tree.
        """
        buffer = host_buffer_of(node)
        if buffer is None:
            return None
        plan = self.whole().packing.one_buffer
        assert plan is not None
        if buffer.numel() < plan.nbytes:
            return None
        seen = self._laid is not None and self._laid[0] == buffer.data_ptr()
        addresses = self._laid[1] if seen and self._laid else plan.addresses(buffer)
        if described.pointers != addresses or not plan.holds(described.parts, seen=seen):
            return None
        self._laid = buffer.data_ptr(), addresses
        return buffer.detach()[: plan.nbytes]

    def stage(self) -> Stage:
        """A buffer for one packed message, used before or new."""
        return _pool.take(self)

    def give_back(self, stage: Stage) -> None:
        """Keep a buffer for the next message of this schema."""
        _pool.keep(self, stage)


class StagePool:
    """The buffers that the process keeps between exchanges, the last used ones first.

    Args:
        limit: bytes to keep at most.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._kept: OrderedDict[int, tuple[Known, Stage]] = OrderedDict()
        self.nbytes = 0

    def take(self, entry: Known) -> Stage:
        """A buffer of a schema, kept or new."""
        with self._lock:
            if entry.stages:
                stage = entry.stages.pop()
                self._forget(stage)
                return stage
        return Stage(entry.packing)

    def keep(self, entry: Known, stage: Stage) -> None:
        """Keep a buffer, and drop those that were not used for longest."""
        with self._lock:
            if len(entry.stages) >= _MAX_STAGES:
                return
            entry.stages.append(stage)
            self._kept[id(stage)] = entry, stage
            self.nbytes += stage.nbytes
            while self.nbytes > self._limit:
                owner, oldest = next(iter(self._kept.values()))
                owner.stages.remove(oldest)
                self._forget(oldest)

    def _forget(self, stage: Stage) -> None:
        del self._kept[id(stage)]
        self.nbytes -= stage.nbytes


_pool = StagePool(_MAX_STAGED_NBYTES)


def known(schema: Schema, data: bytes, digest: bytes) -> Known:
    """Everything derived from a schema, its bytes and their digest."""
    paths = []
    if schema.values:
        paths = [path for path, place in places(schema) if place.letter == VALUE]
    packing = plan_packing(schema)
    apart = None
    if not (schema.values or packing.large):
        apart = packing.apart(len(schema.dtypes))
    return Known(schema, data, digest, packing, paths, apart)


@dataclass(slots=True)
class Taken:
    """A tensordict taken apart, and the buffer for what of it is packed.

    Attributes:
        described, entry: the tensordict and its schema.
        stage: the buffer; None when it is the tensordict's own.
        packed: whether it is filled.
        buffer: that of a consolidated tensordict, as it can be sent.
    """

    described: Described
    entry: Known
    stage: Stage | None
    packed: bool
    buffer: Tensor | None = None


def learn(data: bytes, digest: bytes, limits: Limits) -> Known:
    """The entry of a schema that a peer has sent.

    Raises:
        WireError: it is none, is not the one announced, or is above the limits.
    """
    if schema_digest(data) != digest:
        raise WireError("the schema does not have the digest that the header announces", 24)
    entry = known(decode(data, limits), data, digest)
    if entry.packing.nbytes > limits.max_payload_nbytes:
        raise WireError(
            f"the schema describes {entry.packing.nbytes} bytes, above the limit of "
            f"{limits.max_payload_nbytes}"
        )
    return entry


class Catalogue:
    """The schemas met last, by digest and by a cheap fingerprint of their columns."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_digest: OrderedDict[bytes, Known] = OrderedDict()
        self._by_print: dict[Any, Known] = {}

    def find(self, digest: bytes) -> Known | None:
        """The schema of a digest."""
        with self._lock:
            found = self._by_digest.get(digest)
            if found is not None:
                self._by_digest.move_to_end(digest)
            return found

    def add(self, entry: Known) -> Known:
        """Remember a schema; one met before stays the one in use."""
        with self._lock:
            old = self._by_digest.get(entry.digest)
            if old is not None:
                return old
            self._by_digest[entry.digest] = entry
            self._by_print[_fingerprint(entry.schema, _sample(entry.schema.shapes))] = entry
            while len(self._by_digest) > _MAX_SCHEMAS:
                _, gone = self._by_digest.popitem(last=False)
                key = _fingerprint(gone.schema, _sample(gone.schema.shapes))
                if self._by_print.get(key) is gone:
                    del self._by_print[key]
            return entry

    def near(self, schema: Schema, shapes: Sequence[Size]) -> Known | None:
        """A known schema that this one may be equal to; ``shapes`` is a sample of its shapes."""
        return self._by_print.get(_fingerprint(schema, shapes))

    def of(self, schema: Schema) -> Known:
        """The entry of a schema that was just made from a tensordict."""
        shapes = _sample(schema.shapes)
        near = self.near(schema, shapes)
        if near is not None and describe.equal(near.schema, schema):
            return near
        data, digest = digest_of(schema)
        found = self.find(digest)
        if found is None:
            return self.add(known(schema, data, digest))
        with self._lock:  # the next time it is found without being encoded
            self._by_print[_fingerprint(schema, shapes)] = found
        return found


def _sample(column: Sequence[Any]) -> tuple[Any, ...]:
    """Some items from all over a column, the first and the last among them."""
    return (*column[:: len(column) // 8 + 1], *column[-1:])


def _fingerprint(schema: Schema, shapes: Sequence[Size]) -> Any:
    return (
        len(schema.keys),
        len(schema.dtypes),
        schema.pack_below,
        schema.locked[0],
        _sample(schema.keys[0]),
        _sample(schema.keys[-1]),
        tuple(shapes),
        _sample(schema.dtypes),
    )


class Endpoint:
    """The memory of one rank about one transport."""

    def __init__(self, transport: Transport) -> None:
        self._transport = weakref.ref(transport)
        self.catalogue = Catalogue()
        self._acked: dict[int, OrderedDict[bytes, None]] = {}
        self._met: dict[int, tuple[Known | None, Known]] = {}
        self._busy: set[Any] = set()
        self._lock = threading.Lock()

    def describe(
        self,
        node: Node,
        *,
        pack_below: int,
        bundle: int | None = None,
        still: Callable[[Snapshot, Sequence[Tensor]], bool] = same_parts,
    ) -> tuple[Described, Known]:
        """A tensordict taken apart, and the entry of its schema; ``still`` as in `describe`."""
        alignment = HOST_ALIGNMENT if host_buffer_of(node) is None else alignment_of(node)
        described = describe.describe(
            node,
            alignment=alignment,
            pack_below=pack_below,
            bundle=bundle,
            near=self._snapshot,
            still=still,
        )
        entry = self.catalogue.of(described.schema)
        if described.schema is not entry.schema:
            described.schema = entry.schema
        if not described.recalled:
            entry.snapshot = Snapshot.of(described, entry.apart)
        return described, entry

    def take(self, node: Node, *, pack_below: int, bundle: int | None = None) -> Taken:
        """A tensordict taken apart, packed already where that helps to tell what it is."""
        if host_buffer_of(node) is not None:
            described, entry = self.describe(node, pack_below=pack_below, bundle=bundle)
            buffer = entry.buffer_under(node, described)
            if buffer is not None:
                return Taken(described, entry, None, packed=True, buffer=buffer)
        described, entry = self.describe(
            node, pack_below=pack_below, bundle=bundle, still=same_apart
        )
        stage = entry.stage()
        if described.recalled and entry.apart is not None:
            if stage.pack_alike(described.parts, plain=not entry.schema.grad):
                return Taken(described, entry, stage, packed=True)
            entry.give_back(stage)
            described, entry = self.describe(node, pack_below=pack_below, bundle=bundle)
            stage = entry.stage()
        return Taken(described, entry, stage, packed=False)

    def _snapshot(self, schema: Schema, parts: Sequence[Tensor]) -> Snapshot | None:
        near = self.catalogue.near(schema, [x.shape for x in _sample(parts)])
        return None if near is None else near.snapshot

    def is_acked(self, peer: int, digest: bytes) -> bool:
        """Whether a peer has said that it knows a schema."""
        return digest in self._acked.get(peer, ())

    def ack(self, peer: int, digest: bytes) -> None:
        """Note that a peer knows a schema."""
        with self._lock:
            digests = self._acked.setdefault(peer, OrderedDict())
            digests[digest] = None
            while len(digests) > _MAX_ACKED:
                digests.popitem(last=False)

    def unack(self, peer: int, digest: bytes) -> None:
        """Note that a peer has forgotten a schema."""
        with self._lock:
            self._acked.get(peer, OrderedDict()).pop(digest, None)

    def met(self, peer: int, entry: Known) -> None:
        """Note what a peer has sent."""
        before = self._met.get(peer)
        self._met[peer] = (None if before is None else before[1], entry)

    def expected(self, peer: int) -> Known | None:
        """What a peer will send, if it goes on as it did the last two times."""
        before, last = self._met.get(peer, (None, None))
        return last if before is last else None

    @contextmanager
    def claim(self, verb: str, peer: int, tag: int) -> Iterator[None]:
        """Hold a tag for one exchange in one direction.

        Raises:
            TransferError: another exchange with this peer is using it.
        """
        transport = self._transport()
        tagged = transport is None or transport.capabilities.tags
        key = (verb, peer, tag if tagged else None)
        with self._lock:
            if key in self._busy:
                raise TransferError(
                    f"Cannot {verb} on tag {tag} with rank {peer} of the group: an earlier {verb} "
                    "on that tag is still under way. Wait for it, or use another init_tag."
                )
            self._busy.add(key)
        try:
            yield
        finally:
            with self._lock:
                self._busy.discard(key)


_endpoints: weakref.WeakKeyDictionary[Any, Endpoint] = weakref.WeakKeyDictionary()
_endpoints_lock = threading.Lock()


def endpoint_of(transport: Transport) -> Endpoint:
    """The endpoint of a transport, made at first use."""
    with _endpoints_lock:
        found = _endpoints.get(transport)
        if found is None:
            found = _endpoints[transport] = Endpoint(transport)
        return found
