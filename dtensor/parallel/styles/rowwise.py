"""RowwiseParallel: shards the input features of a linear layer, or the vocabulary of an embedding.

Each rank computes a partial sum. Redistributing the output to `output_layouts` reduces it: by an all-reduce to
Replicate() or a reduce-scatter to Shard(dim).
"""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ...layout.placements import Placement, Replicate, Shard
from ..modules.distribute_module import distribute_module
from ..modules.forward_wrapping import wrap_forward
from .style import ParallelStyle, as_layout, first_to_layout, linear_dims, output_to_layout


class RowwiseParallel(ParallelStyle):
    """Shards the input features of a module.

    nn.Linear: weight (out, in) on dim 1. nn.Embedding: weight (num, features) on dim 0. Conv1D of transformers: weight
    (in, out) on dim 0. Biases are replicated.

    Args:
        input_layouts: placement of the first input if it is a plain tensor. None means the placement that the
            computation needs: Shard(-1) for linear layers and Replicate() for nn.Embedding. The first input is always
            redistributed to the latter.
        output_layouts: placement of the output; None means Replicate().
        use_local_output: return the output as a plain local tensor instead of a DTensor.

    Raises:
        NotImplementedError: the style was applied to another kind of module.
        ValueError: `input_layouts` or `output_layouts` is not one placement.
    """

    shards_parameters = True

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        self.input_layouts: Placement | None = as_layout("input_layouts", input_layouts)
        self.output_layouts: Placement = as_layout("output_layouts", output_layouts) or Replicate()
        self.use_local_output = use_local_output

    def apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        dims = linear_dims(module)
        if dims is not None:
            placements, needed = {"weight": Shard(dims[1]), "bias": Replicate()}, Shard(-1)
        elif isinstance(module, nn.Embedding):
            placements, needed = {"weight": Shard(0)}, Replicate()
        else:
            self.refuse(module)

        def partition(name: str, submodule: nn.Module, mesh: DeviceMesh) -> None:
            for parameter, placement in placements.items() if submodule is module else ():
                self.distribute_parameter(submodule, parameter, mesh, placement)

        distribute_module(module, device_mesh, partition)
        wrap_forward(
            module,
            first_to_layout(self.input_layouts or needed, needed, device_mesh, self.check_inputs),
            output_to_layout(self.output_layouts, self.use_local_output, device_mesh),
        )
        return module

    def __repr__(self) -> str:
        return (
            f"RowwiseParallel(input_layouts={self.input_layouts!r}, output_layouts={self.output_layouts!r}, "
            f"use_local_output={self.use_local_output})"
        )


__all__ = ["RowwiseParallel"]
