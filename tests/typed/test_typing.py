"""What type checkers see of typed classes (PEP 681)."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tensordict

SOURCE = Path(tensordict.__file__).parents[1]

HEAD = """\
import dataclasses
import torch
from torch import Tensor
from tensordict import TensorClass, tensorclass

class Sample(TensorClass):
    x: Tensor
    label: str = "none"
    tags: list[str] = dataclasses.field(default_factory=list)

class Longer(Sample, nocast=True):
    more: int = 0

@tensorclass
class Decorated:
    n: int
    s: str = ""

c = Sample(torch.zeros(3), label="a", batch_size=[3], device="cpu")
"""
EXPRESSIONS = {
    "c": "Sample",
    "c.label": "str",
    "c.tags": "list[str]",
    "c[0]": "Sample",
    "c + 1": "Sample",
    "c.clone()": "Sample",
    "c.reshape(1, 3)": "Sample",
    "Longer(torch.zeros(3), more=3).more": "int",
    "Longer(torch.zeros(3))": "Longer",
    "Decorated(3).n": "int",
    "Sample.from_tensordict(c.to_tensordict())": "Sample",
    "dataclasses.replace(c, label='b')": "Sample",
}
WRONG = [
    "Sample()",
    "Sample(torch.zeros(3), q=1)",
    "Sample(torch.zeros(3), label=3)",
    "c.label = 3",
    "c.no_such_field",
    "Decorated('three')",
]


def snippet(folder):
    lines = HEAD.splitlines()
    first = len(lines) + 1
    lines += [f"reveal_type({expression})" for expression in EXPRESSIONS]
    wrong = len(lines) + 1
    (folder / "snippet.py").write_text("\n".join([*lines, *WRONG]) + "\n")
    return first, wrong


def run(folder, *command):
    env = {**os.environ, "MYPYPATH": str(SOURCE)}
    if SOURCE.name == "site-packages":  # installed packages are found, and refused as a path
        env.pop("MYPYPATH")
    return subprocess.run(
        [sys.executable, "-m", *command],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=250,
    ).stdout


def short(name):
    return re.sub(r"(?:\w+\.)+(\w)", r"\1", name)


def test_mypy(tmp_path):
    pytest.importorskip("mypy", reason="the checker to be asked")
    first, wrong = snippet(tmp_path)
    (tmp_path / "mypy.ini").write_text(
        "[mypy]\nignore_missing_imports = True\n"
        "[mypy-torch.*,numpy.*]\nfollow_imports = skip\n"
        "[mypy-tensordict.*]\nignore_errors = True\n"
    )
    out = run(tmp_path, "mypy", "--config-file", "mypy.ini", "snippet.py")
    seen = dict(re.findall(r'snippet\.py:(\d+): note: Revealed type is "([^"]*)"', out))
    for i, (expression, expected) in enumerate(EXPRESSIONS.items()):
        assert short(seen[str(first + i)]) == expected, (expression, out)
    refused = {int(n) for n in re.findall(r"snippet\.py:(\d+): error", out)}
    assert refused == set(range(wrong, wrong + len(WRONG))), out


def test_basedpyright(tmp_path):
    pytest.importorskip("basedpyright", reason="the checker to be asked")
    first, wrong = snippet(tmp_path)
    settings = {
        "include": ["snippet.py"],
        "extraPaths": [str(SOURCE)],
        "typeCheckingMode": "standard",
    }
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    out = run(tmp_path, "basedpyright", "--pythonpath", sys.executable, "-p", ".", "--outputjson")
    seen, refused = {}, {}
    for item in json.loads(out)["generalDiagnostics"]:
        line = item["range"]["start"]["line"] + 1
        if item["severity"] == "information":
            seen[line] = re.search(r'is "([^"]*)"$', item["message"])[1]
        elif item["severity"] == "error":
            refused[line] = item["message"]
    assert seen == {first + i: expected for i, expected in enumerate(EXPRESSIONS.values())}
    assert set(refused) == set(range(wrong, wrong + len(WRONG))), refused
