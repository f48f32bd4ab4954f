"""One device, which the other examples begin with: python examples/one_device.py"""

import torch
import torch.nn.functional as F
from model import Model, batch

torch.manual_seed(0)
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
compiled = torch.compile(model)
for step in range(10):
    tokens, targets = batch(step)
    loss = F.cross_entropy(compiled(tokens).flatten(0, 1), targets.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step} loss {loss.item():.6f}", flush=True)
