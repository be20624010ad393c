"""A rank that has done its work ends with status 0, whatever gloo's threads still hold."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tensordict.distributed import at_exit

# Each child leaves a finished collective whose tensor only gloo's thread holds, keeps the lock
# long enough that this thread has to wait for it, and exits.
PROGRAM = """
import os, sys, torch, torch.distributed as dist
torch.set_num_threads(1)
{imports}
codes = []
for i in range(16):
    pid = os.fork()
    if pid == 0:
        dist.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{folder}/{{i}}")
        kept = dist.group.WORLD
        sys.setswitchinterval(1000)
        dist.all_reduce(torch.ones(3), async_op=True)
        n = 0
        while n < 300_000:
            n += 1
        sys.exit(0)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
print([c for c in codes if c])
"""


def bad_codes(imports: str, folder: Path) -> list[int]:
    program = PROGRAM.format(imports=imports, folder=folder)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    )
    return [int(code) for code in done.stdout.strip(" []\n").split(",") if code]


@pytest.mark.skipif(sys.platform != "linux", reason="thread names are read from /proc")
def test_ranks_end_well_although_a_gloo_thread_waits_for_the_lock(tmp_path: Path) -> None:
    assert bad_codes("import tensordict", tmp_path) == []


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="thread names are read from /proc")
def test_the_program_above_does_kill_ranks_without_us(tmp_path: Path) -> None:
    codes = bad_codes("", tmp_path)
    assert set(codes) <= {-6}
    assert codes, "torch no longer needs this: remove distributed/at_exit.py"


def test_threads_of_our_own_end_before_the_close_and_others_are_not_waited_for(monkeypatch):
    # An exchange is over before its thread is, and a thread that drops tensors while the
    # interpreter closes takes the process with it.
    monkeypatch.setattr(at_exit, "has_gloo_threads", lambda: False)
    monkeypatch.setattr(at_exit, "GRACE_S", 10.0)
    going_on, never = threading.Event(), threading.Event()
    other = threading.Thread(target=never.wait, daemon=True)
    other.start()
    thread = at_exit.in_background(lambda: going_on.wait(5), "drops tensors")
    threading.Timer(0.05, going_on.set).start()
    at_exit.let_threads_finish()
    assert not thread.is_alive()
    assert other.is_alive()
    never.set()
