"""Predictions of the search's model of cost for training runs that others have published.

The rows are those in bfloat16 with torch.compile, without pipelines, of torchtitan's tables for Llama 3.1 on hosts of
eight H100 (benchmarks/llama3_h100_202412_torchtitan.md and asyncTP_llama3_h100_2025-06_torchtitan.md in
github.com/pytorch/torchtitan). Peak, memory bandwidth and links are those of data sheets; the efficiency of products,
one number, is fitted on the first row. Activation checkpointing recomputes half of the forward if it is selective, as
every other product is kept, and all of it if it is full. A layer's time is the difference between models of four layers
and of two.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from dtensor.layout.cost import Link, Network
from dtensor.layout.machine import Machine
from dtensor.parallel.search.choices import Choices
from dtensor.parallel.search.engine import Assignment, Engine, Run
from dtensor.parallel.search.steps import Steps, pattern, steps_of
from dtensor.parallel.search.tape import PARAMETER, record

from .models import Llama, Sizes

EFFICIENCY = 0.41
"""Of the 989 TFLOP/s of the data sheet, fitted on the first row; these GPUs ran at 500 of 700 W."""

GPU = Link(alpha=4e-6, bandwidth=360e9, memory=2.4e12, launch=3e-6, start=10e-6)
WIRE = Link(alpha=8e-6, bandwidth=45e9, memory=2.4e12, launch=3e-6, start=15e-6)
"""Within a host of eight H100, and between hosts by 400 Gbit/s for each GPU."""

SEQ = 8192


@dataclass(frozen=True)
class Row:
    """A published run.

    Attributes:
        name: of the model and its sharding.
        layers, dim, heads, hidden: of the model.
        batch: sequences of a rank, or of a group of tensor parallel ranks.
        fsdp, tp: number of ranks along each axis.
        again: which part of the forward is computed again in the backward.
        tokens: per second and GPU, as published.
    """

    name: str
    layers: int
    dim: int
    heads: int
    hidden: int
    batch: int
    fsdp: int
    tp: int
    again: float
    tokens: float

    @property
    def step(self) -> float:
        """Seconds of a step, as published."""
        return self.batch * SEQ / self.tp / self.tokens


ROWS = (
    Row("8B, FSDP 8", 32, 4096, 32, 14336, 2, 8, 1, 0.5, 6667),
    Row("8B, FSDP 128", 32, 4096, 32, 14336, 2, 128, 1, 0.5, 6514),
    Row("8B, FSDP 8, TP 8", 32, 4096, 32, 14336, 12, 8, 8, 0.5, 4378),
    Row("70B, FSDP 32, TP 8", 80, 8192, 64, 28672, 16, 32, 8, 1.0, 597.3),
)


@dataclass(frozen=True)
class _Sizes(Sizes):
    wide: int = 14336

    @property
    def hidden(self) -> int:
        return self.wide


def predicted(row: Row) -> float:
    """Seconds of a step."""
    (few, few_forward), (more, more_forward) = (_runs(row, layers) for layers in (2, 4))

    def whole(a: float, b: float) -> float:
        return a + (b - a) / 2 * (row.layers - 2)

    computing = whole(few.computing, more.computing)
    computing += row.again * whole(few_forward.computing, more_forward.computing)
    waiting = whole(few.waiting, more.waiting)
    waiting += int(row.again) * whole(few_forward.waiting, more_forward.waiting)
    # Parameters and their states are in float32, and moved and priced here in bfloat16.
    together = few.machine.together(computing, whole(few.beside, more.beside))
    return waiting + together + 2 * whole(few.updating, more.updating)


def _runs(row: Row, layers: int) -> tuple[Run, Run]:
    """The whole step, and its forward."""
    made = []
    for training in (True, False):
        sizes = _Sizes(layers, row.dim, SEQ, row.batch * row.fsdp, 128256, row.heads, 8, row.hidden)
        with torch.device("meta"):
            model = Llama(sizes).to(torch.bfloat16)
        tokens = torch.empty(sizes.batch, SEQ, dtype=torch.long, device="meta")
        steps = steps_of(record(model, tokens, loss=_loss, training=training))
        machine = Machine(EFFICIENCY * 400e12, EFFICIENCY * 989e12, 0.9 * 2.4e12, 2e-6)
        outer = GPU if row.fsdp * row.tp <= 8 else WIRE
        shape, links = ((row.fsdp, row.tp), (outer, GPU)) if row.tp > 1 else ((row.fsdp,), (outer,))
        choices = Choices(torch.device("cuda"), Network.of(shape, links), machine)
        engine = Engine(steps, choices, training=training, states=2.0 if training else 0.0)
        made.append(engine.run(_as_published(steps, row)))
    return made[0], made[1]


def _as_published(steps: Steps, row: Row) -> Assignment:
    """Fully sharded over the first axis; with a second one, tensor parallel with activations cut along the sequence."""
    made = Assignment()
    two = row.tp > 1
    for t in steps.tensors:
        if t.step is None and t.kind == "input":
            made.stored[t] = (0, None) if two else (0,)
        if t.kind == PARAMETER:
            rows = t.name.endswith(("wo.weight", "w2.weight"))
            inner = None if t.like.ndim == 1 else 1 if rows else 0
            made.stored[t] = (0, inner) if two else (0,)
            made.used[t] = (None, inner) if two else (None,)
    whole, cut = (0, None), (0, 1)
    for step in steps.steps if two else ():
        if step.border and not step.backward:
            module, what = pattern(step.like.path).rpartition(".")[2], step.like.what
            if what == "input" and module in ("attention", "feed_forward", "output"):
                made.borders[step] = whole, cut
            if what == "output" and module in ("attention", "feed_forward", "tok_embeddings"):
                made.borders[step] = cut, whole
    return made


def _loss(out: torch.Tensor) -> torch.Tensor:
    targets = torch.zeros(out.shape[:2].numel(), dtype=torch.long, device=out.device)
    return F.cross_entropy(out.flatten(0, 1).float(), targets)


__all__ = ["GPU", "ROWS", "WIRE", "Row", "predicted"]
