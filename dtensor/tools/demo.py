"""The demo: a small language model, trained on one process, then sharded, then sharded and compiled.

`demonstrate` starts the processes, or joins those that torchrun started, and runs `on_rank` in each. It returns a
`DemoOutcome`, which `cli` prints: the loss curves, which must agree, and the traffic and speed of each way of training.
The demo uses the public API of the library, and `dtensor.testing` for the model and the processes.
"""

import importlib.util
import os
import statistics as numbers
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F

from dtensor.compile import statistics

from ..mesh.mesh import init_device_mesh
from ..parallel import clip_grad_norm_
from ..program.stages import Stage
from ..testing import CountCollectives, ModelArgs, Transformer, run_ranks
from .demo_plans import PLANS, computing_in

BATCH, SEQ, VOCAB, DIM, HEADS = 8, 64, 256, 64, 4
"""Sequences in a batch, bytes in a sequence, values of a byte, width of the model, and number of attention heads."""

TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-2}
"""Dtype of the computation -> the largest allowed difference between loss curves."""

CLIP = 1.0
"""The value to which the total norm of gradients is clipped."""

BACKENDS = ("dtensor", "inductor", "eager")


@dataclass(frozen=True)
class DemoOptions:
    """What to demonstrate.

    Attributes:
        nproc: number of processes to start.
        plan: a key of `demo_plans.PLANS`.
        data: the text to train on.
        steps: number of training steps.
        backend: an element of `BACKENDS`, the backend of torch.compile.
        layers: number of layers of the model.
        seed: seed of the model and the batches.
        timeout: seconds that everything may take; under torchrun, seconds that a collective may take.
        dtype: dtype of the computation, a key of `TOLERANCE`.
    """

    nproc: int = 2
    plan: str = "tp"
    data: bytes = b""
    steps: int = 30
    backend: str = "dtensor"
    layers: int = 2
    seed: int = 0
    timeout: float = 600.0
    dtype: str = "float32"


@dataclass(frozen=True)
class Traffic:
    """Number of collectives of one step by operator, and the bytes a rank sends in them; None if not counted."""

    forward: tuple[Counter[str], int] | None = None
    backward: tuple[Counter[str], int] | None = None


@dataclass(frozen=True)
class DemoRun:
    """The result of one way of training.

    Attributes:
        name: name of the way, for the table.
        losses: loss of each step.
        speed: tokens per second.
        traffic: collectives of one step.
    """

    name: str
    losses: tuple[float, ...]
    speed: float
    traffic: Traffic


@dataclass(frozen=True)
class DemoOutcome:
    """The result of the demo, which rank 0 has.

    Attributes:
        runs: the runs on one process, sharded, and sharded and compiled.
        difference: the largest difference in any step between two loss curves, over all runs and ranks.
        graphs: number of graphs that Dynamo made of the compiled step.
        graph_breaks: number of breaks between them.
        parameters: number of parameters of the model.
        tolerance: the largest allowed difference.
    """

    runs: tuple[DemoRun, ...]
    difference: float
    graphs: int
    graph_breaks: int
    parameters: int
    tolerance: float = TOLERANCE["float32"]

    @property
    def good(self) -> bool:
        """Whether the loss curves agree and the compiled step has no graph breaks."""
        return self.difference <= self.tolerance and self.graph_breaks == 0


def default_text() -> Path | None:
    """Return the path of a text of some 700 kB that comes with Python: the source of its help topics; None if this
    Python does not have it."""
    spec = importlib.util.find_spec("pydoc_data.topics")
    return Path(spec.origin) if spec is not None and spec.origin is not None else None


def under_torchrun() -> bool:
    """Return whether this process is a rank that torchrun, or a similar launcher, has started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def demonstrate(options: DemoOptions) -> DemoOutcome | None:
    """Run the demo.

    Returns:
        The outcome; None under torchrun on ranks other than 0.

    Raises:
        RankError: a rank failed, where this function starts the processes; see `run_ranks`.
        TimeoutError: likewise, the ranks were not done in time.
    """
    if not under_torchrun():
        return run_ranks(on_rank, options.nproc, options, timeout=options.timeout)[0]
    dist.init_process_group("gloo", timeout=timedelta(seconds=options.timeout))
    try:
        return on_rank(dist.get_rank(), options)
    finally:
        dist.destroy_process_group()


@Stage("demo")
def on_rank(rank: int, options: DemoOptions) -> DemoOutcome | None:
    """Do the part of one rank in an initialised process group; return the outcome on rank 0, None on the others."""
    batches = list(_batches(options))
    plan, dtype, nproc = PLANS[options.plan], getattr(torch, options.dtype), dist.get_world_size()
    mesh = init_device_mesh("cpu", plan.mesh_shape(nproc), mesh_dim_names=plan.axes)
    own = [tuple([plan.own_part(x, mesh) for x in batch]) for batch in batches]

    def model() -> Transformer:
        torch.manual_seed(options.seed)
        return Transformer(ModelArgs(options.layers, VOCAB, SEQ, DIM, HEADS, dropout_p=0.0, weight_tying=False))

    def sharded(wrap: Wrap = lambda fn: fn) -> DemoStep:
        return loss_of(plan.apply(model(), mesh, dtype), None if plan.data_axes else dtype, wrap)

    single = None
    if rank == 0:
        single = train("one process", loss_of(model(), dtype), batches)
    with Stage("counting what an eager step sends"):
        counted = count(sharded(), own[0])
    eager = _averaged(train("sharded, eager", sharded(), own, counted))
    torch.compiler.reset()
    with statistics() as seen:
        step = sharded(lambda fn: torch.compile(fn, backend=options.backend, fullgraph=True))
        compiled = _averaged(train("sharded, compiled", step, own))
    compiled = replace(compiled, traffic=_compiled_traffic(seen, options.backend))
    curves = _gathered([eager.losses, compiled.losses])
    if single is None:
        return None
    parameters = sum(p.numel() for p in model().parameters())
    difference, most = largest_difference([single.losses, *curves]), TOLERANCE[options.dtype]
    return DemoOutcome((single, eager, compiled), difference, seen.graphs, seen.graph_breaks, parameters, most)


@dataclass
class DemoStep:
    """A model and the function (inputs, targets) -> loss."""

    model: Transformer
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


Wrap: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]


def loss_of(model: Transformer, dtype: torch.dtype | None = None, wrap: Wrap = lambda fn: fn) -> DemoStep:
    """Return the step of `model`: forward and cross entropy as one function, which `wrap` may compile.

    If `dtype` is given, the step casts the parameters to it. Fully sharded models do that themselves.
    """
    forward = model if dtype in (None, torch.float32) else computing_in(model, dtype)

    def loss(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(forward(inputs).flatten(0, 1), targets.flatten())

    return DemoStep(model, wrap(loss))


def train(
    name: str,
    step: DemoStep,
    batches: Sequence[tuple[torch.Tensor, ...]],
    traffic: Traffic | None = None,
) -> DemoRun:
    """Train with AdamW and clipped gradients, one step for each batch.

    The speed is that of the median step, without the first.
    """
    parameters = list(step.model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    losses, seconds = [], []
    with Stage(name) as stage:
        for k, (inputs, targets) in enumerate(batches):
            stage.what = f"{name}, step {k + 1} of {len(batches)}" + (f", loss {losses[-1]:.3f}" if losses else "")
            start = time.perf_counter()
            optimizer.zero_grad()
            loss = step.loss(inputs, targets)
            loss.backward()
            clip_grad_norm_(parameters, CLIP)
            optimizer.step()
            losses.append(loss.item())
            seconds.append(time.perf_counter() - start)
    speed = BATCH * SEQ / numbers.median(seconds[1:] or seconds)
    return DemoRun(name, tuple(losses), speed, traffic or Traffic((Counter(), 0), (Counter(), 0)))


def count(step: DemoStep, batch: tuple[torch.Tensor, ...]) -> Traffic:
    """Return the traffic of forward and backward of one eager step."""
    with CountCollectives() as forward:
        loss = step.loss(*batch)
    with CountCollectives() as backward:
        loss.backward()
    return Traffic(_by_operator(forward.collectives), _by_operator(backward.collectives))


def largest_difference(curves: Sequence[Sequence[float]]) -> float:
    """Return the largest difference between two curves at any step; infinite if a loss is NaN."""
    if not all(value == value for curve in curves for value in curve):
        return float("inf")
    return max((max(at_step) - min(at_step) for at_step in zip(*curves)), default=0.0)


def _batches(options: DemoOptions) -> Any:
    """Yield (inputs, targets) of each step, both (BATCH, SEQ), sampled from the text; the same on all ranks."""
    text = torch.frombuffer(bytearray(options.data), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(options.seed)
    for _ in range(options.steps):
        starts = torch.randint(len(text) - SEQ, (BATCH, 1), generator=generator)
        rows = text[starts + torch.arange(SEQ + 1)]
        yield rows[:, :-1], rows[:, 1:]


def _compiled_traffic(seen: Any, backend: str) -> Traffic:
    """Return the traffic of the compiled graphs; with Dynamo's "eager" backend there is no graph of collectives."""
    if backend == "eager":
        return Traffic()
    return Traffic(_by_operator(seen.forward), _by_operator(seen.backward))


def _by_operator(collectives: Sequence[Any]) -> tuple[Counter[str], int]:
    return Counter(c.op for c in collectives), sum(c.bytes for c in collectives)


def _averaged(run: DemoRun) -> DemoRun:
    """Return the run with losses averaged over all ranks; ranks that train on the same part of the batch have the same
    losses."""
    losses = torch.tensor(run.losses, dtype=torch.float64)
    dist.all_reduce(losses)
    return replace(run, losses=tuple((losses / dist.get_world_size()).tolist()))


def _gathered(curves: list[tuple[float, ...]]) -> list[tuple[float, ...]]:
    """Return the curves of all ranks."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, curves)
    return [curve for of_rank in everyone for curve in of_rank]


__all__ = [
    "BACKENDS",
    "BATCH",
    "HEADS",
    "SEQ",
    "TOLERANCE",
    "DemoOptions",
    "DemoOutcome",
    "DemoRun",
    "Traffic",
    "default_text",
    "demonstrate",
    "under_torchrun",
]
