"""Tensor parallelism by plan: `parallelize_module` and the styles it applies. Stands on `dtensor.api`."""

from .api import parallelize_module
from .clipping import clip_grad_norm_
from .colwise import ColwiseParallel
from .loss import linear_cross_entropy, loss_parallel
from .prepare import PrepareModuleInput, PrepareModuleInputOutput, PrepareModuleOutput
from .rowwise import RowwiseParallel
from .sequence import SequenceParallel
from .style import ParallelStyle

__all__ = [
    "ColwiseParallel",
    "ParallelStyle",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "RowwiseParallel",
    "SequenceParallel",
    "clip_grad_norm_",
    "linear_cross_entropy",
    "loss_parallel",
    "parallelize_module",
]
