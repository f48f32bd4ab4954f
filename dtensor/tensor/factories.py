"""Functions that create DTensors: `distribute_tensor`, and factories such as `zeros` and `randn`."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..comm.from_plain import from_source, mesh_of
from ..errors import ArgumentError, ArgumentTypeError, MeshError, PlacementError, shown
from ..layout.chunks import note_place
from ..layout.layout import Layout
from ..layout.placements import Placement, as_placements, parsed, words
from ..mesh.operator_library import library
from ..mesh.tensor_spec import Spec, contiguous_stride
from ..rules.families.random import keep_shard
from ..rules.sampling import sample
from ..torch_private.core import disable_dynamo
from .declared_layouts import is_size
from .deferred import Deferred, own_box, read
from .tensor import DTensor
from .torch_dtensor import from_torch, is_torch_dtensor


def distribute_tensor(
    tensor: torch.Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> DTensor:
    """Distributes a global tensor over a mesh.

    A tensor on the meta device stays there, and nothing is communicated; of one that is yet to be read from a file
    (`dtensor.safetensors.state_dict`) each rank reads its part. A DTensor that already has this mesh and these
    placements is returned as it is.

    Args:
        tensor: the global tensor; it must be a leaf. Its values are taken from `src_data_rank`. A DTensor of torch is
            converted.
        device_mesh: the mesh; None uses the current one.
        placements: one per mesh axis; None replicates. Shards are split as by `torch.chunk`. For Partial("sum") and
            Partial("product") the first rank along the axis holds the full value and the others hold 0 or 1. For other
            reductions every rank holds the full value.
        src_data_rank: the rank along each mesh axis whose values are broadcast to the others. None uses each rank's own
            values, without communication.

    Returns:
        A leaf DTensor with the `requires_grad` of `tensor`; an `nn.Parameter` if `tensor` is one.

    Raises:
        PlacementError: placements do not fit mesh or tensor, or `tensor` is a DTensor in other placements.
        ValueError: `tensor` is sparse or not a leaf, or some mesh axis has no rank `src_data_rank`.
        TypeError: `tensor` is not a tensor.
        MeshError: `tensor` is a DTensor on another mesh, or `device_mesh` is not a mesh.
        ImportError: the mesh is of XLA devices and torch_xla is not installed.
    """
    if not isinstance(tensor, torch.Tensor):
        fix = "distribute_model(module, mesh, ...)" if isinstance(tensor, nn.Module) else "torch.tensor(x)"
        raise ArgumentTypeError(f"distribute_tensor takes a tensor, got {type(tensor).__name__}; write {fix}")
    mesh = mesh_of(device_mesh)
    if on_xla(mesh):
        return of_xla("xla_distribute_tensor")(tensor, mesh, placements)
    checked = as_placements(placements, mesh.ndim, tensor.dim())
    if isinstance(tensor, DTensor):
        return _already_distributed(tensor, mesh, checked)
    if torch.compiler.is_dynamo_compiling():
        if tensor.requires_grad or isinstance(tensor, nn.Parameter):  # no graph makes a leaf that requires a gradient
            return _outside_of_graphs(tensor, mesh, placements, src_data_rank)
        return torch.ops.dtensor.distribute(tensor, mesh, words(checked), src_data_rank)
    if not tensor.is_leaf:
        raise ArgumentError(
            "distribute_tensor takes a leaf tensor, but the one given was computed with gradients; "
            "write distribute_tensor(x.detach(), …), or DTensor.from_local(x, …) to keep its history"
        )
    if tensor.layout != torch.strided:
        raise ArgumentError(f"distribute_tensor takes a strided tensor, got layout={tensor.layout}; write x.to_dense()")
    if is_torch_dtensor(tensor):
        made = _already_distributed(from_torch(tensor.detach()), mesh, checked)
        made.requires_grad_(tensor.requires_grad)
    else:
        made = _distributed(tensor, mesh, Layout.of(checked, tensor.dim()), src_data_rank)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, requires_grad=tensor.requires_grad)  # pyright: ignore[reportReturnType]
    return made


def _distributed(tensor: torch.Tensor, mesh: DeviceMesh, layout: Layout, src_data_rank: int | None) -> DTensor:
    spec = Spec.make(mesh, layout, tensor.shape, contiguous_stride(tensor.shape), tensor.dtype)
    data = tensor.detach()
    if isinstance(tensor, Deferred):
        if mesh.get_coordinate() is not None:
            data = read(data, None if layout.partial else own_box(spec)).to(mesh.device_type).contiguous()
            data = keep_shard(data, layout, mesh) if layout.partial else data
            data = _keep_part(data, layout, mesh)
    elif tensor.is_meta:
        data = data.new_empty(spec.local_shape())
    elif mesh.get_coordinate() is not None:
        data = data.to(mesh.device_type)
        data = from_source(data, mesh, src_data_rank) if src_data_rank is not None else data.contiguous().clone()
        data = _keep_part(keep_shard(data, layout, mesh), layout, mesh)
    return DTensor(data, mesh, layout, spec.shape, spec.stride, tensor.requires_grad)


# The operator that Dynamo records for `distribute_tensor`.
library.define(
    "distribute(Tensor x, torch.distributed.device_mesh.DeviceMesh mesh, str placements, int? src) -> Tensor"
)


def _distribute_operator(x: Any, mesh: DeviceMesh, text: str, src: int | None) -> DTensor:
    """`dtensor::distribute`, decomposed at once for any tensor and any mode."""
    return _distributed(x, mesh, Layout.of(parsed(text), x.dim()), src)


library.impl("distribute", _distribute_operator, "CompositeImplicitAutograd")


@disable_dynamo
def _outside_of_graphs(*arguments: Any) -> DTensor:
    """`distribute_tensor` between two graphs."""
    return distribute_tensor(*arguments[:-1], src_data_rank=arguments[-1])


_NEUTRAL = {"sum": 0, "product": 1}
"""Reduction -> its neutral element. The other reductions need none, as they reduce equal values to the same value."""


def _keep_part(x: torch.Tensor, layout: Layout, mesh: DeviceMesh) -> torch.Tensor:
    """This rank's part of a partial value: the first rank along an axis holds the value, the others a neutral one."""
    if layout.partial:
        note_place()
    for axis, op in layout.partial:
        if op in _NEUTRAL and mesh.get_local_rank(axis) > 0:
            x = torch.full_like(x, _NEUTRAL[op])
    return x


def _already_distributed(tensor: DTensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> DTensor:
    if tensor.device_mesh != mesh:
        raise MeshError(
            f"the tensor already lives on {tensor.device_mesh}, not on {mesh}; write x.redistribute(mesh, placements)"
        )
    if tensor.placements != placements:
        raise PlacementError(
            f"the tensor is already distributed as {list(tensor.placements)}; "
            f"write x.redistribute(placements={list(placements)})"
        )
    return tensor


def on_xla(mesh: DeviceMesh) -> bool:
    """Whether a mesh consists of XLA devices. On these torch_xla does the sharding."""
    return getattr(mesh, "device_type", None) == "xla"


def of_xla(name: str) -> Callable[..., Any]:
    """The function `name` of torch_xla, which shards tensors or modules over a mesh of XLA devices.

    Raises:
        ImportError: torch_xla is not installed.
    """
    try:
        from torch_xla.distributed import spmd  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError("a mesh of device type 'xla' needs torch_xla; write: pip install torch_xla") from error
    return getattr(spmd, name)


def _make(
    fill: Callable[..., torch.Tensor],
    size: Any,
    dtype: torch.dtype | None,
    layout: Any,
    requires_grad: bool,
    device_mesh: DeviceMesh | None,
    placements: Sequence[Placement] | None,
) -> DTensor:
    """A DTensor filled with a constant. Each rank fills only its own shard."""
    spec = _spec(size, dtype, layout, device_mesh, placements)
    local = fill(spec.local_shape(), dtype=spec.dtype, device=spec.mesh.device_type)
    return DTensor(local, spec.mesh, spec.layout, spec.shape, spec.stride, requires_grad)


def _spec(
    size: Any,
    dtype: torch.dtype | None,
    layout: Any,
    device_mesh: DeviceMesh | None,
    placements: Sequence[Placement] | None,
) -> Spec:
    if layout != torch.strided:
        raise ArgumentError(f"DTensor factories make torch.strided tensors, got layout={layout}")
    shape = tuple(size[0]) if len(size) == 1 and isinstance(size[0], (tuple, list)) else tuple(size)
    if not all(map(is_size, shape)):
        raise ArgumentError(
            f"a factory takes the global size, ints of at least 0; got {shown(shape)}; mesh and placements are "
            f"given by name: "
            "write zeros(4, 4, device_mesh=mesh, placements=[Shard(0)])"
        )
    mesh = mesh_of(device_mesh)
    checked = as_placements(placements, mesh.ndim, len(shape))
    if any(p.is_partial() for p in checked):
        raise PlacementError(f"a factory takes Shard(dim) or Replicate(), got {list(checked)}")
    dtype = dtype if dtype is not None else torch.get_default_dtype()
    return Spec.make(mesh, Layout.of(checked, len(shape)), shape, contiguous_stride(shape), dtype)


def zeros(
    *size: Any,
    dtype: torch.dtype | None = None,
    layout: Any = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """A DTensor of zeros. Each rank creates only its own shard.

    Args:
        *size: the global shape, as ints or one sequence of ints.
        dtype: the dtype; None uses torch's default dtype.
        layout: must be `torch.strided`.
        requires_grad: whether autograd records operations on the result.
        device_mesh: the mesh; None uses the current one.
        placements: one Shard or Replicate per mesh axis; None replicates.

    Raises:
        PlacementError: placements do not fit mesh or shape, or one is Partial.
        ValueError: `layout` is not `torch.strided`, or a length is not an int of at least 0.
        MeshError: there is no mesh.
    """
    return _make(torch.zeros, size, dtype, layout, requires_grad, device_mesh, placements)


def ones(
    *size: Any,
    dtype: torch.dtype | None = None,
    layout: Any = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """A DTensor of ones. Each rank creates only its own shard. Arguments and errors are those of `zeros`."""
    return _make(torch.ones, size, dtype, layout, requires_grad, device_mesh, placements)


def empty(
    *size: Any,
    dtype: torch.dtype | None = None,
    layout: Any = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """An uninitialised DTensor. Each rank allocates only its own shard. Arguments and errors are those of `zeros`."""
    return _make(torch.empty, size, dtype, layout, requires_grad, device_mesh, placements)


def full(
    size: Any,
    fill_value: Any,
    *,
    dtype: torch.dtype | None = None,
    layout: Any = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """A DTensor filled with `fill_value`. Each rank creates only its own shard.

    Args:
        size: the global shape, a sequence of ints.
        fill_value: the number to fill with.
        dtype: the dtype; None infers it from `fill_value`.

    Other arguments and errors are those of `zeros`.
    """
    dtype = dtype if dtype is not None else torch.tensor(fill_value).dtype

    def fill(shape: Any, *, dtype: torch.dtype | None, device: Any) -> Any:
        return torch.full(shape, fill_value, dtype=dtype, device=device)

    return _make(fill, (tuple(size),), dtype, layout, requires_grad, device_mesh, placements)


def linspace(
    start: Any,
    end: Any,
    steps: Any,
    *,
    dtype: torch.dtype | None = None,
    layout: Any = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """`steps` evenly spaced numbers, as `torch.linspace`. Each rank computes all of them and keeps its shard.

    Args:
        start: the first value, a number or a zero-dimensional tensor or DTensor.
        end: the last value, likewise.
        steps: the number of values, which is the global length of the result.

    Other arguments and errors are those of `zeros`.
    """
    make = partial(torch.linspace, _whole(start), _whole(end), steps)
    return _cut(make, steps, dtype, layout, requires_grad, device_mesh, placements)


def logspace(
    start: Any,
    end: Any,
    steps: Any,
    base: int = 10,
    *,
    dtype: torch.dtype | None = None,
    layout: Any = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """`steps` powers of `base`, from `base ** start` to `base ** end`, as `torch.logspace`.

    Arguments and errors are otherwise those of `linspace`.
    """
    make = partial(torch.logspace, _whole(start), _whole(end), steps, base)
    return _cut(make, steps, dtype, layout, requires_grad, device_mesh, placements)


def _whole(x: Any) -> Any:
    return x.full_tensor() if isinstance(x, DTensor) else x


def _cut(
    make: Callable[..., torch.Tensor],
    length: Any,
    dtype: torch.dtype | None,
    layout: Any,
    requires_grad: bool,
    device_mesh: DeviceMesh | None,
    placements: Sequence[Placement] | None,
) -> DTensor:
    """This rank's shard of a vector of `length` numbers that every rank computes in full."""
    spec = _spec((length,), dtype, layout, device_mesh, placements)
    local = keep_shard(make(dtype=dtype, device=spec.mesh.device_type), spec.layout, spec.mesh)
    return DTensor(local, spec.mesh, spec.layout, spec.shape, spec.stride, requires_grad)


def rand(
    *size: Any,
    dtype: torch.dtype | None = None,
    layout: Any = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """Uniform random numbers in [0, 1), the same as `torch.rand(size)` on one device with the same seed.

    All ranks need the same random state (see `dtensor.random`). Arguments and errors are those of `zeros`.
    """
    spec = _spec(size, dtype, layout, device_mesh, placements)
    return DTensor(sample(torch.rand, spec), spec.mesh, spec.layout, spec.shape, spec.stride, requires_grad)


def randn(
    *size: Any,
    dtype: torch.dtype | None = None,
    layout: Any = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """Standard normal random numbers, the same as `torch.randn(size)` on one device with the same seed.

    All ranks need the same random state (see `dtensor.random`). Arguments and errors are those of `zeros`.
    """
    spec = _spec(size, dtype, layout, device_mesh, placements)
    return DTensor(sample(torch.randn, spec), spec.mesh, spec.layout, spec.shape, spec.stride, requires_grad)


__all__ = [
    "distribute_tensor",
    "empty",
    "full",
    "linspace",
    "logspace",
    "of_xla",
    "on_xla",
    "ones",
    "rand",
    "randn",
    "zeros",
]
