"""Parameters and batches divided over two ranks: torchrun --nproc-per-node 2 examples/fully_sharded.py"""

import torch
import torch.nn.functional as F
from model import Model, batch

from dtensor import DTensor, Partial, init_device_mesh
from dtensor.parallel import fully_shard

mesh = init_device_mesh("cpu", (-1,))
torch.manual_seed(0)
model = Model()
fully_shard(model, mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
compiled = torch.compile(model, backend="dtensor")
for step in range(10):
    tokens, targets = (x.chunk(mesh.size())[mesh.get_local_rank()] for x in batch(step))
    loss = F.cross_entropy(compiled(tokens).flatten(0, 1), targets.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    mean = DTensor.from_local(loss.detach(), mesh, [Partial("avg")]).full_tensor()
    print(f"step {step} loss {mean.item():.6f}", flush=True)
