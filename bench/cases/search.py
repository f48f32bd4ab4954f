"""search: seconds to find a plan, how good it is by its bound, and its step against those of well-known plans.

Finding is timed for the shapes of Llama 3.1 8B on meshes of up to 128 GPUs that are not there. Steps are those of found
plans and of plans written by hand, tensor parallel, data parallel and fully sharded, of one model in the same
processes: two ranks with gloo, on loopback and, if namespaces can be made, on links of 1 Gbit/s and 100 Mbit/s. All are
applied by `distribute_model` and compiled, so that they differ in the plan alone; their losses must agree. Processor
and link are measured first, on the ranks. "predicted" is what the plan is expected to take. The model of cost is also
held against steps that torchtitan has published (`bench.published`).
"""

import copy
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._dynamo import config as dynamo_config

from dtensor import DTensor, Plan, Replicate, Shard, distribute_model, init_device_mesh, search
from dtensor.layout.machine import Machine
from dtensor.mesh.mesh import facts
from dtensor.tools.calibration import Options, fit, measure
from dtensor.tools.processor import measure as measure_processor

from .. import namespaces
from ..effort import Effort
from ..models import Llama, Sizes, named
from ..namespaces import End
from ..published import GPU, ROWS, WIRE
from ..published import predicted as predicted_step
from ..ranks import RanksFailed, on_ranks
from ..record import Record, Setting
from ..timing import compared, interleaved

LOOPBACK, RATES = "loopback", ("1gbit", "100mbit")
FOUND = "found"
AXIS = "x"
STEPS = 8
"""Steps of a turn, so that most find their code and data in the processor's caches, as in training."""


class Llama8B(Sizes):
    """The shapes of Llama 3.1 8B."""

    hidden = 14336  # type: ignore[assignment]


LARGE = Llama8B(layers=32, dim=4096, seq=8192, batch=128, vocab=128256, heads=32, kv_heads=8)
MODELS = ("decoder", "llama", "wide", "images")
AMOUNTS: dict[str, tuple[tuple[tuple[int, ...], ...], int, tuple[str, ...], Sizes, int]] = {
    "tiny": (((8,),), 1, ("perceptron",), Sizes(dim=16, seq=4, batch=4), 1),
    "quick": (((8,), (16, 8)), 32, MODELS, Sizes(dim=128, seq=64, batch=8), 5),
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
    if name == "images":
        return WithLoss(Images(sizes)), (torch.randn(2 * sizes.batch, 3, 16, 16), torch.randn(2 * sizes.batch, 16))
    family = {"perceptron": "mlp", "decoder": "transformer-2", "llama": "llama-2", "wide": "transformer-2"}[name]
    like = named(family, sizes)
    inner = Wide(sizes) if name == "wide" else like.dense()
    x, y = like.batch(0)
    if name == "wide":
        x = x * 7 % (32 * sizes.dim)
    return WithLoss(inner), (x, y)


def by_hand(model: nn.Module) -> dict[str, Plan]:
    """Plans as one writes them for one axis."""
    mesh, data = {AXIS: dist.get_world_size()}, {AXIS: Shard(0)}
    names = {n: p for n, p in model.named_parameters() if p.shape and p.shape[0] % mesh[AXIS] == 0}
    everywhere = {AXIS: Replicate()}
    rows = ("wo.weight", "w2.weight", "down.weight", "head.weight")
    columns = ("wq.weight", "wk.weight", "wv.weight", "w1.weight", "w3.weight", "up.weight", "w1.bias", "up.bias")
    cut = {n: {AXIS: Shard(1)} for n in names if n.endswith(rows)}
    cut |= {n: {AXIS: Shard(0)} for n in names if n.endswith((*columns, "embeddings.weight", "output.weight"))}
    return {
        "tp": Plan(mesh, cut),
        "ddp": Plan(mesh, inputs=data),
        "fsdp": Plan(mesh, dict.fromkeys(names, data), dict.fromkeys(names, everywhere), data),
    }


def on_rank(
    rank: int, name: str, sizes: Sizes, links: tuple[str, ...], rounds: int, code: bool, end: End | None
) -> dict[str, tuple[dict[str, list[float]], float, float, str]]:
    """Link -> (plan -> seconds of a step in each round, predicted seconds, gap, the plan that was found)."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=(AXIS,))
    model, batch = model_of(name, sizes)
    machine = measure_processor("cpu")
    done: dict[str, tuple[dict[str, list[float]], float, float, str]] = {}
    for link in links:
        if end is not None and link != LOOPBACK and rank in (0, dist.get_world_size() // 2):
            namespaces.limit(end, link)
        dist.barrier()
        amount = Options(sizes=tuple([4**k for k in range(5, 11)]))
        found = fit(measure(facts(mesh).groups[(0,)], amount, quiet=True))
        plan = search(model, mesh, batch, links={AXIS: found}, machine=machine, optimizer_states=0.0)
        plans = {FOUND: plan, **by_hand(model)}
        trained: dict[str, Trained] = {}
        losses: dict[str, list[float]] = {}
        for side, p in plans.items():
            trained[side] = Trained(model, mesh, p, batch, code)
            losses[side] = [_mean(trained[side]()) for _ in range(3)]
        first = losses[FOUND]
        for side, others in losses.items():
            if any(abs(a - b) > 1e-3 * abs(a) for a, b in zip(first, others)):
                raise RanksFailed(f"{name}: losses of {side} differ, {others} instead of {first}")
        times = interleaved(trained, rounds, STEPS, dist.barrier)
        predicted = plan.prediction
        assert predicted is not None
        done[link] = times, predicted.seconds, predicted.gap, str(plan)
    return done


class Trained:
    """A training step of a model under a plan.

    Dynamo compiles one forward for so many plans only, and leaves it to Python then; here it compiles for all.
    """

    def __init__(self, model: nn.Module, mesh: Any, plan: Plan, batch: tuple[torch.Tensor, ...], code: bool) -> None:
        dynamo_config.recompile_limit = dynamo_config.accumulated_recompile_limit = 1000
        self.model = distribute_model(copy.deepcopy(model), mesh, plan, outputs={}, check_inputs=False)
        self._run = torch.compile(self.model, backend="dtensor", options={} if code else {"inner": "aot_eager"})
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self._given = plan.part(batch, mesh)

    def __call__(self) -> float:
        """Take a step, and return its loss."""
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
    machine = Machine(flops=160e12, half=400e12, memory=2.1e12, launch=2e-6)
    began = time.perf_counter()
    plan = search(model, dict(zip(names, shape)), tokens, links=links, machine=machine, loss=_loss, limit=60.0)
    took, predicted = time.perf_counter() - began, plan.prediction
    assert predicted is not None
    at = Setting("search", f"llama-8b, {layers} layers", "x".join(map(str, shape)), 1, "")
    yield at.alone("found in", took, "s", note=f"recorded in {predicted.took[0]:.1f} s")
    yield at.alone("gap to the bound", predicted.gap, "of 1")
    for name, (seconds, _) in predicted.others.items():
        yield at.counted("predicted step", "ms", 1e3 * predicted.seconds, name, 1e3 * seconds, FOUND)


def _loss(out: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out.flatten(0, 1), torch.zeros(out.shape[:2].numel(), dtype=torch.long, device=out.device))


def run(effort: Effort) -> Iterator[Record]:
    """Yield records of finding, and then of steps, by model and link."""
    meshes, layers, models, sizes, rounds = effort.of(AMOUNTS)
    for shape in effort.progress(meshes, "finding"):
        yield from finding(shape, layers)
    for row in ROWS if effort.level != "tiny" else ROWS[:1]:
        at = Setting("search", row.name, "as published", 1, "")
        yield at.counted("step", "s", predicted_step(row), "torchtitan", row.step, "predicted")
    without = namespaces.why_not()
    for name in effort.progress(models, "steps"):
        yield from _steps(name, sizes, rounds, (LOOPBACK,), None, effort.level != "tiny")
        if effort.level == "tiny":
            continue
        if without:
            yield Setting("search", name, FOUND, 2, RATES[0]).missing("step", without)
        else:
            with namespaces.joined() as ends:
                yield from _steps(name, sizes, rounds, RATES, ends, True)


def _steps(name: str, sizes: Sizes, rounds: int, links: tuple[str, ...], ends: Any, code: bool) -> Iterator[Record]:
    done = on_ranks(on_rank, 2, name, sizes, links, rounds, code, ends=ends)
    for link, (times, predicted, gap, plan) in done.items():
        at = Setting("search", name, FOUND, 2, link)
        for side in [s for s in times if s != FOUND]:
            yield at.timed("step", "ms", compared(times[FOUND], times[side], 1e3), side, FOUND)
        yield at.alone("predicted step", 1e3 * predicted, "ms", FOUND, note=plan.replace("\n", "; "))
        yield at.alone("gap to the bound", gap, "of 1", FOUND)


__all__ = ["AXIS", "Trained", "by_hand", "model_of", "on_rank", "run"]
