"""ColwiseParallel: the output features of a linear layer or of an embedding are divided between the ranks.

With it a row-wise layer makes a pair (Shoeybi et al., "Megatron-LM", 2019): the activation between the two
stays sharded, so that the pair communicates once, at its end.
"""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ...layout.placements import Placement, Replicate, Shard
from ..modules.distribute_module import distribute_module
from ..modules.forward_wrapping import wrap_forward
from .style import ParallelStyle, as_layout, first_to_layout, linear_dims, output_to_layout


class ColwiseParallel(ParallelStyle):
    """Shard the output features: nn.Linear weight (out, in) and bias on dim 0, nn.Embedding weight (num,
    features) on 1; of transformers' Conv1D the weight (in, out) on 1.

    Args:
        input_layouts: layout of a plain tensor that arrives as first input, Replicate() by default. Whatever
            arrives is redistributed to Replicate().
        output_layouts: layout in which the output leaves, Shard(-1) by default.
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
        self.input_layouts: Placement = as_layout("input_layouts", input_layouts) or Replicate()
        self.output_layouts: Placement = as_layout("output_layouts", output_layouts) or Shard(-1)
        self.use_local_output = use_local_output

    def apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        dims = linear_dims(module)
        if dims is not None:
            placements = {"weight": Shard(dims[0]), "bias": Shard(0)}
        elif isinstance(module, nn.Embedding):
            placements = {"weight": Shard(1)}
        else:
            self.refuse(module)

        def partition(name: str, submodule: nn.Module, mesh: DeviceMesh) -> None:
            for parameter, placement in placements.items() if submodule is module else ():
                self.distribute_parameter(submodule, parameter, mesh, placement)

        distribute_module(module, device_mesh, partition)
        wrap_forward(
            module,
            first_to_layout(self.input_layouts, Replicate(), device_mesh, self.check_inputs),
            output_to_layout(self.output_layouts, self.use_local_output, device_mesh),
        )
        return module

    def __repr__(self) -> str:
        return (
            f"ColwiseParallel(input_layouts={self.input_layouts!r}, output_layouts={self.output_layouts!r}, "
            f"use_local_output={self.use_local_output})"
        )


__all__ = ["ColwiseParallel"]
