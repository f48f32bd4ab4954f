"""Train, save now and then, and go on after a crash, on as many ranks as there are then and sharded as they are then.

    torchrun --standalone --nproc-per-node 4 --max-restarts 3 examples/train.py --tp 2 --folder checkpoints
    torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/train.py --folder checkpoints --steps 40

torchrun starts all ranks anew when one of them dies. Each then reads the newest whole checkpoint; what a rank had begun
to write when it died is no checkpoint. Batches follow from the number of the step, so that the loss curve is that of a
run which nothing has interrupted.
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from model import Model, batch

from dtensor import Checkpoints, DTensor, Partial, init_device_mesh
from dtensor.parallel import ColwiseParallel, RowwiseParallel, fully_shard, parallelize_module

parser = argparse.ArgumentParser()
parser.add_argument("--folder", required=True, help="where checkpoints lie")
parser.add_argument("--steps", type=int, default=20, help="at which step the run ends")
parser.add_argument("--every", type=int, default=5, help="steps from one checkpoint to the next")
parser.add_argument("--tp", type=int, default=1, help="ranks that layers are divided over; batches are over the others")
parser.add_argument("--background", action="store_true", help="save while the training goes on")
parser.add_argument("--compile", action="store_true", help="compile the model")
given = parser.parse_args()

mesh = init_device_mesh("cpu", (-1, given.tp), mesh_dim_names=("dp", "tp"))
dp = mesh["dp"]
torch.manual_seed(0)
model = Model()
if given.tp > 1:
    parallelize_module(model, mesh["tp"], {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()})
fully_shard(model, dp)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
run = torch.compile(model, backend="dtensor") if given.compile else model
state = {"model": model, "optimizer": optimizer}


checkpoints, start = Checkpoints(given.folder, keep=3), 0
if checkpoints.newest() is not None:
    start = checkpoints.load(state)
    print(f"goes on after step {start}", flush=True)

for step in range(start + 1, given.steps + 1):
    tokens, targets = (x.chunk(dp.size())[dp.get_local_rank()] for x in batch(step))
    loss = F.cross_entropy(run(tokens).flatten(0, 1), targets.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    mean = DTensor.from_local(loss.detach(), dp, [Partial("avg")]).full_tensor()
    if dist.get_rank() == 0:
        print(f"step {step} loss {mean.item():.6f}", flush=True)
    if step % given.every == 0 or step == given.steps:
        save = checkpoints.save_async if given.background else checkpoints.save
        save(state, step)

checkpoints.wait()
dist.destroy_process_group()
