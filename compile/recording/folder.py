"""The folder of a dump: which files it holds, and how they are written.

    folder/rank0/000_forward/                a frame: a function that Dynamo compiled, by order and name
        01_dynamo.txt                        Dynamo's graph
        02_joint.00_input.txt                the joint graph as AOTAutograd traced it
        03_forward.00_input.txt              the forward (or `03_inference`) before the passes
        03_forward.04_bucket.txt             after the fourth change, made by the pass `bucket`
        03_forward.inner.txt                 what the inner compiler made of it
        04_backward....                      the same for the backward
        guards.txt, recompiled.txt, graph_breaks.txt, bytecode.py
        decisions.json                       the layouts decided for the whole graph, which options={"decide": …} takes
        manifest.json, trace.json            what it communicates; the timeline, for chrome://tracing or Perfetto

No frame is overwritten: numbering continues after what the folder holds. A file is written completely or not at all. If
something cannot be written, it is left out, with one warning per folder: a dump never stops a training run.
"""

import contextlib
import os
import re
import warnings
from pathlib import Path
from typing import Any

import torch.distributed as dist

from dtensor.program.files import write_whole

from .frames import Frame

NUMBERED = re.compile(r"(\d+)_\w+")
ORDER = {"dynamo": "01_dynamo", "joint": "02_joint", "forward": "03_forward", "inference": "03_inference"} | {
    "backward": "04_backward"
}
"""Graph -> the prefix of its file names."""

_active: list[Path] = []
_failed: set[Path] = set()


@contextlib.contextmanager
def writing_to(root: Path) -> Any:
    """Write everything that is compiled inside the context to `root`."""
    _active.append(root)
    _failed.discard(root)
    try:
        yield
    finally:
        _active.remove(root)


def is_wanted(frame: Frame) -> bool:
    """Whether anything is to be written for a frame."""
    return bool(_active or frame.roots)


def rank_folder(root: Path) -> Path:
    """Return this rank's folder below `root`."""
    return root / f"rank{dist.get_rank() if dist.is_initialized() else os.environ.get('RANK', '0')}"


def write(frame: Frame, name: str, content: str) -> None:
    """Write a file of a frame to all folders where it is wanted; an existing one is replaced."""
    for root in dict.fromkeys([*_active, *frame.roots]):
        if root in _failed:
            continue
        try:
            write_whole(_folder(frame, root) / name, content)
        except OSError as error:
            _failed.add(root)
            warnings.warn(f"nothing more is dumped to {root}: {error}", stacklevel=2)


def _folder(frame: Frame, root: Path) -> Path:
    """The folder of a frame; created when its first file is written."""
    if root not in frame.folders:
        own = rank_folder(root)
        own.mkdir(parents=True, exist_ok=True)
        taken = [int(m[1]) for path in own.iterdir() if (m := NUMBERED.fullmatch(path.name))]
        name = re.sub(r"\W+", "_", frame.name).strip("_") or "graph"
        frame.folders[root] = own / f"{max(taken, default=-1) + 1:03}_{name}"
        frame.folders[root].mkdir()
    return frame.folders[root]


__all__ = ["ORDER", "is_wanted", "rank_folder", "write", "writing_to"]
