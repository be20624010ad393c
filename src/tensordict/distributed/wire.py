"""Frames: the bytes that two ranks exchange before any payload.

A frame has a fixed header of 64 bytes (little endian), followed by a body.  The
first message of an exchange is always `EAGER_NBYTES` long, so both ends agree on
counts whatever the backend; schema and payload ride in it when they fit.  Every
answer is `REPLY_NBYTES` long.  Nothing here knows about tensordicts, and nothing is
allocated from a length that has not been compared with `Limits` first.
`docs/internals/wire-format.md` is the text of the format.
"""

from __future__ import annotations

import enum
import hashlib
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from ..errors import WireError

MAGIC: Final = b"TDXF"
MAJOR: Final = 1
MINOR: Final = 0
HEADER_NBYTES: Final = 64
EAGER_NBYTES: Final = 4096
REPLY_NBYTES: Final = 512
SEAL_NBYTES: Final = 4
EAGER_ROOM: Final = EAGER_NBYTES - HEADER_NBYTES - SEAL_NBYTES
REPLY_ROOM: Final = REPLY_NBYTES - HEADER_NBYTES - SEAL_NBYTES
DIGEST_NBYTES: Final = 16
NO_DIGEST: Final = b"\0" * DIGEST_NBYTES

# magic, major, minor, flags, schema bytes, payload bytes, digest, payload checksum,
# sequence, publication version; the header checksum (crc32 of these 60 bytes) follows.
_FIELDS: Final = struct.Struct("<4sBBHQQ16sQIQ")
_CRC: Final = struct.Struct("<I")

_INLINE_SCHEMA: Final = 1 << 0
_INLINE_PAYLOAD: Final = 1 << 1
_COMPRESSED: Final = 1 << 2
_DELTA: Final = 1 << 3
_LAST: Final = 1 << 4
_STRICT: Final = 1 << 5
_ONE_BUFFER: Final = 1 << 6
_CHECKSUM_SHIFT: Final = 8
_KIND_SHIFT: Final = 12
_KNOWN: Final = 0b0111_1011  # compression has a bit, and no algorithm yet


class Kind(enum.IntEnum):
    """What a frame says."""

    DATA = 0  # a sender announces (and, when it fits, carries) a tensordict
    ERROR = 1  # a sender cannot send: the body says why
    ACCEPT = 2  # a receiver agrees: the payload may follow
    NEED_SCHEMA = 3  # a receiver does not know the digest: the schema may follow
    REFUSE = 4  # a receiver does not agree: the body says why
    COMMIT = 5  # a receiver has verified and written the payload


class Checksum(enum.IntEnum):
    """Checksums of a payload."""

    NONE = 0
    CRC32 = 1
    BLAKE2B = 2
    SUM64 = 3


@dataclass(frozen=True, slots=True)
class Limits:
    """What a receiver is ready to allocate or to walk for a peer, in bytes and counts.

    Attributes:
        max_schema_nbytes: of a schema, and of the encoded non-tensor values.
        max_payload_nbytes: of everything else.
        max_depth: of nested tensordicts.
        max_entries: nodes, and parts of leaves.

    >>> Limits(max_payload_nbytes=1 << 20).max_payload_nbytes
    1048576
    """

    max_schema_nbytes: int = 64 << 20
    max_payload_nbytes: int = 1 << 38
    max_depth: int = 128
    max_entries: int = 4_000_000


DEFAULT_LIMITS: Final = Limits()


@dataclass(frozen=True, slots=True)
class Header:
    """The fields of a frame header.

    ``schema_nbytes`` and ``payload_nbytes`` are those of the whole schema and payload,
    wherever they travel; for answers and errors ``schema_nbytes`` is the body's length.
    ``one_buffer`` says that the payload is the buffer of a consolidated tree.

    >>> parse_header(Header(Kind.DATA, payload_nbytes=12).pack()).payload_nbytes
    12
    """

    kind: Kind
    schema_nbytes: int = 0
    payload_nbytes: int = 0
    digest: bytes = NO_DIGEST
    inline_schema: bool = False
    inline_payload: bool = False
    strict: bool = True
    delta: bool = False
    last: bool = False
    checksum: Checksum = Checksum.NONE
    payload_sum: int = 0
    sequence: int = 0
    version: int = 0
    one_buffer: bool = False

    def pack(self) -> bytes:
        """The 64 bytes of this header."""
        flags = (
            (_INLINE_SCHEMA if self.inline_schema else 0)
            | (_INLINE_PAYLOAD if self.inline_payload else 0)
            | (_DELTA if self.delta else 0)
            | (_LAST if self.last else 0)
            | (_STRICT if self.strict else 0)
            | (_ONE_BUFFER if self.one_buffer else 0)
            | self.checksum << _CHECKSUM_SHIFT
            | self.kind << _KIND_SHIFT
        )
        head = _FIELDS.pack(
            MAGIC,
            MAJOR,
            MINOR,
            flags,
            self.schema_nbytes,
            self.payload_nbytes,
            self.digest,
            self.payload_sum,
            self.sequence & 0xFFFFFFFF,
            self.version,
        )
        return head + _CRC.pack(zlib.crc32(head))


def parse_header(data: bytes | memoryview) -> Header:
    """Read and check a header; every field is one this version can act on.

    Args:
        data: at least 64 bytes, the header first.

    Raises:
        WireError: wrong magic, version, checksum, unknown flags or kinds.
    """
    head = bytes(data[:HEADER_NBYTES])
    if len(head) < HEADER_NBYTES:
        raise WireError(f"a header has {HEADER_NBYTES} bytes, got {len(head)}", len(head))
    magic, major, minor, flags, schema, payload, digest, total, sequence, version = _FIELDS.unpack(
        head[: _FIELDS.size]
    )
    if magic != MAGIC:
        raise WireError(f"expected the magic {MAGIC!r}, got {magic!r}", 0)
    if _CRC.unpack(head[_FIELDS.size :])[0] != zlib.crc32(head[: _FIELDS.size]):
        raise WireError("the header does not have the checksum it announces", _FIELDS.size)
    if major != MAJOR:
        raise WireError(
            f"the peer speaks protocol {major}.{minor}, this is {MAJOR}.{MINOR}. "
            "Use the same version on both sides",
            4,
        )
    low = flags & 0xFF
    if low & ~_KNOWN:
        raise WireError(f"unknown flags {low & ~_KNOWN:#x}", 6)
    kind, checksum = flags >> _KIND_SHIFT, flags >> _CHECKSUM_SHIFT & 0xF
    if kind not in Kind._value2member_map_:
        raise WireError(f"unknown kind of frame {kind}", 7)
    if checksum not in Checksum._value2member_map_:
        raise WireError(f"unknown checksum {checksum}", 7)
    return Header(
        kind=Kind(kind),
        schema_nbytes=schema,
        payload_nbytes=payload,
        digest=digest,
        inline_schema=bool(flags & _INLINE_SCHEMA),
        inline_payload=bool(flags & _INLINE_PAYLOAD),
        strict=bool(flags & _STRICT),
        delta=bool(flags & _DELTA),
        last=bool(flags & _LAST),
        checksum=Checksum(checksum),
        payload_sum=total,
        sequence=sequence,
        version=version,
        one_buffer=bool(flags & _ONE_BUFFER),
    )


def check_limits(header: Header, limits: Limits) -> None:
    """Refuse lengths above the limits, and inline parts that cannot fit.

    Raises:
        WireError: naming the length and the limit.
    """
    if header.schema_nbytes > limits.max_schema_nbytes:
        raise WireError(
            f"a schema of {header.schema_nbytes} bytes is above the limit of "
            f"{limits.max_schema_nbytes}",
            8,
        )
    if header.payload_nbytes > limits.max_payload_nbytes:
        raise WireError(
            f"a payload of {header.payload_nbytes} bytes is above the limit of "
            f"{limits.max_payload_nbytes}",
            16,
        )
    end = HEADER_NBYTES
    if header.inline_schema:
        end += header.schema_nbytes
    if header.inline_payload:
        end = payload_start(end) + header.payload_nbytes
    if end > EAGER_NBYTES - SEAL_NBYTES:
        raise WireError(f"inline parts end at byte {end} of a frame of {EAGER_NBYTES}", 8)


def seal(frame: bytearray) -> bytearray:
    """End a frame or an answer with the crc32 of what follows its header."""
    frame[-SEAL_NBYTES:] = _CRC.pack(zlib.crc32(memoryview(frame)[HEADER_NBYTES:-SEAL_NBYTES]))
    return frame


def check_seal(data: bytes) -> None:
    """Refuse a frame or an answer of which a part was lost or changed.

    Raises:
        WireError: what follows the header is not what was sealed.
    """
    body = memoryview(data)[HEADER_NBYTES:-SEAL_NBYTES]
    if _CRC.unpack(data[-SEAL_NBYTES:])[0] != zlib.crc32(body):
        raise WireError("the message was cut or changed", len(data) - SEAL_NBYTES)


def payload_start(end: int) -> int:
    """Where an inline payload starts when what precedes it ends at ``end``."""
    return -(-end // 64) * 64


def schema_digest(schema: bytes) -> bytes:
    """The 16 bytes that stand for a schema."""
    return hashlib.blake2b(schema, digest_size=DIGEST_NBYTES).digest()


def _crc32(state: int, data: np.ndarray) -> int:
    return zlib.crc32(data.data, state)


def _sum64(state: int, data: np.ndarray) -> int:
    whole = data.size // 8 * 8
    total = int(data[:whole].view("<u8").sum(dtype=np.uint64)) if whole else 0
    total += int.from_bytes(data[whole:].tobytes(), "little")
    # The length takes part, so that zeros added at the end are noticed.
    return (state * 0x9E3779B1 + total + data.size) & 0xFFFFFFFFFFFFFFFF


def _blake2b(state: int, data: np.ndarray) -> int:
    salt = state.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(data.data, digest_size=8, key=salt).digest(), "little")


_SUMS: Final[dict[Checksum, Callable[[int, Any], int]]] = {
    Checksum.CRC32: _crc32,
    Checksum.SUM64: _sum64,
    Checksum.BLAKE2B: _blake2b,
}


def checksum_of(kind: Checksum, parts: list[np.ndarray]) -> int:
    """The checksum of the payload messages, in their order.

    Args:
        kind: which checksum; ``NONE`` gives 0.
        parts: one contiguous uint8 array for each message.

    >>> checksum_of(Checksum.CRC32, [np.frombuffer(b"ab", np.uint8), np.frombuffer(b"c", np.uint8)])
    891568578
    """
    if kind is Checksum.NONE:
        return 0
    state, step = 0, _SUMS[kind]
    for part in parts:
        state = step(state, part)
    return state


def eager_frame(header: Header, schema: bytes = b"", payload: bytes = b"") -> bytearray:
    """A sealed frame of `EAGER_NBYTES` with an inline schema (or body) and payload."""
    frame = bytearray(EAGER_NBYTES)
    frame[:HEADER_NBYTES] = header.pack()
    end = HEADER_NBYTES + len(schema)
    frame[HEADER_NBYTES:end] = schema
    if payload:
        start = payload_start(end)
        frame[start : start + len(payload)] = payload
    return seal(frame)


def reply_frame(kind: Kind, body: bytes = b"", *, digest: bytes = NO_DIGEST) -> bytearray:
    """An answer of `REPLY_NBYTES`; a body too long for it is announced, not carried."""
    inline = len(body) <= REPLY_ROOM
    frame = bytearray(REPLY_NBYTES)
    frame[:HEADER_NBYTES] = Header(
        kind, schema_nbytes=len(body), inline_schema=inline, digest=digest
    ).pack()
    if inline:
        frame[HEADER_NBYTES : HEADER_NBYTES + len(body)] = body
    return seal(frame)
