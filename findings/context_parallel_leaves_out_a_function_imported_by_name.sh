#!/usr/bin/env bash
# Attention that a program imported by name is not parallel inside of torch's context_parallel: no error, another result.
#
# torch 2.13.0, CPU, 2 gloo ranks. The region replaces the attribute scaled_dot_product_attention of
# torch.nn.functional while it is entered. A module that wrote `from torch.nn.functional import
# scaled_dot_product_attention` before keeps the old one, which attends to this rank's part of the sequence alone.
# Seen, of results that context_parallel_unshard puts together again:
#   by attribute: as on one device
#   by name: another result, that of each part alone
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q torch==2.13.0 numpy
cat > "$dir/run.py" <<'EOF'
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import context_parallel_unshard
from torch.nn import functional as F
from torch.nn.functional import scaled_dot_product_attention

dist.init_process_group("gloo")
mesh, rank = init_device_mesh("cpu", (2,)), dist.get_rank()
torch.manual_seed(0)
whole = torch.randn(1, 2, 8, 4)
calls = {
    "by attribute": lambda x: F.scaled_dot_product_attention(x, x, x),
    "by name": lambda x: scaled_dot_product_attention(x, x, x),
}
wanted = F.scaled_dot_product_attention(whole, whole, whole)
for name, attend in calls.items():
    part = whole.clone()
    with context_parallel(mesh, buffers=[part], buffer_seq_dims=[2], no_restore_buffers={part}):
        found = attend(part)
        alone = torch.equal(found, torch.ops.aten.scaled_dot_product_attention(part, part, part))
        (together,) = context_parallel_unshard(mesh, [found], [2])
    said = "as on one device" if torch.allclose(together, wanted) else "another result"
    if rank == 0:
        print(f"{name}: {said}{', that of each part alone' if alone else ''}")
dist.destroy_process_group()
EOF
"$dir/venv/bin/torchrun" --standalone --nproc-per-node 2 "$dir/run.py" 2>/dev/null | tee "$dir/seen"
diff "$dir/seen" <(grep -E '^#   by ' "$0" | sed 's/^#   //')
echo "as described"
