"""Malformed calls: each gives a typed error that names what was wrong, and changes nothing."""

from __future__ import annotations

import pytest
import torch

from tensordict import NonTensorData, TensorDict, lazy_stack
from tensordict.errors import TensorDictError


def make():
    """Batch [3, 4], names, a leaf with features, a nested tensordict, values, an int leaf."""
    return TensorDict(
        {
            "a": torch.arange(60.0).view(3, 4, 5),
            "i": torch.arange(12).view(3, 4),
            "n": TensorDict({"b": torch.ones(3, 4, 2), "s": "deep"}, [3, 4]),
            "s": "text",
        },
        [3, 4],
        names=["x", "y"],
    )


def other(*batch, **entries):
    return TensorDict({"a": torch.zeros(*batch, 5), **entries}, batch)


def snapshot(td):
    leaves = {k: (id(v), v.clone(), v.dtype) for k, v in td.items(True, True)}
    values = {k: repr(v) for k, v in td.non_tensor_items(True)}
    state = (td.batch_size, td["n"].batch_size, td.names, td.device, td.is_locked)
    return leaves, values, state, list(td.keys(True))


def unchanged(before, td):
    after = snapshot(td)
    assert before[1:] == after[1:]
    assert before[0].keys() == after[0].keys()
    for key, (ident, value, dtype) in before[0].items():
        now = after[0][key]
        assert now[0] == ident and now[2] is dtype and torch.equal(now[1], value), key


Z = torch.zeros
# group -> name -> (call, builtin type that it must be, text in the message)
CASES = {
    "constructor": {
        "source and keywords": (lambda td: TensorDict({"a": 1}, b=2), ValueError, "not both"),
        "list of pairs": (lambda td: TensorDict([("a", 1)]), ValueError, "list"),
        "number": (lambda td: TensorDict(3), ValueError, "int"),
        "string": (lambda td: TensorDict("abc"), ValueError, "str"),
        "tensor": (lambda td: TensorDict(Z(3)), ValueError, "Tensor"),
        "int key": (lambda td: TensorDict({1: 2}), KeyError, "1 of type int"),
        "None key": (lambda td: TensorDict({None: 2}), KeyError, "NoneType"),
        "empty tuple key": (lambda td: TensorDict({(): 2}), KeyError, "()"),
        "int in a tuple key": (lambda td: TensorDict({("a", 1): 2}), KeyError, "('a', 1)"),
        "batch size string": (lambda td: TensorDict({}, "ab"), ValueError, "'ab'"),
        "batch size float": (lambda td: TensorDict({}, 2.5), ValueError, "2.5"),
        "batch size of floats": (lambda td: TensorDict({}, [2.5]), ValueError, "2.5"),
        "batch size dict": (lambda td: TensorDict({}, batch_size={"a": 1}), ValueError, "a"),
        "batch size bool": (lambda td: TensorDict({}, batch_size=True), ValueError, "True"),
        "leaf too short": (lambda td: TensorDict({"a": Z(3)}, [3, 4]), RuntimeError, "'a'"),
        "other sizes": (lambda td: TensorDict({"a": Z(3, 5)}, [3, 4]), RuntimeError, "[3, 4]"),
        "scalar in a batch": (lambda td: TensorDict({"a": 1}, [3]), RuntimeError, "NonTensorData"),
        "list of another length": (
            lambda td: TensorDict({"a": ["x", "y"]}, [3]),
            RuntimeError,
            "'a'",
        ),
        "nested leaf": (lambda td: TensorDict({"n": {"b": Z(2)}}, [3]), RuntimeError, "('n', 'b')"),
        "nested tensordict": (
            lambda td: TensorDict({"n": TensorDict({"b": Z(2)}, [2])}, [3]),
            RuntimeError,
            "'n'",
        ),
        "ragged list of tensors": (lambda td: TensorDict({"a": [Z(2), Z(3)]}), RuntimeError, "'a'"),
        "too many names": (lambda td: TensorDict({}, [3], names=["x", "y"]), ValueError, "2 names"),
        "too few names": (lambda td: TensorDict({}, [3, 4], names=["x"]), ValueError, "1 names"),
        "names twice": (lambda td: TensorDict({}, [3, 4], names=["x", "x"]), ValueError, "x"),
        "name that is no str": (lambda td: TensorDict({}, [3], names=[3]), ValueError, "3"),
        "key through a leaf": (lambda td: TensorDict({"a": 1, ("a", "b"): 2}), KeyError, "'b'"),
    },
    "reading keys": {
        "missing": (lambda td: td["zz"], KeyError, '"zz"'),
        "missing names what is there": (lambda td: td["zz"], KeyError, "'a'"),
        "missing nested": (lambda td: td["n", "zz"], KeyError, "zz"),
        "missing on the way": (lambda td: td["zz", "a"], KeyError, "zz"),
        "through a tensor": (lambda td: td["a", "zz"], KeyError, "'a' is a Tensor"),
        "through a value": (lambda td: td["s", "zz"], KeyError, "'s' is a NonTensorData"),
        "get with an int": (lambda td: td.get(3), KeyError, "3"),
        "get with None": (lambda td: td.get(None), KeyError, "None"),
        "get through a tensor": (lambda td: td.get(("a", "zz")), KeyError, "'zz'"),
        "get_at of a bad index": (lambda td: td.get_at("a", 7), IndexError, "7"),
        "in with an int": (lambda td: 3 in td, RuntimeError, "int"),
        "in with a tensor": (lambda td: Z(1) in td, RuntimeError, "Tensor"),
        "class of a missing entry": (lambda td: td.entry_class("zz"), KeyError, "zz"),
        "shape of a missing entry": (lambda td: td.get_item_shape("zz"), KeyError, "zz"),
        "kind of a missing entry": (lambda td: td.is_non_tensor("zz"), KeyError, "zz"),
    },
    "writing keys": {
        "int key": (lambda td: td.set(1, Z(3, 4)), KeyError, "1"),
        "empty key": (lambda td: td.set((), Z(3, 4)), KeyError, "()"),
        "key with an int": (lambda td: td.set(("a", 1), Z(3, 4)), KeyError, "('a', 1)"),
        "through a tensor": (lambda td: td.set(("a", "b"), Z(3, 4)), KeyError, "'a' is a Tensor"),
        "shape": (lambda td: td.set("z", Z(3, 5)), RuntimeError, "'z'"),
        "shape by brackets": (lambda td: td.__setitem__("z", Z(4)), RuntimeError, "[3, 4]"),
        "nested shape": (lambda td: td.set(("n", "z"), Z(2)), RuntimeError, "('n', 'z')"),
        "scalar": (lambda td: td.set("z", 1.0), RuntimeError, "expand"),
        "dict with a bad entry": (
            lambda td: td.set("z", {"ok": Z(3, 4), "bad": Z(2)}),
            RuntimeError,
            "('z', 'bad')",
        ),
        "itself": (lambda td: td.set("z", td), ValueError, "contain itself"),
        "itself below": (lambda td: td["n"].set("z", td), ValueError, "contain itself"),
        "set_ of a missing key": (lambda td: td.set_("zz", Z(3, 4)), KeyError, "zz"),
        "set_ of a bad shape": (lambda td: td.set_("a", Z(3, 5)), RuntimeError, "'a'"),
        "set_ of a node by a tensor": (lambda td: td.set_("n", Z(3, 4)), RuntimeError, "n"),
        "set_at_ of a missing key": (lambda td: td.set_at_("zz", 0, 0), KeyError, "zz"),
        "set_at_ of a bad index": (lambda td: td.set_at_("a", 0, 7), IndexError, "7"),
        "set_at_ of a bad shape": (lambda td: td.set_at_("a", Z(7), 0), RuntimeError, "a"),
        "update with a bad second entry": (
            lambda td: td.update({"ok": Z(3, 4), "bad": Z(5)}),
            RuntimeError,
            "'bad'",
        ),
        "update with a bad key": (lambda td: td.update({3: Z(3, 4)}), KeyError, "3"),
        "update through a tensor": (lambda td: td.update({("a", "b"): 1}), KeyError, "'b'"),
        "update_ with a missing second key": (
            lambda td: td.update_({"a": Z(3, 4, 5), "zz": Z(3, 4)}),
            KeyError,
            "zz",
        ),
        "update_ with a bad second shape": (
            lambda td: td.update_({"i": Z(3, 4), "a": Z(9)}),
            RuntimeError,
            "'a'",
        ),
        "update_at_ with a missing key": (lambda td: td.update_at_({"zz": 1}, 0), KeyError, "zz"),
        "update_at_ with a bad second entry": (
            lambda td: td.update_at_({"i": Z(4), "a": Z(9, 9)}, 0),
            RuntimeError,
            "a",
        ),
        "replace with a bad shape": (lambda td: td.replace({"a": Z(2)}), RuntimeError, "'a'"),
        "setdefault of a bad shape": (lambda td: td.setdefault("z", Z(2)), RuntimeError, "'z'"),
    },
    "removing and choosing keys": {
        "del": (lambda td: td.__delitem__("zz"), KeyError, "zz"),
        "del_": (lambda td: td.del_("zz"), KeyError, "zz"),
        "del through a tensor": (lambda td: td.del_(("a", "b")), KeyError, "'b'"),
        "pop": (lambda td: td.pop("zz"), KeyError, "zz"),
        "pop nested": (lambda td: td.pop(("n", "zz")), KeyError, "zz"),
        "popitem of nothing": (lambda td: TensorDict().popitem(), KeyError, "empty"),
        "select": (lambda td: td.select("a", "zz"), KeyError, "zz"),
        "select nested": (lambda td: td.select(("n", "zz")), KeyError, "zz"),
        "select through a tensor": (lambda td: td.select(("a", "b")), KeyError, "'b'"),
        "select an int": (lambda td: td.select(3), KeyError, "3"),
        "select in place": (lambda td: td.select("a", "zz", inplace=True), KeyError, "zz"),
        "exclude an int": (lambda td: td.exclude(3), KeyError, "3"),
        "split a missing key": (lambda td: td.split_keys(["a", "zz"]), KeyError, "zz"),
        "split a key twice": (lambda td: td.split_keys(["a"], ["a"]), KeyError, "'a'"),
        "rename a missing key": (lambda td: td.rename_key_("zz", "z"), KeyError, "zz"),
        "rename safely to a key": (
            lambda td: td.rename_key_("a", "i", safe=True),
            KeyError,
            "already present",
        ),
        "rename to no key": (lambda td: td.rename_key_("a", 3), KeyError, "3"),
        "rename keys": (lambda td: td.rename_keys({"zz": "z"}), KeyError, "zz"),
        "unflatten into a leaf": (
            lambda td: TensorDict({"a": 1, "a.b": 2}).unflatten_keys("."),
            KeyError,
            "a.b",
        ),
        "flatten onto a key": (
            lambda td: TensorDict({"a.b": 1, "a": {"b": 2}}).flatten_keys("."),
            KeyError,
            "a.b",
        ),
    },
    "locked": {
        name: (call, RuntimeError, "Cannot modify locked TensorDict")
        for name, call in {
            "set": lambda td: td.lock_().set("z", Z(3, 4)),
            "brackets": lambda td: td.lock_().__setitem__("a", Z(3, 4)),
            "nested": lambda td: td.lock_()["n"].set("z", Z(3, 4)),
            "update": lambda td: td.lock_().update({"a": Z(3, 4)}),
            "pop": lambda td: td.lock_().pop("a"),
            "del_": lambda td: td.lock_().del_("a"),
            "clear": lambda td: td.lock_().clear(),
            "rename": lambda td: td.lock_().rename_key_("a", "z"),
            "setdefault": lambda td: td.lock_().setdefault("z", Z(3, 4)),
            "create_nested": lambda td: td.lock_().create_nested("z"),
            "select": lambda td: td.lock_().select("a", inplace=True),
            "exclude": lambda td: td.lock_().exclude("a", inplace=True),
            "flatten_keys": lambda td: td.lock_().flatten_keys(inplace=True),
            "set_non_tensor": lambda td: td.lock_().set_non_tensor("z", 1),
            "row with a new key": lambda td: td.lock_().__setitem__(0, {"z": Z(4)}),
        }.items()
    },
    "indices": {
        "out of range": (lambda td: td[3], IndexError, "3"),
        "out of range below": (lambda td: td[-4], IndexError, "-4"),
        "second dimension": (lambda td: td[0, 4], IndexError, "4"),
        "too many": (lambda td: td[0, 0, 0], IndexError, "[3, 4]"),
        "too many after ...": (lambda td: td[..., 0, 0, 0], IndexError, "[3, 4]"),
        "two ellipses": (lambda td: td[..., ...], IndexError, "single ellipsis"),
        "float": (lambda td: td[1.5], IndexError, "1.5"),
        "float tensor": (lambda td: td[Z(2)], IndexError, "float"),
        "negative step": (lambda td: td[::-1], ValueError, "step"),
        "dict": (lambda td: td[{}], IndexError, "{}"),
        "set": (lambda td: td[{1}], IndexError, "{1}"),
        "object": (lambda td: td[object()], IndexError, "object"),
        "tensor out of range": (lambda td: td[torch.tensor([0, 3])], IndexError, "3"),
        "list out of range": (lambda td: td[[0, -4]], IndexError, "-4"),
        "mask of another size": (lambda td: td[torch.ones(4, dtype=torch.bool)], IndexError, "4"),
        "mask of too many dimensions": (
            lambda td: td[torch.ones(3, 4, 5, dtype=torch.bool)],
            IndexError,
            "[3, 4]",
        ),
        "tensors that do not broadcast": (
            lambda td: td[torch.tensor([0, 1]), torch.tensor([0, 1, 2])],
            IndexError,
            "Cannot index",
        ),
        "no batch": (lambda td: TensorDict(a=1)[0], RuntimeError, "batch_dims==0"),
        "mixed tuple": (lambda td: td["a", 0], KeyError, "('a', 0)"),
    },
    "writing rows": {
        "out of range": (lambda td: td.__setitem__(3, other(4)), IndexError, "3"),
        "batch size": (lambda td: td.__setitem__(0, other(3)), RuntimeError, "batch size"),
        "bad second entry": (
            lambda td: td.__setitem__(0, {"i": Z(4), "a": Z(9, 9)}),
            RuntimeError,
            "a",
        ),
        "bad nested entry": (
            lambda td: td.__setitem__(0, {"i": Z(4), "n": {"b": Z(7)}}),
            RuntimeError,
            "b",
        ),
        "bad key": (lambda td: td.__setitem__(0, {3: Z(4)}), KeyError, "3"),
        "tensor over a node": (lambda td: td.__setitem__(0, {"n": Z(4)}), RuntimeError, "n"),
        "no batch": (lambda td: TensorDict(a=1).__setitem__(0, 1), RuntimeError, "batch_dims==0"),
        "float index": (lambda td: td.__setitem__(0.5, 1), IndexError, "0.5"),
    },
    "shapes": {
        "view of another size": (lambda td: td.view(5, 2), RuntimeError, "[5, 2]"),
        "view with two -1": (lambda td: td.view(-1, -1), RuntimeError, "-1"),
        "view with -2": (lambda td: td.view(-2, 6), RuntimeError, "-2"),
        "view that does not divide": (lambda td: td.view(5, -1), RuntimeError, "5"),
        "view without sizes": (lambda td: td.view(), (RuntimeError, TypeError), "view"),
        "view of a string": (lambda td: td.view("ab"), (ValueError, TypeError), "'ab'"),
        "reshape of another size": (lambda td: td.reshape(7), RuntimeError, "7"),
        "reshape with two -1": (lambda td: td.reshape(-1, -1), RuntimeError, "-1"),
        "unsqueeze": (lambda td: td.unsqueeze(5), RuntimeError, "5"),
        "unsqueeze below": (lambda td: td.unsqueeze(-4), RuntimeError, "-4"),
        "squeeze": (lambda td: td.squeeze(2), IndexError, "2"),
        "permute too few": (lambda td: td.permute(0), RuntimeError, "0"),
        "permute twice": (lambda td: td.permute(0, 0), RuntimeError, "0"),
        "permute out of range": (lambda td: td.permute(0, 5), IndexError, "5"),
        "transpose": (lambda td: td.transpose(0, 3), IndexError, "3"),
        "movedim": (lambda td: td.movedim(0, 4), IndexError, "4"),
        "movedim of two and one": (lambda td: td.movedim([0, 1], [0]), RuntimeError, "[0, 1]"),
        "expand of a size": (lambda td: td.expand(3, 5), RuntimeError, "5"),
        "expand to fewer": (lambda td: td.expand(4), RuntimeError, "sizes provided (1)"),
        "flatten backwards": (lambda td: td.flatten(1, 0), RuntimeError, "1"),
        "flatten out of range": (lambda td: td.flatten(0, 3), IndexError, "3"),
        "unflatten of another size": (lambda td: td.unflatten(0, [2, 2]), RuntimeError, "[2, 2]"),
        "unflatten out of range": (lambda td: td.unflatten(3, [3]), IndexError, "3"),
        "split of sizes": (lambda td: td.split([1, 1], 0), RuntimeError, "[1, 1]"),
        "split by zero": (lambda td: td.split(0), ValueError, "0"),
        "split by a negative": (lambda td: td.split(-1), ValueError, "-1"),
        "split out of range": (lambda td: td.split(1, 2), IndexError, "2"),
        "chunk in none": (lambda td: td.chunk(0), (RuntimeError, ValueError), "0"),
        "unbind": (lambda td: td.unbind(2), IndexError, "2"),
        "narrow": (lambda td: td.narrow(0, 2, 2), (RuntimeError, IndexError), "2"),
        "roll": (lambda td: td.roll(1, 5), IndexError, "5"),
        "flip": (lambda td: td.flip([2]), IndexError, "2"),
        "gather of another rank": (
            lambda td: td.gather(0, torch.tensor([0])),
            (RuntimeError, ValueError),
            "[1]",
        ),
        "gather out of range": (
            lambda td: td.gather(0, torch.full((1, 4), 9)),
            (IndexError, RuntimeError),
            "",
        ),
        "repeat of too few": (lambda td: td.repeat(2), (ValueError, RuntimeError), "2"),
        "repeat_interleave of a size": (
            lambda td: td.repeat_interleave(torch.tensor([1, 2]), dim=0),
            RuntimeError,
            "",
        ),
        "masked_select of another size": (
            lambda td: td.masked_select(torch.ones(4, dtype=torch.bool)),
            (RuntimeError, IndexError),
            "4",
        ),
    },
    "joining": {
        "stack of an empty list": (lambda td: TensorDict.stack([]), RuntimeError, "empty"),
        "stack of other keys": (
            lambda td: torch.stack([td, other(3, 4)]),
            RuntimeError,
            "exclusive",
        ),
        "stack of other batches": (
            lambda td: torch.stack([other(2), other(3)]),
            RuntimeError,
            "congruent",
        ),
        "stack of other leaf shapes": (
            lambda td: torch.stack([TensorDict(a=Z(2)), TensorDict(a=Z(3))]),
            RuntimeError,
            "for key a",
        ),
        "stack of a leaf and a node": (
            lambda td: torch.stack([TensorDict(a=1), TensorDict(a={"b": 1})]),
            RuntimeError,
            "'a'",
        ),
        "stack out of range": (lambda td: torch.stack([td, td], 4), IndexError, "4"),
        "stack with a tensor": (lambda td: torch.stack([td, Z(3, 4)]), TypeError, "Tensor"),
        "stack into another batch": (
            lambda td: torch.stack([td, td], out=td),
            RuntimeError,
            "[2, 3, 4]",
        ),
        "cat of an empty list": (lambda td: TensorDict.cat([]), RuntimeError, "empty"),
        "cat of other keys": (lambda td: torch.cat([td, other(3, 4)]), KeyError, "exclusive"),
        "cat without batch": (
            lambda td: torch.cat([TensorDict(a=1), TensorDict(a=1)]),
            RuntimeError,
            "dim must be in the range",
        ),
        "cat out of range": (lambda td: torch.cat([td, td], 2), IndexError, "2"),
        "cat of other sizes": (
            lambda td: torch.cat([other(2, 3), other(2, 4)]),
            RuntimeError,
            "[2, 4]",
        ),
        "cat with a tensor": (lambda td: torch.cat([td, Z(3, 4)]), TypeError, "Tensor"),
        "lazy stack of nothing": (lambda td: lazy_stack([]), RuntimeError, "empty"),
        "lazy stack of a dict": (lambda td: lazy_stack([td, {}]), ValueError, "dict"),
        "lazy stack of other ranks": (
            lambda td: lazy_stack([td, td[0]]),
            (ValueError, RuntimeError),
            "",
        ),
        "pad of too many sizes": (
            lambda td: td.pad([1, 1, 1, 1, 1, 1]),
            (RuntimeError, ValueError),
            "",
        ),
    },
    "metadata": {
        "batch size that does not fit": (
            lambda td: setattr(td, "batch_size", [3, 5]),
            RuntimeError,
            "[3, 5]",
        ),
        "batch size of a leaf too short": (
            lambda td: setattr(td, "batch_size", [3, 4, 5]),
            RuntimeError,
            "[3, 4, 5]",
        ),
        "batch size of another type": (
            lambda td: setattr(td, "batch_size", "x"),
            ValueError,
            "'x'",
        ),
        "device": (lambda td: setattr(td, "device", "cpu"), RuntimeError, "to(new_device)"),
        "names of another length": (lambda td: setattr(td, "names", ["x"]), ValueError, "['x']"),
        "names twice": (lambda td: setattr(td, "names", ["x", "x"]), ValueError, "non-unique"),
        "refine to another name": (lambda td: td.refine_names("z", "y"), RuntimeError, "z"),
        "rename a missing dimension": (lambda td: td.rename(q="z"), ValueError, "'q'"),
        "rename in two ways": (lambda td: td.rename("u", "v", x="z"), ValueError, "not both"),
        "size out of range": (lambda td: td.size(2), IndexError, "2"),
        "unlock a part": (
            lambda td: td.lock_()["n"].unlock_(),
            RuntimeError,
            "part of a locked graph",
        ),
        "truth": (lambda td: bool(td), RuntimeError, "is_empty"),
        "empty of a bad batch": (lambda td: td.empty(batch_size="x"), ValueError, "'x'"),
    },
    "to": {
        "dict": (lambda td: td.to({}), TypeError, "dict"),
        "list": (lambda td: td.to([1]), TypeError, "list"),
        "two devices": (lambda td: td.to("cpu", "meta"), TypeError, "(str, str)"),
        "unknown keyword": (lambda td: td.to(devise="cpu"), TypeError, "devise"),
        "unknown device": (lambda td: td.to("nowhere"), RuntimeError, "nowhere"),
        "spec and more": (lambda td: td.to(td.attrs(), torch.float32), TypeError, ""),
        "locked in place": (
            lambda td: td.lock_().to(torch.float64, inplace=True),
            RuntimeError,
            "locked",
        ),
        "batch size that does not fit": (lambda td: td.to(batch_size=[9]), RuntimeError, "[9]"),
    },
    "operands": {
        "other keys": (lambda td: td.select("a") + td.select("i"), KeyError, "mismatch"),
        "a list": (lambda td: td.select("a").add([1]), TypeError, "list"),
        "a string": (lambda td: td.select("a").mul("x"), TypeError, "str"),
        "a shape that does not broadcast": (
            lambda td: td.select("a") + Z(7, 4),
            RuntimeError,
            "[7, 4]",
        ),
        "in place with other keys": (lambda td: td.add_(td.select("a")), KeyError, "mismatch"),
        "apply that breaks the batch": (
            lambda td: td.apply(lambda x: x.sum()),
            RuntimeError,
            "batch",
        ),
        "apply with other keys": (
            lambda td: td.apply(lambda x, y: x, td.select("a")),
            KeyError,
            "",
        ),
        "fill of a missing key": (lambda td: td.fill_("zz", 0), KeyError, "zz"),
        "copy_ of other keys": (lambda td: td.copy_(other(3, 4, z=Z(3, 4))), KeyError, "z"),
        "masked_fill_ of another size": (
            lambda td: td.masked_fill_(torch.ones(7, dtype=torch.bool), 0),
            (RuntimeError, IndexError),
            "7",
        ),
    },
    "conversion": {
        "schema": (lambda td: TensorDict.from_schema({"a": 3}), ValueError, "'a'"),
        "tuple": (lambda td: TensorDict.from_tuple([1]), TypeError, "list"),
        "named tuple": (lambda td: td.rename_keys({"a": "a b"}).to_namedtuple(), ValueError, "a b"),
        "state dict": (lambda td: td.load_state_dict({"zz": Z(1)}), RuntimeError, "zz"),
        "module": (lambda td: td.to_module(torch.nn.Linear(1, 1)), KeyError, "'a'"),
        "values beside values": (lambda td: NonTensorData("x", batch_size="y"), ValueError, "'y'"),
    },
}

TABLE = [(group, name, *case) for group, cases in CASES.items() for name, case in cases.items()]


@pytest.mark.parametrize(
    ("group", "name", "call", "kind", "text"), TABLE, ids=[f"{g}: {n}" for g, n, *_ in TABLE]
)
def test_malformed(group, name, call, kind, text):
    td = make()
    before = snapshot(td)
    with pytest.raises(kind) as err:
        call(td)
    assert text in str(err.value)
    # to() reads its arguments with torch's own parser, and raises what Tensor.to() would.
    assert isinstance(err.value, TensorDictError) or group == "to", type(err.value)
    if td.is_locked:
        td.unlock_()
    unchanged(before, td)


def test_the_table_is_large():
    assert len(TABLE) >= 200
