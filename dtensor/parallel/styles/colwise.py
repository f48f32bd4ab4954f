"""ColwiseParallel: shards the output features of a linear layer or of an embedding.

It is used in a pair with a following row-wise layer (Shoeybi et al., "Megatron-LM", 2019): the activation between the
two stays sharded, so that the pair communicates only once, at its end.
"""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ...layout.placements import Placement, Replicate, Shard
from ..modules.distribute_module import distribute_module
from ..modules.forward_wrapping import wrap_forward
from .style import ParallelStyle, as_layout, first_to_layout, linear_dims, output_to_layout


class ColwiseParallel(ParallelStyle):
    """Shards the output features of a module.

    nn.Linear: weight (out, in) and bias (out,) on dim 0. nn.Embedding: weight (num, features) on dim 1. Conv1D of
    transformers: weight (in, out) on dim 1 and bias (out,) on dim 0.

    Args:
        input_layouts: placement of the first input if it is a plain tensor; None means Replicate(). The first input is
            always redistributed to Replicate().
        output_layouts: placement of the output; None means Shard(-1).
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
