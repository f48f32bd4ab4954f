"""`input_reshard`: keeps the replicated saved activations of a module sharded, and gathers them in the backward.

Between tensor parallel layers activations are the same on all ranks, and each rank saves all of them for the backward.
In a resharded module each rank saves only its shard. This costs an all-gather per saved activation in the backward.
"""

from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh

from ...comm.from_plain import check_module, mesh_of
from ...errors import ArgumentError, ArgumentTypeError
from ...layout.layout import Layout
from ...mesh.mesh import group_name
from ...mesh.tensor_spec import Spec
from ...tensor.tensor import DTensor, move
from ...torch_private.core import tree_leaves


def input_reshard(module: nn.Module, device_mesh: DeviceMesh, input_reshard_dim: int | None = None) -> nn.Module:
    """Makes `module` save its replicated activations sharded over the axis of `device_mesh` until the backward.

    This applies to DTensors that are replicated over the axis, and to the module's plain inputs where they are saved
    unchanged; these must be the same on all ranks of the axis. Parameters, buffers, other plain tensors, and tensors
    whose length along the dim is less than the number of ranks, are saved as usual. Sizes need not divide evenly. A
    resharded module inside `module` uses its own dim.

    In compiled graphs this has no effect: there the partitioner decides what is saved, and the option `memory_budget`
    of `backend="dtensor"` makes it gather more of the tensors again.

    Args:
        module: the module; it gets two forward hooks.
        device_mesh: a mesh of one axis, such as `mesh["tp"]`.
        input_reshard_dim: the dim along which activations are sharded; None does nothing.

    Returns:
        `module`.

    Raises:
        ValueError: the mesh has several axes.
        TypeError: `module` is not a module, or the dim is not an int.
    """
    check_module("input_reshard", module)
    device_mesh = mesh_of(device_mesh)
    if input_reshard_dim is None:
        return module
    if not isinstance(input_reshard_dim, Integral):
        raise ArgumentTypeError(
            f"input_reshard_dim is a dimension of the activations, or None; got {input_reshard_dim!r}"
        )
    if device_mesh.ndim != 1:
        raise ArgumentError(
            f"input_reshard works over a mesh of one axis, this one has {device_mesh.ndim}; write mesh['tp'] for the "
            "axis over which the activations are replicated"
        )
    resharding = _Resharding(device_mesh, input_reshard_dim)
    module.register_forward_pre_hook(resharding.enter, with_kwargs=True)
    module.register_forward_hook(resharding.leave, always_call=True)
    return module


@dataclass
class _Saved:
    """This rank's shard of a replicated tensor, with the metadata needed to gather it."""

    local: torch.Tensor
    spec: Spec
    layout: Layout
    plain: bool


class _Resharding:
    """The hooks of one module, and the saved tensor regions of its running forwards."""

    def __init__(self, mesh: DeviceMesh, dim: int) -> None:
        self.mesh, self.dim = mesh, dim
        self.running: list[saved_tensors_hooks] = []

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            return
        kept = {_memory(x) for x in (*module.parameters(), *module.buffers())}
        given = {_identity(x) for x in tree_leaves((args, kwargs)) if _is_plain(x)}
        region = saved_tensors_hooks(lambda x: self.pack(x, kept, given), unpack)
        region.__enter__()
        self.running.append(region)

    def leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not torch.compiler.is_compiling() and self.running:
            self.running.pop().__exit__()

    def pack(self, x: torch.Tensor, kept: set[int], given: set[tuple[Any, ...]]) -> Any:
        """This rank's shard of `x`, or `x` itself if it is not resharded."""
        if x.layout is not torch.strided or _memory(x) in kept:
            return x
        if isinstance(x, DTensor):
            return self._part(x, False)
        return self._part(DTensor.from_local(x.detach(), self.mesh), True) if _identity(x) in given else x

    def _part(self, x: DTensor, plain: bool) -> Any:
        spec, whole = x._spec, x if not plain else x.to_local()
        axis = self._axis(x)
        dim = self.dim + x.dim() if self.dim < 0 else self.dim
        if axis is None or not 0 <= dim < x.dim() or x.shape[dim] < self.mesh.size():
            return whole
        layout = spec.layout.moved(axis, dim)
        local = move(x, layout).to_local().detach()
        if local.untyped_storage().nbytes() > local.numel() * local.element_size():
            local = local.clone()
        return _Saved(local, spec, layout, plain)

    def _axis(self, x: DTensor) -> int | None:
        """The axis of the mesh of `x` with the process group of `self.mesh`, if `x` is replicated over it."""
        if x._spec.layout.partial or x.device_mesh.get_coordinate() is None:
            return None
        names = [group_name(x.device_mesh, axis) for axis in range(x.device_mesh.ndim)]
        own = group_name(self.mesh, 0)
        axis = names.index(own) if own in names else None
        return axis if axis is not None and x.placements[axis].is_replicate() else None


def unpack(saved: Any) -> torch.Tensor:
    """The tensor that `pack` was given, gathered if necessary."""
    if not isinstance(saved, _Saved):
        return saved
    spec = saved.spec
    whole = move(DTensor(saved.local, spec.mesh, saved.layout, spec.shape, spec.stride), spec.layout)
    return whole.to_local() if saved.plain else whole


def _is_plain(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and not isinstance(x, DTensor)


def _identity(x: torch.Tensor) -> tuple[Any, ...]:
    """A key shared by plain tensors with the same values in the same memory. A slice of a tensor has another key."""
    return _memory(x), x.storage_offset(), x.numel(), x._version


def _memory(x: torch.Tensor) -> int:
    """The address of the memory that a tensor, or the local tensor of a DTensor, is a view of."""
    local = x.to_local() if isinstance(x, DTensor) else x
    return local.untyped_storage().data_ptr() if local.layout is torch.strided else id(local)


__all__ = ["input_reshard"]
