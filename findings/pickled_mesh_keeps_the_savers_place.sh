#!/usr/bin/env bash
# A DTensor of torch that rank 0 saved with torch.save loads on rank 1 without an error, as the shard of rank 0: the
# DeviceMesh in the pickle still has the coordinate of the rank that saved it.
#
# torch 2.13.0, gloo on the CPU, two ranks. `model.state_dict()` of a sharded model, saved by one rank and loaded by all,
# gives every rank that rank's part, and full_tensor() puts two copies of it together.
# Seen:
#   loaded on rank 1: coordinate (0,), local [0.0, 1.0]
#   full_tensor: [0.0, 1.0, 0.0, 1.0], saved [0.0, 1.0, 2.0, 3.0]
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q torch==2.13.0 numpy
cat > "$dir/run.py" <<'EOF'
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor


def work(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    saved = torch.arange(4.0)
    x = distribute_tensor(saved, mesh, [Shard(0)])
    if rank == 0:
        torch.save(x, f"{folder}/x.pt")
    dist.barrier()
    y = torch.load(f"{folder}/x.pt", weights_only=False)
    whole = y.full_tensor().tolist()
    if rank == 1:
        print(f"loaded on rank 1: coordinate {tuple(y.device_mesh.get_coordinate())}, local {y.to_local().tolist()}")
        print(f"full_tensor: {whole}, saved {saved.tolist()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(work, (sys.argv[1],), 2)
EOF
"$dir/venv/bin/python" "$dir/run.py" "$dir" | tee "$dir/seen"
diff "$dir/seen" <(grep -E '^#   (loaded|full)' "$0" | sed 's/^#   //')
echo "as described"
