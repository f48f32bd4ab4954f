"""The base class of parallel styles, and the three conversions they are built from.

A style defines how one module is sharded: the placements of its parameters, inputs and outputs. `parallelize_module`
applies styles to the modules of a plan. Styles use `dtensor.parallel.modules.distribute_module` for parameters and
`dtensor.parallel.modules.forward_wrapping` for inputs and outputs. The functions called around a forward are kept
short, because Dynamo traces them once per module.
"""

from abc import ABC, abstractmethod
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ...errors import ArgumentError, UnsupportedError
from ...layout.placements import Placement, as_placement
from ...tensor.tensor import DTensor
from ..checks.input_check import compare_input
from ..fsdp.sharded_module import FullyShardedModule
from ..modules.distribute_module import distribute_parameter
from ..modules.forward_wrapping import Give, Take


class ParallelStyle(ABC):
    """Base class of styles: how one module is parallelized over a mesh of one axis. Implement `apply` in a subclass.

    Attributes:
        src_data_rank: the rank of the axis whose parameter values all ranks receive; None makes every rank shard its
            own values. `parallelize_module` sets it.
        check_inputs: whether ranks compare plain inputs that are declared Replicate(), on first use and periodically
            later. `parallelize_module` sets it.
        shards_parameters: whether the style replaces parameters. A plan must then have an entry for every module that
            shares one of them.
    """

    src_data_rank: int | None = 0
    check_inputs: bool = True
    shards_parameters: bool = False

    @abstractmethod
    def apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Shard `module` in place over `device_mesh`, wrap its forward, and return it."""

    def distribute_parameter(self, module: nn.Module, name: str, mesh: DeviceMesh, placement: Placement) -> None:
        """Replace parameter `name` of `module`, unless it is None, by a DTensor with the given placement.

        Modules that share the parameter continue to share it.
        """
        parameter = getattr(module, name)

        def distribute(whole: nn.Parameter) -> nn.Parameter:
            return distribute_parameter(whole, mesh, [placement], src_data_rank=self.src_data_rank)

        if isinstance(module, FullyShardedModule) and parameter is not None:
            module.redistribute_parameter(name, distribute)
        elif parameter is not None:
            module.register_parameter(name, distribute(parameter))

    def refuse(self, module: nn.Module) -> NoReturn:
        """Raise NotImplementedError for a module that a style for nn.Linear and nn.Embedding cannot shard."""
        raise UnsupportedError(
            f"{type(self).__name__} shards nn.Linear and nn.Embedding, not {type(module).__name__}; name the linear "
            'layers and embeddings inside, such as {"up": ColwiseParallel()}, write SequenceParallel() for a norm, '
            "or a "
            "ParallelStyle of your own for this module"
        )


def linear_dims(module: nn.Module) -> tuple[int, int] | None:
    """The dims of output and input features in a linear layer's weight; None for another module.

    Supports nn.Linear and its transpose, Conv1D of transformers.
    """
    if isinstance(module, nn.Linear):
        return 0, 1
    named = type(module).__name__ == "Conv1D" and type(module).__module__.startswith("transformers.")
    return (1, 0) if named else None


def as_layout(argument: str, given: Any) -> Placement | None:
    """The placement passed for `argument` of a style; None stays None.

    Raises:
        ValueError: `given` is not one placement.
    """
    if isinstance(given, (tuple, list)):
        raise ArgumentError(
            f"{argument} is one placement, as a style works on a mesh of one axis; got {given!r}, "
            f"write {argument}={given[0] if given else 'Replicate()'!r}"
        )
    return None if given is None else as_placement(given)


def to_layout(
    x: Any, mesh: DeviceMesh, given: Placement, wanted: Placement | None, compared_for: nn.Module | None = None
) -> DTensor:
    """`x` as a DTensor placed as `wanted`, or as it is placed for None.

    A plain tensor counts as this rank's part of a tensor placed as `given`. If that is Replicate(), it is compared over
    the ranks from time to time, as an input of `compared_for`.

    Raises:
        ValueError: `x` is not a tensor.
    """
    if not isinstance(x, DTensor):
        if not isinstance(x, torch.Tensor):
            raise ArgumentError(
                f"layout {given!r} is given for a value that is not a tensor but {x!r}; write None for it"
            )
        alike = compared_for is not None and given.is_replicate()
        if torch.compiler.is_dynamo_compiling():  # skips from_local, as each line is slow to trace
            x = torch.ops.dtensor.from_local(x, mesh, str(given), (), (), "", alike)
        else:
            if alike:
                compare_input(x, mesh, compared_for)
            x = DTensor.from_local(x, mesh, (given,))
    return x if wanted is None else x.redistribute(mesh, (wanted,))


def first_to_layout(given: Placement, wanted: Placement, mesh: DeviceMesh, compared: bool) -> Take:
    """A `Take` that converts the first positional input to `wanted` and keeps the others; `compared`: check it."""

    def take(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not args:
            raise ArgumentError(
                f"{type(module).__name__} is parallelized by a style that prepares its first positional input, but "
                "was called with keywords only; pass the input by position"
            )
        return (to_layout(args[0], mesh, given, wanted, module if compared else None), *args[1:]), kwargs

    return take


def output_to_layout(wanted: Placement | None, use_local_output: bool, mesh: DeviceMesh) -> Give:
    """A `Give` that redistributes the output to `wanted`, unless None, and returns a local tensor if requested."""

    def give(module: nn.Module, args: tuple[Any, ...], output: DTensor) -> torch.Tensor:
        output = output if wanted is None else output.redistribute(mesh, (wanted,))
        return output.to_local() if use_local_output else output

    return give


__all__ = ["ParallelStyle", "as_layout", "first_to_layout", "linear_dims", "output_to_layout", "to_layout"]
