"""The peak of memory that a function allocates for tensors, as torch's profiler sees each allocation on the CPU."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

from torch.profiler import ProfilerActivity, profile


def peak_of(run: Callable[[], None]) -> int:
    """Bytes that torch's CPU allocator has handed out at most while `run` runs, beyond those from before.

    The memory of mapped files is not counted.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    found = [e for e in events if e["name"] == "[memory]" and e["args"]["Device Type"] == 0]
    now = top = 0
    for event in sorted(found, key=lambda e: e["ts"]):
        now += event["args"]["Bytes"]
        top = max(top, now)
    return top


__all__ = ["peak_of"]
