"""SequenceParallel: runs a module that works token by token on activations sharded along the sequence.

See Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022. Between the tensor
parallel regions, norms and dropouts need no other tokens, so each rank keeps only its part of the sequence.
"""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ...layout.placements import Replicate, Shard
from ..modules.distribute_module import distribute_module
from ..modules.forward_wrapping import wrap_forward
from .style import ParallelStyle, first_to_layout, output_to_layout


class SequenceParallel(ParallelStyle):
    """Replicates the parameters of a module and runs it on an input sharded on `sequence_dim`.

    For nn.LayerNorm, nn.RMSNorm and nn.Dropout, and for custom norms and pointwise modules with parameters anywhere
    inside. A plain input counts as this rank's part of the sequence; a DTensor is redistributed to Shard(sequence_dim).
    Parameters get the values of rank `src_data_rank` of the axis.

    Args:
        sequence_dim: the sequence dim of the input.
        use_local_output: return the output as a plain local tensor instead of a DTensor.
    """

    shards_parameters = True

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = False) -> None:
        self.sequence_sharding: Shard = Shard(sequence_dim)
        self.use_local_output = use_local_output

    def apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def partition(name: str, submodule: nn.Module, mesh: DeviceMesh) -> None:
            for parameter, _ in list(submodule.named_parameters(recurse=False)):
                self.distribute_parameter(submodule, parameter, mesh, Replicate())

        distribute_module(module, device_mesh, partition)
        wrap_forward(
            module,
            first_to_layout(self.sequence_sharding, self.sequence_sharding, device_mesh, False),
            output_to_layout(None, self.use_local_output, device_mesh),
        )
        return module

    def __repr__(self) -> str:
        return f"SequenceParallel(sequence_dim={self.sequence_sharding.dim}, use_local_output={self.use_local_output})"


__all__ = ["SequenceParallel"]
