"""A plan: where the parameters, inputs and activations of a model are, as data that can be saved, read and changed."""

import difflib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ...errors import MeshError, PlacementError
from ...layout.placements import Placement, Replicate, Shard, parsed
from ...program.files import write_whole
from .inputs import arguments_of, entry_of, is_by_name, mapped_arguments, parameter_names
from .prediction import Prediction, amount, duration, summary

Axes: TypeAlias = Mapping[str, Placement]
"""Placements by mesh axis; on axes that are left out a tensor is replicated."""

FORMAT = "dtensor plan 1"
"""The value of a file's "format" entry."""

INPUT, OUTPUT = "input", "output"

FINDERS: dict[str, Callable[[Any, Any, Any], "Plan"]] = {}
"""Word that `distribute_model` takes in place of a plan -> what finds one for a model, a mesh and a batch."""


@dataclass(frozen=True)
class Activation:
    """Where a tensor is moved at the border of a module.

    Attributes:
        to: its placements from there on.
        gradient: those in which its gradient comes back, where Partial() is a sum that is still to be computed.
    """

    to: Axes = field(default_factory=dict[str, Placement])
    gradient: Axes = field(default_factory=dict[str, Placement])

    def __str__(self) -> str:
        back = "" if self.gradient == self.to else f", gradient {_words(self.gradient)}"
        return _words(self.to) + back


@dataclass(frozen=True)
class Plan:
    """Where the tensors of a model are on a mesh.

    Names are patterns. In those of parameters `*` stands for anything, as in `distribute_model`; in those of modules,
    within one part of a name between dots, and `**` for any number of parts. Placements are given by mesh axis; a
    tensor is replicated over axes that are left out.

    Attributes:
        mesh: axis -> number of ranks.
        parameters: name of a parameter or buffer -> where it is stored.
        used: name of a parameter -> where it is when the forward reads it, if not where it is stored.
        inputs: where the arguments of the model's forward are, as `distribute_model` takes it: all of them, or name of
            an argument -> where that one is.
        activations: name of a module, with ".input" or ".output" -> where the first tensor is that it takes or returns.
        recomputed: name of modules -> n: each n-th of these keeps no activations, and the backward runs its forward
            again. Modules within one that the name matches are parts of it.
        gradients: the dtype to which gradients of parameters are rounded, and in which they are sent; None for their
            own.
        options: for the compiler, as in `torch.compile(model, backend="dtensor", options=plan.options)`.
        prediction: what the plan is expected to cost, if that was computed.
    """

    mesh: Mapping[str, int]
    parameters: Mapping[str, Axes] = field(default_factory=dict[str, Axes])
    used: Mapping[str, Axes] = field(default_factory=dict[str, Axes])
    inputs: Axes | Mapping[str, Axes] = field(default_factory=dict[str, Placement])
    activations: Mapping[str, Activation] = field(default_factory=dict[str, Activation])
    recomputed: Mapping[str, int] = field(default_factory=dict[str, int])
    gradients: torch.dtype | None = None
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    prediction: Prediction | None = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        lines = [f"mesh  {', '.join([f'{axis}={n}' for axis, n in self.mesh.items()])}"]
        if self.inputs:
            named: Any = self.inputs
            arguments = named if is_by_name(named) else {"": named}
            lines += [f"inputs{name and '.'}{name}  {_words(axes)}" for name, axes in arguments.items()]
        for name in sorted({*self.parameters, *self.used}, key=[*self.parameters, *self.used].index):
            stored = _words(self.parameters.get(name, {}))
            read = f", read as {_words(self.used[name])}" if name in self.used else ""
            lines.append(f"{name}  {stored}{read}")
        lines += [f"{name}  {placed}" for name, placed in self.activations.items()]
        for name, n in self.recomputed.items():
            lines.append(f"{name}  recomputed in the backward" + (f", one of {n}" if n > 1 else ""))
        if self.gradients is not None:
            lines.append(f"gradients  sent as {_dtype_name(self.gradients)}")
        if self.options:
            lines.append(f"options  {', '.join([f'{name}={value!r}' for name, value in self.options.items()])}")
        return "\n".join(lines)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a file, as JSON, at once: all ranks may write the same one, and read it.

        Raises:
            OSError: it cannot be written.
        """
        texts: dict[str, Any] = {
            "parameters": {name: _texts(axes) for name, axes in self.parameters.items()},
            "used": {name: _texts(axes) for name, axes in self.used.items()},
            "inputs": _input_texts(self.inputs),
            "activations": {
                name: {"to": _texts(a.to), "gradient": _texts(a.gradient)} for name, a in self.activations.items()
            },
        }
        texts |= {"recomputed": dict(self.recomputed), "options": dict(self.options)}
        if self.gradients is not None:
            texts["gradients"] = _dtype_name(self.gradients)
        write_whole(Path(path), json.dumps({"format": FORMAT, "mesh": dict(self.mesh), **texts}, indent=2))

    @staticmethod
    def load(path: str | os.PathLike[str]) -> "Plan":
        """Read a plan that `save` wrote, or that was written by hand.

        Raises:
            PlacementError: the file holds no plan, or something in it is no placement.
            OSError: it cannot be read.
        """
        try:
            content = json.loads(Path(path).read_text())
            if content["format"] != FORMAT:
                raise ValueError(f"its format is {content['format']!r}, not {FORMAT!r}")
            sizes = {str(axis): int(n) for axis, n in content["mesh"].items()}
            parameters, used = (
                {name: _parsed(axes) for name, axes in content.get(part, {}).items()} for part in ("parameters", "used")
            )
            activations = {
                name: Activation(_parsed(a["to"]), _parsed(a.get("gradient", a["to"])))
                for name, a in content.get("activations", {}).items()
            }
            recomputed = {str(name): int(n) for name, n in content.get("recomputed", {}).items()}
            inputs, options = _parsed_inputs(content.get("inputs", {})), dict(content.get("options", {}))
            gradients = _dtype(content["gradients"]) if "gradients" in content else None
            return Plan(sizes, parameters, used, inputs, activations, recomputed, gradients, options)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise PlacementError(
                f"{path} is not a plan: {error}; write one with Plan.save, as dtensor.search does"
            ) from error

    def part(self, inputs: Any, mesh: DeviceMesh, model: nn.Module | None = None) -> Any:
        """Return this rank's part of inputs that hold the whole batch, in memory of its own.

        Args:
            inputs: the arguments of the model's forward, as `dtensor.search` takes them: a tensor, a tuple, or a dict
                of names.
            mesh: the mesh.
            model: the model, whose forward says how arguments are called. It is needed if they are not in a dict, and
                the plan has different placements for them.

        Raises:
            PlacementError: the mesh has other axes than the plan; names of arguments are needed; or the plan places
                other arguments.
            MeshError: this rank is not in the mesh.
        """
        check_mesh(self, mesh)
        at = mesh.get_coordinate()
        if at is None:
            raise MeshError(f"this rank is not in {mesh}, so no part is its own; call part on the ranks of the mesh")
        names = () if model is None else parameter_names(model.forward)
        if is_by_name(self.inputs) and model is None and not isinstance(inputs, Mapping):
            raise PlacementError(
                "the plan has different placements for arguments, by their names; pass inputs in a dict from names, or "
                "the model as the third argument"
            )

        met: list[str] = []

        def own(x: torch.Tensor, name: str) -> torch.Tensor:
            met.append(name)
            axes, whole = self.input(name), x
            for axis, i in zip(mesh.mesh_dim_names or (), at):
                p = axes.get(axis)
                if isinstance(p, Shard) and p.dim < x.dim():
                    x = x.tensor_split(self.mesh[axis], p.dim)[i]
            # Not a view, whose offset in the batch's memory would lead ranks to compile at different times.
            return x if x is whole else x.clone(memory_format=torch.contiguous_format)

        args, kwargs = mapped_arguments(own, names, *arguments_of(inputs))
        given: Any = self.inputs
        if is_by_name(given) and all(entry_of(name, given) is None for name in met):
            places, passed = (", ".join(map(repr, found)) for found in (given, met))
            raise PlacementError(
                f"the plan places {places}, and inputs are {passed or 'no tensors'}; pass arguments by the names "
                "that they had when the plan was made"
            )
        if isinstance(inputs, Mapping):
            return kwargs
        if isinstance(inputs, (tuple, list)):
            return list(args) if isinstance(inputs, list) else args
        return args[0]

    def input(self, name: str) -> Axes:
        """Return where an argument of the model's forward is."""
        given: Any = self.inputs
        if not is_by_name(given):
            return given
        entry = entry_of(name, given)
        return {} if entry is None else given[entry]

    def explain(self) -> str:
        """Return where time and memory go, what other plans would cost, and how good the plan is, as text."""
        p = self.prediction
        if p is None:
            return f"{self}\n\nNothing is predicted of this plan: it was not found by dtensor.search."
        lines = [str(self), "", summary(p), ""]
        if p.bound:
            lines += [
                f"Within {p.gap:.1%} of the best there is, under this model of cost and of what a plan can say.",
                "",
            ]
        lines += ["Where the time goes, in all modules of a name:"]
        rows = sorted(p.modules.items(), key=lambda item: -sum(item[1]))[:12]
        lines += [f"  {a:>9} computing  {b:>9} communicating  {name or 'outside'}" for name, (a, b) in _times(rows)]
        if p.moves:
            lines += ["", "What is moved, most expensive first:"]
            lines += [
                f"  {duration(s):>9}  {n} x {op} in {at or 'the model'}: {a} -> {b}" for at, op, a, b, n, s in p.moves
            ]
        for title, plans in (("Other plans:", p.others), ("The best plan, if things were otherwise:", p.what_if)):
            if plans:
                rows = [
                    (f"{duration(s):>9} ({s / p.seconds:.2f} times)  {amount(m):>9}", n) for n, (s, m) in plans.items()
                ]
                lines += ["", title, *[f"  {figures}  {name}" for figures, name in rows]]
        if p.gathered:
            lines += ["", f"Without a sharding rule, so that their operands are gathered: {', '.join(p.gathered)}"]
        return "\n".join(lines)


def _times(rows: Sequence[tuple[str, tuple[float, float]]]) -> list[tuple[str, tuple[str, str]]]:
    return [(name, (duration(a), duration(b))) for name, (a, b) in rows]


def _words(axes: Axes) -> str:
    return ", ".join([f"{axis} {p}" for axis, p in axes.items()]) or "replicated"


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"gradients: {name!r} is not a dtype, such as 'bfloat16'")
    return found


def _texts(axes: Axes) -> dict[str, str]:
    return {axis: str(p) for axis, p in axes.items()}


def _input_texts(inputs: Any) -> dict[str, Any]:
    return {name: _texts(axes) for name, axes in inputs.items()} if is_by_name(inputs) else _texts(inputs)


def _parsed_inputs(texts: Mapping[str, Any]) -> Any:
    return {name: _parsed(axes) for name, axes in texts.items()} if is_by_name(texts) else _parsed(texts)


def _parsed(axes: Mapping[str, str]) -> Axes:
    found = {str(axis): parsed(text) for axis, text in axes.items()}
    if wrong := next((axis for axis, given in found.items() if len(given) != 1), None):
        raise ValueError(f"{axes[wrong]!r} for axis {wrong!r} is not one placement, such as 'S(0)' or 'R'")
    return {axis: given[0] for axis, given in found.items()}


def check_mesh(plan: Plan, mesh: DeviceMesh) -> None:
    """Raise PlacementError if a mesh has other axes than the plan."""
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape))
    if sizes != plan.mesh:
        raise PlacementError(
            f"the plan is for a mesh {plan.mesh}, and the mesh has {sizes or tuple(mesh.shape)}; make it with these "
            "axes and sizes, or search for a plan for this one"
        )


def matches(name: str, pattern: str) -> bool:
    """Whether a pattern matches the name of a module: part by part, where `**` stands for any number of parts."""
    return _matches(name.split("."), pattern.split("."))


def _matches(parts: Sequence[str], wanted: Sequence[str]) -> bool:
    if not wanted:
        return not parts
    if wanted[0] == "**":
        return any(_matches(parts[k:], wanted[1:]) for k in range(len(parts) + 1))
    return bool(parts) and fnmatchcase(parts[0], wanted[0]) and _matches(parts[1:], wanted[1:])


def _matching(name: str, entry: str, names: Sequence[str]) -> list[str]:
    """The modules that a name in an entry of a plan matches.

    Raises:
        PlacementError: there are none.
    """
    matching = [n for n in names if n and matches(n, name)]
    if not matching:
        near = difflib.get_close_matches(name, names, n=3, cutoff=0.3) or [n for n in names if n][:3]
        raise PlacementError(
            f"{name!r} of {entry!r} matches no module of the model; it has for example {', '.join(near)}"
        )
    return matching


def recomputed_of(plan: Plan, names: Sequence[str]) -> list[str]:
    """The modules among `names` whose forward the backward runs again, none of them within another.

    Raises:
        PlacementError: an entry names no module of the model, or its number is not positive.
    """
    found: list[str] = []
    for entry, n in plan.recomputed.items():
        if n < 1:
            raise PlacementError(
                f"recomputed: each n-th of {entry!r} with n = {n}; write 1 for all, 2 for every other one"
            )
        outer: list[str] = []
        for name in _matching(entry, "recomputed", names):
            if not any(name.startswith(f"{other}.") for other in outer):
                outer.append(name)
        found += [name for k, name in enumerate(outer) if k % n == 0]
    return [n for n in dict.fromkeys(found) if not any(n.startswith(f"{other}.") for other in found)]


def modules_of(plan: Plan, names: Sequence[str]) -> dict[str, dict[str, Activation]]:
    """Name of a module -> "input" or "output" -> placements of its activations.

    Raises:
        PlacementError: an entry names no module of the model, or is neither of the two.
    """
    found: dict[str, dict[str, Activation]] = {}
    for entry, placed in plan.activations.items():
        name, _, which = entry.rpartition(".")
        if which not in (INPUT, OUTPUT):
            raise PlacementError(f"{entry!r} is not an activation; write the name of a module with .input or .output")
        for n in _matching(name, entry, names):
            found.setdefault(n, {})[which] = placed
    return found


def on_axes(axes: Axes, mesh: DeviceMesh) -> list[Placement]:
    """One placement for each axis of a mesh with named axes."""
    return [axes.get(name, Replicate()) for name in mesh.mesh_dim_names or ()]


__all__ = [
    "FINDERS",
    "INPUT",
    "OUTPUT",
    "Activation",
    "Axes",
    "Plan",
    "check_mesh",
    "matches",
    "modules_of",
    "on_axes",
]
__all__ += ["recomputed_of"]
