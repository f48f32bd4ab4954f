"""Call: one operator call as a rule sees it, with specs in place of tensors, and as `local` functions see it."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..layout.layout import Layout
from ..mesh.tensor_spec import Spec
from ..torch_private.core import OpOverload
from .rule import Rule

RuleFunction = Callable[["Call"], Rule]
RULES: dict[str, RuleFunction] = {}
"""Operator name (`aten::add`, without overload and without the in-place underscore) -> its rule; one overload's own
(`aten.add.Tensor`) comes before it."""

SHAPES: dict[str, Callable[..., Any]] = {}
"""Operator name -> what gives its outputs on stand-ins, where torch's own refuses what a kernel takes."""


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
    """The name under which an operator's rule stands in `RULES`, or would stand.

    That of the operator itself if it is there; else without the in-place underscore, then also without `_copy` (the
    twin of a view that copies). A foreach operator has the name of what it does to each tensor.
    """
    name = func._schema.name.replace("aten::_foreach_", "aten::")
    plain = name[:-1] if name.endswith("_") and not name.endswith("__") else name
    return next((n for n in (name, plain, plain.removesuffix("_copy")) if n in RULES), plain)


def is_in_place(func: OpOverload) -> bool:
    """Whether the operator writes its result into its first argument and returns that."""
    return func._schema.is_mutable and func._schema.name.endswith("_")


@dataclass
class Call:
    """An operator call with `Spec` in place of each DTensor.

    Attributes:
        func: the torch OpOverload.
        args, kwargs: as given, specs in place of tensors.
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

    def operands_at(self, arguments: Iterable[int]) -> frozenset[int] | None:
        """Operand indices of the arguments at these positions of the schema; None if one of them is no DTensor."""
        names = [a.name for a in self.func._schema.arguments]
        found: dict[int, int] = {}
        count = 0
        for position, name in enumerate(names):
            given = self[name]
            if isinstance(given, list) and len(given) == 1:
                given = given[0]
            if isinstance(given, Spec):
                found[position] = count
                count += 1
        wanted = tuple(arguments)
        return frozenset(found[p] for p in wanted) if all(p in found for p in wanted) else None

    @property
    def wanted(self) -> tuple[Output | None, ...]:
        """The outputs, None for those that an `output_mask` leaves out: not every fake kernel heeds it."""
        mask = self["output_mask"] if self.has("output_mask") else ()
        return tuple(o if i >= len(mask) or mask[i] else None for i, o in enumerate(self.outputs))

    @property
    def name(self) -> str:
        """Name under which the rule is registered: without "aten::", "_foreach_", in-place underscore and "_copy"."""
        return base_name(self.func).removeprefix("aten::")

    def has(self, name: str) -> bool:
        """Whether the schema has an argument of that name."""
        return name in positions(self.func)


@dataclass(frozen=True)
class LocalCall:
    """What a rule's `local` function gets.

    Attributes:
        func, args, kwargs: the call on local tensors.
        call: the global call.
        mesh: the device mesh.
        axes: factor -> the mesh axes that shard it, outermost cut first.
        layouts: layout of each output.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    call: Call
    mesh: Any
    axes: dict[str, tuple[int, ...]]
    layouts: tuple[Layout | None, ...]

    def __getitem__(self, name: str) -> Any:
        return argument(self.func, self.args, self.kwargs, name)

    def run(self, /, **changed: Any) -> Any:
        """Run the operator on the local arguments, some of them changed by name."""
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
    index, default, _ = positions(func)[name]
    if name in kwargs:
        return kwargs[name]
    return args[index] if index < len(args) else default


def replaced(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], changed: Iterable[tuple[str, Any]]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """`args` and `kwargs` with the named arguments changed; positional ones are filled up with defaults as needed."""
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


def rule_for(*names: str) -> Callable[[RuleFunction], RuleFunction]:
    """Register a rule function for the named operators, of aten where no namespace is named."""

    def register(function: RuleFunction) -> RuleFunction:
        for name in names:
            RULES[name if "::" in name else f"aten::{name}"] = function
        return function

    return register


def shape_for(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register what is called on stand-ins of global tensors in the place of an aten operator."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        SHAPES[f"aten::{name}"] = function
        return function

    return register


__all__ = [
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
    "rule_for",
    "shape_for",
]
