"""Memory that exchanges write to: made in inference mode, shared, in a graph, or left behind."""

import pickle

import numpy as np
import pytest
import torch

from tensordict import TensorDict
from tensordict.distributed import all_reduce, recv, reduce_scatter, send
from tensordict.distributed.testing import LoopbackGroup, run_ranks
from tensordict.errors import UnsupportedLeaf

BIG = 60_000


def run(main):
    return LoopbackGroup(2, timeout=10).run(main)


def tree(fill, n=BIG):
    x = torch.full((n,), float(fill))
    return TensorDict(
        {
            "direct": x,
            "small": torch.full((4,), float(fill)),
            "strided": torch.full((n // 4, 4), float(fill)).t(),
            "wider": torch.full((n,), int(fill), dtype=torch.int16),
        }
    )


def values(td):
    return {x for leaf in td.values() for x in leaf.unique().tolist()}


@pytest.mark.parametrize("atomic", [True, False])
@pytest.mark.parametrize("forms", [(False, False), (True, False), (False, True), (True, True)])
def test_memory_made_in_inference_mode_is_received_into(atomic, forms):
    def main(transport):
        if transport.rank == 0:
            td = tree(1).consolidate() if forms[0] else tree(1).lock_()
            return send(td, 1, transport=transport)
        with torch.inference_mode():
            td = tree(0).consolidate() if forms[1] else tree(0).lock_()
        recv(0, out=td, atomic=atomic, transport=transport)
        return values(td)

    assert run(main)[1] == {1.0}


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("how", [{"op": "avg"}, {"async_op": True, "op": "avg"}, {"scale": 2}])
def test_memory_made_in_inference_mode_is_reduced(how, whole):
    def main(transport):
        with torch.inference_mode():
            td = tree(3).consolidate() if whole else tree(3)
        pending = all_reduce(td, transport=transport, **how)
        if pending is not None:
            pending.wait()
        return values(td)

    assert run(main) == [{12.0 if "scale" in how else 3.0}] * 2


def _graph(rank, size, whole):
    td = tree(1).consolidate() if whole else tree(1)

    def exchange():
        if rank == 0:
            send(td, 1)
        else:
            recv(0, out=td, atomic=False)

    for call, writes in ((lambda: all_reduce(td), True), (exchange, rank == 1)):
        weight = torch.ones(BIG, requires_grad=True)
        loss = (weight * td["direct"]).sum()
        call()
        if writes:
            with pytest.raises(RuntimeError, match="modified by an inplace"):
                loss.backward()
        else:
            loss.backward()
    return True


@pytest.mark.ranks
@pytest.mark.parametrize("whole", [True, False])
def test_a_graph_notices_what_gloo_wrote(whole):
    assert run_ranks(_graph, 2, whole) == [True, True]


@pytest.mark.parametrize("whole", [True, False])
def test_reduce_scatter_of_tensordicts_of_one_memory(whole):
    def main(transport):
        td = TensorDict({"x": torch.full((BIG,), float(transport.rank + 1))})
        if whole:
            td = td.consolidate()
        out = reduce_scatter([td, td.copy()], transport=transport)
        return out["x"].unique().tolist()

    assert run(main) == [[3.0], [3.0]]


def test_factors_are_numbers_of_any_kind():
    def reduced(scale, x):
        def main(transport):
            td = TensorDict({"x": x.clone()})
            all_reduce(td, scale=scale, transport=transport, timeout=10)
            return td["x"].tolist()

        return run(main)

    ones, flags = torch.ones(2), torch.tensor([True, False])
    assert reduced(np.float64(0.5), ones) == reduced(torch.tensor(0.5), ones) == [[1.0, 1.0]] * 2
    assert reduced(np.int64(3), ones.long()) == [[6, 6]] * 2
    assert reduced(1 << 70, ones) == [[2.0**71, 2.0**71]] * 2
    assert reduced(256, flags) == [[True, False]] * 2 and reduced(0, flags) == [[False] * 2] * 2
    for fraction in (np.float64(0.5), torch.tensor(0.5), 1 << 70):
        with pytest.raises(UnsupportedLeaf, match="scale"):
            reduced(fraction, ones.long())
    for strange in ("2", 1j):
        with pytest.raises(TypeError, match="Expected a number"):
            reduced(strange, ones)


def test_a_tree_below_another_one_leaves_its_buffer_too():
    def ragged(fill):
        rows = [torch.full((n,), fill) for n in (2, 3)]
        return TensorDict({"j": torch.nested.nested_tensor(rows, layout=torch.jagged)}, [2])

    def main(transport):
        if transport.rank == 0:
            return send(TensorDict({"n": ragged(1.0).lock_()}), 1, transport=transport)
        inner = ragged(0.0).consolidate()
        recv(0, out=TensorDict({"n": inner}), transport=transport)
        again = pickle.loads(pickle.dumps(inner))
        return inner["j"].values().tolist(), again["j"].values().tolist(), inner.is_consolidated()

    assert run(main)[1] == ([1.0] * 5, [1.0] * 5, False)


def test_one_address_read_in_another_way():
    square, block = torch.arange(9.0).view(3, 3), torch.arange(120.0).view(2, 3, 4, 5)
    last = block.as_strided(block.shape, (60, 1, 15, 3))
    trees = [
        TensorDict({"a": square, "b": square if tied else square.t(), "c": block if tied else last})
        for tied in (False, True, False)
    ]

    def main(transport):
        for td in trees:
            if transport.rank == 0:
                send(td, 1, transport=transport)
                continue
            got = recv(0, transport=transport)
            assert all(torch.equal(got[key], td[key]) for key in "abc")
            assert got["c"].stride() == td["c"].stride()
            tied = td["b"].is_contiguous()
            assert (got["a"].data_ptr() == got["b"].data_ptr()) is tied
        return True

    assert run(main)[1]


@pytest.mark.parametrize("checksum", ["none", "crc32"])
def test_a_single_element_of_any_stride_travels_alone(checksum):
    def main(transport):
        td = TensorDict({"x": torch.arange(4.0)[2 * (1 - transport.rank) :: 2][:1]})
        if transport.rank == 0:
            send(td, 1, pack_below=0, checksum=checksum, transport=transport)
        else:
            recv(0, out=td, atomic=False, transport=transport)
        return td["x"].tolist()

    assert run(main) == [[2.0], [2.0]]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int32])
def test_a_dtype_that_nothing_is_summed_in_is_refused_before_anything_is_written(dtype):
    td = tree(1)
    with pytest.raises(ValueError, match="Expected a floating dtype"):
        all_reduce(td, accumulate_dtype=dtype, transport=LoopbackGroup(1).transport(0))
    assert values(td) == {1.0}
