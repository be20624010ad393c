"""Publish the weights of an FSDP2 trainer to tensor-parallel inference ranks.

    python examples/trainer_to_inference.py
    torchrun --nproc-per-node 4 examples/trainer_to_inference.py

Ranks 0 and 1 train a small transformer in float32 under ``fully_shard``.  Ranks 2 and 3 serve it
in bfloat16, tensor parallel, with fused ``qkv`` and ``gate_up`` weights and a padded vocabulary.
The plan is made once.  After each step the trainer publishes: every rank sends the slices that
the other side needs and nothing else, and no rank ever holds a whole fused tensor.

With ``--transformers`` the trainer is a Llama of that package instead of the one below.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.functional import scaled_dot_product_attention, silu

from tensordict.distributed import DoubleBuffer, reshard, share_layouts
from tensordict.distributed.testing import run_ranks
from tensordict.placement import ReshardPlan, layouts_of, plan_reshard, views

VOCAB, PADDED, WIDTH, HIDDEN, LAYERS = 61, 64, 32, 64, 2
HEADS, KV_HEADS, HEAD = 4, 2, 8
# Pieces in which gate and up alternate, so that every rank has as much of both.
GATES = 8


# --- the trainer's model -----------------------------------------------------------------------


def rotated(x: Tensor) -> Tensor:
    """Rotary position embedding of ``[batch, heads, length, HEAD]``."""
    at = torch.arange(x.shape[2], dtype=torch.float32)
    angle = at[:, None] * 10000.0 ** (-torch.arange(0, HEAD, 2, dtype=torch.float32) / HEAD)
    angle = torch.cat([angle, angle], 1)
    half = torch.cat([-x[..., HEAD // 2 :], x[..., : HEAD // 2]], -1)
    return (x.float() * angle.cos() + half.float() * angle.sin()).to(x.dtype)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of ``[batch, length, heads * HEAD]``, key and value heads shared."""
    q, k, v = (x.unflatten(-1, (-1, HEAD)).transpose(1, 2) for x in (q, k, v))
    times = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(times, 1) for x in (rotated(k), v))
    out = scaled_dot_product_attention(rotated(q), k, v, is_causal=True)
    return out.transpose(1, 2).flatten(2)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(WIDTH, HEADS * HEAD, bias=False)
        self.k_proj = nn.Linear(WIDTH, KV_HEADS * HEAD, bias=False)
        self.v_proj = nn.Linear(WIDTH, KV_HEADS * HEAD, bias=False)
        self.o_proj = nn.Linear(HEADS * HEAD, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.o_proj(attention(self.q_proj(x), self.k_proj(x), self.v_proj(x)))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.up_proj = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down_proj = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(WIDTH, eps=1e-6)
        self.self_attn = Attention()
        self.post_attention_layernorm = nn.RMSNorm(WIDTH, eps=1e-6)
        self.mlp = MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH, eps=1e-6)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Transformer(nn.Module):
    """Named as a Llama of ``transformers`` is."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Body()
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.lm_head(self.model(tokens))


def trainer_model(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "own":
        return Transformer()
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config)


# --- the engine that serves --------------------------------------------------------------------


class FusedLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(WIDTH, eps=1e-6)
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * HEAD, bias=False)
        self.out = nn.Linear(HEADS * HEAD, WIDTH, bias=False)
        self.mlp_norm = nn.RMSNorm(WIDTH, eps=1e-6)
        self.gate_up = nn.Linear(WIDTH, 2 * HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        # Of each group of heads: its queries, its key, its value.
        groups = self.qkv(self.attn_norm(x)).unflatten(-1, (-1, HEADS // KV_HEADS + 2, HEAD))
        q, k, v = groups.split([HEADS // KV_HEADS, 1, 1], -2)
        x = x + self.out(attention(q.flatten(2), k.flatten(2), v.flatten(2)))
        pieces = self.gate_up(self.mlp_norm(x)).unflatten(-1, (-1, 2, HIDDEN // GATES))
        gate, up = pieces.unbind(-2)
        return x + self.down((silu(gate) * up).flatten(2))


class Server(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(PADDED, WIDTH)
        self.layers = nn.ModuleList(FusedLayer() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH, eps=1e-6)
        self.head = nn.Linear(WIDTH, PADDED, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))[..., :VOCAB]


SERVER_STYLES = {
    "embed": RowwiseParallel(input_layouts=Replicate()),
    "layers.*.qkv": ColwiseParallel(),
    "layers.*.out": RowwiseParallel(),
    "layers.*.gate_up": ColwiseParallel(),
    "layers.*.down": RowwiseParallel(),
    "head": ColwiseParallel(output_layouts=Replicate()),
}

# How the server's tensors are made of the trainer's.
ATTN, MLP_ = "model.layers.{i}.self_attn.", "model.layers.{i}.mlp."
VIEWS = {
    "embed.weight": views.pad("model.embed_tokens.weight", PADDED),
    "head.weight": views.pad("lm_head.weight", PADDED),
    "norm.weight": views.leaf("model.norm.weight"),
    "layers.{i}.attn_norm.weight": views.leaf("model.layers.{i}.input_layernorm.weight"),
    "layers.{i}.mlp_norm.weight": views.leaf("model.layers.{i}.post_attention_layernorm.weight"),
    "layers.{i}.qkv.weight": views.interleave(
        [ATTN + "q_proj.weight", ATTN + "k_proj.weight", ATTN + "v_proj.weight"], KV_HEADS
    ),
    "layers.{i}.out.weight": views.leaf(ATTN + "o_proj.weight"),
    "layers.{i}.gate_up.weight": views.interleave(
        [MLP_ + "gate_proj.weight", MLP_ + "up_proj.weight"], GATES
    ),
    "layers.{i}.down.weight": views.leaf(MLP_ + "down_proj.weight"),
}


# --- both sides --------------------------------------------------------------------------------


def logits_of(model: nn.Module, tokens: Tensor) -> Tensor:
    out = model(tokens)
    return out if isinstance(out, Tensor) else out.logits


def train(rank: int, model: nn.Module, plan: ReshardPlan, tokens: Tensor) -> None:
    """Two steps, each followed by a publication."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(2):
        loss = nn.functional.cross_entropy(
            logits_of(model, tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        reshard(model, plan).wait()
        with torch.no_grad():
            expected = logits_of(model, tokens).float()
        if rank == 0:
            print(f"trainer: step {step}, loss {float(loss.detach()):.4f}, published", flush=True)
            for server in (2, 3):
                dist.send(expected, server)


def serve(rank: int, server: nn.Module, plan: ReshardPlan, tokens: Tensor) -> list[float]:
    """Take two publications; answer with each.  Returns the errors of the logits."""
    buffer = DoubleBuffer(plan, rank)
    errors = []
    for step in range(2):
        # The weights in use stay as they are until the new ones are all there.
        reshard(None, plan, out=buffer.back, partial=True).wait()
        fresh = buffer.swap().flatten_keys(".")
        with torch.no_grad():
            for name, parameter in server.named_parameters():
                local = getattr(parameter, "_local_tensor", parameter)
                local.copy_(fresh[name])
            answer = server(tokens).float()
        expected = torch.empty_like(answer)
        dist.recv(expected, 0)
        errors.append(float((answer - expected).abs().max() / expected.abs().max()))
        if rank == 2:
            text = f"server: version {step}, logits within {errors[-1]:.1%} of the trainer's"
            print(text, flush=True)
    return errors


def main(rank: int, size: int, kind: str = "own") -> list[float]:
    """One rank; the errors of the logits on ranks that serve, for the test."""
    assert size == 4, "this example has two trainers and two servers"
    meshes = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])]
    tokens = torch.randint(VOCAB, (2, 12), generator=torch.Generator().manual_seed(1))
    if rank < 2:
        model = trainer_model(kind)
        for layer in model.model.layers:
            fully_shard(layer, mesh=meshes[0])
        fully_shard(model, mesh=meshes[0], reshard_after_forward=True)
        mine = {"src": layouts_of(model, ranks=[0, 1])}
    else:
        model = Server().to(torch.bfloat16)
        parallelize_module(model, meshes[1], SERVER_STYLES)
        mine = {"dst": layouts_of(model, ranks=[2, 3])}
    both = share_layouts(mine)
    plan = plan_reshard(both["src"], both["dst"], views=VIEWS)
    plan.check_coverage()
    if rank == 0:
        print(plan.table(), plan.summary(), sep="\n", flush=True)
    if rank < 2:
        train(rank, model, plan, tokens)
        return []
    return serve(rank, model, plan, tokens)


if __name__ == "__main__":
    chosen = "transformers" if "--transformers" in sys.argv else "own"
    if "RANK" in os.environ:  # torchrun
        dist.init_process_group("gloo")
        main(dist.get_rank(), dist.get_world_size(), chosen)
        dist.destroy_process_group()
    else:
        run_ranks(main, 4, chosen)
