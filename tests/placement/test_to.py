"""`to()` against the loop over `torch.Tensor.to`, and its identity rules."""

import itertools
import pickle
import subprocess
import sys
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from tensordict import TensorDict, lazy_stack, tensorclass
from tensordict.device.fake import FakeDevices
from tensordict.errors import LockedError
from tensordict.placement import Target, TensorAttrs, plan_moves, spec

CPU, META = torch.device("cpu"), torch.device("meta")


def tree(**kwargs):
    return TensorDict(
        {"a": torch.arange(3.0), "n": {"b": torch.ones(3, 2), "i": torch.arange(3)}, "s": "text"},
        batch_size=[3],
        **kwargs,
    )


def leaves(td):
    return dict(td.items(True, True))


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.float64, torch.int32, torch.bool, torch.complex64]
)
def test_a_dtype_casts_every_leaf_as_torch_does(dtype):
    td = tree()
    out = td.to(dtype)
    assert out is not td and out.device is None and out.batch_size == (3,)
    for key, x in leaves(td).items():
        expected = x.to(dtype)
        assert out[key].dtype is dtype and torch.equal(out[key], expected)
    assert out["s"] == "text"


def test_a_leaf_with_nothing_to_do_is_the_same_object():
    td = tree()
    out = td.to(torch.float32)
    assert out is not td
    assert out["a"] is td["a"] and out["n", "b"] is td["n", "b"]
    assert out["n", "i"] is not td["n", "i"]
    placed = td.to("cpu")
    assert placed is not td and placed.device == CPU and placed["n"].device == CPU
    assert all(placed[key] is x for key, x in leaves(td).items())


def test_what_returns_the_same_tensordict():
    td = tree(device="cpu")
    for call in [
        td.to(),
        td.to(None),
        td.to("cpu"),
        td.to(torch.device("cpu", 0)),
        td.to(device="cpu"),
        td.cpu(),
        td.to("cpu", non_blocking=True),
        td.to(other=TensorDict()),
    ]:
        assert call is td
    assert td.to(batch_size=[]) is td and td.batch_size == ()


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        (("meta", torch.float16), {}),
        ((), {"device": "meta", "dtype": torch.float16}),
        (("meta",), {"dtype": torch.float16}),
        ((torch.device("meta"), torch.float16, True), {}),
        ((torch.zeros(1, device="meta", dtype=torch.float16),), {}),
        (
            (),
            {
                "other": TensorDict(
                    {"x": torch.zeros(1, device="meta", dtype=torch.float16)}, device="meta"
                )
            },
        ),
        (
            (TensorDict({"x": torch.zeros(1, device="meta", dtype=torch.float16)}, device="meta"),),
            {},
        ),
    ],
)
def test_forms_with_device_and_dtype(args, kwargs):
    out = tree().to(*args, **kwargs)
    assert out.device == META
    assert all(x.device == META and x.dtype is torch.float16 for x in leaves(out).values())


def test_other_without_a_device_casts_alone():
    out = tree().to(other=TensorDict({"x": torch.zeros(1, dtype=torch.float64)}))
    assert out.device is None and out["n", "i"].dtype is torch.float64
    mixed = TensorDict({"x": torch.zeros(1), "y": torch.zeros(1, dtype=torch.int8)})
    td = tree()
    assert td.to(other=mixed) is td


def test_a_number_is_read_as_a_tensor():
    out = tree().to(3.5)
    assert out.device == CPU and out["a"].dtype is torch.float64


@pytest.mark.parametrize(
    ("args", "kwargs", "error"),
    [
        (({},), {}, TypeError),
        (([1],), {}, TypeError),
        ((), {"other": 3}, TypeError),
        (("nowhere",), {}, RuntimeError),
        (("cpu", "cpu"), {}, TypeError),
        ((torch.float16, torch.float32), {}, TypeError),
        ((), {"unknown": 1}, TypeError),
        ((), {"copy": True}, RuntimeError),
        (("cpu",), {"non_blocking_pin": True}, RuntimeError),
    ],
)
def test_what_torch_does_not_take_is_refused(args, kwargs, error):
    td = tree()
    with pytest.raises(error):
        td.to(*args, **kwargs)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is there")
def test_cuda_that_is_missing_raises_what_torch_raises():
    # In a process of its own: fake devices tell torch that CUDA was initialised.
    code = """
import torch
from tensordict import TensorDict, lazy_stack, tensorclass
for call in (lambda x: x.to("cuda"), lambda x: x.cuda(), lambda x: x.to("cuda:0")):
    for x in (torch.ones(2), TensorDict({"a": torch.ones(2)})):
        try:
            call(x)
        except Exception as error:
            print(type(error).__name__, error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == 6 and lines[0::2] == lines[1::2]


def test_a_memory_format_applies_to_the_leaves_that_can_have_it():
    td = TensorDict({"image": torch.zeros(2, 3, 4, 4), "x": torch.zeros(2)}, batch_size=[2])
    out = td.to(memory_format=torch.channels_last)
    assert out["image"].is_contiguous(memory_format=torch.channels_last)
    assert out["x"] is td["x"]
    assert out.to(memory_format=torch.channels_last)["image"] is out["image"]


def test_inplace_writes_into_the_same_tensordict():
    td = tree()
    nested = td["n"]
    assert td.to("meta", torch.float16, inplace=True) is td
    assert td.device == META and td["n"] is nested and nested.device == META
    assert td["n", "b"].dtype is torch.float16 and td["s"] == "text"
    with pytest.raises(LockedError):
        td.lock_().to(torch.float32, inplace=True)
    assert td["a"].dtype is torch.float16


@pytest.mark.parametrize(
    "move",
    [
        lambda td: td.to(torch.float16),
        lambda td: td.to("meta"),
        lambda td: td.half(),
        lambda td: td.to(td.attrs()),
    ],
)
def test_a_locked_source_gives_a_locked_result(move):
    td = tree().lock_()
    out = move(td)
    assert out is not td and out.is_locked and out["n"].is_locked
    assert not move(tree()).is_locked


def test_names_and_batch_sizes_are_kept():
    td = tree(names=["t"])
    for out in (td.to(torch.float64), td.to("meta"), td.to(td.attrs())):
        assert out.names == ["t"] and out.batch_size == (3,) and out["n"].batch_size == (3,)


def test_non_tensor_values_say_the_device_of_their_tensordict():
    td = TensorDict({"a": torch.ones(2), "s": "x", "n": {"t": "y"}}, batch_size=[2])
    assert td.to("meta").get("s").device == META and td.to("cpu")["n"].get("t").device == CPU
    here = td.to("cpu")
    assert here.to(here.attrs()).get("s").device is None
    assert here.to("meta", inplace=True).get("s").device == META and here["s"] == "x"
    assert td.get("s").device is None
    assert td.lock_().to("cpu").is_locked


DTYPE_METHODS = {
    "bfloat16": torch.bfloat16, "bool": torch.bool, "byte": torch.uint8, "cdouble": torch.complex128,
    "cfloat": torch.complex64, "chalf": torch.complex32, "char": torch.int8, "complex32": torch.complex32,
    "complex64": torch.complex64, "complex128": torch.complex128, "double": torch.float64,
    "float": torch.float32, "float16": torch.float16, "float32": torch.float32, "float64": torch.float64,
    "half": torch.float16, "int": torch.int32, "int8": torch.int8, "int16": torch.int16,
    "int32": torch.int32, "int64": torch.int64, "long": torch.int64, "short": torch.int16,
    "uint8": torch.uint8, "uint16": torch.uint16, "uint32": torch.uint32, "uint64": torch.uint64,
}  # fmt: skip


@pytest.mark.parametrize(("name", "dtype"), DTYPE_METHODS.items())
def test_dtype_methods(name, dtype):
    td = tree()
    out = getattr(td, name)()
    assert all(x.dtype is dtype for x in leaves(out).values())
    some = getattr(td, name)(cast_filter=lambda path, x: path == ("n", "b"))
    assert some["n", "b"].dtype is dtype
    assert some["a"] is td["a"] and some["n", "i"] is td["n", "i"] and some.device is None


def test_casts_and_moves_stay_differentiable():
    w = torch.ones(3, requires_grad=True)
    td = TensorDict({"w": w})
    (td.to(torch.float64)["w"] * 2).sum().backward()
    assert w.grad.tolist() == [2, 2, 2]
    (td.to("cpu", torch.float16)["w"]).sum().backward()
    assert w.grad.tolist() == [3, 3, 3]


# --- ties ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "move",
    [
        lambda td: td.to(torch.bfloat16),
        lambda td: td.to("cpu", torch.bfloat16),
        lambda td: td.to(
            TensorDict(
                {
                    "a": torch.zeros(1, dtype=torch.bfloat16),
                    "b": torch.zeros(1, dtype=torch.bfloat16),
                }
            ).attrs()
        ),
    ],
)
def test_tied_leaves_are_moved_once_and_stay_tied(move):
    w = torch.randn(4, 3)
    td = TensorDict({"a": w, "b": w.detach(), "c": w[:2]})
    out = move(td)
    assert out["a"].data_ptr() == out["b"].data_ptr()
    assert torch.equal(out["a"], w.bfloat16())
    out["a"][0, 0] = 99
    assert out["b"][0, 0] == 99


def test_overlapping_views_are_no_ties():
    w = torch.arange(6.0)
    td = TensorDict({"a": w[:4], "b": w[2:], "t": w.view(2, 3), "u": w.view(3, 2)})
    out = td.to(torch.float64)
    pointers = {x.untyped_storage().data_ptr() for x in leaves(out).values()}
    assert len(pointers) == 4
    for key, x in leaves(td).items():
        assert torch.equal(out[key], x.double())


def test_the_same_object_stays_the_same_object():
    w = torch.ones(2, requires_grad=True)
    td = TensorDict({"a": w, "b": w, "c": w.detach().requires_grad_()})
    out = td.to(torch.float64)
    assert out["a"] is out["b"]
    assert out["c"] is not out["a"]
    out["c"].sum().backward()
    assert w.grad is None and td["c"].grad is not None


def test_empty_leaves_are_no_ties():
    td = TensorDict({"a": torch.zeros(0), "b": torch.zeros(0)})
    out = td.to(torch.float64)
    assert out["a"] is not out["b"]


# --- specs ------------------------------------------------------------------------


def test_a_spec_moves_each_leaf_and_leaves_the_rest():
    td = tree(device="cpu", names=["t"])
    spec = TensorDict(
        {
            "a": torch.zeros(7, dtype=torch.float16, device="meta"),
            "n": {"i": torch.zeros(1)},
            "more": torch.zeros(1),
        }
    ).attrs()
    out = td.to(spec)
    assert out.device is None and out["n"].device is None and out.names == ["t"]
    assert out["a"].device == META and out["a"].dtype is torch.float16 and out["a"].shape == (3,)
    assert out["n", "i"].dtype is torch.float32
    assert out["n", "b"] is td["n", "b"]
    assert "more" not in out.keys()


def test_a_spec_of_dtypes_keeps_devices():
    spec = tree(device="meta").to(torch.float16).attrs(fields=("dtype",))
    out = tree().to(spec)
    assert all(x.device == CPU and x.dtype is torch.float16 for x in leaves(out).values())


def test_a_spec_that_matches_returns_the_same_leaves():
    td = tree()
    out = td.to(td.attrs())
    assert out is not td
    assert all(out[key] is x for key, x in leaves(td).items())


def test_a_spec_excludes_other_targets():
    td = tree()
    with pytest.raises(TypeError, match=r"does not accept torch\.float16"):
        td.to(td.attrs(), torch.float16)
    with pytest.raises(NotImplementedError, match="non_blocking_pin"):
        td.to(td.attrs(), non_blocking_pin=True)


def test_a_spec_in_place():
    td = tree()
    spec = TensorDict({"a": torch.zeros(1, dtype=torch.int8)}).attrs()
    b = td["n", "b"]
    assert td.to(spec, inplace=True) is td
    assert td["a"].dtype is torch.int8 and td["n", "b"] is b


keys = st.sampled_from("abc")
dtypes = st.sampled_from([torch.float16, torch.float32, torch.int8, torch.float64])


@st.composite
def trees(draw, depth=2):
    out = {}
    for key in draw(st.sets(keys, max_size=3)):
        if depth and draw(st.booleans()):
            out[key] = draw(trees(depth - 1))
        else:
            out[key] = torch.arange(3).to(draw(dtypes))
    return out


@settings(max_examples=60, deadline=None)
@given(trees(), trees())
def test_any_spec_on_any_tree_equals_the_slow_loop(source, like):
    td, spec_td = TensorDict(source), TensorDict(like)
    out = td.to(spec_td.attrs())
    wanted = leaves(spec_td)
    assert set(leaves(out)) == set(leaves(td))
    for key, x in leaves(td).items():
        expected = x.to(wanted[key].dtype) if key in wanted else x
        assert out[key].dtype is expected.dtype and torch.equal(out[key], expected)
        if expected.dtype is x.dtype:
            assert out[key] is x


# --- attrs ------------------------------------------------------------------------


def test_attrs_records_what_was_asked_for():
    td = tree(device="cpu", names=["t"])
    spec = td.attrs()
    assert type(spec) is TensorDict
    assert spec.batch_size == () and spec.device is None and not spec.is_locked
    assert spec["n"].batch_size == () and spec["n"].device is None
    assert spec["n", "b"] == TensorAttrs("cpu", torch.float32, [3, 2])
    assert list(spec.keys()) == ["a", "n", "s"] and spec["s"] == "text"
    only = td.attrs(fields=("dtype", "nonsense"))
    assert only["a"] == TensorAttrs(tgt_dtype=torch.float32)
    assert only["a"].tgt_shape is None and only["a"].tgt_device is None


def test_equal_leaves_share_one_record():
    td = TensorDict({f"k{i}": torch.zeros(3) for i in range(5)})
    assert len({id(x) for x in td.attrs().values()}) == 1


def test_records_do_not_change_and_pickle():
    import pickle

    record = TensorAttrs("cuda:1", torch.bfloat16, [2, 3])
    with pytest.raises(AttributeError, match="shared"):
        record.tgt_dtype = torch.float32
    assert pickle.loads(pickle.dumps(record)) == record
    assert hash(pickle.loads(pickle.dumps(record))) == hash(record)
    assert record != TensorAttrs("cuda:1", torch.bfloat16, [2, 4]) and record != 3


def test_shape_operations_on_attrs_raise():
    spec = TensorDict({"a": torch.zeros(2)}).attrs()
    with pytest.raises(TypeError, match="describe whole leaves"):
        spec.unsqueeze(0) if hasattr(spec, "unsqueeze") else spec[None]


# --- with blocks ------------------------------------------------------------------


def test_a_block_writes_back_into_the_same_memory():
    td = TensorDict({"x": torch.zeros(3), "y": torch.ones(3)}, batch_size=[3], device="cpu")
    x, y = td["x"], td["y"]
    with td.to(torch.float64) as wide:
        wide["x"] += 1
        wide["z"] = wide["x"] * 2
        wide["y"] = torch.full((3,), 7.0, dtype=torch.float64)
    assert td["x"] is x and x.tolist() == [1, 1, 1] and x.dtype is torch.float32
    assert td["y"] is y and y.tolist() == [7, 7, 7]
    assert td["z"].dtype is torch.float64 and td["z"].tolist() == [2, 2, 2]


def test_a_leaf_that_the_block_did_not_touch_loses_nothing():
    td = TensorDict({"x": torch.tensor([1.0001, 1e-20]), "y": torch.zeros(2)})
    before = td["x"].clone()
    with td.to(torch.float16) as low:
        low["y"].add_(1)
    assert torch.equal(td["x"], before) and td["y"].tolist() == [1, 1]


def test_new_entries_go_to_the_device_of_the_original():
    with FakeDevices():
        td = TensorDict({"x": torch.zeros(3)}, batch_size=[3], device="cpu")
        with td.to("cuda:0") as moved:
            assert moved.device == torch.device("cuda:0")
            moved["x"] = moved["x"] + 1
            moved["n", "y"] = moved["x"] * 2
        assert td["x"].tolist() == [1, 1, 1] and td["x"].device == CPU
        assert td["n", "y"].tolist() == [2, 2, 2] and td["n", "y"].device == CPU


def test_an_exception_writes_nothing():
    td = TensorDict({"x": torch.zeros(3)})
    with pytest.raises(ValueError, match="stop"), td.to(torch.float64) as wide:
        wide["x"] += 1
        wide["y"] = wide["x"]
        raise ValueError("stop")
    assert td["x"].tolist() == [0, 0, 0] and "y" not in td.keys()


def test_removed_entries_stay_and_other_shapes_replace():
    td = TensorDict({"x": torch.zeros(3), "y": torch.zeros(3)})
    with td.to(torch.float64) as wide:
        del wide["x"]
        wide["y"] = torch.ones(2, dtype=torch.float64)
        wide["s"] = "new"
    assert td["x"].tolist() == [0, 0, 0]
    assert td["y"].tolist() == [1, 1] and td["y"].dtype is torch.float32
    assert td["s"] == "new"


def test_a_locked_original_is_written_in_place_or_not_at_all():
    td = TensorDict({"x": torch.zeros(3), "y": torch.zeros(3)}).lock_()
    with td.to(torch.float64) as wide:
        wide["x"].add_(1)
    assert td["x"].tolist() == [1, 1, 1] and td.is_locked
    with pytest.raises(LockedError), td.to(torch.float64) as wide:
        wide["x"].add_(1)
        wide.unlock_()
        wide["z"] = torch.ones(3)
    assert td["x"].tolist() == [1, 1, 1], "nothing may be written when something cannot"


def test_a_leaf_that_requires_grad_is_replaced():
    w = torch.ones(2, requires_grad=True)
    td = TensorDict({"w": w})
    with td.to(torch.float64) as wide:
        wide["w"] = wide["w"] * 3
    assert td["w"] is not w and td["w"].dtype is torch.float32
    td["w"].sum().backward()
    assert w.grad.tolist() == [3, 3]


def test_a_leaf_that_is_the_same_object_needs_no_write():
    w = torch.ones(2, requires_grad=True)
    td = TensorDict({"w": w, "x": torch.zeros(2, dtype=torch.float64)}).lock_()
    with td.to(torch.float32) as low:
        assert low["w"] is w
        with torch.no_grad():
            low["w"].add_(1)
        low["x"].add_(1)
    assert td["w"] is w and w.tolist() == [2, 2] and td["x"].tolist() == [1, 1]


def test_a_block_on_the_same_tensordict_works_on_it():
    td = TensorDict({"x": torch.zeros(2)}, device="cpu")
    with td.to("cpu") as same:
        assert same is td
        same["x"] += 1
    assert td["x"].tolist() == [1, 1]


def test_blocks_within_blocks_keep_their_own_way_back():
    td = TensorDict({"x": torch.zeros(2)}, device="cpu")
    with td.to(torch.float64) as wide:
        with wide.lock_():
            wide["x"].add_(1)
        with wide.to("cpu") as same:
            assert same is wide
            same["y"] = torch.ones(2)
        assert "y" not in td.keys()
        wide.unlock_()
        wide["x"].add_(1)
    assert td["x"].tolist() == [2, 2] and td["y"].tolist() == [1, 1]


def test_the_original_is_not_kept_alive():
    import gc
    import weakref

    td = tree()
    ref = weakref.ref(td)
    td = td.to(torch.float16)
    gc.collect()
    assert ref() is None


# --- compile ------------------------------------------------------------------------


@pytest.mark.parametrize("grad", [False, True])
def test_casts_trace_as_one_graph(grad):
    def step(td):
        return td.to(torch.float64)["n", "b"] * 2

    td = tree()
    if grad:
        td["n", "b"].requires_grad_()
    compiled = torch.compile(step, fullgraph=True, backend="eager")
    assert torch.equal(compiled(td), step(td))


def test_a_spec_traces_as_one_graph():
    spec = TensorDict({"n": {"b": torch.zeros(1, dtype=torch.float64)}}).attrs()
    td = tree()
    compiled = torch.compile(lambda t: t.to(spec)["n", "b"] * 2, fullgraph=True, backend="eager")
    assert torch.equal(compiled(td), td["n", "b"].double() * 2)


@pytest.mark.parametrize(
    "step",
    [
        lambda t: t.to(spec(rules={"*b": torch.float64}, default="cpu"))["n", "b"] * 2,
        lambda t: t.to(t.double().attrs())["n", "b"] * 2,
        lambda t: t.to("cpu", torch.float64, non_blocking=True)["n", "b"] * 2,
        lambda t: t.lock_().double()["n", "b"] * 2,
    ],
)
def test_other_forms_trace_as_one_graph(step):
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "Guards may run slower on Python 3.13.0")
        out = torch.compile(step, fullgraph=True, backend="eager")(tree())
    assert torch.equal(out, torch.full((3, 2), 2.0, dtype=torch.float64))


def test_a_device_traces_as_one_graph():
    compiled = torch.compile(lambda t: t.to("cpu")["a"] * 2, fullgraph=True, backend="eager")
    assert torch.equal(compiled(tree()), torch.arange(3.0) * 2)


def test_every_pair_of_host_targets_equals_the_loop():
    for device, dtype in itertools.product([None, "cpu", "meta"], [None, torch.float16]):
        td = tree()
        out = td.to(device=device, dtype=dtype)
        for key, x in leaves(td).items():
            expected = x.to(device=x.device if device is None else device, dtype=dtype or x.dtype)
            assert (out[key].device, out[key].dtype) == (expected.device, expected.dtype)


# --- stacks and typed views ---------------------------------------------------------------


def ragged():
    return lazy_stack(
        [TensorDict({"a": torch.ones(n), "n": {"b": torch.zeros(2)}}) for n in (2, 3)]
    )


def test_lazy_stacks_move_by_their_members():
    out = ragged().to(torch.float16)
    assert [m["a"].dtype for m in out.unbind(0)] == [torch.float16] * 2
    assert ragged().to("meta").device == META
    td = ragged()
    assert td.to(torch.float64, inplace=True) is td
    assert [m["n", "b"].dtype for m in td.unbind(0)] == [torch.float64] * 2
    dense = TensorDict({"n": {"b": torch.zeros(1, dtype=torch.int8)}}).attrs(fields=("dtype",))
    out = td.to(dense)
    assert [m["n", "b"].dtype for m in out.unbind(0)] == [torch.int8] * 2
    assert out.unbind(0)[0]["a"] is td.unbind(0)[0]["a"]


def test_attrs_of_a_lazy_stack_read_as_records_of_the_stack():
    spec = ragged().attrs()
    assert spec["n", "b"] == TensorAttrs("cpu", torch.float32, [2, 2])
    assert spec["a"] == TensorAttrs("cpu", torch.float32)
    assert "TensorAttrs" in repr(spec)


def test_a_block_on_a_lazy_stack_writes_back_into_its_members():
    td = ragged()
    members = td.unbind(0)
    a = members[1]["a"]
    with td.to(torch.float64) as wide:
        wide.unbind(0)[1]["a"].add_(1)
        wide.unbind(0)[0]["new"] = torch.ones(1)
    assert members[1]["a"] is a and a.tolist() == [2, 2, 2] and a.dtype is torch.float32
    assert members[0]["a"].tolist() == [1, 1]
    assert td.unbind(0)[0]["new"].tolist() == [1]


@tensorclass
class Sample:
    x: torch.Tensor
    tag: str


def test_typed_views_keep_their_class_and_are_written_in_place():
    sample = Sample(x=torch.ones(3), tag="t", batch_size=[3])
    low = sample.to(torch.float16)
    assert type(low) is Sample and low.x.dtype is torch.float16 and low.tag == "t"
    assert type(sample.to("meta")) is Sample and sample.to("meta").device == META
    td = TensorDict({"s": sample, "y": torch.zeros(3)}, batch_size=[3])
    assert td.to(torch.float64, inplace=True) is td
    assert type(td["s"]) is Sample and td["s"].x.dtype is torch.float64
    with td.to(torch.float32) as moved:
        moved["s"].x.add_(1)
    assert td["s"].x.tolist() == [2, 2, 2] and td["s"].x.dtype is torch.float64
    assert td.to(td.to(torch.int8).attrs())["s"].x.dtype is torch.int8


# --- one buffer ----------------------------------------------------------------------------


def test_a_consolidated_tree_moves_as_one_buffer():
    with FakeDevices() as world:
        td = tree().consolidate()
        out = td.to("cuda:0")
        assert len(world.copies) == 1 and world.waits == []
        assert out.is_consolidated() and out.is_locked and out.device == torch.device("cuda:0")
        world.copies.clear()
        back = out.to("cpu")
        assert len(world.copies) == 1 and world.waits == [torch.device("cuda:0")]
        assert back.is_consolidated() and back["n"].device == CPU
        for key, x in leaves(td).items():
            assert torch.equal(back[key], x)


def test_casts_keep_a_tree_consolidated():
    td = tree().consolidate()
    for out in (td.to(torch.float16), td.half(), td.to("cpu", torch.float16)):
        assert out.is_consolidated() and out["a"].dtype is torch.float16
        assert len({x.untyped_storage().data_ptr() for x in leaves(out).values()}) == 1
        assert torch.equal(out["n", "b"], td["n", "b"].half())
    low = td.to(torch.float16)
    same = low.to(torch.float16)
    assert same.is_consolidated() and same["a"] is low["a"]
    mixed = td.to(TensorDict({"a": torch.zeros(1, dtype=torch.int8)}).attrs())
    assert not mixed.is_consolidated() and mixed["n", "b"] is td["n", "b"]


def test_a_cast_of_a_consolidated_tree_copies_each_leaf_once():
    td = tree().consolidate()
    with CountCopies() as seen:
        out = td.to(torch.float16)
    assert out.is_consolidated() and seen.nbytes == sum(x.nbytes for x in leaves(out).values())
    for key, x in leaves(td).items():
        assert torch.equal(out[key], x.half())
    back = pickle.loads(pickle.dumps(out))
    assert back.is_consolidated() and torch.equal(back["n", "b"], out["n", "b"])


def test_casts_of_consolidated_ties_gradients_and_jagged_leaves():
    w = torch.randn(3)
    tied = TensorDict({"a": w, "b": w, "c": torch.ones(2)}).consolidate()
    both = tied.half()
    assert both["a"].data_ptr() == both["b"].data_ptr() and both["c"].tolist() == [1, 1]
    one = tied.half(cast_filter=lambda path, x: path != ("b",))
    assert torch.equal(one["b"], w) and torch.equal(one["a"], w.half()) and one.is_consolidated()
    assert one["c"].dtype is torch.float16

    td = TensorDict({"w": torch.ones(3)}).consolidate()
    td["w"].requires_grad_()
    (td.to(torch.float64)["w"] * 2).sum().backward()
    assert td["w"].grad.tolist() == [2, 2, 2]

    rows = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    low = TensorDict({"r": rows}, batch_size=[2]).consolidate().to(torch.float16)
    assert low.is_consolidated() and low["r"].dtype is torch.float16
    with pytest.raises(RuntimeError):
        td.detach().consolidate().to(torch.quint4x2)


def test_a_consolidated_tree_is_cast_where_fewer_bytes_move():
    td = TensorDict({"a": torch.ones(64), "b": torch.ones(64)}, device="cpu").consolidate()
    with FakeDevices() as world:
        low = td.to("cuda:0", torch.float16)
        assert [copy.nbytes for copy in world.copies] == [2 * 64 * 2]
        assert low.is_consolidated() and low["b"].dtype is torch.float16
        world.copies.clear()
        back = low.to("cpu", torch.float32)
        assert [copy.nbytes for copy in world.copies] == [2 * 64 * 2]
        assert back.is_consolidated() and back["b"].tolist() == [1] * 64


class CountCopies(TorchDispatchMode):
    """Counts the bytes that copies write."""

    nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if "copy_" in func.name():
            written = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
            self.nbytes += sum(x.nbytes for x in written)
        elif "_to_copy" in func.name() or "clone" in func.name():
            self.nbytes += out.nbytes
        return out


# --- tensors without plain memory ------------------------------------------------------------


def test_casts_within_transforms():
    td = TensorDict({"a": torch.ones(3, 2), "b": torch.ones(3)}, batch_size=[3])
    out = torch.vmap(lambda t: t.to(torch.float64))(td)
    assert out["a"].dtype is torch.float64 and out["a"].shape == (3, 2)

    def loss(x):
        return TensorDict({"a": x, "b": x * 2}).to(torch.float64)["b"].sum()

    assert torch.func.grad(loss)(torch.ones(3)).tolist() == [2, 2, 2]
    assert torch.vmap(torch.func.grad(loss))(torch.ones(2, 3)).tolist() == [[2, 2, 2]] * 2


@pytest.mark.parametrize("device", ["cuda:0", "cuda", "xpu:0", "mps:0", "cpu", "meta"])
def test_fake_tensors_move(device):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with FakeTensorMode():
            td = TensorDict({"a": torch.ones(3), "b": torch.ones(3, device="cuda:1")})
            out = td.to(device)
            wanted = (
                torch.device(device)
                if ":" in device or device in ("cpu", "meta")
                else torch.device("cuda:0")
            )
            assert out["a"].device == out["b"].device == out.device == wanted
            assert td.to(torch.float16)["b"].dtype is torch.float16


def test_sparse_jagged_and_inference_leaves():
    jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    td = TensorDict({"s": torch.eye(3).to_sparse(), "j": jagged, "t": torch.eye(3).to_sparse()})
    out = td.to(torch.float64)
    assert out["s"].is_sparse and torch.equal(out["s"].to_dense(), torch.eye(3).double())
    assert out["j"].dtype is torch.float64 and out["j"].is_nested
    with torch.inference_mode():
        td = TensorDict({"a": torch.ones(2)})
        with td.to(torch.float64) as wide:
            wide["a"].add_(1)
        assert td["a"].tolist() == [2, 2]


def test_patterns_and_keys_reach_the_members_of_a_stack():
    td = TensorDict({"s": ragged(), "x": torch.zeros(2)})
    for target in (
        spec(rules={"s.a": torch.float64}),
        spec({("s", "a"): Target(dtype=torch.float64)}),
    ):
        out = td.to(target)
        assert [m["a"].dtype for m in out["s"].unbind(0)] == [torch.float64] * 2
        assert out["x"] is td["x"] and out["s"].unbind(0)[0]["n", "b"].dtype is torch.float32
        assert plan_moves(td, target, on_unused="error").n_copies == 2


def test_type_casts_as_the_named_methods_do():
    td = TensorDict({"a": torch.zeros(3), "n": {"b": torch.zeros(3, dtype=torch.int64)}}, [3])
    out = td.type(torch.float16, cast_filter=lambda key, x: x.is_floating_point())
    assert out["a"].dtype is torch.float16 and out["n", "b"] is td["n", "b"]
    with pytest.raises(TypeError, match=r"expected a torch\.dtype"):
        td.type("half")
