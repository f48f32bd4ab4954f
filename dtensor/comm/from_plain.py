"""The way from plain tensors to the mesh: the current mesh, checks across ranks, and data from a source rank.

Used by `from_local`, `distribute_tensor` and the like. The checks and broadcasts of eager mode call process groups
directly, not through the operators of `dtensor.comm.collectives`.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..errors import ArgumentError, ArgumentTypeError, MeshError, PlacementError, ShardingError, shown
from ..layout.placements import Placement
from ..mesh.mesh import facts
from ..mesh.provenance import note_alike
from ..torch_private.core import (
    FakeTensor,
    FunctionalTensor,
    current_device_mesh,
    function_transforms_active,
    has_tangent,
)


def current_mesh() -> Any:
    """The mesh of the innermost `with mesh:` block.

    Raises:
        MeshError: There is none.
    """
    found = current_device_mesh()
    if found is None:
        raise MeshError("no device mesh was given and none is current; pass device_mesh, or write `with mesh:` around")
    return found


def mesh_of(device_mesh: DeviceMesh | None) -> DeviceMesh:
    """The given mesh, or the current one for None.

    Raises:
        MeshError: `device_mesh` is not a mesh, or none is given and none is current.
    """
    if device_mesh is None:
        return current_mesh()
    if not hasattr(device_mesh, "device_type"):
        given = device_mesh if isinstance(device_mesh, (list, tuple)) else [device_mesh]
        places = all(isinstance(p, Placement) for p in given) and given
        raise MeshError(
            f"device_mesh must be a mesh as made by dtensor.init_device_mesh(device_type, sizes); got "
            f"{shown(device_mesh)}; "
            + (f"write placements={list(given)!r}, the mesh comes before them" if places else _a_mesh(device_mesh))
        )
    return device_mesh


def _a_mesh(given: Any) -> str:
    if isinstance(given, (dict, torch.nn.Module)):
        return "the mesh comes second, write (model, device_mesh, plan)"
    return f'write for example init_device_mesh("cpu", ({dist.get_world_size() if dist.is_initialized() else 2},))'


def is_tracing(out: Any) -> bool:
    """Whether `out`, a DTensor or a sequence of them, holds fake or functional tensors."""
    first = out[0] if isinstance(out, (tuple, list)) and out else out
    local = getattr(first, "_local_tensor", None)
    return isinstance(local, (FakeTensor, FunctionalTensor))


def refuse_export() -> None:
    """Raise if torch.export.export traces: it records operators before DTensors see them, and fails obscurely later.

    Raises:
        ShardingError: torch.export.export traces.
    """
    if torch.compiler.is_exporting():
        raise ShardingError(
            "torch.export.export cannot trace through DTensors: it records operators before they are decomposed into "
            "local operators and collectives; write dtensor.export(model, args), which gives the same kind of program"
        )


def refuse_tangent(x: torch.Tensor, name: str) -> None:
    """Raise if forward-mode differentiation would lose the tangent of `x` in the function `name`.

    Raises:
        ShardingError: `x` has a tangent.
    """
    if has_tangent(x):
        raise ShardingError(
            f"forward-mode differentiation does not support {name}, whose result would have no tangent; write "
            "torch.autograd.functional.jvp or hvp, which use reverse mode twice"
        )


def refuse_function_transforms(what: str) -> None:
    """Raise if a transform of torch.func (grad, vjp, vmap) runs, which cannot pass borders to and from plain tensors.

    Args:
        what: what was called, for the error.

    Raises:
        ShardingError: one runs.
    """
    if function_transforms_active():
        raise ShardingError(
            f"torch.func transforms (grad, vjp, vmap, jacrev) do not support {what}; write torch.autograd.grad(loss, "
            "parameters) with torch.func.functional_call(model, parameters, args) for gradients with respect to given "
            "parameters, and a loop over samples for vmap"
        )


def of_all_ranks(item: Any, mesh: DeviceMesh) -> list[Any]:
    """Gather the `item`, which must be picklable, of each rank of the mesh, in an order that is the same on all ranks.

    For checks: all ranks see the items of all others before any rank raises. A rank that raised earlier would leave the
    others waiting.
    """
    found = [item]
    for axis in range(mesh.ndim):
        group = mesh.get_group(axis)
        parts: list[Any] = [None] * group.size()
        dist.all_gather_object(parts, found, group=group)
        found = [item for part in parts for item in part]
    return found


def check_replicas(
    local: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...], *, with_shape: bool, wrong: str = ""
) -> torch.Tensor:
    """Compare shape and dtype across the mesh, then broadcast replicas from the first rank of their axis.

    Args:
        local: This rank's local tensor.
        mesh: The mesh.
        placements: One placement per mesh axis; the tensor is broadcast along the replicated ones.
        with_shape: Whether shapes must be the same, too.
        wrong: The error that this rank has found by itself; "" if there is none.

    Returns:
        The local tensor with the broadcast values.

    Raises:
        PlacementError: On every rank of the mesh, if any two ranks differ or one has found an error.
    """
    if mesh.get_coordinate() is None:
        return local
    shape = tuple(local.shape) if with_shape else None
    everything = of_all_ranks((dist.get_rank(), wrong, shape, str(local.dtype)), mesh)
    if refused := sorted((rank, why) for rank, why, *_ in everything if why):
        raise PlacementError("from_local: " + "; ".join(f"rank {rank}: {why}" for rank, why in refused))
    found = [(rank, *what) for rank, _, *what in everything]
    if any(item[1:] != found[0][1:] for item in found):
        ranks = {rank: what for rank, *what in sorted(found)}
        raise PlacementError(
            f"from_local: shape and dtype differ between the ranks of the mesh: {ranks}; "
            "pass the global shape and stride for uneven shards"
        )
    local = local.clone()  # the caller's stays as it is; gradients reach it
    for axis, p in enumerate(placements):
        if p.is_replicate():
            local = local.resolve_conj().resolve_neg().contiguous()
            with torch.no_grad():
                _broadcast(local.detach(), mesh.get_group(axis), 0)
    return local


def _broadcast(x: torch.Tensor, group: Any, source: int) -> None:
    """Overwrite the contiguous `x` with that of rank `source` of the group, as bytes: backends lack some dtypes."""
    dist.broadcast(x.view(-1).view(torch.uint8), dist.get_global_rank(group, source), group=group)


def check_source(mesh: DeviceMesh, src_data_rank: int | None) -> None:
    """Raise ValueError if a mesh axis has no rank `src_data_rank`."""
    if src_data_rank is not None and src_data_rank not in range(min(mesh.shape)):
        raise ArgumentError(
            f"src_data_rank must be a rank along each mesh axis, here 0 to {min(mesh.shape) - 1}; got {src_data_rank!r}"
        )


TORCH = "torch.distributed.tensor"
"""The package of torch's own DTensor."""


def is_torch_dtensor(x: Any) -> bool:
    """Whether `x` is a DTensor of torch.distributed.tensor. Does not import that module."""
    return any(c.__name__ == "DTensor" and c.__module__.startswith(TORCH) for c in type(x).__mro__)


def refuse_torchs(name: str, module: torch.nn.Module) -> None:
    """Raise PlacementError if torch's DTensors are parameters or buffers of `module`, an argument of `name`."""
    for tensors in (module.named_parameters(), module.named_buffers()):
        for parameter, x in tensors:
            if is_torch_dtensor(x):
                raise PlacementError(
                    f"{name}: {parameter!r} is a DTensor of {TORCH}, by which the model is sharded already; write "
                    "dtensor.interop.convert_module(model), which makes it one of dtensor, or give the plain model to "
                    f"{name} alone"
                )


def check_module(name: str, module: Any) -> None:
    """Raise TypeError if `module`, an argument of the function `name`, is not an nn.Module.

    Raises:
        PlacementError: a parameter or buffer is a DTensor of torch.
    """
    if not isinstance(module, torch.nn.Module):
        made = isinstance(module, type) and issubclass(module, torch.nn.Module)
        fix = f"write {module.__name__}(...)" if made else f"the module comes first, {name}(model, mesh, ...)"
        raise ArgumentTypeError(f"{name} takes an nn.Module; got {shown(module)}, {fix}")
    refuse_torchs(name, module)


def from_source(tensor: torch.Tensor, mesh: DeviceMesh, src_data_rank: int) -> torch.Tensor:
    """A copy of the global tensor that rank `src_data_rank` (of each mesh axis) holds, on every rank of the mesh.

    Raises:
        ValueError: A mesh axis has no such rank.
    """
    check_source(mesh, src_data_rank)
    data = tensor.detach().contiguous().clone()
    take_from_source(data, mesh, src_data_rank)
    return data


def take_from_source(x: torch.Tensor, mesh: DeviceMesh, src_data_rank: int) -> None:
    """Overwrite the memory of `x` with that of rank `src_data_rank` (of each mesh axis), on every rank of the mesh.

    Does nothing on ranks outside the mesh. `x` may be any view of the memory. In a trace, the graph does it for `x`.
    """
    if mesh.get_coordinate() is None:
        return
    if isinstance(x, (FakeTensor, FunctionalTensor)):
        for axis, group in enumerate(facts(mesh).by_axis):
            of_all = torch.ops.dtensor.all_gather(x.unsqueeze(0), 0, mesh.size(axis), group)
            x.copy_(of_all[src_data_rank])
        note_alike(x)
        return
    data = torch.empty(0, dtype=x.dtype, device=x.device).set_(x.untyped_storage())
    for axis in range(mesh.ndim):
        _broadcast(data, mesh.get_group(axis), src_data_rank)


__all__ = [
    "TORCH",
    "check_module",
    "check_replicas",
    "check_source",
    "current_mesh",
    "from_source",
    "is_torch_dtensor",
    "is_tracing",
    "mesh_of",
    "of_all_ranks",
    "refuse_export",
    "refuse_function_transforms",
    "refuse_tangent",
    "refuse_torchs",
    "take_from_source",
]
