"""`send`, `recv`, `isend`, `irecv`: whole tensordicts between two ranks."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypedDict

from .._typing import DeviceLike
from ..core.devices import as_device
from ..core.node import Node
from ..placement.policy import CastPolicy
from . import protocol, wire
from .arrival import Cast
from .endpoint import endpoint_of
from .link import Request, loss_of_peer
from .packing import PACK_BELOW
from .pending import Pending
from .receive import Into, New, Target, bundled
from .transport import TorchTransport, group_rank
from .transport_protocol import Transport
from .wire import Checksum, Limits

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from typing_extensions import Unpack


class Options(TypedDict, total=False):
    """What every exchange with one peer can be told.

    Attributes:
        timeout: seconds for the whole exchange; the group's own timeout by default.
        strict: whether the receiver agrees before any payload is sent (default).
        checksum: ``"none"`` (default), ``"crc32"``, ``"sum64"`` or ``"blake2b"``; with one,
            the receiver confirms after it has verified the payload.
        pack_below: leaves of fewer bytes travel in one packed message; 192 KiB by default.
        limits: what this rank accepts from the peer.
        policy: a `tensordict.placement.CastPolicy` by which a sender casts the leaves before
            they travel, or a receiver when they have arrived (``LossyCast`` is then raised by
            the receiver alone); ``out`` has the resulting dtypes.
        transport: what to send with instead of a process group.
    """

    timeout: float | None
    strict: bool
    checksum: str
    pack_below: int
    limits: Limits
    policy: CastPolicy | None
    transport: Transport


def request_of(
    group: Any,
    world: int | None,
    local: int | None,
    tag: int,
    options: Options,
    bundle: int | None = None,
) -> Request:
    """The request that the arguments of a call stand for."""
    strange = options.keys() - Options.__optional_keys__
    if strange:
        raise TypeError(
            f"Cannot exchange with the option {min(strange)!r}. "
            f"Expected some of {sorted(Options.__optional_keys__)}."
        )
    transport = options.get("transport")
    if transport is None:
        transport = TorchTransport.of(group)
    name = options.get("checksum", "none")
    try:
        checksum = Checksum[name.upper()]
    except (KeyError, AttributeError):
        known = ", ".join(repr(c.name.lower()) for c in Checksum)
        raise ValueError(f"Cannot use the checksum {name!r}. Expected one of {known}.") from None
    pack_below = options.get("pack_below", PACK_BELOW)
    _check_options(options)
    if pack_below < 0:
        raise ValueError(f"Cannot pack below {pack_below} bytes. Expected 0 or more.")
    return Request(
        transport=transport,
        endpoint=endpoint_of(transport),
        peer=group_rank(transport, group, world, local),
        tag=tag,
        timeout=options.get("timeout"),
        strict=options.get("strict", True),
        checksum=checksum,
        pack_below=pack_below,
        limits=options.get("limits", wire.DEFAULT_LIMITS),
        policy=options.get("policy"),
        bundle=bundle,
    )


_KINDS: Final[dict[str, type]] = {
    "strict": bool,
    "pack_below": int,
    "limits": Limits,
    "policy": CastPolicy,
}


def _check_options(options: Options) -> None:
    for name, kind in _KINDS.items():
        value = options.get(name)
        if value is not None and not isinstance(value, kind):
            raise TypeError(
                f"Cannot exchange with {name}={value!r}. Expected one of type {kind.__name__}."
            )


def target_of(
    out: Node | None, device: DeviceLike | None = None, *, atomic: bool = True, mesh: Any = None
) -> Target:
    """Where to receive: ``out``, or a new tensordict on ``device``."""
    if out is not None:
        return Into(out, atomic=atomic)
    return New(None if device is None else as_device(device), mesh=mesh)


def _receiver(
    out: Any, node: Node | None, device: DeviceLike | None, request: Request, **how: Any
) -> Callable[[], Any]:
    """What receives, and casts by the policy of the request when there is one."""
    if request.policy is None:
        target = target_of(node, device, **how)
        return lambda: protocol.run_recv(request, target)
    cast = Cast(request.policy, node, mesh=how["mesh"])
    where = None if device is None else as_device(device)
    return lambda: cast.finish(protocol.run_recv(request, cast), out, where)


def send(
    td: Node | Sequence[Node],
    dst: int | None = None,
    *,
    group: Any = None,
    group_dst: int | None = None,
    init_tag: int = 0,
    **options: Unpack[Options],
) -> None:
    """Send a tensordict to a rank that calls `recv` or `irecv`.

    Structure, dtypes, non-tensor values, names, locks and ties travel with it; a receiver
    that expects something else refuses before any payload is sent, and both ranks raise.

    Args:
        td: the tensordict; a list of them travels in one exchange and arrives as a list.
        dst: rank of the receiver in the world.
        group: a process group or a device mesh of one dimension; the default group if None.
        group_dst: rank of the receiver in the group, instead of ``dst``.
        init_tag: pairs this call with the receiver's; 0 to 2**28 - 1.
        **options: see `Options`.

    Raises:
        SchemaMismatch: the receiver expects another structure; lists every path.
        UnsupportedLeaf: an entry cannot travel; the receiver raises it too.
        TransferTimeout: the receiver said nothing in time.
        PeerLost: the receiver is gone.

    >>> import torch
    >>> from tensordict import TensorDict
    >>> from tensordict.distributed.loopback import LoopbackGroup
    >>> def main(transport):
    ...     if transport.rank == 0:
    ...         send(TensorDict({"a": torch.arange(3)}), 1, transport=transport)
    ...     else:
    ...         return recv(0, transport=transport)["a"]
    >>> LoopbackGroup(2).run(main)
    [None, tensor([0, 1, 2])]
    """
    node, n = bundled(td)
    protocol.run_send(request_of(group, dst, group_dst, init_tag, options, n), node)


def isend(
    td: Node | Sequence[Node],
    dst: int | None = None,
    *,
    group: Any = None,
    group_dst: int | None = None,
    init_tag: int = 0,
    **options: Unpack[Options],
) -> Pending[None]:
    """Start a `send` in the background; the tensordict must not change until it is done.

    Returns:
        A handle; its ``wait`` raises what `send` would.
    """
    node, n = bundled(td)
    request = request_of(group, dst, group_dst, init_tag, options, n)
    what = f"send to {request.transport.name_of(request.peer)}"
    loss = partial(loss_of_peer, request)
    return Pending(lambda: protocol.run_send(request, node), what, loss=loss)


def recv(
    src: int | None = None,
    *,
    out: Node | Sequence[Node] | None = None,
    device: DeviceLike | None = None,
    group: Any = None,
    group_src: int | None = None,
    init_tag: int = 0,
    atomic: bool = True,
    mesh: Any = None,
    **options: Unpack[Options],
) -> Any:
    """Receive a tensordict from a rank that calls `send` or `isend`.

    Args:
        src: rank of the sender in the world.
        out: write into this tensordict, in place; leaves are matched by key.
        device: where the leaves of a new tensordict go; the CPU by default.
        group: a process group or a device mesh of one dimension; the default group if None.
        group_src: rank of the sender in the group, instead of ``src``.
        init_tag: the sender's tag.
        atomic: with ``out``, write only when everything has arrived.  False receives
            large leaves in place: a copy and their memory less, but a peer that dies
            leaves them half written.
        mesh: the device mesh that new shards (`DTensor` leaves) belong to.
        **options: see `Options`.

    Returns:
        ``out``, or a new tensordict whose small leaves share one buffer.

    Raises:
        SchemaMismatch: ``out`` has another structure; lists every path, nothing is written.
        UnsupportedLeaf: the sender has an entry that cannot travel.
        TransferTimeout: the sender said nothing in time.
        PeerLost: the sender is gone.
        WireError: what came is not a message of this protocol, or is above the limits.
    """
    node, n = bundled(out)
    request = request_of(group, src, group_src, init_tag, options, n)
    return _receiver(out, node, device, request, atomic=atomic, mesh=mesh)()


def irecv(
    src: int | None = None,
    *,
    out: Node | Sequence[Node] | None = None,
    device: DeviceLike | None = None,
    group: Any = None,
    group_src: int | None = None,
    init_tag: int = 0,
    atomic: bool = True,
    mesh: Any = None,
    **options: Unpack[Options],
) -> Pending[Any]:
    """Start a `recv` in the background.

    Returns:
        A handle; its ``wait`` returns, and raises, what `recv` would.
    """
    node, n = bundled(out)
    request = request_of(group, src, group_src, init_tag, options, n)
    receive = _receiver(out, node, device, request, atomic=atomic, mesh=mesh)
    what = f"receive from {request.transport.name_of(request.peer)}"
    return Pending(receive, what, loss=partial(loss_of_peer, request))


def sendrecv(
    td: Node | Sequence[Node],
    dst: int,
    src: int,
    *,
    out: Node | Sequence[Node] | None = None,
    group: Any = None,
    init_tag: int = 0,
    **options: Unpack[Options],
) -> Any:
    """Send to one rank and receive from another at once: the form that cannot deadlock.

    Args:
        td: what to send.
        dst, src: ranks in the world; they may be the same.
        out: where to receive, see `recv`; not memory of ``td``, which is read meanwhile.
        group, init_tag, **options: see `send`; ``policy`` is for what is sent.

    Returns:
        ``out``, or a new tensordict.
    """
    node, n = bundled(out)
    mine: Options = {**options, "policy": None}
    request = request_of(group, src, None, init_tag, mine, n)  # an error here sends nothing
    sending = isend(td, dst, group=group, init_tag=init_tag, **options)
    try:
        return _receiver(out, node, None, request, atomic=True, mesh=None)()
    finally:
        sending.wait()
