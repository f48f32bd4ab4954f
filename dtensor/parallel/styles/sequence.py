"""SequenceParallel: a module that works token by token runs on activations sharded along the sequence.

After Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022: between the
tensor parallel regions norms and dropouts need no other token, so each rank keeps only its part of the
sequence.
"""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ...layout.placements import Replicate, Shard
from ..modules.distribute_module import distribute_module
from ..modules.forward_wrapping import wrap_forward
from .style import ParallelStyle, first_to_layout, output_to_layout


class SequenceParallel(ParallelStyle):
    """Replicate the parameters and run on an input sharded on `sequence_dim`: nn.LayerNorm, nn.RMSNorm,
    nn.Dropout.

    Also for a norm or pointwise module of one's own, with its parameters anywhere inside. A plain input is
    taken as this rank's part of the sequence, a DTensor is redistributed to Shard(sequence_dim). The
    parameters take the values of rank `src_data_rank` of the axis.

    Args:
        sequence_dim: the dimension of the input that counts tokens.
        use_local_output: whether the output leaves as a plain local tensor rather than as a DTensor.
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
