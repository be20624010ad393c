from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import safetensors.torch
import torch

from tensordict.cli import converting
from tensordict.cli.convert import parse_size
from tensordict.cli.main import main
from tensordict.errors import CastError

from ._calls import command, fails
from ._weights import real_file, write_header


def tensors():
    generator = torch.Generator().manual_seed(0)
    return {
        "layer.0.weight": torch.randn(300, 200, generator=generator),
        "layer.0.bias": torch.randn(301, generator=generator),
        "norm.weight": torch.ones(7),
        "ids": torch.arange(5),
        "half": torch.randn(3, generator=generator).half(),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "mask": torch.tensor([True, False, True]),
    }


@pytest.fixture
def src(tmp_path):
    path = tmp_path / "src.safetensors"
    safetensors.torch.save_file(tensors(), path, metadata={"format": "pt"})
    return path


def expected(keep=("norm.weight",), dtype=torch.bfloat16, of=None):
    """What the library writes for the same tensors cast by hand."""
    source = tensors() if of is None else of
    cast = {
        k: x.to(dtype) if x.is_floating_point() and k not in keep else x for k, x in source.items()
    }
    return safetensors.torch.save(cast, {"format": "pt"})


OPTIONS = ["--dtype", "bf16", "--keep", "norm*=fp32"]


def run(*argv):
    return main(["convert", *map(str, argv)])


def test_the_file_is_the_one_that_the_library_writes(src, tmp_path, capfd):
    dst = tmp_path / "dst.safetensors"
    assert run(src, dst, *OPTIONS) == 0
    assert dst.read_bytes() == expected()
    assert sorted(os.listdir(tmp_path)) == ["dst.safetensors", "src.safetensors"]
    out = capfd.readouterr()
    assert "5 of 8 leaves move" in out.out and re.search(r"convert \[#+\] 235", out.err)


@pytest.mark.parametrize("piece", [4096, 1 << 14])
def test_pieces_of_any_size_give_the_same_file(src, tmp_path, monkeypatch, piece):
    monkeypatch.setattr("tensordict.cli.convert.piece_nbytes", lambda room: piece)
    dst = tmp_path / "dst.safetensors"
    assert run(src, dst, *OPTIONS) == 0
    assert dst.read_bytes() == expected()


def test_the_real_file(tmp_path):
    src, dst = real_file(), tmp_path / "dst.safetensors"
    keep = ["--keep", "*norm*=fp32", "*embed*=fp32", "*.bias=fp32"]
    assert run(src, dst, "--dtype", "bf16", *keep) == 0
    found = safetensors.torch.load_file(dst)
    for name, x in safetensors.torch.load_file(src).items():
        whole = not x.is_floating_point() or re.search("norm|embed|bias$", name.lower())
        assert torch.equal(found[name], x if whole else x.bfloat16()), name
    assert sum(x.dtype is torch.bfloat16 for x in found.values()) == 37


def sharded(folder):
    folder.mkdir()
    parts = {"m-1.safetensors": ["layer.0.weight", "ids"], "m-2.safetensors": []}
    parts["m-2.safetensors"] = [k for k in tensors() if k not in parts["m-1.safetensors"]]
    where = {}
    for file, names in parts.items():
        safetensors.torch.save_file(
            {k: tensors()[k] for k in names}, folder / file, metadata={"format": "pt"}
        )
        where.update(dict.fromkeys(names, file))
    index = {"metadata": {"total_size": 1, "more": "x"}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps({"torch_dtype": "float32", "hidden": 7}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "old.bin").write_text("weights in another format")
    return where


def test_a_sharded_set_with_its_index_and_configuration(tmp_path):
    where = sharded(tmp_path / "src")
    assert run(tmp_path / "src", tmp_path / "dst", *OPTIONS) == 0
    dst = tmp_path / "dst"
    assert sorted(os.listdir(dst)) == [
        "config.json",
        "m-1.safetensors",
        "m-2.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
    ]
    sizes = 0
    for file in ("m-1.safetensors", "m-2.safetensors"):
        part = {k: x for k, x in tensors().items() if where[k] == file}
        assert (dst / file).read_bytes() == expected(of=part)
        sizes += sum(x.nbytes for x in safetensors.torch.load_file(dst / file).values())
    index = json.loads((dst / "model.safetensors.index.json").read_text())
    assert index == {"metadata": {"total_size": sizes, "more": "x"}, "weight_map": where}
    assert json.loads((dst / "config.json").read_text()) == {"torch_dtype": "bfloat16", "hidden": 7}
    assert sorted(os.listdir(tmp_path)) == ["dst", "src"]


def test_a_dry_run_is_the_plan_and_writes_nothing(src, tmp_path, capsys):
    assert run(src, tmp_path / "dst.safetensors", *OPTIONS, "--dry-run") == 0
    dry = capsys.readouterr().out
    assert main(["plan", str(src), *OPTIONS]) == 0
    assert capsys.readouterr().out.endswith(dry) and os.listdir(tmp_path) == ["src.safetensors"]


# --- what is lost ------------------------------------------------------------------------


@pytest.fixture
def risky(tmp_path):
    path = tmp_path / "risky.safetensors"
    safetensors.torch.save_file(
        {
            "big": torch.tensor([1e6, 1.0, -1e6]),
            "small": torch.tensor([1e-9, 1.0]),
            "fine": torch.tensor([0.1, 1.0]),
        },
        path,
    )
    return path


def test_every_lossy_tensor_is_reported(risky, tmp_path, capfd):
    dst = tmp_path / "dst.safetensors"
    assert run(risky, dst, "--dtype", "f16") == 0
    err = capfd.readouterr().err
    assert re.search(r"'big' +2 of 3 overflow", err)
    assert re.search(r"'small' +1 of 2 underflow", err)
    assert "'fine'" not in err and dst.exists()


def test_error_writes_nothing_and_names_all(risky, tmp_path, capfd):
    assert run(risky, tmp_path / "dst.safetensors", "--dtype", "f16", "--on-lossy", "error") == 1
    err = capfd.readouterr().err
    assert "'big'" in err and "'small'" in err
    assert err.splitlines()[-1].endswith("dst.safetensors was not written: 2 tensors lose values")
    assert os.listdir(tmp_path) == ["risky.safetensors"]


def test_allow_does_not_look(risky, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(converting, "measure_cast", None)
    assert run(risky, tmp_path / "dst.safetensors", "--dtype", "f16", "--on-lossy", "allow") == 0
    assert "'big'" not in capfd.readouterr().err


# --- interruption ------------------------------------------------------------------------


class Stop(BaseException):
    pass


def stop_after(monkeypatch, n):
    """Let the conversion stop after n tensors; counts those that are read."""
    real, seen = converting._Pieces.convert, []

    def convert(self, source, entry, *rest):
        if len(seen) == n:
            raise Stop
        seen.append(entry.name)
        return real(self, source, entry, *rest)

    monkeypatch.setattr(converting._Pieces, "convert", convert)
    monkeypatch.setattr(converting, "_JOURNAL_EVERY", -1.0)
    return seen


@pytest.mark.parametrize("stop", range(9))
def test_an_interrupted_run_is_taken_up(src, tmp_path, monkeypatch, stop):
    dst = tmp_path / "dst.safetensors"
    with monkeypatch.context() as patch:
        before = stop_after(patch, stop)
        if stop < 8:
            with pytest.raises(Stop):
                run(src, dst, *OPTIONS)
            assert not dst.exists()
    with monkeypatch.context() as patch:
        after = stop_after(patch, -1)
        assert run(src, dst, *OPTIONS) == 0
    assert dst.read_bytes() == expected()
    assert sorted(before + after) == sorted(tensors())  # none was read twice
    assert sorted(os.listdir(tmp_path)) == ["dst.safetensors", "src.safetensors"]


def test_a_half_written_tensor_is_written_again(src, tmp_path, monkeypatch):
    dst = tmp_path / "dst.safetensors"
    with monkeypatch.context() as patch:
        stop_after(patch, 2)
        with pytest.raises(Stop):
            run(src, dst, *OPTIONS)
    with open(tmp_path / ".dst.safetensors.part" / "src.safetensors", "ab") as file:
        file.write(b"half of a tensor")
    assert run(src, dst, *OPTIONS) == 0
    assert dst.read_bytes() == expected()


@pytest.mark.parametrize("change", ["options", "source", "journal", "output"])
def test_what_does_not_fit_is_started_over(src, tmp_path, monkeypatch, change):
    dst, part = tmp_path / "dst.safetensors", tmp_path / ".dst.safetensors.part"
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        with pytest.raises(Stop):
            run(src, dst, "--dtype", "f16" if change == "options" else "bf16", *OPTIONS[2:])
    if change == "source":
        safetensors.torch.save_file(tensors(), src, metadata={"format": "pt"})
    if change == "journal":
        (part / "journal.json").write_text('{"key": 3}')
    if change == "output":
        os.truncate(part / "src.safetensors", 10)
    with monkeypatch.context() as patch:
        seen = stop_after(patch, -1)
        assert run(src, dst, *OPTIONS) == 0
    assert len(seen) == 8 and dst.read_bytes() == expected()


def test_the_losses_before_the_interruption_are_reported_too(risky, tmp_path, monkeypatch, capfd):
    dst = tmp_path / "dst.safetensors"
    with monkeypatch.context() as patch:
        stop_after(patch, 1)
        with pytest.raises(Stop):
            run(risky, dst, "--dtype", "f16")
    capfd.readouterr()
    assert run(risky, dst, "--dtype", "f16") == 0
    err = capfd.readouterr().err
    assert "'big'" in err and "'small'" in err


def test_two_at_once_are_refused(src, tmp_path, capfd, monkeypatch):
    dst = tmp_path / "dst.safetensors"
    real, lines = converting._Pieces.convert, []

    def convert(self, *args):
        if not lines:
            lines.append(fails(capfd, "convert", src, dst, *OPTIONS))
        return real(self, *args)

    monkeypatch.setattr(converting._Pieces, "convert", convert)
    assert run(src, dst, *OPTIONS) == 0
    assert "another conversion" in lines[0] and dst.read_bytes() == expected()


@pytest.mark.ranks
def test_killed_and_run_again(tmp_path):
    nbytes = 600 << 20
    src = write_header(
        tmp_path / "src.safetensors",
        {"a": ("F32", [nbytes // 8], nbytes // 2), "b": ("F32", [nbytes // 8], nbytes // 2)},
    )
    dst = tmp_path / "dst.safetensors"
    argv = [sys.executable, "-m", "tensordict", "convert", src, dst, "--dtype", "f16"]
    victim = subprocess.Popen(argv, stderr=subprocess.PIPE, stdout=subprocess.PIPE)
    out = tmp_path / ".dst.safetensors.part" / "src.safetensors"
    end = time.monotonic() + 60
    while time.monotonic() < end and not (out.exists() and out.stat().st_size > 1 << 20):
        time.sleep(0.01)
    victim.send_signal(signal.SIGKILL)
    victim.communicate()
    assert victim.returncode == -signal.SIGKILL and not dst.exists()
    assert command("convert", src, dst, "--dtype", "f16").returncode == 0
    assert dst.stat().st_size > nbytes // 2 and sorted(os.listdir(tmp_path)) == [dst.name, src.name]


# --- memory ------------------------------------------------------------------------------

# Not getrusage: its maximum counts the process that forked this one, too.
PEAK = """
import re, sys
from tensordict.cli.main import main
status = main(sys.argv[1:])
with open("/proc/self/status") as file:
    print(int(re.search(r"VmHWM:\\s+(\\d+) kB", file.read())[1]) * 1024)
sys.exit(status)
"""


def peak(*argv):
    out = subprocess.run(
        [sys.executable, "-c", PEAK, *map(str, argv)], capture_output=True, text=True, timeout=280
    )
    assert out.returncode == 0, out.stderr
    return int(out.stdout.split()[-1])


@pytest.mark.parametrize(("gib", "room"), [(0.25, 92), pytest.param(5, 28, marks=pytest.mark.slow)])
def test_the_memory_limit_holds(tmp_path, gib, room):
    nbytes = int(gib * (1 << 30))
    src = write_header(tmp_path / "src.safetensors", {"one": ("F32", [nbytes // 4], nbytes)})
    dst = tmp_path / "dst.safetensors"
    # What torch alone takes differs by hundreds of MiB between its builds.
    limit = (peak("convert", src, dst, "--dtype", "f16", "--dry-run") >> 20) + room
    used = peak("convert", src, dst, "--dtype", "f16", "--max-memory", f"{limit}MiB")
    assert used < limit << 20
    dst.unlink()


def test_too_little_memory_is_told(src, tmp_path, capfd):
    line = fails(capfd, "convert", src, tmp_path / "dst.safetensors", "--max-memory", "1MiB")
    assert re.search(r"needs \d+ MiB more", line)


# --- bad input ---------------------------------------------------------------------------


def test_bad_input_is_one_line(src, tmp_path, capfd):
    dst = tmp_path / "dst.safetensors"
    dst.write_bytes(b"old")
    assert "--overwrite" in fails(capfd, "convert", src, dst)
    assert "there is no folder" in fails(capfd, "convert", src, tmp_path / "no" / "dst")
    assert "No such file" in fails(capfd, "convert", tmp_path / "none", tmp_path / "x")
    assert "as a size" in fails(capfd, "convert", src, tmp_path / "x", "--max-memory", "lots")
    assert "matches no leaf" in fails(capfd, "convert", src, tmp_path / "x", "--keep", "zz=f16")
    (tmp_path / "folder").mkdir()
    assert "is a folder" in fails(capfd, "convert", src, tmp_path / "folder", "--overwrite")
    blob = src.read_bytes()
    src.write_bytes(blob[:-1])
    assert "cut short" in fails(capfd, "convert", src, tmp_path / "x")
    assert dst.read_bytes() == b"old"


def test_a_cast_that_torch_does_not_have_is_told_first(tmp_path, capfd):
    src = write_header(
        tmp_path / "src.safetensors", {"q": ("F4", [4, 8], 16), "w": ("F32", [2], 8)}
    )
    line = fails(capfd, "convert", src, tmp_path / "dst.safetensors", "--dtype", "bf16")
    assert "no cast from torch.float4" in line and os.listdir(tmp_path) == ["src.safetensors"]
    assert (
        run(src, tmp_path / "dst.safetensors", "--dtype", "bf16", "--keep", "q=float4_e2m1fn_x2")
        == 0
    )


def test_overwriting_and_converting_in_place(src, tmp_path):
    assert run(src, src, *OPTIONS, "--overwrite") == 0
    assert src.read_bytes() == expected()
    sharded(tmp_path / "set")
    assert run(tmp_path / "set", tmp_path / "set", *OPTIONS, "--overwrite") == 0
    found = safetensors.torch.load_file(tmp_path / "set" / "m-1.safetensors")
    assert found["layer.0.weight"].dtype is torch.bfloat16
    assert sorted(os.listdir(tmp_path)) == ["set", "src.safetensors"]


def test_sizes():
    assert [parse_size(x) for x in ("0", "1k", "1.5 MiB", "2gb")] == [0, 1024, 3 << 19, 2 << 30]
    for text in ("", "MiB", "-1", "1 x", "1e3"):
        with pytest.raises(CastError):
            parse_size(text)
