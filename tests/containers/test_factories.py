"""The package's functions do what the classmethods do."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch

import tensordict
from tensordict import TensorDict

FROM = sorted(n for n in tensordict.__all__ if n.startswith("from") and hasattr(TensorDict, n))


@pytest.mark.parametrize("name", FROM)
def test_each_takes_the_arguments_of_the_classmethod(name):
    function = inspect.signature(getattr(tensordict, name)).parameters
    method = inspect.signature(getattr(TensorDict, name)).parameters
    # The function of a dataclass takes a type too, and makes a tensorclass of it.
    only_method = {"as_tensorclass"} if name == "from_dataclass" else set()
    missing = set(list(method)[1:]) - set(list(function)[1:]) - only_method
    assert not missing or name == "from_consolidated"
    for key, parameter in function.items():
        if key in method and not (name == "from_module" and key == "lock"):
            assert parameter.default == method[key].default, key


def test_what_they_make():
    from collections import namedtuple

    x = torch.zeros(3)
    made = [
        tensordict.make_tensordict({"a": x}, b=x, batch_size=[3]),
        tensordict.from_dict({"a": x, "b": x}, batch_size=[3]),
        tensordict.from_any({"a": x, "b": x}, batch_size=[3]),
        tensordict.from_namedtuple(namedtuple("T", "a b")(x, x), batch_size=[3]),
        tensordict.from_struct_array(np.zeros(3, dtype=[("a", "f4"), ("b", "f4")])),
        tensordict.fromkeys(["a", "b"], 0.0).expand(3),
    ]
    for td in made:
        assert type(td) is TensorDict and td.batch_size == (3,) and set(td.keys()) == {"a", "b"}
    assert set(tensordict.from_tuple((x, x)).keys()) == {"0", "1"}
    assert tensordict.from_pytree([1]).to_pytree() == [1]
    assert tensordict.make_tensordict(a=x, auto_batch_size=True).batch_size == (3,)
    assert tensordict.make_tensordict(a=x, device="meta").is_meta


def test_modules_are_locked_by_default():
    linear = torch.nn.Linear(1, 1)
    assert tensordict.from_module(linear).is_locked and not TensorDict.from_module(linear).is_locked
    assert not tensordict.from_module(linear, lock=False).is_locked
    assert tensordict.from_modules(linear, linear).is_locked


def test_tables(tmp_path):
    pandas = pytest.importorskip("pandas", reason="data frames need the data extra")
    frame = pandas.DataFrame({"a": [1, 2]})
    frame.to_csv(tmp_path / "t.csv", index=False)
    frame.to_json(tmp_path / "t.json", orient="records", lines=True)
    for td in (
        tensordict.from_pandas(frame),
        tensordict.from_csv(tmp_path / "t.csv"),
        tensordict.from_json(tmp_path / "t.json", lines=True),
    ):
        assert td["a"].tolist() == [1, 2]


@pytest.mark.parametrize("module", ["base", "functional", "utils"])
def test_import_paths_that_users_type(module):
    import importlib

    loaded = importlib.import_module(f"tensordict.{module}")
    assert loaded.__all__ == sorted(loaded.__all__)
    for name in loaded.__all__:
        mine = getattr(loaded, name)
        assert getattr(tensordict, name, mine) is mine


def test_nested_dicts_are_checked_at_every_level():
    good = {"a": torch.zeros(2, 3), "n": {"b": torch.zeros(2), "m": {"c": torch.zeros(2, 5)}}}
    td = TensorDict(good, batch_size=[2], names=["rows"])
    assert td["n", "m"].batch_size == (2,) and td["n", "m"].names == ["rows"]
    assert td["n", "m", "c"] is good["n"]["m"]["c"]
    good["n"]["m"]["d"] = torch.zeros(3, 5)
    with pytest.raises(RuntimeError, match=r"\('n', 'm', 'd'\)"):
        TensorDict(good, batch_size=[2])
    mixed = {"n": {("x", "y"): torch.zeros(2), "v": 1.0, "w": {}}}
    td = TensorDict(mixed, batch_size=[])
    assert td["n", "x", "y"].shape == (2,) and td["n", "v"] == 1.0 and not len(td["n", "w"].keys())
