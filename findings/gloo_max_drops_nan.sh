#!/usr/bin/env bash
# dist.all_reduce with ReduceOp.MAX or MIN over gloo keeps a NaN of rank 0 and drops that of any other rank.
#
# torch 2.13.0, gloo on the CPU, two ranks. torch.maximum, torch.amax and torch.max propagate NaN, so a maximum that is
# taken on each rank and then reduced over ranks depends on which rank holds the NaN. A check of gradients by their
# largest absolute value (clip_grad_norm_ with norm_type=inf and error_if_nonfinite=True) finds only those of rank 0.
# Seen:
#   MAX, NaN on rank 0: nan
#   MAX, NaN on rank 1: 1.0
#   MIN, NaN on rank 0: nan
#   MIN, NaN on rank 1: 1.0
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


def work(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    for op in ("MAX", "MIN"):
        for holder in (0, 1):
            x = torch.tensor([float("nan") if rank == holder else 1.0])
            dist.all_reduce(x, getattr(dist.ReduceOp, op))
            if rank == 0:
                print(f"{op}, NaN on rank {holder}: {x.item()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(work, (sys.argv[1],), 2)
EOF
"$dir/venv/bin/python" "$dir/run.py" "$dir/store" | tee "$dir/seen"
diff "$dir/seen" <(grep -E '^#   M' "$0" | sed 's/^#   //')
echo "as described"
