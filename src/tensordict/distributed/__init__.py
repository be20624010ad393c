"""Whole tensordicts between ranks: agreement first, then as few messages as possible."""

from __future__ import annotations

from .methods import DistributedMethods
from .p2p import Options, irecv, isend, recv, send, sendrecv
from .pending import Pending
from .transport import Capabilities, TorchTransport, Transport, Work, use_side_group
from .wire import Limits

__all__ = [
    "Capabilities",
    "DistributedMethods",
    "Limits",
    "Options",
    "Pending",
    "TorchTransport",
    "Transport",
    "Work",
    "irecv",
    "isend",
    "recv",
    "send",
    "sendrecv",
    "use_side_group",
]
