"""Support for FullyShardedDataParallel (FSDP1) on parameters that styles have sharded over one axis of a mesh.

FSDP1 flattens these parameters and shards them over the data axes. It copies the local tensor of a parameter into its
flat parameter and returns it as a view of the gathered flat parameter. `DTensorExtensions` wraps that view as a
DTensor, through which gradients flow. In sharded state dicts a parameter is one DTensor on the mesh of all axes, with
the data axis as the innermost split, because FSDP1 shards the result of the other axes.

For models that do not use FSDP1 yet, `fully_shard` does the same without flat parameters, and can be compiled.
"""

from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ...errors import ArgumentError, ArgumentTypeError
from ...job.groups import canonical
from ...layout.layout import Layout
from ...mesh.mesh import group_name
from ...mesh.tensor_spec import Spec
from ...tensor.tensor import DTensor, move
from ...tensor.torch_dtensor import from_torch, is_torch_dtensor
from ...torch_private.core import disable_dynamo
from ...torch_private.fsdp import extend_fsdp1, mark_flattened
from .sharding import planned, sharded


def enable_fsdp1() -> None:
    """Makes FullyShardedDataParallel accept parameters that are DTensors.

    Call this before creating the wrapper, and pass the wrapper a slice of a mesh that also has the axes of the styles.
    Sharded and full state dicts of model and optimizer then contain DTensors: sharded ones over all axes, full ones
    over the axes of the styles. Torch's own DTensors are handled as before. In sharded state dicts, plain parameters
    become DTensors of this package.

    >>> mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    >>> parallelize_module(model, mesh["tp"], plan)
    >>> enable_fsdp1()
    >>> model = FullyShardedDataParallel(model, device_mesh=mesh["dp"], use_orig_params=True)
    """
    extend_fsdp1(DTensorExtensions, gathered, local)


class DTensorExtensions:
    """Torch's `FSDPExtensions` protocol for DTensors, through which FSDP1 handles them. One per FSDP1 wrapper.

    Args:
        others: the extensions for torch's own DTensors.
        data_mesh: the mesh over which FSDP1 shards: of one axis, or (replicate, shard).
        kept: whether FSDP1 shards nothing and keeps the user's parameters, which then cannot be views of a flat one.
    """

    def __init__(self, others: Any, data_mesh: DeviceMesh, kept: bool = False) -> None:
        self.others = others
        self.data_mesh = data_mesh
        self.kept = kept
        self._flattened: WeakValueDictionary[int, DTensor] = WeakValueDictionary()

    @staticmethod
    def owns(tensor: Any) -> bool:
        """Whether these extensions handle `tensor`, rather than those for torch's own DTensors."""
        return not is_torch_dtensor(tensor)

    @property
    def compute_stream(self) -> Any:
        """The stream on which gathered parameters are used; FSDP1 sets it."""
        return self.others.compute_stream

    @compute_stream.setter
    def compute_stream(self, stream: Any) -> None:
        self.others.compute_stream = stream

    def pre_flatten_transform(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The local tensor of a parameter, and its spec, from which the DTensor can be restored.

        Plain parameters and torch's DTensors are passed on to the other extensions.

        Raises:
            ValueError: two modules share the parameter, it is partial, or FSDP1 shards nothing and keeps parameters.
        """
        if not isinstance(tensor, DTensor):
            return self.others.pre_flatten_transform(tensor)
        if self.kept:
            raise ArgumentError(
                "FullyShardedDataParallel with NO_SHARD (which it also takes on an axis of one rank) and "
                "use_orig_params keeps the parameters, which then cannot be DTensors; write use_orig_params=False, or "
                "another strategy"
            )
        if self._flattened.get(id(tensor)) is tensor:
            raise ArgumentError(
                f"a parameter of shape {list(tensor.shape)} is shared by two modules of one FullyShardedDataParallel, "
                "which supports shared parameters only if they are plain tensors; leave both modules out of the plan, "
                "or write dtensor.parallel.fully_shard instead"
            )
        if tensor._spec.layout.partial:
            raise ArgumentError(
                f"a parameter of shape {list(tensor.shape)} is {list(tensor.placements)}, which "
                "FullyShardedDataParallel cannot flatten; redistribute it to Shard or Replicate first"
            )
        self._flattened[id(tensor)] = tensor
        return tensor.to_local().detach().requires_grad_(tensor.requires_grad), tensor._spec

    @disable_dynamo
    def post_unflatten_transform(self, tensor: torch.Tensor, param_extension: Any) -> torch.Tensor:
        """The DTensor whose local tensor on this rank is `tensor`; differentiable.

        Raises:
            ValueError: `tensor` does not have the shape of this rank's shard.
        """
        if not isinstance(param_extension, Spec):
            return self.others.post_unflatten_transform(tensor, param_extension)
        spec = param_extension
        if tuple(tensor.shape) != spec.local_shape():
            raise ArgumentError(
                f"a parameter of shape {list(spec.shape)}, placed as {list(spec.layout.placements)}, has a part of "
                f"shape {list(spec.local_shape())} on this rank; got one of shape {list(tensor.shape)}: the state dict "
                "was saved under another plan, load it with dtensor.Checkpoints or torch.distributed.checkpoint"
            )
        handle = self.others.device_handle
        with handle.stream(self.compute_stream or handle.current_stream()):
            whole = _Unflattened.apply(tensor, spec)
        mark_flattened(whole)
        return whole

    def chunk_tensor(
        self, tensor: torch.Tensor, rank: int, world_size: int, num_devices_per_node: int, pg: Any, device: Any = None
    ) -> torch.Tensor:
        """As `chunk_dtensor`, but a plain tensor becomes a ShardedTensor, as in FSDP1 without a mesh."""
        if isinstance(tensor, DTensor):
            return self.chunk_dtensor(tensor, rank, self.data_mesh)
        return self.others.chunk_tensor(tensor, rank, world_size, num_devices_per_node, pg)

    def chunk_dtensor(self, tensor: torch.Tensor, rank: int, device_mesh: DeviceMesh) -> torch.Tensor:
        """`tensor`, which is replicated over the data axes, as a DTensor sharded on dim 0 over the last of them.

        A DTensor keeps its other axes. A plain tensor is placed on the data axes only.
        """
        if is_torch_dtensor(tensor):
            return self.others.chunk_dtensor(tensor, rank, device_mesh)
        value = nn.Parameter(tensor.detach().clone(), requires_grad=False)
        made = sharded(value, planned(value, device_mesh, 0 if tensor.dim() else None), None)
        return made.detach()

    def pre_load_state_dict_transform(self, tensor: torch.Tensor) -> tuple[torch.Tensor, list[Any]]:
        """A meta tensor with the size of this rank's flattened part of a parameter, and the shards of it held here."""
        if not isinstance(tensor, DTensor):
            return self.others.pre_load_state_dict_transform(tensor)
        whole = _without(tensor._spec.layout, self._data_axes(tensor))
        size = tensor._spec.with_layout(whole).local_shape()
        return torch.empty(size, dtype=tensor.dtype, device="meta"), [_Shard(tensor.to_local())]

    def all_gather_dtensor(self, tensor: torch.Tensor, parent_mesh: DeviceMesh) -> torch.Tensor:
        """The local tensor of a state dict's DTensor after gathering it over the data axes.

        Raises:
            TypeError: `tensor` is not a DTensor.
        """
        if is_torch_dtensor(tensor):
            tensor = from_torch(tensor)
        if not isinstance(tensor, DTensor):
            raise ArgumentTypeError(
                f"a sharded state dict holds DTensors, not {type(tensor).__name__}; load what was saved under "
                "StateDictType.SHARDED_STATE_DICT, or distribute_tensor(x, mesh, placements)"
            )
        return move(tensor, _without(tensor._spec.layout, self._data_axes(tensor))).to_local().detach()

    def _data_axes(self, tensor: DTensor) -> tuple[int, ...]:
        names = tensor.device_mesh.mesh_dim_names or ()
        return tuple([names.index(name) for name in self.data_mesh.mesh_dim_names or () if name in names])


class _Shard:
    """One shard, with the attribute that torch reads from shards of a ShardedTensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class _Unflattened(torch.autograd.Function):
    """Local tensor to DTensor. The gradient is the local tensor of the DTensor's gradient in the parameter's layout."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, spec: Spec) -> DTensor:
        ctx.set_materialize_grads(False)
        ctx.layout = spec.layout
        return DTensor(local.view_as(local), spec.mesh, spec.layout, spec.shape, spec.stride)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        if grad is None:
            return None, None
        return torch.ops.dtensor.redistribute(grad, ctx.layout.text, False).to_local(), None


def _without(layout: Layout, axes: tuple[int, ...]) -> Layout:
    for axis in axes:
        layout = layout.moved(axis)
    return layout


def gathered(x: Any, group: Any) -> Any:
    """A DTensor of an optimizer's state dict as the plain tensor that FSDP1 flattens. Other values are unchanged.

    Args:
        x: a value of the state dict.
        group: the process group over which FSDP1 shards.
    """
    if not isinstance(x, DTensor):
        return x
    mesh = x.device_mesh
    axes = [axis for axis in range(mesh.ndim) if group_name(mesh, axis) == canonical(group.group_name)]
    return move(x, _without(x._spec.layout, tuple(axes))).to_local().detach()


def local(x: torch.Tensor) -> torch.Tensor:
    """The local tensor of a DTensor, detached, in the same memory. Other tensors are unchanged."""
    return x.to_local().detach() if isinstance(x, DTensor) else x


__all__ = ["DTensorExtensions", "enable_fsdp1"]
