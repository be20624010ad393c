"""The example that publishes a trainer's weights, started both ways."""

import os
import subprocess
import sys

import pytest
from examples import trainer_to_inference
from tests.policy._project import ROOT

from tensordict.distributed.testing import run_ranks

pytestmark = pytest.mark.ranks


def test_servers_answer_as_the_trainer_does():
    results = run_ranks(trainer_to_inference.main, 4, timeout=240)
    assert results[:2] == [[], []]
    for errors in results[2:]:
        # bfloat16 has 8 bits; two publications.
        assert len(errors) == 2 and max(errors) < 0.03


def test_a_llama_of_transformers():
    pytest.importorskip("transformers", reason="the trainer of this test is one of its models")
    results = run_ranks(trainer_to_inference.main, 4, "transformers", timeout=240)
    assert all(max(errors) < 0.03 for errors in results[2:])


@pytest.mark.slow
def test_it_starts_under_torchrun():
    path = ROOT / "examples" / "trainer_to_inference.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", str(path)]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    assert "server: version 1, logits within" in done.stdout
