"""The demonstration: a small language model, trained on one process, then sharded, then sharded and compiled.

`demonstrate` starts the processes (or joins those that torchrun started), has each of them do `on_rank`, and
gives an `Outcome` that `cli` prints: the loss curves, which must agree, and what each way of running sends
and achieves. It stands on everything a user would use, and on `dtensor.testing` for the model and the
processes.
"""

import importlib.util
import os
import statistics as numbers
import sys
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
from tqdm import tqdm

from dtensor.compile import statistics

from ..mesh.mesh import init_device_mesh
from ..parallel import clip_grad_norm_
from ..testing import CountCollectives, ModelArgs, Transformer, run_ranks
from .demo_plans import PLANS, computing_in

BATCH, SEQ, VOCAB, DIM, HEADS = 8, 64, 256, 64, 4
"""Sequences in a batch, bytes in a sequence, values of a byte, width of the model, its attention heads."""

TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-2}
"""How far the loss curves may lie apart, by the dtype that is computed in."""

CLIP = 1.0
"""The most that the norm of all gradients is left at."""

BACKENDS = ("dtensor", "inductor", "eager")


@dataclass(frozen=True)
class Options:
    """What to demonstrate; `data` is the text, `timeout` the seconds the whole may take."""

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
    """Collectives of one step by operator, and the bytes a rank sends in them; None where it was not counted."""

    forward: tuple[Counter[str], int] | None = None
    backward: tuple[Counter[str], int] | None = None


@dataclass(frozen=True)
class Run:
    """One way of training: its name, the loss of each step, tokens per second, and the traffic of a step."""

    name: str
    losses: tuple[float, ...]
    speed: float
    traffic: Traffic


@dataclass(frozen=True)
class Outcome:
    """What rank 0 found out.

    Attributes:
        runs: on one process, sharded, sharded and compiled.
        difference: the largest difference, in any step, between two loss curves of any rank.
        graphs: graphs Dynamo made of the compiled step.
        graph_breaks: breaks between them.
        parameters: number of parameters of the model.
        tolerance: how large the difference may be.
    """

    runs: tuple[Run, ...]
    difference: float
    graphs: int
    graph_breaks: int
    parameters: int
    tolerance: float = TOLERANCE["float32"]

    @property
    def good(self) -> bool:
        """Whether the loss curves agree and the compiled step is whole."""
        return self.difference <= self.tolerance and self.graph_breaks == 0


def default_text() -> Path | None:
    """A text of some 700 kB that Python installations ship: the source of the interpreter's help topics."""
    spec = importlib.util.find_spec("pydoc_data.topics")
    return Path(spec.origin) if spec is not None and spec.origin is not None else None


def under_torchrun() -> bool:
    """Whether this process is a rank that something else has started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def demonstrate(options: Options) -> Outcome | None:
    """Run the demonstration; on ranks other than 0 of torchrun's there is no outcome to give.

    Raises:
        RankError, TimeoutError: as `run_ranks`, where it starts the processes.
    """
    if not under_torchrun():
        return run_ranks(on_rank, options.nproc, options, timeout=options.timeout)[0]
    dist.init_process_group("gloo", timeout=timedelta(seconds=options.timeout))
    try:
        return on_rank(dist.get_rank(), options)
    finally:
        dist.destroy_process_group()


def on_rank(rank: int, options: Options) -> Outcome | None:
    """One rank's part, within an initialised process group; rank 0 gives the outcome."""
    batches = list(_batches(options))
    plan, dtype, nproc = PLANS[options.plan], getattr(torch, options.dtype), dist.get_world_size()
    mesh = init_device_mesh("cpu", plan.mesh_shape(nproc), mesh_dim_names=plan.axes)
    own = [tuple([plan.own_part(x, mesh) for x in batch]) for batch in batches]

    def model() -> Transformer:
        torch.manual_seed(options.seed)
        return Transformer(ModelArgs(options.layers, VOCAB, SEQ, DIM, HEADS, dropout_p=0.0, weight_tying=False))

    def sharded(wrap: Wrap = lambda fn: fn) -> Step:
        return loss_of(plan.apply(model(), mesh, dtype), None if plan.data_axes else dtype, wrap)

    single = None
    if rank == 0:
        single = train("one process", loss_of(model(), dtype), batches)
    counted = count(sharded(), own[0])
    eager = _averaged(train("sharded, eager", sharded(), own, counted, quiet=rank != 0))
    torch.compiler.reset()
    with statistics() as seen:
        step = sharded(lambda fn: torch.compile(fn, backend=options.backend, fullgraph=True))
        compiled = _averaged(train("sharded, compiled", step, own, quiet=rank != 0))
    compiled = replace(compiled, traffic=_compiled_traffic(seen, options.backend))
    curves = _gathered([eager.losses, compiled.losses])
    if single is None:
        return None
    parameters = sum(p.numel() for p in model().parameters())
    difference, most = largest_difference([single.losses, *curves]), TOLERANCE[options.dtype]
    return Outcome((single, eager, compiled), difference, seen.graphs, seen.graph_breaks, parameters, most)


@dataclass
class Step:
    """A model and the function (inputs, targets) -> loss."""

    model: Transformer
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


Wrap: TypeAlias = Callable[[Callable], Callable]


def loss_of(model: Transformer, dtype: torch.dtype | None = None, wrap: Wrap = lambda fn: fn) -> Step:
    """The step of `model`: forward and cross entropy, as one function that `wrap` may compile.

    Parameters are cast to `dtype`, if one is given, which fully sharded models do themselves.
    """
    forward = model if dtype in (None, torch.float32) else computing_in(model, dtype)

    def loss(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(forward(inputs).flatten(0, 1), targets.flatten())

    return Step(model, wrap(loss))


def train(
    name: str,
    step: Step,
    batches: Sequence[tuple[torch.Tensor, ...]],
    traffic: Traffic | None = None,
    quiet: bool = False,
) -> Run:
    """Train with AdamW and clipped gradients, one step for each batch. The speed is that of the median step but the
    first.

    The progress bar is left out where `quiet`, and where stderr is no terminal.
    """
    parameters = list(step.model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    losses, seconds = [], []
    for inputs, targets in tqdm(batches, desc=f"{name:<18}", unit="step", disable=quiet or None, file=sys.stderr):
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = step.loss(inputs, targets)
        loss.backward()
        clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - start)
    speed = BATCH * SEQ / numbers.median(seconds[1:] or seconds)
    return Run(name, tuple(losses), speed, traffic or Traffic((Counter(), 0), (Counter(), 0)))


def count(step: Step, batch: tuple[torch.Tensor, ...]) -> Traffic:
    """What forward and backward of one eager step send."""
    with CountCollectives() as forward:
        loss = step.loss(*batch)
    with CountCollectives() as backward:
        loss.backward()
    return Traffic(_by_operator(forward.collectives), _by_operator(backward.collectives))


def largest_difference(curves: Sequence[Sequence[float]]) -> float:
    """The largest difference between two curves at one step; infinite where a loss is no number."""
    if not all(value == value for curve in curves for value in curve):
        return float("inf")
    return max((max(at_step) - min(at_step) for at_step in zip(*curves)), default=0.0)


def _batches(options: Options) -> Any:
    """(inputs, targets) of each step, both (BATCH, SEQ), cut out of the text at random; the same on every
    rank."""
    text = torch.frombuffer(bytearray(options.data), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(options.seed)
    for _ in range(options.steps):
        starts = torch.randint(len(text) - SEQ, (BATCH, 1), generator=generator)
        rows = text[starts + torch.arange(SEQ + 1)]
        yield rows[:, :-1], rows[:, 1:]


def _compiled_traffic(seen: Any, backend: str) -> Traffic:
    """Traffic of the compiled graphs; Dynamo's "eager" backend has no graph of collectives to count."""
    if backend == "eager":
        return Traffic()
    return Traffic(_by_operator(seen.forward), _by_operator(seen.backward))


def _by_operator(collectives: Sequence[Any]) -> tuple[Counter[str], int]:
    return Counter(c.op for c in collectives), sum(c.bytes for c in collectives)


def _averaged(run: Run) -> Run:
    """The run with the losses of all ranks' parts of the batch; those that share a part have the same."""
    losses = torch.tensor(run.losses, dtype=torch.float64)
    dist.all_reduce(losses)
    return replace(run, losses=tuple((losses / dist.get_world_size()).tolist()))


def _gathered(curves: list[tuple[float, ...]]) -> list[tuple[float, ...]]:
    """The curves of all ranks."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, curves)
    return [curve for of_rank in everyone for curve in of_rank]


__all__ = [
    "BACKENDS",
    "BATCH",
    "HEADS",
    "SEQ",
    "TOLERANCE",
    "Options",
    "Outcome",
    "Run",
    "Traffic",
    "default_text",
    "demonstrate",
    "under_torchrun",
]
