#!/usr/bin/env bash
# A compiled step gives no gradients, and says nothing, if it meets the parameters in an optimizer before its backward.
#
# torch 2.13.0, CPU. With torch._dynamo.config.trace_autograd_ops a compiled function may call backward(), for which Dynamo
# looks for leaves among the inputs of its graph. Parameters that it first reaches through an optimizer, to clear their
# gradients, are attributes of the graph instead. It finds none, and leaves backward() out without an error or warning.
# Cleared through the model the same parameters are inputs, and get their gradients.
# Seen:
#   cleared by the optimizer, eager: a gradient
#   cleared by the optimizer, compiled: None
#   cleared by the model, compiled: a gradient
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q torch==2.13.0 numpy
cat > "$dir/run.py" <<'EOP'
import torch
from torch import nn

torch._dynamo.config.trace_autograd_ops = True


def gradient(name, clear, compiled):
    torch.compiler.reset()
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        clear(optimizer, model)
        model(x).square().mean().backward()

    (torch.compile(step, backend="eager", fullgraph=True) if compiled else step)(torch.ones(4, 3))
    print(f"{name}: {'a gradient' if model.weight.grad is not None else 'None'}")


def by_the_optimizer(optimizer, model):
    for p in optimizer.param_groups[0]["params"]:
        p.grad = None


def by_the_model(optimizer, model):
    for p in model.parameters():
        p.grad = None


gradient("cleared by the optimizer, eager", by_the_optimizer, False)
gradient("cleared by the optimizer, compiled", by_the_optimizer, True)
gradient("cleared by the model, compiled", by_the_model, True)
EOP
"$dir/venv/bin/python" "$dir/run.py" 2>/dev/null | tee "$dir/seen"
diff "$dir/seen" <(sed -n '/^# Seen:/,/^set /p' "$0" | grep -E '^#   ' | sed 's/^#   //')
echo "as described"
