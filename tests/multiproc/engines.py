"""A small model under the parallelisms of torch, for ranks of a gloo world."""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

VOCAB, WIDTH, HIDDEN = 13, 6, 12
# By name, for planning, and with styles, for doing it.
PLAN = {
    "embed": "rowwise",
    "blocks.*.gate": "colwise",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
    "head": "colwise",
}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        y = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.register_buffer("scale", torch.ones(3))

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def new_model(seed):
    torch.manual_seed(seed)
    return Model()


def styles():
    return {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "blocks.*.gate": ColwiseParallel(),
        "blocks.*.up": ColwiseParallel(),
        "blocks.*.down": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }


# For each kind: extents of a mesh of 4 or 2 ranks and what its axes do.
KINDS = {
    "fsdp": ((-1,), ("fsdp",)),
    "hsdp": ((2, -1), ("replicate", "fsdp")),
    "tp": ((-1,), ("tp",)),
    "fsdp over tp": ((-1, 2), ("fsdp", "tp")),
    "plain": ((-1,), ("replicate",)),
}


def extents(kind, ranks):
    shape = list(KINDS[kind][0])
    fixed = torch.Size([n for n in shape if n > 0]).numel()
    shape[shape.index(-1)] = len(ranks) // fixed
    return tuple(shape)


def engine(kind, ranks, seed=0):
    """The model on these ranks, ``None`` on others; all ranks of the world call this."""
    model = new_model(seed)
    shape, axes = extents(kind, ranks), KINDS[kind][1]
    mesh = DeviceMesh("cpu", torch.tensor(list(ranks)).view(shape), mesh_dim_names=axes)
    if mesh.get_coordinate() is None:
        return None
    if "tp" in axes:
        parallelize_module(model, mesh["tp"], styles())
    if "fsdp" in axes:
        part = mesh["fsdp"] if kind != "hsdp" else mesh
        for block in model.blocks:
            fully_shard(block, mesh=part)
        fully_shard(model, mesh=part)
    return model
