"""remedies: the exposed time of collectives, measured beside estimated, and what remedies save of what is said.

Two ranks with gloo are joined by a link of 20 Mbit/s, which is measured first. A fully sharded Transformer and a tensor
parallel Llama are compiled, and measured as `dtensor inspect --measure` does it. Of the ten most exposed collectives of
each there is a row, with the most effective remedy that the report has, or the reason why there is none. Then remedies
are applied, one at a time, and steps with and without it take turns.
"""

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

import dtensor.compile
from dtensor import Shard, init_device_mesh, prepare
from dtensor.compile.reports.remedies import with_remedies
from dtensor.compile.reports.summary import what
from dtensor.mesh.mesh import facts
from dtensor.parallel import ColwiseParallel, MixedPrecisionPolicy, fully_shard, loss_parallel, parallelize_module
from dtensor.tools.calibration import CalibrationOptions, fit, measure
from dtensor.tools.demo_plans import PLANS

from .. import namespaces
from ..effort import Effort
from ..models import Sizes, loss, named
from ..namespaces import End
from ..plans import own_part, styles
from ..ranks import on_ranks
from ..record import Record, Setting
from ..sides import RATE
from ..timing import interleaved, quartiles

LINK, BURST, LOOPBACK = "20mbit", "8kb", "loopback"
CALIBRATION = CalibrationOptions(sizes=(1 << 16, 1 << 18, 1 << 20, 1 << 21), rounds=4)
MOST = 10
MODELS = {"fsdp": "transformer-4", "tp": "llama-2"}
AMOUNTS: dict[str, tuple[Sizes, int, bool]] = {
    "tiny": (Sizes(dim=16, seq=4, batch=4), 2, False),
    "quick": (Sizes(dim=64, seq=32, vocab=1024), 6, False),
    "full": (Sizes(dim=64, seq=32, vocab=1024), 12, True),
}
"""Sizes of the models, rounds, and whether code is generated: on such a link that saves next to nothing."""


@dataclass(frozen=True)
class Program:
    """How a step is written: without a remedy, or with one.

    Attributes:
        options: options of the backend.
        policy: dtypes of fully sharded parameters and gradients.
        microbatches: how often the model is called in a step.
        sync: whether each microbatch reduces its gradients.
        autocast: whether activations are computed in bfloat16.
        sharded_loss: whether the loss takes sharded logits.
    """

    options: dict[str, Any] = field(default_factory=dict)
    policy: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    microbatches: int = 1
    sync: bool = True
    autocast: bool = False
    sharded_loss: bool = False


REMEDIES: dict[str, dict[str, tuple[Program, Program]]] = {
    "fsdp": {
        "memory_budget": (Program(), Program(options={"memory_budget": 1 << 40})),
        "param_dtype": (Program(), Program(policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))),
        "reduce_dtype": (Program(), Program(policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))),
        "set_requires_gradient_sync": (Program(microbatches=2), Program(microbatches=2, sync=False)),
    },
    "tp": {
        "loss_parallel": (Program(), Program(sharded_loss=True)),
        "autocast": (Program(), Program(autocast=True)),
    },
}
"""Plan -> a word of a remedy -> the step without and with it."""


def step_of(name: str, sizes: Sizes, plan: str, mesh: Any, program: Program, code: bool) -> Callable[[], object]:
    """Return a training step."""
    like = named(name, sizes)
    model: Any = like.dense()
    if plan == "fsdp":
        for layer in model.get_submodule("layers").children():
            fully_shard(layer, mesh=mesh, mp_policy=program.policy)
        model = fully_shard(model, mesh=mesh, mp_policy=program.policy)
    else:
        given = styles(like.family, "dtensor", sequence=False)
        if program.sharded_loss:
            given["output"] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
        model = parallelize_module(model, mesh, given)
    inputs, targets = (own_part(x, like.family, plan, mesh) for x in like.batch(0))

    def forward(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=program.autocast):
            outputs = model(inputs)
            with loss_parallel() if program.sharded_loss else contextlib.nullcontext():
                return loss(outputs, targets)

    options = program.options if code else {**program.options, "inner": "aot_eager"}
    compiled = torch.compile(forward, backend="dtensor", fullgraph=True, options=options)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)

    def step() -> None:
        for k in range(program.microbatches):
            if not program.sync:
                model.set_requires_gradient_sync(k == program.microbatches - 1)
            compiled(inputs, targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@dataclass(frozen=True)
class Found:
    """What the first rank found.

    Attributes:
        collectives: of each its description and its remedy, and its exposed seconds, estimated and measured.
        saved: word of a remedy -> seconds of a step that it was said to save, and that it saved in each round.
    """

    collectives: list[tuple[str, float, float]]
    saved: dict[str, tuple[float, list[float]]]


def on_rank(rank: int, name: str, sizes: Sizes, plan: str, rounds: int, code: bool, end: End | None) -> Found:
    """Measure a model, and apply the remedies."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=PLANS[plan].axes)
    if end is not None:
        namespaces.limit(end, LINK, BURST)
        dist.barrier()
        links = [fit(measure(facts(mesh).groups[(0,)], CALIBRATION))]
        dist.broadcast_object_list(links)
        prepare(mesh, links=links)

    def made(program: Program) -> Callable[[], object]:
        return step_of(name, sizes, plan, mesh, program, code)

    with tempfile.TemporaryDirectory() as folder, dtensor.compile.dump(folder):
        report = dtensor.compile.measure(made(Program()), steps=rounds)
    collectives = [c for m in report.manifests for c in with_remedies(m)]
    saved = {}
    for word, pair in REMEDIES[plan].items():
        said = max([r["step"] for c in collectives for r in c["remedies"] if word in r["write"]], default=0.0)
        torch.compiler.reset()
        sides: dict[str, Callable[[], object]] = dict(zip(("without", "with"), map(made, pair)))
        for step in sides.values():
            for _ in range(2):
                step()
        times = interleaved(sides, rounds, before=dist.barrier)
        saved[word] = said, [a - b for a, b in zip(times["without"], times["with"])]
    most = sorted(collectives, key=lambda c: -c["exposed"])[:MOST]
    return Found([(_named(c), c["exposed"], c["measured"]["exposed"]) for c in most], saved)


def _named(c: dict[str, Any]) -> str:
    first = next(iter(c["remedies"]), {"write": "", "why": "nothing is exposed"})
    return f"{what(c).partition('exposed: ')[2]}; to write: {first['write'] or 'none, ' + first['why']}"


def run(effort: Effort) -> Iterator[Record]:
    """Yield, of each model, the records of its most exposed collectives and of its remedies."""
    (sizes, rounds, code), without = effort.of(AMOUNTS), namespaces.why_not()
    tiny = effort.level == "tiny"
    for plan, name in effort.progress(MODELS.items(), "remedies"):
        at = Setting("remedies", name, plan, 2, LOOPBACK if tiny else LINK)
        if without and not tiny:
            yield at.missing("exposed", without)
            continue
        with contextlib.nullcontext() if tiny else namespaces.joined() as ends:
            found = on_ranks(on_rank, 2, name, sizes, plan, rounds, code, ends=ends, timeout=1500)
        for k, (words, estimated, measured) in enumerate(found.collectives, 1):
            yield at.counted(f"{k}. {words}", "ms", 1e3 * measured, "estimated", 1e3 * estimated, "measured")
        for word, (said, saved) in found.saved.items():
            low, middle, high = (1e3 * x for x in quartiles(saved))
            note = f"{low:.0f} to {high:.0f} ms"
            yield at.counted(f"saved of a step by {word}", "ms", middle, "said", 1e3 * said, "measured", note=note)


__all__ = ["run"]
