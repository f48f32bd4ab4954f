"""watch: what `dtensor.watch` costs a training step, compared with a step that nobody watches.

Two ranks on this machine train two copies of a model with AdamW, of which one is watched. "step" is the mean time of as
many steps as there are from one comparison to the next, one comparison included, in rounds in which both take a turn.
"comparison" is one alone at the end of each round, and its peer all these steps: a share that is lost in the noise of
the former.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import dtensor
from dtensor import init_device_mesh
from dtensor.tools.demo_plans import PLANS

from ..effort import Effort
from ..models import Model, Sizes, named
from ..ranks import on_ranks
from ..record import OURS, Record, Setting
from ..sides import Trainer, batch, made
from ..timing import compared, interleaved, seconds

RANKS = 2
UNWATCHED, STEPS = "unwatched", "{} steps"
SIDES = {False: "dtensor", True: "dtensor eager"}
RATE = 1e-3


@dataclass(frozen=True)
class Amount:
    """What is measured at a level, and how often.

    Attributes:
        plans: plans of the model.
        model: name of the model.
        sizes: its sizes.
        every: number of steps from one comparison to the next.
        rounds: number of rounds.
        eager: whether the step is not compiled.
    """

    plans: tuple[str, ...]
    model: str
    sizes: Sizes
    every: int
    rounds: int
    eager: bool = False


SMALL, REAL = Sizes(dim=128, seq=64, batch=8), Sizes(dim=256, seq=128, batch=8)
AMOUNTS = {
    "tiny": Amount(("ddp",), "mlp", Sizes(dim=16, seq=4, batch=2), 2, 2, True),
    "quick": Amount(("ddp", "tp", "fsdp"), "transformer-2", SMALL, 100, 5),
    "full": Amount(("ddp", "tp", "fsdp"), "transformer-8", REAL, 100, 7),
}

Times = dict[str, list[float]]


def trainer(model: Model, plan: str, mesh: Any, eager: bool) -> Trainer:
    """Return a trainer whose optimizer has a state."""
    found = made(SIDES[eager], model, plan, mesh)
    found.optimizer = torch.optim.AdamW(found.model.parameters(), lr=RATE)
    return found


def on_rank(rank: int, model: Model, plan: str, amount: Amount, end: Any) -> Times:
    """Return the seconds of a step, watched and not, and of a comparison, in each round."""
    chosen = PLANS[plan]
    mesh = init_device_mesh("cpu", chosen.mesh_shape(dist.get_world_size()), mesh_dim_names=chosen.axes)
    given = batch(model, plan, mesh, 0)
    sides = {side: trainer(model, plan, mesh, amount.eager) for side in (OURS, UNWATCHED)}
    for side in sides.values():
        side.step(*given)
    watched = dtensor.watch(sides[OURS].model, sides[OURS].optimizer, every=amount.every)
    runs = {name: lambda side=side: side.step(*given) for name, side in sides.items()}
    found: Times = {name: [] for name in (*runs, "comparison")}
    for _ in range(amount.rounds):
        for name, times in interleaved(runs, 1, amount.every, before=dist.barrier).items():
            found[name] += times
        found["comparison"].append(seconds(watched.check))
    return found


def run(effort: Effort) -> Iterator[Record]:
    """Yield records for each plan."""
    amount: Amount = effort.of(AMOUNTS)
    model = named(amount.model, amount.sizes)
    for plan in effort.progress(amount.plans, "watch"):
        times: Times = on_ranks(on_rank, RANKS, model, plan, amount)
        at = Setting("watch", model.name, plan, RANKS)
        yield at.timed("step", "ms", compared(times[OURS], times[UNWATCHED], 1e3), UNWATCHED)
        between = [amount.every * step for step in times[UNWATCHED]]
        yield at.timed("comparison", "ms", compared(times["comparison"], between, 1e3), STEPS.format(amount.every))


__all__ = ["run"]
