"""The known meshes, in the form that passes and estimates take."""

from typing import Any

from dtensor.job.groups import group_ranks
from dtensor.mesh.mesh import MeshFacts, known_meshes, mesh_kind
from dtensor.passes import MeshGroups
from dtensor.torch_private.core import disable_current_modes


def mesh_groups() -> tuple[MeshGroups, ...]:
    """Return the groups of all meshes that tensors live on.

    The records outlive process groups, whose names are reused: a mesh whose groups were destroyed is left out.
    """
    with disable_current_modes():
        facts = [f for f in known_meshes() if f.groups and _is_alive(f)]
    return tuple(dict.fromkeys([MeshGroups(tuple(sorted(f.groups.items())), f.network, f.machine) for f in facts]))


def mesh_kinds() -> tuple[Any, ...]:
    """Return what the meshes are, in the same words on all ranks that have them."""
    with disable_current_modes():
        return tuple(sorted({mesh_kind(f.mesh) for f in known_meshes() if f.groups and _is_alive(f)}, key=str))


def _is_alive(facts: MeshFacts) -> bool:
    """Whether the names of the mesh's groups still stand for the ranks of the mesh."""
    assert facts.coordinate is not None, "a mesh has groups on its own ranks only"
    for axes, name in facts.groups.items():
        place = tuple([slice(None) if a in axes else at for a, at in enumerate(facts.coordinate)])
        try:
            ranks = group_ranks(name)
        except (RuntimeError, ValueError, KeyError):  # torch raises these for an unknown name
            return False
        if ranks != tuple(facts.mesh.mesh[place].flatten().tolist()):
            return False
    return True


__all__ = ["mesh_groups", "mesh_kinds"]
