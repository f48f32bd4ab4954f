"""The log of each rank while something takes long: what is compiled, where, and for whom a rank waits; no long gaps."""

import logging
import re
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from dtensor import Checkpoints, Shard, distribute_tensor, init_device_mesh
from dtensor.job import job
from dtensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from dtensor.passes import Lower
from dtensor.program import stages
from dtensor.state import files
from dtensor.state.index import StoredPart
from dtensor.testing import run_ranks

PACE = 8
"""How many times faster than in earnest ranks tell."""

LIMIT = 10.0
"""Seconds without a line, in earnest."""

SLOW = 5.0
"""Seconds that what is slow takes."""


def told(rank, slow, folder, pace):
    """Run `slow` on a rank that tells at another pace, and return how long its log was silent."""
    handler = logging.FileHandler(Path(folder) / f"rank-{rank}")
    handler.setFormatter(logging.Formatter("%(created)f %(message)s"))
    with pytest.MonkeyPatch.context() as patch:
        for module, name in ((stages, "EVERY"), (stages, "TICK"), (job, "TELL"), (job, "PATIENCE"), (job, "PULSE")):
            patch.setattr(module, name, getattr(module, name) / pace)
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        stages.log.addHandler(handler)
        began = time.time()
        try:
            slow(rank, mesh, patch)
        finally:
            ended = time.time()
            stages.log.removeHandler(handler)
            handler.close()
    times = [float(line.split()[0]) for line in (Path(folder) / f"rank-{rank}").read_text().splitlines()]
    return max(b - a for a, b in zip([began, *times], [*times, ended]))


def compiling(mesh, backend):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    options = {"options": {"inner": "aot_eager"}} if backend == "dtensor" else {}
    torch.compile(model, backend=backend, **options)(torch.ones(2, 4)).sum().backward()


def slow_pass(rank, mesh, patch):
    """A pass that takes long on rank 1; rank 0 waits for it where the graph begins."""
    own = Lower.__call__

    def call(self, graph):
        time.sleep(SLOW * rank)
        return own(self, graph)

    patch.setattr(Lower, "__call__", call)
    compiling(mesh, "dtensor")


def slow_backend(rank, mesh, patch):
    """A compile function that takes long on rank 0; rank 1 waits in an eager collective."""

    def backend(gm, inputs):
        time.sleep(SLOW * (1 - rank))
        return gm.forward

    compiling(mesh, backend)


def slow_save(rank, mesh, patch):
    """A disk that is slow on rank 1, where a checkpoint is written and read."""
    own = files.raw_bytes, StoredPart.read

    def slowly(k):
        def call(*args):
            time.sleep(SLOW / 2 * rank)
            return own[k](*args)

        return call

    patch.setattr(files, "raw_bytes", slowly(0))
    patch.setattr(StoredPart, "read", slowly(1))
    state = {"a": distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]), "b": distribute_tensor(torch.ones(4), mesh)}
    checkpoints = Checkpoints(Path(stages.log.handlers[-1].baseFilename).parent / "checkpoints")
    checkpoints.save(state, 7)
    checkpoints.load(state)


COMPILES = r"compiling Sequential\.forward\w*"
CASES = {
    slow_pass: (
        rf"rank 0: waits in the agreement on a compiled graph.*: rank 1 computes at .*test_silence\.py:\d+ \[{COMPILES}"
        r".*: passes.*: forward graph.*: pass lower.*\]",
        rf"rank 1: {COMPILES}.*: passes.*: forward graph.*: pass lower \(\d s\)",
    ),
    slow_backend: (
        rf"rank 0: {COMPILES}.*backend \(\d s\)",
        rf"rank 1: waits in all_reduce.* at .*test_silence.py:\d+ \(\d s\): rank 0 computes at .*\[{COMPILES}.*backend",
    ),
    slow_save: (
        r"rank 0: saving the checkpoint of step 7: waits in torch\.distributed\.\w+ .*: rank 1 .*\[.*writing part",
        r"rank 1: loading a checkpoint: step 7: reading part 2 of 2 \(\d s\)",
    ),
}


@pytest.mark.parametrize(
    "slow", [pytest.param(slow, marks=[] if slow is slow_pass else [pytest.mark.nightly]) for slow in CASES]
)
def test_no_rank_is_silent(slow, tmp_path):
    gaps = run_ranks(told, 2, slow, str(tmp_path), PACE)
    logs = [(tmp_path / f"rank-{rank}").read_text() for rank in range(2)]
    for said, log in zip(CASES[slow], logs):
        assert re.search(said, log), "\n".join(logs)
    assert max(gaps) < LIMIT / PACE + 1.0, "\n".join(logs)
