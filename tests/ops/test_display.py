"""Printed forms, against texts written down."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest
import torch

from tensordict import (
    MetaData,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictParams,
    get_printoptions,
    lazy_stack,
    set_printoptions,
    tensorclass,
)

FULL = """\
TensorDict(
    fields={
        a: Tensor(shape=torch.Size([]), device=cpu, dtype=torch.int64, is_shared=False),
        b: Tensor(shape=torch.Size([3, 2]), device=cpu, dtype=torch.float32, is_shared=False),
        n: TensorDict(
            fields={
                x: Tensor(shape=torch.Size([3]), device=cpu, dtype=torch.float32, is_shared=False)},
            batch_size=torch.Size([]),
            device=None,
            is_shared=False),
        s: NonTensorData(data=hello, batch_size=torch.Size([]), device=None)},
    batch_size=torch.Size([]),
    device=None,
    is_shared=False)"""

EMPTY = """\
TensorDict(
    fields={
    },
    batch_size=torch.Size([]),
    device=None,
    is_shared=False)"""

LAZY = """\
LazyStackedTensorDict(
    fields={
        a: Tensor(shape=torch.Size([2, 2]), device=cpu, dtype=torch.float32, is_shared=False)},
    exclusive_fields={
        1 ->
            b: Tensor(shape=torch.Size([]), device=cpu, dtype=torch.int64, is_shared=False)},
    batch_size=torch.Size([2]),
    device=None,
    is_shared=False,
    stack_dim=0)"""

CLASS = """\
TensorDict(
    fields={
        o: Sample(
            s=NonTensorData(data=d, batch_size=torch.Size([2]), device=None),
            x=Tensor(shape=torch.Size([2]), device=cpu, dtype=torch.float32, is_shared=False),
            n=None,
            batch_size=torch.Size([2]),
            device=None,
            is_shared=False)},
    batch_size=torch.Size([]),
    device=None,
    is_shared=False)"""


@tensorclass
class Sample:
    x: torch.Tensor
    s: str
    n: torch.Tensor = None


def tree():
    return TensorDict(s="hello", n={"x": torch.ones(3)}, b=torch.zeros(3, 2), a=0)


def rows():
    return TensorDict(
        {
            "b": torch.zeros(3, 2),
            "a": torch.zeros(3, requires_grad=True),
            "n": {"x": torch.ones(3, 4)[:, ::2]},
            "s": "hello",
            "l": ["x", "y", "z"],
        },
        [3],
        names=["t"],
    )


def test_the_full_form():
    assert repr(tree()) == str(tree()) == FULL
    assert repr(TensorDict()) == EMPTY
    assert "device=meta," in repr(TensorDict(device="meta"))
    locked = TensorDict(lock=True)
    assert repr(locked) == EMPTY, "the lock is not shown"


def test_kinds_of_leaves():
    nested = torch.nested.as_nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged)
    td = TensorDict(p=torch.nn.Parameter(torch.zeros(2)), j=nested, m=torch.zeros(2, device="meta"))
    text = repr(td)
    assert "p: Parameter(shape=torch.Size([2]), device=cpu" in text
    assert "j: Tensor(shape=torch.Size([2, -1]), device=cpu" in text
    assert (
        "m: Tensor(shape=torch.Size([2]), device=meta, dtype=torch.float32, is_shared=False)"
        in text
    )
    shared = TensorDict(a=torch.zeros(2)).share_memory_()
    assert repr(shared).count("is_shared=True") == 2


def test_non_tensor_entries():
    td = TensorDict({"l": ["a", "b"]}, [2])
    assert (
        "        l: NonTensorStack(\n            ['a', 'b'],\n"
        "            batch_size=torch.Size([2]),\n            device=None)}," in repr(td)
    )
    assert (
        repr(NonTensorData("a", batch_size=[2]))
        == "NonTensorData(data=a, batch_size=torch.Size([2]), device=None)"
    )
    assert repr(MetaData("x")) == "MetaData(data=x, batch_size=torch.Size([]), device=None)"
    assert repr(NonTensorStack("a", "b")).startswith("NonTensorStack(\n    ['a', 'b'],\n")


def test_stacks_and_classes():
    lazy = lazy_stack([TensorDict(a=torch.zeros(2)), TensorDict(a=torch.zeros(2), b=1)])
    assert repr(lazy) == LAZY
    ragged = lazy_stack([TensorDict(a=torch.zeros(2)), TensorDict(a=torch.zeros(3))])
    assert "a: Tensor(shape=torch.Size([2, -1])" in repr(ragged)
    assert "    exclusive_fields={\n    },\n" in repr(ragged)
    sample = Sample(x=torch.zeros(2), s="d", batch_size=[2])
    assert repr(TensorDict(o=sample)) == CLASS


@pytest.mark.parametrize(
    ("option", "value", "gone", "there"),
    [
        ("show_batch_size", False, "    batch_size=torch.Size([3]),\n    device", None),
        ("show_device", False, "device=None,\n    is_shared", None),
        ("show_is_shared", False, "    is_shared=False)", None),
        ("show_shape", False, "a: Tensor(shape", "a: Tensor(device=cpu"),
        ("show_field_device", False, "device=cpu", "a: Tensor(shape=torch.Size([3]), dtype"),
        ("show_dtype", False, "dtype", "device=cpu, is_shared=False)"),
        ("show_field_is_shared", False, "dtype=torch.float32, is_shared", None),
        ("show_grad", True, None, "is_shared=False, requires_grad=True)"),
        ("show_is_contiguous", True, None, "is_contiguous=False)}"),
        ("show_is_view", True, None, "is_view=True)}"),
        ("show_storage_size", True, None, "storage_size=48)}"),
        ("plain", True, None, "mean=1, std=0)}"),
        ("sort_keys", None, "fields={\n        a:", "fields={\n        b:"),
    ],
)
def test_each_option_of_the_full_form(option, value, gone, there):
    before = repr(rows())
    with set_printoptions(**{option: value}):
        text = repr(rows())
    assert repr(rows()) == before != text
    if gone is not None:
        assert gone in before and gone not in text
    if there is not None:
        assert there in text and there not in before


def test_setting_options():
    before = get_printoptions()
    assert before["compact"] is False and before["sort_keys"] == "alphabetical"

    @set_printoptions(compact=True)
    def compact():
        return repr(TensorDict(a=0))

    assert compact() == "TensorDict(batch_size=[], fields={a: i64[]})"
    set_printoptions(compact=True).set()
    assert repr(TensorDict(a=0)) == compact()
    set_printoptions(compact=False).set()
    with set_printoptions(compact=True):
        with set_printoptions(show_batch_size=False):
            assert repr(TensorDict(a=0)) == "TensorDict(fields={a: i64[]})"
    with pytest.raises(ValueError), set_printoptions(compact=True):
        raise ValueError
    with set_printoptions(verbose=False):
        assert repr(TensorDict(a=0)) == (
            "TensorDict(\n    fields={\n        a: Tensor(shape=torch.Size([]))},\n"
            "    batch_size=torch.Size([]))"
        )
    get_printoptions()["compact"] = True
    assert get_printoptions() == before
    with pytest.raises(TypeError, match="zzz"):
        set_printoptions(zzz=1)


def compact(td, **options):
    with set_printoptions(compact=True, **options):
        return repr(td)


def test_the_compact_form():
    td = tree().exclude("s")
    assert (
        compact(td) == "TensorDict(batch_size=[], fields={a: i64[], b: f32[3,2], n: {x: f32[3]}})"
    )
    assert compact(td, verbose=False) == (
        "TensorDict(batch_size=[], fields={a: [], b: [3,2], n: {x: [3]}})"
    )
    assert compact(TensorDict({"a": torch.zeros(2)}, [2], device="cpu")) == (
        "TensorDict(batch_size=[2], device=cpu, fields={a: f32[]})"
    )
    assert compact(TensorDict()) == "TensorDict(batch_size=[], fields={})"
    nested = TensorDict({"td": TensorDict({"x": torch.zeros(3, 4)}, [3, 4])}, [3])
    assert compact(nested) == "TensorDict(batch_size=[3], fields={td: [4]{x: f32[]}})"
    assert compact(TensorDict(c=None, d=int, m=MetaData(1))) == (
        "TensorDict(batch_size=[], fields={c: NoneType, d: type, m: MetaData})"
    )


def test_the_compact_form_breaks_at_eighty_columns():
    assert compact(rows()) == (
        "TensorDict(batch_size=[3], fields={\n    a: f32[],\n    b: f32[2],\n"
        "    l: NonTensorStack,\n    n: {x: f32[2]},\n    s: str})"
    )
    for n in (40, 50):
        td = TensorDict({"c" * 90: 1, "n": {"a" * n: torch.zeros(1), "b": torch.zeros(1)}})
        line = next(x for x in compact(td).split("\n") if x.strip().startswith("n:"))
        assert line.endswith("}})") and len(line) == 30 + n
    td = TensorDict({"c" * 90: 1, "n": {"a" * 51: torch.zeros(1), "b": torch.zeros(1)}})
    assert "    n: {\n        " + "a" * 51 + ": f32[1],\n        b: f32[1]}})" in compact(td)


def test_the_compact_form_of_other_kinds():
    lazy = lazy_stack([TensorDict(a=torch.zeros(2)), TensorDict(a=torch.zeros(3), b=1)])
    assert compact(lazy) == (
        "LazyStackedTensorDict(batch_size=[2], stack_dim=0, fields={\n    a: f32[-1]}, "
        "exclusive_fields={\n    1: {b: i64[]}})"
    )
    sample = Sample(x=torch.zeros(2), s="d", batch_size=[2])
    assert compact(sample) == "Sample(batch_size=[2], fields={s: str, x: f32[], n: None})"
    params = TensorDictParams(TensorDict(a=torch.zeros(3)))
    assert (
        compact(params) == "TensorDictParams(params=TensorDict(batch_size=[], fields={a: f32[3]}))"
    )
    assert compact(TensorDict(c=sample, p=params)) == (
        "TensorDict(batch_size=[], fields={\n    c: Sample[2]{s: str, x: f32[], n: None},\n"
        "    p: TensorDictParams{a: f32[3]}})"
    )


def test_dtype_codes():
    codes = {
        torch.float16: "f16",
        torch.bfloat16: "bf16",
        torch.float64: "f64",
        torch.int8: "i8",
        torch.uint8: "u8",
        torch.bool: "bool",
        torch.complex64: "c64",
        torch.float8_e4m3fn: "f8_e4m3fn",
        torch.uint16: "u16",
    }
    for dtype, code in codes.items():
        td = TensorDict(a=torch.zeros(2, dtype=dtype))
        assert compact(td) == f"TensorDict(batch_size=[], fields={{a: {code}[2]}})"


class Reader(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.texts, self.folds = [], [], 0

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.folds += tag == "details"

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def test_html_is_a_foldable_tree_with_everything_in_it():
    td = rows()
    td["<b>"] = torch.zeros(3, dtype=torch.bool)
    td["o"] = Sample(x=torch.zeros(3), s="d", batch_size=[3])
    td["z"] = lazy_stack([TensorDict(a=1), TensorDict(a=1), TensorDict(a=1, only=2)])
    reader = Reader()
    reader.feed(td.lock_()._repr_html_())
    assert reader.open == [] and reader.folds == 4
    text = "".join(reader.texts)
    assert "<b>: bool[3], cpu, 3 B" in text and "b: f32[3, 2], cpu, 24 B" in text
    assert "batch_size=[3], names=['t'], locked, 8 entries" in text and "only in 2" in text
    assert (
        "n: None" in text and "s: str 'hello'" in text and re.search(r"n: TensorDict .*24 B", text)
    )
    with set_printoptions(html=False):
        assert td._repr_html_() is None
    params = TensorDictParams(a=torch.zeros(1024, 4))
    assert "TensorDictParams" in params._repr_html_() and "16.0 KiB" in params._repr_html_()


def test_rich():
    pytest.importorskip("rich", reason="rich is an extra")
    from rich.console import Console
    from rich.pretty import pretty_repr

    console = Console(width=100, record=True, file=open("/dev/null", "w"))
    td = rows()
    td["[bold]"] = 1 * torch.ones(3)
    td["z"] = lazy_stack([TensorDict(a=1), TensorDict(a=1), TensorDict(a=1, only=2)])
    td["o"] = Sample(x=torch.zeros(3), s="d", batch_size=[3])
    console.print(td)
    text = console.export_text()
    assert "├── a: f32[3], cpu, 12 B" in text and "[bold]: f32[3]" in text
    assert "only in 2" in text and "n: None" in text
    pretty = pretty_repr(TensorDict({"a": torch.zeros(2), "s": "x", "n": {"b": 1}}))
    assert pretty.startswith("TensorDict(") and "a=f32[2]" in pretty and "s='x'" in pretty
    assert "n=None" in pretty_repr(td["o"])


def test_key_completion():
    assert set(tree()._ipython_key_completions_()) == {"a", "b", "n", ("n", "x"), "s"}


def test_printing_reads_nothing_of_the_values():
    with torch._subclasses.FakeTensorMode():
        fake = TensorDict(a=torch.zeros(3))
    assert "a: FakeTensor(shape=torch.Size([3])" in repr(fake)
    assert "f32[3]" in compact(fake) and fake._repr_html_()
    with set_printoptions(plain=True, show_storage_size=True, show_is_view=True):
        assert "mean" not in repr(TensorDict(a=torch.zeros(3, device="meta"), b=torch.zeros(0)))


ODD = {
    "sparse": (lambda: torch.eye(3).to_sparse(), "f32[3,3]"),
    "csr": (lambda: torch.eye(3).to_sparse_csr(), "f32[3,3]"),
    "uninitialised": (lambda: torch.nn.LazyLinear(3).weight, "f32[-1]"),
    "nested": (lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]), "f32[2,-1]"),
    "mkldnn": (lambda: torch.ones(2).to_mkldnn(), "f32[2]"),
    "conjugate": (lambda: torch.ones(2, dtype=torch.cfloat).conj(), "c64[2]"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ODD)
def test_leaves_that_answer_few_questions(kind):
    make, code = ODD[kind]
    td = TensorDict()
    td["x"] = make()
    assert compact(td) == f"TensorDict(batch_size=[], fields={{x: {code}}})"
    everything = {name: True for name in get_printoptions() if name.startswith("show")}
    with set_printoptions(plain=True, **everything):
        assert "requires_grad=" in repr(td)
    assert "x: " in td._repr_html_()


def test_a_tree_of_200_levels_is_shown():
    td = TensorDict({"x": torch.zeros(2)}, [2])
    for _ in range(200):
        td = TensorDict({"n": td}, [2])
    assert repr(td).count("n: TensorDict(") == 200
    with set_printoptions(compact=True):
        assert repr(td).count("n: {") == 200
