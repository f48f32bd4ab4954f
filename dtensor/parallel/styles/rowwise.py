"""RowwiseParallel: the input features of a linear layer, or the vocabulary of an embedding, are divided
between the ranks.

Each rank computes a part of a sum; bringing the output to `output_layouts` reduces it, by an all-reduce to
Replicate() or by a reduce-scatter to Shard(dim).
"""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ...layout.placements import Placement, Replicate, Shard
from ..modules.distribute_module import distribute_module
from ..modules.forward_wrapping import wrap_forward
from .style import ParallelStyle, as_layout, first_to_layout, linear_dims, output_to_layout


class RowwiseParallel(ParallelStyle):
    """Shard the input features: nn.Linear weight (out, in) on dim 1, its bias replicated; nn.Embedding weight
    on dim 0, that of transformers' Conv1D (in, out) too.

    Args:
        input_layouts: layout of a plain tensor that arrives as first input; by default the layout the
            computation needs, which is Shard(-1) for nn.Linear and Replicate() for nn.Embedding. Whatever
            arrives is redistributed to that one.
        output_layouts: layout in which the output leaves, Replicate() by default.
        use_local_output: whether the output leaves as a plain local tensor rather than as a DTensor.

    Raises:
        NotImplementedError: applied to another kind of module.
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
