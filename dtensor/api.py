"""Making DTensors: `distribute_tensor`, `distribute_module` and the factories."""

import inspect
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from .boundary import check_module, from_source, mesh_of
from .declared import is_size
from .errors import MeshError, PlacementError
from .layout import Layout
from .placements import Placement, Replicate, as_placements
from .rules.random import keep_shard
from .sampling import sample
from .spec import Spec, contiguous_stride
from .tensor import DTensor
from .ties import DISTRIBUTED_AS, Ties, shared_otherwise
from .wrapping import Give, Take, wrap_forward


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
    if _on_xla(mesh):
        return _of_xla("xla_distribute_tensor")(tensor, mesh, placements)
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


def _on_xla(mesh: Any) -> bool:
    return getattr(mesh, "device_type", None) == "xla"


def _of_xla(name: str) -> Callable[..., Any]:
    """The function of torch_xla that shards what lies on a mesh of its devices."""
    try:
        from torch_xla.distributed import spmd  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError("a mesh of device type 'xla' needs torch_xla; write: pip install torch_xla") from error
    return getattr(spmd, name)


DISTRIBUTED = "_distributed_module"
"""The attribute of a module that was distributed as a whole, by whatever name."""


def distribute_parameter(
    parameter: nn.Parameter, mesh: Any, placements: Sequence[Placement], *, src_data_rank: int | None = 0
) -> nn.Parameter:
    """A parameter distributed for a module: the same one for all modules that share it, so that tied weights stay tied.

    Raises:
        PlacementError: another module that shares it has it on another mesh, or in other placements.
    """
    before = vars(parameter).get(DISTRIBUTED_AS)
    if before is None:
        value = distribute_tensor(parameter, mesh, placements, src_data_rank=src_data_rank)
        made = nn.Parameter(value, requires_grad=parameter.requires_grad) if value is not parameter else parameter
        vars(parameter)[DISTRIBUTED_AS] = made
        return made
    if before.device_mesh != mesh or before.placements != as_placements(placements, mesh.ndim, parameter.dim()):
        raise shared_otherwise(parameter, before, placements, mesh)
    return before


PartitionFn = Callable[[str, nn.Module, Any], None]


def distribute_module(
    module: nn.Module,
    device_mesh: Any = None,
    partition_fn: PartitionFn | None = None,
    input_fn: Callable[..., Any] | None = None,
    output_fn: Callable[..., Any] | None = None,
) -> nn.Module:
    """Distribute a module's parameters and buffers in place, and convert what goes in and out.

    Args:
        module: the module; its plain parameters and buffers become DTensors.
        device_mesh: the mesh; None takes the current one.
        partition_fn: called with (name, submodule, device_mesh) for every submodule, to distribute its parameters;
            what it leaves plain is replicated. A parameter that modules share stays one: what takes its place in one
            of them takes it in all.
        input_fn: called with (module, inputs, device_mesh) before the forward; returns the inputs, or None for those
            it was given.
        output_fn: called with (module, outputs, device_mesh) after it; returns the outputs, or None likewise.

    Raises:
        TypeError: `module` is none, or a hook no function, or takes a wrong number of arguments.
        PlacementError: `partition_fn` gave a parameter that modules share different placements in them; the module is
            of no use then.
        RuntimeError: the module was distributed before.
        ImportError: the mesh is of device type "xla", and torch_xla, whose function shards the module then, is not
            installed.
    """
    check_module("distribute_module", module)
    mesh = mesh_of(device_mesh)
    if getattr(module, DISTRIBUTED, False):
        raise RuntimeError("distribute_module was already called on this module; call it once, on the plain module")
    if _on_xla(mesh):
        return _of_xla("xla_distribute_module")(module, mesh, partition_fn, input_fn, output_fn)
    take = None if input_fn is None else _take(input_fn, mesh)
    give = None if output_fn is None else _give(output_fn, mesh)
    if partition_fn is not None:
        _check_function(partition_fn, "partition_fn", "(name, submodule, device_mesh)")
    ties = Ties(module)
    if partition_fn is not None:
        for name, sub in module.named_modules():
            partition_fn(name, sub, mesh)
    ties.restore()
    for sub in module.modules():
        _replicate_rest(sub, mesh)
    if take or give:
        wrap_forward(module, take, give)
    setattr(module, DISTRIBUTED, True)
    return module


def _take(input_fn: Callable[..., Any], mesh: Any) -> Take:
    wants_module = _takes_module(input_fn, "input_fn", "(module, inputs, device_mesh)")

    def take(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        found = input_fn(module, args, mesh) if wants_module else input_fn(args, mesh)
        if found is None:
            return args, kwargs
        return found if isinstance(found, tuple) else (found,), kwargs

    return take


def _give(output_fn: Callable[..., Any], mesh: Any) -> Give:
    wants_module = _takes_module(output_fn, "output_fn", "(module, outputs, device_mesh)")

    def give(module: nn.Module, args: tuple, output: Any) -> Any:
        found = output_fn(module, output, mesh) if wants_module else output_fn(output, mesh)
        return output if found is None else found

    return give


def _replicate_rest(module: nn.Module, mesh: Any) -> None:
    replicate = [Replicate()] * mesh.ndim
    for name, p in module.named_parameters(recurse=False):
        if not isinstance(p, DTensor):
            module.register_parameter(name, distribute_parameter(p, mesh, replicate))
    for name, b in module.named_buffers(recurse=False):
        if not isinstance(b, DTensor):
            module._buffers[name] = distribute_tensor(b, mesh, replicate)


def _check_function(hook: Any, name: str, form: str) -> None:
    if not callable(hook):
        raise TypeError(f"{name} is a function of {form}; got {hook!r}")


def _takes_module(hook: Callable[..., Any], name: str, form: str) -> bool:
    _check_function(hook, name, form)
    count = len(inspect.signature(hook).parameters)
    if count == 2:
        warnings.warn(f"{name} with two arguments is deprecated; write {name}{form}", FutureWarning, stacklevel=4)
        return False
    if count != 3:
        raise TypeError(f"{name} takes {form}, the one given takes {count} arguments")
    return True


def _make(fill: Callable[..., torch.Tensor], size, dtype, layout, requires_grad, device_mesh, placements) -> DTensor:
    """A DTensor of a constant: each rank fills its own shard only."""
    spec = _spec(size, dtype, layout, device_mesh, placements)
    local = fill(spec.local_shape(), dtype=spec.dtype, device=spec.mesh.device_type)
    return DTensor(local, spec.mesh, spec.layout, spec.shape, spec.stride, requires_grad)


def _spec(size, dtype, layout, device_mesh, placements) -> Spec:
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


def zeros(*size, dtype=None, layout=torch.strided, requires_grad=False, device_mesh=None, placements=None) -> DTensor:
    """Zeros of global shape `size`; each rank makes its shard only."""
    return _make(torch.zeros, size, dtype, layout, requires_grad, device_mesh, placements)


def ones(*size, dtype=None, layout=torch.strided, requires_grad=False, device_mesh=None, placements=None) -> DTensor:
    """Ones of global shape `size`; each rank makes its shard only."""
    return _make(torch.ones, size, dtype, layout, requires_grad, device_mesh, placements)


def empty(*size, dtype=None, layout=torch.strided, requires_grad=False, device_mesh=None, placements=None) -> DTensor:
    """Uninitialised, of global shape `size`; each rank makes its shard only."""
    return _make(torch.empty, size, dtype, layout, requires_grad, device_mesh, placements)


def full(
    size, fill_value, *, dtype=None, layout=torch.strided, requires_grad=False, device_mesh=None, placements=None
) -> DTensor:
    """`fill_value` everywhere, of global shape `size`; each rank makes its shard only."""
    dtype = dtype if dtype is not None else torch.tensor(fill_value).dtype

    def fill(shape, *, dtype, device):
        return torch.full(shape, fill_value, dtype=dtype, device=device)

    return _make(fill, (tuple(size),), dtype, layout, requires_grad, device_mesh, placements)


def linspace(
    start, end, steps, *, dtype=None, layout=torch.strided, requires_grad=False, device_mesh=None, placements=None
) -> DTensor:
    """`steps` evenly spaced numbers, as `torch.linspace`; each rank makes all, and keeps its shard.

    `start` and `end` are numbers or tensors of no dimension, DTensors too.
    """
    make = partial(torch.linspace, _whole(start), _whole(end), steps)
    return _cut(make, steps, dtype, layout, requires_grad, device_mesh, placements)


def logspace(
    start,
    end,
    steps,
    base=10,
    *,
    dtype=None,
    layout=torch.strided,
    requires_grad=False,
    device_mesh=None,
    placements=None,
) -> DTensor:
    """`steps` powers of `base`, from `base ** start` to `base ** end`, as `torch.logspace`; otherwise as `linspace`."""
    make = partial(torch.logspace, _whole(start), _whole(end), steps, base)
    return _cut(make, steps, dtype, layout, requires_grad, device_mesh, placements)


def _whole(x: Any) -> Any:
    return x.full_tensor() if isinstance(x, DTensor) else x


def _cut(make: Callable[..., torch.Tensor], length, dtype, layout, requires_grad, device_mesh, placements) -> DTensor:
    """The shard of a row of numbers that every rank makes whole."""
    spec = _spec((length,), dtype, layout, device_mesh, placements)
    local = keep_shard(make(dtype=dtype, device=spec.mesh.device_type), spec.layout, spec.mesh)
    return DTensor(local, spec.mesh, spec.layout, spec.shape, spec.stride, requires_grad)


def rand(*size, dtype=None, layout=torch.strided, requires_grad=False, device_mesh=None, placements=None) -> DTensor:
    """Uniform in [0, 1), of global shape `size`: what `torch.rand(size)` gives on one device with the same seed."""
    spec = _spec(size, dtype, layout, device_mesh, placements)
    return DTensor(sample(torch.rand, spec), spec.mesh, spec.layout, spec.shape, spec.stride, requires_grad)


def randn(*size, dtype=None, layout=torch.strided, requires_grad=False, device_mesh=None, placements=None) -> DTensor:
    """Standard normal, of global shape `size`: what `torch.randn(size)` gives on one device with the same seed."""
    spec = _spec(size, dtype, layout, device_mesh, placements)
    return DTensor(sample(torch.randn, spec), spec.mesh, spec.layout, spec.shape, spec.stride, requires_grad)


__all__ = [
    "distribute_module",
    "distribute_parameter",
    "distribute_tensor",
    "empty",
    "full",
    "linspace",
    "logspace",
    "ones",
    "rand",
    "randn",
    "zeros",
]
