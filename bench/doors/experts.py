"""Experts dealt out over ranks by hand: each rank holds some of them, and adds up what they make of all tokens.

transformers' implementations skip a choice of an expert that is none of the module's (`_is_expert_parallel`).
"""

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Partial, Replicate


class Dealt(nn.Module):
    """Experts of a mixture of which this rank keeps its part.

    Args:
        experts: the module with the parameters of all experts, stacked; it is changed.
        mesh: the mesh, of one axis.
        tensor: the class DTensor of either library.
    """

    first: torch.Tensor

    def __init__(self, experts: Any, mesh: Any, tensor: Any):
        super().__init__()
        count = experts.num_experts // mesh.size()
        first = count * mesh.get_local_rank()
        for name, p in list(experts.named_parameters()):
            setattr(experts, name, nn.Parameter(p.detach()[first : first + count].clone()))
        experts.num_experts, experts._is_expert_parallel = count, True
        self.experts, self.mesh, self.tensor, self.count = experts, mesh, tensor, count
        self.register_buffer("first", torch.tensor(first), persistent=False)

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        index = index - self.first
        elsewhere = (index < 0) | (index >= self.count)
        index = index.masked_fill(elsewhere, self.count)
        weights = self._shared(weights).masked_fill(elsewhere, 0.0)
        out = self.experts(self._shared(hidden), index, weights)
        whole = self.tensor.from_local(out, self.mesh, [Partial()]).redistribute(placements=[Replicate()])
        return whole.to_local()

    def _shared(self, x: torch.Tensor) -> torch.Tensor:
        """Return the same values; gradients of all ranks are added up."""
        whole = self.tensor.from_local(x, self.mesh, [Replicate()])
        return whole.to_local(grad_placements=[Partial()])


def dealt(model: nn.Module, mesh: Any, tensor: Any) -> None:
    """Deal out the experts of all layers of a decoder."""
    for layer in model.get_submodule("model.layers").children():
        layer.mlp.experts = Dealt(layer.mlp.experts, mesh, tensor)  # pyright: ignore


__all__ = ["dealt"]
