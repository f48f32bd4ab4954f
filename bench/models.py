"""The models that are trained, and their batches: a perceptron, the Transformer of `dtensor.testing`, and a Llama.

A model maps inputs to outputs. `loss` maps outputs to a number: cross entropy of the next token, or the squared error
for the perceptron. `named` takes names such as "mlp", "transformer-8" (with 8 layers) and "llama-2".
"""

import threading
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import nn

from dtensor.testing import ModelArgs, Transformer


@dataclass(frozen=True)
class Sizes:
    """Sizes of models and batches.

    Attributes:
        layers: number of layers.
        dim: width of activations.
        seq: tokens in a sequence.
        batch: sequences in a batch.
        vocab: number of different tokens.
        heads: number of attention heads.
        kv_heads: number of heads of keys and values, for Llama only.
        hidden: width of the feed-forward layers.
    """

    layers: int = 2
    dim: int = 64
    seq: int = 32
    batch: int = 8
    vocab: int = 256
    heads: int = 4
    kv_heads: int = 2

    @property
    def hidden(self) -> int:
        return 4 * self.dim


class MLPLayer(nn.Module):
    """Linear, GELU, Linear, with a residual connection around them."""

    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.w1 = nn.Linear(dim, hidden)
        self.w2 = nn.Linear(hidden, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.w2(F.gelu(self.w1(x)))


class MLP(nn.Module):
    """A sequence of MLPLayers; (batch, dim) -> (batch, dim)."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        self.layers = nn.ModuleList([MLPLayer(sizes.dim, sizes.hidden) for _ in range(sizes.layers)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply the rotary embedding (Su et al., "RoFormer", 2021) to x of shape (batch, heads, seq, head_dim).

    The two halves of the last dim form the pairs that are rotated.
    """
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def angles(seq: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines of the rotary embedding, each of shape (seq, head_dim / 2)."""
    rates = 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
    turned = torch.outer(torch.arange(seq), rates)
    return turned.cos(), turned.sin()


class LlamaAttention(nn.Module):
    """Causal grouped-query attention with rotary embedding."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        self.head_dim = sizes.dim // sizes.heads
        self.groups = sizes.heads // sizes.kv_heads
        self.wq = nn.Linear(sizes.dim, sizes.heads * self.head_dim, bias=False)
        self.wk = nn.Linear(sizes.dim, sizes.kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(sizes.dim, sizes.kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(sizes.heads * self.head_dim, sizes.dim, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        k, v = (t.repeat_interleave(self.groups, 1) for t in (rotated(k, cos, sin), v))
        out = F.scaled_dot_product_attention(rotated(q, cos, sin), k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).flatten(2))


class LlamaFeedForward(nn.Module):
    """A SwiGLU layer (Shazeer, 2020)."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        self.w1 = nn.Linear(sizes.dim, sizes.hidden, bias=False)
        self.w2 = nn.Linear(sizes.hidden, sizes.dim, bias=False)
        self.w3 = nn.Linear(sizes.dim, sizes.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class LlamaBlock(nn.Module):
    """Attention and feed-forward, each with an RMS norm before it and a residual connection around it."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        self.attention_norm = nn.RMSNorm(sizes.dim)
        self.attention = LlamaAttention(sizes)
        self.ffn_norm = nn.RMSNorm(sizes.dim)
        self.feed_forward = LlamaFeedForward(sizes)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        h = x + self.attention(self.attention_norm(x), cos, sin)
        return h + self.feed_forward(self.ffn_norm(h))


class Llama(nn.Module):
    """A model like Llama (Touvron et al., 2023): tokens (batch, seq) -> logits (batch, seq, vocab)."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, sizes: Sizes):
        super().__init__()
        self.tok_embeddings = nn.Embedding(sizes.vocab, sizes.dim)
        self.layers = nn.ModuleList([LlamaBlock(sizes) for _ in range(sizes.layers)])
        self.norm = nn.RMSNorm(sizes.dim)
        self.output = nn.Linear(sizes.dim, sizes.vocab, bias=False)
        for name, value in zip(("cos", "sin"), angles(sizes.seq, sizes.dim // sizes.heads)):
            self.register_buffer(name, value, persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return self.output(self.norm(x))


_one_at_a_time = threading.Lock()
"""Ranks may be threads, which share the global random generator."""


@dataclass(frozen=True)
class Model:
    """A model, defined by its family ("mlp", "transformer" or "llama") and its sizes."""

    family: str
    sizes: Sizes

    @property
    def name(self) -> str:
        return "mlp" if self.family == "mlp" else f"{self.family}-{self.sizes.layers}"

    def dense(self, device: str = "cpu") -> nn.Module:
        """Return the unsharded model on one device, with the same values each time."""
        with _one_at_a_time:
            torch.manual_seed(0)
            return self._made().to(device)

    def _made(self) -> nn.Module:
        s = self.sizes
        if self.family == "transformer":
            args = ModelArgs(s.layers, s.vocab, s.seq, s.dim, s.heads, dropout_p=0.0, weight_tying=False)
            return Transformer(args)
        return {"mlp": MLP, "llama": Llama}[self.family](s)

    def batch(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and targets of a step; they are the same on all ranks."""
        s, generator = self.sizes, torch.Generator().manual_seed(index)
        if self.family == "mlp":
            x = torch.randn(s.batch * s.seq, s.dim, generator=generator)
            return x, x.roll(1, -1).contiguous()
        tokens = torch.randint(s.vocab, (s.batch, s.seq + 1), generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy of logits and tokens, or the mean squared error if the targets are floating-point."""
    if targets.is_floating_point():
        return F.mse_loss(outputs, targets)
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def named(name: str, sizes: Sizes) -> Model:
    """Return the model called `name`, with the number of layers that it states and the other sizes from `sizes`.

    Raises:
        ValueError: there is no such model.
    """
    family, _, layers = name.partition("-")
    if family not in ("mlp", "transformer", "llama") or (layers and not layers.isdecimal()):
        raise ValueError(f"there is no model {name!r}; write mlp, transformer-LAYERS or llama-LAYERS")
    return Model(family, replace(sizes, layers=int(layers)) if layers else sizes)


__all__ = ["MLP", "Llama", "Model", "Sizes", "angles", "loss", "named", "rotated"]
