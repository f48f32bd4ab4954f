"""Calibration: measures the constants of the cost model on the links of this machine.

`calibrate` starts ranks, or joins those that torchrun started. It measures what a rank computes with, on all ranks at
once (`dtensor.tools.processor`). It times each collective and a local copy over several sizes, fits a
`dtensor.prices.links.Link` to the times of each kind of link, and saves both in the file of measured links
(`dtensor.prices.calibrated`), which `dtensor.prepare` and `dtensor.search` read. It times the operators of
`dtensor.comm.collectives` as they run eagerly, with the copies they make.

Where a collective takes the processor, as over gloo, each call comes after some computation, and its time is the mean:
that is how collectives run in a step. From idle ranks they can be ten times as fast. The threads that carry messages
wait for their turn where another thread computes, on some kernels until the next tick of the clock, and every fourth
call or so is late by milliseconds, which a median would hide and a step that has ten of them does not.

The model is that of `dtensor.prices.links` (Hockney, "The communication challenge for MPP", 1994, with rounds and bytes
of recursive doubling and halving; a ring sends the same bytes):

    seconds = start + alpha * rounds(op, n) + bytes sent(op, n) / bandwidth        for a collective over n ranks
    seconds = launch + bytes written / memory                                      for a copy

Both are linear in start, alpha, 1/bandwidth, launch and 1/memory. These are fitted by least squares of the relative
error, under the constraint that none is negative. alpha and start can be separated because all_reduce takes twice as
many rounds as the others.
"""

import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from ..comm.collectives import ops
from ..errors import ArgumentError
from ..job.groups import group_size
from ..mesh.mesh import RANKS_PER_HOST, backend_of
from ..prices.calibrated import FORMAT, KINDS, UNITS, Measured, links_path, machine_key, read_links
from ..prices.links import WORK, Link, log2_ceil, seconds, wire_bytes
from ..prices.machine import Machine
from ..program.files import write_whole
from ..program.stages import Stage
from ..testing import run_ranks
from .demo import under_torchrun
from .processor import measure as measure_processor

SIZES = tuple(4**k for k in range(5, 13))
"""Sizes of the buffers in bytes: 1 KiB to 16 MiB."""

COPY = "shard"
"""The operator that is timed as a local copy."""

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
"""Device type -> backend of its process group."""


@dataclass(frozen=True)
class CalibrationOptions:
    """What to measure.

    Attributes:
        nproc: number of ranks to start.
        device: device type, a key of `BACKENDS`.
        sizes: sizes of the buffers in bytes.
        rounds: number of measurements of each call.
        timeout: seconds that everything may take; under torchrun, seconds that a collective may take.
        computing: seconds of computation before each call on a CPU.
    """

    nproc: int = 2
    device: str = "cpu"
    sizes: tuple[int, ...] = SIZES
    rounds: int = 20
    timeout: float = 600.0
    computing: float = 0.001


@dataclass(frozen=True)
class Timing:
    """A measured time.

    Attributes:
        op: a collective, or `COPY`.
        n: number of ranks.
        size: bytes, as in `dtensor.prices.links.seconds`.
        seconds: time of one call.
    """

    op: str
    n: int
    size: int
    seconds: float


@dataclass(frozen=True)
class Fit:
    """The result for one kind of link.

    Attributes:
        kind: an element of `dtensor.prices.calibrated.KINDS`.
        timings: the measured times.
        link: the constants that fit the times.
    """

    kind: str
    timings: tuple[Timing, ...]
    link: Link

    def fitted(self, timing: Timing) -> float:
        """Return the seconds that the link predicts for `timing`."""
        return seconds(timing.op, timing.size, timing.n, self.link)

    def error(self, timing: Timing) -> float:
        """Return the relative error of the prediction for `timing`; positive if it is too high."""
        return self.fitted(timing) / timing.seconds - 1


@dataclass(frozen=True)
class CalibrationOutcome:
    """The result of a calibration.

    Attributes:
        key: key of the machine, backend and device type in the file of measured links.
        fits: the result for each kind of link.
        machine: what a rank computes with.
        path: the file of measured links; None if the user has turned it off.
    """

    key: str
    fits: tuple[Fit, ...]
    path: Path | None
    machine: Machine | None = None


def calibrate(options: CalibrationOptions) -> CalibrationOutcome | None:
    """Measure the links, fit their constants, and save them.

    Returns:
        The outcome; None under torchrun on ranks other than 0.

    Raises:
        ValueError: the times do not determine the constants, or the file is not a file of measured links.
        RankError: a rank failed, where this function starts the processes; see `run_ranks`.
        TimeoutError: likewise, the ranks were not done in time.
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


def on_rank(rank: int, options: CalibrationOptions) -> CalibrationOutcome | None:
    """Do the part of one rank in an initialised process group; return the outcome on rank 0, None on the others."""
    world = dist.get_world_size()
    per_host = int(os.environ.get(RANKS_PER_HOST, world))
    if world < 2 or world % per_host:
        raise ArgumentError(
            f"{world} ranks with {per_host} per host have no link to measure; start 2 or more ranks, the same number "
            "on each host"
        )
    mesh = init_device_mesh(options.device, (world // per_host, per_host), mesh_dim_names=KINDS)
    fits = []
    for kind in KINDS:
        if mesh[kind].size() > 1:
            timings = measure(mesh.get_group(kind).group_name, options, kind)
            fits.append(Fit(kind, timings, fit(timings)))
    machine = measure_processor(options.device)
    key, path = machine_key(backend_of(mesh), options.device), links_path()
    for host in range(world // per_host):  # one after the other, as hosts may share the file
        if path is not None and rank == host * per_host:
            save_links(path, key, Measured(**{f.kind: f.link for f in fits}, machine=machine))
        dist.barrier()
    return CalibrationOutcome(key, tuple(fits), path, machine) if rank == 0 else None


def measure(group: str, options: CalibrationOptions, label: str = "") -> tuple[Timing, ...]:
    """Time each collective and a copy for each size on the ranks of `group`; all ranks of the world get the same times.

    All groups of the world measure at the same time, as they also communicate at the same time in a program, over links
    that they may share: all wait for each other before each call. Each time is that of the slowest rank, the mean over
    the rounds on CPUs and the median on other devices.

    Args:
        group: name of the process group.
        options: sizes, number of rounds, and device.
        label: the kind of link, for lines about the progress.
    """
    n = group_size(group)
    step = n * torch.float32.itemsize
    sizes = sorted({-(-size // step) * step for size in options.sizes})
    runs = {(op, size): _call(op, size, n, group, options.device) for op in (*WORKED, COPY) for size in sizes}
    taken: dict[Any, list[float]] = {case: [] for case in runs}
    clock = CLOCKS[options.device]
    with Stage("timing collectives") as stage:
        for number in range(options.rounds + 1):
            stage.what = f"timing collectives{label and f' ({label})'}: round {number + 1} of {options.rounds + 1}"
            for case, run in runs.items():
                dist.barrier()
                if options.device == "cpu":
                    _compute(options.computing)
                taken[case].append(clock(run))
    # The first round warms up.
    average = statistics.mean if options.device == "cpu" else statistics.median
    slowest = torch.tensor([average(times[1:]) for times in taken.values()], dtype=torch.float64, device=options.device)
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
"""Collective -> a function that calls it over n ranks on a vector, whose bytes are the `size` of its cost."""


def _call(op: str, size: int, n: int, group: str, device: str) -> Callable[[], object]:
    elements = size // torch.float32.itemsize
    if op == COPY:
        whole = torch.ones(elements * n, device=device)
        return lambda: ops.shard(whole, 0, group)
    x = torch.ones(elements, device=device)
    return lambda: WORKED[op](x, n, group)


def _compute(seconds: float) -> None:
    x, end = torch.ones(128, 128), time.perf_counter() + seconds
    while time.perf_counter() < end:
        torch.mm(x, x)


def _by_clock(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _by_events(run: Callable[[], object]) -> float:
    """Measure on the stream, from an idle device. This includes the time in which the host starts `run`, but not the
    time in which it waits for the end."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e-3


CLOCKS = {"cpu": _by_clock, "cuda": _by_events}
"""Device type -> a function that returns the seconds a call takes."""


def fit(timings: Sequence[Timing]) -> Link:
    """Return the link that fits the times of collectives and copies best.

    Raises:
        ValueError: the times do not determine all constants. They need at least two sizes, collectives with different
            numbers of rounds, and times that grow with the size.
    """
    sent = [t for t in timings if t.op in WORK]
    copied = [t for t in timings if t.op not in WORK]
    start, alpha, per_byte = _least_squares(
        [[1.0, WORK[t.op][0](t.n, log2_ceil), wire_bytes(t.op, t.size, t.n)] for t in sent], sent
    )
    launch, per_copied = _least_squares([[1.0, t.size] for t in copied], copied)
    if per_byte == 0 or per_copied == 0:
        what = "collectives" if per_byte == 0 else "copies"
        raise ArgumentError(f"the times of {what} do not grow with the size; measure larger sizes, or more rounds")
    return Link(alpha, 1 / per_byte, 1 / per_copied, launch, start)


def _least_squares(rows: Sequence[Sequence[float]], timings: Sequence[Timing]) -> list[float]:
    """Return the x >= 0 for which rows @ x is nearest to the times, by relative error.

    The best x solves the unconstrained problem on the columns where it is not 0 (Lawson and Hanson, 1974). There are
    few enough columns to try all subsets.
    """
    a = np.array(rows, dtype=float) / np.array([t.seconds for t in timings])[:, None]
    width = a.shape[-1]
    scale = np.linalg.norm(a, axis=0)
    if not rows or np.linalg.matrix_rank(a / scale) < width:
        raise ArgumentError(f"{len(timings)} timings do not determine the constants of a link; measure more sizes")
    best, least = np.zeros(width), np.inf
    for columns in (list(c) for k in range(1, width + 1) for c in combinations(range(width), k)):
        x = np.zeros(width)
        x[columns] = np.linalg.lstsq(a[:, columns] / scale[columns], np.ones(len(a)), rcond=None)[0] / scale[columns]
        off = float(np.linalg.norm(a @ x - 1))
        if (x >= 0).all() and off < least:
            best, least = x, off
    return best.tolist()


def save_links(path: Path, key: str, measured: Measured) -> None:
    """Add measured links to the file and keep its other entries. The file is replaced atomically.

    Raises:
        ValueError: The file is damaged or is some other file; it is left as it is.
        OSError: It cannot be written.
    """
    entries = read_links(path)
    old = entries.get(key, Measured())
    entries[key] = Measured(measured.inter or old.inter, measured.intra or old.intra, measured.machine or old.machine)
    links = {k: {kind: c for kind, c in asdict(m).items() if c is not None} for k, m in sorted(entries.items())}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps({"format": FORMAT, "units": UNITS, "links": links}, indent=2))


__all__ = [
    "BACKENDS",
    "SIZES",
    "CalibrationOptions",
    "CalibrationOutcome",
    "Fit",
    "Timing",
    "calibrate",
    "fit",
    "measure",
    "on_rank",
    "save_links",
]
