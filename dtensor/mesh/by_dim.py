"""Placements said the other way round: for each dimension of a tensor the mesh axes that shard it, in their order."""

from collections.abc import Sequence

from torch.distributed.device_mesh import DeviceMesh

from ..errors import MeshError, PlacementError, shown
from ..layout.placements import Placement, Replicate, Shard


def by_dim(mesh: DeviceMesh, *dims: str | Sequence[str] | None) -> tuple[Placement, ...]:
    """The placements that shard each dimension of a tensor over the named mesh axes, as JAX's `PartitionSpec` says it.

    Args:
        mesh: A mesh whose axes have names.
        dims: For each dimension, from the first, the name of the axis that shards it; several names in the order in
            which they cut it, so that the ranks along the first hold the longest runs; or None. Dimensions that are
            left out are not sharded, and axes that are not named replicate.

    Returns:
        One placement for each axis of the mesh. A `Shard` has a `cut` if axes shard its dimension in another order than
        that of the mesh.

    Raises:
        MeshError: The mesh has no names.
        PlacementError: The mesh has no such axis, or an axis is named twice.
    """
    names = mesh.mesh_dim_names
    if names is None:
        raise MeshError(f"{mesh} has no names of axes; make it with init_device_mesh(…, mesh_dim_names=(…))")
    placements: list[Placement] = [Replicate() for _ in names]
    for dim, wanted in enumerate(dims):
        if not isinstance(wanted, (str, list, tuple, type(None))):
            raise PlacementError(
                f"dimension {dim} is to be sharded over {shown(wanted)}; write one name or several of {names}, or None"
            )
        axes = [wanted] if isinstance(wanted, str) else list(wanted or ())
        for axis in axes:
            if axis not in names:
                raise PlacementError(f"dimension {dim} is to be sharded over {shown(axis)}, but the axes are {names}")
            if placements[names.index(axis)] != Replicate() or axes.count(axis) > 1:
                raise PlacementError(
                    f"{axis!r} is named twice, but an axis shards one dimension, once; name it there only"
                )
        order = [names.index(axis) for axis in axes]
        for cut, axis in enumerate(order):
            placements[axis] = Shard(dim, None if order == sorted(order) else cut)
    return tuple(placements)


__all__ = ["by_dim"]
