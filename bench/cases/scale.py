"""scale: predicted time and communication of a step on meshes of up to 4096 ranks, and the error of the prediction.

A prediction is the simulation of the schedule of the compiled graphs (`dtensor.compile`), priced as `dtensor.prices`
says: collectives by latency and bandwidth, operators by a roofline. The graphs are compiled by one process, the first
rank of the mesh. All axes have the link that this run measures on loopback, as `dtensor calibrate` does. Each rank's
part of the batch stays the same, so that with perfect scaling the ratio to the fewest ranks is one. The error of the
model is its prediction for two ranks over the time that two processes take for forward and backward, with operators
run one by one, as the model assumes.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from dtensor import init_device_mesh, prepare
from dtensor.compile import report
from dtensor.prices.links import Link
from dtensor.testing import fake_ranks
from dtensor.tools import calibration
from dtensor.tools.demo_plans import PLANS

from ..effort import Effort
from ..models import Model, Sizes, named
from ..namespaces import End
from ..ranks import on_ranks
from ..record import OURS, Record, Setting
from ..sides import batch, made
from ..timing import Ratio, quartiles, seconds
from ..uncoded import UNCODED

SIZES = {"tiny": Sizes(dim=16, seq=8, batch=4), "quick": Sizes(dim=256, seq=128), "full": Sizes(dim=256, seq=128)}
MESHES = {
    "tiny": {"hsdp": ((1, 2), (2, 2))},
    "quick": {
        "hsdp": ((1, 8), (32, 8), (512, 8)),
        "3d": ((1, 2, 4), (32, 2, 4), (512, 2, 4)),
    },
}
MESHES["full"] = {
    "tp": ((2,), (4,)),
    "sp": ((2,), (4,)),
    "fsdp": ((2,), (8,), (32,), (128,)),
    "hsdp": tuple([(n, 8) for n in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)]),
    "3d": tuple([(n, 2, 4) for n in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)]),
}
"""Level -> plan -> shapes of meshes, the smallest first."""

MEASURED = {"tiny": (), "quick": ("tp", "sp", "fsdp"), "full": ("tp", "sp", "fsdp")}
ROUNDS = 9
LOOPBACK = "loopback"


def measured_link() -> Link:
    """Measure and return the link between two processes on this machine."""
    options = calibration.CalibrationOptions(sizes=tuple(4**k for k in range(5, 12)), rounds=5)
    return on_ranks(_calibrated, 2, options)


def _calibrated(rank: int, options: Any, end: End | None) -> Link:
    group: Any = dist.group.WORLD
    return calibration.fit(calibration.measure(group.group_name, options))


def predicted(model: Model, plan: str, shape: tuple[int, ...], link: Link) -> dict[str, float]:
    """Return the seconds of the step, of its communication, and of its exposed communication, by simulation."""
    torch.compiler.reset()
    with fake_ranks(math.prod(shape)):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=PLANS[plan].axes)
        prepare(mesh, links=[link] * len(shape))
        trainer = made(OURS, model, plan, mesh, UNCODED[OURS])
        given = model.batch(0)  # each rank's part, whatever the mesh
        trainer.backward(trainer.forward(*given))
        graphs = report().manifests[-1]["graphs"].values()
        return {key: sum(g[key] for g in graphs) for key in ("seconds", "communicating", "exposed")}


def on_rank(rank: int, model: Model, plan: str, end: End | None) -> list[float]:
    """Return the seconds of forward and backward in each round."""
    mesh = init_device_mesh("cpu", PLANS[plan].mesh_shape(dist.get_world_size()), mesh_dim_names=PLANS[plan].axes)
    trainer, given = made(OURS, model, plan, mesh, UNCODED[OURS]), batch(model, plan, mesh, 0)
    found = []
    for _ in range(ROUNDS + 2):
        dist.barrier()
        found.append(seconds(lambda: trainer.backward(trainer.forward(*given))))
        trainer.optimizer.zero_grad()
    return found[2:]


def run(effort: Effort) -> Iterator[Record]:
    """Yield records of the model's error, and of all meshes."""
    model, meshes = named("transformer-2", effort.of(SIZES)), effort.of(MESHES)
    link = Link() if effort.level == "tiny" else measured_link()
    jobs = [("error", plan) for plan in effort.of(MEASURED)] + list(meshes)
    for job in effort.progress(jobs, "scale"):
        if isinstance(job, tuple):
            yield _error(model, job[1], link)
        else:
            yield from _meshes(model, job, meshes[job], link)


def _error(model: Model, plan: str, link: Link) -> Record:
    """Return the record of the prediction for two ranks over the time they take; the spread is that of the time."""
    found = on_ranks(on_rank, 2, model, plan)
    guess = predicted(parts_of(model, PLANS[plan].parts(2)[0]), plan, (2,), link)["seconds"]
    low, middle, high = quartiles([guess / f for f in found])
    ratio = Ratio(1e3 * guess, 1e3 * quartiles(found)[1], middle, (low, high))
    at = Setting("scale", model.name, plan, 2, LOOPBACK)
    return at.timed("predicted forward and backward", "ms", ratio, "measured", note=str(link))


def parts_of(model: Model, parts: int) -> Model:
    """Return the model with one of `parts` parts of its batch."""
    sizes = model.sizes
    return Model(model.family, replace(sizes, batch=sizes.batch // parts))


def _meshes(model: Model, plan: str, shapes: tuple[tuple[int, ...], ...], link: Link) -> Iterator[Record]:
    found = {math.prod(s): predicted(model, plan, s, link) for s in shapes}
    fewest = min(found)
    for ranks, guess in found.items():
        at = Setting("scale", model.name, plan, ranks)
        for key, figure in (("seconds", "predicted step"), ("exposed", "predicted exposed communication")):
            note = f"communication {1e3 * guess['communicating']:.2f} ms"
            peer = f"{plan} on {fewest} ranks"
            yield at.counted(
                figure, "ms", 1e3 * guess[key], "the fewest ranks", 1e3 * found[fewest][key], note=f"{note}; {peer}"
            )


__all__ = ["measured_link", "predicted", "run"]
