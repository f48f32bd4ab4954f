"""What the library asks of a DeviceMesh again and again, looked up once per mesh object.

Keyed by the object, not by its value: after the process groups were destroyed and made anew, an equal mesh has other
groups.
"""

from dataclasses import dataclass
from typing import Any

from .caches import cache


@dataclass(frozen=True)
class MeshFacts:
    """A mesh, the sizes of its axes, this rank's coordinate (None outside the mesh) and its group along each axis."""

    mesh: Any
    shape: tuple[int, ...]
    coordinate: tuple[int, ...] | None
    groups: tuple[str, ...]


_facts: dict[int, MeshFacts] = cache()


def facts(mesh: Any) -> MeshFacts:
    """The facts of `mesh`; a rank outside the mesh has no groups."""
    found = _facts.get(id(mesh))
    if found is None:
        at = mesh.get_coordinate()
        groups = () if at is None else tuple(mesh.get_group(axis).group_name for axis in range(mesh.ndim))
        found = MeshFacts(mesh, tuple(mesh.shape), None if at is None else tuple(at), groups)
        _facts[id(mesh)] = found
    return found


def mesh_shape(mesh: Any) -> tuple[int, ...]:
    """Sizes of the mesh axes."""
    return facts(mesh).shape


def group_name(mesh: Any, axis: int) -> str:
    """Name of this rank's process group along a mesh axis."""
    return facts(mesh).groups[axis]


__all__ = ["MeshFacts", "facts", "group_name", "mesh_shape"]
