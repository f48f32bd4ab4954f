"""A small Transformer that trains on whatever ranks there are, and goes on when some of them die.

    torchrun --standalone --nproc-per-node 4 --max-restarts 100 examples/elastic.py --folder checkpoints

    torchrun --nnodes 1:2 --nproc-per-node 2 --max-restarts 100 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \
        examples/elastic.py --folder checkpoints

torchrun starts the program anew after each failure. Then it makes the mesh that fits the ranks there are: layers over
pairs of ranks, parameters and batches over the rest. It reads the newest checkpoint, and trains on from there. Batches
follow from the number of the step, so the loss curve is that of a run which nothing has interrupted. On the same mesh
that holds to the last bit. docs/guides/running.md explains the rest.
"""

import argparse
import math
import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from model import LAYERS, SEQ, VOCAB, WIDTH, batch
from torch import nn

from dtensor import Checkpoints, DTensor, Partial, init_device_mesh
from dtensor.parallel import ColwiseParallel, RowwiseParallel, fully_shard, parallelize_module

HEADS = 4

PLAN = {
    "blocks.*.[qkv]": ColwiseParallel(),
    "blocks.*.up": ColwiseParallel(),
    "blocks.*.o": RowwiseParallel(),
    "blocks.*.down": RowwiseParallel(),
}


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each behind a norm and beside a residual connection."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norms[0](x)
        q, k, v = (f(h).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for f in (self.q, self.k, self.v))
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(h.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Transformer(nn.Module):
    """Tokens (batch, seq) -> logits (batch, seq, VOCAB)."""

    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, WIDTH), nn.Parameter(torch.randn(SEQ, WIDTH))
        self.blocks = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(x)


parser = argparse.ArgumentParser()
parser.add_argument("--folder", required=True, help="where checkpoints are; all hosts must see it")
parser.add_argument("--steps", type=int, default=20, help="at which step the run ends")
parser.add_argument("--every", type=int, default=5, help="steps from one checkpoint to the next")
parser.add_argument("--compile", action="store_true", help="compile the model")
parser.add_argument("--pause", type=float, default=0.0, help="seconds to wait in each step, to watch what happens")
given = parser.parse_args()

world = int(os.environ["WORLD_SIZE"])
tp = math.gcd(world, 2)
mesh = init_device_mesh("cpu", (world // tp, tp), mesh_dim_names=("dp", "tp"), timeout=timedelta(minutes=2))
dp = mesh["dp"]
torch.manual_seed(0)
model = Transformer()
if tp > 1:
    parallelize_module(model, mesh["tp"], PLAN)
fully_shard(model, dp)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
run = torch.compile(model, backend="dtensor") if given.compile else model
state = {"model": model, "optimizer": optimizer}


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


checkpoints, start = Checkpoints(given.folder, keep=3), 0
if checkpoints.newest() is not None:
    start = checkpoints.load(state)
say(f"{world} ranks go on after step {start}")

for step in range(start + 1, given.steps + 1):
    tokens, targets = (x.chunk(dp.size())[dp.get_local_rank()] for x in batch(step))
    loss = F.cross_entropy(run(tokens).flatten(0, 1), targets.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    mean = DTensor.from_local(loss.detach(), dp, [Partial("avg")]).full_tensor()
    say(f"step {step} loss {mean.item():.9g}")  # nine digits are all bits of a float32
    if step % given.every == 0 or step == given.steps:
        checkpoints.save(state, step)
    time.sleep(given.pause)

dist.destroy_process_group()
