"""Calling the command line, in this process and in one of its own."""

from __future__ import annotations

import subprocess
import sys

from tensordict.cli.main import main


def fails(capfd, *argv, status=1):
    """Call ``tensordict`` in-process; it must fail with exactly one line, which is returned."""
    assert main([str(arg) for arg in argv]) == status
    out = capfd.readouterr()
    lines = out.err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("tensordict")
    return lines[0]


def command(*argv, **kwargs):
    """Run ``python -m tensordict`` in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "tensordict", *map(str, argv)],
        capture_output=True,
        text=True,
        timeout=120,
        **kwargs,
    )
