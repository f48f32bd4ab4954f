"""Calibration: the constants of the cost model, measured on the links of this machine.

`calibrate` starts ranks (or joins those that torchrun started), times each collective over several sizes and a local
copy, fits a `cost.Link` to the times of each kind of link, and keeps it in the file that `dtensor.prepare` plans with
(`links`). What is timed are the operators of `collectives` as they run eagerly, with the copies they make.

The model is that of `cost` (Hockney, "The communication challenge for MPP", 1994, with rounds and bytes of recursive
doubling and halving; a ring sends the same bytes):

    seconds = start + alpha * rounds(op, n) + bytes sent(op, n) / bandwidth        of a collective over n ranks
    seconds = launch + bytes written / memory                                      of a copy

Both are linear in start, alpha, 1/bandwidth, launch and 1/memory, which are fitted by least squares of the relative
error, none below zero. That all_reduce takes twice the rounds of the others is what tells alpha from start.
"""

import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from tqdm import tqdm

from ..comm.collectives import ops
from ..layout.cost import WORK, Link, log2_ceil, seconds, wire_bytes
from ..mesh.groups import group_size
from ..mesh.links import KINDS, Measured, links_path, machine_key, save_links
from ..mesh.mesh import RANKS_PER_HOST, backend_of
from ..testing import run_ranks
from .demo import under_torchrun

SIZES = tuple(4**k for k in range(5, 13))
"""Bytes of the buffers: 1 KiB to 16 MiB."""

COPY = "shard"
"""The operator that is timed as a local copy."""

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
"""Device type -> backend of the process group that is started for it."""


@dataclass(frozen=True)
class Options:
    """What to measure: on how many ranks, where, buffers of which bytes, how often; seconds the whole may take."""

    nproc: int = 2
    device: str = "cpu"
    sizes: tuple[int, ...] = SIZES
    rounds: int = 20
    timeout: float = 600.0


@dataclass(frozen=True)
class Timing:
    """The seconds that `op` took over `n` ranks; `size` in bytes as in `cost.seconds`."""

    op: str
    n: int
    size: int
    seconds: float


@dataclass(frozen=True)
class Fit:
    """A kind of link of `links.KINDS`, what was measured on it, and the link that fits it."""

    kind: str
    timings: tuple[Timing, ...]
    link: Link

    def fitted(self, timing: Timing) -> float:
        """What the link says in place of `timing.seconds`."""
        return seconds(timing.op, timing.size, timing.n, self.link)

    def error(self, timing: Timing) -> float:
        """By what part of what was measured the link is off; positive where it says more."""
        return self.fitted(timing) / timing.seconds - 1


@dataclass(frozen=True)
class Outcome:
    """What was fitted, under which key, and the file it is in; None where the file is turned off."""

    key: str
    fits: tuple[Fit, ...]
    path: Path | None


def calibrate(options: Options) -> Outcome | None:
    """Measure, fit and save; on ranks other than 0 of torchrun's there is no outcome to give.

    Raises:
        ValueError: the times do not tell the constants, or the file is some other file.
        RankError, TimeoutError: as `run_ranks`, where it starts the processes.
    """
    if not under_torchrun():
        return run_ranks(on_rank, options.nproc, options, backend=BACKENDS[options.device], timeout=options.timeout)[0]
    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(BACKENDS[options.device], timeout=timedelta(seconds=options.timeout))
    try:
        return on_rank(dist.get_rank(), options)
    finally:
        dist.destroy_process_group()


def on_rank(rank: int, options: Options) -> Outcome | None:
    """One rank's part, within an initialised process group; rank 0 gives the outcome."""
    world = dist.get_world_size()
    per_host = int(os.environ.get(RANKS_PER_HOST, world))
    if world < 2 or world % per_host:
        raise ValueError(f"{world} ranks, {per_host} a host, make no link to measure; start 2 or more, alike per host")
    mesh = init_device_mesh(options.device, (world // per_host, per_host), mesh_dim_names=KINDS)
    fits = []
    for kind in KINDS:
        if mesh[kind].size() > 1:
            timings = measure(mesh.get_group(kind).group_name, options, kind, quiet=rank != 0)
            fits.append(Fit(kind, timings, fit(timings)))
    key, path = machine_key(backend_of(mesh), options.device), links_path()
    for host in range(world // per_host):  # one after the other: they may share a file
        if path is not None and rank == host * per_host:
            save_links(path, key, Measured(**{f.kind: f.link for f in fits}))
        dist.barrier()
    return Outcome(key, tuple(fits), path) if rank == 0 else None


def measure(group: str, options: Options, label: str = "", quiet: bool = False) -> tuple[Timing, ...]:
    """Time each collective and a copy on each size, on the ranks of `group`; the same on all ranks of the world.

    All groups of the world measure at once, as they communicate at once. A time is the median of the rounds, and
    that of the slowest rank.
    """
    n = group_size(group)
    step = n * torch.float32.itemsize
    sizes = sorted({-(-size // step) * step for size in options.sizes})
    runs = {(op, size): _call(op, size, n, group, options.device) for op in (*WORKED, COPY) for size in sizes}
    taken: dict[Any, list[float]] = {case: [] for case in runs}
    clock = CLOCKS[options.device]
    with tqdm(
        total=len(runs) * (options.rounds + 1), desc=label, unit="call", disable=quiet or None, file=sys.stderr
    ) as bar:
        for _ in range(options.rounds + 1):
            for case, run in runs.items():
                taken[case].append(clock(run))
                bar.update()
    # The first round warms up.
    medians = [statistics.median(times[1:]) for times in taken.values()]
    slowest = torch.tensor(medians, dtype=torch.float64, device=options.device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return tuple([Timing(op, n, size, t) for (op, size), t in zip(runs, slowest.tolist())])


def _all_gather(x: torch.Tensor, n: int, group: str) -> torch.Tensor:
    return ops.all_gather(x[: len(x) // n], 0, len(x), group)


def _reduce_scatter(x: torch.Tensor, n: int, group: str) -> torch.Tensor:
    return ops.reduce_scatter(x, "sum", 0, group)


def _all_reduce(x: torch.Tensor, n: int, group: str) -> torch.Tensor:
    return ops.all_reduce(x, "sum", group)


def _all_to_all(x: torch.Tensor, n: int, group: str) -> torch.Tensor:
    return ops.all_to_all(x.unsqueeze(0), 0, 1, n, group)


WORKED: dict[str, Callable[[torch.Tensor, int, str], torch.Tensor]] = {
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
}
"""Collective -> a call of it over n ranks on a vector, whose bytes are the size that prices it."""


def _call(op: str, size: int, n: int, group: str, device: str) -> Callable[[], object]:
    elements = size // torch.float32.itemsize
    if op == COPY:
        whole = torch.ones(elements * n, device=device)
        return lambda: ops.shard(whole, 0, group)
    x = torch.ones(elements, device=device)
    return lambda: WORKED[op](x, n, group)


def _by_clock(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _by_events(run: Callable[[], object]) -> float:
    """On the stream, from an idle device: what the host takes to start `run` is in it, what it takes to wait is not."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e-3


CLOCKS = {"cpu": _by_clock, "cuda": _by_events}
"""Device type -> seconds that a call takes there."""


def fit(timings: Sequence[Timing]) -> Link:
    """The link that explains the times of collectives and copies best.

    Raises:
        ValueError: they do not tell all constants: they need two sizes at least, collectives that differ in their
            rounds, and times that grow with the size.
    """
    sent = [t for t in timings if t.op in WORK]
    copied = [t for t in timings if t.op not in WORK]
    start, alpha, per_byte = _least_squares(
        [[1.0, WORK[t.op][0](t.n, log2_ceil), wire_bytes(t.op, t.size, t.n)] for t in sent], sent
    )
    launch, per_copied = _least_squares([[1.0, t.size] for t in copied], copied)
    if per_byte == 0 or per_copied == 0:
        what = "collectives" if per_byte == 0 else "copies"
        raise ValueError(f"the times of {what} do not grow with the size; measure larger sizes, or more rounds")
    return Link(alpha, 1 / per_byte, 1 / per_copied, launch, start)


def _least_squares(rows: Sequence[Sequence[float]], timings: Sequence[Timing]) -> list[float]:
    """The x >= 0 for which rows @ x is nearest to the times, by relative error.

    The best x solves the problem without bound on the columns where it is not 0 (Lawson and Hanson, 1974), of which
    there are few enough to try all sets.
    """
    a = np.array(rows, dtype=float) / np.array([t.seconds for t in timings])[:, None]
    width = a.shape[-1]
    scale = np.linalg.norm(a, axis=0)
    if not rows or np.linalg.matrix_rank(a / scale) < width:
        raise ValueError(f"{len(timings)} timings do not tell the constants of a link; measure more sizes")
    best, least = np.zeros(width), np.inf
    for columns in (list(c) for k in range(1, width + 1) for c in combinations(range(width), k)):
        x = np.zeros(width)
        x[columns] = np.linalg.lstsq(a[:, columns] / scale[columns], np.ones(len(a)), rcond=None)[0] / scale[columns]
        off = float(np.linalg.norm(a @ x - 1))
        if (x >= 0).all() and off < least:
            best, least = x, off
    return best.tolist()


__all__ = ["BACKENDS", "SIZES", "Fit", "Options", "Outcome", "Timing", "calibrate", "fit", "measure", "on_rank"]
