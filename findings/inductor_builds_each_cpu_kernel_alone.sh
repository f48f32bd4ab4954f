#!/usr/bin/env bash
# Inductor runs the C++ compiler once for each CPU kernel, and nearly all of that time is not for the kernel.
#
# torch 2.13.0, CPU. A function with eight pointwise kernels between matrix products makes eight sources, each of which is
# compiled and linked to a library of its own. An empty kernel that is built in the same way takes about as long as one of
# them: headers (although precompiled), the binding to Python and linking are paid for each. So the time to compile a
# model grows with the number of its kernels, however small they are.
# Seen on two cores with g++ 12:
#   8 kernels, 8 libraries
#   an empty kernel takes at least half of the time of a kernel: True
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q torch==2.13.0 numpy setuptools
cat > "$dir/run.py" <<'EOF'
import os
import time
from pathlib import Path

import torch
from torch._inductor import config
from torch._inductor.codecache import CppPythonBindingsCodeCache

config.compile_threads = 1
sources = []
load = CppPythonBindingsCodeCache.load_pybinding.__func__


@classmethod
def noted(cls, types, source, *args, **kwargs):
    sources.append((types, source))
    return load(cls, types, source, *args, **kwargs)


CppPythonBindingsCodeCache.load_pybinding = noted


def chain(x, w):
    for k in range(8):
        x = torch.sin(x @ w + k) / (k + 1)
    return x


torch.compile(chain)(torch.ones(16, 16), torch.ones(16, 16))
cache = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
built = [path for path in cache.rglob("*.so") if ".main" in path.name]
print(f"{len(sources)} kernels, {len(built)} libraries")


def seconds(types, source):
    start = time.perf_counter()
    load(CppPythonBindingsCodeCache, types, source)
    return time.perf_counter() - start


types, kernel = sources[0]
empty = '#include <torch/csrc/inductor/cpp_prefix.h>\nextern "C" void kernel(float* x) { x[%d] = 0; }\n'
nothing = min(seconds(["float*"], empty % k) for k in range(3))
something = min(seconds(types, f"{kernel}\n// {k}\n") for k in range(3))
print(f"an empty kernel takes at least half of the time of a kernel: {nothing > something / 2}")
EOF
export TORCHINDUCTOR_CACHE_DIR=$dir/cache OMP_NUM_THREADS=1
"$dir/venv/bin/python" -W ignore "$dir/run.py" | tee "$dir/seen"
diff "$dir/seen" <(grep -E '^#   ' "$0" | sed 's/^#   //')
echo "as described"
