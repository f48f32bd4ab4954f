"""Sharded layers as autograd functions, after Megatron-LM (Shoeybi et al., 2019; Korthikanti et al., 2022).

Activations have the shape (seq, batch, dim), so that gathering along the sequence needs no copy. With `Cut.sequence`
they are sharded along the sequence between the layers, else replicated. A collective overlaps with the products that do
not need its result.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dtensor.comm.start_collectives import FUNCTIONAL, OVER_GLOO, Starts, starts
from dtensor.torch_private.compiling import lower_as_collective

c10d = torch.ops._c10d_functional
wait = c10d.wait_tensor


@dataclass(frozen=True)
class Group:
    """A process group, and this rank in it. In a group of one rank nothing is gathered.

    Gathers and scatters are started by the library's kernels (`dtensor.comm.start_collectives`). Over gloo these
    send in both directions at once. They have no reduce-scatter there, because gloo's sends as much as an all-reduce;
    instead, the ranks exchange their parts with an all-to-all, and add them up here.
    """

    name: str = ""
    size: int = 1
    rank: int = 0
    starts: Starts = FUNCTIONAL

    @classmethod
    def of(cls, group: Any, rank: int, device: str) -> "Group":
        """Return the process group `group`, in which this is `rank`."""
        lower_as_collective(OVER_GLOO.all_to_all)
        return cls(group.group_name, group.size(), rank, starts(group.group_name, torch.device(device)))

    def start_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Start to gather `x` of all ranks along dim 0; `wait` returns the result."""
        return x if self.size == 1 else self.starts.all_gather(x.contiguous(), self.size, self.name)

    def start_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """Start to sum `x` over the ranks and scatter it along dim 0; `scattered` returns this rank's part."""
        if self.starts.reduce_scatter is not None:
            return self.starts.reduce_scatter(x.contiguous(), "sum", self.size, self.name)
        rows = [x.shape[0] // self.size] * self.size
        return self.starts.all_to_all(x.contiguous(), rows, rows, self.name)

    def scattered(self, started: torch.Tensor) -> torch.Tensor:
        """Wait for the result of `start_scatter`."""
        x = wait(started)
        return x.unflatten(0, (self.size, -1)).sum(0) if self.starts.reduce_scatter is None else x


@dataclass(frozen=True)
class Cut:
    """How layers are sharded.

    Attributes:
        group: the process group over which they are sharded.
        sequence: whether activations are also sharded along the sequence.
    """

    group: Group = Group()
    sequence: bool = False

    @property
    def size(self) -> int:
        return self.group.size

    @property
    def rank(self) -> int:
        return self.group.rank

    def part(self, x: torch.Tensor, dim: int) -> nn.Parameter:
        """Return this rank's shard of a parameter."""
        return nn.Parameter(x.detach().chunk(self.size, dim)[self.rank].clone())

    def start_sum(self, x: torch.Tensor) -> torch.Tensor:
        """Start to sum `x` over the ranks; with `sequence`, each gets its shard of the sum. `summed` waits for it."""
        return self.group.start_scatter(x) if self.sequence else c10d.all_reduce(x.contiguous(), "sum", self.group.name)

    def summed(self, started: torch.Tensor) -> torch.Tensor:
        return self.group.scattered(started) if self.sequence else wait(started)


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.flatten(0, -2)


class Columns(torch.autograd.Function):
    """x @ w.T + b for several weights that are sharded by rows, or not at all; takes w, b, w, b, ...; b may be None."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cut: Cut, *given: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        weights, biases = given[::2], given[1::2]
        if cut.sequence and cut.size > 1:
            x = wait(cut.group.start_gather(x))
        ctx.save_for_backward(x, *weights)
        ctx.cut, ctx.biased = cut, [b is not None for b in biases]
        return tuple([torch.nn.functional.linear(x, w, b) for w, b in zip(weights, biases)])  # pyright: ignore

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        x, *weights = ctx.saved_tensors
        cut: Cut = ctx.cut
        gx = started = None
        if ctx.needs_input_grad[0]:
            gx = grads[0] @ weights[0]
            for g, w in zip(grads[1:], weights[1:]):
                gx = gx + g @ w
            started = cut.start_sum(gx) if cut.size > 1 else None
        found = []
        for g, biased in zip(grads, ctx.biased):
            found += [_rows(g).t() @ _rows(x), _rows(g).sum(0) if biased else None]
        return (gx if started is None else cut.summed(started), None, *found)


class Rows(torch.autograd.Function):
    """x @ w.T, summed over ranks, + b for a weight that is sharded by columns; b is replicated, or None."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cut: Cut, w: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        ctx.cut, ctx.biased = cut, b is not None
        y = x @ w.t()
        y = cut.summed(cut.start_sum(y)) if cut.size > 1 else y
        return y if b is None else y + b

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        x, w = ctx.saved_tensors
        (g,), cut = grads, ctx.cut
        if cut.sequence and cut.size > 1:
            g = wait(cut.group.start_gather(g))
        return g @ w, None, _rows(g).t() @ _rows(x), _rows(g).sum(0) if ctx.biased else None


class Sum(torch.autograd.Function):
    """The sum of partial values over ranks; with `Cut.sequence`, this rank's shard of it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cut: Cut) -> torch.Tensor:
        ctx.cut = cut
        return cut.summed(cut.start_sum(x)) if cut.size > 1 else x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        cut: Cut = ctx.cut
        return wait(cut.group.start_gather(grads[0])) if cut.sequence and cut.size > 1 else grads[0], None


class Whole(torch.autograd.Function):
    """Gathers shards along the last dim; all ranks continue with the same computation."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cut: Cut) -> torch.Tensor:
        ctx.cut = cut
        return torch.cat(wait(cut.group.start_gather(x)).chunk(cut.size), -1) if cut.size > 1 else x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        cut: Cut = ctx.cut
        return grads[0].chunk(cut.size, -1)[cut.rank], None


def looked_up(table: torch.Tensor, index: torch.Tensor, cut: Cut) -> torch.Tensor:
    """Look up rows in a table that is sharded by rows; the result is partial, a sum over the ranks."""
    if cut.size == 1:
        return nn.functional.embedding(index, table)
    here = index - cut.rank * table.shape[0]
    mine = (here >= 0) & (here < table.shape[0])
    return nn.functional.embedding(here * mine, table) * mine.unsqueeze(-1)


__all__ = ["Columns", "Cut", "Group", "Rows", "Sum", "Whole", "c10d", "looked_up", "wait"]
