"""What one rank of a collective of pairs does wrong is told to the others, who do not wait."""

import pytest
import torch

from tensordict import NonTensorStack, TensorDict, lazy_stack, tensorclass
from tensordict.distributed import all_reduce, all_to_all, gather_and_stack, reduce_scatter
from tensordict.distributed.testing import LoopbackGroup
from tensordict.errors import TransferError

N = 3


@tensorclass
class Step:
    x: torch.Tensor
    note: str


def outcomes(call):
    """What each rank returned or raised; then the group is used again."""

    def main(transport):
        try:
            result = call(transport)
        except Exception as error:
            result = error
        td = TensorDict({"a": torch.ones(2)})
        all_reduce(td, transport=transport)
        assert td["a"].eq(N).all()
        return result

    return LoopbackGroup(N, timeout=5).run(main)


def mine(rank):
    return TensorDict({"a": torch.full((2,), float(rank)), "n": {"v": f"rank {rank}"}})


def test_rows_take_tensors_and_other_values():
    def call(transport):
        rows = TensorDict({"a": torch.zeros(N - 1, 2), "n": {"v": "nothing"}}, [N - 1]).lock_()
        a = rows["a"]
        got = gather_and_stack(
            rows if transport.rank == 0 else mine(transport.rank), 0, transport=transport
        )
        if transport.rank > 0:
            return got
        assert got is rows and got["a"] is a and got.is_locked
        return a.tolist(), got.get(("n", "v")).tolist(), got[1]["n", "v"]

    assert outcomes(call) == [([[1, 1], [2, 2]], ["rank 1", "rank 2"], "rank 2"), None, None]


def test_rows_of_classes_and_members_of_stacks():
    def of_class(transport):
        if transport.rank > 0:
            step = Step(x=torch.ones(2) * transport.rank, note=f"{transport.rank}", batch_size=[])
            return gather_and_stack(step, 0, transport=transport)
        rows = Step(x=torch.zeros(N - 1, 2), note=NonTensorStack("", ""), batch_size=[N - 1])
        got = gather_and_stack(rows, 0, transport=transport)
        return got.x.tolist(), [row.note for row in got.unbind(0)]

    assert outcomes(of_class) == [([[1, 1], [2, 2]], ["1", "2"]), None, None]

    def of_stack(transport):
        if transport.rank > 0:
            td = TensorDict({"a": torch.ones(transport.rank), "v": f"{transport.rank}"})
            return gather_and_stack(td, 0, transport=transport)
        rows = lazy_stack([TensorDict({"a": torch.zeros(r), "v": ""}) for r in range(1, N)])
        got = gather_and_stack(rows, 0, transport=transport)
        return [(row["a"].tolist(), row["v"]) for row in got.unbind(0)]

    assert outcomes(of_stack) == [[([1], "1"), ([1, 1], "2")], None, None]


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        (lambda: TensorDict({"a": torch.zeros(2)}), "Expected one row for each other rank"),
        (lambda: TensorDict({"a": torch.zeros(N, 2)}, [N]), "Expected one row for each other rank"),
        (lambda: TensorDict({"a": torch.eye(N - 1).to_sparse()}, [N - 1]), "a leaf of layout"),
    ],
)
def test_rows_that_cannot_be_are_told_to_all(rows, text):
    results = outcomes(
        lambda t: gather_and_stack(rows() if t.rank == 0 else mine(t.rank), 0, transport=t)
    )
    assert all(isinstance(error, TransferError) and text in str(error) for error in results)


@pytest.mark.parametrize("call", [all_to_all, reduce_scatter])
def test_a_wrong_number_on_one_rank_is_told_to_all(call):
    def main(transport):
        n = N - 1 if transport.rank == 1 else N
        return call([TensorDict({"a": torch.ones(2)}) for _ in range(n)], transport=transport)

    first, second, third = outcomes(main)
    assert isinstance(second, ValueError) and "Expected one for each" in str(second)
    for error in (first, third):
        assert isinstance(error, TransferError) and "Expected one for each" in str(error)
