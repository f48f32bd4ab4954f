"""gpu: the cases of one device again, on CUDA: call, eager, memory.

Skipped, with a record that says so, where there is no CUDA device. The ranks are as in those cases: this process is the
first of a mesh of which the others are not there, so that one GPU is enough.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch

from ..effort import Effort
from ..record import Record, Setting
from . import call, eager, memory

CASES = {"call": call, "eager": eager, "memory": memory}
WITHOUT = f"skipped: no CUDA device here; with one: {', '.join(CASES)} on it, in three minutes with --quick"


def run(effort: Effort) -> Iterator[Record]:
    """The records of these cases on CUDA, or one that says why there are none."""
    if not torch.cuda.is_available():
        yield Setting("gpu").missing("all", WITHOUT)
        return
    for name, case in CASES.items():
        for made in case.run(replace(effort, device="cuda")):
            yield replace(made, case=f"gpu: {name}")


__all__ = ["run"]
