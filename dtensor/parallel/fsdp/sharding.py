"""Shards a parameter over the data axes: determines its new layout and mesh, and computes its local values.

A plain parameter moves to the data mesh. One that another style has already sharded (over a tensor parallel axis) moves
to the mesh of all these axes, with the data axis as the innermost split. So gathering over the data axis restores the
result of that style, whichever dims the two have chosen.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ...errors import MeshError
from ...layout.layout import Layout
from ...layout.placements import Placement, Replicate, Shard
from ...mesh.mesh import one_object
from ...tensor.factories import distribute_tensor
from ...tensor.tensor import DTensor
from ...torch_private.core import root_mesh
from ..checks.rank_variance import WATCHED
from ..modules.ties import shared_otherwise
from .unshard import Unshard

SHARDED_AS = "_dtensor_fully_sharded"
"""The attribute of a parameter, for all modules that share it, that holds a tuple: its replacement (None if it is the
replacement itself), the `Unshard` of that, and the data mesh."""

SHARDED_AGAIN = "_dtensor_fully_sharded_again"
"""The attribute of a sharded parameter that holds its replacement when it was sharded over other axes too, and the
`Unshard` of that."""


def planned(parameter: torch.Tensor, mesh: DeviceMesh, dim: int | None) -> Unshard:
    """How to shard a parameter over the last axis of the data mesh, and unshard it. Nothing is changed.

    Args:
        parameter: a plain parameter, or a DTensor on other axes of the mesh that `mesh` was sliced from.
        mesh: the data mesh: (shard,) or (replicate, shard).
        dim: the dim to shard; None replicates. An axis with a single rank always replicates.

    Raises:
        MeshError: the axes of the parameter and of `mesh` do not belong to one mesh.
    """
    dim = dim if mesh.size(mesh.ndim - 1) > 1 else None  # operators prefer replicated where both are free
    inner = parameter if isinstance(parameter, DTensor) else None
    whole = mesh if inner is None else joint_mesh(mesh, inner.device_mesh)
    return _how(whole, mesh, parameter.dim(), dim, inner)


def sharded(parameter: nn.Parameter, how: Unshard, src_data_rank: int | None) -> nn.Parameter:
    """The sharded parameter that replaces `parameter`. It is recorded for all modules that share the latter.

    Args:
        parameter: the parameter that `how` was planned for.
        how: the result of `planned`.
        src_data_rank: the rank along each data axis whose values are used; None uses each rank's own.
    """
    mesh, values = how.data_mesh, parameter.detach()
    values = values.to_local() if isinstance(values, DTensor) else values
    data: list[Placement] = [Replicate()] * (mesh.ndim - 1)
    last = Replicate() if how.dim is None else Shard(how.dim)
    local = distribute_tensor(values, mesh, [*data, last], src_data_rank=src_data_rank).to_local()
    made = of_part(parameter, local, how)
    vars(parameter)[SHARDED_AS] = made, how, mesh
    return made


def of_part(whole: torch.Tensor, local: torch.Tensor, how: Unshard) -> nn.Parameter:
    """A parameter with local tensor `local`, and with the shape, strides and `requires_grad` of `whole`."""
    value = DTensor(local, how.mesh, how.layout, tuple(whole.shape), tuple(whole.stride()))
    made = nn.Parameter(value, requires_grad=whole.requires_grad)
    vars(made)[SHARDED_AS] = None, how, how.data_mesh
    if WATCHED in vars(whole):
        vars(made)[WATCHED] = vars(whole)[WATCHED]
    return made


def sharded_otherwise(
    parameter: nn.Parameter, how: Unshard, distribute: Callable[[nn.Parameter], nn.Parameter]
) -> tuple[nn.Parameter, Unshard]:
    """A fully sharded parameter, sharded over other axes by `distribute` and then over the data axes again.

    All modules that share the parameter get the same one.

    Raises:
        MeshError: the parameter is already on other axes.
        PlacementError: another module that shares the parameter has it in other placements.
    """
    mesh = how.data_mesh
    if how.inner_mesh is not None:
        raise MeshError(
            f"the parameter is already on {how.inner_mesh} beside its data axes; parallelize a module once, or write "
            "fully_shard after all other styles"
        )
    shards: Any = parameter.detach()
    values = torch.empty(shards.shape, dtype=shards.dtype, device="meta") if shards.is_meta else shards.full_tensor()
    whole: Any = distribute(nn.Parameter(values, requires_grad=parameter.requires_grad))
    how = planned(whole, mesh, how.dim)
    before = vars(parameter).get(SHARDED_AGAIN)
    if before is None:
        before = vars(parameter)[SHARDED_AGAIN] = sharded(whole, how, None), how
    elif before[1].layout != how.layout or before[1].mesh != how.mesh:
        raise shared_otherwise(parameter, before[0], whole.placements, whole.device_mesh)
    return before


def _how(mesh: DeviceMesh, data_mesh: DeviceMesh, ndim: int, dim: int | None, inner: DTensor | None) -> Unshard:
    data = tuple(range(mesh.ndim)) if inner is None else _axes(mesh, data_mesh)
    dims: list[tuple[int, ...]] = [()] * ndim
    layout, inner_mesh = None, None
    if inner is not None:
        layout, inner_mesh = inner._spec.layout, inner.device_mesh
        if layout.partial:
            raise MeshError(f"a parameter cannot be sharded further where it is {list(layout.placements)}")
        at = _axes(mesh, inner_mesh)
        dims = [tuple([at[axis] for axis in axes]) for axes in layout.dims]
    cut = [(*axes, data[-1]) if d == dim else axes for d, axes in enumerate(dims)]

    def made(dims: list[tuple[int, ...]], averaged: tuple[int, ...]) -> Layout:
        return Layout.make(mesh.ndim, tuple(dims), tuple([(axis, "avg") for axis in sorted(averaged)]))

    return Unshard(
        mesh, data_mesh, dim, made(cut, ()), made(dims, ()), made(dims, data), made(cut, data[:-1]), inner_mesh, layout
    )


def _axes(mesh: DeviceMesh, part: Any) -> tuple[int, ...]:
    """The indices in `mesh` of the axes of `part`, which is sliced from the same mesh."""
    return tuple([_names(mesh).index(name) for name in _names(part)])


def _names(mesh: DeviceMesh) -> tuple[str, ...]:
    return tuple(mesh.mesh_dim_names or ())


def joint_mesh(one: Any, other: Any) -> Any:
    """The mesh with the axes of two slices of one mesh, in the order of that mesh. Always returns the same object.

    Raises:
        MeshError: `one` and `other` are not slices of one mesh, or share an axis.
    """
    root = root_mesh(one)
    names, mine, others = _names(root), _names(one), _names(other)
    if root_mesh(other) is not root or not names or not {*mine, *others} <= {*names}:
        raise MeshError(
            f"a parameter on {other} cannot be sharded over {one} too, because they are not slices of one mesh; write "
            'mesh = init_device_mesh(..., mesh_dim_names=("dp", "tp")), and pass mesh["tp"] for the one and mesh["dp"] '
            "for the other"
        )
    if {*mine} & {*others}:
        raise MeshError(
            f"the parameter is already on axis {' and '.join(sorted({*mine} & {*others}))} of the mesh, over which it "
            "was to be sharded; shard over other axes, or leave its module out"
        )
    wanted = tuple([name for name in names if name in mine or name in others])
    return root if wanted == names else one_object(root[wanted])


__all__ = ["SHARDED_AS", "joint_mesh", "of_part", "planned", "sharded", "sharded_otherwise"]
