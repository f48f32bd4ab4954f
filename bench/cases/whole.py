"""whole: a training step with clipping and optimizers as one graph, against the same in three, and against torch.

"dtensor" is `dtensor.compile.step`. In three graphs the model with its loss is compiled, and so are the steps of the
optimizers; clipping between them runs operator by operator. Torch's sides are FSDP2 and DDP with a compiled model and
optimizers as torch runs them. With Muon, parameters that are no matrices are AdamW's. "float8" is "dtensor" with
parameters and gradients sent in float8. Losses are compared before anything is timed. The peak is what one step of the
first rank allocates, of a mesh of which the others do not exist. "Within" a part of the memory is "dtensor" with that
part of all it holds, parameters and states included, as its bound; its peak is compared with the bound.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import dtensor.compile
from dtensor import DTensor, init_device_mesh
from dtensor.parallel import MixedPrecisionPolicy, clip_grad_norm_
from dtensor.tools.demo_plans import PLANS

from .. import models
from ..counting import counting_ranks
from ..effort import Effort
from ..links import LOOPBACK, RATES, each, on_links
from ..models import Model, Sizes, named
from ..namespaces import End
from ..plans import applied
from ..record import OURS, Record, Setting
from ..sides import batch, forget, reason
from ..timing import compared, interleaved
from .memory import allocated

THREE, TORCH, NARROW = "three graphs", "torch", "float8"
WITHIN = {"within 0.95": 0.95, "within 0.9": 0.9}
"""Sides with a bound on memory -> the part of what the step holds without one."""

FAST = RATES[0]


@dataclass(frozen=True)
class Job:
    """A model of `bench.models` by a plan of the demo, and its optimizer."""

    model: str
    plan: str
    optimizer: str
    ranks: int = 2


AMOUNTS: dict[str, tuple[tuple[Job, ...], Sizes, int, tuple[str, ...]]] = {
    "tiny": ((Job("mlp", "fsdp", "AdamW"),), Sizes(dim=16, seq=4, batch=4), 2, (LOOPBACK,)),
    "quick": (
        (
            *[Job("llama-2", plan, "AdamW") for plan in ("fsdp", "ddp", "tp")],
            Job("llama-2", "fsdp", "Muon"),
        ),
        Sizes(dim=256, seq=128, batch=8, vocab=1024, heads=8, kv_heads=4),
        8,
        (LOOPBACK, FAST),
    ),
    "full": (
        tuple(
            [Job("llama-2", plan, o, n) for n in (2, 4) for plan in ("fsdp", "ddp", "tp") for o in ("AdamW", "Muon")]
        ),
        Sizes(dim=256, seq=128, batch=8, vocab=1024, heads=8, kv_heads=4),
        15,
        (LOOPBACK, *RATES),
    ),
}
"""Jobs, sizes, rounds, and links."""


def optimizers(name: str, model: nn.Module) -> list[torch.optim.Optimizer]:
    """AdamW for all parameters, or Muon for those that are matrices and AdamW for the others."""
    held = list(model.parameters())
    first = [p for p in held if p.dim() == 2] if name == "Muon" else []
    rest = [p for p in held if p.dim() != 2 or name != "Muon"]
    found: list[torch.optim.Optimizer] = [torch.optim.Muon(first, lr=1e-3)] if first else []
    return [*found, torch.optim.AdamW(rest, lr=1e-3)] if rest else found


@dataclass(frozen=True)
class Trained:
    """The step of a side, from a batch to its loss, and what stays between steps."""

    step: Callable[[Any, Any], Any]
    model: nn.Module
    optimizers: list[torch.optim.Optimizer]

    def standing(self, given: tuple[Any, Any]) -> int:
        """Bytes of parameters, states of optimizers and a batch on this rank."""
        states = [s for o in self.optimizers for state in o.state.values() for s in state.values()]
        held = [t for t in (*self.model.parameters(), *states, *given) if isinstance(t, torch.Tensor)]
        return sum([(t.to_local() if isinstance(t, DTensor) else t).nbytes for t in held])


def trained(side: str, job: Job, model: Model, mesh: Any, agreement: bool = True, memory: int | None = None) -> Trained:
    """A side. `memory` is its bound, if it has one."""
    options = {} if agreement else {"agreement": False}
    library = "torch" if side == TORCH else "dtensor"
    narrow = MixedPrecisionPolicy(gather_dtype=torch.float8_e4m3fn, reduce_dtype=torch.float8_e4m3fn)
    given = {"mp_policy": narrow} if side == NARROW else {}
    built = applied(model.dense(mesh.device_type), model.family, library, job.plan, mesh, **given)
    steps = optimizers(job.optimizer, built)
    clip: Any = torch.nn.utils.clip_grad_norm_ if side == TORCH else clip_grad_norm_

    def loss(inputs: Any, targets: Any) -> Any:
        return models.loss(built(inputs), targets)

    if side in (OURS, NARROW, *WITHIN):

        def whole(inputs: Any, targets: Any) -> Any:
            found = loss(inputs, targets)
            found.backward()
            clip(built.parameters(), 1.0)
            for optimizer in steps:
                optimizer.step()
                optimizer.zero_grad()
            return found.detach()

        return Trained(dtensor.compile.step(whole, memory=memory, options=options), built, steps)
    ours: dict[str, Any] = {} if side == TORCH else {"backend": "dtensor", "options": options}
    forward: Any = torch.compile(loss, **ours)
    updates = [o.step if side == TORCH else torch.compile(o.step, **ours) for o in steps]

    def apart(inputs: Any, targets: Any) -> Any:
        found = forward(inputs, targets)
        found.backward()
        clip(built.parameters(), 1.0)
        for optimizer, update in zip(steps, updates):
            update()
            optimizer.zero_grad()
        return found.detach()

    return Trained(apart, built, steps)


def sides(job: Job) -> tuple[str, ...]:
    """What is compared; of tensor parallelism torch's compiled side is timed in `step`."""
    narrow = (NARROW,) if job.plan in ("fsdp", "ddp") and job.optimizer == "AdamW" else ()
    within = tuple(WITHIN) if job.plan == "fsdp" and job.optimizer == "AdamW" else ()
    return (OURS, THREE) if job.plan == "tp" else (OURS, THREE, TORCH, *narrow, *within)


def mesh_of(job: Job) -> Any:
    """The mesh of the plan for so many ranks."""
    plan = PLANS[job.plan]
    return init_device_mesh("cpu", plan.mesh_shape(job.ranks), mesh_dim_names=plan.axes)


def on_rank(
    rank: int, job: Job, sizes: Sizes, rounds: int, links: tuple[str, ...], end: End | None
) -> tuple[dict[str, dict[str, list[float]]], dict[str, str]]:
    """Time each side on each link: link -> side -> seconds in each round; and why a side does not run."""
    model, mesh = named(job.model, sizes), mesh_of(job)
    given = [batch(model, job.plan, mesh, k) for k in range(4)]
    runs: dict[str, Callable[[], Any]] = {}
    losses: dict[str, list[float]] = {}
    failed: dict[str, str] = {}
    most = 0
    for side in sides(job):
        try:
            made = trained(side, job, model, mesh, memory=bound(side, most))
            losses[side] = [value(made.step(*x)) for x in given]
            runs[side] = lambda made=made: made.step(*given[0])
            if side == OURS:
                most = on_all(allocated(runs[side]) + made.standing(given[0]))
        except Exception as error:  # the failure of a peer is a result
            if side == OURS:
                raise
            failed[side] = reason(side, error)
    for side, found in losses.items():
        for a, b in zip(losses[OURS], found):
            near = 1e-2 if side == NARROW else 1e-3
            assert abs(a - b) <= near * abs(b), f"{job}: losses of {side} differ: {found} and {losses[OURS]}"
    times: dict[str, dict[str, list[float]]] = {}
    for link in each(links, end):
        times[link] = interleaved(runs, rounds, calls=2, before=dist.barrier, warm=1)
    return times, failed


def value(loss: Any) -> float:
    """A loss as a number."""
    return float(loss.full_tensor() if isinstance(loss, DTensor) else loss)


def on_all(most: int) -> int:
    """The largest of a number that each rank has."""
    found = torch.tensor(most)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return int(found)


def bound(side: str, most: int) -> int | None:
    """The bound of a side on memory, if it has one; `most` is what a step holds without one."""
    return int(WITHIN[side] * most) if side in WITHIN else None


def peak(side: str, job: Job, sizes: Sizes, most: int = 0) -> tuple[int, int]:
    """Return the bytes that the fourth step allocates, at its peak, and those that stand between steps."""
    forget()
    with counting_ranks(job.ranks):
        model, mesh = named(job.model, sizes), mesh_of(job)
        made = trained(side, job, model, mesh, agreement=False, memory=bound(side, most))
        given = batch(model, job.plan, mesh, 0)
        for _ in range(3):
            made.step(*given)
        return allocated(lambda: made.step(*given)), made.standing(given)


def run(effort: Effort) -> Iterator[Record]:
    """Yield records of each job and link."""
    jobs, sizes, rounds, links = effort.of(AMOUNTS)
    for job in effort.progress(jobs, "whole"):
        most = 0
        if job.plan != "tp":  # of which eager mode, the first step, asks the other ranks
            took, standing = peak(OURS, job, sizes)
            most = took + standing
            yield _setting(job, "").counted("peak", "bytes", took, THREE, peak(THREE, job, sizes)[0])
            for side in [s for s in WITHIN if s in sides(job)]:
                figure, room = f"peak {side}", bound(side, most)
                try:
                    held = sum(peak(side, job, sizes, most))
                except Exception as error:  # so small a step cannot do with less
                    yield _setting(job, "").missing(figure, reason(side, error))
                else:
                    yield _setting(job, "").counted(figure, "bytes", held, "the bound", room or 0)
        for at, found, without in on_links(links, on_rank, job.ranks, job, sizes, rounds):
            if without:
                yield _setting(job, at[0]).missing("step", without)
            else:
                yield from _records(job, *found)


def _setting(job: Job, link: str) -> Setting:
    return Setting("whole", job.model, f"{job.plan}, {job.optimizer}", job.ranks, link)


def _records(job: Job, times: dict[str, Any], failed: dict[str, str]) -> Iterator[Record]:
    for link, found in times.items():
        for peer in found:
            if peer in (NARROW, *WITHIN):
                yield _setting(job, link).timed("step", "ms", compared(found[peer], found[OURS], 1e3), OURS, peer)
            elif peer != OURS:
                yield _setting(job, link).timed("step", "ms", compared(found[OURS], found[peer], 1e3), peer)
    for peer, why in failed.items():
        yield _setting(job, next(iter(times))).missing("step", why, peer)


__all__ = ["run"]
