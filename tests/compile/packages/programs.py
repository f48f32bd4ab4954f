"""Programs that are packaged: training steps of small models, sharded by each plan."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from dtensor.parallel import ColwiseParallel, RowwiseParallel, fully_shard, parallelize_module
from dtensor.testing.models import ModelArgs, Transformer

STEPS = 2


class Small(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, width), nn.Linear(width, 16)
        self.activation = F.relu

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.activation(self.up(x)))


class Broken(Small):
    """With a graph break."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.activation(self.up(x))
        torch._dynamo.graph_break()
        return self.down(y)


def batch() -> torch.Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(1))


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": partial(torch.optim.Adam, lr=0.01, amsgrad=True, foreach=True),
    "adamw": partial(torch.optim.AdamW, lr=0.01),
    "adagrad": partial(torch.optim.Adagrad, lr=0.01),
    "a rate that is a tensor": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01)),
}


def small(mesh: Any, x: torch.Tensor, kind: type = Small, steps: int = STEPS, **options: Any) -> list[float]:
    """Train a model of two linear layers by tensor parallelism; return the losses."""
    torch.manual_seed(0)
    model = kind()
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return train(model, x, x, steps, **options)


def train(
    model: nn.Module, x: torch.Tensor, y: torch.Tensor, steps: int = STEPS, optimizer: str = "", **options: Any
) -> list[float]:
    """Train a model, by a compiled step of one of `OPTIMIZERS` if it is named."""
    made = OPTIMIZERS[optimizer or "sgd"](model.parameters())
    step = torch.compile(made.step) if optimizer else made.step
    run, losses = torch.compile(model, **options), []
    for _ in range(steps):
        out = run(x)
        out = out.full_tensor() if hasattr(out, "full_tensor") else out
        loss = F.cross_entropy(out.flatten(0, 1), y.flatten()) if y.dtype == torch.int64 else F.mse_loss(out, y)
        loss.backward()
        step()
        made.zero_grad()
        losses.append(loss.item())
    return losses


def transformer(mesh: Any, plan: str, tokens: torch.Tensor) -> list[float]:
    """Train a transformer of two layers by one of the plans."""
    torch.manual_seed(0)
    args = ModelArgs(n_layers=2, vocab_size=64, max_seq_len=16, dim=32, n_heads=4, dropout_p=0.0)
    model: Any = Transformer(args)
    if plan in ("tp", "sp"):
        model = Transformer.parallelize(model, mesh, use_seq_parallel=plan == "sp")
    elif plan == "2d":
        model = _fully_sharded(Transformer.parallelize(model, mesh["tp"], use_seq_parallel=True), mesh["dp"])
    else:
        model = _fully_sharded(model, mesh)
    return train(model, tokens, tokens, steps=3, optimizer="adamw")


def _fully_sharded(model: Any, mesh: Any) -> Any:
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


MESHES = {
    "tp": {"tp": 4},
    "sp": {"tp": 4},
    "fsdp": {"dp": 4},
    "hsdp": {"dp": 2, "shards": 2},
    "2d": {"dp": 2, "tp": 2},
}
"""Plan -> the mesh for it."""


def tokens() -> torch.Tensor:
    return torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(1))
