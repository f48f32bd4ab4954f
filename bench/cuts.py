"""Models for each of which another cut wins: of heads, sequence, vocabulary, weights or activations."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from dtensor import Plan, Shard


class Attention(nn.Module):
    """Attention with a residual connection; (batch, seq, dim) -> the same."""

    def __init__(self, dim: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (w(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return x + self.wo(out.transpose(1, 2).flatten(2))


class Normed(nn.Module):
    """Linear layers, each with a norm over all that it returns; (rows, dim) -> the same."""

    def __init__(self, dim: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(dim, dim) for _ in range(layers)])
        self.norms = nn.ModuleList([nn.LayerNorm(dim) for _ in range(layers)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, norm in zip(self.layers, self.norms):
            x = norm(layer(x))
        return x


class Words(nn.Module):
    """A table and a head over a large vocabulary; (batch, seq) -> (batch, seq, vocab)."""

    def __init__(self, vocab: int, dim: int) -> None:
        super().__init__()
        self.embeddings, self.output = nn.Embedding(vocab, dim), nn.Linear(dim, vocab, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.output(self.embeddings(x))


Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Cut:
    """A model for which a cut wins.

    Attributes:
        what: the cut, in words.
        make: returns the model, and inputs and targets.
        chosen: whether a plan for the axis "x" has the cut.
        memory: bytes that a rank may hold, as a fraction of what it holds with data parallel; None for any. A tenth of
            them is spared.
        states: how many tensors the optimizer is taken to keep for a parameter, for the search alone.
    """

    what: str
    make: Callable[[], tuple[nn.Module, Batch]]
    chosen: Callable[[Plan], bool]
    memory: float | None = None
    states: float = 0.0


def _floats(model: nn.Module, *shape: int) -> tuple[nn.Module, Batch]:
    return model, (torch.randn(shape), torch.randn(shape))


def _tokens(model: nn.Module, vocab: int, *shape: int) -> tuple[nn.Module, Batch]:
    return model, (torch.randint(vocab, shape), torch.randint(vocab, shape))


def _is_cut(plan: Plan, ending: str, dim: int) -> bool:
    """Whether a weight is cut along `dim` and read as it is stored."""
    return any(
        name.endswith(ending) and axes.get("x") == Shard(dim) and name not in plan.used
        for name, axes in plan.parameters.items()
    )


def _along(plan: Plan, dim: int) -> bool:
    """Whether activations or inputs are cut along `dim`."""
    places = [a.to.get("x") for a in plan.activations.values()]
    return Shard(dim) in [*places, plan.input("x").get("x")]


CUTS = {
    "heads": Cut(
        "heads: a long way for gradients of wide projections, few tokens",
        lambda: _floats(Attention(1024, 8, True), 1, 64, 1024),
        lambda plan: _is_cut(plan, "wq.weight", 0),
    ),
    "sequence": Cut(
        "sequence: one long sequence, one head, no causal mask",
        lambda: _floats(Attention(64, 1, False), 1, 4096, 64),
        lambda plan: _along(plan, 1),
    ),
    "activations": Cut(
        "activations gathered: wide layers, few rows, norms over whole rows",
        lambda: _floats(Normed(1024, 3), 255, 1024),
        lambda plan: _is_cut(plan, "layers.*.weight", 0) and not plan.inputs,
    ),
    "weights": Cut(
        "weights gathered: many rows, and less memory than copies of all weights take",
        lambda: _floats(Normed(512, 8), 2048, 512),
        lambda plan: bool(plan.inputs) and any(plan.parameters.values()),
        memory=1.05,
        states=2.0,
    ),
    "vocabulary": Cut(
        "vocabulary: a large one, many tokens",
        lambda: _tokens(Words(32768, 256), 32768, 4, 128),
        lambda plan: _is_cut(plan, "output.weight", 0),
    ),
}
"""Name -> the model."""

__all__ = ["CUTS", "Attention", "Cut", "Normed", "Words"]
