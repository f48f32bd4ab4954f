"""A model as it is, over two by two ranks: torchrun --nproc-per-node 4 examples/global_view.py"""

import torch
import torch.nn.functional as F
from model import Model, batch

from dtensor import Shard, distribute_model, init_device_mesh

mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
torch.manual_seed(0)
model = Model()
columns, rows = {"tp": Shard(0)}, {"tp": Shard(1)}
plan = {"*.up.*": columns, "*.down.weight": rows}
distribute_model(model, mesh, plan, inputs={"dp": Shard(0)}, outputs={})
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
compiled = torch.compile(model, backend="dtensor")
for step in range(10):
    tokens, targets = batch(step)
    part = tokens.chunk(2)[mesh.get_local_rank("dp")]
    loss = F.cross_entropy(compiled(part).flatten(0, 1), targets.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step} loss {loss.item():.6f}", flush=True)
