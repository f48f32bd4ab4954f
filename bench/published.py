"""Predictions of the search's model of cost beside steps that ran on GPUs.

`ROWS` are runs of torchtitan for Llama 3.1 on hosts of eight H100, in bfloat16 with torch.compile and without pipelines
(benchmarks/llama3_h100_202412_torchtitan.md and asyncTP_llama3_h100_2025-06_torchtitan.md in
github.com/pytorch/torchtitan). Peak, memory bandwidth and links are those of data sheets; the efficiency, one number,
is fitted on the first row. Parameters, gradients and states are in float32 there. Selective checkpointing keeps
attention and every other product. Memory was read as reserved by the allocator, in segments that can grow, of which
each stream has its own; what fully_shard and an eager loss hold beyond a step of ours is added to what is predicted.

`STEPS` are steps of parts of Llama 3.1 8B on one H100 (80 GB, HBM3, 700 W), without dtensor: torch 2.11 with
torch.compile and fused AdamW, all in bfloat16, sequences of 8,192 tokens. The efficiency is fitted on the first of
them.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from dtensor.parallel.search.choices import Choices
from dtensor.parallel.search.engine import Engine
from dtensor.parallel.search.known import known
from dtensor.parallel.search.recording import record
from dtensor.parallel.search.regime import Regime
from dtensor.parallel.search.repeats import steps_of
from dtensor.prices.links import Link, Network
from dtensor.prices.machine import Machine

from .models import Llama, Sizes

H100 = Machine(flops=67e12, half=989e12, memory=3.35e12, launch=3e-6, overlap=0.88, efficiency=0.69)
"""By the data sheet; the efficiency is fitted on `STEPS`. NCCL takes about 16 of 132 multiprocessors."""

H100_500W = replace(H100, memory=2.4e12, efficiency=0.463)
"""Those of torchtitan's hosts, with HBM2e and at 500 of 700 W; the efficiency is fitted on the first of `ROWS`."""

GPU = Link(alpha=4e-6, bandwidth=360e9, memory=2.4e12, launch=3e-6, start=10e-6)
WIRE = Link(alpha=8e-6, bandwidth=45e9, memory=2.4e12, launch=3e-6, start=15e-6)
"""Within a host of eight H100, and between hosts by 400 Gbit/s for each GPU."""

SEQ, VOCAB = 8192, 128256

EAGER_LOSS = 2
"""Tensors in float32, of the shape of the logits, that a loss holds beyond what it does if compiled: the logarithms and
two gradients, in place of logits and one gradient in bfloat16. torchtitan compiled the model, and not the loss."""


ENDS = 8
"""Bytes for each element of the embedding and of the output beyond what a step of ours holds, as torchtitan's runs kept
both in one group of fully_shard, which is gathered throughout: 2 for the embedding in bfloat16 and the gradient of the
output, of which each is half of the elements; 2 for what is gathered before it is copied, and 4 for what is reduced in
float32, which are in the memory of other streams."""


@dataclass(frozen=True)
class Row:
    """A step that ran.

    Attributes:
        name: of the model and its sharding.
        layers, dim, heads, hidden: of the model.
        batch: sequences of a rank, or of a group of tensor parallel ranks.
        fsdp, tp: number of ranks along each axis.
        again: what the backward computes again: "", "selective" or "full".
        step: seconds.
        memory: bytes, if known.
    """

    name: str
    layers: int
    dim: int
    heads: int
    hidden: int
    batch: int
    fsdp: int
    tp: int
    again: str
    step: float
    memory: float | None = None

    def __str__(self) -> str:
        return self.name

    @property
    def tokens(self) -> float:
        """Tokens per second and GPU."""
        return self.batch * SEQ / self.tp / self.step


def _row(
    name: str,
    layers: int,
    wide: tuple[int, int, int],
    batch: int,
    ranks: tuple[int, int],
    again: str,
    tokens: float,
    memory: float | None = None,
) -> Row:
    step = batch * SEQ / ranks[1] / tokens
    return Row(name, layers, *wide, batch, *ranks, again, step, None if memory is None else memory * 2**30)


SMALL, LARGE = (4096, 32, 14336), (8192, 64, 28672)

ROWS = (
    _row("8B, FSDP 8", 32, SMALL, 2, (8, 1), "selective", 6667, 77.0),
    _row("8B, FSDP 128", 32, SMALL, 2, (128, 1), "selective", 6514, 62.0),
    _row("8B, FSDP 8, TP 8", 32, SMALL, 12, (8, 8), "selective", 4378),
    _row("70B, FSDP 32, TP 8", 80, LARGE, 16, (32, 8), "full", 597.3),
)


def _step(layers: int, batch: int, again: str, ms: float, gb: float) -> Row:
    how = ", layers recomputed" if again else ""
    name = f"{layers} layers of 8B, batch {batch}{how}"
    return Row(name, layers, *SMALL, batch, 1, 1, again, ms * 1e-3, gb * 1e9)


STEPS = (
    _step(2, 1, "", 90.5, 14.90),
    _step(4, 1, "", 135.6, 20.13),
    _step(4, 2, "", 257.7, 27.61),
    _step(4, 2, "full", 301.0, 19.26),
    _step(8, 1, "", 221.0, 30.61),
    _step(8, 2, "full", 511.5, 26.24),
)


@dataclass(frozen=True)
class _Sizes(Sizes):
    wide: int = 14336

    @property
    def hidden(self) -> int:
        return self.wide


def predicted(row: Row) -> tuple[float, float]:
    """Seconds of a step, and bytes at its peak."""
    model, tokens = model_of(row)
    steps = steps_of(record(model, tokens, loss=loss_of))
    sizes, links = mesh_of(row)
    network = Network.of(tuple(sizes.values()), tuple(links.values()))
    choices = Choices(torch.device("cuda"), network, machine_of(row))
    run = Engine(steps, choices, Regime(states=states_of(row))).run(known(steps, choices)[plan_name(row)])
    if row.fsdp * row.tp == 1:
        return run.seconds, run.peak
    loss, ends = EAGER_LOSS * 4.0 * row.batch * SEQ * VOCAB, ENDS * 2.0 * VOCAB * row.dim
    return run.seconds, run.peak + (loss + ends) / row.tp


def plan_name(row: Row) -> str:
    """The well-known plan with which it ran."""
    if row.tp == 1:
        return "fully sharded (FSDP)"
    return "tensor parallel, sequence parallel over the last axis, fully sharded over the others (2-d)"


def states_of(row: Row) -> float:
    """Tensors of a parameter's size that the optimizer keeps. In torchtitan's runs parameters, gradients and two states
    have twice the bytes of the parameters here: together eight times as many, of which two are parameter and gradient.
    """
    return 2.0 if row.fsdp * row.tp == 1 else 6.0


def model_of(row: Row, again: str | None = None) -> tuple[nn.Module, torch.Tensor]:
    """The model, and the whole batch; `again` in place of what the row computes again."""
    again = row.again if again is None else again
    sizes = _Sizes(row.layers, row.dim, SEQ, row.batch * row.fsdp, VOCAB, row.heads, 8, row.hidden)
    with torch.device("meta"):
        model = Llama(sizes).to(torch.bfloat16)
    for layer in model.layers if again else ():
        context = {"context_fn": _selective} if again == "selective" else {}
        how = partial(checkpoint, use_reentrant=False, preserve_rng_state=False, **context)
        layer.forward = partial(how, layer.forward)
    return model, torch.empty(sizes.batch, SEQ, dtype=torch.long, device="meta")


def mesh_of(row: Row) -> tuple[dict[str, int], dict[str, Link]]:
    """Sizes and links of the axes."""
    outer = GPU if row.fsdp * row.tp <= 8 else WIRE
    sizes, links = {"fsdp": row.fsdp, "tp": row.tp}, {"fsdp": outer, "tp": GPU}
    axes = [axis for axis in sizes if sizes[axis] > 1] or ["fsdp"]
    return {axis: sizes[axis] for axis in axes}, {axis: links[axis] for axis in axes}


def machine_of(row: Row) -> Machine:
    """What it ran on."""
    return H100 if row.fsdp * row.tp == 1 else H100_500W


def _selective() -> Any:
    """Keep attention, and every other product."""
    products = {False: 0, True: 0}

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = str(op)
        if name.startswith(("aten.mm", "aten.addmm")):
            products[context.is_recompute] += 1
            keep = products[context.is_recompute] % 2 == 1
        else:
            keep = "scaled_dot_product" in name
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def loss_of(out: torch.Tensor) -> torch.Tensor:
    """Cross entropy with targets of no meaning."""
    targets = torch.zeros(out.shape[:2].numel(), dtype=torch.long, device=out.device)
    return F.cross_entropy(out.flatten(0, 1).float(), targets)


__all__ = ["GPU", "H100", "H100_500W", "ROWS", "STEPS", "WIRE", "Row", "loss_of", "machine_of", "mesh_of", "model_of"]
__all__ += ["predicted", "states_of"]
