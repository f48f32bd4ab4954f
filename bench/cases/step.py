"""step: the time of a training step (forward, backward, SGD), and how much of its communication is exposed.

Ranks are processes with gloo and one thread each. They run on loopback and, if namespaces can be made, on a link of
which each end sends at most 1 Gbit/s or 100 Mbit/s. All sides train in the same processes, from the same values and on
the same batches, in interleaved blocks of steps; their losses must agree. Besides the step, these are timed in the same
way:

    compute         the step without sending (collectives return at once)
    communication   what the step sends, sent again alone, one after the other

    exposed = step - compute        overlap = (compute + communication - step) / min(compute, communication)
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch.distributed as dist

from dtensor import init_device_mesh
from dtensor.tools.demo_plans import PLANS

from ..counting import counted, silent
from ..effort import Effort
from ..links import LOOPBACK, RATES, each, on_links
from ..models import Model, Sizes, named
from ..namespaces import End
from ..plans import NO_COLLECTIVES, RANKS
from ..ranks import RanksFailed
from ..record import OURS, Record, Setting
from ..sides import HALVES, batch, forget_failed, made, reason
from ..timing import compared, interleaved, quartiles
from ..uncoded import UNCODED

WARM_UP = 3
"""Steps of each side before the first block; the first step compiles."""

IN_HALVES = ("tp", "sp")
"""Plans that communicate activations; with others, microbatches would hide nothing."""

TOLERANCE = 1e-3
"""The largest allowed relative difference between the losses of two sides."""


@dataclass(frozen=True)
class Job:
    """A model, its plan, the number of ranks, and the links between them."""

    model: str
    plan: str
    ranks: int
    links: tuple[str, ...]


@dataclass(frozen=True)
class Amount:
    """What is measured at a level, and how often.

    Attributes:
        jobs: the jobs.
        sides: names of the sides.
        sizes: sizes of the models.
        rounds: number of rounds.
        steps: number of steps in a block.
        code: whether Inductor generates code for compiled sides.
    """

    jobs: tuple[Job, ...]
    sides: tuple[str, ...]
    sizes: Sizes
    rounds: int
    steps: int
    code: bool = True


REAL = Sizes(dim=256, seq=128, batch=8)
PEERS = ("torch eager", "torch compiled", "torch tuned", "by hand")
EVERYWHERE = (LOOPBACK, *RATES)
AMOUNTS = {
    "tiny": Amount(
        (Job("mlp", "tp", 2, (LOOPBACK,)),), (OURS, "torch eager"), Sizes(dim=16, seq=4, batch=2), 2, 1, False
    ),
    "quick": Amount(
        (
            *[Job("transformer-2", plan, 2, EVERYWHERE) for plan in ("tp", "sp")],
            *[Job("transformer-2", plan, 2, (LOOPBACK, RATES[0])) for plan in ("ddp", "fsdp")],
            *[Job("transformer-2", plan, 4, (RATES[0],)) for plan in ("hsdp", "2d")],
        ),
        (OURS, HALVES, *PEERS),
        REAL,
        5,
        2,
    ),
    "full": Amount(
        (
            *[Job(m, plan, n, EVERYWHERE) for m in ("mlp", "transformer-2", "llama-2") for plan, n in RANKS.items()],
            *[Job("transformer-2", plan, 4, EVERYWHERE) for plan in ("tp", "sp", "fsdp")],
            *[Job("transformer-8", plan, 2, EVERYWHERE) for plan in ("tp", "sp", "fsdp")],
        ),
        (OURS, HALVES, "dtensor eager", *PEERS),
        REAL,
        15,
        3,
    ),
}


@dataclass
class Found:
    """The results of the first rank.

    Attributes:
        step: link -> side -> seconds of a step in each round.
        compute: side -> seconds of the computation in each round.
        communication: link -> side -> seconds of the communication in each round.
        losses: side -> mean loss of all ranks in each warm-up step.
        errors: side -> why it does not run.
    """

    step: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    compute: dict[str, list[float]] = field(default_factory=dict)
    communication: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    losses: dict[str, list[float]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)


def on_rank(
    rank: int, model: Model, plan: str, sides: tuple[str, ...], amount: Amount, links: tuple[str, ...], end: End | None
) -> Found:
    """Do the part of one rank: run all sides on all links."""
    chosen = PLANS[plan]
    mesh = init_device_mesh("cpu", chosen.mesh_shape(dist.get_world_size()), mesh_dim_names=chosen.axes)
    batches = [batch(model, plan, mesh, i) for i in range(WARM_UP)]
    found, trainers = Found(), {}
    for side in sides:
        try:
            trainers[side] = made(side, model, plan, mesh, None if amount.code else UNCODED[side])
            found.losses[side] = [_mean(trainers[side].step(*b)) for b in batches]
        except Exception as error:
            if side == OURS:
                raise
            trainers.pop(side, None)
            found.errors[side] = reason(side, error)
            forget_failed()
    counts = {}
    for side, t in trainers.items():
        with counted() as counts[side]:
            t.step(*batches[0])
    runs = {side: _steps(t, batches[0], amount.steps) for side, t in trainers.items()}
    again = {side: c.replayed for side, c in counts.items()}
    for link in each(links, end):
        # On loopback, computation and the kernel's network stack share the cores, so many rounds are needed.
        rounds = {LOOPBACK: 4 * amount.rounds, RATES[-1]: max(2, amount.rounds // 2)}.get(link, amount.rounds)
        found.step[link] = _per_step(interleaved(runs, rounds, before=dist.barrier), amount.steps)
        found.communication[link] = interleaved(again, max(2, min(rounds, amount.rounds) // 2), before=dist.barrier)
    found.compute = _per_step(interleaved(_in_silence(runs), amount.rounds, before=dist.barrier), amount.steps)
    return found


def _steps(trainer: Any, given: tuple[Any, Any], steps: int) -> Any:
    def run() -> None:
        for _ in range(steps):
            trainer.step(*given)

    return run


def _in_silence(runs: dict[str, Any]) -> dict[str, Any]:
    def quiet(run: Any) -> Any:
        def call() -> None:
            with silent():
                run()

        return call

    return {side: quiet(run) for side, run in runs.items()}


def _per_step(seconds: dict[str, list[float]], steps: int) -> dict[str, list[float]]:
    return {side: [s / steps for s in found] for side, found in seconds.items()}


def _mean(value: float) -> float:
    """Return the mean of a loss over ranks, each of which has its part of the batch."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return sum(gathered) / len(gathered)


def run(effort: Effort) -> Iterator[Record]:
    """Yield records of all jobs of the level, on loopback and on the slow links."""
    amount = effort.of(AMOUNTS)
    jobs = {(j.model, j.plan, j.ranks): j for j in amount.jobs}
    for key in effort.progress(jobs, "step"):
        job = jobs[key]
        yield from _job(amount, job)


def _job(amount: Amount, job: Job) -> Iterator[Record]:
    model = named(job.model, amount.sizes)
    idle = ("torch tuned",) if job.plan in NO_COLLECTIVES else ()
    idle += () if job.plan in IN_HALVES else (HALVES,)
    sides = tuple([s for s in amount.sides if s not in idle])
    for links, found, without in on_links(job.links, on_rank, job.ranks, model, job.plan, sides, amount, timeout=600.0):
        if without:
            yield Setting("step", model.name, job.plan, job.ranks, links[0]).missing("step", without)
            continue
        _check(found, model, job.plan)
        for link in links:
            yield from _records(Setting("step", model.name, job.plan, job.ranks, link), found, link)


def _check(found: Found, model: Model, plan: str) -> None:
    for side, losses in found.losses.items():
        for ours, theirs in zip(found.losses[OURS], losses):
            if not abs(ours - theirs) <= TOLERANCE * abs(ours):
                raise RanksFailed(
                    f"{model.name}, {plan}: losses of {side} differ, {losses} instead of {found.losses[OURS]}"
                )


def _records(at: Setting, found: Found, link: str) -> Iterator[Record]:
    for peer, note in found.errors.items():
        yield at.missing("step", note, peer)
    times, alone = found.step[link], found.communication[link]
    exposed = {s: max(quartiles(times[s])[1] - quartiles(found.compute[s])[1], 0.0) for s in times}
    ours = [s for s in (OURS, HALVES) if s in times]
    for side, peer in product(ours, [s for s in times if s not in ours]):
        yield at.timed("step", "ms", compared(times[side], times[peer], 1e3), peer, side)
        yield at.timed("compute", "ms", compared(found.compute[side], found.compute[peer], 1e3), peer, side)
        mine, theirs = 1e3 * exposed[side], 1e3 * exposed[peer]
        yield at.counted("exposed communication", "ms", mine, peer, theirs, side, note="of medians")
    for side in times:
        step, compute, communication = (quartiles(t[side])[1] for t in (times, found.compute, alone))
        overlap = (compute + communication - step) / max(min(compute, communication), 1e-9)
        yield at.alone("overlap", overlap, "of 1", side, note=f"communication alone {1e3 * communication:.2f} ms")


__all__ = ["PEERS", "REAL", "on_rank", "run"]
