"""What packing notices about the leaves while it copies them, and that nothing slips past it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tensordict import TensorDict
from tensordict.distributed import all_reduce, recv, send
from tensordict.distributed.describe import describe
from tensordict.distributed.endpoint import Catalogue, Endpoint
from tensordict.distributed.packing import PACK_BELOW
from tensordict.distributed.schema import encode
from tensordict.distributed.testing import LoopbackGroup
from tensordict.errors import SchemaMismatch


def tree():
    """Leaves of which most lie in one group, others alone in theirs, and two share memory."""
    leaves = {f"k{i}": torch.arange(6.0).view(2, 3) + i for i in range(8)}
    tied = torch.ones(5, dtype=torch.int64)
    return TensorDict({**leaves, "lone": torch.zeros(4), "a": tied, "b": tied})


def stage_of(td):
    described = describe(td)
    return described.parts, Catalogue().of(described.schema).stage()


def test_packed_bytes_do_not_depend_on_who_looks():
    parts, stage = stage_of(tree())
    stage.pack(parts)
    once = stage.message().clone()
    stage.message().fill_(1)
    assert stage.pack_alike(parts, plain=True)
    for group in stage.packing.groups:
        span = slice(group.offset, group.offset + group.nbytes)
        assert torch.equal(stage.message()[span], once[span])


@pytest.mark.parametrize(
    "other",
    [
        torch.zeros(3, 2),
        torch.zeros(6),
        torch.zeros(2, 3, requires_grad=True),
        torch.zeros(2, 3, device="meta"),
    ],
    ids=["shape", "rank", "grad", "device"],
)
@pytest.mark.parametrize("where", [0, 5])
def test_a_group_with_another_part_is_not_packed(other, where):
    parts, stage = stage_of(tree())
    parts[where] = other
    assert not stage.pack_alike(parts, plain=True)


def test_a_group_in_which_all_parts_changed_is_not_packed():
    parts, stage = stage_of(tree())
    assert not stage.pack_alike([x.t() if x.shape == (2, 3) else x for x in parts], plain=True)


def test_what_a_structure_was_last_is_not_taken_for_what_it_is():
    transport = LoopbackGroup(1).transport(0)
    endpoint = Endpoint(transport)
    td = tree()
    first = endpoint.take(td, pack_below=PACK_BELOW)
    again = endpoint.take(td, pack_below=PACK_BELOW)
    assert not first.packed and again.packed and again.entry is first.entry
    changes = [
        lambda: td.set("k3", td["k3"].view(3, 2)),  # the same address, dtype and bytes
        lambda: td.set("lone", td["lone"].view(2, 2)),
        lambda: td["k5"].requires_grad_(),
        lambda: td["lone"].requires_grad_(),
        lambda: td.set("k0", td["k0"].view(torch.int32)),
        lambda: td.set("b", td["b"].clone()),
        lambda: td.set("b", td["a"].view(5, 1)),
    ]
    for change in changes:
        change()
        taken = endpoint.take(td, pack_below=PACK_BELOW)
        fresh = describe(td).schema
        assert taken.described.schema.shapes == fresh.shapes
        assert taken.described.schema.dtypes == fresh.dtypes
        assert taken.described.schema.grad == fresh.grad
        assert taken.described.schema.ties == fresh.ties


def _swapped(td, key, x):
    td[key].data = x  # the leaf stays, its memory and shape do not


CHANGES = {
    "view": lambda td, key, x: td.set(key, x.reshape(-1)),
    "rows": lambda td, key, x: td.set(key, x.unsqueeze(0)),
    "bits": lambda td, key, x: td.set(key, x.contiguous().view(torch.uint8)),
    "copy": lambda td, key, x: td.set(key, x.clone()),
    "grad": lambda td, key, x: td.set(key, x.float().requires_grad_()),
    "strided": lambda td, key, x: td.set(key, torch.stack([x, x], -1)[..., 0]),
    "expanded": lambda td, key, x: td.set(key, x.reshape(-1)[:1].expand(6)),
    "tied": lambda td, key, x: td.set(key, td["k1"].detach()),
    "swapped": lambda td, key, x: _swapped(td, key, x.clone().reshape(-1)),
    "nested": lambda td, key, x: td.set(key, {"a": x, "b": x.clone()}),
    "value": lambda td, key, x: td.set(key, "text"),
    "nothing": lambda td, key, x: None,
}


@settings(max_examples=40, deadline=None)
@given(
    st.booleans(),
    st.lists(
        st.tuples(st.sampled_from(sorted(CHANGES)), st.sampled_from(["k0", "k3", "k7", "lone"])),
        min_size=1,
        max_size=6,
    ),
)
def test_takes_after_any_changes_are_those_of_a_fresh_look(grad, changes):
    transport = LoopbackGroup(1).transport(0)
    endpoint, td = Endpoint(transport), tree()
    if grad:
        for key in ("k1", "k2", "k3", "k4", "k7"):
            td[key].requires_grad_()
    for name, key in changes:
        if isinstance(td.get(key, None), torch.Tensor):
            CHANGES[name](td, key, td[key].detach())
        taken = endpoint.take(td, pack_below=PACK_BELOW)
        parts, fresh = stage_of(td)
        assert encode(taken.described.schema) == encode(describe(td).schema)
        if not taken.packed:
            taken.stage.pack(taken.described.parts)
        fresh.pack(parts)
        assert torch.equal(taken.stage.message(), fresh.message())
        taken.entry.give_back(taken.stage)


def test_a_changed_leaf_in_a_group_is_refused_or_sent_as_it_is():
    def main(transport):
        td = tree()
        for _ in range(3):
            all_reduce(td, transport=transport)
        if transport.rank == 1:
            td["k4"] = td["k4"].view(3, 2)
        before = td.clone()
        with pytest.raises(SchemaMismatch, match="k4"):
            all_reduce(td, transport=transport)
        assert all(torch.equal(td[k], before[k]) for k in td.keys())
        if transport.rank == 1:
            send(td, 0, transport=transport)
            td["k4"].requires_grad_()
            send(td, 0, transport=transport)
        else:
            first, second = (recv(1, transport=transport)["k4"] for _ in range(2))
            assert first.shape == second.shape == (3, 2)
            assert second.requires_grad and not first.requires_grad

    LoopbackGroup(2, timeout=10).run(main)


def test_structures_that_look_alike_are_both_recalled():
    transport = LoopbackGroup(1).transport(0)
    endpoint = Endpoint(transport)
    one = TensorDict({f"k{i}": torch.ones(3) for i in range(100)})
    other = TensorDict({"other" if k == "k47" else k: v.clone() for k, v in one.items()})
    entries = [endpoint.take(td, pack_below=99).entry for td in (one, other)]
    assert entries[0] is not entries[1]
    for td, entry in zip((one, other), entries):
        endpoint.take(td, pack_below=99)  # the last one that looked so was the other
        taken = endpoint.take(td, pack_below=99)
        assert taken.packed and taken.entry is entry


def test_parameters_are_packed_while_they_are_looked_at():
    transport = LoopbackGroup(1).transport(0)
    endpoint = Endpoint(transport)
    td = TensorDict({f"k{i}": torch.nn.Parameter(torch.ones(3)) for i in range(8)})
    assert [endpoint.take(td, pack_below=99).packed for _ in range(3)] == [False, True, True]
    td["k2"].requires_grad_(False)
    taken = endpoint.take(td, pack_below=99)
    assert not taken.packed and taken.described.schema.grad == [0, 1, 3, 4, 5, 6, 7]


def test_buffers_outlive_the_mode_they_were_made_in():
    def main(transport):
        td = tree()
        want = {k: v * 2 for k, v in td.items()}
        with torch.inference_mode():
            all_reduce(td, transport=transport)
        for factor in (1, 2):
            assert all(torch.equal(td[k], v * factor) for k, v in want.items())
            all_reduce(td, transport=transport)

    LoopbackGroup(2, timeout=10).run(main)
