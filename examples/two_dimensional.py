"""Layers divided over two ranks, parameters and batches over two times two: torchrun --nproc-per-node 4
examples/two_dimensional.py"""

import torch
import torch.nn.functional as F
from model import Model, batch

from dtensor import DTensor, Partial, init_device_mesh
from dtensor.parallel import ColwiseParallel, RowwiseParallel, fully_shard, parallelize_module

mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
torch.manual_seed(0)
model = Model()
parallelize_module(model, mesh["tp"], {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()})
fully_shard(model, mesh["dp"])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
compiled = torch.compile(model, backend="dtensor")
for step in range(10):
    tokens, targets = (x.chunk(2)[mesh.get_local_rank("dp")] for x in batch(step))
    loss = F.cross_entropy(compiled(tokens).flatten(0, 1), targets.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    mean = DTensor.from_local(loss.detach(), mesh["dp"], [Partial("avg")]).full_tensor()
    print(f"step {step} loss {mean.item():.6f}", flush=True)
