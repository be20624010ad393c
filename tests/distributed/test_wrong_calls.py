"""Arguments that make no sense: an error before the first byte, or the like on both ranks."""

import math

import pytest
import torch

from tensordict import TensorDict
from tensordict.distributed import all_reduce, broadcast, irecv, isend, recv, send, sendrecv
from tensordict.distributed.testing import CountingTransport, LoopbackGroup, run_ranks
from tensordict.errors import TransferError, UnsupportedLeaf


def tree():
    return TensorDict({"a": torch.ones(3), "n": {"b": torch.zeros(2)}, "s": "x"})


def between(sender, receiver):
    """What the sender raised or returned, and the receiver; then the group is used again."""

    def main(transport):
        try:
            result = (sender, receiver)[transport.rank](transport)
        except Exception as error:
            result = error
        if transport.rank == 0:
            send(tree(), 1, transport=transport)
        else:
            assert recv(0, transport=transport)["a"].eq(1).all()
        return result

    return LoopbackGroup(2, timeout=5).run(main)


@pytest.mark.parametrize("junk", [None, {"a": torch.ones(2)}, torch.ones(2), [tree(), 3], "td"])
def test_what_is_no_tensordict_is_told_to_the_peer(junk):
    sent, got = between(
        lambda t: send(junk, 1, transport=t), lambda t: recv(0, out=tree(), transport=t)
    )
    assert isinstance(sent, TypeError) and "Expected a tensordict" in str(sent)
    assert isinstance(got, TransferError) and "Expected a tensordict" in str(got)
    if junk is None:
        return  # to receive into nothing is to receive a new one
    sent, got = between(
        lambda t: send(tree(), 1, transport=t), lambda t: recv(0, out=junk, transport=t)
    )
    assert isinstance(sent, TransferError) and "Expected a tensordict" in str(sent)
    assert isinstance(got, TypeError) and "Expected a tensordict" in str(got)


def test_a_device_that_is_not_there_is_told_to_the_sender():
    if torch.cuda.is_available():
        pytest.skip("there is such a device")
    text = "Cannot receive on the device cuda"
    sent, got = between(
        lambda t: send(tree(), 1, transport=t), lambda t: recv(0, device="cuda", transport=t)
    )
    assert type(sent) is type(got) is TransferError and text in str(got) and text in str(sent)
    sent, got = between(
        lambda t: broadcast(tree(), 0, transport=t),
        lambda t: broadcast(None, 0, device="cuda", transport=t),
    )
    assert type(sent) is type(got) is TransferError and text in str(got) and text in str(sent)


def test_leaves_without_memory_cannot_be_received_into():
    sent, got = between(
        lambda t: send(tree(), 1, transport=t),
        lambda t: recv(0, out=tree().to("meta"), transport=t),
    )
    assert type(sent) is type(got) is UnsupportedLeaf and str(sent) == str(got)
    assert got.path == ("a",)


WRONG = {
    "timout": (TypeError, "the option 'timout'", {"timout": 3}),
    "checksum": (ValueError, "Expected one of 'none'", {"checksum": "md5"}),
    "pack_below": (ValueError, "Expected 0 or more", {"pack_below": -1}),
    "negative timeout": (ValueError, "Expected 0 or more", {"timeout": -1}),
    "timeout of nan": (ValueError, "Expected 0 or more", {"timeout": math.nan}),
    "timeout": (TypeError, "Expected seconds, or None", {"timeout": "3"}),
    "limits": (TypeError, "limits=3. Expected one of type Limits", {"limits": 3}),
    "strict": (TypeError, "Expected one of type bool", {"strict": "x"}),
    "text": (TypeError, "pack_below='x'. Expected one of type int", {"pack_below": "x"}),
    "policy": (TypeError, "Expected one of type CastPolicy", {"policy": torch.float16}),
    "number": (ValueError, "Expected one of 'none'", {"checksum": 3}),
    "init_tag": (ValueError, "Expected an int of 0 to", {"init_tag": "a"}),
    "large init_tag": (ValueError, "Expected an int of 0 to", {"init_tag": 1 << 28}),
}
CALLS = {
    "send": lambda peer, **o: send(tree(), peer, **o),
    "isend": lambda peer, **o: isend(tree(), peer, **o),
    "recv": lambda peer, **o: recv(peer, **o),
    "irecv": lambda peer, **o: irecv(peer, **o),
    "sendrecv": lambda peer, **o: sendrecv(tree(), peer, peer, **o),
}


@pytest.mark.parametrize("call", list(CALLS))
def test_wrong_arguments_send_nothing(call):
    transport = CountingTransport(LoopbackGroup(2).transport(0))
    for error, text, options in WRONG.values():
        with pytest.raises(error, match=text):
            CALLS[call](1, transport=transport, **options)
    for peer in (2, -1):
        with pytest.raises(ValueError, match="not one of the 2 ranks"):
            CALLS[call](peer, transport=transport)
    with pytest.raises(TransferError, match="oneself"):
        CALLS[call](0, transport=transport)
    with pytest.raises(TypeError, match="rank '1'"):
        CALLS[call]("1", transport=transport)
    assert not transport.messages


@pytest.mark.parametrize(
    ("error", "text", "options"),
    [
        (TypeError, "Expected a ReduceOp", {"op": 3}),
        (TypeError, "Expected a torch.dtype", {"accumulate_dtype": 1}),
        (ValueError, "Expected a floating dtype", {"accumulate_dtype": torch.int32}),
        (ValueError, "Expected 0 or more", {"timeout": -1}),
        (TypeError, "Expected seconds, or None", {"timeout": "3"}),
    ],
)
def test_wrong_arguments_of_a_reduction_send_nothing(error, text, options):
    transport = CountingTransport(LoopbackGroup(2).transport(0))
    with pytest.raises(error, match=text):
        all_reduce(tree(), transport=transport, **options)
    assert not transport.messages


def test_a_reduction_says_why_a_leaf_cannot_be_reduced():
    def main(transport):
        td = TensorDict({"n": {"b": torch.tensor([True])}, "x": torch.ones(1)})
        with pytest.raises(UnsupportedLeaf) as caught:
            all_reduce(td, "avg", scale=0.5, transport=transport)
        return str(caught.value)

    texts = LoopbackGroup(2).run(main)
    assert (
        texts[0]
        == texts[1]
        == (
            "Cannot use the entry ('n', 'b'): a leaf of dtype bool cannot be reduced by avg with the "
            "scale 0.5. Take it out, or convert it, first."
        )
    )


def test_both_peers_are_looked_at_before_anything_is_sent():
    transport = CountingTransport(LoopbackGroup(2).transport(0))
    for src in (0, 5):
        with pytest.raises((ValueError, TransferError)):
            sendrecv(tree(), 1, src, transport=transport)
    assert not transport.messages


@pytest.mark.parametrize("n", [0, 1, 3])
def test_lists_of_any_length(n):
    tds = [TensorDict({"a": torch.full((2,), float(k))}) for k in range(n)]
    sent, got = between(lambda t: send(tds, 1, transport=t), lambda t: recv(0, transport=t))
    assert sent is None and [td["a"].tolist() for td in got] == [[k, k] for k in range(n)]
    out = [td.clone().zero_() for td in tds]
    sent, got = between(
        lambda t: send(tds, 1, transport=t), lambda t: recv(0, out=out, transport=t)
    )
    assert got == out if not n else all(a is b for a, b in zip(got, out))
    assert [td["a"].tolist() for td in out] == [[k, k] for k in range(n)]
    for error in between(
        lambda t: send(tds, 1, transport=t), lambda t: recv(0, out=[*out, tree()], transport=t)
    ):
        assert isinstance(error, TransferError) and "entries differ" in str(error)


def _groups(rank, size):
    for group in ("world", 3, [0, 1]):
        with pytest.raises(TypeError, match="Expected a process group"):
            send(tree(), 1 - rank, group=group)
    for options in ({}, {"group_dst": 1 - rank}):
        with pytest.raises(ValueError, match="Cannot tell the peer"):
            send(tree(), *([] if not options else [1 - rank]), **options)


@pytest.mark.ranks
def test_what_is_no_group_is_refused():
    run_ranks(_groups, 2)
