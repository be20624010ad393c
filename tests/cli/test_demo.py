from __future__ import annotations

import os
import re
import signal
import socket

import pytest
import torch

from tensordict.cli import demo, rank_side, source
from tensordict.cli.main import main
from tensordict.cli.rank_side import same_bits
from tensordict.storage.safetensors import save_tensors

from ._calls import command, fails
from ._weights import real_file

pytestmark = pytest.mark.ranks


@pytest.fixture
def path(tmp_path):
    tensors = {
        "layer.weight": torch.randn(300, 200),
        "layer.bias": torch.full((300,), float("nan")),
        "embed.weight": torch.randn(50, 20),
        "ids": torch.arange(7),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "half": torch.randn(3).half(),
    }
    save_tensors(tensors, tmp_path / "x.safetensors")
    return tmp_path / "x.safetensors"


def verdict(out):
    last = out.splitlines()[-1]
    found = re.fullmatch(
        r"(\d+) of (\d+) leaves bit-equal on rank 1: (.*) in [\d.]+ ms, [\d.]+x one flat send", last
    )
    assert found, last
    return int(found[1]), int(found[2]), found[3]


def test_a_file_arrives_bit_equal(path, capfd):
    assert main(["demo", str(path)]) == 0
    out = capfd.readouterr()
    assert verdict(out.out) == (7, 7, "122.3 KiB")
    assert re.search(r"cast +float32 -> bfloat16 +3 ", out.out)
    assert re.fullmatch(r"rank 0 -> rank 1 \[#{32}\] 122.3 KiB of 122.3 KiB\n", out.err)


def test_the_real_file_ends_with_bit_equal_and_its_figures():
    out = command("demo", real_file())
    assert out.returncode == 0, out.stderr
    assert verdict(out.stdout) == (104, 104, "66.1 MiB")
    assert re.search(r"cast +float32 -> bfloat16 +37 +41.1 MiB +20.5 MiB", out.stdout)
    assert re.search(r"alias +float32 cpu +66 +45.6 MiB +45.6 MiB", out.stdout)
    assert re.search(r"alias +int64 cpu +1 ", out.stdout)


def test_without_the_model_a_small_one_is_made(monkeypatch, capfd):
    monkeypatch.setattr(source, "MODEL_PACKAGE", "no_such_package")
    assert main(["demo"]) == 0
    out = capfd.readouterr().out
    equal, leaves, _ = verdict(out)
    assert "using a small one" in out and equal == leaves == len(source.small_transformer())


def expect_other_bits(rank, emit, path, policy, plan_hash):
    """The real task, but rank 1 expects other bits in one leaf."""
    if rank == 1:
        load = source.load

        def other(path):
            td = load(path)
            td["layer", "weight"] = td["layer", "weight"] + 1
            return td

        source.load = other
    return EXCHANGE(rank, emit, path, policy, plan_hash)


def die(rank, emit, path, policy, plan_hash):
    """The real task, but rank 1 dies before it receives."""
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return EXCHANGE(rank, emit, path, policy, plan_hash)


EXCHANGE = rank_side.exchange


def test_other_bits_are_found(path, capfd, monkeypatch):
    monkeypatch.setattr(demo.rank_side, "exchange", expect_other_bits)
    assert main(["demo", str(path)]) == 1
    last = capfd.readouterr().err.splitlines()[-1]
    assert last == "tensordict: 1 of 7 leaves arrived with other bits: layer.weight"


def test_a_rank_that_dies_is_one_line(path, capfd, monkeypatch):
    monkeypatch.setattr(demo.rank_side, "exchange", die)
    assert fails(capfd, "demo", path) == "tensordict: rank 1 died: killed by SIGKILL"


def test_a_file_that_changes_under_way_is_one_line(path, capfd, monkeypatch):
    real = demo.run_ranks

    def swap(*args, **kwargs):
        save_tensors({"other": torch.zeros(3)}, path)
        return real(*args, **kwargs)

    monkeypatch.setattr(demo, "run_ranks", swap)
    assert "the file changed" in fails(capfd, "demo", path)


def test_bad_input_is_one_line(path, tmp_path, capfd):
    assert "No such file" in fails(capfd, "demo", tmp_path / "none.safetensors")
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(path.read_bytes()[:-1])
    assert "cut short" in fails(capfd, "demo", cut)
    save_tensors({}, tmp_path / "empty.safetensors")
    assert main(["demo", str(tmp_path / "empty.safetensors")]) == 1
    assert "no tensors" in capfd.readouterr().err
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        line = fails(capfd, "demo", path, "--port", taken.getsockname()[1])
    assert "in use" in line
    assert "invalid int value" in fails(capfd, "demo", path, "--port", "x", status=2)


def test_bits_are_compared_and_not_values():
    nan = torch.tensor([float("nan")])
    assert same_bits(nan, nan.clone()) and not same_bits(torch.zeros(1), -torch.zeros(1))
    assert not same_bits(torch.zeros(2), torch.zeros(1, 2))
    assert not same_bits(torch.zeros(2), torch.zeros(2).half())


def test_the_small_model_is_the_same_in_every_process():
    one, two = source.small_transformer(), source.small_transformer()
    assert all(same_bits(one[name], two[name]) for name in one)
