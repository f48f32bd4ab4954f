"""How a step is run, whatever its placements."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from .states import State


@dataclass(frozen=True)
class Regime:
    """How a step is run.

    Attributes:
        training: whether there is a backward, and an optimizer.
        states: tensors of its size that the optimizer keeps for a parameter.
        parts: number of microbatches that a compiled step computes in turns (`dtensor.passes`, `split_batch`).
        gradients: the dtype in which gradients of parameters are sent; None for their own.
        by_operator: whether every operator runs in the layouts found for it (`dtensor.parallel.decisions`), rather than
            in those that the engine chooses between the borders of modules.
    """

    training: bool = True
    states: float = 2.0
    parts: int = 1
    gradients: torch.dtype | None = None
    by_operator: bool = False

    def itemsize(self, dtype: torch.dtype) -> int:
        """Bytes of an element of a gradient as it is sent."""
        return min(dtype.itemsize, dtype.itemsize if self.gradients is None else self.gradients.itemsize)

    def divides(self, shape: Sequence[int], state: State, sizes: Sequence[int]) -> bool:
        """Whether each rank's part of a batch divides into microbatches."""
        return not shape or shape[0] % (self.parts * prod([n for s, n in zip(state, sizes) if s == 0])) == 0


USUAL = Regime()
"""Training with Adam."""


def on_parts(a: State, b: State) -> bool:
    """Whether a single move runs on microbatches one by one: one along the batch does not."""
    return all(x == y or (x != 0 and y != 0) for x, y in zip(a, b))


__all__ = ["USUAL", "Regime", "on_parts"]
