#!/usr/bin/env bash
# A tensor subclass sees more detaches in AOTAutograd's second trace of a checkpointed function than in its first.
#
# torch 2.13.0, CPU. AOTAutograd traces a function twice: for what it has to know beforehand, and for the graph. The
# subclass is torch's own TwoTensor, whose __torch_dispatch__ counts what it is called for while a function compiles. Both
# traces of a plain function dispatch the same operators forward. Under torch.utils.checkpoint the second dispatches one
# aten.detach more for each value that is made, which the program does not have. So a subclass that counts on operators
# coming in one order in both loses its place.
# Seen:
#   plain: exp 2 and 2, detach 3 and 3
#   checkpointed: exp 2 and 2, detach 3 and 6
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q torch==2.13.0 numpy
cat > "$dir/run.py" <<'EOF'
from collections import Counter

import torch
from torch._functorch import aot_autograd
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

dispatch, capture = TwoTensor.__torch_dispatch__.__func__, aot_autograd.aot_stage1_graph_capture
traces = []


@classmethod
def counting(cls, func, types, args=(), kwargs=None):
    traces[-1][func.__name__] += 1
    return dispatch(cls, func, types, args, kwargs)


def second(*args, **kwargs):
    traces.append(Counter())
    try:
        return capture(*args, **kwargs)
    finally:
        traces.append(Counter())


def block(x, w):
    return torch.sin(torch.exp(x @ w))


def checkpointed(x, w):
    return checkpoint(block, x, w, use_reentrant=False)


TwoTensor.__torch_dispatch__ = counting
aot_autograd.aot_stage1_graph_capture = second
for name, function in (("plain", block), ("checkpointed", checkpointed)):
    torch.compiler.reset()
    traces[:] = [Counter()]
    x, w = (TwoTensor(torch.ones(4, 4), torch.ones(4, 4)) for _ in range(2))
    torch.compile(function, backend="aot_eager")(x, w.requires_grad_())
    exp, detach = ([trace[f"{op}.default"] for trace in traces[:2]] for op in ("exp", "detach"))
    print(f"{name}: exp {exp[0]} and {exp[1]}, detach {detach[0]} and {detach[1]}")
EOF
"$dir/venv/bin/python" "$dir/run.py" 2>/dev/null | tee "$dir/seen"
diff "$dir/seen" <(grep -E '^#   (plain|checkpointed):' "$0" | sed 's/^#   //')
echo "as described"
