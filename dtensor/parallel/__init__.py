"""Tensor parallelism by plan (`parallelize_module` and the styles it applies) and full sharding over data axes
(`fully_shard`). Stands on `dtensor.api`."""

from .api import parallelize_module
from .colwise import ColwiseParallel
from .fully_shard import fully_shard
from .materialize import materialize
from .mixed_precision import MixedPrecisionPolicy
from .prepare import PrepareModuleInput, PrepareModuleInputOutput, PrepareModuleOutput
from .rowwise import RowwiseParallel
from .sequence import SequenceParallel
from .sharded_module import FullyShardedModule
from .style import ParallelStyle

__all__ = [
    "ColwiseParallel",
    "FullyShardedModule",
    "MixedPrecisionPolicy",
    "ParallelStyle",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "RowwiseParallel",
    "SequenceParallel",
    "fully_shard",
    "materialize",
    "parallelize_module",
]
