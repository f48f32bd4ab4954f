"""record: what recording a training step by `dtensor.record` costs, compared with a step that is not recorded.

Two ranks on this machine train a model with AdamW. Compiled code that hands out values is other code, so nothing is
timed while both are there: in each round one side after the other compiles, takes a step, and is timed in the next
ones. "bytes of a value" is the size of the record, of all ranks, per value.
"""

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

import dtensor
from dtensor import init_device_mesh
from dtensor.tools.demo_plans import PLANS

from ..effort import Effort
from ..models import Model, Sizes, named
from ..ranks import on_ranks
from ..record import OURS, Record, Setting
from ..sides import batch, forget
from ..timing import compared, seconds
from .watch import trainer

RANKS = 2
UNRECORDED = "not recorded"
MODES = {"eager": True, "compiled": False}
"""How the step runs -> whether it is eager."""


@dataclass(frozen=True)
class Amount:
    """What is measured at a level, and how often.

    Attributes:
        plans: plans of the model.
        model: name of the model.
        sizes: its sizes.
        steps: number of steps in a turn.
        rounds: number of rounds.
        modes: keys of `MODES`.
    """

    plans: tuple[str, ...]
    model: str
    sizes: Sizes
    steps: int
    rounds: int
    modes: tuple[str, ...] = tuple(MODES)


REAL = Sizes(dim=512, seq=128, batch=8, heads=8)
AMOUNTS = {
    "tiny": Amount(("tp",), "mlp", Sizes(dim=16, seq=4, batch=2), 2, 2, ("eager",)),
    "quick": Amount(("tp", "fsdp"), "transformer-2", REAL, 3, 3),
    "full": Amount(("tp", "fsdp"), "transformer-8", REAL, 3, 7),
}


@dataclass
class Found:
    """What a rank measured: seconds of a step in each round, by side, and how many values it wrote."""

    times: dict[str, list[float]]
    values: int = 0


def on_rank(rank: int, model: Model, plan: str, amount: Amount, mode: str, folder: str, end: Any) -> Found:
    """Time the steps of both sides on this rank."""
    chosen = PLANS[plan]
    mesh = init_device_mesh("cpu", chosen.mesh_shape(dist.get_world_size()), mesh_dim_names=chosen.axes)
    given = batch(model, plan, mesh, 0)
    side = trainer(model, plan, mesh, MODES[mode])
    side.step(*given)
    found = Found({OURS: [], UNRECORDED: []})

    def timed(name: str) -> None:
        side.step(*given)
        dist.barrier()
        found.times[name].append(seconds(lambda: side.step(*given), amount.steps))

    def recorded() -> None:
        recorder = dtensor.record(folder)
        with recorder:
            timed(OURS)
        found.values = recorder.index

    turns: list[Callable[[], None]] = [recorded, lambda: timed(UNRECORDED)]
    for k in range(amount.rounds):
        for turn in turns if k % 2 else reversed(turns):
            forget()
            turn()
    return found


def run(effort: Effort) -> Iterator[Record]:
    """Yield records for each plan, eager and compiled."""
    amount: Amount = effort.of(AMOUNTS)
    model = named(amount.model, amount.sizes)
    jobs = [(plan, mode) for plan in amount.plans for mode in amount.modes]
    for plan, mode in effort.progress(jobs, "record"):
        at = Setting("record", model.name, plan, RANKS)
        with tempfile.TemporaryDirectory(prefix="dtensor-bench-record-") as folder:
            found: Found = on_ranks(on_rank, RANKS, model, plan, amount, mode, folder)
            size = sum([path.stat().st_size for path in Path(folder).iterdir()])
        yield at.timed(f"step, {mode}", "ms", compared(found.times[OURS], found.times[UNRECORDED], 1e3), UNRECORDED)
        yield at.alone(f"bytes of a value, {mode}", size / RANKS / found.values, "bytes")


__all__ = ["run"]
