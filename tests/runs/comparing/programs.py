"""Recorded training steps of small models, on one device and sharded by each plan: what the tests compare."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dtensor
from dtensor import errors, init_device_mesh
from dtensor.parallel import fully_shard
from dtensor.runs.comparing.comparison import Comparison, compare
from dtensor.runs.comparing.values import load
from dtensor.testing import run_threads
from dtensor.testing.models import ModelArgs, Transformer

from ...zoo.models import EXAMPLES

VOCABULARY, LENGTH, BATCH = 64, 16, 4


@dataclass(frozen=True)
class Batch:
    tokens: torch.Tensor
    targets: torch.Tensor

    def part(self, count: int, k: int) -> "Batch":
        return Batch(self.tokens.chunk(count)[k], self.targets.chunk(count)[k])


def transformer(seed: int = 0, dtype: torch.dtype = torch.float32, layers: int = 2) -> nn.Module:
    torch.manual_seed(seed)
    args = ModelArgs(n_layers=layers, vocab_size=VOCABULARY, max_seq_len=LENGTH, dim=32, n_heads=4, dropout_p=0.0)
    return Transformer(args).to(dtype)


def qwen3(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Qwen3 of transformers, with two layers."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(seed)
    return EXAMPLES["qwen3"].model(transformers).to(dtype)


def batch(seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(1000 + seed)
    return Batch(*[torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=generator) for _ in range(2)])


def tp(model: nn.Module, given: Batch, rank: int, sequence: bool = False) -> tuple[nn.Module, Batch]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    return Transformer.parallelize(model, mesh, use_seq_parallel=sequence), given


def sp(model: nn.Module, given: Batch, rank: int) -> tuple[nn.Module, Batch]:
    return tp(model, given, rank, sequence=True)


def _fully_sharded(model: Any, mesh: Any) -> nn.Module:
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def fsdp(model: nn.Module, given: Batch, rank: int) -> tuple[nn.Module, Batch]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    return _fully_sharded(model, mesh), given.part(2, rank)


def hsdp(model: nn.Module, given: Batch, rank: int) -> tuple[nn.Module, Batch]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    return _fully_sharded(model, mesh), given.part(4, rank)


def two_axes(model: nn.Module, given: Batch, rank: int) -> tuple[nn.Module, Batch]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = Transformer.parallelize(model, mesh["tp"], use_seq_parallel=True)
    return _fully_sharded(model, mesh["dp"]), given.part(2, rank // 2)


def swapped_axes(model: nn.Module, given: Batch, rank: int) -> tuple[nn.Module, Batch]:
    """As `two_axes`, but the ranks take their parts of the batch along the wrong mesh axis."""
    sharded, _ = two_axes(model, given, rank)
    return sharded, given.part(2, rank % 2)


def by_patterns(model: nn.Module, given: Batch, rank: int) -> tuple[nn.Module, Batch]:
    """A model of the zoo, as it is."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    return dtensor.distribute_model(model, mesh, EXAMPLES["qwen3"].plan, outputs={}), given


Plan = Callable[[nn.Module, Batch, int], tuple[nn.Module, Batch]]
PLANS: dict[str, tuple[Plan, int]] = {
    "tp": (tp, 2),
    "sp": (sp, 2),
    "fsdp": (fsdp, 2),
    "hsdp": (hsdp, 4),
    "2d": (two_axes, 4),
    "qwen3": (by_patterns, 2),
}
WRONG_PLANS: dict[str, tuple[Plan, int]] = {"2d, swapped": (swapped_axes, 4)}
ALL = PLANS | WRONG_PLANS
MODELS: dict[str, Callable[..., nn.Module]] = {"qwen3": qwen3}
"""The models of plans that are not for `transformer`."""


def model_for(plan: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    return MODELS.get(plan, transformer)(seed, dtype)


Fault = Callable[[nn.Module, Any, int], AbstractContextManager[Any]]
"""(model, optimizer, rank) -> a context in which something is wrong."""


def healthy(model: nn.Module, optimizer: Any, rank: int) -> AbstractContextManager[Any]:
    return nullcontext()


def suspected(model: nn.Module, optimizer: Any, rank: int) -> AbstractContextManager[Any]:
    """No fault is put in, but a check of the library may find one."""
    return nullcontext()


def step(
    model: nn.Module,
    given: Batch,
    folder: Path,
    fault: Fault = healthy,
    rank: int = 0,
    *,
    steps: int = 2,
    last: str = "optimizer",
    run: Any = None,
    **values: Any,
) -> None:
    """Record steps of `model`, or of `run`, which is what was compiled of it, each up to the phase `last`."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    # A check of the library may see what is wrong, too, after the step; the record ends there.
    with (
        suppress(*((errors.ShardingError,) if fault is not healthy else ())),
        fault(model, optimizer, rank),
        dtensor.record(folder, **values),
    ):
        for _ in range(steps):
            out = (model if run is None else run)(given.tokens)
            out = getattr(out, "logits", out)
            out = out.full_tensor() if isinstance(out, dtensor.DTensor) else out
            loss = F.cross_entropy(out.float().flatten(0, 1), given.targets.flatten())
            if last == "forward":
                continue
            loss.backward()
            if last == "backward":
                continue
            optimizer.step()
            optimizer.zero_grad()


def on_one_device(model: nn.Module, given: Batch, folder: Path, **more: Any) -> None:
    step(copy.deepcopy(model), given, folder, **more)


def sharded(name: str, model: nn.Module, given: Batch, folder: Path, fault: Fault = healthy, **more: Any) -> None:
    plan, ranks = ALL[name]

    def run(rank: int) -> None:
        mine, part = plan(copy.deepcopy(model), given, rank)
        step(mine, part, folder, fault, rank, **more)

    run_threads(run, ranks)


def compared(a: Path, b: Path) -> Comparison:
    return compare(load(a), load(b))
