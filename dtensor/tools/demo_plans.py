"""The plans of the demo: over which mesh the model is sharded, how, and which part of a batch each rank takes.

`demo` trains the models that these plans shard.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..parallel import MixedPrecisionPolicy, fully_shard
from ..testing import Transformer

TENSOR = "tp"
"""The mesh axis over which layers are sharded; batches are split over all other axes."""


@dataclass(frozen=True)
class DemoPlan:
    """How the model is sharded.

    Attributes:
        title: description of the plan.
        axes: names of the mesh axes, outermost first.
        sequence: whether tensor parallelism also shards activations along the sequence.
        replicas: whether every rank has all parameters, so that the axes after the first have one rank each.
    """

    title: str
    axes: tuple[str, ...]
    sequence: bool = False
    replicas: bool = False

    def mesh_shape(self, nproc: int) -> tuple[int, ...]:
        """Return the sizes of the axes for `nproc` processes.

        From the last axis on, each has size 2 as long as the number of remaining processes is even, else 1. The first
        axis takes the rest, which is all of them if ranks are replicas.
        """
        sizes, left = [], nproc
        for _ in self.axes[1:]:
            sizes.insert(0, 2 if left % 2 == 0 and not self.replicas else 1)
            left //= sizes[0]
        return (left, *sizes)

    def parts(self, nproc: int) -> tuple[int, int]:
        """Return into how many parts batches are split, and over how many ranks layers are sharded."""
        sizes = dict(zip(self.axes, self.mesh_shape(nproc)))
        layers = sizes.get(TENSOR, 1)
        return prod(sizes.values()) // layers, layers

    def apply(self, model: Transformer, mesh: DeviceMesh, dtype: torch.dtype) -> Transformer:
        """Shard `model` in place over `mesh` and return it; fully sharded layers gather parameters and compute in
        `dtype`."""
        if TENSOR in self.axes:
            Transformer.parallelize(model, mesh[TENSOR], self.sequence)
        data = self.data_axes
        if data:
            policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
            for layer in model.layers:
                fully_shard(layer, mesh[data], mp_policy=policy)
            fully_shard(model, mesh[data], mp_policy=policy)
        return model

    @property
    def data_axes(self) -> tuple[str, ...]:
        """Names of the axes over which batches are split."""
        return tuple([name for name in self.axes if name != TENSOR])

    def own_part(self, batch: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        """Return this rank's part of `batch`."""
        index, parts = 0, 1
        for name in self.data_axes:
            index, parts = index * mesh[name].size() + mesh.get_local_rank(name), parts * mesh[name].size()
        return batch.chunk(parts)[index]


PLANS = {
    "tp": DemoPlan("tensor parallel", (TENSOR,)),
    "sp": DemoPlan("tensor and sequence parallel", (TENSOR,), sequence=True),
    "ddp": DemoPlan("data parallel", ("replicate", "shard"), replicas=True),
    "fsdp": DemoPlan("fully sharded", ("shard",)),
    "hsdp": DemoPlan("hybrid: fully sharded, and replicated", ("replicate", "shard")),
    "2d": DemoPlan("fully sharded and tensor parallel", ("shard", TENSOR)),
    "3d": DemoPlan("hybrid, tensor and sequence parallel", ("replicate", "shard", TENSOR), sequence=True),
}
"""Plans by name, the values of `--plan`."""


def computing_in(model: nn.Module, dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    """Return `model` as a function that first casts the parameters to `dtype`."""

    def run(*inputs: torch.Tensor) -> torch.Tensor:
        cast = {name: p.to(dtype) for name, p in model.named_parameters()}
        return torch.func.functional_call(model, cast, inputs)

    return run


__all__ = ["PLANS", "TENSOR", "DemoPlan", "computing_in"]
