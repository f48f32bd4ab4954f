#!/usr/bin/env bash
# torch.optim.Muon with nesterov=False divides its own momentum by its norm, if parameters are bfloat16.
#
# torch 2.13.0, CPU. After a step with gradient g the momentum is 0.1 g, here of norm 0.4. The matrix that is made
# orthogonal is cast to bfloat16, which copies nothing if it is that already, and is then divided in place; without
# nesterov it is the momentum itself, whose size is lost in each step.
# Seen:
#   torch.float32, nesterov=True: norm 0.4
#   torch.float32, nesterov=False: norm 0.4
#   torch.bfloat16, nesterov=True: norm 0.4
#   torch.bfloat16, nesterov=False: norm 1.0
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q torch==2.13.0 numpy
cat > "$dir/run.py" <<'EOP'
import torch

for dtype in (torch.float32, torch.bfloat16):
    for nesterov in (True, False):
        p = torch.nn.Parameter(torch.ones(4, 4, dtype=dtype))
        optimizer = torch.optim.Muon([p], momentum=0.9, nesterov=nesterov)
        p.grad = torch.ones(4, 4, dtype=dtype)
        optimizer.step()
        norm = optimizer.state[p]["momentum_buffer"].float().norm()
        print(f"{dtype}, nesterov={nesterov}: norm {norm:.1f}")
EOP
"$dir/venv/bin/python" "$dir/run.py" 2>/dev/null | tee "$dir/seen"
diff "$dir/seen" <(sed -n '/^# Seen:/,/^set /p' "$0" | grep -E '^#   ' | sed 's/^#   //')
echo "as described"
