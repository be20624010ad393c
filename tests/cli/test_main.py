from __future__ import annotations

import os
import subprocess
import sys

import pytest

import tensordict
from tensordict.cli import main as main_module
from tensordict.cli.main import main, one_line

from ._calls import command, fails
from ._weights import small_file


def test_version_and_help(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"tensordict {tensordict.__version__}\n"
    assert main(["--help"]) == 0
    assert "plan" in capsys.readouterr().out


@pytest.mark.parametrize("argv", [[], ["nonsense"], ["plan"], ["plan", "--nonsense", "x"]])
def test_a_wrong_call_is_one_line_and_status_2(capfd, argv):
    assert "--help" in fails(capfd, *argv, status=2)


def test_python_m_is_the_command(tmp_path):
    out = command("plan", small_file(tmp_path / "x.safetensors"))
    assert out.returncode == 0 and out.stderr == "" and "4 tensors" in out.stdout
    out = command("plan", tmp_path / "missing.safetensors")
    assert out.returncode == 1 and out.stdout == ""
    assert out.stderr == f"tensordict: {tmp_path}/missing.safetensors: No such file or directory\n"


def test_any_error_is_one_line(capfd, monkeypatch):
    def broken(path):
        raise RuntimeError("first\n  second\x1b[2J")

    monkeypatch.setattr(main_module.plan, "read_weights", broken)
    assert fails(capfd, "plan", "x") == "tensordict: first; second?[2J"
    monkeypatch.setenv("TENSORDICT_TRACEBACK", "1")
    with pytest.raises(RuntimeError):
        main(["plan", "x"])


def test_interruption(capfd, monkeypatch):
    def interrupted(path):
        raise KeyboardInterrupt

    monkeypatch.setattr(main_module.plan, "read_weights", interrupted)
    assert fails(capfd, "plan", "x", status=130) == "tensordict: interrupted"


def test_a_reader_that_leaves_early(tmp_path):
    path = small_file(tmp_path / "x.safetensors")
    read, write = os.pipe()
    os.close(read)
    out = subprocess.run(
        [sys.executable, "-m", "tensordict", "plan", path, "--json"],
        stdout=write,
        stderr=subprocess.PIPE,
        timeout=120,
    )
    os.close(write)
    assert out.returncode == 1 and out.stderr == b""


def test_one_line_is_bounded():
    assert len(one_line(ValueError("x" * 10_000))) <= 600
    assert one_line(ValueError()) == "ValueError"
