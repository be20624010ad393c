"""Whole tensordicts between ranks: agreement first, then as few messages as possible."""

from __future__ import annotations

from . import at_exit as at_exit
from .channel import Channel
from .double_buffer import DoubleBuffer
from .exchange import reshard
from .fanout import all_to_all, gather, gather_and_stack, scatter
from .layout_sharing import share_layouts
from .methods import DistributedMethods
from .p2p import Options, irecv, isend, recv, send, sendrecv
from .pending import Pending
from .reductions import all_reduce, reduce, reduce_scatter
from .scaled import reshard_scaled
from .spreading import all_gather, broadcast
from .staged import StagedTransport
from .transport import TorchTransport, use_side_group
from .transport_protocol import Capabilities, Transport, Work
from .wire import Limits

__all__ = [
    "Capabilities",
    "Channel",
    "DistributedMethods",
    "DoubleBuffer",
    "Limits",
    "Options",
    "Pending",
    "StagedTransport",
    "TorchTransport",
    "Transport",
    "Work",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "gather",
    "gather_and_stack",
    "reduce",
    "reduce_scatter",
    "scatter",
    "irecv",
    "isend",
    "recv",
    "reshard",
    "reshard_scaled",
    "send",
    "share_layouts",
    "sendrecv",
    "use_side_group",
]
