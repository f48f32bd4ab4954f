"""Stages with parameters sharded over a data axis: one flat parameter per stage, prefetched, reduced in the background.

    forward     the gather of stage i + 1 overlaps with the computation of stage i
    backward    the gather of stage i - 1 overlaps with the computation of stage i; the last stage keeps its gathered
                parameters, and a stage of which no parameters were saved (an embedding) is not gathered again
    gradients   are reduce-scattered while the next stage computes, then summed over the replicas, if there are any; if
                all ranks are replicas, they are only summed

Saved-tensor hooks replace views of gathered parameters, which autograd would save, by their position, so that a stage
needs no memory for them between its forward and its backward. Stages may be compiled: they see plain tensors and none
of these collectives.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .functions import Group, c10d, wait


class Flat(nn.Module):
    """The parameters of one stage, flattened, and this rank's shard of them."""

    def __init__(self, stage: nn.Module, group: Group):
        super().__init__()
        self.group, size = group, group.size
        named = list(stage.named_parameters())
        self.shapes: dict[str, torch.Size] = {name: p.shape for name, p in named}
        flat = torch.cat([p.detach().flatten() for _, p in named])
        self.length = -(-len(flat) // size) * size
        flat = torch.cat([flat, flat.new_zeros(self.length - len(flat))])
        self.part = nn.Parameter(flat.chunk(size)[group.rank].clone())
        self.whole: torch.Tensor | None = None
        self.started = False

    def start(self) -> None:
        """Start to gather, unless the parameters are gathered or being gathered."""
        if self.whole is None:
            self.whole, self.started = self.group.start_gather(self.part.detach()), True

    def gathered(self) -> torch.Tensor:
        """Return the gathered flat parameters."""
        self.start()
        if self.started:
            self.whole, self.started = wait(self.whole), False
        assert isinstance(self.whole, torch.Tensor)
        return self.whole

    def views(self) -> list[torch.Tensor]:
        """Return the gathered parameters in the shapes of the stage."""
        parts = self.gathered()[: sum(s.numel() for s in self.shapes.values())]
        return [v.view(s) for v, s in zip(parts.split([s.numel() for s in self.shapes.values()]), self.shapes.values())]


class Unshard(torch.autograd.Function):
    """The gathered parameters of a stage; its backward starts to reduce their gradients."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, owner: "Sharded", index: int) -> tuple[torch.Tensor, ...]:
        ctx.owner, ctx.index = owner, index
        flat: Any = owner.flats[index]
        return tuple([v.detach() for v in flat.views()])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        ctx.owner.reduce(ctx.index, grads)
        return None, None, None


class Sharded(nn.Module):
    """A fully sharded model that is a sequence of stages.

    Args:
        stages: the stages.
        group: group of the data axis over which parameters are sharded.
        replicas: name and size of the group over which they are replicated, if there is one.
        wrap: function to apply to each stage, for example to compile it.
    """

    def __init__(
        self,
        stages: nn.ModuleList,
        group: Group,
        replicas: tuple[str, int] | None = None,
        wrap: Callable[[nn.Module], Callable[..., Any]] = lambda stage: stage,
    ):
        super().__init__()
        self.flats = nn.ModuleList([Flat(stage, group) for stage in stages])
        self.replicas, self.ranks = replicas, group.size * (replicas[1] if replicas else 1)
        self._stages = [self._functional(stage, wrap) for stage in stages]
        self._pending: list[tuple[int, torch.Tensor]] = []
        self._summing: list[tuple[int, torch.Tensor]] = []

    @staticmethod
    def _functional(stage: nn.Module, wrap: Callable[[nn.Module], Callable[..., Any]]) -> Callable[..., Any]:
        names = [name for name, _ in stage.named_parameters()]

        def run(x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
            return torch.func.functional_call(stage, dict(zip(names, parameters)), (x,))

        for p in stage.parameters():
            p.data = p.data[:0] if p.dim() else p.data  # gathered parameters replace it
        return wrap(run)  # pyright: ignore

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flats: Any = self.flats
        flats[0].start()
        for i, run in enumerate(self._stages):
            flats[i].gathered()
            if i + 1 < len(flats):
                flats[i + 1].start()
            views = Unshard.apply(flats[i].part, self, i)
            with torch.autograd.graph.saved_tensors_hooks(self._packing(i), self._unpacked):
                x = run(x, *views)  # pyright: ignore
            if i + 1 < len(flats):
                flats[i].whole = None
        return x

    def _packing(self, i: int) -> Callable[[torch.Tensor], Any]:
        whole = self.flats[i].whole
        assert isinstance(whole, torch.Tensor)
        at = whole.untyped_storage().data_ptr()

        def pack(x: torch.Tensor) -> Any:
            if x.untyped_storage().data_ptr() != at:
                return x
            self._read.add(i)
            return i, x.shape, x.stride(), x.storage_offset()

        return pack

    @property
    def _read(self) -> set[int]:
        """Stages whose backward reads parameters."""
        return self.__dict__.setdefault("_reads", set())

    def _unpacked(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        i, shape, stride, offset = packed
        flats: Any = self.flats
        fresh = flats[i].whole is None or flats[i].started or i + 1 == len(flats)
        whole = flats[i].gathered()
        ahead = max([k for k in self._read if k < i], default=None)
        if fresh and ahead is not None:
            flats[ahead].start()
        return whole.as_strided(shape, stride, offset)

    def reduce(self, i: int, grads: tuple[torch.Tensor, ...]) -> None:
        """Start to reduce a stage's gradients, and wait for the reduction that the previous call started."""
        flat: Any = self.flats[i]
        flat.whole = None
        parts = [g.flatten() for g in grads]
        parts.append(parts[0].new_zeros(flat.length - sum(map(len, parts))))
        if self.replicas is not None and flat.group.size == 1:
            self._summing.append((i, c10d.all_reduce(torch.cat(parts), "sum", self.replicas[0])))
            return
        started = flat.group.start_scatter(torch.cat(parts))
        self._settle()
        self._pending.append((i, started))

    def _settle(self) -> None:
        for i, started in self._pending:
            flat: Any = self.flats[i]
            part = flat.group.scattered(started)
            if self.replicas is not None:
                self._summing.append((i, c10d.all_reduce(part, "sum", self.replicas[0])))
            else:
                self._keep(i, part)
        self._pending.clear()

    def finish(self) -> None:
        """Wait for the gradients, which are those of the mean loss of all ranks."""
        self._settle()
        for i, started in self._summing:
            self._keep(i, wait(started))
        self._summing.clear()

    def _keep(self, i: int, part: torch.Tensor) -> None:
        flat: Any = self.flats[i]
        flat.part.grad = part.div_(self.ranks)


__all__ = ["Sharded"]
