"""Typed classes: fields, options, and that every method of tensordicts keeps the class."""

import copy
import dataclasses
import inspect
import pickle
from dataclasses import FrozenInstanceError
from typing import ClassVar, Generic, TypeVar

import pytest
import torch
from torch import Tensor

import tensordict
from tensordict import (
    LazyStackedTensorDict,
    MetaData,
    TensorClass,
    TensorDict,
    TensorDictBase,
    is_tensor_collection,
    is_tensorclass,
    lazy_stack,
    tensorclass,
)
from tensordict.core import registry

T = TypeVar("T")


@tensorclass
class MyData:
    image: Tensor
    mask: Tensor
    label: Tensor

    def mask_image(self):
        return self.image[self.mask.expand_as(self.image)].view(*self.batch_size, -1)

    def select_label(self, label):
        return self[self.label == label]


class Sample(TensorClass):
    x: Tensor
    name: str = "none"
    extra: Tensor = None
    tags: list = dataclasses.field(default_factory=lambda: ["t"])


class Nested(TensorClass):
    sample: Sample
    td: TensorDict = None


def sample(n=3, **kwargs):
    return Sample(torch.arange(float(n)), tags=None, batch_size=[n], **kwargs)


def test_the_example_of_the_documentation():
    torch.manual_seed(0)
    images = torch.randn(100, 3, 64, 64)
    label = torch.randint(10, (100,))
    mask = torch.zeros(1, 64, 64, dtype=torch.bool).bernoulli_().expand(100, 1, 64, 64)
    data = MyData(images, mask, label=label, batch_size=[100])
    n = int((label == 1).sum())
    assert repr(data.select_label(1)) == (
        "MyData(\n"
        f"    image=Tensor(shape=torch.Size([{n}, 3, 64, 64]), device=cpu, dtype=torch.float32, is_shared=False),\n"
        f"    label=Tensor(shape=torch.Size([{n}]), device=cpu, dtype=torch.int64, is_shared=False),\n"
        f"    mask=Tensor(shape=torch.Size([{n}, 1, 64, 64]), device=cpu, dtype=torch.bool, is_shared=False),\n"
        f"    batch_size=torch.Size([{n}]),\n"
        "    device=None,\n"
        "    is_shared=False)"
    )
    count = int(mask[0].sum()) * 3
    assert data.mask_image().shape == (100, count)
    out = data.reshape(10, 10)
    assert type(out) is MyData and out.image.shape == (10, 10, 3, 64, 64)
    assert MyData.mask_image.__qualname__ == "MyData.mask_image"


def test_import_paths():
    from tensordict.prototype import tensorclass as old
    from tensordict.tensorclass import tensorclass as module_name

    assert old is tensorclass is module_name is tensordict.tensorclass


def test_fields_and_defaults():
    c = Sample(torch.zeros(3))
    assert c.name == "none" and c.extra is None and c.tags == ["t"] and c.batch_size == ()
    assert "extra" not in c._tensordict.keys()
    c.extra = torch.ones(2)
    assert torch.equal(c.extra, torch.ones(2)) and "extra" in c._tensordict.keys()
    c.extra = None
    assert c.extra is None and "extra" not in c._tensordict.keys()
    c.name = "new"
    assert c.name == "new" and c.get("name") == "new" and c.get("extra") is None
    assert Sample(torch.zeros(3)).tags is not c.tags


def test_wrong_arguments():
    with pytest.raises(TypeError, match=r"missing 1 required argument: 'x'"):
        Sample()
    with pytest.raises(
        AttributeError, match=r"'q': Sample has no such field. Its fields are \['extra'"
    ):
        Sample(torch.zeros(3), q=1)
    with pytest.raises(TypeError, match="multiple values for argument 'x'"):
        Sample(torch.zeros(3), x=1)
    with pytest.raises(TypeError, match="takes 4 positional arguments but 5"):
        Sample(1, 2, 3, 4, 5)
    c = sample()
    with pytest.raises(AttributeError, match="'q': Sample has no such field"):
        c.q = 1
    with pytest.raises(AttributeError):
        c.q
    with pytest.raises(AttributeError, match="no such field"):
        c.set("q", 1)
    with pytest.raises(AttributeError, match="no such field"):
        c.update({"x": torch.ones(3), "q": torch.ones(3)})
    assert c.x.tolist() == [0, 1, 2]  # nothing was written
    with pytest.raises(AttributeError, match="no such field"):
        c[0] = {"x": 7.0, "q": 1}
    assert c.x.tolist() == [0, 1, 2]
    with pytest.raises(AttributeError, match="no such field"):
        c.sum = 3
    with pytest.raises(RuntimeError, match="batch dimension mismatch"):
        c.x = torch.zeros(4)
    with pytest.raises(TypeError):
        hash(c)


def test_signature_tells_fields_and_metadata():
    names = list(inspect.signature(Sample).parameters)
    assert names[-8:] == ["x", "name", "extra", "tags", "batch_size", "device", "names", "lock"]
    assert inspect.signature(Sample).parameters["name"].default == "none"


def test_metadata_arguments():
    c = Sample(
        torch.zeros(2, 3), tags=None, batch_size=[2, 3], device="cpu", names=["a", "b"], lock=True
    )
    assert c.batch_size == (2, 3) and c.device == torch.device("cpu") and c.names == ["a", "b"]
    assert c.is_locked and c.unlock_() is c and not c.is_locked
    assert Sample(torch.zeros(3), device="meta").x.is_meta
    c.batch_size = [2]
    assert c.batch_size == (2,)
    c.names = None
    assert c.names == [None]


def test_keys_are_attributes():
    c = sample()
    for key in ("x", ("x",), ("a", "b")):
        with pytest.raises(ValueError, match="Invalid indexing arguments"):
            c[key]
        with pytest.raises(ValueError, match="Invalid indexing arguments"):
            c[key] = 1
    assert torch.equal(c.get("x"), c.x) and c.get("zz", 4) == 4
    n = Nested(c, TensorDict({"a": {"b": torch.zeros(3)}}, [3]), batch_size=[3])
    assert n.get(("td", "a", "b")).shape == (3,) and n.get(("td", "z"), None) is None
    assert n.get(("sample", "x")) is c.x
    n.set(("td", "a", "c"), torch.ones(3))
    assert n.td["a", "c"].sum() == 3


OPS = {
    "index": lambda c: c[0],
    "slice": lambda c: c[:2],
    "mask": lambda c: c[torch.tensor([True, False, True])],
    "stack": lambda c: torch.stack([c, c]),
    "cat": lambda c: torch.cat([c, c]),
    "lazy_stack": lambda c: lazy_stack([c, c]),
    "view": lambda c: c.view(1, 3),
    "expand": lambda c: c.expand(2, 3),
    "apply": lambda c: c.apply(lambda x: x + 1),
    "add": lambda c: c + 1,
    "radd": lambda c: 1 + c,
    "neg": lambda c: -c,
    "eq": lambda c: c == c,
    "less": lambda c: c < 2,
    "to": lambda c: c.to(torch.float64),
    "device": lambda c: c.to("meta"),
    "clone": lambda c: c.clone(),
    "copy": lambda c: copy.copy(c),
    "deepcopy": lambda c: copy.deepcopy(c),
    "pickle": lambda c: pickle.loads(pickle.dumps(c)),
    "select": lambda c: c.select("x"),
    "exclude": lambda c: c.exclude("x"),
    "flatten_keys": lambda c: c.flatten_keys(),
    "sum": lambda c: c.sum(dim=0),
    "detach": lambda c: c.detach(),
    "data": lambda c: c.data,
    "zeros_like": lambda c: torch.zeros_like(c),
    "split": lambda c: c.split(2)[0],
    "unbind": lambda c: c.unbind(0)[0],
    "gather": lambda c: c.gather(0, torch.tensor([2, 0])),
    "lock": lambda c: c.lock_(),
    "consolidate": lambda c: c.consolidate(),
    "where": lambda c: c.where(torch.tensor([True, False, True]), c),
    "replace": lambda c: dataclasses.replace(c, x=torch.ones(3)),
    "empty": lambda c: c.empty(),
    "iadd": lambda c: c.__iadd__(1),
    "double": lambda c: c.double(),
    "update": lambda c: c.update(x=torch.ones(3)),
    "torch_function": lambda c: torch.sin(c),
    "attribute_context": lambda c: c.unsqueeze(0).__enter__(),
}


@pytest.mark.parametrize("name", OPS)
def test_operations_keep_the_class(name):
    out = OPS[name](sample())
    assert type(out) is Sample, name
    assert is_tensorclass(out) and not isinstance(out, TensorDictBase)


@pytest.mark.parametrize("name", OPS)
def test_operations_over_a_lazy_stack_keep_the_class(name):
    lazy = lazy_stack(list(sample().unbind(0)))
    assert isinstance(lazy._tensordict, LazyStackedTensorDict)
    assert type(OPS[name](lazy)) is Sample


def test_nothing_a_tensordict_can_do_is_missing():
    missing = [name for name in dir(TensorDict) if not hasattr(Sample, name)]
    assert not set(missing) - {"_entries", "kind"} - set(vars(TensorDict))


def test_rows_are_written():
    c = sample()
    c[0] = Sample(torch.tensor(9.0), tags=None)
    assert c.x.tolist() == [9, 1, 2]
    c[1:] = TensorDict({"x": torch.tensor([7.0, 8.0])}, [2])
    assert c.x.tolist() == [9, 7, 8]
    c[2] = 0
    assert c.x.tolist() == [9, 7, 0]


def test_as_an_entry():
    td = TensorDict({"c": sample()}, [3])
    assert type(td["c"]) is Sample and td["c", "x"].shape == (3,)
    for out in (td.clone(), td[:2], td.to(torch.float64), td.reshape(3, 1), td + 1, pickle.loads(pickle.dumps(td)), torch.stack([td, td]), lazy_stack([td, td])):  # fmt: skip
        assert type(out["c"]) is Sample
    assert td[0]["c"].name == "none" and isinstance(td.to_tensordict()["c"], TensorDictBase)
    td["c"] = sample(name="other")
    assert td["c"].name == "other"
    td["c", "x"] = torch.ones(3)
    assert td["c"].x.tolist() == [1, 1, 1]
    with pytest.raises(AttributeError):
        td["c", "q"] = torch.ones(3)
    td.lock_()
    with pytest.raises(RuntimeError, match="locked"):
        td["c"].x = torch.zeros(3)
    with pytest.raises(RuntimeError, match="part of a locked graph"):
        td["c"].unlock_()


def test_nested_classes_are_made_of_what_is_given():
    n = Nested(TensorDict({"x": torch.zeros(3)}, [3]), batch_size=[3])
    assert type(n.sample) is Sample and n.sample.name is None
    n.sample = {"x": torch.ones(3), "tags": None}
    assert type(n.sample) is Sample and n.sample.name == "none"
    n.td = {"a": torch.zeros(3)}
    assert type(n.td) is TensorDict
    out = torch.stack([n, n])
    assert type(out.sample) is Sample and out.sample.batch_size == (2, 3)
    again = Nested.from_tensordict(n.to_tensordict())
    assert type(again.sample) is Sample


def test_from_tensordict():
    td = TensorDict({"x": torch.zeros(3)}, [3])
    c = Sample.from_tensordict(td)
    assert c.x is td["x"] and c.name is None and c.batch_size == (3,)
    c.x = torch.ones(3)
    assert td["x"].sum() == 3  # a view, no copy
    assert Sample.from_tensordict(td, {"name": "n"}).name == "n"
    with pytest.raises(ValueError, match="with the keys"):
        Sample.from_tensordict(TensorDict(x=1, q=2))


def test_dataclasses_know_it():
    assert dataclasses.is_dataclass(Sample) and dataclasses.is_dataclass(sample())
    assert [f.name for f in dataclasses.fields(Sample)] == ["x", "name", "extra", "tags"]
    assert [f.name for f in sample().fields()] == ["x", "name", "extra", "tags"]
    c = dataclasses.replace(sample(), name="other")
    assert c.name == "other" and c.batch_size == (3,) and c.x.shape == (3,)
    named = Sample(torch.zeros(2), tags=None, batch_size=[2], names=["t"])
    assert dataclasses.replace(named, x=torch.ones(2)).names == ["t"]
    as_dict = dataclasses.asdict(Nested(sample(), batch_size=[3]))
    assert as_dict["sample"]["x"].tolist() == [0, 1, 2] and as_dict["td"] is None
    assert not any(f.name in ("batch_size", "device") for f in dataclasses.fields(Sample))


def test_what_it_is():
    assert is_tensorclass(Sample) and is_tensorclass(sample()) and not is_tensorclass(TensorDict)
    assert is_tensor_collection(Sample) and is_tensor_collection(sample())
    assert not isinstance(sample(), TensorDictBase) and not isinstance(sample(), dict)


def test_numbers_fit_the_annotation():
    class Counted(TensorClass):
        n: int
        f: float = 1.0
        x: Tensor = None

    assert torch.equal(Counted(3).n, torch.tensor(3))
    c = Counted(3, batch_size=[2])
    assert c.n == 3 and c[0].n == 3 and c.f == 1.0
    c.n = 5
    assert c.n == 5
    with pytest.raises(RuntimeError, match="batch dimension mismatch"):
        c.x = 3


def test_nocast_keeps_values():
    class Plain(TensorClass, nocast=True):
        i: int
        items_: list
        d: dict
        x: Tensor

    for cls in (Plain, type("Other", (TensorClass["nocast"],), {"__annotations__": Plain.__annotations__})):  # fmt: skip
        c = cls(3, [1, 2], {"a": 1}, torch.zeros(2), batch_size=[2])
        assert (c.i, c.items_, c.d) == (3, [1, 2], {"a": 1}) and type(c.i) is int
        assert torch.stack([c, c])[1][0].items_ == [1, 2]


def test_autocast_converts_by_annotation():
    @tensorclass(autocast=True)
    class Cast:
        i: int
        s: str
        x: Tensor
        f: float = 1.0
        o: "int | None" = None
        t: "Tensor | None" = None
        anything: object = None
        nested: Sample = None

    c = Cast("3", 4, [1, 2])
    assert (c.i, c.s, c.f, c.o) == (3, "4", 1.0, None) and torch.equal(c.x, torch.tensor([1, 2]))
    c.o = "7"
    c.t = 3
    c.anything = [1, 2]
    assert c.o == 7 and torch.equal(c.t, torch.tensor(3)) and torch.equal(c.anything, torch.tensor([1, 2]))  # fmt: skip
    c.nested = {"x": torch.zeros(2)}
    assert type(c.nested) is Sample
    with pytest.raises(ValueError):
        c.i = "not a number"
    assert c.i == 3


def test_tensor_only():
    @tensorclass(tensor_only=True)
    class Only:
        x: Tensor
        y: "Tensor | None" = None

    assert torch.equal(Only([1.0, 2.0]).x, torch.tensor([1.0, 2.0])) and Only(3).y is None
    with pytest.raises(TypeError, match="tensor_only"):

        @tensorclass(tensor_only=True)
        class Bad:
            x: str


def test_frozen():
    class Frozen(TensorClass["frozen"]):
        x: Tensor

    c = Frozen(torch.zeros(2), batch_size=[2])
    with pytest.raises(FrozenInstanceError, match="cannot assign to field 'x'"):
        c.x = torch.ones(2)
    assert c.is_locked and not c[0].is_locked
    with pytest.raises(RuntimeError, match="locked"):
        c.update({"x": torch.ones(2)})
    assert type(c + 1) is Frozen


def test_shadow():
    for name in ("values", "batch_size", "_map", "sum", "names"):
        with pytest.raises(AttributeError, match=f"Attribute name {name} can't be used"):
            type("Bad", (TensorClass,), {"__annotations__": {name: Tensor}})

    class Shadow(TensorClass, shadow=True):
        values: Tensor
        sum: Tensor

    c = Shadow(torch.zeros(2), torch.ones(2), batch_size=[2])
    assert torch.equal(c.values, torch.zeros(2)) and type(c + 1) is Shadow
    assert torch.equal(torch.stack([c, c]).sum, torch.ones(2, 2)) and "sum" in repr(c)
    with pytest.raises(AttributeError, match="batch_size"):
        type("Bad", (TensorClass["shadow"],), {"__annotations__": {"batch_size": Tensor}})


def test_options_exclude_each_other_and_are_inherited():
    with pytest.raises(ValueError, match="exclude each other"):
        TensorClass["nocast", "autocast"]
    with pytest.raises(TypeError, match="expected options"):
        TensorClass["no_such_option"]
    with pytest.raises(TypeError, match="no options"):
        tensorclass(no_such=True)
    assert TensorClass["nocast"] is TensorClass["nocast"]

    class Base(TensorClass["nocast"]):
        i: int

    class Child(Base):
        j: int = 4

    assert Child(3).i == 3 and Child(3).j == 4


def test_kw_only():
    @tensorclass(kw_only=True)
    class Kw:
        x: Tensor = None
        y: Tensor

    assert Kw(y=torch.ones(1)).y == 1
    with pytest.raises(TypeError, match="positional"):
        Kw(torch.ones(1))


def test_inheritance():
    class Base(TensorClass):
        x: Tensor
        y: Tensor = None

        def double(self):
            return self.x * 2

        @property
        def half(self):
            return self.x / 2

        @classmethod
        def made(cls):
            return cls(torch.ones(2))

        @staticmethod
        def static():
            return 3

    class Child(Base):
        y: str = "text"
        z: Tensor = None
        shared: ClassVar[int] = 7

        def double(self):
            return super().double() + 1

    c = Child.made()
    assert c.double().tolist() == [3, 3] and c.half.tolist() == [0.5, 0.5] and c.y == "text"
    assert Child.static() == 3 and Child.shared == 7 and isinstance(c, Base)
    assert [f.name for f in dataclasses.fields(Child)] == ["x", "y", "z"]
    assert type(torch.stack([Base(torch.ones(2)), Base(torch.ones(2))])) is Base


def test_decorated_classes_keep_super_and_bases():
    class Mixin:
        def hello(self):
            return "hello"

    @tensorclass
    class Decorated(Mixin):
        x: Tensor

        def hello(self):
            return super().hello() + "!"

    c = Decorated(torch.zeros(2))
    assert c.hello() == "hello!" and isinstance(c, Mixin)
    assert Decorated.__name__ == "Decorated" and Decorated.__module__ == __name__

    @tensorclass(nocast=True)
    class Again(Sample):
        i: int = 3

    assert Again(torch.zeros(2)).i == 3 and Again._options.nocast and not Sample._options.nocast


def test_generics():
    class Box(TensorClass, Generic[T]):
        x: Tensor
        item: T = None

    c = Box[str](torch.zeros(2), "item", batch_size=[2])
    assert type(c) is Box and type(c[0]) is Box and c.x.shape == (2,)

    class IntBox(Box[int]):
        pass

    assert type(IntBox(torch.zeros(2))) is IntBox


def test_post_init_and_init_only_variables():
    class Scaled(TensorClass):
        x: Tensor
        factor: dataclasses.InitVar[float] = 2.0
        total: Tensor = dataclasses.field(default=None, init=False)

        def __post_init__(self, factor):
            self.x = self.x * factor
            self.total = self.x.sum()

    c = Scaled(torch.ones(2), 3.0)
    assert c.x.tolist() == [3, 3] and c.total == 6
    assert c.clone().x.tolist() == [3, 3]  # a copy is equal to its source
    with pytest.raises(AttributeError):
        Scaled(torch.ones(2), total=torch.ones(()))

    class Checked(TensorClass):
        x: Tensor

        def __post_init__(self):
            if self.x.ndim < 1:
                raise ValueError("no dimension")

    with pytest.raises(ValueError):
        Checked(torch.zeros(()))
    with pytest.raises(ValueError):
        Checked.from_tensordict(TensorDict(x=0))


def test_different_classes_do_not_join():
    class A(TensorClass):
        x: Tensor

    class B(TensorClass):
        x: Tensor

    class C(A):
        pass

    class D(A):
        y: Tensor = None

    a = A(torch.zeros(2), batch_size=[2])
    for other in (B(torch.zeros(2), batch_size=[2]), D(torch.zeros(2), batch_size=[2]), TensorDict({"x": torch.zeros(2)}, [2])):  # fmt: skip
        for join in (torch.stack, torch.cat, lazy_stack):
            with pytest.raises(TypeError, match="different"):
                join([a, other])
    assert type(torch.stack([a, C(torch.zeros(2), batch_size=[2])])) is A


def test_unresolvable_annotations_do_no_harm():
    Local = int

    class Odd(TensorClass["autocast"]):
        x: "NoSuchName"  # noqa: F821
        y: "Local" = None

    assert torch.equal(Odd(torch.zeros(2)).x, torch.zeros(2)) and Odd([1], y="3").y == "3"
    assert Local is int


def test_jaxtyping_like_annotations_are_read():
    class FloatTensor:
        """What jaxtyping makes: a class with the array type in it."""

        array_type = Tensor

    @tensorclass(tensor_only=True)
    class Typed:
        x: FloatTensor

    assert Typed([1.0]).x.tolist() == [1.0]


def test_printed_form_with_none_and_nested():
    text = repr(Nested(sample(2), batch_size=[2]))
    assert text.startswith("Nested(\n    sample=Sample(\n        name=NonTensorData(data=none,")
    assert "        extra=None,\n        tags=None,\n" in text
    assert text.endswith("    td=None,\n    batch_size=torch.Size([2]),\n    device=None,\n    is_shared=False)")  # fmt: skip


def test_registered_by_name():
    kind = f"{__name__}:Sample"
    assert Sample.kind == kind and registry.node_class(kind) is Sample
    again = registry.node_class(kind)._from_header(sample()._header(), dict(sample()._items()))
    assert type(again) is Sample and torch.equal(again.x, sample().x)
    with pytest.raises(TypeError, match="Import the module that defines it first"):
        registry.node_class("no.such:Class")

    def make(**fields):
        return type("Same", (TensorClass,), {"__annotations__": fields, "__module__": "m", "__qualname__": "Same"})  # fmt: skip

    first, second = make(x=Tensor), make(x=Tensor)
    assert registry.node_class("m:Same") is second is not first
    with pytest.raises(TypeError, match="a class with other fields"):
        make(y=Tensor)

    class Named(TensorClass, register_as="a-name"):
        x: Tensor

    assert registry.node_class("a-name") is Named


def test_locks_and_context_managers():
    c = sample()
    with c.lock_() as same:
        assert same is c and c.is_locked
    assert not c.is_locked
    with c.unsqueeze(0) as u:
        u.x = torch.ones(1, 3)
    assert c.x.tolist() == [1, 1, 1]
    with c.to(torch.float64) as d:
        d.x = d.x * 2
    assert c.x.tolist() == [2, 2, 2] and c.x.dtype is torch.float32


def test_values_of_fields():
    c = torch.stack([Sample(torch.zeros(2), name=n, tags=None) for n in ("a", "b")])
    assert c.name == ["a", "b"] and c[1].name == "b"
    c.name[0] = "z"
    assert c.name == ["z", "b"]

    class Meta(TensorClass):
        m: MetaData

    assert torch.stack([Meta(m=MetaData("abc"))] * 2).m == "abc"


def test_lazy_stacks_of_typed_classes():
    lazy = lazy_stack([Sample(torch.zeros(n), name=str(n), tags=None) for n in (2, 3)])
    assert type(lazy) is Sample and lazy.batch_size == (2,) and lazy.name == ["2", "3"]
    with pytest.raises(RuntimeError, match="pass as_padded_tensor"):
        lazy.x
    assert lazy.get("x", as_padded_tensor=True).shape == (2, 3) and type(lazy[0]) is Sample
    lazy.name = "both"
    assert lazy[1].name == "both" and lazy.stack_dim == 0
    lazy[0] = Sample(torch.ones(2), tags=None)
    assert lazy[0].x.tolist() == [1, 1]
    nested = lazy_stack([Nested(Sample(torch.zeros(n), tags=None)) for n in (2, 3)])
    assert type(nested.sample) is Sample and type(nested[1].sample) is Sample
    with pytest.raises(AttributeError):
        sample().stack_dim


def test_vmap_and_pytree():
    from torch.utils import _pytree

    c = Sample(torch.arange(6.0).view(3, 2), tags=None, batch_size=[3])
    out = torch.vmap(lambda row: row + 1)(c)
    assert type(out) is Sample and torch.equal(out.x, c.x + 1) and out.batch_size == (3,)
    assert torch.vmap(lambda row: row.x.sum())(c).tolist() == [1, 5, 9]
    doubled = _pytree.tree_map(lambda x: x * 2, c)
    assert type(doubled) is Sample and torch.equal(doubled.x, c.x * 2) and doubled.name == "none"


def test_compiled_functions_read_and_write_fields():
    def step(c, y):
        c.x = c.x * 2 + y
        out = Sample(x=c.x, name="new", tags=None, batch_size=[3])
        return out + 1

    c, y = sample(), torch.ones(3)
    compiled = torch.compile(step, backend="eager", fullgraph=True)
    out = compiled(c, y)
    assert type(out) is Sample and out.x.tolist() == [2, 4, 6] and out.name == "new"
    assert c.x.tolist() == [1, 3, 5]


def test_reading_rows_of_one_field():
    c = sample(name="n")
    assert (
        c.get_at("x", 1) == 1 and c.get_at("name", 0).data == "n" and c.get_at("extra", 0) is None
    )
    lazy = lazy_stack([Sample(torch.zeros(n), name=str(n), tags=None) for n in (2, 3)])
    assert lazy.get_at("name", 1).data == "3" and lazy.data_ptr().get("x").shape == (2,)


def test_from_dict_gives_the_class():
    source = {name: torch.zeros(3, 2) for name in ("image", "mask", "label")}
    made = MyData.from_dict(source, batch_size=[3])
    assert type(made) is MyData
    assert made.batch_size == (3,)
    assert made.mask is source["mask"]
    assert MyData.from_dict(source, auto_batch_size=True).batch_size == (3, 2)
    with pytest.raises(ValueError, match="other"):
        MyData.from_dict({"other": torch.zeros(3)})
