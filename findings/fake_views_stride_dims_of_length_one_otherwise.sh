#!/usr/bin/env bash
# A view of a fake tensor has another stride for a dim of length 1 than the same view of a real tensor.
#
# torch 2.13.0, CPU. A transposed tensor of shape (1, 32, 64) is viewed as (1, 32, 8, 8). Of a real tensor, and of one on
# the meta device, the view has stride 32 in the dim of length 1; of a fake tensor 2048. No element lies elsewhere. But
# sums carry such a stride on, and kernels such as native_group_norm read it when they ask in which order memory is. So
# what a trace finds out about the memory of a value need not hold for the value when the traced graph runs.
# Seen:
#   real (32, 1, 256, 32)
#   fake (2048, 1, 256, 32)
#   meta (32, 1, 256, 32)
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q torch==2.13.0 numpy
cat > "$dir/run.py" <<'EOF'
import torch
from torch._subclasses import FakeTensorMode


def strides(x):
    return x.transpose(1, 2).view(1, 32, 8, 8).stride()


print("real", strides(torch.empty(1, 64, 32)))
with FakeTensorMode():
    print("fake", strides(torch.empty(1, 64, 32)))
print("meta", strides(torch.empty(1, 64, 32, device="meta")))
EOF
"$dir/venv/bin/python" "$dir/run.py" | tee "$dir/seen"
diff "$dir/seen" <(grep -E '^#   ' "$0" | sed 's/^#   //')
echo "as described"
