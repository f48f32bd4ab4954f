"""PrepareModuleInput, PrepareModuleOutput, PrepareModuleInputOutput: the placements of a module's inputs and outputs.

They shard no parameters. Plain tensors become DTensors in a declared placement and are redistributed to the desired
one. Use them on modules whose submodules are sharded by other styles.
"""

import difflib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ...errors import ArgumentError, ArgumentTypeError
from ...layout.placements import Placement
from ..modules.forward_wrapping import wrap_forward
from .style import ParallelStyle, as_layout, to_layout

Layouts: TypeAlias = Placement | Sequence[Placement | None] | None
"""One placement, or one for each value, with None for a value that is passed on unchanged."""

KwargLayouts: TypeAlias = dict[str, Placement] | None


class PrepareModuleInput(ParallelStyle):
    """Redistributes the inputs of a module to the placements it needs.

    Args:
        input_layouts: for each positional input its placement if it is a plain tensor; None passes the input on
            unchanged. One placement stands for a single input. Without this argument no positional input is changed.
        desired_input_layouts: for each of these inputs the placement to redistribute it to; None does not redistribute.
        input_kwarg_layouts: keyword -> placement of that input if it is a plain tensor. Other keywords are unchanged.
        desired_input_kwarg_layouts: the same keywords -> the placement to redistribute the input to.
        use_local_output: pass plain local tensors to the module instead of DTensors.

    Raises:
        ValueError: the layouts do not match each other, the signature of the module or, when it is called, its inputs.
        TypeError: keyword layouts are not a dict.
    """

    def __init__(
        self,
        *,
        input_layouts: Layouts = None,
        desired_input_layouts: Layouts = None,
        input_kwarg_layouts: KwargLayouts = None,
        desired_input_kwarg_layouts: KwargLayouts = None,
        use_local_output: bool = False,
    ) -> None:
        self.input_layouts: tuple[Placement | None, ...]
        self.desired_input_layouts: tuple[Placement | None, ...]
        self.input_layouts, self.desired_input_layouts = _paired(
            "input_layouts", input_layouts, "desired_input_layouts", desired_input_layouts
        )
        self.kwarg_layouts: dict[str, Any] = _paired_by_name(input_kwarg_layouts, desired_input_kwarg_layouts)
        self.use_local_output = use_local_output

    def apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _check_keywords(module, self.kwarg_layouts)

        def take(
            module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            compared_for = module if self.check_inputs else None
            return self._positional(args, device_mesh, compared_for), self._named(kwargs, device_mesh, compared_for)

        wrap_forward(module, take=take)
        return module

    def _positional(self, inputs: tuple[Any, ...], mesh: DeviceMesh, compared_for: nn.Module | None) -> tuple[Any, ...]:
        if self.input_layouts is None:
            return inputs
        return _all_to_layout(
            inputs,
            mesh,
            "input_layouts",
            self.input_layouts,
            self.desired_input_layouts,
            self.use_local_output,
            compared_for,
        )

    def _named(self, kwargs: dict[str, Any], mesh: DeviceMesh, compared_for: nn.Module | None) -> dict[str, Any]:
        if not self.kwarg_layouts:
            return kwargs
        prepared = dict(kwargs)
        for name, (given, desired) in self.kwarg_layouts.items():
            if name in kwargs:
                prepared[name] = _one_to_layout(kwargs[name], mesh, given, desired, self.use_local_output, compared_for)
        return prepared

    def __repr__(self) -> str:
        given = {name: layouts[0] for name, layouts in self.kwarg_layouts.items()}
        desired = {name: layouts[1] for name, layouts in self.kwarg_layouts.items()}
        return (
            f"PrepareModuleInput(input_layouts={self.input_layouts}, "
            f"desired_input_layouts={self.desired_input_layouts}, input_kwarg_layouts={given}, "
            f"desired_input_kwarg_layouts={desired}, use_local_output={self.use_local_output})"
        )


class PrepareModuleOutput(ParallelStyle):
    """Redistributes the outputs of a module.

    Args:
        output_layouts: for each output its placement if it is a plain tensor; None passes the output on unchanged. One
            placement stands for a single output.
        desired_output_layouts: for each of these outputs the placement to redistribute it to; None does not
            redistribute.
        use_local_output: return plain local tensors instead of DTensors.

    Raises:
        ValueError: the layouts do not match each other or, when the module is called, its outputs.
    """

    def __init__(
        self, *, output_layouts: Layouts, desired_output_layouts: Layouts, use_local_output: bool = True
    ) -> None:
        self.output_layouts: tuple[Placement | None, ...]
        self.desired_output_layouts: tuple[Placement | None, ...]
        self.output_layouts, self.desired_output_layouts = _paired(
            "output_layouts", output_layouts, "desired_output_layouts", desired_output_layouts
        )
        if self.output_layouts is None:
            raise ArgumentError(
                "PrepareModuleOutput needs output_layouts; write a placement, or a tuple of one for each"
            )
        self.use_local_output = use_local_output

    def apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def give(module: nn.Module, args: tuple[Any, ...], outputs: Any) -> Any:
            return self._prepared(outputs, device_mesh)

        wrap_forward(module, give=give)
        return module

    def _prepared(self, outputs: Any, mesh: DeviceMesh) -> Any:
        several = isinstance(outputs, (tuple, list))
        prepared = _all_to_layout(
            tuple(outputs) if several else (outputs,),
            mesh,
            "output_layouts",
            self.output_layouts,
            self.desired_output_layouts,
            self.use_local_output,
        )
        return prepared if several else prepared[0]

    def __repr__(self) -> str:
        return (
            f"PrepareModuleOutput(output_layouts={self.output_layouts}, "
            f"desired_output_layouts={self.desired_output_layouts}, use_local_output={self.use_local_output})"
        )


class PrepareModuleInputOutput(ParallelStyle):
    """Applies `PrepareModuleInput` and `PrepareModuleOutput` to one module.

    Args:
        input_layouts: as in `PrepareModuleInput`.
        desired_input_layouts: as in `PrepareModuleInput`.
        input_kwarg_layouts: as in `PrepareModuleInput`.
        desired_input_kwarg_layouts: as in `PrepareModuleInput`.
        use_local_input: `use_local_output` of `PrepareModuleInput`.
        output_layouts: as in `PrepareModuleOutput`.
        desired_output_layouts: as in `PrepareModuleOutput`.
        use_local_output: as in `PrepareModuleOutput`.
    """

    def __init__(
        self,
        *,
        input_layouts: Layouts = None,
        desired_input_layouts: Layouts = None,
        input_kwarg_layouts: KwargLayouts = None,
        desired_input_kwarg_layouts: KwargLayouts = None,
        use_local_input: bool = False,
        output_layouts: Layouts,
        desired_output_layouts: Layouts,
        use_local_output: bool = True,
    ) -> None:
        self.prepare_module_input: PrepareModuleInput = PrepareModuleInput(
            input_layouts=input_layouts,
            desired_input_layouts=desired_input_layouts,
            input_kwarg_layouts=input_kwarg_layouts,
            desired_input_kwarg_layouts=desired_input_kwarg_layouts,
            use_local_output=use_local_input,
        )
        self.prepare_module_output: PrepareModuleOutput = PrepareModuleOutput(
            output_layouts=output_layouts,
            desired_output_layouts=desired_output_layouts,
            use_local_output=use_local_output,
        )

    def apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.prepare_module_input.apply(module, device_mesh)
        return self.prepare_module_output.apply(module, device_mesh)

    def __repr__(self) -> str:
        return f"PrepareModuleInputOutput({self.prepare_module_input!r}, {self.prepare_module_output!r})"


def _as_layouts(argument: str, given: Layouts) -> tuple[Placement | None, ...] | None:
    if given is None:
        return None
    layouts = given if isinstance(given, (tuple, list)) else (given,)
    return tuple(as_layout(f"{argument}[{index}]", layout) for index, layout in enumerate(layouts))


def _paired(argument: str, given: Layouts, desired_argument: str, desired: Layouts) -> tuple[Any, ...]:
    """Both arguments as tuples of the same length, or both None."""
    layouts, desired_layouts = _as_layouts(argument, given), _as_layouts(desired_argument, desired)
    if layouts is None and desired_layouts is not None:
        raise ArgumentError(
            f"{desired_argument}={desired!r} is given without {argument}; write {argument} too, "
            "to say in which layout plain tensors arrive"
        )
    if layouts is not None and desired_layouts is None:
        raise ArgumentError(
            f"{argument}={given!r} is given without {desired_argument}; write {desired_argument} too, "
            f"the same as {argument} if nothing is to be redistributed"
        )
    if layouts is not None and desired_layouts is not None and len(layouts) != len(desired_layouts):
        raise ArgumentError(
            f"{argument} has {len(layouts)} layouts but {desired_argument} has {len(desired_layouts)}: {given!r}, "
            f"{desired!r}; write one for each value in both, None for a value to be left alone"
        )
    return layouts, desired_layouts


def _paired_by_name(given: KwargLayouts, desired: KwargLayouts) -> dict[str, tuple[Any, ...]]:
    """Keyword -> (layout, desired layout)."""
    given, desired = given or {}, desired or {}
    for name, layouts in (("input_kwarg_layouts", given), ("desired_input_kwarg_layouts", desired)):
        if not isinstance(layouts, Mapping):
            raise ArgumentTypeError(f"{name} is a dict from keyword to placement; got {layouts!r}")
    if given.keys() != desired.keys():
        odd = ", ".join(sorted(given.keys() ^ desired.keys()))
        raise ArgumentError(
            "input_kwarg_layouts and desired_input_kwarg_layouts name different keywords; "
            f"write a layout in both for: {odd}"
        )
    return {
        name: (
            as_layout(f"input_kwarg_layouts[{name!r}]", given[name]),
            as_layout(f"desired_input_kwarg_layouts[{name!r}]", desired[name]),
        )
        for name in given
    }


def _check_keywords(module: nn.Module, layouts: dict[str, tuple[Any, ...]]) -> None:
    """Raise ValueError if a layout names a keyword that the module's forward does not take."""
    parameters = inspect.signature(module.forward).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    for name in layouts:
        if name not in parameters:
            near = difflib.get_close_matches(name, parameters) or list(parameters)
            raise ArgumentError(
                f"input_kwarg_layouts names {name!r}, which {type(module).__name__}.forward does not take; "
                f"write one of: {', '.join(near)}"
            )


def _one_to_layout(
    value: Any,
    mesh: DeviceMesh,
    given: Placement | None,
    desired: Placement | None,
    local: bool,
    compared_for: nn.Module | None,
) -> Any:
    if given is None:
        return value
    value = to_layout(value, mesh, given, desired, compared_for)
    return value.to_local() if local else value


def _all_to_layout(
    values: tuple[Any, ...],
    mesh: DeviceMesh,
    argument: str,
    given: tuple[Placement | None, ...],
    desired: tuple[Placement | None, ...],
    local: bool,
    compared_for: nn.Module | None = None,
) -> tuple[torch.Tensor | Any, ...]:
    if len(values) != len(given):
        raise ArgumentError(
            f"{argument} has {len(given)} layouts, but the module has {len(values)} values; "
            "write one layout for each, None for a value to be left alone"
        )
    return tuple([_one_to_layout(v, mesh, g, d, local, compared_for) for v, g, d in zip(values, given, desired)])


__all__ = ["PrepareModuleInput", "PrepareModuleInputOutput", "PrepareModuleOutput"]
