"""Arguments of a model's forward: their names, and which placements are given for them.

A tensor is named after the parameter of `forward` that takes it, and by what follows in tuples, lists, dicts and
dataclasses: `tokens`, `batch.ids`, `images.0`. What is given for `batch` holds for all that is in it, unless more is
said. Dynamo traces this as part of the forward.
"""

import inspect
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, TypeAlias, TypeVar

import torch

from ...errors import PlacementError
from ...layout.placements import Placement

Placements: TypeAlias = Mapping[str, Placement] | Sequence[Placement]
"""Placements of a tensor: one per mesh axis, or a dict from axis names, where axes that are left out are Replicate."""

T = TypeVar("T")

MANY = "*"
"""The start of a parameter's name that takes any number of arguments."""


def is_by_name(given: Any) -> bool:
    """Whether placements are given by name of an argument, and not for all."""
    return isinstance(given, Mapping) and any(isinstance(p, (Mapping, list, tuple)) for p in given.values())


def entry_of(name: str, given: Mapping[str, T]) -> str | None:
    """The name under which something is given for an argument: its own, or of what contains it; None if there is none.

    >>> entry_of("batch.ids", {"batch": [Shard(0)]})
    'batch'
    """
    while name not in given:
        if "." not in name:
            return None
        name = name.rpartition(".")[0]
    return name


def parameter_names(forward: Callable[..., Any]) -> tuple[str, ...]:
    """The parameters that take positional arguments; the last one with a star if it takes any number."""
    kinds = inspect.Parameter
    return tuple(
        [
            f"{MANY}{p.name}" if p.kind == kinds.VAR_POSITIONAL else p.name
            for p in _parameters(forward)
            if p.kind not in (kinds.KEYWORD_ONLY, kinds.VAR_KEYWORD)
        ]
    )


def name_of(k: int, names: Sequence[str]) -> str:
    """The name of the k-th positional argument.

    >>> name_of(2, ("x", "*rest"))
    'rest.1'
    """
    if k < len(names) and not names[k].startswith(MANY):
        return names[k]
    return f"{names[-1].removeprefix(MANY)}.{k - len(names) + 1}" if names else f"args.{k}"


def check_names(given: Mapping[str, Any], forward: Callable[..., Any], what: str = "inputs", other: str = "") -> None:
    """Raise PlacementError if `what` is given for an argument that `forward` does not take; `other` ends it."""
    parameters = _parameters(forward)
    known = [p.name for p in parameters]
    if any(p.kind == inspect.Parameter.VAR_KEYWORD for p in parameters):
        return
    for name in given:
        if name.partition(".")[0] not in known:
            raise PlacementError(
                f"{what}: forward takes no {name!r}; write one of its arguments, {', '.join(map(repr, known))}{other}"
            )


def _parameters(forward: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(forward).parameters.values())
    except (TypeError, ValueError):  # it is not written in Python
        return []


def arguments_of(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional arguments and those by name that a tensor, a sequence or a dict stands for."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)), {}


def mapped_arguments(
    f: Callable[[torch.Tensor, str], Any], names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with each tensor in them replaced by `f(tensor, its name)`."""
    return (
        tuple([mapped(f, x, name_of(k, names)) for k, x in enumerate(args)]),
        {name: mapped(f, x, name) for name, x in kwargs.items()},
    )


def mapped(f: Callable[[torch.Tensor, str], Any], x: Any, name: str) -> Any:
    """`x` with each tensor in it replaced by `f(tensor, its name)`, where `x` itself is called `name`.

    Descends into tuples, lists, dicts and dataclasses; other objects are unchanged.
    """
    if isinstance(x, torch.Tensor):
        return f(x, name)
    if isinstance(x, (tuple, list)):
        items = [mapped(f, item, f"{name}.{i}") for i, item in enumerate(x)]
        return type(x)(*items) if hasattr(x, "_fields") else type(x)(items)
    if isinstance(x, dict):
        # Outputs of transformers are both dicts and dataclasses, and their items omit None values.
        items = {key: mapped(f, item, f"{name}.{key}") for key, item in x.items()}
        return type(x)(**items) if is_dataclass(x) else OrderedDict(items) if isinstance(x, OrderedDict) else items
    if is_dataclass(x) and not isinstance(x, type):
        items = {d.name: mapped(f, getattr(x, d.name), f"{name}.{d.name}") for d in fields(x) if d.init}
        return type(x)(**items)
    return x


__all__ = [
    "Placements",
    "arguments_of",
    "check_names",
    "entry_of",
    "is_by_name",
    "mapped",
    "mapped_arguments",
    "name_of",
]
__all__ += ["parameter_names"]
