#!/usr/bin/env bash
# Dynamo traces Tensor.view, but not Tensor.unflatten, while a TorchFunctionMode of the program is active.
#
# torch 2.13.0, CPU. The mode does nothing but call the function. In eager mode both methods work under it. Compiled with
# fullgraph=True, unflatten raises torch._dynamo.exc.Unsupported (without it, the graph breaks there): its Python wrapper
# calls super().unflatten, which Dynamo meets as an attribute that is no function. Modes of libraries, such as those that
# replace a loss, meet it in models of others.
# Seen:
#   view: (2, 2) eager, (2, 2) compiled
#   unflatten: (2, 2) eager, Unsupported compiled
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q torch==2.13.0 numpy
cat > "$dir/run.py" <<'EOF'
import torch
from torch.overrides import TorchFunctionMode


class Through(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def view(x):
    return x.view(2, -1)


def unflatten(x):
    return x.unflatten(0, (2, -1))


for function in (view, unflatten):
    torch.compiler.reset()
    with Through():
        eager = tuple(function(torch.ones(4)).shape)
        try:
            found = tuple(torch.compile(function, backend="eager", fullgraph=True)(torch.ones(4)).shape)
        except torch._dynamo.exc.Unsupported:
            found = "Unsupported"
    print(f"{function.__name__}: {eager} eager, {found} compiled")
EOF
"$dir/venv/bin/python" "$dir/run.py" 2>/dev/null | tee "$dir/seen"
diff "$dir/seen" <(grep -E '^#   (view|unflatten):' "$0" | sed 's/^#   //')
echo "as described"
