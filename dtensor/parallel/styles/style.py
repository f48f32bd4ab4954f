"""The base of all parallel styles, and the three moves they are made of.

A style says how one module is sharded: what becomes of its parameters, in which layout its inputs are taken
and in which its outputs are given. `parallelize_module` applies styles to the modules of a plan; each
style stands on `dtensor.parallel.modules.distribute_module.distribute_module`, for parameters, and on
`dtensor.parallel.modules.forward_wrapping`. What is called around a forward is kept short: Dynamo traces it once for
each module.
"""

from abc import ABC, abstractmethod
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ...layout.placements import Placement, as_placement
from ...tensor.tensor import DTensor
from ..checks.input_check import compare_input
from ..fsdp.sharded_module import FullyShardedModule
from ..modules.distribute_module import distribute_parameter
from ..modules.forward_wrapping import Give, Take


class ParallelStyle(ABC):
    """How one module is parallelized over the axis of a one-axis mesh.

    Attributes:
        src_data_rank: the rank of the axis whose parameter values are scattered to all; None makes every rank
            shard the values it has itself. `parallelize_module` sets it.
        check_inputs: whether ranks compare, at first and every so often, what they give where the layout is
            Replicate(). `parallelize_module` sets it.
        shards_parameters: whether modules get other parameters by it. A plan then has to name all modules that share
            one.
    """

    src_data_rank: int | None = 0
    check_inputs: bool = True
    shards_parameters: bool = False

    @abstractmethod
    def apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Shard `module` in place over `device_mesh`, wrap its forward, and return it."""

    def distribute_parameter(self, module: nn.Module, name: str, mesh: DeviceMesh, placement: Placement) -> None:
        """Replace parameter `name` of `module` (nothing happens if it is None) by a DTensor placed as
        `placement`; modules that share it go on sharing it."""
        parameter = getattr(module, name)

        def distribute(whole: nn.Parameter) -> nn.Parameter:
            return distribute_parameter(whole, mesh, [placement], src_data_rank=self.src_data_rank)

        if isinstance(module, FullyShardedModule) and parameter is not None:
            module.redistribute_parameter(name, distribute)
        elif parameter is not None:
            module.register_parameter(name, distribute(parameter))

    def refuse(self, module: nn.Module) -> NoReturn:
        """Raise the error for a module that a style for nn.Linear and nn.Embedding cannot shard."""
        raise NotImplementedError(
            f"{type(self).__name__} shards nn.Linear and nn.Embedding, not {type(module).__name__}; apply it to the "
            "linear layers and embeddings inside, or write a ParallelStyle of your own for this module"
        )


def linear_dims(module: nn.Module) -> tuple[int, int] | None:
    """The dimensions of a linear layer's weight that count output and input features; None for another module.

    Known are nn.Linear and its transpose, which transformers call Conv1D.
    """
    if isinstance(module, nn.Linear):
        return 0, 1
    named = type(module).__name__ == "Conv1D" and type(module).__module__.startswith("transformers.")
    return (1, 0) if named else None


def as_layout(argument: str, given: Any) -> Placement | None:
    """The placement given for `argument` of a style; None stays None.

    Raises:
        ValueError: `given` is no placement.
    """
    if isinstance(given, (tuple, list)):
        raise ValueError(
            f"{argument} is one placement, as a style works on a mesh of one axis; got {given!r}, "
            f"write {argument}={given[0] if given else 'Replicate()'!r}"
        )
    return None if given is None else as_placement(given)


def to_layout(
    x: Any, mesh: DeviceMesh, given: Placement, wanted: Placement | None, compared_for: nn.Module | None = None
) -> DTensor:
    """`x` as a DTensor in layout `wanted` (None: as it is); a plain tensor is taken as this rank's part in
    layout `given`, and compared over the ranks at times, if that is Replicate(), as an input of `compared_for`.

    Raises:
        ValueError: `x` is no tensor.
    """
    if not isinstance(x, DTensor):
        if not isinstance(x, torch.Tensor):
            raise ValueError(f"layout {given!r} is given for a value that is no tensor but {x!r}; write None for it")
        alike = compared_for is not None and given.is_replicate()
        if torch.compiler.is_dynamo_compiling():  # at once what from_local comes to: each line is slow to trace
            x = torch.ops.dtensor.from_local(x, mesh, str(given), (), (), "", alike)
        else:
            if alike:
                compare_input(x, mesh, compared_for)
            x = DTensor.from_local(x, mesh, (given,))
    return x if wanted is None else x.redistribute(mesh, (wanted,))


def first_to_layout(given: Placement, wanted: Placement, mesh: DeviceMesh, compared: bool) -> Take:
    """Takes the first positional input in layout `wanted`, the others as they are; `compared` is `check_inputs`."""

    def take(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not args:
            raise ValueError(
                f"{type(module).__name__} is parallelized by a style that prepares its first positional input, but "
                "was called with keywords only; pass the input by position"
            )
        return (to_layout(args[0], mesh, given, wanted, module if compared else None), *args[1:]), kwargs

    return take


def output_to_layout(wanted: Placement | None, use_local_output: bool, mesh: DeviceMesh) -> Give:
    """Gives the output in layout `wanted` (None: as it is), as a plain local tensor if asked."""

    def give(module: nn.Module, args: tuple[Any, ...], output: DTensor) -> torch.Tensor:
        output = output if wanted is None else output.redistribute(mesh, (wanted,))
        return output.to_local() if use_local_output else output

    return give


__all__ = ["ParallelStyle", "as_layout", "first_to_layout", "linear_dims", "output_to_layout", "to_layout"]
