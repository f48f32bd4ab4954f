"""Sequences of batch sizes, in any order, under each kind of plan: one device's gradients, and no more graphs than
torch.compile makes of the plain model for the same batches.

Each rank takes its part of a batch, so that ranks have other sizes, and some of them none. What one rank compiles anew
another may know.
"""

import copy
from math import prod

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

from dtensor import DTensor, init_device_mesh
from dtensor.parallel import ColwiseParallel, RowwiseParallel, fully_shard, parallelize_module
from dtensor.testing import run_ranks

SEQUENCES = ((4, 5, 8, 3), (9, 1, 2, 6), (1, 9, 7, 7, 5), (3, 4, 1, 6, 2), (8, 6, 4, 2, 9))
PLANS = {
    "tp": {"tp": 2},
    "fsdp": {"shard": 2},
    "ddp": {"replicate": 2, "shard": 1},
    "2d": {"shard": 2, "tp": 2},
}
"""Axis -> ranks along it."""


class Model(nn.Module):
    """Tokens (batch, 8) to logits (batch, 8, 16)."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.mix = nn.Embedding(16, 16), nn.LayerNorm(16), nn.Linear(8, 8)
        self.up, self.down, self.out = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 16, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        x = x + self.mix(self.norm(x).transpose(1, 2)).transpose(1, 2)
        return self.out(x + self.down(F.gelu(self.up(x))))


def sharded(model, mesh):
    data = tuple(name for name in mesh.mesh_dim_names if name != "tp")
    if "tp" in mesh.mesh_dim_names:
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if data:
        for part in (model.up, model.down, model):
            fully_shard(part, mesh[data])
    return model


def gradients(model, tokens):
    model.zero_grad()
    out = model(tokens)
    F.cross_entropy(out.flatten(0, 1), tokens.flatten(), reduction="sum").backward()
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]


def compiled(model, inner, own):
    torch.compiler.reset()
    counters.clear()
    options = {"backend": "dtensor", "options": {"inner": inner}} if own else {"backend": "aot_eager"}
    return torch.compile(model, fullgraph=True, **options)


def batch_of(size):
    return torch.randint(0, 16, (size, 8), generator=torch.Generator().manual_seed(size))


def part_of(tokens, mesh):
    """This rank's rows, and among how many ranks the batch is divided."""
    index, parts = 0, 1
    for name in mesh.mesh_dim_names:
        if name != "tp":
            index, parts = index * mesh[name].size() + mesh.get_local_rank(name), parts * mesh[name].size()
    step = -(-len(tokens) // parts)
    return tokens[index * step : (index + 1) * step], parts


def check(rank, name, inner, sizes):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", tuple(PLANS[name].values()), mesh_dim_names=tuple(PLANS[name]))
    reference = Model()
    plain = compiled(copy.deepcopy(reference), inner, own=False)
    for size in sizes:
        gradients(plain, part_of(batch_of(size), mesh)[0])
    wanted = counters["stats"]["unique_graphs"]
    model = compiled(sharded(copy.deepcopy(reference), mesh), inner, own=True)
    for size in sizes:
        tokens, parts = part_of(batch_of(size), mesh)
        expected = gradients(reference, batch_of(size))
        for found, one in zip(gradients(model, tokens), expected, strict=True):
            found = found.full_tensor() if isinstance(found, DTensor) else found
            torch.testing.assert_close(found * parts, one, rtol=1e-4, atol=1e-4)
    graphs = counters["stats"]["unique_graphs"]
    assert graphs <= wanted, f"{graphs} graphs, of the plain model {wanted}"


def cases():
    for name in PLANS:
        for k, sizes in enumerate(SEQUENCES):
            for inner in ("aot_eager", "inductor"):
                yield pytest.param(name, inner, sizes, id=f"{name}-{k}-{inner}")


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "inner", "sizes"), list(cases()))
def test_any_order_of_batches(name, inner, sizes):
    run_ranks(check, prod(PLANS[name].values()), name, inner, sizes)
