"""Registers sharding rules that users write, in einsum-like text, for operators that the library does not know.

    register_sharding(op, "mk,kn->mn", …)  ->  Rule (parsed, checked against the schema)  ->  the engine's rule per call

A rule names the factors of each dim of each tensor, in the notation of the tables in `dtensor.rules`, and `bind` turns
it into the engine's `dtensor.rules.rule.Rule` for the tensors of each call.
"""

import inspect
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import torch

from ..errors import ArgumentError, ArgumentTypeError, shown
from ..mesh.tensor_spec import Spec
from ..rules import RULES, Call
from ..rules import Rule as EngineRule
from ..rules.bind import bind
from ..rules.call import RuleFunction, argument
from ..rules.notation import Argument, Rule
from ..rules.plan import check_schema
from ..torch_private.core import OpOverload, overloads_of
from . import dispatch

_registered: dict[str, str] = {}
"""Operator -> a string that identifies its registered rule."""


@dataclass(frozen=True)
class TensorMeta:
    """Stands for a tensor argument when a rule function is called.

    Attributes:
        shape: global shape.
        dtype: element type.
    """

    shape: tuple[Any, ...]
    dtype: torch.dtype

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)


RuleMaker = Callable[..., "Rule | str"]
_BY_FUNCTION = object()
"""Default for `rule`: the decorated function supplies it."""


@overload
def register_sharding(op: Any) -> Callable[[RuleMaker], RuleMaker]: ...
@overload
def register_sharding(
    op: Any,
    rule: str | Rule,
    *,
    reduce: str | Mapping[str, str] = ...,
    linear: Argument | Sequence[Argument | Sequence[Argument]] = ...,
    added: Argument | Sequence[Argument] = ...,
    blocked: str | Iterable[str] = ...,
    sizes: Mapping[str, Any] = ...,
) -> None: ...
def register_sharding(op: Any, rule: Any = _BY_FUNCTION, **options: Any) -> Any:
    """Give an operator a sharding rule, or replace the rule it has.

    The rule applies from the next call on. Functions that are already compiled stay as they are. A rule given as a
    function keeps torch from reusing code that other processes compiled. The operator's backward needs no rule here: it
    runs by the rules of the operators that it is written in.

    Args:
        op: an operator made by `torch.library.custom_op`, an OpOverload, or an OpOverloadPacket, which stands for all
            its overloads. It needs a fake kernel (`register_fake`), as for torch.compile.
        rule: a `Rule`, or its text, with the other fields of `Rule` as keywords. Without `rule`, `register_sharding`
            is a decorator for a function that takes the operator's arguments, or the first few of them, and returns a
            `Rule` or its text. The function gets a `TensorMeta` (`shape`, `dtype`, `ndim`) for each tensor.

    Raises:
        TypeError: `op` is not an operator, or `rule` is neither a `Rule` nor its text.
        ValueError: the rule does not fit the operator's schema, or the operator cannot have one: it writes to its
            arguments, its result's shape depends on values, or torch decomposes it before DTensor sees it.
        OperatorError: when the operator is called, if the tensors do not fit the rule.

    >>> @torch.library.custom_op("mylib::scale_rows", mutates_args=())
    ... def scale_rows(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    ...     return x * w[:, None]
    >>> @scale_rows.register_fake
    ... def _(x, w):
    ...     return torch.empty_like(x)
    >>> dtensor.register_sharding(scale_rows, "mk,m->mk", linear=("x", "w"))

    The same with a function, for a rule that depends on the arguments:

    >>> @dtensor.register_sharding(scale_rows)
    ... def _(x, w):
    ...     return dtensor.Rule("mk,m->mk", linear=("x", "w"), blocked="k" if x.dtype is torch.int8 else "")

    Check in a test that a rule is right. `wrong_candidates` runs every combination of placements that the rule allows
    on simulated ranks and compares the result with the plain call:

    >>> from dtensor.testing import Case, wrong_candidates
    >>> x, w = torch.rand(5, 4, dtype=torch.float64), torch.rand(5, dtype=torch.float64)
    >>> wrong_candidates([Case(scale_rows, (x, w))], 2)
    []
    """
    overloads = [o for o in _overloads(op) if _is_shardable(o, alone=not hasattr(op, "overloads"))]
    if not overloads:
        raise ArgumentError(f"no overload of {op} can have a sharding rule; register one that only returns new tensors")
    if rule is _BY_FUNCTION:
        if options:
            raise ArgumentTypeError(
                f"register_sharding takes {', '.join(options)} only together with the text of a rule"
            )
        return lambda function: _register_function(overloads, function)
    made = Rule(rule, **options) if isinstance(rule, str) else rule
    if not isinstance(made, Rule) or (made is rule and options):
        raise ArgumentTypeError(
            f"register_sharding takes the text of a rule and its options, or a dtensor.Rule; got {rule!r}"
        )
    for func in overloads:
        check_schema(made, func)
    for func in overloads:
        _register(func, lambda call: bind(made, call), repr(made))
    return None


def _register(func: OpOverload, make: RuleFunction, identity: str) -> None:
    RULES[str(func)] = make
    _registered[str(func)] = identity
    dispatch.forget()


def fingerprint() -> tuple[tuple[str, str], ...]:
    """The registered rules as a key for compiled code; a rule given as a function matches no other process's."""
    return tuple(sorted(_registered.items()))


def _overloads(op: Any) -> list[OpOverload]:
    found = overloads_of(op)
    if not found:
        fix = f", write torch.ops.{op.replace('::', '.')}" if isinstance(op, str) and "::" in op else ""
        raise ArgumentTypeError(
            "register_sharding takes an operator: one made by torch.library.custom_op, torch.ops.mylib.f or "
            f"torch.ops.mylib.f.default; got {shown(op)}{fix}"
        )
    return found


def _is_shardable(func: OpOverload, alone: bool) -> bool:
    """Whether `func` can have a rule.

    Raises:
        ValueError: it cannot, and it was passed `alone` rather than as one overload of several.
    """
    why = ""
    if func.namespace in ("dtensor", "_c10d_functional") or "_foreach_" in func.name():
        why = "is laid out by the library itself"
    elif any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments):
        why = "writes to its arguments; register one that returns a new tensor"
    elif torch.Tag.dynamic_output_shape in func.tags or torch.Tag.data_dependent_output in func.tags:
        why = "returns a result that depends on values, so its shards cannot be known beforehand"
    elif func._can_decompose():
        why = "is written in terms of other operators, which DTensor sees in its place; register those"
    if why and alone:
        raise ArgumentError(f"no sharding rule for {func}: it {why}")
    return not why


def _register_function(overloads: list[OpOverload], function: RuleMaker) -> RuleMaker:
    if not callable(function):
        raise ArgumentTypeError(f"register_sharding(op) decorates a function that returns a rule; got {function!r}")
    parameters = list(inspect.signature(function).parameters.values())
    rest = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    takes = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    for func in overloads:
        positional = [a.name for a in func._schema.arguments if not a.kwarg_only]
        required = [p for p in takes if p.default is p.empty]
        if len(required) > len(positional):
            raise ArgumentError(
                f"the rule function for {func} takes {len(required)} arguments "
                f"({', '.join(p.name for p in required)}), the operator only {len(positional)}: {func._schema}"
            )
        count = len(positional) if rest else min(len(takes), len(positional))
        _register(func, _of_function(func, function, positional[:count], parameters), uuid.uuid4().hex)
    return function


def _of_function(
    func: OpOverload, function: RuleMaker, positional: list[str], parameters: list[inspect.Parameter]
) -> Any:
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    accepted = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
    keywords = [a.name for a in func._schema.arguments if a.kwarg_only and (takes_all or a.name in accepted)]

    def make(call: Call) -> EngineRule:
        def given(name: str) -> Any:
            return _described(argument(func, call.args, call.kwargs, name))

        found = function(*map(given, positional), **{name: given(name) for name in keywords})
        rule = Rule(found) if isinstance(found, str) else found
        if not isinstance(rule, Rule):
            raise ArgumentTypeError(f"the rule function for {func} returns a dtensor.Rule or its text; got {found!r}")
        check_schema(rule, func)
        return bind(rule, call)

    return make


def _described(value: Any) -> Any:
    if isinstance(value, Spec):
        return TensorMeta(value.shape, value.dtype)
    return [_described(v) for v in value] if isinstance(value, (list, tuple)) else value


__all__ = ["TensorMeta", "fingerprint", "register_sharding"]
