"""Small models of torch's own modules, as they are written for one device."""

import torch
import torch.nn.functional as F
from torch import nn


class WithLoss(nn.Module):
    """A model that gives its output, and a loss of it that tells every element from every other."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.model(**inputs)
        weight = torch.arange(out.shape[-1], device=out.device) + 1
        return {"loss": (out * weight).cos().mean(), "logits": out}


class Images(nn.Module):
    """Convolutions with a batch norm, pooled."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second, self.head = nn.Conv2d(8, 8, 3, stride=2, padding=1), nn.Linear(8, 5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(self.norm(self.first(images)).relu(), 2)
        return self.head(F.adaptive_avg_pool2d(self.second(x).relu(), 1).flatten(1))


class Sampled(nn.Module):
    """A model of diffusers, and of what it gives the tensor."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
        return self.model(**inputs).sample


class Clicks(nn.Module):
    """Tables of bags, and products of what they give."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.EmbeddingBag(20, 8, mode="sum") for _ in range(2)])
        self.dense = nn.Linear(4, 8)
        self.top = nn.Sequential(nn.Linear(11, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, numbers: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        found = [self.dense(numbers), *[table(ids[:, i]) for i, table in enumerate(self.tables)]]
        x = torch.stack(found, 1)
        rows, columns = torch.tril_indices(3, 3, -1)
        return self.top(torch.cat([found[0], torch.bmm(x, x.transpose(1, 2))[:, rows, columns]], 1))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.table, self.layers = nn.Embedding(16, 8), kind(8, 12, 2, batch_first=True)
        self.head = nn.Linear(12, 16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.table(tokens))[0])


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.table, self.layers, self.head = nn.Embedding(16, 8), nn.TransformerEncoder(layer, 2), nn.Linear(8, 16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.head(self.layers(self.table(tokens), mask=mask, is_causal=True))


class Graph(nn.Module):
    """A mean over neighbours, by scatter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, nodes: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        sources, targets = edges
        x = self.first(nodes).relu()
        met = torch.zeros_like(x).index_add(0, targets, x[sources])
        ones = torch.ones_like(targets, dtype=x.dtype)
        count = torch.zeros(x.shape[0], device=x.device, dtype=x.dtype).scatter_add(0, targets, ones)
        return self.second(met / count.clamp(min=1)[:, None])


__all__ = ["Clicks", "Encoder", "Graph", "Images", "Recurrent", "Sampled", "WithLoss"]
