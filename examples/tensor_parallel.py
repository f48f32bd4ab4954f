"""Layers divided over two ranks: torchrun --nproc-per-node 2 examples/tensor_parallel.py"""

import torch
import torch.nn.functional as F
from model import Model, batch

from dtensor import init_device_mesh
from dtensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

mesh = init_device_mesh("cpu", (-1,))
torch.manual_seed(0)
model = Model()
parallelize_module(model, mesh, {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()})
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
compiled = torch.compile(model, backend="dtensor")
for step in range(10):
    tokens, targets = batch(step)
    loss = F.cross_entropy(compiled(tokens).flatten(0, 1), targets.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step} loss {loss.item():.6f}", flush=True)
