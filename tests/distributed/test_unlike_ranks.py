"""Collectives of ranks whose tensordicts differ in what does not count."""

import torch

from tensordict import NonTensorStack, TensorDict
from tensordict.core.traverse import leaves
from tensordict.distributed import all_gather
from tensordict.distributed.testing import LoopbackGroup
from tensordict.storage.consolidate import over_buffer
from tensordict.storage.packing import plan_packing


def consolidated(td, alignment):
    """As a tree that was consolidated on an accelerator is, when it comes to the host."""
    packing, pieces = plan_packing(leaves(td), alignment)
    buffer = torch.zeros(packing.layout.total_nbytes, dtype=torch.uint8)
    out = over_buffer(td, packing, buffer)
    for target, source in zip(leaves(out), pieces):
        target.copy_(source)
    return out


def gathered(make):
    return LoopbackGroup(2, timeout=10).run(lambda t: all_gather(make(t.rank), transport=t))


def test_values_in_another_order_are_not_mixed_up():
    def make(rank):
        pairs = [
            ("s", f"s{rank}"),
            ("n", TensorDict({"u": f"u{rank}", "v": f"v{rank}"})),
            ("t", f"t{rank}"),
        ]
        td = TensorDict({"x": torch.full((2,), float(rank))})
        for key, value in pairs if rank == 0 else reversed(pairs):
            td[key] = value
        if rank:
            td["n"] = td["n"].select("v", "u")
        return td

    for parts in gathered(make):
        for rank, part in enumerate(parts):
            assert part["s"] == f"s{rank}" and part["t"] == f"t{rank}"
            assert part["n", "v"] == f"v{rank}" and part["n", "u"] == f"u{rank}"
            assert part["x"].tolist() == [rank, rank]


def test_one_value_for_all_rows_meets_one_for_each():
    def make(rank):
        values = ["one", NonTensorStack("two", "three")]
        return TensorDict(dict(zip("ab" if rank else "ba", values)), [2])

    for first, second in gathered(make):
        assert first.get("b").data == "one" and first.get("a").tolist() == ["two", "three"]
        assert second.get("a").data == "one" and second.get("b").tolist() == ["two", "three"]


def test_buffers_of_other_alignments():
    def make(rank):
        td = TensorDict({"a": torch.full((3,), rank), "b": torch.full((5,), rank), "s": "x" * rank})
        return consolidated(td, 256 >> 2 * rank)

    for parts in gathered(make):
        for rank, part in enumerate(parts):
            assert part["a"].tolist() == [rank] * 3 and part["b"].tolist() == [rank] * 5
            assert part["s"] == "x" * rank
