"""Styles of torch.distributed.tensor.parallel in a plan of `parallelize_module`: each is replaced by its namesake here.

Torch's are recognised by name, so that their module is not imported.
"""

from collections.abc import Callable
from typing import Any

from ...errors import ArgumentTypeError
from ...tensor.torch_dtensor import TORCH
from .colwise import ColwiseParallel
from .prepare import PrepareModuleInput, PrepareModuleInputOutput, PrepareModuleOutput
from .rowwise import RowwiseParallel
from .sequence import SequenceParallel
from .style import ParallelStyle


def _linear(made: Any) -> Callable[[Any], ParallelStyle]:
    def converted(style: Any) -> ParallelStyle:
        (given,), (output,) = style.input_layouts, style.output_layouts
        return made(input_layouts=given, output_layouts=output, use_local_output=style.use_local_output)

    return converted


def _input(style: Any) -> dict[str, Any]:
    return {
        "input_layouts": style.input_layouts,
        "desired_input_layouts": style.desired_input_layouts,
        "input_kwarg_layouts": style.input_kwarg_layouts or None,
        "desired_input_kwarg_layouts": style.desired_input_kwarg_layouts or None,
    }


def _output(style: Any) -> dict[str, Any]:
    return {
        "output_layouts": style.output_layouts,
        "desired_output_layouts": style.desired_output_layouts,
        "use_local_output": style.use_local_output,
    }


def _both(style: Any) -> ParallelStyle:
    before, after = style.prepare_module_input, style.prepare_module_output
    return PrepareModuleInputOutput(**_input(before), use_local_input=before.use_local_output, **_output(after))


STYLES: dict[str, Callable[[Any], ParallelStyle]] = {
    "ColwiseParallel": _linear(ColwiseParallel),
    "RowwiseParallel": _linear(RowwiseParallel),
    "SequenceParallel": lambda style: SequenceParallel(
        sequence_dim=style.sequence_sharding[0].dim, use_local_output=style.use_local_output
    ),
    "PrepareModuleInput": lambda style: PrepareModuleInput(**_input(style), use_local_output=style.use_local_output),
    "PrepareModuleOutput": lambda style: PrepareModuleOutput(**_output(style)),
    "PrepareModuleInputOutput": _both,
}
"""Name of a style of torch -> a function that makes of it the one here."""


def as_our_style(style: Any) -> Any:
    """The style here that does what one of torch's does; anything else is returned unchanged.

    Raises:
        TypeError: `style` is of a class derived from one of torch's.
    """
    cls = type(style)
    theirs = [c.__name__ for c in cls.__mro__ if c.__module__.startswith(f"{TORCH}.parallel")]
    if cls.__module__.startswith(f"{TORCH}.parallel") and cls.__name__ in STYLES:
        return STYLES[cls.__name__](style)
    if theirs and not isinstance(style, ParallelStyle):
        raise ArgumentTypeError(
            f"{cls.__name__} is a style for torch's DTensor, derived from {theirs[0]} of {TORCH}.parallel; derive it "
            f"from the class of dtensor (`from dtensor.parallel import {theirs[0]}`), whose method is "
            "apply(module, device_mesh)"
        )
    return style


__all__ = ["as_our_style"]
