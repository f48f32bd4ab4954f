"""The models as sequences of stages made of sharded layers: the embedding, each layer, the output.

`staged` takes a `Model` and shards the parameters of its dense form. Language models take tokens (batch, seq) and
return logits (batch, seq, vocab); activations in between have the shape (seq, batch, dim).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..models import Model, rotated
from .functions import Columns, Cut, Rows, Sum, Whole, c10d, looked_up, wait


def _whole(x: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(x.detach().clone())


class MLPStage(nn.Module):
    """A layer of the perceptron."""

    def __init__(self, dense: Any, cut: Cut):
        super().__init__()
        self.cut = cut
        self.w1, self.b1 = cut.part(dense.w1.weight, 0), cut.part(dense.w1.bias, 0)
        self.w2, self.b2 = cut.part(dense.w2.weight, 1), _whole(dense.w2.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (y,) = Columns.apply(x, self.cut, self.w1, self.b1)  # pyright: ignore
        return x + Rows.apply(F.gelu(y), self.cut, self.w2, self.b2)


class Embedding(nn.Module):
    """Maps tokens to activations, and adds learned positions if the model has them."""

    def __init__(self, dense: Any, cut: Cut):
        super().__init__()
        self.cut = cut
        self.tokens = cut.part(dense.tok_embeddings.weight, 0)
        positions = getattr(dense, "pos_embeddings", None)
        self.positions = cut.part(positions.weight, 0) if positions is not None else None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = looked_up(self.tokens, tokens.t(), self.cut)
        if self.positions is not None:
            at = torch.arange(tokens.shape[1], device=tokens.device)
            x = x + looked_up(self.positions, at, self.cut).unsqueeze(1)
        return Sum.apply(x, self.cut)  # pyright: ignore


class Norm(nn.Module):
    """The model's norm, on this rank's part of the sequence."""

    def __init__(self, dense: Any):
        super().__init__()
        self.weight = _whole(dense.weight)
        self.bias = _whole(dense.bias) if getattr(dense, "bias", None) is not None else None
        self.eps, self.centred = dense.eps, isinstance(dense, nn.LayerNorm)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.centred:
            return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)


class Block(nn.Module):
    """Attention and feed-forward of a language model."""

    def __init__(self, dense: Any, cut: Cut, angles: tuple[torch.Tensor, torch.Tensor] | None):
        super().__init__()
        self.cut, self.angles = cut, angles
        attention, feed = dense.attention, dense.feed_forward
        self.head_dim = attention.head_dim
        self.norm1, self.norm2 = Norm(dense.attention_norm), Norm(dense.ffn_norm)
        self.wq, self.wk, self.wv = (cut.part(w.weight, 0) for w in (attention.wq, attention.wk, attention.wv))
        self.wo = cut.part(attention.wo.weight, 1)
        self.w1, self.w2 = cut.part(feed.w1.weight, 0), cut.part(feed.w2.weight, 1)
        gated = getattr(feed, "w3", None)
        self.w3 = cut.part(gated.weight, 0) if gated is not None else None
        self.b1 = cut.part(feed.w1.bias, 0) if feed.w1.bias is not None else None
        self.b2 = _whole(feed.w2.bias) if feed.w2.bias is not None else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self._attention(self.norm1(x))
        return x + self._feed_forward(self.norm2(x))

    def _attention(self, x: torch.Tensor) -> torch.Tensor:
        found = Columns.apply(x, self.cut, self.wq, None, self.wk, None, self.wv, None)
        # (seq, batch, dim) -> (batch, heads, seq, head_dim)
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)).permute(1, 2, 0, 3) for t in found)  # pyright: ignore
        if self.angles is not None:
            q, k = rotated(q, *self.angles), rotated(k, *self.angles)
            groups = q.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return Rows.apply(out.permute(2, 0, 1, 3).flatten(2), self.cut, self.wo, None)  # pyright: ignore

    def _feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.w3 is None:
            (up,) = Columns.apply(x, self.cut, self.w1, self.b1)  # pyright: ignore
            inner = F.gelu(up)
        else:
            up, gate = Columns.apply(x, self.cut, self.w1, None, self.w3, None)  # pyright: ignore
            inner = F.silu(up) * gate
        return Rows.apply(inner, self.cut, self.w2, self.b2)  # pyright: ignore


class Head(nn.Module):
    """The last norm, and the logits."""

    def __init__(self, dense: Any, cut: Cut):
        super().__init__()
        self.cut, self.norm, self.output = cut, Norm(dense.norm), cut.part(dense.output.weight, 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (y,) = Columns.apply(self.norm(x), self.cut, self.output, None)  # pyright: ignore
        return Whole.apply(y, self.cut).transpose(0, 1)  # pyright: ignore


class Tensor(nn.Module):
    """A sequence of stages that are sharded by `cut`."""

    def __init__(self, stages: list[nn.Module], cut: Cut):
        super().__init__()
        self.stages, self.cut = nn.ModuleList(stages), cut

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stage in self.stages:
            x = stage(x)
        return x

    def finish(self) -> None:
        """Finish the backward: sum the gradients of norms, which ran on parts of the sequence, in one all-reduce."""
        if not self.cut.sequence or self.cut.size == 1:
            return
        norms = [m for m in self.modules() if isinstance(m, Norm)]
        grads = [p.grad for m in norms for p in m.parameters() if p.grad is not None]
        if grads:
            whole = wait(c10d.all_reduce(torch.cat([g.flatten() for g in grads]), "sum", self.cut.group.name))
            for g, part in zip(grads, whole.split([g.numel() for g in grads])):
                g.copy_(part.view_as(g))


def staged(model: Model, cut: Cut, device: str = "cpu") -> Tensor:
    """Return the sharded stages of the model, with the values of its dense form."""
    dense: Any = model.dense(device)
    if model.family == "mlp":
        return Tensor([MLPStage(layer, cut) for layer in dense.layers], cut)
    angles = (dense.cos, dense.sin) if model.family == "llama" else None
    blocks = [Block(layer, cut, angles) for layer in dense.layers]
    return Tensor([Embedding(dense, cut), *blocks, Head(dense, cut)], cut)


__all__ = ["Cut", "Tensor", "staged"]
