"""Converts modules sharded by torch's FSDP2 to modules sharded by `fully_shard`, on the same memory."""

from typing import Any

import torch
from torch import nn

from ...layout.placements import as_placements
from ...mesh.mesh import one_object
from ...tensor.tensor import DTensor
from ...tensor.torch_dtensor import is_torch_dtensor
from ...torch_private.core import root_mesh
from ...torch_private.fsdp import FSDP2Parameter, FSDP2Unit
from .added_later import remember
from .fully_shard import policy_of
from .sharded_module import join
from .sharding import of_part, planned
from .unit import Unit
from .unshard import Unshard

Taken = list[tuple[nn.Parameter, Unshard]]
"""The replacements of a unit's parameters, each with its `Unshard`."""


def taken_over(units: list[FSDP2Unit]) -> list[Taken]:
    """The replacements of the parameters of `units`, on the same memory. Nothing is communicated or changed.

    Raises:
        MeshError: a parameter is on a mesh that cannot be combined with the data mesh.
    """
    return [[_taken_over(p, unit) for p in unit.parameters] for unit in units]


def take_over(units: list[FSDP2Unit], taken: list[Taken]) -> None:
    """Turn the modules of `units`, from which FSDP2 has been removed, into what `fully_shard` would make of them."""
    meshes = [one_object(unit.mesh) for unit in units if unit.mesh is not None]
    for unit, parameters in zip(units, taken):
        mesh = one_object(unit.mesh) if unit.mesh is not None else next(iter(meshes), None)
        assert mesh is not None, "a unit without parameters stands beside one that has some"
        ours = Unit(mesh, policy_of(unit.policy), not unit.reshard, True, unit.reduce)
        hows: dict[nn.Module, dict[str, Unshard]] = {module: {} for module in unit.modules}
        for given, (made, how) in zip(unit.parameters, parameters):
            for module, name in given.places:
                hows.setdefault(module, {})[name] = how
                module._parameters[name] = made
        for module, how in hows.items():
            join(module, ours, how, module in unit.modules)
    for module in {module: None for unit in units for module in unit.modules}:
        remember(module)


def _taken_over(given: FSDP2Parameter, unit: FSDP2Unit) -> tuple[nn.Parameter, Unshard]:
    theirs = given.parameter
    gathered = theirs.detach()
    assert unit.mesh is not None, "a unit with parameters has a mesh"
    if given.inner is not None:
        mesh, placements = given.inner
        root = root_mesh(unit.mesh)
        if mesh.mesh_dim_names and root_mesh(mesh) == root:  # torch's caches may give a slice of an equal mesh
            mesh = one_object(root[mesh.mesh_dim_names])
        placed = as_placements(placements, mesh.ndim, theirs.dim())
        nothing = torch.empty(0, dtype=theirs.dtype, device="meta")
        gathered = DTensor(nothing, mesh, placed, tuple(theirs.shape), tuple(theirs.stride()))
    how = planned(gathered, one_object(unit.mesh), given.dim)
    made = of_part(theirs, _local(theirs), how)
    if is_torch_dtensor(theirs.grad):
        grad = _local(theirs.grad)
        made.grad = DTensor(grad, how.mesh, how.layout, tuple(theirs.shape), tuple(theirs.stride()))
    return made, how


def _local(x: Any) -> torch.Tensor:
    return x.detach().to_local()


__all__ = ["take_over", "taken_over"]
