"""A module imports its own layer or lower."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from ._project import ROOT, copy_of_package

pytest.importorskip("importlinter", reason="the layers contract is checked by import-linter")


def lint(path):
    """Run the contract of the project on the package found in a folder."""
    code = "import sys; from importlinter.cli import lint_imports_command; lint_imports_command()"
    return subprocess.run(
        [sys.executable, "-c", code, "--config", str(ROOT / "pyproject.toml"), "--no-cache"],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=path,
        env={**os.environ, "PYTHONPATH": str(path)},
    )


def test_the_contract_holds(tmp_path):
    out = lint(copy_of_package(tmp_path))
    assert out.returncode == 0, out.stdout[-3000:]
    assert "1 kept, 0 broken" in out.stdout


def test_an_upward_import_is_found(tmp_path):
    path = copy_of_package(tmp_path)
    (path / "tensordict/storage/bad.py").write_text("from ..placement import __name__\n")
    out = lint(path)
    assert out.returncode != 0
    assert "tensordict.storage.bad -> tensordict.placement" in out.stdout


def test_a_module_outside_the_layers_is_found(tmp_path):
    path = copy_of_package(tmp_path)
    (path / "tensordict/helpers.py").write_text("x = 1\n")
    out = lint(path)
    assert out.returncode != 0 and "helpers" in out.stdout


def test_imports_for_type_checking_are_free(tmp_path):
    path = copy_of_package(tmp_path)
    (path / "tensordict/storage/fine.py").write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..placement import x\n"
    )
    assert lint(path).returncode == 0
