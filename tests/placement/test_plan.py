"""Plans: what they say, what they refuse, and that running them does what they said."""

import json
import pickle
import subprocess
import sys
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tensordict import TensorDict
from tensordict.device.fake import FakeDevices
from tensordict.device.kinds import MoveKind
from tensordict.errors import (
    FileFormatError,
    LayoutError,
    LockedError,
    MemoryBudgetError,
    MissingKeyError,
    PlanMismatch,
    SchemaMismatch,
)
from tensordict.placement import CastPolicy, Layout, MovePlan, Rule, Spec, Target, plan_moves

CPU, META, CUDA0, CUDA1 = (torch.device(name) for name in ("cpu", "meta", "cuda:0", "cuda:1"))


def model(device="cpu"):
    w = torch.ones(4, 3, device=device)
    return TensorDict(
        {
            "embed": {"weight": w},
            "layer": {
                "weight": torch.ones(3, 3, device=device),
                "norm": torch.ones(3, device=device),
            },
            "head": {"weight": w},
            "step": torch.tensor(3, device=device),
            "name": "model",
        }
    )


def test_kinds_bytes_and_totals():
    plan = plan_moves(model(), policy=CastPolicy.mixed())
    assert plan.bytes_by_kind == {
        MoveKind.ALIAS: 4 * 3 * 4 + 3 * 4 + 8,
        MoveKind.CAST: (9 + 12) * 2,
    }
    assert plan.n_copies == 2 and plan.n_syncs == 0 and plan.bytes_by_link == {}
    assert plan["layer", "norm"].kind is MoveKind.ALIAS
    assert plan["head", "weight"].route.dtype is torch.bfloat16
    assert len(plan) == 5 and [move.path[-1] for move in plan][-1] == "step"


def test_tied_leaves_count_and_move_once():
    plan = plan_moves(model(), "cuda:0")
    assert plan["head", "weight"].tied_to == ("embed", "weight")
    assert plan.bytes_by_link == {(CPU, CUDA0): (12 + 9 + 3) * 4 + 8}
    assert plan.peak_bytes("cuda:0") == (12 + 9 + 3) * 4 + 8
    assert plan.peak_bytes("cuda:1") == 0
    assert "4 h2d, 1 tied" in plan.summary()
    assert "shares memory with embed.weight" in plan.explain(("head", "weight"))


def test_leaves_of_one_memory_and_two_targets_are_not_tied():
    rule = Rule("head.*", torch.float16)
    out = plan_moves(model(), Spec(rules=(rule,), default=Target(dtype=torch.float64)))
    assert out.ties == {}
    td = out.run(model())
    assert td["head", "weight"].dtype is torch.float16
    assert td["embed", "weight"].dtype is torch.float64


def test_a_tree_of_meta_tensors_is_enough():
    plan = plan_moves(model("meta"), policy=CastPolicy.mixed())
    assert plan.n_copies == 2
    assert plan.run(model("meta"))["layer", "weight"].dtype is torch.bfloat16


def test_a_plan_runs_again_on_another_tree_of_the_same_structure():
    plan = plan_moves(model(), torch.float16)
    other = model()
    other["layer", "weight"].fill_(7)
    out = plan.run(other)
    assert bool((out["layer", "weight"] == 7).all()) and out["name"] == "model"
    assert plan.run(other, inplace=True) is other and other["step"].dtype is torch.float16


def test_another_structure_is_refused_with_every_difference():
    plan = plan_moves(model(), torch.float16)
    td = model()
    del td["head"]
    td["layer", "weight"] = torch.ones(3, 4)
    td["step"] = torch.tensor(3, dtype=torch.int32)
    td["new"] = torch.ones(1)
    before = td.clone()
    with pytest.raises(PlanMismatch) as error:
        plan.run(td)
    text = str(error.value)
    assert "4 leaves differ" in text
    for part in (
        "('head', 'weight')",
        "[3, 4] on cpu; planned float32 [3, 3]",
        "int32 []",
        "'new'",
    ):
        assert part in text
    assert isinstance(error.value, SchemaMismatch)
    assert pickle.loads(pickle.dumps(error.value)).differences == error.value.differences
    assert list(td.keys(True, True)) == list(before.keys(True, True))


def test_a_tree_whose_ties_are_gone_still_moves_right():
    plan = plan_moves(model(), torch.float16)
    td = model()
    td["head", "weight"] = torch.zeros(4, 3)
    assert bool((plan.run(td)["head", "weight"] == 0).all())


def test_out_receives_values_or_is_left_alone():
    td = model()
    plan = plan_moves(td, torch.float16)
    out = TensorDict(
        {
            "embed": {"weight": torch.zeros(4, 3)},
            "layer": {"weight": torch.zeros(3, 3), "norm": torch.zeros(3)},
            "head": {"weight": torch.zeros(4, 3)},
            "step": torch.tensor(0),
        }
    )
    weight = out["layer", "weight"]
    assert plan.run(td, out=out) is out
    assert out["layer", "weight"] is weight and bool((weight == 1).all()) and out["step"] == 3
    bad = TensorDict({"embed": {"weight": torch.zeros(4, 4)}, "more": torch.zeros(1)})
    with pytest.raises(SchemaMismatch) as error:
        plan.run(td, out=bad)
    assert len(error.value.differences) == 6
    assert bool((bad["embed", "weight"] == 0).all())


def test_locked_trees_are_not_written_in_place():
    td = model().lock_()
    with pytest.raises(LockedError):
        plan_moves(td, torch.float16).run(td, inplace=True)
    assert plan_moves(td, torch.float16).run(td).is_locked


# --- what does not meet -----------------------------------------------------------


def test_unused_entries_warn_or_raise_and_name_what_is_near():
    td = model()
    policy = CastPolicy({"*.wieght": "bf16"})
    with pytest.warns(UserWarning, match=r"1 entries.*(\n.*)*near: embed\.weight"):
        plan = plan_moves(td, policy=policy)
    assert plan.unmatched[0].pattern == "*.wieght"
    with pytest.raises(SchemaMismatch, match="wieght"):
        plan_moves(td, policy=policy, on_unused="error")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan_moves(td, policy=policy, on_unused="ignore")
    spec = TensorDict({"layer": {"wight": torch.zeros(3, 3)}}).attrs()
    with pytest.raises(SchemaMismatch, match=r"near: layer\.weight"):
        plan_moves(td, spec, on_unused="error")


def test_missing_entries():
    td = model()
    spec = td.select("embed", "layer", "step").attrs()
    plan_moves(td, spec)
    with pytest.raises(SchemaMismatch) as error:
        plan_moves(td, spec, on_missing="error")
    assert error.value.paths == [("head", "weight")]
    plan_moves(td, Spec(rules=(Rule("*", torch.float16),)), on_missing="error")
    plan_moves(td, torch.float16, on_missing="error")


def test_other_shapes():
    td = model()
    spec = model().attrs()
    td["step"] = torch.zeros(2)
    td["layer", "norm"] = torch.zeros(4)
    with pytest.raises(SchemaMismatch) as error:
        plan_moves(td, spec)
    assert error.value.paths == [("layer", "norm"), "step"]
    plan_moves(td, spec, on_shape="ignore")
    td.to(spec)


def test_values_that_are_not_there():
    td = model("meta")
    with pytest.raises(
        NotImplementedError, match=r"Cannot copy out of meta tensor; no data! 5 leaves"
    ):
        plan_moves(td, "cpu")
    plan = plan_moves(
        td,
        "cpu",
        materialize=lambda path, want: torch.full(want.tgt_shape, 2, dtype=want.tgt_dtype),
    )
    assert {move.kind for move in plan} == {MoveKind.FROM_META}
    out = plan.run(td)
    assert out.device == CPU and out["step"] == 2
    wrong = plan_moves(td, "cpu", materialize=lambda path, want: torch.zeros(7))
    with pytest.raises(PlanMismatch, match=r"expected shape \[4, 3\], got \[7\]"):
        wrong.run(td)


def test_another_sharding_is_refused():
    td = TensorDict({"a": torch.zeros(4)})
    spec = Spec({("a",): Target(layout=Layout.replicated([4], [0, 1]))})
    with pytest.raises(LayoutError, match="Use reshard"):
        td.to(spec)
    with pytest.raises(LayoutError, match="'a'"):
        plan_moves(td, spec)


def test_a_plan_that_does_not_fit_is_refused_before_anything_moves():
    with FakeDevices() as world:
        td = TensorDict({"a": torch.zeros(8 << 20)})
        plan = plan_moves(td, CUDA1)
        world.free_memory[CUDA1] = 20 << 20
        with pytest.raises(MemoryBudgetError, match=r"needs 32.0 MiB there.*12.0 MiB are missing"):
            plan.run(td)
        assert world.copies == []
        world.free_memory[CUDA1] = 40 << 20
        plan.run(td)
        assert len(world.copies) == 1


# --- texts, JSON, differences ---------------------------------------------------------


def test_tables_in_three_styles():
    plan = plan_moves(model(), policy=CastPolicy.mixed())
    text = plan.table()
    assert text.splitlines()[0].split() == [
        "kind",
        "move",
        "leaves",
        "before",
        "after",
        "can",
        "lose",
    ]
    assert "float32 -> bfloat16" in text and "rounding" in text
    assert plan.table("html").startswith("<table>") and "&gt;" in plan.table("html")
    assert plan._repr_html_() == plan.table("html")
    rich = pytest.importorskip("rich.console")
    console = rich.Console(width=120)
    with console.capture() as capture:
        console.print(plan.table("rich"))
    assert "float32 -> bfloat16" in capture.get()
    with pytest.raises(ValueError, match="expected 'text'"):
        plan.table("latex")


def test_explain_names_the_link_and_the_wait():
    with FakeDevices():
        td = TensorDict({"a": torch.zeros(3).to("cuda:1")})
        text = plan_moves(td, "cpu").explain("a")
        assert "12 B cross cuda:1 -> cpu" in text and "waits for the source once" in text
        text = plan_moves(td, "cpu", non_blocking=True).explain("a")
        assert "the caller waits" in text
        text = plan_moves(td, Spec(default=Target("cpu", torch.float64))).explain("a")
        assert "cast happens at the target" in text
    with pytest.raises(MissingKeyError, match=r"Near: embed\.weight"):
        plan_moves(model(), "cpu").explain(("embed", "wight"))


def test_json_hash_and_equality():
    for target in (
        "meta",
        torch.float16,
        Spec(rules=(Rule("*.norm", Target(dtype=torch.float64)),)),
    ):
        plan = plan_moves(model(), target)
        again = MovePlan.from_json(json.loads(json.dumps(plan.to_json())))
        assert again == plan and again.hash == plan.hash and again.diff(plan) == []
        assert again.table() == plan.table()
        if target != "meta":
            assert again.run(model())["step"].dtype is plan["step"].route.dtype
    assert plan_moves(model(), "meta").hash != plan_moves(model(), torch.float16).hash


def test_the_hash_does_not_depend_on_the_process():
    code = (
        "import torch\nfrom tensordict import TensorDict\n"
        "from tensordict.placement import plan_moves\n"
        "print(plan_moves(TensorDict({'b': torch.zeros(3), 'a': {'c': torch.zeros(2)}}), 'cuda:1').hash)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    td = TensorDict({"b": torch.zeros(3), "a": {"c": torch.zeros(2)}})
    assert done.stdout.strip() == plan_moves(td, "cuda:1").hash


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.update(format="x"),
        lambda data: data.update(version=9),
        lambda data: data.update(ties=[[0, 3]]),
        lambda data: data["routes"][0].update(memory_format="evil"),
    ],
)
def test_json_that_is_no_plan_is_refused(change):
    data = json.loads(json.dumps(plan_moves(model(), torch.float16).to_json()))
    change(data)
    with pytest.raises(FileFormatError):
        MovePlan.from_json(data)


def test_diff_names_every_leaf_that_differs():
    a = plan_moves(model(), torch.float16)
    td = model()
    del td["step"]
    td["new"] = torch.zeros(1)
    b = plan_moves(td, policy=CastPolicy({"*norm": torch.float64}, default=torch.float16))
    differing = dict(a.diff(b))
    assert set(differing) == {("layer", "norm"), "step", "new"}
    assert "no such leaf there" in differing["step"] and "no such leaf here" in differing["new"]


def test_the_inverse_brings_back_devices_dtypes_and_ties():
    with FakeDevices():
        td = model()
        plan = plan_moves(td, Spec(default=Target("cuda:1", torch.float64)))
        out = plan.run(td)
        back = plan.inverse().run(out)
        for key, x in td.items(True, True):
            assert back[key].device == x.device and back[key].dtype is x.dtype
            assert torch.equal(back[key], x)
        assert back["head", "weight"] is back["embed", "weight"]
        assert plan.inverse().inverse() == plan_without_target(plan)
    with pytest.raises(NotImplementedError, match="no data"):
        plan_moves(model(), "meta").inverse()


def plan_without_target(plan):
    data = plan.to_json()
    data["target_device"] = None
    return MovePlan.from_json(data)


# --- plans that are kept --------------------------------------------------------------


def test_the_plan_of_a_locked_tree_is_kept_until_an_entry_changes():
    td = model().lock_()
    spec, policy = Spec(default=Target(dtype=torch.float16)), CastPolicy.mixed()
    for target in (spec, torch.float16, "meta", model().to(torch.float16).attrs().lock_()):
        plan = plan_moves(td, target)
        assert plan_moves(td, target) is plan
        assert plan_moves(td, target, non_blocking=True) is not plan
        assert plan_moves(td, target, policy=policy, on_unused="ignore") is not plan
    kept = plan_moves(td, spec)
    td.unlock_()
    td["layer", "norm"] = torch.zeros(3, dtype=torch.int8)
    td.lock_()
    assert plan_moves(td, spec) is not kept
    with pytest.raises(PlanMismatch, match="norm"):
        kept.run(td)


def test_plans_of_what_may_change_are_not_kept():
    td = model()
    assert plan_moves(td, torch.float16) is not plan_moves(td, torch.float16)
    td.lock_()
    spec = td.attrs()
    assert plan_moves(td, spec) is not plan_moves(td, spec)


def test_a_leaf_whose_data_changed_is_found_when_a_kept_plan_runs():
    td = model().lock_()
    plan = plan_moves(td, torch.float16)
    td["layer", "norm"].data = torch.zeros(3, dtype=torch.float64)
    assert plan_moves(td, torch.float16) is plan
    with pytest.raises(PlanMismatch, match="norm"):
        plan.run(td)


# --- properties ----------------------------------------------------------------------

devices = st.sampled_from(["cpu", "meta", "cuda:0", "cuda:1"])
dtypes = st.sampled_from([torch.float16, torch.float32, torch.int64])
leaf = st.tuples(devices, dtypes, st.integers(0, 3))


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(st.sampled_from("abcdef"), leaf, max_size=6),
    st.dictionaries(st.sampled_from("abcdefgh"), leaf, max_size=6),
    st.sampled_from([None, True, False]),
)
def test_what_a_plan_says_is_what_it_does(source, wanted, non_blocking):
    with FakeDevices() as world:
        td = TensorDict(
            {key: torch.ones(n).to(dtype).to(device) for key, (device, dtype, n) in source.items()}
        )
        entries = {
            (key,): Target(device, dtype)
            for key, (device, dtype, _) in wanted.items()
            if key not in source or source[key][0] != "meta" or device == "meta"
        }
        plan = plan_moves(td, Spec(entries), non_blocking=non_blocking, on_unused="ignore")
        world.copies.clear()
        world.waits.clear()
        out = plan.run(td)
        real = [copy for copy in world.copies if copy.dst != META and copy.nbytes]
        assert sum(copy.nbytes for copy in real) == sum(plan.bytes_by_link.values())
        assert set(world.waits) == set(plan.sync_devices)
        assert len(world.waits) == len(plan.sync_devices)
        for key, x in td.items():
            target = entries.get((key,), Target())
            assert out[key].device == (target.device or x.device)
            assert out[key].dtype is (target.dtype or x.dtype)
            assert (out[key] is x) == (plan[key].kind is MoveKind.ALIAS)
            if out[key].device == CPU and non_blocking is not True:
                assert bool((out[key] == 1).all())


def test_trees_of_equal_names_and_leaves_but_another_nesting_are_told_apart():
    x = torch.zeros(2)
    one = TensorDict({"a": x, "b": {"x": torch.ones(2)}})
    other = TensorDict({"a": {"x": torch.zeros(2)}, "b": torch.ones(2)})
    plan = plan_moves(one, torch.float16)
    with pytest.raises(PlanMismatch, match="4 leaves differ"):
        plan.run(other)
    swapped = TensorDict({"b": {"x": torch.ones(2)}, "a": x})
    with pytest.raises(PlanMismatch, match="another order"):
        plan.run(swapped)
    param = TensorDict({"a": torch.nn.Parameter(torch.zeros(2)), "b": {"x": torch.ones(2)}})
    assert plan.run(param)["a"].dtype is torch.float16
    again = MovePlan.from_json(plan.to_json())
    assert again.run(one)["b", "x"].dtype is torch.float16
    with pytest.raises(PlanMismatch):
        again.run(other)


@pytest.mark.parametrize("cls", [MovePlan, Spec, CastPolicy])
@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.pop("rules", d.pop("leaves", None)),
        lambda d: d.update(rules=3, leaves=3),
        lambda d: d.update(rules=[["a"]], leaves=[["a"]]),
        lambda d: d.update(default={"device": "nowhere"}, routes=[{}]),
        lambda d: d.update(default=[1], leaves=[[["a"], [1], -1]]),
        lambda d: d.update(default={"dtype": "os.system"}, leaves=[[["a"], ["x"], 0]]),
        lambda d: d.update(default=3, leaves=[[["a"], [1], 99]]),
    ],
)
def test_malformed_json_is_one_error(cls, change):
    td = model()
    good = {
        MovePlan: plan_moves(td, torch.float16).to_json(),
        Spec: Spec(rules=(Rule("a", torch.int8),)).to_json(),
        CastPolicy: CastPolicy.mixed().to_json(),
    }[cls]
    data = json.loads(json.dumps(good))
    change(data)
    with pytest.raises(FileFormatError, match="Cannot read"):
        cls.from_json(data)
    for junk in ([], "x", None, 3):
        with pytest.raises(FileFormatError, match="Cannot read"):
            cls.from_json(junk)


def test_what_is_no_tensordict_is_refused_at_the_door():
    with pytest.raises(TypeError, match="Cannot plan moves of a dict"):
        plan_moves({"a": torch.ones(1)}, "meta")
    with pytest.raises(TypeError, match="Cannot run a plan on a list"):
        plan_moves(model(), "meta").run([1])
