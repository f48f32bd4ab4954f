"""Into how many parts a sharded model divides a batch, and which of them this rank reads.

Trainers written for DistributedDataParallel take every process for a reader of its own part. Here only ranks along the
data axes read different parts: those over which `fully_shard` divides parameters, and those for which
`distribute_model` was given `inputs={"dp": Shard(0)}`. Ranks along all other axes, such as a tensor parallel one, need
the same batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..errors import MeshError, PlacementError
from ..layout.placements import Partial, Replicate
from ..mesh.mesh import group_name
from ..parallel.fsdp.unit import members
from ..parallel.whole_model.view import VIEW
from ..tensor.tensor import DTensor

Axes = list[tuple[Any, int]]


@dataclass(frozen=True, eq=False)
class BatchParts:
    """The parts of a batch.

    Attributes:
        count: how many parts a batch has.
        index: which of them this rank reads, from 0.
        shared: how many of them a loss is of that the model computes. With `fully_shard` it is that of this rank's
            part, and `shared` is 1; a model of `distribute_model` computes that of all parts together.
        axes: the data axes, outermost first, each a mesh and the number of an axis in it.
    """

    count: int
    index: int
    shared: int
    axes: Axes

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """The parts of a tensor, concatenated along dim 0, on all ranks. Collective.

        Args:
            x: this rank's part, of the same shape on all ranks. A number of no dims gives one element a part.
        """
        x = x.detach().reshape(1) if not x.dim() else x.detach()
        for mesh, axis in reversed(self.axes):
            parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(mesh.size(axis))]
            dist.all_gather(parts, x.contiguous(), group=mesh.get_group(axis))
            x = torch.cat(parts)
        return x

    def reduce(self, x: torch.Tensor, how: str) -> torch.Tensor:
        """The "sum" or "mean" of a tensor over the parts, on all ranks. Collective."""
        parts = self.gather(x[None])
        return parts.sum(0) if how == "sum" else parts.float().mean(0).to(x.dtype)

    def whole(self, x: Any) -> Any:
        """A parameter as a whole plain tensor, to compute with this rank's part of the batch. Collective.

        Its gradient is averaged over the parts. What is no DTensor is returned as it is.
        """
        if not isinstance(x, DTensor):
            return x
        mesh = x.device_mesh
        groups = {group_name(m, axis) for m, axis in self.axes}
        averaged = [group_name(mesh, axis) in groups for axis in range(mesh.ndim)]
        return x.full_tensor(grad_placements=[Partial("avg") if a else Replicate() for a in averaged])


@contextlib.contextmanager
def gradients_unreduced(model: nn.Module) -> Iterator[None]:
    """Backwards within leave gradients of fully sharded parameters as each rank computed them; the next reduces all."""
    units: list[Any] = [module for module, member in members(model) if member.given]
    for module in units:
        module.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        for module in units:
            module.set_requires_gradient_sync(True)


def is_sharded(model: nn.Module) -> bool:
    """Whether a model has DTensors among its parameters."""
    return any(isinstance(p, DTensor) for p in model.parameters())


def batch_parts(model: nn.Module) -> BatchParts:
    """Into how many parts a sharded model divides a batch, and which of them this rank reads.

    Args:
        model: a model that `distribute_model`, `parallelize_module` or `fully_shard` has sharded. For one that is not
            sharded a batch has one part.

    Returns:
        `count` and `index`, the number of parts and this rank's; `shared`, of how many parts one loss is that the model
        computes (1 with `fully_shard`, where a rank's loss is that of its own part). `gather(x)` gives the parts of a
        tensor, concatenated along dim 0, and `reduce(x, "sum")` or `"mean"` what they add up to.

    Raises:
        MeshError: parts of the model are fully sharded over different meshes.
        PlacementError: the model returns whole outputs for a part of the batch, or DTensors.
    """
    own, shared = _data_axes(model), _view_axes(model)
    axes = [*shared, *own]
    index = 0
    for mesh, axis in axes:
        index = index * mesh.size(axis) + mesh.get_local_rank(axis)
    return BatchParts(_size(axes), index, _size(shared), axes)


def _size(axes: Axes) -> int:
    return prod(mesh.size(axis) for mesh, axis in axes)


def _data_axes(model: nn.Module) -> Axes:
    """The axes over which a model is fully sharded."""
    meshes: list[Any] = []
    for _, member in members(model):
        if member.unit.local and not any(member.unit.mesh is m or member.unit.mesh == m for m in meshes):
            meshes.append(member.unit.mesh)
    if len(meshes) > 1:
        raise MeshError(
            f"parts of the model are fully sharded over different meshes, {' and '.join(map(str, meshes))}, so it does "
            "not follow which part of a batch a rank reads; call fully_shard with one mesh"
        )
    return [(mesh, axis) for mesh in meshes for axis in range(mesh.ndim)]


def _view_axes(model: nn.Module) -> Axes:
    """The axes over which a model of `distribute_model` is given parts of a batch."""
    view = next((vars(module)[VIEW] for module in model.modules() if VIEW in vars(module)), None)
    if view is None:
        return []
    if view.outputs is None:
        raise PlacementError(
            "the model returns DTensors, and trainers compute with plain tensors; write distribute_model(..., "
            'outputs={}), or outputs={"dp": Shard(0)} if the inputs are placed so'
        )
    mesh, names = view.mesh, view.mesh.mesh_dim_names
    inputs = _first_dim([view.others, *view.inputs.values()])
    outputs = _first_dim([view.outputs])
    if inputs != outputs:
        asked: Mapping[str, str] = {names[axis]: "Shard(0)" for axis in sorted(inputs)}
        text = ", ".join(f'"{name}": {placement}' for name, placement in asked.items())
        raise PlacementError(
            "the model takes parts of a batch and returns other parts, so predictions do not belong to the labels that "
            f"a rank has; write distribute_model(..., outputs={{{text}}})"
        )
    return [(mesh, axis) for axis in sorted(inputs)]


def _first_dim(placements: list[Any]) -> set[int]:
    """The axes for which one of the placements shards dim 0."""
    return {axis for of_one in placements for axis, p in enumerate(of_one) if p.is_shard(0)}


__all__ = ["BatchParts", "batch_parts", "gradients_unreduced", "is_sharded"]
