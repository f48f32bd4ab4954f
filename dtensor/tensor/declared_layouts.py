"""Checks of what users declare about a local tensor: the global shape and stride, and the placements of its gradient.

A wrong declaration would go unnoticed later. A local tensor of another size than the layout assigns to this rank yields
wrong numbers wherever it is padded or trimmed, and a local gradient read as the wrong shard ends up in the wrong place.
Each rank checks only itself; with `run_check=True` in `from_local`, all ranks learn of a failure before any raises.
"""

from collections.abc import Sequence
from numbers import Integral
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from ..errors import PlacementError
from ..layout.layout import Layout
from ..layout.placements import Placement, as_placements
from ..mesh.mesh import facts, mesh_shape


def wrong_sizes(
    local: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...], shape: Any, stride: Any
) -> str:
    """Why `local` is not this rank's shard of a tensor of global `shape` and `stride`; empty if it is.

    Symbolic sizes, while a graph is traced, are not checked.
    """
    for name, sizes in (("shape", shape), ("stride", stride)):
        if not isinstance(sizes, Sequence) or not all(is_size(n) for n in sizes):
            return f"{name} must hold one int of at least 0 for each dimension of the global tensor, got {sizes!r}"
        if len(sizes) != local.dim():
            return (
                f"the {name} {tuple(sizes)} has {len(sizes)} dimensions, the local tensor {local.dim()}: "
                f"{tuple(local.shape)}; write a global {name} of {local.dim()} dimensions"
            )
    coordinate = facts(mesh).coordinate
    if coordinate is None or any(isinstance(n, torch.SymInt) for n in (*shape, *local.shape)):
        return ""
    wanted = Layout.of(placements, local.dim()).local_shape(shape, mesh_shape(mesh), coordinate)
    if tuple(local.shape) == wanted:
        return ""
    return (
        f"of a tensor of shape {tuple(shape)}, placed as {list(placements)} on a mesh of shape {mesh_shape(mesh)}, the "
        f"rank at {tuple(coordinate)} holds {tuple(wanted)}, but the local tensor has shape {tuple(local.shape)}; "
        "write the global shape, which is split into shards as by torch.chunk, or leave shape and stride out if "
        "shards are even"
    )


def is_size(n: Any) -> bool:
    """Whether `n` may be the length of a dimension."""
    return isinstance(n, torch.SymInt) or (isinstance(n, Integral) and int(n) >= 0)


def gradient_placements(
    given: Sequence[Placement], mesh_ndim: int, ndim: int, local: Sequence[Placement] | None = None
) -> tuple[Placement, ...]:
    """Validated placements of a gradient; with `local`, of the local gradient of a local tensor placed as `local`.

    Raises:
        PlacementError: they do not fit mesh or tensor, one is Partial with a reduction other than sum or avg, or a
            local gradient could not have the shape of its local tensor.
    """
    checked = as_placements(given, mesh_ndim, ndim)
    for axis, p in enumerate(checked):
        if p.is_partial() and not (p.is_partial("sum") or p.is_partial("avg")):
            raise PlacementError(
                f"grad_placements: over mesh axis {axis} a partial gradient is a sum, Partial(), or an average, "
                f'Partial("avg"), got {p!r}'
            )
        if local is None or not (p.is_shard() or local[axis].is_shard()) or p == local[axis]:
            continue
        fits = repr(local[axis]) if local[axis].is_shard() else "Replicate() or Partial()"
        raise PlacementError(
            f"grad_placements: a local gradient has the shape of the local tensor, which is placed as {local[axis]!r} "
            f"over mesh axis {axis}, so it cannot be {p!r} there; write {fits}"
        )
    return checked


__all__ = ["gradient_placements", "is_size", "wrong_sizes"]
