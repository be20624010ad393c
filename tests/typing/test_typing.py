"""What type checkers see, and that the stub they read is the op table's."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tensordict
from tensordict.ops.pointwise import PointwiseMethods
from tensordict.ops.table import TABLE, Unary

ROOT = Path(__file__).parents[2]
SOURCE = Path(tensordict.__file__).parents[1]

# Expression -> the type that both checkers must see.
EXPRESSIONS = {
    "td.exp()": "TensorDict",
    "td.exp_()": "TensorDict",
    "td['a']": "Any",
    "td['n', 'b']": "Any",
    "td[0]": "TensorDict",
    "td[:2, None]": "TensorDict",
    "td + 1": "TensorDict",
    "1 - td": "TensorDict",
    "-td": "TensorDict",
    "td == td": "TensorDict",
    "td < 1.5": "TensorDict",
    "td.add(td, default=0)": "TensorDict",
    "td.clamp(min=0)": "TensorDict",
    "td.lerp(td, 0.5)": "TensorDict",
    "td.sum(0)": "TensorDict",
    "td.sum(reduce=True)": "Tensor",
    "td.softmax(0)": "TensorDict",
    "td.clone()": "TensorDict",
    "td.detach()": "TensorDict",
    "td.apply_(lambda x: x)": "TensorDict",
}
# Lines that must be refused.
WRONG = ["td.exp(1)", "td.add()", "td.no_such_method()", "td.sum(0, keepdims=True)"]


def snippet(folder):
    lines = ["import torch", "from tensordict import TensorDict"]
    lines.append("td = TensorDict({'a': torch.ones(3), 'n': {'b': torch.ones(3)}}, batch_size=[3])")
    lines += [f"reveal_type({expression})" for expression in EXPRESSIONS]
    lines += WRONG
    (folder / "snippet.py").write_text("\n".join(lines) + "\n")
    return 4, 4 + len(EXPRESSIONS)


def run(folder, *command):
    env = dict(os.environ)
    if SOURCE.name != "site-packages":  # installed packages are found, and refused as a path
        env["MYPYPATH"] = str(SOURCE)
    return subprocess.run(
        [sys.executable, "-m", *command],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=250,
    )


def test_mypy(tmp_path):
    pytest.importorskip("mypy", reason="the checker to be asked")
    first, wrong = snippet(tmp_path)
    # Without torch's own sources the run is short; its types read as Any.
    (tmp_path / "mypy.ini").write_text(
        "[mypy]\nignore_missing_imports = True\n"
        "[mypy-torch.*,numpy.*]\nfollow_imports = skip\n"
        "[mypy-tensordict.*]\nignore_errors = True\n"
    )
    out = run(tmp_path, "mypy", "--config-file", "mypy.ini", "snippet.py").stdout
    seen = dict(re.findall(r'snippet\.py:(\d+): note: Revealed type is "(?:\w+\.)*(\w+)"', out))
    for i, (expression, expected) in enumerate(EXPRESSIONS.items()):
        expected = "Any" if expected == "Tensor" else expected
        assert seen[str(first + i)] == expected, (expression, out)
    refused = {int(n) for n in re.findall(r"snippet\.py:(\d+): error", out)}
    assert refused == set(range(wrong, wrong + len(WRONG))), out


def test_basedpyright(tmp_path):
    pytest.importorskip("basedpyright", reason="the checker to be asked")
    first, wrong = snippet(tmp_path)
    (tmp_path / "pyrightconfig.json").write_text(
        json.dumps(
            {
                "include": ["snippet.py"],
                "extraPaths": [str(SOURCE)],
                "typeCheckingMode": "standard",
            }
        )
    )
    out = run(tmp_path, "basedpyright", "--pythonpath", sys.executable, "-p", ".", "--outputjson")
    found = json.loads(out.stdout)["generalDiagnostics"]
    seen, refused = {}, set()
    for item in found:
        line = item["range"]["start"]["line"] + 1
        if item["severity"] == "information":
            seen[line] = re.search(r'is "([^"]*)"$', item["message"])[1]
        else:
            refused.add(line)
    assert seen == {first + i: expected for i, expected in enumerate(EXPRESSIONS.values())}
    assert refused == set(range(wrong, wrong + len(WRONG)))


# --- generated files ---------------------------------------------------------------------


def tool(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["gen_stubs", "gen_op_docs"])
def test_generated_files_are_current(name, monkeypatch):
    monkeypatch.setattr(sys, "argv", [name, "--check"])
    assert tool(name).main() == 0


@pytest.mark.parametrize("name", ["gen_stubs", "gen_op_docs"])
def test_a_new_row_is_noticed(name, monkeypatch, capsys):
    module = tool(name)
    monkeypatch.setattr(module, "TABLE", (*TABLE, Unary("new_one", "A new one.")))
    monkeypatch.setattr(sys, "argv", [name, "--check"])
    assert module.main() == 1 and f"tools/{name}.py" in capsys.readouterr().out


def test_the_stub_has_the_methods_that_are_made():
    text = tool("gen_stubs").stub()
    declared = set(re.findall(r"    def (\w+)\(", text)) | {"__hash__", "__array_ufunc__"}
    special = {"__slots__", "__module__", "__doc__", "__qualname__"}
    special |= {"__firstlineno__", "__static_attributes__", "__annotations__"}
    assert declared == set(vars(PointwiseMethods)) - special
