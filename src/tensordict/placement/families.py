"""Ready-made mixed precision for common families of models, by their naming conventions.

Each family names the leaves that are kept in float32 beyond norms and biases: what feeds an
exponential, a recurrence or a choice of experts.  The patterns follow the parameter names of the
public implementations (transformers, torchvision, state-spaces/mamba).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from .._keys import dotted
from .._typing import Path
from ..errors import EntryTypeError
from .policy import MIXED_FP32, CastPolicy
from .rules import Rule, Target, predicate

_NORMS = ("*norm*", "*.bias")

# Family: (patterns kept in float32, patterns of which all must match some leaf to guess it).
FAMILIES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "bert": (
        (*_NORMS, "*embeddings*", "*pooler*"),
        ("*attention.self.query*", "*attention.output*"),
    ),
    "gpt2": ((*_NORMS, "*.ln_*", "*wte*", "*wpe*"), ("*wte*", "*.c_attn.*")),
    "llama": ((*_NORMS, "*embed_tokens*"), ("*self_attn.q_proj*", "*mlp.gate_proj*")),
    "mixtral": (
        (*_NORMS, "*embed_tokens*", "*.gate.weight", "*router*"),
        ("*experts*", "*self_attn.q_proj*"),
    ),
    "t5": (
        (*_NORMS, "*layer_norm*", "shared*", "*relative_attention_bias*", "*.wo.*"),
        ("*SelfAttention.q*", "*relative_attention_bias*"),
    ),
    "vit": (
        (*_NORMS, "*pos_embed*", "*cls_token*", "*position_embeddings*"),
        ("*patch_embed*",),
    ),
    "whisper": (
        (*_NORMS, "*layer_norm*", "*embed_positions*", "*embed_tokens*", "*.conv1.*", "*.conv2.*"),
        ("*encoder.conv1*", "*encoder_attn*"),
    ),
    "mamba": ((*_NORMS, "*A_log", "*.D", "*dt_bias", "*dt_proj*"), ("*A_log", "*mixer*")),
    "resnet": (
        ("*.bn*", "*bn1*", "*.downsample.1.*", "*running_*", "fc.*"),
        ("layer1.0.conv1*", "*bn1*"),
    ),
}


def policy_for(
    family: str, param: torch.dtype | str = torch.bfloat16, **options: Any
) -> CastPolicy:
    """The mixed-precision policy of a family.

    Args:
        family: A name in `FAMILIES`, or ``"mixed"`` for the general one.
        param: The dtype of most leaves.
        **options: As of `CastPolicy`.

    Raises:
        EntryTypeError: (a ``ValueError``) for an unknown family.

    >>> policy = policy_for("mamba")
    >>> policy.dtype_for(("layers", "0", "mixer", "A_log"), torch.float32)
    torch.float32
    """
    if family == "mixed":
        patterns: tuple[str, ...] = MIXED_FP32
    elif family in FAMILIES:
        patterns = FAMILIES[family][0]
    else:
        raise EntryTypeError(
            f"There is no policy for {family!r}: expected one of {sorted([*FAMILIES, 'mixed'])}."
        )
    fp32 = Target(dtype=torch.float32)
    rules = [Rule(pattern, fp32, optional=True) for pattern in patterns]
    return CastPolicy(rules, default=param, **options)


def guess_family(paths: Iterable[Path]) -> str:
    """The family whose marks all occur among the paths, ``"mixed"`` when none does.

    >>> guess_family([("h", "0", "attn", "c_attn", "weight"), ("wte", "weight")])
    'gpt2'
    """
    texts = [dotted(path).lower() for path in paths]
    found = [
        name
        for name, (_, marks) in FAMILIES.items()
        if all(any(predicate(mark)(text) for text in texts) for mark in marks)
    ]
    # The family with the most specific marks: mixtral has those of llama's attention too.
    return max(found, key=lambda name: len("".join(FAMILIES[name][1])), default="mixed")
