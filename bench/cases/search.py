"""search: seconds to find a plan, how good it is by its bound, and its step against those of well-known plans.

Finding is timed for the shapes of Llama 3.1 8B on meshes of up to 128 GPUs that are not there. Steps are those of found
plans and of plans written by hand, tensor parallel, data parallel and fully sharded, of one model in the same
processes: two or four ranks with gloo, on loopback and, if namespaces can be made, on links of 1 Gbit/s and 100 Mbit/s.
One model is also run forward only, as in inference. All are applied by `distribute_model` and compiled, so that they
differ in the plan alone; their losses must agree. Processor and link are measured first, on the ranks. "predicted" is
what the plan is expected to take. The model of cost is also held against steps on GPUs, our own on one and those that
torchtitan has published on up to 256; for these also what the search would have chosen, within the memory of the GPUs,
and what it would gain (`bench.published`).
"""

import copy
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._dynamo import config as dynamo_config

from dtensor import (
    Activation,
    DTensor,
    Plan,
    Shard,
    distribute_model,
    init_device_mesh,
    predict,
    prepare,
    search,
)
from dtensor.layout.placements import Placement
from dtensor.mesh.mesh import facts
from dtensor.parallel.search.best import SPARE
from dtensor.tools.calibration import CalibrationOptions, fit, measure
from dtensor.tools.processor import measure as measure_processor

from ..cuts import CUTS
from ..effort import Effort
from ..links import LOOPBACK, RATES, each, on_links
from ..models import Llama, Sizes, named
from ..namespaces import End
from ..published import GPU, H100, ROWS, STEPS, WIRE, Row, loss_of, machine_of, mesh_of, states_of
from ..published import model_of as published_model
from ..published import predicted as predicted_step
from ..ranks import RanksFailed
from ..record import Record, Setting
from ..timing import compared, interleaved

FORWARD = " forward"
"""At the end of a model's name: inference."""

FOUND = "found"
OUTER, AXIS = "y", "x"
TURN, WARM = 5, 2
"""Steps of a turn that are timed, and those before them, after which code and data are in the processor's caches."""


class Llama8B(Sizes):
    """The shapes of Llama 3.1 8B."""

    hidden = 14336  # type: ignore[assignment]


LARGE = Llama8B(layers=32, dim=4096, seq=8192, batch=128, vocab=128256, heads=32, kv_heads=8)
MODELS = ("decoder", "llama", "wide", "images")
AMOUNTS: dict[str, tuple[tuple[tuple[int, ...], ...], int, tuple[str, ...], Sizes, int]] = {
    "tiny": (((8,),), 1, ("perceptron",), Sizes(dim=16, seq=4, batch=4), 1),
    "quick": (((8,), (16, 8)), 32, MODELS, Sizes(dim=256, seq=128, batch=8), 8),
    "full": (
        ((8,), (16, 8), (4, 8, 4)),
        32,
        ("decoder", "llama", "wide", "images"),
        Sizes(dim=256, seq=128, batch=8),
        15,
    ),
}
"""Meshes, layers, models, their sizes, and rounds."""


class WithLoss(nn.Module):
    """A model that returns its loss."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = self.inner(x)
        return F.mse_loss(out, y) if y.is_floating_point() else F.cross_entropy(out.flatten(0, 1), y.flatten())


class Wide(nn.Module):
    """A wide perceptron between a large table and a head."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.table = nn.Embedding(32 * sizes.dim, sizes.dim)
        self.up, self.down = nn.Linear(sizes.dim, 8 * sizes.dim), nn.Linear(8 * sizes.dim, sizes.dim)
        self.head = nn.Linear(sizes.dim, sizes.vocab)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.down(F.relu(self.up(self.table(x)))))


class Images(nn.Module):
    """Convolutions, and a large linear layer."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 64, 3, padding=1, stride=2)
        self.up, self.head = nn.Linear(64 * 64, 4 * sizes.dim), nn.Linear(4 * sizes.dim, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(F.relu(self.up(F.relu(self.b(F.relu(self.a(x)))).flatten(1))))


def model_of(name: str, sizes: Sizes) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """Return a model that returns its loss, and a batch; the same on all ranks."""
    torch.manual_seed(0)
    name = name.removesuffix(FORWARD)
    if name in CUTS:
        inner, batch = CUTS[name].make()
        return WithLoss(inner), batch
    if name == "images":
        return WithLoss(Images(sizes)), (torch.randn(2 * sizes.batch, 3, 16, 16), torch.randn(2 * sizes.batch, 16))
    family = {"perceptron": "mlp", "decoder": "transformer-2", "llama": "llama-2", "wide": "transformer-2"}[name]
    like = named(family, sizes)
    inner = Wide(sizes) if name == "wide" else like.dense()
    x, y = like.batch(0)
    if name == "wide":
        x = x * 7 % (32 * sizes.dim)
    return WithLoss(inner), (x, y)


ROWS_OF = ("wo.weight", "w2.weight", "down.weight", "head.weight")
COLUMNS_OF = ("wq.weight", "wk.weight", "wv.weight", "w1.weight", "w3.weight", "up.weight", "w1.bias", "up.bias")
TABLES = ("embeddings.weight", "output.weight")
ENTERING = ("inner.layers.*.attention", "inner.layers.*.feed_forward", "inner.output")
LEAVING = ("inner.layers.*.attention", "inner.layers.*.feed_forward", "inner.tok_embeddings")
"""What tensor parallelism cuts, by the ends of names; and modules between which activations are cut along the
sequence."""


def by_hand(model: nn.Module, batch: Sequence[torch.Tensor], mesh: dict[str, int]) -> dict[str, Plan]:
    """Plans as one writes them; those that cut the batch only if it divides. With two axes tensor parallelism is over
    both of them or, in "2d", over the last one, with parameters fully sharded over the first."""
    ranks = math.prod(mesh.values())
    names = {n: p for n, p in model.named_parameters() if p.shape and p.shape[0] % ranks == 0}

    def over(axes: Sequence[str], dim: int) -> dict[str, Placement]:
        return {axis: Shard(dim) for axis in axes}

    def tensor_parallel(axes: Sequence[str]) -> dict[str, dict[str, Placement]]:
        cut = {n: over(axes, 1) for n in names if n.endswith(ROWS_OF)}
        return cut | {n: over(axes, 0) for n in names if n.endswith((*COLUMNS_OF, *TABLES))}

    data, everywhere = over(list(mesh), 0), over((), 0)
    found = {"tp": Plan(mesh, tensor_parallel(list(mesh)))}
    if any(hasattr(module, "feed_forward") for module in model.modules()):
        along = over(list(mesh), 1)
        borders = {f"{name}.input": Activation(everywhere, along) for name in ENTERING}
        borders |= {f"{name}.output": Activation(along, everywhere) for name in LEAVING}
        found["sp"] = replace(found["tp"], activations=borders)
    if any(len(x) % ranks for x in batch):
        return {"tp": found["tp"], "replicas": Plan(mesh)}
    found["ddp"] = Plan(mesh, inputs=data)
    found["fsdp"] = Plan(mesh, dict.fromkeys(names, data), dict.fromkeys(names, everywhere), data)
    if len(mesh) > 1:
        first, last = mesh
        inner = {n: tensor_parallel([last]).get(n, {}) for n in names}
        stored = {n: {first: Shard(0), **inner[n]} for n in names}
        found["2d"] = Plan(mesh, stored, inner, over([first], 0))
    return found


@dataclass(frozen=True)
class Outcome:
    """What was measured over one link.

    Attributes:
        times: plan -> seconds of a step in each round.
        plan: the plan that was found, in words.
        chosen: whether it has the cut that the model is made for, or None.
        predicted, gap: of it.
    """

    times: dict[str, list[float]]
    plan: str
    chosen: bool | None
    predicted: float
    gap: float


def on_rank(
    rank: int, name: str, sizes: Sizes, rounds: int, code: bool, links: tuple[str, ...], end: End | None
) -> dict[str, Outcome]:
    """Link -> what was measured."""
    n = dist.get_world_size()
    axes = {AXIS: n} if n < 4 else {OUTER: n // 2, AXIS: 2}
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    model, batch = model_of(name, sizes)
    machine = measure_processor("cpu")
    done: dict[str, Outcome] = {}
    cut = CUTS.get(name)
    for link in each(links, end):
        dist.barrier()
        calibrated(mesh)
        forward = name.endswith(FORWARD)
        mode = "forward" if forward else "training"
        states = 0.0 if cut is None else cut.states
        how: dict[str, Any] = {"machine": machine, "optimizer_states": states, "mode": mode}
        memory = None
        if cut is not None and cut.memory is not None:
            ddp = Plan(axes, inputs=dict.fromkeys(axes, Shard(0)))
            memory = cut.memory * _held(predict(model, mesh, batch, ddp, **how))
        plan = search(model, mesh, batch, memory=memory, **how)
        plans = {FOUND: plan, **by_hand(model, batch, axes)}
        if memory is not None:
            plans = {
                side: p
                for side, p in plans.items()
                if _held(predict(model, mesh, batch, p, **how)) <= (1 - SPARE) * memory
            }
        trained: dict[str, Trained] = {}
        losses: dict[str, list[float]] = {}
        for side, p in plans.items():
            trained[side] = Trained(model, mesh, p, batch, code, forward)
            losses[side] = [_mean(trained[side]()) for _ in range(3)]
        first = losses[FOUND]
        for side, others in losses.items():
            if any(abs(a - b) > 1e-3 * abs(a) for a, b in zip(first, others)):
                raise RanksFailed(f"{name}: losses of {side} differ, {others} instead of {first}")
        times = interleaved(trained, rounds, TURN, dist.barrier, WARM)
        predicted = plan.prediction
        assert predicted is not None
        chosen = None if cut is None else cut.chosen(plan)
        done[link] = Outcome(times, str(plan), chosen, predicted.seconds, predicted.gap)
    return done


def calibrated(mesh: Any) -> None:
    """Measure the links along the axes of a mesh, for engine, passes and search. All ranks take those of the first."""
    amount = CalibrationOptions(sizes=tuple([4**k for k in range(5, 12)]))
    links = [fit(measure(facts(mesh).groups[(axis,)], amount)) for axis in range(mesh.ndim)]
    dist.broadcast_object_list(links)
    prepare(mesh, links=links)


def _held(plan: Plan) -> float:
    assert plan.prediction is not None
    return plan.prediction.memory


class Trained:
    """A training step of a model under a plan, or its forward.

    Dynamo compiles one forward for so many plans only, and leaves it to Python then; here it compiles for all.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: Any,
        plan: Plan,
        batch: tuple[torch.Tensor, ...],
        code: bool,
        forward: bool = False,
    ) -> None:
        dynamo_config.recompile_limit = dynamo_config.accumulated_recompile_limit = 1000
        self.model = distribute_model(copy.deepcopy(model), mesh, plan, outputs={}, check_inputs=False)
        self._run = torch.compile(
            self.model, backend="dtensor", options={**plan.options, **({} if code else {"inner": "aot_eager"})}
        )
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self._given, self._forward = plan.part(batch, mesh, model), forward

    def __call__(self) -> float:
        """Take a step, and return its loss."""
        if self._forward:
            with torch.no_grad():
                return float(self._run(*self._given))
        self._optimizer.zero_grad()
        loss = self._run(*self._given)
        loss.backward()
        self._optimizer.step()
        return float(loss.detach())

    def persistent(self) -> int:
        """Return the bytes of this rank's parameters and gradients."""
        held = [*self.model.parameters(), *[p.grad for p in self.model.parameters() if p.grad is not None]]
        return sum([x.to_local().nbytes if isinstance(x, DTensor) else x.nbytes for x in held])


def _mean(value: float) -> float:
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return sum(gathered) / len(gathered)


def finding(shape: tuple[int, ...], layers: int) -> Iterator[Record]:
    """Find a plan for a large model on GPUs that are not there."""
    names = {1: ("tp",), 2: ("dp", "tp"), 3: ("replicate", "shard", "tp")}[len(shape)]
    with torch.device("meta"):
        model = Llama(replace(LARGE, layers=layers)).to(torch.bfloat16)
    tokens = torch.empty(LARGE.batch, LARGE.seq, dtype=torch.long, device="meta")
    links = dict.fromkeys(names[:-1], WIRE) | {names[-1]: GPU}
    began = time.perf_counter()
    plan = search(model, dict(zip(names, shape)), tokens, links=links, machine=H100, loss=loss_of)
    took, predicted = time.perf_counter() - began, plan.prediction
    assert predicted is not None
    at = Setting("search", f"llama-8b, {layers} layers", "x".join(map(str, shape)), 1, "")
    yield at.alone("found in", took, "s", note=f"recorded in {predicted.took[0]:.1f} s")
    yield at.alone("gap to the bound", predicted.gap, "of 1")
    for name, (seconds, _) in predicted.others.items():
        yield at.counted("predicted step", "ms", 1e3 * predicted.seconds, name, 1e3 * seconds, FOUND)


ROOM = 0.9 * 96e9
"""Bytes of the memory of torchtitan's GPUs that a plan may take."""


def published(row: Row) -> Iterator[Record]:
    """Predict a step that ran, and find a plan in place of the one that it ran with."""
    seconds, held = predicted_step(row)
    at = Setting("search", row.name, "as it ran", row.fsdp * row.tp, "")
    yield at.counted("tokens/s of a GPU", "", row.tokens * row.step / seconds, "measured", row.tokens, "predicted")
    if row.memory is not None:
        yield at.counted("memory", "GiB", held / 2**30, "measured", row.memory / 2**30, "predicted")
    if row.fsdp * row.tp == 1:
        return
    model, tokens = published_model(row, again="")
    sizes, links = mesh_of(row)
    plan = search(
        model,
        sizes,
        tokens,
        memory=ROOM,
        links=links,
        machine=machine_of(row),
        loss=loss_of,
        optimizer_states=states_of(row),
        limit=60.0,
    )
    found = plan.prediction
    assert found is not None
    words = str(plan).replace("\n", "; ")
    yield at.counted("predicted step", "s", found.seconds, "as it ran", seconds, FOUND)
    yield at.alone("predicted memory", found.memory / 2**30, "GiB", FOUND, note=words)


def run(effort: Effort) -> Iterator[Record]:
    """Yield records of finding, and then of steps, by model and link."""
    meshes, layers, models, sizes, rounds = effort.of(AMOUNTS)
    for shape in effort.progress(meshes, "finding"):
        yield from finding(shape, layers)
    for row in effort.progress((*STEPS, *ROWS) if effort.level != "tiny" else STEPS[:1], "published"):
        yield from published(row)
    tiny = effort.level == "tiny"
    jobs = [(name, ranks) for ranks in ((2,) if tiny else (2, 4)) for name in models]
    jobs += [] if tiny else [(name, 2) for name in (*CUTS, f"{models[0]}{FORWARD}")]
    for name, ranks in effort.progress(jobs, "steps"):
        for links, done, without in on_links(
            (LOOPBACK,) if tiny else (LOOPBACK, *RATES), on_rank, ranks, name, sizes, rounds, not tiny
        ):
            if without:
                yield Setting("search", name, FOUND, ranks, links[0]).missing("step", without)
            else:
                yield from _steps(name, ranks, done)


def _steps(name: str, ranks: int, done: dict[str, Outcome]) -> Iterator[Record]:
    for link, out in done.items():
        at = Setting("search", name, FOUND, ranks, link)
        words = out.plan.replace("\n", "; ")
        for side in [s for s in out.times if s != FOUND]:
            yield at.timed("step", "ms", compared(out.times[FOUND], out.times[side], 1e3), side, FOUND)
        yield at.alone("predicted step", 1e3 * out.predicted, "ms", FOUND, note=words)
        yield at.alone("gap to the bound", out.gap, "of 1", FOUND)
        if out.chosen is not None:
            yield at.alone(f"chosen: {CUTS[name].what}", float(out.chosen), "of 1", FOUND)


__all__ = ["AXIS", "TURN", "WARM", "Trained", "by_hand", "calibrated", "model_of", "on_rank", "run"]
