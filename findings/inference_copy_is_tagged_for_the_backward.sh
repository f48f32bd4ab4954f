#!/usr/bin/env bash
# AOTAutograd tags nodes of an inference graph, which has no backward, as those that must be in the backward.
#
# torch 2.13.0, CPU. A function that writes to an input is compiled under no_grad, by a backend of aot_autograd that keeps
# such writes in the graph. The copy_ that stands for the write has the meta entry partitioner_tag "must_be_in_backward":
# a pass that takes the tag as a sign of the backward half takes inference graphs for such. (In a training graph of the
# same function, where gradients are asked for, the copy_ is tagged "must_be_in_forward".)
# Seen:
#   inference: add_ -> copy_ must_be_in_backward
#   forward: add_ -> copy_ must_be_in_forward
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q torch==2.13.0 numpy
cat > "$dir/run.py" <<'EOF'
import torch
from torch._dynamo.backends.common import aot_autograd


def shown(which):
    def compiler(gm, example_inputs):
        for node in gm.graph.nodes:
            if node.target is torch.ops.aten.copy_.default:
                print(f"{which}: add_ -> copy_ {node.meta.get('partitioner_tag')}")
        return gm

    return compiler


backend = aot_autograd(
    fw_compiler=shown("forward"),
    bw_compiler=shown("backward"),
    inference_compiler=shown("inference"),
    keep_inference_input_mutations=True,
)


def function(x, w):
    x.add_(1)
    return x * w


with torch.no_grad():
    torch.compile(function, backend=backend)(torch.ones(3), torch.ones(3))
torch.compiler.reset()
torch.compile(function, backend=backend)(torch.ones(3), torch.ones(3, requires_grad=True)).sum().backward()
EOF
"$dir/venv/bin/python" "$dir/run.py" 2>/dev/null | tee "$dir/seen"
diff "$dir/seen" <(grep -E '^#   (inference|forward|backward):' "$0" | sed 's/^#   //')
echo "as described"
