from __future__ import annotations

import json
import os

import pytest
import torch

from tensordict import TensorDict
from tensordict.cli.main import main
from tensordict.cli.plan import plan_of, policy_of
from tensordict.placement import plan_moves
from tensordict.storage.named import from_safetensors
from tensordict.storage.weight_files import read_weights

from ._calls import fails
from ._weights import real_file, small_file, write_header


@pytest.fixture
def path(tmp_path):
    return small_file(tmp_path / "x.safetensors")


def test_the_table(path, capsys):
    assert main(["plan", str(path), "--dtype", "bf16", "--keep", "*norm*=fp32"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == f"{path}: 4 tensors, 224 B"
    rows = [line.split() for line in out[1:]]
    assert rows[0] == ["kind", "move", "leaves", "before", "after", "can", "lose"]
    assert ["alias", "float32", "cpu", "1", "32", "B", "32", "B"] in rows
    assert ["alias", "int64", "cpu", "1", "32", "B", "32", "B"] in rows
    assert "cast float32 -> bfloat16 2 160 B 80 B rounding".split() in rows
    assert ["total", "4", "224", "B", "144", "B"] in rows


def test_json_is_the_plan_of_the_loaded_file(path, capsys):
    assert main(["plan", str(path), "--dtype", "f16", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    td = from_safetensors(path)
    plan = plan_moves(td, policy=policy_of("f16", []))
    assert data["file"] == str(path) and data["plan"] == plan.to_json()
    assert plan.run(td)["layer", "0", "weight"].dtype is torch.float16


def test_without_options_nothing_moves(path, capsys):
    assert main(["plan", str(path)]) == 0
    assert "cast" not in capsys.readouterr().out.splitlines()[2]


def test_a_device_needs_not_be_there(path, capsys):
    assert main(["plan", str(path), "--device", "cuda:1"]) == 0
    assert "cpu -> cuda:1" in " ".join(capsys.readouterr().out.split())


def test_the_last_matching_pattern_wins_and_equals_signs_may_be_in_names(tmp_path):
    path = write_header(tmp_path / "x.safetensors", {"a=b": ("F32", [2], 8), "c": ("F32", [2], 8)})
    plan = plan_of(read_weights(path), policy_of("bf16", ["*=f16", "a=b=fp64"]))
    assert plan["a=b"].route.dtype is torch.float64 and plan["c"].route.dtype is torch.float16


def test_no_data_is_read_of_200_gib(tmp_path, capsys):
    nbytes = 200 << 30
    path = write_header(
        tmp_path / "hole.safetensors",
        {"big": ("F32", [nbytes // 8], nbytes // 2), "also": ("BF16", [nbytes // 4], nbytes // 2)},
    )
    assert path.stat().st_size > nbytes and path.stat().st_blocks * 512 < 1 << 20

    def bytes_read():
        with open("/proc/self/io") as file:
            return int(file.readline().split()[1])

    before = bytes_read()
    assert main(["plan", str(path), "--dtype", "bf16"]) == 0
    assert bytes_read() - before < 10_000
    with open("/proc/self/maps") as file:
        assert str(path) not in file.read()
    assert "200.0 GiB" in capsys.readouterr().out


def test_exact_counts_on_the_real_file(capsys):
    path = real_file()
    keep = ["*norm*=fp32", "*embed*=fp32", "*.bias=fp32"]
    assert main(["plan", str(path), "--dtype", "bf16", "--keep", *keep, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)["plan"]
    routes = [plan["routes"][number] for _, _, number in plan["leaves"]]
    dtypes = [(route["src"][1], route["dst"][1]) for route in routes]
    assert len(dtypes) == 104
    assert dtypes.count(("float32", "bfloat16")) == 37
    assert dtypes.count(("float32", "float32")) == 66
    assert dtypes.count(("int64", "int64")) == 1
    assert plan["nbytes"] == {"before": 90856960, "after": 69328384}


# --- bad input ---------------------------------------------------------------------------


def test_bad_options_are_one_line(path, capfd):
    assert "bf17" in fails(capfd, "plan", path, "--dtype", "bf17")
    assert "Did you mean" in fails(capfd, "plan", path, "--keep", "*norm*=fp31")
    assert "PATTERN=DTYPE" in fails(capfd, "plan", path, "--keep", "norm")
    assert "PATTERN=DTYPE" in fails(capfd, "plan", path, "--keep", "=fp32")
    assert "'gpu'" in fails(capfd, "plan", path, "--device", "gpu")


def test_a_pattern_that_matches_nothing_is_named_with_what_is_near(path, capfd):
    line = fails(capfd, "plan", path, "--keep", "nrom.weight=fp32", "*zzz*=fp32")
    assert "'nrom.weight' matches no leaf" in line and "norm.weight" in line and "'*zzz*'" in line


def test_bad_files_are_one_line(tmp_path, capfd, path):
    assert "No such file" in fails(capfd, "plan", tmp_path / "none")
    (tmp_path / "empty").mkdir()
    assert "no safetensors file" in fails(capfd, "plan", tmp_path / "empty")
    blob = path.read_bytes()
    bad = tmp_path / "bad.safetensors"
    for cut in (0, 7, 8, 50, len(blob) - 1):
        bad.write_bytes(blob[:cut])
        assert "as a safetensors file" in fails(capfd, "plan", bad)
    bad.write_bytes(b"\xff" * 100)
    assert "100000000 are allowed" in fails(capfd, "plan", bad)
    os.mkfifo(tmp_path / "pipe")
    assert "regular" in fails(capfd, "plan", tmp_path / "pipe")


def test_plans_of_headers_and_of_tensors_agree(path):
    plan = plan_of(read_weights(path), policy_of("bf16", []))
    real = TensorDict(
        {
            "layer": {"0": {"weight": torch.zeros(8, 4), "bias": torch.zeros(8)}},
            "norm": {"weight": torch.zeros(8)},
            "ids": torch.zeros(4, dtype=torch.int64),
        }
    )
    assert plan == plan_moves(real, policy=policy_of("bf16", []))
