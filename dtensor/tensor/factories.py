"""Making DTensors: `distribute_tensor` and the factories."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ..comm.from_plain import from_source, mesh_of
from ..errors import MeshError, PlacementError
from ..layout.layout import Layout
from ..layout.placements import Placement, as_placements
from ..mesh.tensor_spec import Spec, contiguous_stride
from ..rules.families.random import keep_shard
from ..rules.sampling import sample
from .declared_layouts import is_size
from .tensor import DTensor


def distribute_tensor(
    tensor: torch.Tensor,
    device_mesh: Any = None,
    placements: Sequence[Placement] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> DTensor:
    """Distribute a global tensor over a mesh.

    Args:
        tensor: the global tensor, a leaf; its values are taken from `src_data_rank`.
        device_mesh: the mesh; None takes the current one.
        placements: one per mesh axis; None replicates. Shards are cut as `torch.chunk` cuts. Of a Partial sum or
            product the first rank along the axis holds all, of another Partial each rank does.
        src_data_rank: rank along each mesh axis whose data counts, broadcast to the others; None takes each rank's own
            without communication.

    A tensor on the meta device has no values to send, and stays there.

    Returns:
        A leaf DTensor with `requires_grad` of `tensor`. An `nn.Parameter` gives an `nn.Parameter`.

    Raises:
        PlacementError: placements do not fit mesh or tensor.
        ValueError: `tensor` is sparse or no leaf, or some mesh axis has no rank `src_data_rank`.
        TypeError: `tensor` is no tensor.
        MeshError: `tensor` is a DTensor on another mesh or in other placements, or `device_mesh` is no mesh.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"distribute_tensor takes a tensor, got {type(tensor).__name__}; write torch.tensor(x)")
    mesh = mesh_of(device_mesh)
    if on_xla(mesh):
        return of_xla("xla_distribute_tensor")(tensor, mesh, placements)
    checked = as_placements(placements, mesh.ndim, tensor.dim())
    if isinstance(tensor, DTensor):
        return _already_distributed(tensor, mesh, checked)
    if not tensor.is_leaf:
        raise ValueError(
            "distribute_tensor takes a leaf tensor, but the one given was computed with gradients; "
            "write distribute_tensor(x.detach(), …), or DTensor.from_local(x, …) to keep its history"
        )
    if tensor.layout != torch.strided:
        raise ValueError(f"distribute_tensor takes a strided tensor, got layout={tensor.layout}; write x.to_dense()")
    layout = Layout.of(checked, tensor.dim())
    spec = Spec.make(mesh, layout, tensor.shape, contiguous_stride(tensor.shape), tensor.dtype)
    data = tensor.detach()
    if tensor.is_meta:
        data = data.new_empty(spec.local_shape())
    elif mesh.get_coordinate() is not None:
        data = data.to(mesh.device_type)
        data = from_source(data, mesh, src_data_rank) if src_data_rank is not None else data.contiguous().clone()
        data = _keep_part(keep_shard(data, layout, mesh), layout, mesh)
    made = DTensor(data, mesh, layout, spec.shape, spec.stride, tensor.requires_grad)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, requires_grad=tensor.requires_grad)  # pyright: ignore[reportReturnType]
    return made


_NEUTRAL = {"sum": 0, "product": 1}
"""What a rank holds that adds nothing to a reduction; the others reduce equal values to that value."""


def _keep_part(x: torch.Tensor, layout: Layout, mesh: Any) -> torch.Tensor:
    """This rank's part of a partial value: all of it on the first rank along an axis."""
    for axis, op in layout.partial:
        if op in _NEUTRAL and mesh.get_local_rank(axis) > 0:
            x = torch.full_like(x, _NEUTRAL[op])
    return x


def _already_distributed(tensor: DTensor, mesh: Any, placements: tuple[Placement, ...]) -> DTensor:
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


def on_xla(mesh: Any) -> bool:
    """Whether a mesh is of XLA devices, for which torch_xla does the sharding."""
    return getattr(mesh, "device_type", None) == "xla"


def of_xla(name: str) -> Callable[..., Any]:
    """The function of torch_xla that shards what lies on a mesh of its devices."""
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
    device_mesh: Any,
    placements: Sequence[Placement] | None,
) -> DTensor:
    """A DTensor of a constant: each rank fills its own shard only."""
    spec = _spec(size, dtype, layout, device_mesh, placements)
    local = fill(spec.local_shape(), dtype=spec.dtype, device=spec.mesh.device_type)
    return DTensor(local, spec.mesh, spec.layout, spec.shape, spec.stride, requires_grad)


def _spec(
    size: Any, dtype: torch.dtype | None, layout: Any, device_mesh: Any, placements: Sequence[Placement] | None
) -> Spec:
    if layout != torch.strided:
        raise ValueError(f"DTensor factories make torch.strided tensors, got layout={layout}")
    shape = tuple(size[0]) if len(size) == 1 and isinstance(size[0], (tuple, list)) else tuple(size)
    if not all(map(is_size, shape)):
        raise ValueError(f"a factory takes the global size, ints of at least 0; got {shape}")
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
    device_mesh: Any = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """Zeros of global shape `size`; each rank makes its shard only."""
    return _make(torch.zeros, size, dtype, layout, requires_grad, device_mesh, placements)


def ones(
    *size: Any,
    dtype: torch.dtype | None = None,
    layout: Any = torch.strided,
    requires_grad: bool = False,
    device_mesh: Any = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """Ones of global shape `size`; each rank makes its shard only."""
    return _make(torch.ones, size, dtype, layout, requires_grad, device_mesh, placements)


def empty(
    *size: Any,
    dtype: torch.dtype | None = None,
    layout: Any = torch.strided,
    requires_grad: bool = False,
    device_mesh: Any = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """Uninitialised, of global shape `size`; each rank makes its shard only."""
    return _make(torch.empty, size, dtype, layout, requires_grad, device_mesh, placements)


def full(
    size: Any,
    fill_value: Any,
    *,
    dtype: torch.dtype | None = None,
    layout: Any = torch.strided,
    requires_grad: bool = False,
    device_mesh: Any = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """`fill_value` everywhere, of global shape `size`; each rank makes its shard only."""
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
    device_mesh: Any = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """`steps` evenly spaced numbers, as `torch.linspace`; each rank makes all, and keeps its shard.

    `start` and `end` are numbers or tensors of no dimension, DTensors too.
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
    device_mesh: Any = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """`steps` powers of `base`, from `base ** start` to `base ** end`, as `torch.logspace`; otherwise as `linspace`."""
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
    device_mesh: Any,
    placements: Sequence[Placement] | None,
) -> DTensor:
    """The shard of a row of numbers that every rank makes whole."""
    spec = _spec((length,), dtype, layout, device_mesh, placements)
    local = keep_shard(make(dtype=dtype, device=spec.mesh.device_type), spec.layout, spec.mesh)
    return DTensor(local, spec.mesh, spec.layout, spec.shape, spec.stride, requires_grad)


def rand(
    *size: Any,
    dtype: torch.dtype | None = None,
    layout: Any = torch.strided,
    requires_grad: bool = False,
    device_mesh: Any = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """Uniform in [0, 1), of global shape `size`: what `torch.rand(size)` gives on one device with the same seed."""
    spec = _spec(size, dtype, layout, device_mesh, placements)
    return DTensor(sample(torch.rand, spec), spec.mesh, spec.layout, spec.shape, spec.stride, requires_grad)


def randn(
    *size: Any,
    dtype: torch.dtype | None = None,
    layout: Any = torch.strided,
    requires_grad: bool = False,
    device_mesh: Any = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """Standard normal, of global shape `size`: what `torch.randn(size)` gives on one device with the same seed."""
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
