"""The sides of a comparison: a library, or code by hand, and how it is compiled. `made` returns the `Trainer` of one.

All sides train from the same initial values. In a model sharded by heads, attention takes the math path with both
libraries, because torch's DTensor has no rule for the path that CPUs take by default. (Inductor recognises the math
path and replaces it by a fused one, on both sides.) That path makes a plain causal mask, which torch's DTensor does not
accept either, so its calls run under `implicit_replication`. By hand, attention takes the default path of plain
tensors.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.experimental import implicit_replication
from torch.nn.attention import SDPBackend, sdpa_kernel

from dtensor.tensor.plain_passes import PARTITIONER, STAGES
from dtensor.tools.demo_plans import PLANS, TENSOR

from . import models
from .limit import Sharded, staged
from .limit.functions import Cut, Group
from .models import Model
from .plans import applied, own_part

REORDER = "reorder_communication_preserving_peak_memory"
SWITCHES: dict[str, Any] = {
    "bucket_all_gathers_fx": "all",
    "bucket_reduce_scatters_fx": "all",
    "bucket_all_reduces_fx": "all",
    "reorder_for_compute_comm_overlap": True,
    "reorder_for_compute_comm_overlap_passes": [REORDER, "sink_waits_iterative", REORDER],
}
"""Inductor's options on communication that work on CPU, with the passes that its source recommends.

Not included are `aten_distributed_optimizations.enable_overlap_scheduling`, which fails without triton, and
`_micro_pipeline_tp`, which only rewrites groups with symmetric memory, that is on GPUs.
"""

AS_WRITTEN = {"reorder_for_peak_memory": False, PARTITIONER: None, **dict.fromkeys(STAGES)}
"""Inductor's options that keep the order of hand-written code and disable the passes of this library."""

RATE = 0.1
"""Learning rate of all sides."""

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


def _inductor(**options: Any) -> Wrap:
    return lambda fn: torch.compile(fn, options=options)


def _as_it_is(fn: Callable[..., Any]) -> Callable[..., Any]:
    return fn


@dataclass(frozen=True)
class Side:
    """A side.

    Attributes:
        library: what shards the model: "dtensor", "torch" or "hand".
        wrap: compiles the step.
        words: description.
    """

    library: str
    wrap: Wrap
    words: str


HALVES = "dtensor in microbatches"

SIDES: dict[str, Side] = {
    "dtensor": Side("dtensor", lambda fn: torch.compile(fn, backend="dtensor", fullgraph=True), 'backend="dtensor"'),
    HALVES: Side(
        "dtensor",
        lambda fn: torch.compile(fn, backend="dtensor", fullgraph=True, options={"split_batch": 2}),
        "the same with split_batch=2: one half of a batch computes while the other travels",
    ),
    "dtensor eager": Side("dtensor", _as_it_is, "the same, not compiled"),
    "torch eager": Side("torch", _as_it_is, "torch DTensor, FSDP2 for fsdp and hsdp, DDP for ddp; not compiled"),
    "torch compiled": Side("torch", _inductor(), "the same under torch.compile"),
    "torch tuned": Side("torch", _inductor(**SWITCHES), "the same with Inductor's options on communication"),
    "by hand": Side("hand", _inductor(**AS_WRITTEN), "local tensors and functional collectives, compiled"),
}
"""Name -> side."""


class Trainer:
    """A model of one side, its optimizer, and its step in three parts."""

    def __init__(self, model: nn.Module, loss: Callable[..., Any], around: Callable[[], Any]):
        self.model, self._loss, self.around = model, loss, around
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=RATE)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with self.around():
            return self._loss(inputs, targets)

    def backward(self, loss: torch.Tensor) -> None:
        with self.around():
            loss.backward()
        finish = getattr(self.model, "finish", None)
        if finish is not None:
            finish()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> float:
        """Train on one batch and return its loss before the update."""
        loss = self.forward(inputs, targets)
        self.backward(loss)
        self.update()
        return loss.item()


def made(side: str, model: Model, plan: str, mesh: Any, wrap: Wrap | None = None) -> Trainer:
    """Return the trainer of a side; `wrap`, if given, compiles the step instead of the side's own."""
    chosen = SIDES[side]
    wrap = wrap or chosen.wrap
    if chosen.library == "hand":
        built, run = _by_hand(model, plan, mesh, wrap)
    else:
        built = applied(model.dense(mesh.device_type), model.family, chosen.library, plan, mesh)
        run = built

    def loss(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return models.loss(run(inputs), targets)

    whole = chosen.library != "hand" or not PLANS[plan].data_axes
    return Trainer(built, wrap(loss) if whole else loss, around(chosen.library, plan))


def _by_hand(model: Model, plan: str, mesh: Any, wrap: Wrap) -> tuple[nn.Module, Callable[..., Any]]:
    chosen = PLANS[plan]
    cut = Cut()
    if TENSOR in chosen.axes:
        cut = Cut(_group(mesh, TENSOR), chosen.sequence)
    built = staged(model, cut, mesh.device_type)
    if not chosen.data_axes:
        return built, built
    *outer, inner = chosen.data_axes
    replicas = [(mesh[a].get_group().group_name, mesh[a].size()) for a in outer]
    sharded = Sharded(built.stages, _group(mesh, inner), replicas[0] if replicas else None, wrap)
    return sharded, sharded


def _group(mesh: Any, axis: str) -> Group:
    return Group.of(mesh[axis].get_group(), mesh.get_local_rank(axis), mesh.device_type)


def around(library: str, plan: str) -> Callable[[], Any]:
    """Return a function that makes the context in which a step runs."""
    if TENSOR not in PLANS[plan].axes or library == "hand":
        return contextlib.nullcontext
    if library == "dtensor":
        return lambda: sdpa_kernel(SDPBackend.MATH)

    @contextlib.contextmanager
    def both() -> Any:
        with implicit_replication(), sdpa_kernel(SDPBackend.MATH):
            yield

    return both


def forget() -> None:
    """Discard compiled code, and what torch's DTensor cached while tracing it."""
    torch.compiler.reset()
    forget_failed()


def forget_failed() -> None:
    """Clear the cache of torch's DTensor, which holds fake tensors after a failed trace; they break other traces, and
    eager mode."""
    _clear_sharding_prop_cache()


def reason(side: str, error: BaseException) -> str:
    """Return one line on why a side does not run."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{side}: {type(error).__name__}: {' '.join(lines[:3])}"[:400]


def batch(model: Model, plan: str, mesh: Any, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's inputs and targets of a step."""
    inputs, targets = (own_part(x, model.family, plan, mesh) for x in model.batch(index))
    return inputs, targets


__all__ = [
    "HALVES",
    "SIDES",
    "SWITCHES",
    "Side",
    "Trainer",
    "Wrap",
    "around",
    "batch",
    "forget",
    "forget_failed",
    "made",
    "reason",
]
