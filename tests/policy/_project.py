"""What the policy tests share: where the project is, and Python in a process of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import tensordict

ROOT = Path(__file__).parents[2]
# The package under test: the installed one in a clean checkout, else the working tree.
PACKAGE = Path(tensordict.__file__).parent


def python(code: str, *args: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter that imports ``tensordict`` from ``path``."""
    env = {**os.environ, "PYTHONPATH": str(path or PACKAGE.parent)}
    return subprocess.run(
        [sys.executable, "-c", code, *args],
        capture_output=True,
        text=True,
        timeout=240,
        env=env,
        cwd=path or ROOT,
    )


def copy_of_package(to: Path) -> Path:
    """A copy of the package's source that a test may break; the folder to import it from."""
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(PACKAGE, to / "tensordict", ignore=ignore)
    return to
