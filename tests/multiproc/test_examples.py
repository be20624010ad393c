"""The example program, started in both ways."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "rank_exchange.py"


@pytest.mark.parametrize(
    "start",
    [[], ["-m", "torch.distributed.run", "--nproc-per-node", "2"]],
    ids=["python", "torchrun"],
)
def test_rank_exchange(start):
    env = dict(os.environ, PYTHONPATH=str(ROOT / "src"), GLOO_SOCKET_IFNAME="lo")
    done = subprocess.run(
        [sys.executable, *start, str(SCRIPT)], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for text in (
        "rank 1: received 5 entries, the tie kept",
        "rank 1: received in place",
        "rank 0: swapped with rank 1",
        "rank 1: mean of the ranks 0.5",
    ):
        assert text in done.stdout
    assert done.stdout.count("rank 1 cannot receive from rank 0: 1 entry differs") == 2
