"""start: time from the launch of a job to the end of its first and second step: cold, warm, packaged, shared.

Ranks on this machine train a Transformer by tensor parallelism over gloo. "cold": nothing was compiled before, and
every rank compiles. "warm": they use the caches of such a job. "packaged": they load a package that one process made
for them, with empty caches. "shared": one of them compiles for all, with empty caches. torch's DTensor under
torch.compile is measured cold and warm. "first step" is that step alone, without imports and process groups. "alone"
is the first step of one process that compiles for a rank while nobody else does.
"""

import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import dtensor
import dtensor.compile
from dtensor import init_device_mesh
from dtensor.tools.demo_plans import PLANS

from ..caches import cold_caches
from ..effort import Effort
from ..models import Model, Sizes, named
from ..ranks import on_ranks
from ..record import OURS, Record, Setting
from ..sides import batch, made
from ..timing import compared

PLAN = "tp"
ALONE, COLD, WARM, PACKAGED, SHARED = "alone", "cold", "warm", "packaged", "shared"
TORCH = "torch compiled"
SIZES = Sizes(dim=64, seq=32, batch=4)
AMOUNTS = {
    "tiny": (("transformer-1",), (2,), 1),
    "quick": (("transformer-2",), (4,), 1),
    "full": (("transformer-2", "transformer-8", "transformer-32"), (2, 4), 3),
}
"""Models, numbers of ranks, and rounds."""

Times = tuple[float, float, float]
"""Seconds of the first step, and from the launch to the end of the first and of the second step."""


def steps(side: str, model: Model, mesh: Any, began: float) -> Times:
    """Take two steps of a trainer."""
    trainer, given = made(side, model, PLAN, mesh), batch(model, PLAN, mesh, 0)
    start = time.time()
    trainer.step(*given)
    first = time.time()
    trainer.step(*given)
    return first - start, first - began, time.time() - began


def on_rank(rank: int, side: str, model: Model, began: float, path: str, share: bool, end: Any) -> Times:
    """Take two steps on a rank of a job; with `path`, from that package."""
    if path:
        dtensor.compile.load(path, strict=True)
    os.environ["DTENSOR_SHARE_COMPILES"] = str(int(share))
    return steps(side, model, init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=PLANS[PLAN].axes), began)


def in_one_process(model: Model, ranks: int, path: str) -> Times:
    """Take two steps as the first rank of ranks that are not there, and write the package."""
    torch.set_num_threads(1)
    found: list[Times] = []
    names = dict.fromkeys(PLANS[PLAN].axes, ranks)
    dtensor.compile.package(lambda mesh: found.append(steps(OURS, model, mesh, time.time())), names, (), path)
    return found[0]


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="dtensor-bench-package-") as name:
        os.chmod(name, 0o700)
        yield Path(name)


def round_of(model: Model, ranks: int) -> dict[str, Times]:
    """Start each kind of job once."""
    found: dict[str, Times] = {}

    def job(side: str, path: str = "", share: bool = False) -> Times:
        return on_ranks(on_rank, ranks, side, model, time.time(), path, share, timeout=1800)

    for side, names in ((OURS, (COLD, WARM)), (TORCH, (f"{TORCH} {COLD}", f"{TORCH} {WARM}"))):
        with cold_caches():
            for name in names:
                found[name] = job(side)
    with _folder() as folder:
        path = str(folder / "step.package")
        with cold_caches(), multiprocessing.get_context("spawn").Pool(1) as pool:
            found[ALONE] = pool.apply(in_one_process, (model, ranks, path))
        with cold_caches():
            found[PACKAGED] = job(OURS, path)
    with cold_caches():
        found[SHARED] = job(OURS, share=True)
    return found


def run(effort: Effort) -> Iterator[Record]:
    """Yield records by model and number of ranks."""
    models, worlds, rounds = effort.of(AMOUNTS)
    for name, ranks in effort.progress([(m, n) for m in models for n in worlds], "start"):
        model = named(name, SIZES)
        taken = [round_of(model, ranks) for _ in range(rounds)]
        at = Setting("start", name, PLAN, ranks)

        def timed(figure: str, k: int, one: str, other: str, at: Setting = at, taken: Any = taken) -> Record:
            times = [[r[side][k] for r in taken] for side in (one, other)]
            return at.timed(f"{figure}, {one}", "s", compared(times[0], times[1]), other)

        for other in (COLD, WARM, f"{TORCH} {COLD}", f"{TORCH} {WARM}"):
            yield timed("first step", 0, PACKAGED, other)
        yield timed("first step", 0, SHARED, ALONE)
        yield timed("first step", 0, SHARED, COLD)
        yield timed("first step", 0, COLD, f"{TORCH} {COLD}")
        yield timed("first step", 0, WARM, f"{TORCH} {WARM}")
        for side, peer in ((COLD, COLD), (WARM, WARM), (PACKAGED, WARM), (SHARED, COLD)):
            yield timed("launch to first step", 1, side, f"{TORCH} {peer}")
            yield timed("launch to second step", 2, side, f"{TORCH} {peer}")


__all__ = ["run"]
