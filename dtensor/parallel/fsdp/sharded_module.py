"""The class of modules with fully sharded parameters: it has a property for each of these parameters.

To other code the module is unchanged: it has the same names in `named_parameters` and `state_dict`, the same methods,
and is an instance of its original class. Inside a forward, reading a parameter returns it unsharded; outside, for
optimizers and initialisation, it is the sharded DTensor. Dynamo traces the properties like any other code, so that
their gathers and reductions are in the graph.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import nn

from ...comm.from_plain import refuse_export, refuse_function_transforms
from ...errors import ArgumentError, ArgumentTypeError
from ...tensor.own_losses import mark
from ...tensor.tensor import DTensor
from ...torch_private.core import constant_in_traces, never_traced, traced_with_caller, tree_map
from ...torch_private.dynamo import traced_modules
from ..modules.forward_wrapping import made_class, with_own_code, without
from .accumulation import set_reduced
from .sharding import SHARDED_AS, sharded_otherwise
from .unit import MEMBER, Member, Unit, members
from .unshard import Unshard, unsharded


class FullyShardedModule(nn.Module):
    """The methods that `fully_shard` adds to the class of a module.

    They apply to all fully sharded modules inside, or with `recurse=False` to those of this module's own unit only.
    """

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Sets whether backward reduces gradients over the data axes. Turn it off to accumulate over several backwards.

        Unreduced gradients are unsharded on each rank: DTensors that are Partial("avg") over the data axes. When this
        is turned on again, the next backward reduces them together with its own gradients, once.

        Args:
            requires_gradient_sync: whether to reduce.
            recurse: apply to all fully sharded modules inside; False applies to this module's unit only.

        Raises:
            TypeError: `requires_gradient_sync` is not a bool.
        """
        _check_flag("requires_gradient_sync", requires_gradient_sync)
        self._set_reduced("all" if requires_gradient_sync else "none", recurse)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Sets whether backward also reduces over the replicate axis of a mesh (replicate, shard).

        If it is off, gradients are reduce-scattered only and stay Partial("avg") over the replicate axis. When this is
        turned on again, the next backward reduces them together with its own gradients, once.

        Args:
            requires_all_reduce: whether to reduce.
            recurse: apply to all fully sharded modules inside; False applies to this module's unit only.

        Raises:
            TypeError: `requires_all_reduce` is not a bool.
        """
        _check_flag("requires_all_reduce", requires_all_reduce)
        self._set_reduced("all" if requires_all_reduce else "scatter", recurse)

    def unshard(self, async_op: bool = False) -> None:
        """Makes attributes such as `module.weight` unsharded outside of forwards too, until `reshard()` is called.

        This is for code that uses a parameter beside the forward, such as a loss that multiplies by the weight of a
        head. Each read gathers the parameter, in the dtype of the forward, and gradients are averaged over the data
        axes like those of the forward. `parameters()` and `state_dict()` stay sharded. It applies to the parameters of
        this module's own unit, in eager and compiled code.

        Args:
            async_op: ignored; present for compatibility with FSDP2.
        """
        vars(self)[MEMBER].unit.unsharded = True

    def reshard(self) -> None:
        """Makes attributes the sharded DTensors again outside of forwards."""
        vars(self)[MEMBER].unit.unsharded = False

    def _set_reduced(self, reduce: str, recurse: bool) -> None:
        own = vars(self)[MEMBER].unit
        set_reduced([found for found in members(self) if recurse or found[1].unit is own], reduce)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As `nn.Module.register_parameter`. A sharded parameter can only be replaced by one sharded in the same way.

        Raises:
            ValueError: `param` replaces a sharded parameter and is placed differently.
        """
        how = vars(self)[MEMBER].how
        if name in how and param is not None:
            _, found, _ = vars(param).get(SHARDED_AS, (None, how[name], None))
            lies = (param._spec.layout, param.device_mesh) if isinstance(param, DTensor) else None
            if lies != (found.layout, found.mesh):
                raise ArgumentError(
                    f"{name} of a fully sharded module is a DTensor {list(how[name].layout.placements)} on "
                    f"{how[name].mesh}; write module.{name}.copy_(values) under torch.no_grad() for other values, or "
                    "replace it before fully_shard"
                )
            how[name] = found
            _average(vars(self)[MEMBER].unit, param, found)
        super().register_parameter(name, param)

    def redistribute_parameter(self, name: str, distribute: Callable[[nn.Parameter], nn.Parameter]) -> None:
        """Use `distribute` to shard a parameter over other mesh axes. It also stays sharded over the data axes."""
        how, parameter = vars(self)[MEMBER].how, self._parameters[name]
        assert parameter is not None, f"{type(self).__name__} has no parameter {name}"
        made, how[name] = sharded_otherwise(parameter, how[name], distribute)
        self._parameters[name] = made
        _average(vars(self)[MEMBER].unit, made, how[name])


def _check_flag(name: str, given: Any) -> None:
    if not isinstance(given, (bool, numpy.bool_)):
        raise ArgumentTypeError(f"{name} is True or False; got {given!r}")


def join(module: nn.Module, unit: Unit, how: dict[str, Unshard], given: bool) -> None:
    """Add `module`, whose parameters `how` are already sharded, to a unit."""
    member = vars(module).setdefault(MEMBER, Member(unit))
    member.how.update(how)
    member.given = member.given or given
    for name, found in how.items():
        _average(unit, module._parameters[name], found)
    module.__class__ = sharded_class(plain_class(module), tuple(sorted(member.how)))


def _average(unit: Unit, parameter: Any, how: Unshard) -> None:
    """Have the gradient averaged where a parameter is read outside of a forward, with `full_tensor` or `to_local`."""
    if unit.local and isinstance(parameter, DTensor):
        mark(parameter, tuple([axis for axis, _ in how.unreduced.partial]))


def plain_class(module: nn.Module) -> type[nn.Module]:
    """The class of a module without the properties for fully sharded parameters."""
    return without(type(module), sharded_class)


@functools.cache
def sharded_class(cls: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """The class derived from `cls` for modules whose parameters `names` are fully sharded."""
    inner = cls.forward  # Dynamo does not trace into a class that is marked with allow_in_graph

    @with_own_code
    @functools.wraps(inner)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return _run(self, inner, args, kwargs)

    inside = {"forward": forward, **{name: _property(name) for name in names}}
    return made_class(sharded_class, cls, names, bases=(FullyShardedModule,), prefix="FSDP", **inside)


def _property(name: str) -> property:
    return property(never_traced(lambda self: _read(self, name)))


def _read(module: nn.Module, name: str) -> torch.Tensor | None:
    """The current value of parameter `name`: unsharded while a forward runs, else the sharded DTensor."""
    parameter = module._parameters.get(name)
    member: Member = getattr(module, MEMBER)
    unit, how = member.unit, member.how[name]
    if not isinstance(parameter, DTensor):
        return parameter
    in_forward = torch.compiler.is_dynamo_compiling() and _in_traced_forward()
    if not (in_forward or unit.running or unit.unsharded):
        return parameter
    floating = parameter.is_floating_point()
    dtype = unit.policy.param_dtype if floating else None
    return unsharded(
        parameter,
        how,
        dtype=dtype,
        reduce_dtype=unit.policy.reduce_dtype or (parameter.dtype if dtype else None),
        gather_dtype=unit.policy.gather_dtype if floating else None,
        local=unit.local,
        keep=unit.keep,
        reduce=unit.reduce,
    )


@constant_in_traces
def _in_traced_forward() -> bool:
    """Whether the read that Dynamo is tracing is inside a forward of its unit that is traced with it.

    Such forwards are not counted, because activation checkpointing allows no change of state.
    """
    unit = vars(next(traced_modules(_read, "module")))[MEMBER].unit
    return any(vars(module)[MEMBER].unit is unit for module in traced_modules(_run, "module"))


@traced_with_caller
def _run(module: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The forward of a fully sharded module."""
    refuse_export()
    member: Member = getattr(module, MEMBER)
    unit, policy = member.unit, member.unit.policy
    if member.given and policy.cast_forward_inputs and policy.param_dtype is not None:
        args, kwargs = _cast((args, kwargs), policy.param_dtype)
    if torch.compiler.is_compiling():
        out = forward(module, *args, **kwargs)
    else:
        refuse_function_transforms("the forward of a fully sharded module")
        unit.running += 1
        try:
            out = forward(module, *args, **kwargs)
        finally:
            unit.running -= 1
    return _cast(out, policy.output_dtype) if member.given and policy.output_dtype is not None else out


def _cast(values: Any, dtype: torch.dtype) -> Any:
    def cast(x: Any) -> Any:
        return x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x

    return tree_map(cast, values)


__all__ = ["FullyShardedModule", "join", "plain_class", "sharded_class"]
