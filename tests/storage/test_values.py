"""Values as JSON: every supported value comes back equal and of its type, others are refused."""

import enum
import json
import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tensordict.errors import UnsupportedLeaf
from tensordict.storage import values

atoms = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text(max_size=8)
    | st.binary(max_size=8)
    | st.builds(slice, st.integers() | st.none(), st.integers())
    | st.builds(range, st.integers(-5, 5), st.integers(-5, 5))
    | st.sampled_from([torch.float32, torch.device("cuda:1"), torch.Size([2, 0]), np.int8(3)])
)
hashable = st.none() | st.integers() | st.text(max_size=4) | st.tuples(st.integers())
nested = st.recursive(
    atoms,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(hashable, inner, max_size=3)
        | st.sets(hashable, max_size=3)
        | st.frozensets(hashable, max_size=3)
    ),
    max_leaves=10,
)


def back(value):
    return values.decode(json.loads(json.dumps(values.encode(value), allow_nan=False)))


@settings(max_examples=150, deadline=None)
@given(nested)
def test_values_come_back(value):
    got = back(value)
    assert type(got) is type(value) and got == value


def test_numbers_that_json_has_not():
    assert math.isnan(back(float("nan"))) and back([float("-inf")]) == [-math.inf]
    assert math.copysign(1, back(-0.0)) == -1
    assert back(2**53 + 1) == 2**53 + 1 and back(-(10**5000)) == -(10**5000)


@pytest.mark.parametrize(
    "value",
    [
        np.arange(6, dtype=">i4").reshape(2, 3)[:, ::2],
        np.array(["a", "bc"]),
        np.array([], dtype=np.float16),
        np.array("2020-01-01", dtype="M8[D]"),
        np.float32(1.5),
        np.bool_(True),
        np.str_("x"),
        torch.arange(4).view(2, 2).t(),
        torch.tensor([1.0, 2.0], dtype=torch.float8_e4m3fn),
        torch.zeros(0, 3),
        torch.tensor(1 + 2j).conj(),
    ],
)
def test_arrays_and_tensors(value):
    got = back(value)
    assert type(got) is type(value) and got.dtype == value.dtype and got.shape == value.shape
    if isinstance(value, torch.Tensor):
        assert torch.equal(raw(got), raw(value))
    else:
        assert np.array_equal(got, value)


def raw(x):
    return x.resolve_conj().contiguous().reshape(-1).view(torch.uint8)


class Colour(enum.Enum):
    RED = 1


class Sub(str):
    pass


def cyclic():
    out = []
    out.append(out)
    return out


@pytest.mark.parametrize(
    "value",
    [
        object(),
        print,
        Colour.RED,
        Sub("x"),
        np.array([object()]),
        np.zeros(1, dtype=[("a", "i4")]),
        torch.eye(2).to_sparse(),
        cyclic(),
    ],
)
def test_the_rest_is_refused_with_its_path(value):
    with pytest.raises(UnsupportedLeaf) as caught:
        values.encode([value], ("a", "b"))
    assert caught.value.path == ("a", "b")


def test_registered_classes_take_part(monkeypatch):
    for table in ("_encoders", "_decoders", "_enums", "_owners"):
        monkeypatch.setattr(values, table, dict(getattr(values, table)))
    values.register_value(Fraction, "fraction", str, Fraction)
    values.register_enum(Colour, "colour")
    assert back({"f": [Fraction(1, 3)]}) == {"f": [Fraction(1, 3)]}
    assert back(Colour.RED) is Colour.RED
    values.register_value(Fraction, "fraction", str, Fraction)  # once more, as a reload does
    with pytest.raises(ValueError, match=r"stands for fractions\.Fraction already"):
        values.register_value(Decimal, "fraction", str, Decimal)
    with pytest.raises(ValueError, match="a kind of plain values"):
        values.register_value(Decimal, "tuple", str, Decimal)
    with pytest.raises(UnsupportedLeaf, match=r"tensordict\.register_value"):
        values.encode(Decimal(1))


@pytest.mark.parametrize(
    "form",
    [
        {"~os:system": "true"},
        {"plain": 1},
        {"~int": 5},
        {"~int": "zz"},
        {"~float": "1.5"},
        {"~tuple": 5, "~set": []},
        {"~set": [[1]]},
        {"~dict": [[1]]},
        {"~bytes": "!!"},
        {"~size": [-1]},
        {"~size": ["a"]},
        {"~device": "nowhere"},
        {"~dtype": "Tensor"},
        {"~dtype": "os"},
        {"~array": ["|O", [1], ""]},
        {"~array": ["<f4", [2**40], ""]},
        {"~array": ["<f4,<i4", [1], ""]},
        {"~scalar": ["<f4", ""]},
        {"~tensor": ["float32", [2**62], ""]},
        {"~tensor": ["float32", [2**62, 0], "AAAA"]},
        {"~enum": ["nobody", "x"]},
        {"~range": [0, 1, 0]},
        {"~slice": [1, 2, 3, 4]},
    ],
)
def test_forms_that_nothing_encodes_are_refused(form):
    with pytest.raises(ValueError):
        values.decode(form)


def test_depth_is_limited():
    form = []
    for _ in range(1000):
        form = [form]
    with pytest.raises(ValueError, match="nested deeper"):
        values.decode(form)
