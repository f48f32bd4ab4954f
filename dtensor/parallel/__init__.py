"""Tensor parallelism by plan (`parallelize_module` and the styles it applies) and full sharding over data axes
(`fully_shard`); losses and clipping on what they shard. Stands on `dtensor.api`."""

from .api import parallelize_module
from .clipping import clip_grad_norm_
from .colwise import ColwiseParallel
from .fsdp1 import DTensorExtensions, enable_fsdp1
from .fully_shard import fully_shard
from .input_reshard import input_reshard
from .loss import linear_cross_entropy, loss_parallel
from .materialize import materialize
from .mixed_precision import MixedPrecisionPolicy
from .prepare import PrepareModuleInput, PrepareModuleInputOutput, PrepareModuleOutput
from .rowwise import RowwiseParallel
from .sequence import SequenceParallel
from .sharded_module import FullyShardedModule
from .style import ParallelStyle

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
    "fully_shard",
    "input_reshard",
    "linear_cross_entropy",
    "loss_parallel",
    "materialize",
    "parallelize_module",
]
