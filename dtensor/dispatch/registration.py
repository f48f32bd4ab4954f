"""Registers sharding rules that users write, in einsum-like text, for operators that the library does not know.

    register_sharding(op, "mk,kn->mn", …)  ->  Rule (parsed, checked against the schema)  ->  the engine's rule per call

A rule names the factors of each dim of each tensor, as the tables in `dtensor.rules` do. For the shapes of each call it
is turned into the engine's `dtensor.rules.rule.Rule`.
"""

import inspect
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import torch

from ..errors import ArgumentError, ArgumentTypeError, OperatorError, shown
from ..mesh.tensor_spec import Spec
from ..rules import RULES, Call, Output
from ..rules import Rule as EngineRule
from ..rules.call import RuleFunction, argument
from ..rules.notation import Rule, Term
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
    linear: str | Sequence[str | Sequence[str]] = ...,
    added: str | Sequence[str] = ...,
    blocked: str | Iterable[str] = ...,
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
        _check_schema(made, func)
    for func in overloads:
        _register(func, lambda call: _engine_rule(made, call), repr(made))
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
        _check_schema(rule, func)
        return _engine_rule(rule, call)

    return make


def _described(value: Any) -> Any:
    if isinstance(value, Spec):
        return TensorMeta(value.shape, value.dtype)
    return [_described(v) for v in value] if isinstance(value, (list, tuple)) else value


def _tensor_arguments(func: OpOverload) -> list[str]:
    return [a.name for a in func._schema.arguments if "Tensor" in str(a.type)]


def _check_schema(rule: Rule, func: OpOverload) -> None:
    """Raise ValueError if the rule cannot fit `func`, whatever the shapes."""
    arguments = _tensor_arguments(func)
    returns = [str(r.type) for r in func._schema.returns if "Tensor" in str(r.type)]
    if len(rule.inputs) != len(arguments):
        raise ArgumentError(
            f"{rule.text!r} has {len(rule.inputs)} operands, {func} takes {len(arguments)} tensors "
            f"({', '.join(arguments)}): {func._schema}; write a term for each"
        )
    if len(rule.outputs) != len(returns):
        raise ArgumentError(
            f"{rule.text!r} has {len(rule.outputs)} outputs, {func} returns {len(returns)} tensors: {func._schema}; "
            "write a term for each"
        )
    if len(func._schema.returns) > 1 and any("List" in t for t in returns):
        raise ArgumentError(
            f"{func} returns a list of tensors beside other results, which no rule can express: {func._schema}"
        )
    names = [n for group in rule.linear_sets for n in group] + list(rule.addends)
    if unknown := [n for n in names if n not in arguments]:
        raise ArgumentError(f"{func} has no tensor argument {unknown[0]!r}; it takes {', '.join(arguments)}")
    for name, term in zip(arguments, rule.inputs):
        if name in rule.addends and (reduced := [f for f in term if f in rule.reductions]):
            raise ArgumentError(
                f"{rule.text!r}: {name} is added to the result of reducing factor {reduced[0]!r}, so it cannot have "
                "that factor itself; write 1 there, or leave added out"
            )


def _engine_rule(rule: Rule, call: Call) -> EngineRule:
    """The engine's rule for the shapes of one call."""
    func = call.func
    terms = dict(zip(_tensor_arguments(func), rule.inputs))
    names = [a.name for a in func._schema.arguments]
    operands: list[tuple[str, Term, Spec]] = []
    for name, value in [*zip(names, call.args), *call.kwargs.items()]:
        items = value if isinstance(value, (list, tuple)) else [value]
        operands += [(name, terms[name], s) for s in items if isinstance(s, Spec)]
    tensors = iter(rule.outputs * len(call.outputs) if len(rule.outputs) == 1 else rule.outputs)
    outputs = [(f"output {i}", next(tensors), o) if o is not None else None for i, o in enumerate(call.outputs)]
    return _Fitting(rule, func, operands, outputs).engine_rule()


@dataclass
class _Fitting:
    """Matches a rule to the tensors of one call.

    Attributes:
        operands: (argument name, term of the rule, spec) for each operand.
        outputs: (name for messages, term, output) for each output, None for one that is not a tensor.
        sizes: global size of each factor.
    """

    rule: Rule
    func: OpOverload
    operands: list[tuple[str, Term, Spec]]
    outputs: list[tuple[str, Term, Output] | None]
    sizes: dict[str, Any] = field(default_factory=dict)

    def engine_rule(self) -> EngineRule:
        expanded = [(name, self._letters(name, term, s), s) for name, term, s in self.operands]
        for name, letters, s in expanded:
            for dim, factor in enumerate(letters):
                self._meet(name, dim, factor, s.shape[dim])
        inputs = tuple(tuple(self._dim(f, s.shape[i]) for i, f in enumerate(t)) for _, t, s in expanded)
        outputs = tuple(None if o is None else self._output(*o) for o in self.outputs)
        minor = {_minor(f): 1 for f in self.rule.reductions if self._even(f) and f in self.sizes}
        groups = [self._indices(g) for g in self.rule.linear_sets]
        return EngineRule(
            inputs,
            outputs,
            {**self.sizes, **minor},
            reduce=self.rule.reductions,
            linear=tuple(g for g in groups if g),
            blocked=self.rule.whole | frozenset(minor),
            addends=self._indices(self.rule.addends),
        )

    def _indices(self, names: Iterable[str]) -> frozenset[int]:
        return frozenset(i for i, (name, _, _) in enumerate(self.operands) if name in names)

    def _letters(self, name: str, term: Term, tensor: Spec | Output) -> list[str]:
        """One factor per dim; `...` is expanded, its dims numbered from the last."""
        extra = tensor.ndim - (len(term) - ("..." in term))
        if extra < 0 or (extra and "..." not in term):
            raise OperatorError(
                f"{self.func}: the rule {self.rule.text!r} gives {name} {len(term) - ('...' in term)} dimensions"
                f"{' or more' if '...' in term else ''}, but its shape is {list(tensor.shape)}; "
                "correct the rule given to dtensor.register_sharding"
            )
        found: list[str] = []
        for part in term:
            found += [f"...{k}" for k in range(extra, 0, -1)] if part == "..." else [part]
        return found

    def _meet(self, name: str, dim: int, factor: str, size: Any) -> None:
        """Record the size of a factor; a length of 1 gives way to any other."""
        known = self.sizes.setdefault(factor, size) if factor else size
        if _same(known, size) or _is_one(size):
            return
        if not _is_one(known):
            raise self._mismatch(name, dim, factor, size, known)
        self.sizes[factor] = size

    def _mismatch(self, name: str, dim: int, factor: str, size: Any, known: Any) -> OperatorError:
        return OperatorError(
            f"{self.func}: by the rule {self.rule.text!r} dimension {dim} of {name} is factor "
            f"{factor!r}, of length {known}, but its length is {size}; correct the rule (write 1 for a dimension that "
            "is never sharded) or the call"
        )

    def _dim(self, factor: str, size: Any) -> tuple[str, ...]:
        if not factor or (_is_one(size) and not _is_one(self.sizes[factor])):
            return ()
        return (factor, _minor(factor)) if self._even(factor) else (factor,)

    def _output(self, name: str, term: Term, out: Output) -> tuple[tuple[str, ...], ...]:
        letters = self._letters(name, term, out)
        for dim, factor in enumerate(letters):
            if factor and not _same(self.sizes.get(factor), out.shape[dim]):
                raise self._mismatch(name, dim, factor, out.shape[dim], self.sizes.get(factor))
        return tuple(self._dim(f, s) for f, s in zip(letters, out.shape))

    def _even(self, factor: str) -> bool:
        """Whether the factor needs even shards: averages weigh all shards equally, and an empty one has no extremum."""
        return self.rule.reductions.get(factor, "sum") != "sum"


def _minor(factor: str) -> str:
    """A second factor, of length 1, for a dim: the engine shards a dim of two factors evenly or not at all."""
    return f"{factor}'"


def _is_one(size: Any) -> bool:
    return isinstance(size, int) and size == 1


def _same(a: Any, b: Any) -> bool:
    return a is b or a == b


__all__ = ["TensorMeta", "fingerprint", "register_sharding"]
