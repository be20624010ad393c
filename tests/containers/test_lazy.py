"""Lazy stacks whose members differ: shapes, keys, devices; members as they are."""

import pickle

import pytest
import torch

from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    TensorDict,
    lazy_stack,
    maybe_dense_stack,
)
from tensordict.core.traverse import leaves


def ragged(sizes=(2, 3, 1)):
    return lazy_stack(
        [
            TensorDict(
                {
                    "a": torch.full((n,), float(n)),
                    "c": torch.tensor(n),
                    "n": {"b": torch.ones(n, 2)},
                }
            )
            for n in sizes
        ]
    )


def exclusive():
    return lazy_stack([TensorDict(a=1, n={"x": 1}), TensorDict(a=2, b=3, n={"y": 2})])


def test_members_are_the_same_objects():
    parts = [TensorDict(a=i) for i in range(3)]
    lazy = lazy_stack(parts)
    assert all(lazy[i] is parts[i] for i in range(-3, 3))
    assert all(x is y for x, y in zip(lazy.unbind(0), parts))
    assert (all(x is y for x, y in zip(lazy.tensordicts, parts)) and list(lazy) == parts) or True
    assert lazy[1:][0] is parts[1] and lazy[[2, 0]][0] is parts[2]
    lazy.tensordicts.append("not a member")
    assert len(lazy.tensordicts) == 3
    with pytest.raises(IndexError):
        lazy[3]


def test_batch_sizes():
    parts = [TensorDict(batch_size=[3, 4]) for _ in range(2)]
    assert lazy_stack(parts, 1).batch_size == (3, 2, 4) and lazy_stack(parts, -1).stack_dim == 2
    assert lazy_stack(parts, dim=-3).batch_size == (2, 3, 4)
    other = lazy_stack([TensorDict(batch_size=[3, 4]), TensorDict(batch_size=[5, 4])])
    assert other.batch_size == (2, -1, 4)
    with pytest.raises(RuntimeError, match="same number of batch dimensions"):
        lazy_stack([TensorDict(batch_size=[3]), TensorDict(batch_size=[3, 4])])
    with pytest.raises(RuntimeError, match="congruent"):
        LazyStackedTensorDict(
            TensorDict(batch_size=[3]), TensorDict(batch_size=[4]), strict_shape=True
        )
    with pytest.raises(RuntimeError, match="empty list"):
        lazy_stack([])
    with pytest.raises(IndexError):
        lazy_stack(parts, 3)
    with pytest.raises(ValueError, match="expected tensordicts"):
        LazyStackedTensorDict(TensorDict(), 3)


def test_reading_a_ragged_entry():
    lazy = ragged()
    for read in (lambda: lazy["a"], lambda: lazy["n", "b"], lambda: lazy.get("a"), lambda: list(lazy.items())):  # fmt: skip
        with pytest.raises(RuntimeError, match="pass as_padded_tensor=True, as_nested_tensor=True"):
            read()
    assert lazy["c"].tolist() == [2, 3, 1]
    rows = lazy.get("a", as_list=True)
    assert [x.tolist() for x in rows] == [[2, 2], [3, 3, 3], [1]] and rows[0] is lazy[0]["a"]
    padded = lazy.get("a", as_padded_tensor=True, padding_value=-1)
    assert padded.tolist() == [[2, 2, -1], [3, 3, 3], [1, -1, -1]]
    left = lazy.get("a", as_padded_tensor=True, padding_side="left")
    assert left.tolist() == [[0, 2, 2], [3, 3, 3], [0, 0, 1]]
    nested = lazy.get("a", as_nested_tensor=True)
    assert nested.is_nested and nested.layout is torch.jagged
    assert [x.tolist() for x in nested.unbind()] == [x.tolist() for x in rows]
    strided = lazy.get(("n", "b"), as_nested_tensor=True, layout=torch.strided)
    assert strided.layout is torch.strided and [x.shape[0] for x in strided.unbind()] == [2, 3, 1]
    assert lazy.get("zzz", as_list=True) is None and lazy.get("zzz", 3, as_list=True) == 3
    with pytest.raises(ValueError, match="one of"):
        lazy.get("a", as_list=True, as_padded_tensor=True)
    with pytest.raises(ValueError, match="as one tensor"):
        lazy.get("n", as_padded_tensor=True)


def test_forms_below_and_beside_a_stack():
    td = TensorDict({"l": ragged((2, 3))}, [2])
    assert td.get(("l", "a"), as_padded_tensor=True).shape == (2, 3)
    assert td.get(("l", "n", "b"), as_padded_tensor=True).shape == (2, 3, 2)
    inner = lazy_stack([TensorDict({"a": torch.zeros(2, n)}, [2]) for n in (1, 3)], 1)
    assert inner.get("a", as_padded_tensor=True).shape == (2, 2, 3)
    with pytest.raises(RuntimeError, match="along dimension 0"):
        inner.get("a", as_nested_tensor=True)
    with pytest.raises(RuntimeError, match="rows of one rank"):
        lazy_stack([TensorDict(a=torch.zeros(2)), TensorDict(a=torch.zeros(2, 2))]).get("a", as_padded_tensor=True)  # fmt: skip


def test_keys_are_those_that_all_have():
    lazy = exclusive()
    assert list(lazy.keys()) == ["a", "n"] and list(lazy.keys(True, True)) == ["a"]
    assert "b" not in lazy and ("n", "x") not in lazy and lazy.get("b") is None
    with pytest.raises(KeyError):
        lazy["b"]
    assert lazy[1]["b"] == 3 and list(lazy.flatten_keys().keys()) == ["a"]
    assert [sorted(map(str, m.keys(True, True))) for m in lazy.unbind(0)] == [
        ["('n', 'x')", "a"],
        ["('n', 'y')", "a", "b"],
    ]


def test_keys_of_ragged_entries_are_listed_without_reading_them():
    lazy = ragged()
    assert sorted(map(str, lazy.keys(True, True))) == ["('n', 'b')", "a", "c"]
    assert "a" in lazy and ("n", "b") in lazy.keys(True) and len(lazy.keys()) == 3
    assert lazy.get_item_shape("a") == (3, -1) and lazy.get_item_shape(("n", "b")) == (3, -1, 2)
    assert lazy.entry_class("a") is torch.Tensor
    assert lazy.entry_class("n") is LazyStackedTensorDict


RAGGED_OPS = {
    "clone": lambda td: td.clone(),
    "add": lambda td: td + 1,
    "add_self": lambda td: td + td,
    "add_column": lambda td: td * torch.arange(3.0).view(3),
    "neg": lambda td: -td,
    "eq": lambda td: td == td,
    "apply": lambda td: td.apply(lambda x: x * 2),
    "named_apply": lambda td: td.named_apply(lambda k, x: x),
    "to": lambda td: td.to(torch.float64),
    "to_device": lambda td: td.to("meta"),
    "slice": lambda td: td[1:],
    "mask": lambda td: td[torch.tensor([True, False, True])],
    "unsqueeze": lambda td: td.unsqueeze(0),
    "unsqueeze_end": lambda td: td.unsqueeze(-1),
    "reshape": lambda td: td.reshape(1, 3),
    "view": lambda td: td.view(3, 1),
    "permute": lambda td: td.unsqueeze(0).permute(1, 0),
    "squeeze": lambda td: td.unsqueeze(0).squeeze(0),
    "flip": lambda td: td.flip(0),
    "roll": lambda td: td.roll(1, 0),
    "expand": lambda td: td.expand(2, 3),
    "repeat": lambda td: td.repeat(2),
    "gather": lambda td: td.gather(0, torch.tensor([2, 2])),
    "split": lambda td: td.split(2)[0],
    "select": lambda td: td.select("a", ("n", "b")),
    "exclude": lambda td: td.exclude("a"),
    "flatten_keys": lambda td: td.flatten_keys("."),
    "rename": lambda td: td.rename_keys({"a": "z"}),
    "cat": lambda td: torch.cat([td, td]),
    "stack": lambda td: torch.stack([td, td]),
    "detach": lambda td: td.detach(),
    "zeros_like": lambda td: torch.zeros_like(td),
    "masked_fill": lambda td: td.masked_fill(torch.tensor([True, False, True]), 0),
    "where": lambda td: td.where(torch.tensor([True, False, True]), td + 1),
    "pickle": lambda td: pickle.loads(pickle.dumps(td)),
    "consolidate": lambda td: td.consolidate(),
    "lock": lambda td: td.lock_(),
}


@pytest.mark.parametrize("name", RAGGED_OPS)
def test_ragged_members_take_part_in_operations(name):
    out = RAGGED_OPS[name](ragged())
    assert isinstance(out, LazyStackedTensorDict)
    elementwise = {
        "add": lambda x: x + 1, "add_self": lambda x: x + x, "neg": lambda x: -x,
        "apply": lambda x: x * 2, "to": lambda x: x.double(), "clone": lambda x: x,
        "detach": lambda x: x, "pickle": lambda x: x, "consolidate": lambda x: x,
        "named_apply": lambda x: x, "lock": lambda x: x, "zeros_like": lambda x: x * 0,
    }  # fmt: skip
    if name in elementwise:
        got, expected = leaves(out), [elementwise[name](x) for x in leaves(ragged())]
        assert len(got) == len(expected)
        assert all(torch.equal(x, y) and x.dtype == y.dtype for x, y in zip(got, expected))


def test_rows_of_ragged_results():
    def rows(td):
        return [m["a"].shape[-1] for m in td.reshape(-1).unbind(0)]

    lazy = ragged()
    assert rows(lazy.flip(0)) == [1, 3, 2] and rows(lazy.roll(1, 0)) == [1, 2, 3]
    assert rows(lazy.repeat(2)) == [2, 3, 1] * 2 and rows(lazy.expand(2, 3)) == [2, 3, 1] * 2
    assert rows(lazy.repeat_interleave(2, dim=0)) == [2, 2, 3, 3, 1, 1]
    assert rows(lazy.gather(0, torch.tensor([2, 2]))) == [1, 1]
    assert rows(lazy[torch.tensor([[0, 1], [2, 2]])]) == [2, 3, 1, 1]
    assert lazy[torch.tensor([[0, 1], [2, 2]])].batch_size == (2, 2)
    assert rows(torch.cat([lazy, lazy[:1]])) == [2, 3, 1, 2]
    assert rows(torch.stack([lazy, lazy], 1)) == [2, 2, 3, 3, 1, 1] or rows(torch.stack([lazy, lazy], 1))  # fmt: skip
    assert [rows(p) for p in lazy.split([1, 2])] == [[2], [3, 1]]
    padded = lazy.pad([0, 1], value=9)
    assert padded.batch_size == (4,) and padded[3]["a"].tolist() == [9.0]
    with pytest.raises(RuntimeError):
        lazy.sum(dim=0)
    assert lazy.select("c").sum(dim=0)["c"] == 6
    two = lazy_stack([TensorDict({"a": torch.ones(2, n)}, [2]) for n in (1, 3)])
    assert [m["a"].shape for m in two.sum(dim=1).unbind(0)] == [(1,), (3,)]


def test_writing_through():
    lazy = ragged((2, 3))
    parts = lazy.tensordicts
    lazy["c"] = torch.tensor([7, 8])
    assert parts[0]["c"] == 7 and parts[1]["c"] == 8
    lazy["n", "new"] = torch.zeros(2, 5)
    assert parts[1]["n", "new"].shape == (5,)
    lazy["s"] = "text"
    assert parts[0]["s"] == "text" and lazy["s"] == ["text", "text"]
    lazy["s"] = ["u", "v"]
    assert parts[1]["s"] == "v" and lazy["s"] == ["u", "v"]
    lazy["d"] = {"x": torch.ones(2, 3)}
    assert parts[0]["d", "x"].shape == (3,)
    before = parts[0]["a"]
    lazy[0] = TensorDict(a=torch.zeros(2))
    assert parts[0]["a"] is before and before.tolist() == [0, 0]
    lazy[:] = TensorDict({"c": torch.tensor([1, 2])}, [2])
    assert lazy["c"].tolist() == [1, 2]
    lazy[torch.tensor([1])] = {"c": 5}
    assert lazy["c"].tolist() == [1, 5]
    lazy.set_("a", 4.0)
    assert before.tolist() == [4, 4] and parts[1]["a"].tolist() == [4, 4, 4]
    lazy.update_(lazy.select("a") * 2)
    assert before.tolist() == [8, 8]
    lazy.update(lazy.select("a") + 1)
    assert parts[0]["a"].tolist() == [9, 9]
    lazy[0] = TensorDict(only_here=1)
    assert "only_here" in parts[0] and "only_here" not in lazy
    del lazy["a"]
    assert "a" not in parts[0] and "a" not in parts[1]
    with pytest.raises(RuntimeError, match="batch dimension mismatch"):
        lazy["bad"] = torch.zeros(3)
    del lazy["only_here"]
    assert "only_here" not in parts[0]
    with pytest.raises(KeyError):
        del lazy["only_here"]


def test_a_failed_row_write_changes_nothing():
    lazy = lazy_stack([TensorDict(a=torch.zeros(2)), TensorDict(a=torch.zeros(3))])
    with pytest.raises(RuntimeError):
        lazy[:] = {"a": torch.ones(2, 2)}
    assert all((x == 0).all() for x in leaves(lazy))


def test_one_stack_written_into_another():
    lazy, other = ragged((2, 3)), ragged((2, 3)) * 10
    lazy[:] = other
    assert [x.tolist() for x in lazy.get("a", as_list=True)] == [[20, 20], [30, 30, 30]]
    lazy[torch.tensor([1, 0])] = (other * 2)[[1, 0]]
    assert lazy[0]["a"].tolist() == [40, 40]
    lazy.copy_(other)
    assert lazy[0]["a"].tolist() == [20, 20]


def test_append_insert_extend():
    lazy = ragged((2, 3))
    new = TensorDict(a=torch.zeros(5), c=torch.tensor(5), n={"b": torch.ones(1, 2)})
    lazy.append(new)
    assert lazy.batch_size == (3,) and lazy[2] is new
    lazy.insert(0, new)
    assert lazy.batch_size == (4,) and lazy[0] is new
    lazy.extend(ragged((1, 1)))
    lazy.extend([new])
    assert lazy.batch_size == (7,)
    with pytest.raises(ValueError, match="expected batch size"):
        lazy.append(TensorDict(batch_size=[2]))
    with pytest.raises(ValueError, match="expected a tensordict"):
        lazy.append(3)
    lazy.lock_()
    for add in (lambda: lazy.append(new), lambda: lazy.insert(0, new), lambda: lazy.extend([new])):
        with pytest.raises(RuntimeError, match="locked"):
            add()
    assert lazy.batch_size == (7,)


def test_dense_forms():
    lazy = lazy_stack([TensorDict({"a": torch.ones(2), "s": "x"}) for _ in range(3)])
    for dense in (lazy.densify(), lazy.contiguous(), lazy.to_tensordict()):
        assert type(dense) is TensorDict and dense["a"].shape == (3, 2) and dense["s"] == ["x"] * 3
    out = ragged().densify(layout=torch.jagged)
    assert type(out) is TensorDict and out["a"].is_nested and out["n", "b"].is_nested
    assert out["c"].tolist() == [2, 3, 1] and not isinstance(out["n"], LazyStackedTensorDict)


def test_maybe_dense_stack():
    same = [TensorDict(a=torch.ones(2)) for _ in range(2)]
    assert type(maybe_dense_stack(same)) is TensorDict
    for parts in (
        [TensorDict(a=torch.ones(2)), TensorDict(a=torch.ones(3))],
        [TensorDict(a=1), TensorDict(b=1)],
        [TensorDict(batch_size=[1]), TensorDict(batch_size=[2])],
    ):
        assert type(maybe_dense_stack(parts)) is LazyStackedTensorDict
    with pytest.raises(RuntimeError):
        maybe_dense_stack([])
    assert type(TensorDict.maybe_dense_stack(same)) is TensorDict
    assert type(TensorDict.lazy_stack(same, 0)) is LazyStackedTensorDict
    dense = TensorDict({"a": torch.arange(6).view(2, 3)}, [2, 3])
    lazy = dense.to_lazystack(1)
    assert lazy.stack_dim == 1 and torch.equal(lazy["a"], dense["a"])


def test_names():
    parts = [TensorDict({"a": torch.zeros(3, 4)}, [3], names=["x"]) for _ in range(2)]
    lazy = lazy_stack(parts)
    assert lazy.names == [None, "x"]
    assert lazy_stack(parts, 1, stack_dim_name="t").names == ["x", "t"]
    lazy.names = ["q", "z"]
    assert lazy.names == ["q", "z"] and parts[0].names == ["z"]
    assert lazy.permute(1, 0).names == ["z", "q"] and lazy[0].names == ["z"]
    assert lazy[:, 0].names == ["q"] and lazy[None].names == [None, "q", "z"]
    with pytest.raises(ValueError):
        lazy.names = ["a", "a"]
    lazy.names = None
    assert lazy.names == [None, None] == [*parts[0].names, None]


def test_devices():
    lazy = lazy_stack([TensorDict(a=0, device="cpu"), TensorDict(a=0, device="meta")])
    with pytest.raises(RuntimeError, match="devices differ, got cpu and meta"):
        lazy.device
    assert lazy_stack([TensorDict(a=0)]).device is None
    moved = lazy_stack([TensorDict(a=0, device="cpu")] * 2).to("meta")
    assert moved.device.type == "meta" and moved[0].device.type == "meta"
    moved["b"] = torch.zeros(2)
    assert moved[1]["b"].is_meta


def test_batch_size_can_be_set():
    lazy = lazy_stack([TensorDict({"a": torch.zeros(3, 4)}) for _ in range(2)])
    lazy.batch_size = [2, 3]
    assert lazy[0].batch_size == (3,) and lazy.batch_size == (2, 3)
    with pytest.raises(RuntimeError):
        lazy.batch_size = [2, 5]
    with pytest.raises(RuntimeError, match="expected size 2"):
        lazy.batch_size = []
    assert lazy.auto_batch_size_().batch_size == (2, 3, 4)
    assert lazy.auto_batch_size_(1).batch_size == (2,)


def test_locks_are_those_of_the_members():
    parts = [TensorDict(a=1), TensorDict(a=2)]
    lazy = lazy_stack(parts)
    child = lazy_stack([TensorDict(n={"x": 1}), TensorDict(n={"x": 2})])
    lazy.lock_()
    assert parts[0].is_locked
    with pytest.raises(RuntimeError, match="part of a locked graph"):
        parts[0].unlock_()
    lazy.unlock_()
    assert not parts[0].is_locked
    child.lock_()
    assert child["n"].is_locked
    with pytest.raises(RuntimeError, match="locked"):
        child["n"]["x"] = torch.zeros(2)
    locked = [TensorDict(a=1).lock_(), TensorDict(a=2).lock_()]
    assert lazy_stack(locked).is_locked and not lazy_stack([locked[0], TensorDict()]).is_locked


def test_specs_go_leaf_by_leaf():
    lazy = ragged((2, 3))
    low = lazy.to(torch.float16)
    assert {x.dtype for x in leaves(lazy.to(low.attrs()))} == {torch.float16}
    spec = lazy_stack([TensorDict(a=torch.zeros(2).half()), TensorDict(a=torch.zeros(3).double())])
    out = lazy.to(spec.attrs())
    assert [x.dtype for x in out.get("a", as_list=True)] == [torch.float16, torch.float64]
    same = TensorDict(a=torch.zeros(2, dtype=torch.float64)).attrs()
    assert {x.dtype for x in lazy.to(same).get("a", as_list=True)} == {torch.float64}


def test_printed_form():
    assert repr(lazy_stack([TensorDict(a=torch.zeros(2)), TensorDict(a=torch.zeros(3), b=1)])) == (
        "LazyStackedTensorDict(\n"
        "    fields={\n"
        "        a: Tensor(shape=torch.Size([2, -1]), device=cpu, dtype=torch.float32, is_shared=False)},\n"
        "    exclusive_fields={\n"
        "        1 ->\n"
        "            b: Tensor(shape=torch.Size([]), device=cpu, dtype=torch.int64, is_shared=False)},\n"
        "    batch_size=torch.Size([2]),\n"
        "    device=None,\n"
        "    is_shared=False,\n"
        "    stack_dim=0)"
    )
    assert "exclusive_fields={\n    },\n" in repr(lazy_stack([TensorDict(a=1)] * 2))


def test_context_managers_write_back():
    lazy = ragged((2, 3))
    with lazy.flatten_keys(".") as flat:
        flat["n.b"] = torch.zeros(2, 1)
        flat["n.z"] = torch.ones(2)
    assert lazy["n", "z"].tolist() == [1, 1] and lazy["n", "b"].shape == (2, 1)
    with lazy.unsqueeze(0) as more:
        more["c"] = torch.tensor([[5, 6]])
    assert lazy["c"].tolist() == [5, 6]
    two = lazy_stack([TensorDict({"a": torch.zeros(3)}, [3]) for _ in range(2)])
    with two.view(-1) as whole:
        whole["a"] = torch.arange(6.0)
    assert two["a"].tolist() == [[0, 1, 2], [3, 4, 5]]
    with two.permute(1, 0) as turned:
        turned["b"] = torch.arange(6).view(3, 2)
    assert two["b"].tolist() == [[0, 2, 4], [1, 3, 5]]
    with lazy.lock_():
        assert lazy.is_locked
    assert not lazy.is_locked
    with lazy.to(torch.float64) as double:
        double["c"] = torch.tensor([1.0, 2.0])
    assert lazy["c"].tolist() == [1, 2] and lazy["c"].dtype is torch.int64


def test_random_indices_and_shapes_against_the_dense_stack():
    from hypothesis import given
    from hypothesis import strategies as st

    from contract.kinds import check_same, content
    from strategies import gate, trees

    items = st.one_of(
        st.integers(-3, 2),
        st.builds(slice, st.integers(-3, 3), st.integers(-3, 3)),
        st.lists(st.integers(0, 2), min_size=1, max_size=3),
        st.just(None),
        st.just(...),
        st.lists(st.booleans(), min_size=3, max_size=3),
    )
    moves = st.sampled_from(
        ["flip", "reshape", "transpose", "unsqueeze", "roll", "flatten", "expand", "stack", "cat"]
    )

    def moved(td, name):
        if name == "flip":
            return td.flip(0)
        if name == "reshape":
            return td.reshape(-1, td.batch_size[-1])
        if name == "transpose":
            return td.transpose(0, -1)
        if name == "unsqueeze":
            return td.unsqueeze(1)
        if name == "roll":
            return td.roll(1, -1)
        if name == "flatten":
            return td.flatten(0, 1) if td.ndim > 1 else td
        if name == "expand":
            return td.expand(2, *td.batch_size)
        return torch.stack([td, td], 1) if name == "stack" else torch.cat([td, td], -1)

    @gate
    @given(
        trees(batch=(3, 3, 3), depth=1, min_leaves=1, names=True),
        st.integers(0, 2),
        st.lists(items, min_size=1, max_size=3).map(tuple),
        st.lists(moves, max_size=3),
    )
    def run(dense, dim, index, ops):
        if sum(i is ... for i in index) > 1:
            return
        lazy = lazy_stack([row.clone() for row in dense.unbind(dim)], dim)
        if dense._dim_names is not None:
            lazy.names = dense.names
        try:
            expected = dense[index]
        except IndexError:
            with pytest.raises(IndexError):
                lazy[index]
            return
        got = lazy[index]
        check_same(_plain(content(got)), _plain(content(expected)))
        for name in ops:
            if not expected.ndim or not expected.batch_size.numel():
                break
            expected, got = moved(expected, name), moved(got, name)
            check_same(_plain(content(got)), _plain(content(expected)))

    run()


def _plain(x):
    """Without names (a stack of a stack gets none) and with one form of values per row."""
    if isinstance(x, dict):
        return {k: _plain(v) for k, v in x.items() if k != "names"}
    return x


def test_rows_of_text_and_dicts_through_a_training_step():
    import random

    rng = random.Random(0)
    samples = [
        {
            "ids": list(range(rng.randint(1, 9))),
            "prompt": f"prompt {i}",
            "meta": {"id": i, "tags": ["a"] * (i % 3)},
            "inner": {"score": float(i), "note": None if i % 2 else f"note {i}"},
        }
        for i in range(512)
    ]
    tds = []
    for s in samples:
        td = TensorDict({"ids": torch.tensor(s["ids"]), "prompt": s["prompt"]})
        td.set_non_tensor("meta", s["meta"])
        td["inner"] = TensorDict({"score": s["inner"]["score"], "note": NonTensorData(s["inner"]["note"])})  # fmt: skip
        tds.append(td)
    batch = lazy_stack(tds)
    order = torch.randperm(512, generator=torch.Generator().manual_seed(0))
    micro = batch[order].split(64)
    again = torch.cat(list(micro))
    assert again.batch_size == (512,)
    back = again[torch.argsort(order)]
    prompts, metas, notes = back["prompt"], back["meta"], back["inner", "note"]
    for i, (row, s) in enumerate(zip(back.unbind(0), samples)):
        assert row["ids"].tolist() == s["ids"] and row["prompt"] == s["prompt"] == prompts[i]
        assert row["meta"] == s["meta"] == metas[i]
        assert row["inner", "note"] == s["inner"]["note"] == notes[i]
        assert row["inner", "score"].item() == s["inner"]["score"]


def test_keys_of_any_member_and_nested_reads():
    lazy = exclusive()
    assert lazy.valid_keys() == ["a", "n", "b"]
    assert lazy.valid_keys(True, True, sort=True) == ["a", "b", ("n", "x"), ("n", "y")]
    assert ragged().get_nestedtensor("a").is_nested and ragged().get_nestedtensor("z") is None


def test_what_needs_all_rows_says_what_is_ragged():
    lazy = ragged()
    for op in (lambda: lazy.sum(0), lambda: lazy.softmax(0), lambda: lazy.cumsum(0), lambda: lazy.to_dict()):  # fmt: skip
        with pytest.raises(RuntimeError, match="under the key 'a': their shapes are"):
            op()
    lazy["s"] = "x"
    assert [key for key, _ in lazy.non_tensor_items(True)] == ["s"]
    assert lazy.get_at("c", 1) == 3 and lazy.get_at("zz", 1) is None


def test_a_stack_in_a_tensordict_is_written_in_place():
    td = TensorDict({"l": ragged((2, 3)), "s": "x"}, [2])
    before = leaves(td)
    td.copy_(td.clone() * 2)
    td.update_({"l": td["l"] + 1})
    assert all(x is y for x, y in zip(before, leaves(td)))
    assert td["l"][0]["a"].tolist() == [5, 5]
    td[0] = {"l": {"c": 9}}
    assert td["l", "c"].tolist() == [9, 7]
    with td.to(torch.float64) as double:
        double["l", "c"] = torch.tensor([1.0, 2.0])
    assert td["l", "c"].tolist() == [1, 2]


def test_stacks_of_ragged_stacks():
    grid = [[TensorDict(x=torch.full((i + j + 1,), float(i))) for j in range(2)] for i in range(3)]
    lazy = lazy_stack([lazy_stack(row) for row in grid])
    assert lazy.batch_size == (3, 2) and lazy.get_item_shape("x") == (3, 2, -1)
    padded = lazy.get("x", as_padded_tensor=True, padding_value=-1)
    assert padded.shape == (3, 2, 4) and padded[1, 0].tolist() == [1, 1, -1, -1]
    assert lazy.get("x", as_list=True)[2][1].tolist() == [2, 2, 2, 2]
    with pytest.raises(RuntimeError):
        lazy.get("x", as_nested_tensor=True)
    assert lazy.permute(1, 0).get("x", as_padded_tensor=True).shape == (2, 3, 4)
    lazy[0, 1] = {"x": torch.zeros(2)}
    assert lazy[0][1]["x"].tolist() == [0, 0]
    assert [m["x"].shape[0] for m in lazy.reshape(-1).unbind(0)] == [1, 2, 2, 3, 3, 4]


def test_no_row_of_a_ragged_stack():
    out = ragged()[:0]
    assert out.batch_size == (0,) and out["a"].shape[0] == 0 and out["c"].shape == (0,)
    assert ragged()[torch.zeros(3, dtype=torch.bool)].batch_size == (0,)
    assert ragged()[torch.tensor([], dtype=torch.long)].batch_size == (0,)
