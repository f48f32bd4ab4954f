#!/usr/bin/env bash
# Activation checkpointing of attention fails where backward is traced into the graph, with a text about random numbers.
#
# torch 2.13.0, CPU. With torch._dynamo.config.trace_autograd_ops a pass of AOTAutograd repeats the operators of
# checkpointed regions in the backward, and raises RuntimeError for those that may draw random numbers. It goes by a tag
# of the operator, which scaled_dot_product_attention has without dropout as well. Without the setting, where torch makes
# two graphs, the same block compiles. functorch.config.remat_using_tags_for_fwd_loss_bwd_graph=False turns the pass off.
# Seen:
#   attention: compiled
#   attention, checkpointed: RuntimeError
#   a linear layer, checkpointed: compiled
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q torch==2.13.0 numpy
cat > "$dir/run.py" <<'EOP'
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
import torch.nn.functional as F

torch._dynamo.config.trace_autograd_ops = True


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def tried(name, block, checkpointed):
    torch.compiler.reset()
    x = torch.randn(2, 4, 8)

    def step(x):
        y = checkpoint(block, x, use_reentrant=False) if checkpointed else block(x)
        y.square().mean().backward()

    try:
        torch.compile(step, backend="aot_eager", fullgraph=True)(x)
        found = "compiled"
    except Exception as error:
        found = "RuntimeError" if "does not support RNG ops" in str(error) else repr(error)
    print(f"{name}: {found}")


tried("attention", Block(), False)
tried("attention, checkpointed", Block(), True)
tried("a linear layer, checkpointed", nn.Linear(8, 8), True)
EOP
"$dir/venv/bin/python" "$dir/run.py" 2>/dev/null | tee "$dir/seen"
diff "$dir/seen" <(sed -n '/^# Seen:/,/^set /p' "$0" | grep -E '^#   ' | sed 's/^#   //')
echo "as described"
