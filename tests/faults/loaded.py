"""One rank of a training run in which nothing is wrong, on a machine that is loaded.

python -m tests.faults.loaded RANK RANKS PORT STEPS
"""

import sys
import time
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from dtensor import Shard, distribute_tensor, init_device_mesh
from dtensor.parallel import ColwiseParallel, RowwiseParallel, fully_shard, parallelize_module


def main() -> None:
    rank, ranks, port, steps = map(int, sys.argv[1:5])
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks, timeout=timedelta(seconds=600)
    )
    mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("data", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    compiled = torch.compile(model, backend="dtensor", options={"inner": "aot_eager"})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = distribute_tensor(torch.ones(ranks, 4), mesh["data"], [Shard(0)])
    for number in range(steps):
        if rank == ranks - 1 and number == steps // 2:
            time.sleep(20)
        step = compiled if number % 2 else model
        loss = step(torch.full((4, 64), 1.0 + number)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert x.sum().item() == 4 * ranks
    print(f"done {steps}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
