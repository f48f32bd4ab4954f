#!/usr/bin/env bash
# Inductor computes the gradients of all weights after the whole backward, if backward is traced into the graph.
#
# torch 2.13.0, CPU. With torch._dynamo.config.trace_autograd_ops a function that calls backward() and clips gradients is
# one graph, which AOTAutograd takes for one of inference. Of these Inductor moves each computation right before its first
# use (config.reorder_for_locality), and a gradient is first used when all are clipped: what its product needs, two
# activations for each layer, is held until the end of the backward, and its reduction, if there is one, starts then.
# Shown is the order of products, w for the gradient of a weight and x for all others, of four linear layers.
# Seen:
#   forward and backward as two graphs: xxxx wxwxwxw
#   with backward and clipping in one graph: xxxxxxxwwww
#   the same, without reorder_for_locality: xxxxwxwxwxw
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q torch==2.13.0 numpy
cat > "$dir/run.py" <<'EOP'
import torch
from torch import nn
import torch._inductor.config as config

torch._dynamo.config.trace_autograd_ops = True
seen = []


def noted(graph):
    products = [n for n in graph.nodes if n.target is torch.ops.aten.mm.default]
    seen.append("".join(["w" if tuple(n.meta["val"].shape) == (8, 8) else "x" for n in products]))


config.post_grad_custom_pre_pass = noted


def order(name, whole):
    torch.compiler.reset()
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(8, 8, bias=False), nn.Tanh())])
    x = torch.randn(5, 8)
    seen.clear()

    def forward(x):
        return model(x).square().mean()

    def step(x):
        forward(x).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    if whole:
        torch.compile(step, fullgraph=True)(x)
    else:
        torch.compile(forward, fullgraph=True)(x).backward()
    print(f"{name}: {' '.join(seen)}")


order("forward and backward as two graphs", False)
order("with backward and clipping in one graph", True)
config.reorder_for_locality = False
order("the same, without reorder_for_locality", True)
EOP
"$dir/venv/bin/python" "$dir/run.py" 2>/dev/null | tee "$dir/seen"
diff "$dir/seen" <(sed -n '/^# Seen:/,/^set /p' "$0" | grep -E '^#   ' | sed 's/^#   //')
echo "as described"
