"""Data frames and table files, against pandas; Arrow tables, against pyarrow."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tensordict import TensorDict
from tensordict.ops.convert_arrow import from_arrow, to_arrow

pandas = pytest.importorskip("pandas", reason="data frames need the data extra")


def tree():
    return TensorDict(
        {
            "i": torch.arange(3),
            "f": torch.tensor([0.5, 1.5, -2.25], dtype=torch.float64),
            "b": torch.tensor([True, False, True]),
            "n": {"m": torch.arange(6).view(3, 2)},
            "s": ["u", "v", "w"],
        },
        [3],
    )


def same(a, b):
    assert a.batch_size == b.batch_size and set(a.keys(True, True)) == set(b.keys(True, True))
    for key, value in a.items(True, True):
        assert value.dtype == b[key].dtype and torch.equal(value, b[key]), key
    for key, value in a.non_tensor_items(True):
        assert value.tolist() == b.get(key).tolist(), key


def test_frames_round_trip():
    frame = tree().to_pandas(separator=".")
    assert list(frame.columns) == ["i", "f", "b", "n.m", "s"] and len(frame) == 3
    assert (
        frame["i"].dtype == np.int64
        and frame["b"].dtype == bool
        and list(frame["s"]) == ["u", "v", "w"]
    )
    same(TensorDict.from_pandas(frame, separator="."), tree())
    flat = TensorDict.from_pandas(frame)
    assert "n.m" in flat and flat.batch_size == (3,)


def test_options_of_reading():
    frame = pandas.DataFrame({"a": [1, 2], "b": [0.5, 1.5]})
    assert TensorDict.from_pandas(frame, dtype=torch.float16)["a"].dtype is torch.float16
    assert TensorDict.from_pandas(frame, batch_size=[]).batch_size == ()
    assert TensorDict.from_pandas(frame, auto_batch_size=True).batch_size == (2,)
    assert TensorDict.from_pandas(frame, device="meta")["a"].is_meta
    empty = TensorDict.from_pandas(frame.iloc[:0])
    assert empty.batch_size == (0,) and empty["a"].dtype is torch.int64


def test_missing_values():
    frame = pandas.DataFrame({"a": pandas.array([1, None], dtype="Int64"), "s": ["x", None]})
    td = TensorDict.from_pandas(frame)
    assert td["a"][0] == 1 and torch.isnan(td["a"][1]) and td["s"][0] == "x"


def test_tables_that_cannot_be_made():
    with pytest.raises(ValueError, match="separator"):
        tree().to_pandas()
    with pytest.raises(ValueError, match="unsqueeze"):
        TensorDict(a=1).to_pandas()
    with pytest.raises(ValueError, match=r"'n\.m'"):
        tree().to_csv("unused.csv", separator=".")
    frame = pandas.DataFrame([[1, 2]], columns=["a", "a"])
    with pytest.raises(KeyError, match="two columns"):
        TensorDict.from_pandas(frame)


def test_csv(tmp_path):
    td = tree().exclude("n")
    td.to_csv(tmp_path / "t.csv")
    same(TensorDict.from_csv(tmp_path / "t.csv"), td)
    td.to_csv(tmp_path / "t.csv", sep=";")
    same(TensorDict.from_csv(tmp_path / "t.csv", sep=";"), td)


@pytest.mark.parametrize("lines", [False, True])
def test_json(tmp_path, lines):
    tree().to_json(tmp_path / "t.json", separator=".", lines=lines)
    same(TensorDict.from_json(tmp_path / "t.json", separator=".", lines=lines), tree())


def test_parquet(tmp_path):
    pytest.importorskip("pyarrow", reason="Parquet needs the data extra")
    tree().to_parquet(tmp_path / "t.parquet", separator=".")
    same(TensorDict.from_parquet(tmp_path / "t.parquet", separator="."), tree())
    some = TensorDict.from_parquet(tmp_path / "t.parquet", columns=["i"])
    assert list(some.keys()) == ["i"]
    deep = TensorDict({"a": torch.arange(12).view(3, 2, 2)}, [3])
    deep.to_parquet(tmp_path / "d.parquet")
    same(TensorDict.from_parquet(tmp_path / "d.parquet"), deep)


def test_arrow_tables_round_trip():
    pa = pytest.importorskip("pyarrow", reason="Arrow tables need the data extra")
    td = tree()
    td["deep"] = torch.arange(12.0).view(3, 2, 2)
    table = to_arrow(td)
    assert table.num_rows == 3 and pa.types.is_struct(table.schema.field("n").type)
    assert table.column("deep").to_pylist() == td["deep"].tolist()
    same(from_arrow(table), td)
    same(from_arrow(table, copy=True), td)
    same(from_arrow(table.slice(1)), td[1:])
    assert from_arrow(table, device="meta")["i"].is_meta
    with pytest.raises(ValueError, match="unsqueeze"):
        to_arrow(TensorDict(a=1))


def test_arrow_memory():
    pa = pytest.importorskip("pyarrow", reason="Arrow tables need the data extra")
    table = pa.table({"a": np.arange(3), "b": [True, False, True]})
    address = table.column("a").chunk(0).buffers()[1].address
    assert from_arrow(table)["a"].data_ptr() == address
    assert from_arrow(table, copy=True)["a"].data_ptr() != address
    assert from_arrow(table.select(["a"]), copy=False)["a"].data_ptr() == address
    with pytest.raises(ValueError, match="'b'"):
        from_arrow(table, copy=False)
    two = pa.concat_tables([table, table])
    assert from_arrow(two)["a"].tolist() == [0, 1, 2, 0, 1, 2]
    with pytest.raises(ValueError, match="chunks"):
        from_arrow(two.select(["a"]), copy=False)


def test_arrow_nulls():
    pa = pytest.importorskip("pyarrow", reason="Arrow tables need the data extra")
    table = pa.table(
        {"i": [1, None], "f": [None, 2.0], "n": [{"x": 1}, {"x": None}], "s": ["a", None]}
    )
    with pytest.raises(ValueError, match="'i'"):
        from_arrow(table)
    td = from_arrow(table, nulls="fill", mask_key="mask")
    assert (
        td["i"].tolist() == [1, 0] and torch.isnan(td["f"][0]) and td["n", "x"].tolist() == [1, 0]
    )
    assert td["mask", "i"].tolist() == [True, False] and td["mask", "n", "x"].tolist() == [
        True,
        False,
    ]
    assert td["s"] == ["a", None]
    for kwargs in ({"nulls": "zz"}, {"mask_key": "m"}):
        with pytest.raises(ValueError, match="null"):
            from_arrow(table, **kwargs)


def test_missing_extras_say_what_to_install(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "pandas", None)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for call in (lambda: tree().to_pandas(separator="."), lambda: to_arrow(tree())):
        with pytest.raises(ImportError, match=r"tensordict\[data\]"):
            call()
