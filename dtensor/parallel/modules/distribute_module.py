"""`distribute_module`: turns parameters and buffers of a module into DTensors and converts its inputs and outputs."""

import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ...comm.from_plain import check_module, mesh_of
from ...errors import ArgumentTypeError, CallOrderError
from ...layout.placements import Placement, Replicate, as_placements
from ...tensor.factories import distribute_tensor, of_xla, on_xla
from ...tensor.tensor import DTensor
from .forward_wrapping import Give, Take, wrap_forward
from .replaced import following
from .ties import DISTRIBUTED_AS, Ties, shared_otherwise

DISTRIBUTED = "_distributed_module"
"""The attribute that marks a module as distributed, by `distribute_module` or `distribute_model`."""


def distribute_parameter(
    parameter: nn.Parameter, mesh: DeviceMesh, placements: Sequence[Placement], *, src_data_rank: int | None = 0
) -> nn.Parameter:
    """The distributed parameter of a plain one. Modules that share it get the same one, so that tied weights stay tied.

    Raises:
        PlacementError: another module that shares the parameter has it on another mesh or in other placements.
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
    device_mesh: DeviceMesh | None = None,
    partition_fn: PartitionFn | None = None,
    input_fn: Callable[..., Any] | None = None,
    output_fn: Callable[..., Any] | None = None,
) -> nn.Module:
    """Distributes a module's parameters and buffers in place, and converts its inputs and outputs.

    Args:
        module: the module; its plain parameters and buffers become DTensors.
        device_mesh: the mesh; None uses the current one.
        partition_fn: called with (name, submodule, device_mesh) for every submodule, to distribute its parameters.
            Parameters that it leaves plain are replicated. Shared parameters stay shared: one replaced in one module is
            replaced in all modules that hold it.
        input_fn: called with (module, inputs, device_mesh) before the forward, where inputs is the tuple of positional
            arguments. Returns the new inputs, or None to keep them.
        output_fn: called with (module, outputs, device_mesh) after the forward. Returns the new outputs, or None to
            keep them.

    Returns:
        `module`.

    Raises:
        TypeError: `module` is not a module, or a hook is not a function or takes a wrong number of arguments.
        PlacementError: `partition_fn` gave a shared parameter different placements in the modules that share it. The
            module is then unusable.
        RuntimeError: the module was already distributed.
        MeshError: `device_mesh` is not a mesh, or is None and no mesh is current.
        ImportError: the mesh has device type "xla" and torch_xla, which then does the sharding, is not installed.
    """
    check_module("distribute_module", module)
    mesh = mesh_of(device_mesh)
    if getattr(module, DISTRIBUTED, False):
        raise CallOrderError("distribute_module was already called on this module; call it once, on the plain module")
    if on_xla(mesh):
        return of_xla("xla_distribute_module")(module, mesh, partition_fn, input_fn, output_fn)
    take = None if input_fn is None else _take(input_fn, mesh)
    give = None if output_fn is None else _give(output_fn, mesh)
    if partition_fn is not None:
        _check_function(partition_fn, "partition_fn", "(name, submodule, device_mesh)")
    ties = Ties(module)
    with following(module):
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


def _take(input_fn: Callable[..., Any], mesh: DeviceMesh) -> Take:
    wants_module = _takes_module(input_fn, "input_fn", "(module, inputs, device_mesh)")

    def take(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        found = input_fn(module, args, mesh) if wants_module else input_fn(args, mesh)
        if found is None:
            return args, kwargs
        return found if isinstance(found, tuple) else (found,), kwargs

    return take


def _give(output_fn: Callable[..., Any], mesh: DeviceMesh) -> Give:
    wants_module = _takes_module(output_fn, "output_fn", "(module, outputs, device_mesh)")

    def give(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        found = output_fn(module, output, mesh) if wants_module else output_fn(output, mesh)
        return output if found is None else found

    return give


def _replicate_rest(module: nn.Module, mesh: DeviceMesh) -> None:
    replicate = [Replicate()] * mesh.ndim
    for name, p in module.named_parameters(recurse=False):
        if not isinstance(p, DTensor):
            module.register_parameter(name, distribute_parameter(p, mesh, replicate))
    for name, b in module.named_buffers(recurse=False):
        if not isinstance(b, DTensor):
            module._buffers[name] = distribute_tensor(b, mesh, replicate)


def _check_function(hook: Any, name: str, form: str) -> None:
    if not callable(hook):
        raise ArgumentTypeError(f"{name} is a function of {form}; got {hook!r}")


def _takes_module(hook: Callable[..., Any], name: str, form: str) -> bool:
    _check_function(hook, name, form)
    count = len(inspect.signature(hook).parameters)
    if count == 2:
        warnings.warn(f"{name} with two arguments is deprecated; write {name}{form}", FutureWarning, stacklevel=4)
        return False
    if count != 3:
        raise ArgumentTypeError(f"{name} takes {form}, the one given takes {count} arguments")
    return True


__all__ = ["DISTRIBUTED", "distribute_module", "distribute_parameter"]
