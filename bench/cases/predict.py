"""predict: what a step is predicted to take and to hold, beside what it does, for random plans.

Two ranks with gloo on loopback run one model under plans that are drawn at random: each parameter whole or cut along a
dim, read as stored or whole, the batch cut or not. Each step is compiled; all take turns. Processor and link are
measured first, on the ranks. The rank correlation is Spearman's. Memory is the peak of what the profiler reports as
allocated in a step, beside what persists; also for plans that the search found under bounds on memory, which no step
may exceed.
"""

import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import nn

from dtensor import Plan, Replicate, Shard, init_device_mesh, predict, search
from dtensor.tools.processor import measure as measure_processor

from ..effort import Effort
from ..models import Sizes
from ..ranks import on_ranks
from ..record import Record, Setting
from ..timing import interleaved
from .memory import allocated
from .search import AXIS, TURN, WARM, Trained, by_hand, calibrated, model_of

AMOUNTS: dict[str, tuple[tuple[str, ...], int, Sizes, int, bool]] = {
    "tiny": (("perceptron",), 2, Sizes(dim=16, seq=4, batch=4), 1, False),
    "quick": (("decoder",), 20, Sizes(dim=256, seq=128, batch=8), 5, True),
    "full": (("decoder", "llama", "wide", "images"), 20, Sizes(dim=256, seq=128, batch=8), 9, True),
}
"""Models, number of random plans, sizes, rounds, and whether code is generated."""


WITHIN = "found within"
BOUNDS = (1.05, 1.0, 0.95)
"""Bounds on memory, as fractions of what data parallel takes, for which plans are searched."""


def drawn(model: nn.Module, ranks: int, seed: int) -> Plan:
    """Return a random plan for one axis, in which layers that are alike are placed alike."""
    choose = random.Random(seed)
    parameters: dict[str, dict[str, Any]] = {}
    used: dict[str, dict[str, Any]] = {}
    for name, p in model.named_parameters():
        key = ".".join(["*" if word.isdigit() else word for word in name.split(".")])
        if key in parameters:
            continue
        dims = [d for d in range(p.ndim) if p.shape[d] % ranks == 0]
        where = choose.choice([None, *dims])
        parameters[key] = {} if where is None else {AXIS: Shard(where)}
        if where is not None and choose.random() < 0.3:
            used[key] = {AXIS: Replicate()}
    return Plan({AXIS: ranks}, parameters, used, {AXIS: Shard(0)} if choose.random() < 0.7 else {})


def on_rank(
    rank: int, name: str, sizes: Sizes, plans: int, rounds: int, code: bool, end: object
) -> dict[str, tuple[list[float], float, float, float]]:
    """Plan -> (seconds in each round, predicted seconds, bytes held at the peak, predicted bytes)."""
    n = dist.get_world_size()
    mesh = init_device_mesh("cpu", (n,), mesh_dim_names=(AXIS,))
    model, batch = model_of(name, sizes)
    machine = measure_processor("cpu")
    calibrated(mesh)
    given = by_hand(model, batch, {AXIS: n}) | {f"random {seed}": drawn(model, n, seed) for seed in range(plans)}
    how: dict[str, Any] = {"machine": machine, "optimizer_states": 0.0}
    most = predict(model, mesh, batch, given["ddp"], **how).prediction
    assert most is not None
    for bound in BOUNDS if plans > 2 else ():
        given[f"{WITHIN} {bound * most.memory:.0f}"] = search(model, mesh, batch, memory=bound * most.memory, **how)
    steps, held, said = {}, {}, {}
    for side, plan in given.items():
        expected = predict(model, mesh, batch, plan, **how).prediction
        assert expected is not None
        said[side] = expected.seconds, expected.memory
        step = steps[side] = Trained(model, mesh, plan, batch, code)
        for _ in range(2):
            step()
        dist.barrier()
        step.model.zero_grad()  # a step begins with it, and nothing sees what that frees
        held[side] = float(step.persistent() + allocated(step))
    times = interleaved(steps, rounds, TURN, dist.barrier, WARM)
    return {side: (times[side], said[side][0], held[side], said[side][1]) for side in given}


def correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Return Spearman's rank correlation."""
    first, second = (np.argsort(np.argsort(values)) for values in (one, other))
    return float(np.corrcoef(first, second)[0, 1])


def run(effort: Effort) -> Iterator[Record]:
    """Yield the records of each model."""
    models, plans, sizes, rounds, code = effort.of(AMOUNTS)
    for name in effort.progress(models, "predict"):
        found = on_ranks(on_rank, 2, name, sizes, plans, rounds, code, timeout=3000)
        at = Setting("predict", name, "random", 2)
        bounds = {side: float(side.split()[-1]) for side in found if side.startswith(WITHIN)}
        for side, bound in bounds.items():
            place = Setting("predict", name, side, 2)
            yield place.counted("memory", "bytes", found[side][2], "its bound", bound)
        found = {side: f for side, f in found.items() if side not in bounds}
        measured = {side: float(np.median(times)) for side, (times, *_) in found.items()}
        yield at.alone(
            "rank correlation of times", correlation(list(measured.values()), [f[1] for f in found.values()]), "of 1"
        )
        wrong = [abs(expected / held - 1) for _, _, held, expected in found.values()]
        yield at.alone("largest error of memory", max(wrong), "of 1")
        yield at.alone("median error of memory", float(np.median(wrong)), "of 1")
        for side, (_, seconds, held, expected) in found.items():
            place = Setting("predict", name, side, 2)
            yield place.counted("step", "ms", 1e3 * seconds, "measured", 1e3 * measured[side], "predicted")
            yield place.counted("memory", "bytes", expected, "measured", held, "predicted")


__all__ = ["run"]
