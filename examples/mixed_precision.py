"""Convert the weights of a module to mixed precision by a plan, and write them to a file.

python examples/mixed_precision.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from tensordict import TensorDict, from_safetensors, to_safetensors
from tensordict.placement import CastPolicy, plan_moves


def main() -> None:
    model = torch.nn.TransformerEncoderLayer(d_model=64, nhead=4)
    weights = TensorDict(model.state_dict()).unflatten_keys(".")

    # Everything is decided here, and nothing is copied yet.
    policy = CastPolicy.mixed(torch.bfloat16).keeping({"linear2.*": torch.float16})
    plan = plan_moves(weights, policy=policy)
    print(plan.table())
    print(plan.explain(("linear2", "weight")))

    low = plan.run(weights)
    assert low["norm1", "weight"] is weights["norm1", "weight"]  # kept, so not even copied

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "low.safetensors"
        to_safetensors(low, path)
        print(f"{path.stat().st_size} bytes on disk, {weights.bytes()} before")
        back = from_safetensors(path)
        assert (back == low).all()


if __name__ == "__main__":
    main()
