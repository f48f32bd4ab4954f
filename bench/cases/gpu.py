"""gpu: the cases that need one device, on CUDA: call, eager, memory.

Without a CUDA device it is skipped, and a record states that. As in those cases, this process is the first rank of a
mesh of which the others do not exist, so that one GPU is enough.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch

from ..effort import Effort
from ..record import Record, Setting
from . import call, eager, memory

CASES = {"call": call, "eager": eager, "memory": memory}
WITHOUT = f"skipped: no CUDA device here; with one this runs {', '.join(CASES)} on it, --quick in three minutes"


def run(effort: Effort) -> Iterator[Record]:
    """Yield the records of these cases on CUDA, or one that states why there are none."""
    if not torch.cuda.is_available():
        yield Setting("gpu").missing("all", WITHOUT)
        return
    for name, case in CASES.items():
        for made in case.run(replace(effort, device="cuda")):
            yield replace(made, case=f"gpu: {name}")


__all__ = ["run"]
