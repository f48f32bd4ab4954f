"""The bridge to FullyShardedDataParallel (FSDP1): parameters that styles have sharded over one axis of a mesh, and that
FSDP1 flattens and shards over the data axes.

FSDP1 copies this rank's part of a parameter into its flat parameter and gives it back as a view of what it gathered;
`DTensorExtensions` makes a DTensor of that view, through which gradients flow. In sharded state dicts a parameter is
one DTensor on the mesh of all axes, which the data axis cuts last: FSDP1 cuts what the other axes have left.

For models not yet written for FSDP1, `fully_shard` does the same without flat parameters, and can be compiled.
"""

from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn

from ...layout.layout import Layout
from ...mesh.mesh import group_name
from ...mesh.tensor_spec import Spec
from ...tensor.tensor import DTensor, move
from ...tensor.torch_dtensor import from_torch, is_torch_dtensor
from ...torch_private.core import disable_dynamo
from ...torch_private.fsdp import extend_fsdp1, mark_flattened
from .sharding import planned, sharded


def enable_fsdp1() -> None:
    """Have FullyShardedDataParallel take parameters that are DTensors.

    Call it before the wrapper is made, with a slice of a mesh that holds the axes of the styles too. Sharded and full
    state dicts of model and optimizer then hold DTensors: sharded ones over all axes, full ones over those of the
    styles. Torch's own DTensors go their way as before; plain parameters are in sharded state dicts as ours.

    >>> mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    >>> parallelize_module(model, mesh["tp"], plan)
    >>> enable_fsdp1()
    >>> model = FullyShardedDataParallel(model, device_mesh=mesh["dp"], use_orig_params=True)
    """
    extend_fsdp1(DTensorExtensions, gathered, local)


class DTensorExtensions:
    """What FSDP1 asks about DTensors, by torch's protocol `FSDPExtensions`; one for each of its wrappers.

    Args:
        others: the extensions for torch's own DTensors.
        data_mesh: the mesh over which FSDP1 shards: of one axis, or (replicate, shard).
        kept: whether FSDP1 shards nothing and keeps the user's parameters, which can be no views of a flat one then.
    """

    def __init__(self, others: Any, data_mesh: Any, kept: bool = False) -> None:
        self.others = others
        self.data_mesh = data_mesh
        self.kept = kept
        self._flattened: WeakValueDictionary[int, DTensor] = WeakValueDictionary()

    @staticmethod
    def owns(tensor: Any) -> bool:
        """Whether these extensions answer for `tensor`, rather than the others."""
        return not is_torch_dtensor(tensor)

    @property
    def compute_stream(self) -> Any:
        """The stream on which what was gathered is used; FSDP1 sets it."""
        return self.others.compute_stream

    @compute_stream.setter
    def compute_stream(self, stream: Any) -> None:
        self.others.compute_stream = stream

    def pre_flatten_transform(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """This rank's part of a parameter, and what it takes to put it together again (None for a plain parameter).

        Raises:
            ValueError: two modules share the parameter, it is a part of a sum, or FSDP1 is to shard nothing.
        """
        if not isinstance(tensor, DTensor):
            return self.others.pre_flatten_transform(tensor)
        if self.kept:
            raise ValueError(
                "FullyShardedDataParallel with NO_SHARD (which it also takes on an axis of one rank) and "
                "use_orig_params keeps parameters that cannot be DTensors; write use_orig_params=False, or another "
                "strategy"
            )
        if self._flattened.get(id(tensor)) is tensor:
            raise ValueError(
                f"a parameter of shape {list(tensor.shape)} is shared by two modules of one FullyShardedDataParallel, "
                "which knows shared parameters only where they are plain tensors; leave both modules out of the plan, "
                "or write dtensor.parallel.fully_shard instead"
            )
        if tensor._spec.layout.partial:
            raise ValueError(
                f"a parameter of shape {list(tensor.shape)} is {list(tensor.placements)}, which "
                "FullyShardedDataParallel cannot flatten; redistribute it to Shard or Replicate first"
            )
        self._flattened[id(tensor)] = tensor
        return tensor.to_local().detach().requires_grad_(tensor.requires_grad), tensor._spec

    @disable_dynamo
    def post_unflatten_transform(self, tensor: torch.Tensor, param_extension: Any) -> torch.Tensor:
        """The DTensor whose part on this rank is `tensor`; differentiable.

        Raises:
            ValueError: `tensor` is no such part.
        """
        if not isinstance(param_extension, Spec):
            return self.others.post_unflatten_transform(tensor, param_extension)
        spec = param_extension
        if tuple(tensor.shape) != spec.local_shape():
            raise ValueError(
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
        """As `chunk_dtensor`; a plain tensor becomes a ShardedTensor, as without a mesh."""
        if isinstance(tensor, DTensor):
            return self.chunk_dtensor(tensor, rank, self.data_mesh)
        return self.others.chunk_tensor(tensor, rank, world_size, num_devices_per_node, pg)

    def chunk_dtensor(self, tensor: torch.Tensor, rank: int, device_mesh: Any) -> torch.Tensor:
        """`tensor`, whole over the data axes, as a DTensor that the last of them cuts on dimension 0.

        A DTensor keeps its other axes; of a plain tensor only the data axes are known.
        """
        if is_torch_dtensor(tensor):
            return self.others.chunk_dtensor(tensor, rank, device_mesh)
        value = nn.Parameter(tensor.detach().clone(), requires_grad=False)
        made = sharded(value, planned(value, device_mesh, 0 if tensor.dim() else None), None)
        return made.detach()

    def pre_load_state_dict_transform(self, tensor: torch.Tensor) -> tuple[torch.Tensor, list[Any]]:
        """A tensor of the size of this rank's part of a parameter, and of that the shards that this rank holds."""
        if not isinstance(tensor, DTensor):
            return self.others.pre_load_state_dict_transform(tensor)
        whole = _without(tensor._spec.layout, self._data_axes(tensor))
        size = tensor._spec.with_layout(whole).local_shape()
        return torch.empty(size, dtype=tensor.dtype, device="meta"), [_Shard(tensor.to_local())]

    def all_gather_dtensor(self, tensor: torch.Tensor, parent_mesh: Any) -> torch.Tensor:
        """This rank's part of a parameter: `tensor`, of a state dict, gathered over the data axes.

        Raises:
            TypeError: `tensor` is no DTensor.
        """
        if is_torch_dtensor(tensor):
            tensor = from_torch(tensor)
        if not isinstance(tensor, DTensor):
            raise TypeError(
                f"a sharded state dict holds DTensors, not {type(tensor).__name__}; load what was saved under "
                "StateDictType.SHARDED_STATE_DICT, or distribute_tensor(x, mesh, placements)"
            )
        return move(tensor, _without(tensor._spec.layout, self._data_axes(tensor))).to_local().detach()

    def _data_axes(self, tensor: DTensor) -> tuple[int, ...]:
        names = tensor.device_mesh.mesh_dim_names or ()
        return tuple([names.index(name) for name in self.data_mesh.mesh_dim_names if name in names])


class _Shard:
    """One shard, as torch's ShardedTensor holds it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class _Unflattened(torch.autograd.Function):
    """A part of a parameter as the DTensor it is a part of; the gradient is this rank's part of the whole one."""

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
    """A DTensor of an optimizer's state dict as the plain tensor that FSDP1 flattens; anything else as it is.

    Args:
        x: a value of the state dict.
        group: the process group over which FSDP1 shards.
    """
    if not isinstance(x, DTensor):
        return x
    mesh = x.device_mesh
    axes = [axis for axis in range(mesh.ndim) if group_name(mesh, axis) == group.group_name]
    return move(x, _without(x._spec.layout, tuple(axes))).to_local().detach()


def local(x: torch.Tensor) -> torch.Tensor:
    """The plain tensor in whose memory this rank's part of a DTensor lies; another tensor as it is."""
    return x.to_local().detach() if isinstance(x, DTensor) else x


__all__ = ["DTensorExtensions", "enable_fsdp1"]
