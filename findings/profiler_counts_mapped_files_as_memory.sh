#!/usr/bin/env bash
# torch.profiler with profile_memory=True reports a safetensors file that is opened as an allocation of its whole size.
#
# torch 2.13.0, safetensors 0.8.0, CPU. safe_open maps the file and reads the header alone; no tensor is asked for. The
# profiler's memory events show the bytes of the whole file as allocated when it is opened, and freed when it is closed,
# so a peak of memory taken from them counts what no process holds. (The file below has 16,777,296 bytes.)
# Seen:
#   size of the file: 16777296
#   memory events while it is opened and closed: [16777296, -16777296]
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q torch==2.13.0 numpy safetensors==0.8.0
cat > "$dir/run.py" <<'EOF'
import json
import os
import sys

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.profiler import ProfilerActivity, profile

folder = sys.argv[1]
path = os.path.join(folder, "model.safetensors")
save_file({"weight": torch.ones(4 * 1024 * 1024)}, path)
print("size of the file:", os.path.getsize(path))
with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen, safe_open(path, framework="pt") as file:
    list(file.keys())
trace = os.path.join(folder, "trace.json")
seen.export_chrome_trace(trace)
with open(trace) as text:
    events = [event for event in json.load(text)["traceEvents"] if event.get("name") == "[memory]"]
print("memory events while it is opened and closed:", [event["args"]["Bytes"] for event in events])
EOF
"$dir/venv/bin/python" "$dir/run.py" "$dir" 2>/dev/null | tee "$dir/seen"
diff "$dir/seen" <(grep -E '^#   (size|memory)' "$0" | sed 's/^#   //')
echo "as described"
