"""The views of an operator call that rules work with, and the tables in which rules are registered.

A rule function gets a `Call`, with specs in place of DTensors; its `local` function gets a `LocalCall`, with this
rank's local tensors.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from ..layout.layout import Layout
from ..mesh.tensor_spec import Spec
from ..torch_private.core import OpOverload
from .rule import Rule

RuleFunction = Callable[["Call"], Rule]
RULES: dict[str, RuleFunction] = {}
"""Operator name (`aten::add`, without overload and in-place underscore) -> its rule function. An entry for a single
overload (`aten.add.Tensor`) takes precedence."""

BY_VALUE: set[str] = set()
"""Operators (as in `RULES`) whose rule depends on the value of a float. All others may only ask whether it is zero, as
`dispatch` keeps one decision for all floats that are not, such as the learning rates of all steps."""

SHAPES: dict[str, Callable[..., Any]] = {}
"""Operator name -> a function that computes its outputs on fake tensors, where torch's own refuses valid arguments."""


@dataclass(frozen=True)
class Output:
    """Global shape, stride and dtype of one output, before a layout is chosen."""

    shape: tuple[Any, ...]
    stride: tuple[Any, ...]
    dtype: torch.dtype

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)


def base_name(func: OpOverload) -> str:
    """The name under which an operator's rule is, or would be, registered in `RULES`.

    It is the operator's own name if that is registered. Otherwise the in-place underscore is dropped, and then the
    suffix `_copy` (of the copying variant of a view). A foreach operator uses the name of the operator that it applies
    to each tensor.
    """
    name = func._schema.name.replace("aten::_foreach_", "aten::")
    plain = name[:-1] if name.endswith("_") and not name.endswith("__") else name
    return next((n for n in (name, plain, plain.removesuffix("_copy")) if n in RULES), plain)


def is_in_place(func: OpOverload) -> bool:
    """Whether the operator writes its result to its first argument and returns that."""
    return func._schema.is_mutable and func._schema.name.endswith("_")


@dataclass
class Call:
    """An operator call with `Spec` in place of each DTensor.

    Attributes:
        func: the torch OpOverload.
        args, kwargs: the arguments as given, with specs in place of DTensors.
        operands: the specs in order of occurrence.
        outputs: for each output its `Output`, or None for one that is not a tensor.
        many: whether the operator returns a tuple or list.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    operands: list[Spec]
    outputs: tuple[Output | None, ...] = ()
    many: bool = False

    def __getitem__(self, name: str) -> Any:
        """The argument called `name` in the operator's schema, its default if it was not given."""
        return argument(self.func, self.args, self.kwargs, name)

    @property
    def wanted(self) -> tuple[Output | None, ...]:
        """The outputs, with None for those that `output_mask` excludes; not every fake kernel respects the mask."""
        if not self.has("output_mask"):
            return self.outputs
        mask = self["output_mask"]
        return tuple(o if i >= len(mask) or mask[i] else None for i, o in enumerate(self.outputs))

    @property
    def name(self) -> str:
        """The `base_name` of the operator, without "aten::"."""
        return base_name(self.func).removeprefix("aten::")

    def has(self, name: str) -> bool:
        """Whether the schema has an argument of that name."""
        return name in positions(self.func)


@dataclass(frozen=True)
class LocalCall:
    """The argument of a rule's `local` function.

    Attributes:
        func, args, kwargs: the call on local tensors.
        call: the global call.
        mesh: the device mesh.
        axes: factor -> the mesh axes that shard it, outermost first.
        layouts: layout of each output.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    call: Call
    mesh: DeviceMesh
    axes: dict[str, tuple[int, ...]]
    layouts: tuple[Layout | None, ...]

    def __getitem__(self, name: str) -> Any:
        return argument(self.func, self.args, self.kwargs, name)

    def run(self, /, **changed: Any) -> Any:
        """Run the operator on the local arguments, with the named ones replaced."""
        args, kwargs = replaced(self.func, self.args, self.kwargs, changed.items())
        return self.func(*args, **kwargs)


_positions: dict[Any, dict[str, tuple[int, Any, bool]]] = {}


def positions(func: OpOverload) -> dict[str, tuple[int, Any, bool]]:
    """Argument name -> (position, default, keyword only) of an operator's schema."""
    found = _positions.get(func)
    if found is None:
        found = _positions[func] = {
            a.name: (i, a.default_value, a.kwarg_only) for i, a in enumerate(func._schema.arguments)
        }
    return found


def argument(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
    """The argument of a call by its name in the schema, or its default. Raises KeyError if it has no such argument."""
    index, default, _ = positions(func)[name]
    if name in kwargs:
        return kwargs[name]
    return args[index] if index < len(args) else default


def replaced(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], changed: Iterable[tuple[str, Any]]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """`args` and `kwargs` with the named arguments replaced; missing positional ones are filled in with defaults."""
    filled, keywords, known = list(args), dict(kwargs), positions(func)
    for name, value in changed:
        index, _, keyword = known[name]
        if keyword or name in keywords:
            keywords[name] = value
            continue
        if index >= len(filled):
            filled += [a.default_value for a in func._schema.arguments[len(filled) : index + 1]]
        filled[index] = value
    return tuple(filled), keywords


def shape_for(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function that runs in place of an aten operator on fake global tensors."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        SHAPES[f"aten::{name}"] = function
        return function

    return register


__all__ = [
    "BY_VALUE",
    "RULES",
    "SHAPES",
    "Call",
    "LocalCall",
    "Output",
    "RuleFunction",
    "argument",
    "base_name",
    "is_in_place",
    "positions",
    "replaced",
    "shape_for",
]
