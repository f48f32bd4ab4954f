"""Reports what the passes did to torch's own logs: `TORCH_LOGS=+dtensor`, and `TORCH_TRACE` with tlparse."""

import json
import logging
from collections import Counter
from collections.abc import Sequence

from dtensor.passes import PassRecord
from dtensor.torch_private.compiling import trace_artifact

from .frames import Frame
from .manifest import manifest

LOG = logging.getLogger("torch.distributed.tensor.dtensor_passes")
"""A child of the logger that torch's name `dtensor` stands for, so that `TORCH_LOGS=+dtensor` shows it."""


def log_passes(frame: Frame, direction: str, records: Sequence[PassRecord]) -> None:
    """Log the passes that changed a graph, with their counts."""
    lines = [pass_line(r) for r in records if r.rewrites]
    for line in lines or ["no pass changed it"]:
        LOG.debug("%s graph of %s: %s", direction, frame.name, line)
    trace_artifact(f"dtensor_{direction}_passes", lambda: "\n".join(lines))


def log_manifest(frame: Frame) -> None:
    """Add the manifest to the artifacts of the current compilation."""
    trace_artifact("dtensor_manifest", lambda: json.dumps(manifest(frame), indent=1))


def pass_line(r: PassRecord) -> str:
    """Return a line such as `cancel_gather_shard: 2 rewrites in 0.3 ms, all_gather 3 -> 1`."""
    changes = [f"{op} {r.before[op]} -> {r.after[op]}" for op in _changed(r.before, r.after)]
    return ", ".join([f"{r.name}: {r.rewrites} rewrites in {r.seconds * 1e3:.1f} ms", *changes])


def _changed(before: Counter[str], after: Counter[str]) -> list[str]:
    return [op for op in sorted({*before, *after}) if before[op] != after[op]]


__all__ = ["log_manifest", "log_passes", "pass_line"]
