"""doors: what models of transformers send and cost, by each way in which a user has them sharded.

The models are those of `bench.doors.subjects`, the ways those of `bench.doors.doors`. A job is a model, what is
measured, the mesh, and whether a step trains:

    count   what a compiled step sends, by kind and direction. One process is the first rank of a mesh whose other ranks
            do not exist. Exact; all passes run, and no code is generated. Compared with whatever way by hand sends
            the fewest bytes. A way of its own, such as data parallelism, may send fewer than any of tensor parallelism
    call    Python functions called by the forward of a compiled step, counted in the same way
    first   the first step of processes whose caches are empty: seconds on the clock, and of the processor
    steps   the time of a step in processes, on loopback and over slow links, and the memory it allocates at its peak
"""

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from dtensor import init_device_mesh
from dtensor.torch_private.compiling import without_compile_caches

from ..caches import cold_caches
from ..counting import Counts, counted, counting_ranks
from ..doors.doors import BY_HAND, DATA, FORWARD, OURS, STYLES, TENSOR, TRAINING, WORDS, Mode, Opened, opened
from ..doors.subjects import SUBJECTS
from ..effort import Effort
from ..links import LOOPBACK, each, on_links
from ..namespaces import End
from ..ranks import RanksFailed, on_ranks
from ..record import OURS as LIBRARY
from ..record import Record, Setting
from ..sides import SIDES, forget, forget_failed, reason
from ..timing import compared, interleaved
from ..uncoded import UNCODED
from .memory import allocated
from .step import EVERYWHERE, TOLERANCE, WARM_UP

DIRECTIONS = ("forward", "backward", "optimizer")
COUNT, CALL, FIRST, STEPS = "count", "call", "first", "steps"
THEIRS = "torch compiled"
BEST = "best by hand"
FLAT, SQUARE = "2", "2x2"

Job = tuple[str, str, str, Mode]
"""Model, what is measured, mesh, mode."""


@dataclass(frozen=True)
class Amount:
    """What is measured at a level.

    Attributes:
        jobs: the jobs.
        doors: the doors.
        links: the links of steps.
        rounds: rounds of steps.
        steps: steps in a round.
    """

    jobs: tuple[Job, ...]
    doors: tuple[str, ...] = tuple(WORDS)
    links: tuple[str, ...] = EVERYWHERE
    rounds: int = 5
    steps: int = 2


COUNTED: tuple[Job, ...] = tuple(
    [(n, COUNT, mesh, mode) for n in SUBJECTS for mesh in (FLAT, SQUARE) for mode in (TRAINING, FORWARD)]
)
IN_PROCESSES: tuple[Job, ...] = tuple([(n, what, FLAT, TRAINING) for n in SUBJECTS for what in (CALL, FIRST, STEPS)])
AMOUNTS = {
    "tiny": Amount((("vit", COUNT, FLAT, FORWARD),), ("styles", "placements")),
    "quick": Amount((*COUNTED, *[job for job in IN_PROCESSES if job[0] == "llama"])),
    "full": Amount(COUNTED + IN_PROCESSES, rounds=15, steps=3),
}


def compiling(door: str, code: bool) -> Callable[[Any], Any]:
    """Return what compiles the model behind a door, with or without generating code."""
    side = LIBRARY if door in OURS else THEIRS
    if not code:
        wrap = UNCODED[side]
        assert wrap is not None
        return wrap
    if side == LIBRARY:  # transformers has graph breaks of its own, so not `SIDES`, which refuses them
        return lambda fn: torch.compile(fn, backend="dtensor")
    return SIDES[side].wrap


def shape_of(mesh: str) -> tuple[int, ...]:
    """Return the shape of a mesh, such as "2x2"."""
    return tuple(map(int, mesh.split("x")))


def mesh_of(shape: tuple[int, ...]) -> Any:
    return init_device_mesh("cpu", shape, mesh_dim_names=(DATA, TENSOR)[-len(shape) :])


def count(door: str, name: str, mesh: str, mode: Mode) -> dict[str, Counts]:
    """Count what the third step sends, by direction."""
    forget()
    shape, found = shape_of(mesh), dict[str, Counts]()
    with counting_ranks(prod(shape)), without_compile_caches():
        model = opened(door, name, mesh_of(shape), mode, compiling(door, False))
        for _ in range(2):
            model.step()
        with counted() as found["forward"]:
            out = model.forward()
        if mode == TRAINING:
            with counted() as found["backward"]:
                out.backward()
            with counted() as found["optimizer"]:
                model.update()
    return found


def calls(door: str, name: str, mesh: str) -> int:
    """Count the Python functions that the forward of the third step calls."""
    forget()
    shape, seen = shape_of(mesh), 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal seen
        seen += event == "call"

    with counting_ranks(prod(shape)), without_compile_caches():
        model = opened(door, name, mesh_of(shape), TRAINING, compiling(door, False))
        for _ in range(2):
            model.step()
        sys.setprofile(note)
        try:
            model.forward()
        finally:
            sys.setprofile(None)
    return seen


def first_on_rank(rank: int, door: str, name: str, mesh: str, end: Any) -> tuple[float, float]:
    """Return the seconds of the first step, on the clock and of this rank's processor."""
    model = opened(door, name, mesh_of(shape_of(mesh)), TRAINING, compiling(door, True))
    dist.barrier()
    start, busy = time.perf_counter(), time.process_time()
    model.step()
    return time.perf_counter() - start, time.process_time() - busy


@dataclass
class Found:
    """The results of the first rank.

    Attributes:
        step: link -> door -> seconds of a step in each round.
        losses: door -> loss of each warm-up step.
        peak: door -> bytes.
        errors: door -> why it does not run.
    """

    step: dict[str, dict[str, list[float]]]
    losses: dict[str, list[float]]
    peak: dict[str, int]
    errors: dict[str, str]


def steps_on_rank(rank: int, name: str, mesh: str, amount: Amount, links: tuple[str, ...], end: End | None) -> Found:
    """Do the part of one rank: train behind all doors on all links."""
    found, models = Found({}, {}, {}, {}), dict[str, Opened]()
    at = mesh_of(shape_of(mesh))
    for door in amount.doors:
        try:
            model = opened(door, name, at, TRAINING, compiling(door, True))
            found.losses[door] = [_mean(model.step()) for _ in range(WARM_UP)]
            models[door] = model
        except Exception as error:  # that a door does not work is a result
            found.errors[door] = reason(door, error)
            forget_failed()
    runs = {door: _several(model, amount.steps) for door, model in models.items()}
    for link in each(links, end):
        rounds = 4 * amount.rounds if link == LOOPBACK else amount.rounds
        times = interleaved(runs, rounds, before=dist.barrier)
        found.step[link] = {door: [s / amount.steps for s in rows] for door, rows in times.items()}
    if end is None:
        found.peak = {door: allocated(model.step) for door, model in models.items()}
    return found


def _several(model: Opened, steps: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(steps):
            model.step()

    return run


def _mean(value: float) -> float:
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return sum(gathered) / len(gathered)


def run(effort: Effort) -> Iterator[Record]:
    """Yield records of all jobs of the level."""
    amount = effort.of(AMOUNTS)
    for job in effort.progress(amount.jobs, "doors"):
        name, what, mesh, mode = job
        at = Setting("doors", name, f"{mode}, {mesh}", prod(shape_of(mesh)))
        yield from {COUNT: _counts, CALL: _calls, FIRST: _firsts, STEPS: _steps}[what](at, job, amount)


def _each(at: Setting, figure: str, amount: Amount, measured: Callable[[str], Any]) -> Iterator[tuple[str, Any]]:
    """Yield door and result, or door and the record of why there is none."""
    for door in amount.doors:
        try:
            yield door, measured(door)
        except Exception as error:  # that a door does not work is a result
            yield door, at.missing(figure, reason(door, error), BEST if figure != CALL else STYLES, door)


def _counts(at: Setting, job: Job, amount: Amount) -> Iterator[Record]:
    name, _, mesh, mode = job
    found = dict(_each(at, "step: bytes", amount, lambda door: count(door, name, mesh, mode)))
    whole = {door: sum([c.bytes for c in f.values()]) for door, f in found.items() if isinstance(f, dict)}
    if not whole.keys() & set(BY_HAND):
        yield from [f for f in found.values() if isinstance(f, Record)]
        return
    best = min([door for door in BY_HAND if door in whole], key=whole.__getitem__)
    for door, f in found.items():
        if not isinstance(f, dict):
            yield f
            continue
        for direction, c in f.items():
            theirs = found[best][direction].calls
            if c.calls or theirs:
                yield at.counted(f"{direction}: collectives", "collectives", c.calls, BEST, theirs, door, note=str(c))
        yield at.counted("step: bytes", "bytes", whole[door], BEST, whole[best], door, note=f"best by hand: {best}")


def _calls(at: Setting, job: Job, amount: Amount) -> Iterator[Record]:
    name, _, mesh, _ = job
    found = dict(_each(at, CALL, amount, lambda door: calls(door, name, mesh)))
    for door, n in found.items():
        yield n if isinstance(n, Record) else at.counted(CALL, "Python calls", n, STYLES, found[STYLES], door)


def _firsts(at: Setting, job: Job, amount: Amount) -> Iterator[Record]:
    name, _, mesh, _ = job

    def first(door: str) -> tuple[float, float]:
        with cold_caches():
            return on_ranks(first_on_rank, prod(shape_of(mesh)), door, name, mesh, timeout=1800)

    found = dict(_each(at, "first step", amount, first))
    for door, t in found.items():
        if isinstance(t, Record):
            yield t
            continue
        for i, figure in enumerate(("first step", "first step, processor")):
            yield at.counted(figure, "s", t[i], STYLES, found[STYLES][i], door)


def _steps(at: Setting, job: Job, amount: Amount) -> Iterator[Record]:
    name, _, mesh, _ = job
    ranks, parts = prod(shape_of(mesh)), []
    for _, found, without in on_links(amount.links, steps_on_rank, ranks, name, mesh, amount, timeout=3600):
        if without:
            yield at.missing("step", without)
        else:
            parts.append(found)
    for door, why in parts[0].errors.items():
        yield at.missing("step", why, STYLES, door)
    for found in parts:
        _check(found, name)
        for link, times in found.step.items():
            on = Setting("doors", at.model, at.plan, ranks, link)
            for door in times:
                yield on.timed("step", "ms", compared(times[door], times[STYLES], 1e3), STYLES, door)
        for door, most in found.peak.items():
            yield at.counted("peak of a step", "bytes", most, STYLES, found.peak[STYLES], door)


def _check(found: Found, name: str) -> None:
    expected = found.losses[STYLES]
    for door, losses in found.losses.items():
        if any(not abs(a - b) <= TOLERANCE * abs(a) for a, b in zip(expected, losses)):
            raise RanksFailed(f"{name}: losses by {door} differ, {losses} instead of {expected}")


__all__ = ["calls", "count", "run"]
