"""What the examples train: a small network that learns to continue a text of numbers, and its batches."""

import torch
from torch import nn

VOCAB, WIDTH, LAYERS = 32, 32, 2
BATCH, SEQ = 16, 8


class Block(nn.Module):
    """A feed-forward layer behind a norm and beside a residual connection."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    """Tokens (batch, seq) -> logits (batch, seq, VOCAB)."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and what follows each, both (BATCH, SEQ): those of `step`, whoever asks."""
    tokens = torch.randint(0, VOCAB, (BATCH, SEQ), generator=torch.Generator().manual_seed(step))
    return tokens, (3 * tokens + 1) % VOCAB
