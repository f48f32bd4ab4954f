"""Small models to shard: a two-layer perceptron and a decoder-only Transformer.

They have the structure, names, arguments and default values of the toy models in PyTorch's own tests of tensor
parallelism, so that results can be compared one to one. The Transformer there follows nanoGPT
(https://github.com/karpathy/nanoGPT); `Transformer.parallelize` shards it with `dtensor.parallel`. Shapes: tokens
(batch, seq), activations (batch, seq, dim), logits (batch, seq, vocab).
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from ..errors import ArgumentError
from ..layout.placements import Replicate, Shard
from ..parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)


class RMSNorm(nn.Module):
    """Root mean square norm over the last dim (Zhang and Sennrich, 2019), written as separate tensor operations."""

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight: nn.Parameter = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + self.eps)
        return (x * scale) * self.weight


class MLPModule(nn.Module):
    """Linear(10, 16), ReLU, Linear(16, 10); every instance has the same initial values."""

    def __init__(self, device: torch.device | str | None, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.net1: nn.Linear = nn.Linear(10, 16, bias=bias, device=device)
        self.relu: nn.ReLU = nn.ReLU()
        self.net2: nn.Linear = nn.Linear(16, 10, bias=bias, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net2(self.relu(self.net1(x)))

    def reset_parameters(self) -> None:
        self.net1.reset_parameters()
        self.net2.reset_parameters()


class MLPStacked(nn.Module):
    """A sequence of `n_layers` MLPModules."""

    def __init__(self, device: torch.device | str | None, n_layers: int = 2) -> None:
        super().__init__()
        self.layers: nn.ModuleList = nn.ModuleList([MLPModule(device) for _ in range(n_layers)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@dataclass
class ModelArgs:
    """Sizes and options of `Transformer`.

    Attributes:
        n_layers: number of Transformer blocks.
        vocab_size: number of different tokens.
        max_seq_len: the longest sequence the model takes, in tokens.
        dim: width of the activations; a multiple of `n_heads`.
        n_heads: number of attention heads.
        dropout_p: probability of dropout.
        use_attn_mask: whether attention is causal.
        weight_tying: whether the output layer shares the weight of the token embedding.
        checkpoint_activations: whether the backward recomputes the activations of each block.
    """

    n_layers: int = 2
    vocab_size: int = 8
    max_seq_len: int = 16
    dim: int = 16
    n_heads: int = 4
    dropout_p: float = 0.1
    use_attn_mask: bool = True
    weight_tying: bool = True
    checkpoint_activations: bool = False


class Attention(nn.Module):
    """Multi-head self-attention, causal if `args.use_attn_mask` is set."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        if args.dim % args.n_heads:
            raise ArgumentError(f"dim is a multiple of n_heads; got dim={args.dim}, n_heads={args.n_heads}")
        self.n_heads: int = args.n_heads
        self.head_dim: int = args.dim // args.n_heads
        self.dropout_p: float = args.dropout_p
        self.use_attn_mask: bool = args.use_attn_mask
        self.resid_dropout: nn.Dropout = nn.Dropout(args.dropout_p)
        self.wq: nn.Linear = nn.Linear(args.dim, args.dim, bias=False)
        self.wk: nn.Linear = nn.Linear(args.dim, args.dim, bias=False)
        self.wv: nn.Linear = nn.Linear(args.dim, args.dim, bias=False)
        self.wo: nn.Linear = nn.Linear(args.dim, args.dim, bias=False)

    def _heads(self, x: torch.Tensor, batch: int, seq: int) -> torch.Tensor:
        """(batch, seq, dim) -> (batch, heads, seq, head_dim)"""
        return x.view(batch, seq, self.n_heads, self.head_dim).transpose(1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, seq, _ = x.size()
        output = F.scaled_dot_product_attention(
            self._heads(self.wq(x), batch, seq),
            self._heads(self.wk(x), batch, seq),
            self._heads(self.wv(x), batch, seq),
            dropout_p=self.dropout_p if self.training else 0.0,
            is_causal=self.use_attn_mask,
        )
        return self.resid_dropout(self.wo(output.transpose(1, 2).flatten(2)))


class FeedForward(nn.Module):
    """Linear, GELU, Linear, dropout."""

    def __init__(self, dim: int, hidden_dim: int, dropout_p: float) -> None:
        super().__init__()
        self.w1: nn.Linear = nn.Linear(dim, hidden_dim)
        self.gelu: nn.GELU = nn.GELU()
        self.w2: nn.Linear = nn.Linear(hidden_dim, dim)
        self.resid_dropout: nn.Dropout = nn.Dropout(dropout_p)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.resid_dropout(self.w2(self.gelu(self.w1(x))))


class TransformerBlock(nn.Module):
    """Attention and feed-forward, each with a norm before it and a residual connection around it."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.attention_norm: nn.LayerNorm = nn.LayerNorm(args.dim)
        self.attention: Attention = Attention(args)
        self.ffn_norm: nn.LayerNorm = nn.LayerNorm(args.dim)
        self.feed_forward: FeedForward = FeedForward(args.dim, 4 * args.dim, args.dropout_p)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x + self.attention(self.attention_norm(x))
        return h + self.feed_forward(self.ffn_norm(h))


class Transformer(nn.Module):
    """Decoder-only language model: tokens (batch, seq) -> logits (batch, seq, vocab), in float32."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.model_args = args
        self.max_seq_len: int = args.max_seq_len
        self.tok_embeddings: nn.Embedding = nn.Embedding(args.vocab_size, args.dim)
        self.pos_embeddings: nn.Embedding = nn.Embedding(args.max_seq_len, args.dim)
        self.dropout: nn.Dropout = nn.Dropout(args.dropout_p)
        self.layers: nn.ModuleList = nn.ModuleList([TransformerBlock(args) for _ in range(args.n_layers)])
        self.norm: nn.LayerNorm = nn.LayerNorm(args.dim)
        self.output: nn.Linear = nn.Linear(args.dim, args.vocab_size, bias=False)
        if args.weight_tying:
            self.output.weight = self.tok_embeddings.weight
        self.checkpoint_activations: bool = args.checkpoint_activations

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        _, seq = tokens.size()
        if seq > self.max_seq_len:
            raise ArgumentError(
                f"a sequence of {seq} tokens exceeds max_seq_len={self.max_seq_len}; write a larger one"
            )
        h = self.tok_embeddings(tokens) + self.pos_embeddings(torch.arange(seq, device=tokens.device))
        h = self.dropout(h)
        for layer in self.layers:
            h = checkpoint(layer, h, use_reentrant=False) if self.checkpoint_activations else layer(h)
        return self.output(self.norm(h)).float()

    @staticmethod
    def parallelize(module: "Transformer", device_mesh: DeviceMesh, use_seq_parallel: bool) -> "Transformer":
        """Shard `module` in place over a mesh of one axis.

        The sharded model takes and returns plain tensors that are replicated.

        Args:
            module: the model; its number of heads must be a multiple of the number of ranks.
            device_mesh: the mesh, of one axis.
            use_seq_parallel: also shard the activations between attention and feed-forward along the sequence, whose
                length must then be a multiple of the number of ranks.

        Returns:
            `module`.
        """
        parallelize_module(module, device_mesh, _sequence_plan() if use_seq_parallel else _tensor_plan())
        if module.model_args.weight_tying:
            module.output.weight = module.tok_embeddings.weight
        return module


def _tensor_plan() -> dict[str, ParallelStyle]:
    """Return the plan that shards weights, with activations replicated between the blocks."""
    return {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate()),
        "pos_embeddings": RowwiseParallel(input_layouts=Replicate()),
        "layers.*.attention.w[qkv]": ColwiseParallel(use_local_output=False),
        "layers.*.attention.wo": RowwiseParallel(),
        "layers.*.feed_forward.w1": ColwiseParallel(),
        "layers.*.feed_forward.w2": RowwiseParallel(),
        "output": ColwiseParallel(output_layouts=Replicate()),
    }


def _sequence_plan() -> dict[str, ParallelStyle]:
    """Return the plan that shards weights, with activations sharded along the sequence between the blocks."""
    return {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "pos_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
        "layers.*.attention_norm": SequenceParallel(),
        "layers.*.attention": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "layers.*.attention.w[qkv]": ColwiseParallel(use_local_output=False),
        "layers.*.attention.wo": RowwiseParallel(output_layouts=Shard(1)),
        "layers.*.ffn_norm": SequenceParallel(),
        "layers.*.feed_forward.w1": ColwiseParallel(input_layouts=Shard(1)),
        "layers.*.feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }


class Tied(nn.Module):
    """An embedding and a linear head with tied weights: two modules share one parameter."""

    table: nn.Embedding
    head: nn.Linear

    def __init__(self, words: int = 8, width: int = 4) -> None:
        super().__init__()
        self.table: nn.Embedding = nn.Embedding(words, width)
        self.head: nn.Linear = nn.Linear(width, words, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(tokens))


__all__ = [
    "Attention",
    "FeedForward",
    "MLPModule",
    "MLPStacked",
    "ModelArgs",
    "RMSNorm",
    "Tied",
    "Transformer",
    "TransformerBlock",
]
