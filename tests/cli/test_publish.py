"""The second half of the demo."""

import re

import pytest
import torch

from tensordict.cli import publish
from tensordict.cli.main import main
from tensordict.errors import TensorDictError
from tensordict.storage.safetensors import save_tensors


def test_the_plan_is_shown_with_what_it_saves(capsys):
    tensors = {"tall": torch.zeros(64, 8), "wide": torch.zeros(8, 64), "n": torch.arange(3)}
    plan = publish.plan_publication(tensors)
    assert plan.efficiency == 1.0
    assert plan.dst["n"].dtype is torch.int64
    publish.show_plan(plan)
    out = capsys.readouterr().out
    assert re.search(r"tall +64x8 +float32 -> bfloat16 +dim 0 over 2 +dim 0 over 2", out)
    assert re.search(r"wide +8x64 +float32 -> bfloat16 +dim 0 over 2 +dim 1 over 2", out)
    assert "saved against gathering whole tensors: 2.0 KiB" in out


def test_other_bits_are_an_error():
    plan = publish.plan_publication({"w": torch.zeros(4, 2)})
    good, bad = publish.Published(1.0, 1.0, 1), publish.Published(1.0, 1.0, 0, ("w",))
    with pytest.raises(TensorDictError, match="rank 3 differ: w"):
        publish.report(plan, [good, good, good, bad])


@pytest.mark.ranks
def test_a_file_is_published(tmp_path, capfd):
    tensors = {"w": torch.randn(30, 20), "b": torch.randn(30), "s": torch.tensor(1.0)}
    save_tensors(tensors, tmp_path / "x.safetensors")
    assert main(["demo", str(tmp_path / "x.safetensors")]) == 0
    out = capfd.readouterr().out
    assert "3 tensors bit-equal to slices of the whole on ranks 2 and 3" in out
