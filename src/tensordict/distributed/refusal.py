"""Errors as bytes, so that both ends of an exchange raise the same one."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final

from ..errors import (
    ChannelClosed,
    ChecksumMismatch,
    LossyCast,
    SchemaMismatch,
    StagingExhausted,
    TransferError,
    UnsupportedLeaf,
    WireError,
)

# Every type that may be named on the wire, with what makes it.
_TYPES: Final[dict[str, Callable[..., TransferError]]] = {
    "SchemaMismatch": lambda headline, rows: SchemaMismatch(
        str(headline), [(_path(path), str(text)) for path, text in rows]
    ),
    "WireError": lambda reason, offset: WireError(str(reason), offset),
    "ChecksumMismatch": lambda reason, offset: ChecksumMismatch(str(reason), offset),
    "UnsupportedLeaf": lambda path, what, advice, why: UnsupportedLeaf(
        _path(path), str(what), str(advice), str(why)
    ),
    "LossyCast": lambda message: LossyCast(str(message)),
    "ChannelClosed": lambda message: ChannelClosed(str(message)),
    "StagingExhausted": lambda message: StagingExhausted(str(message)),
    "TransferError": lambda message: TransferError(str(message)),
}


def encode_error(error: BaseException, limit: int) -> bytes:
    """The bytes of an error, at most ``limit``; the last of many differences are cut."""
    if isinstance(error, SchemaMismatch):
        fields: list[Any] = [error.headline, [list(row) for row in error.differences]]
        data = _dumps("SchemaMismatch", fields)
        while len(data) > limit and fields[1]:
            del fields[1][len(fields[1]) // 2 :]
            data = _dumps("SchemaMismatch", fields)
        return data
    if isinstance(error, WireError):
        return _dumps(type(error).__name__, [error.reason[:200], error.offset])
    if isinstance(error, UnsupportedLeaf):
        return _dumps(
            "UnsupportedLeaf", [error.path, error.what[:400], error.advice[:400], error.why[:400]]
        )
    if isinstance(error, (StagingExhausted, LossyCast, ChannelClosed)):
        return _dumps(type(error).__name__, [str(error)[:2000]])
    if isinstance(error, TransferError):
        return _dumps("TransferError", [str(error)[:2000]])
    return _dumps("TransferError", [f"the peer failed: {type(error).__name__}: {error}"[:2000]])


def decode_error(data: bytes) -> TransferError:
    """The error in some bytes; a `WireError` when they hold none."""
    try:
        document = json.loads(data)
        return _TYPES[document["type"]](*document["fields"])
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        return WireError(f"the peer refuses, and its reason cannot be read: {error!r}")


def _dumps(kind: str, fields: list[Any]) -> bytes:
    return json.dumps({"type": kind, "fields": fields}, separators=(",", ":")).encode()


def _path(path: Any) -> Any:
    return tuple(str(name) for name in path) if isinstance(path, list) else path
