"""Tensor parallelism by plan (`parallelize_module` and its styles) and full sharding over data axes (`fully_shard`).

Also losses, gradient clipping and resharding of saved activations for models that were sharded this way. Built on
`dtensor.parallel.modules.distribute_module`.
"""

from .fsdp.fully_shard import fully_shard
from .fsdp.materialize import materialize
from .fsdp.mixed_precision import MixedPrecisionPolicy
from .fsdp.sharded_module import FullyShardedModule
from .fsdp.torch_fsdp1 import DTensorExtensions, enable_fsdp1
from .styles.colwise import ColwiseParallel
from .styles.parallelize_module import parallelize_module
from .styles.prepare import PrepareModuleInput, PrepareModuleInputOutput, PrepareModuleOutput
from .styles.rowwise import RowwiseParallel
from .styles.sequence import SequenceParallel
from .styles.style import ParallelStyle
from .training import muon as _muon  # noqa: F401 (changes torch.optim.Muon)
from .training.clip_grad_norm import clip_grad_norm_
from .training.experts import expert_gate, experts
from .training.input_reshard import input_reshard
from .training.loss import linear_cross_entropy, loss_parallel
from .training.matrices import map_matrices

__all__ = [
    "ColwiseParallel",
    "DTensorExtensions",
    "FullyShardedModule",
    "MixedPrecisionPolicy",
    "ParallelStyle",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "RowwiseParallel",
    "SequenceParallel",
    "clip_grad_norm_",
    "enable_fsdp1",
    "expert_gate",
    "experts",
    "fully_shard",
    "input_reshard",
    "linear_cross_entropy",
    "loss_parallel",
    "map_matrices",
    "materialize",
    "parallelize_module",
]
