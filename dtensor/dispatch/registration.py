"""Registration: sharding rules for operators that the library does not know, written by users in einsum-like text.

    register_sharding(op, "mk,kn->mn", …)  ->  Rule (parsed, checked against the schema)  ->  the engine's rule per call

A rule names the factors of each dimension of each tensor, as the tables of `rules` do; the engine's `rules.rule.Rule`
is made from it for the shapes of one call.
"""

import inspect
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import torch

from ..errors import OperatorError
from ..mesh.tensor_spec import Spec
from ..rules import RULES, Call, Output
from ..rules import Rule as EngineRule
from ..rules.call import RuleFunction, argument
from ..rules.notation import Rule, Term
from ..torch_private.core import OpOverload, overloads_of
from . import dispatch

_registered: dict[str, str] = {}
"""Operator -> what tells its registered rule from another one."""


@dataclass(frozen=True)
class TensorMeta:
    """What a rule function is told of a tensor argument: its global shape and its dtype."""

    shape: tuple[Any, ...]
    dtype: torch.dtype

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)


RuleMaker = Callable[..., "Rule | str"]
_BY_FUNCTION = object()
"""Stands for a rule that is not given: a function that is decorated gives it."""


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
    """Give an operator a sharding rule, or another one than it has.

    Args:
        op: what `torch.library.custom_op` made, an OpOverload, or an OpOverloadPacket for all its overloads. It needs a
            fake kernel (`register_fake`), as for torch.compile.
        rule: a `Rule`, or its text with the other fields of `Rule` as keywords. Without it this is a decorator for a
            function that takes the operator's arguments (tensors as their `shape`, `dtype` and `ndim`, or the first
            few of them) and returns a `Rule` or its text.

    Holds from the next call on; functions compiled before stay as they are, and a rule that is a function keeps torch
    from reusing compiled code of other processes. What the backward of the operator does is a
    matter of the operators that it is written in.

    Raises:
        TypeError: `op` is no operator.
        ValueError: the rule does not fit the operator's schema, or the operator cannot have one: it writes to its
            arguments, its result's shape depends on values, or torch takes it apart before DTensor sees it.
        OperatorError: when the operator is called, if the tensors do not fit the rule.

    >>> @torch.library.custom_op("mylib::scale_rows", mutates_args=())
    ... def scale_rows(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    ...     return x * w[:, None]
    >>> @scale_rows.register_fake
    ... def _(x, w):
    ...     return torch.empty_like(x)
    >>> dtensor.register_sharding(scale_rows, "mk,m->mk", linear=("x", "w"))

    The same by a function, for a rule that depends on the arguments:

    >>> @dtensor.register_sharding(scale_rows)
    ... def _(x, w):
    ...     return dtensor.Rule("mk,m->mk", linear=("x", "w"), blocked="k" if x.dtype is torch.int8 else "")

    Whether a rule tells the truth is found out by brute force, best in a test: every combination of placements that it
    allows, on simulated ranks, is compared with the plain call.

    >>> from dtensor.testing import Case, wrong_candidates
    >>> x, w = torch.rand(5, 4, dtype=torch.float64), torch.rand(5, dtype=torch.float64)
    >>> wrong_candidates([Case(scale_rows, (x, w))], 2)
    []
    """
    overloads = [o for o in _overloads(op) if _is_shardable(o, alone=not hasattr(op, "overloads"))]
    if not overloads:
        raise ValueError(f"{op} has no overload that returns new tensors and writes to none; nothing to register")
    if rule is _BY_FUNCTION:
        if options:
            raise TypeError(f"register_sharding takes {', '.join(options)} only together with the text of a rule")
        return lambda function: _register_function(overloads, function)
    made = Rule(rule, **options) if isinstance(rule, str) else rule
    if not isinstance(made, Rule) or (made is rule and options):
        raise TypeError(f"register_sharding takes the text of a rule and its options, or a dtensor.Rule; got {rule!r}")
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
    """The registered rules as a key for compiled code; one given as a function is like no other of any process."""
    return tuple(sorted(_registered.items()))


def _overloads(op: Any) -> list[OpOverload]:
    found = overloads_of(op)
    if not found:
        raise TypeError(
            f"register_sharding takes an operator: what torch.library.custom_op made, torch.ops.mylib.f or "
            f"torch.ops.mylib.f.default; got {op!r}"
        )
    return found


def _is_shardable(func: OpOverload, alone: bool) -> bool:
    """Whether a rule for `func` makes sense. If not that is an error for one asked for `alone`."""
    why = ""
    if func.namespace in ("dtensor", "_c10d_functional") or "_foreach_" in func.name():
        why = "is laid out by the library itself"
    elif any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments):
        why = "writes to its arguments; register one that returns a new tensor"
    elif torch.Tag.dynamic_output_shape in func.tags or torch.Tag.data_dependent_output in func.tags:
        why = "gives a result that depends on values, so its shards cannot be known beforehand"
    elif func._can_decompose():
        why = "is written in terms of others that DTensor sees in its place; register those"
    if why and alone:
        raise ValueError(f"no sharding rule for {func}: it {why}")
    return not why


def _register_function(overloads: list[OpOverload], function: RuleMaker) -> RuleMaker:
    if not callable(function):
        raise TypeError(f"register_sharding(op) decorates a function that gives rules; got {function!r}")
    parameters = list(inspect.signature(function).parameters.values())
    rest = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    takes = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    for func in overloads:
        positional = [a.name for a in func._schema.arguments if not a.kwarg_only]
        required = [p for p in takes if p.default is p.empty]
        if len(required) > len(positional):
            raise ValueError(
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
            raise TypeError(f"the rule function for {func} returns a dtensor.Rule or its text; got {found!r}")
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
    """Refuse a rule that cannot be one of `func`, whatever the shapes."""
    arguments = _tensor_arguments(func)
    returns = [str(r.type) for r in func._schema.returns if "Tensor" in str(r.type)]
    if len(rule.inputs) != len(arguments):
        raise ValueError(
            f"{rule.text!r} has {len(rule.inputs)} operands, {func} takes {len(arguments)} tensors "
            f"({', '.join(arguments)}): {func._schema}; write a term for each"
        )
    if len(rule.outputs) != len(returns):
        raise ValueError(
            f"{rule.text!r} has {len(rule.outputs)} outputs, {func} returns {len(returns)} tensors: {func._schema}; "
            "write a term for each"
        )
    if len(func._schema.returns) > 1 and any("List" in t for t in returns):
        raise ValueError(
            f"{func} returns a list of tensors beside other results, which no rule can say: {func._schema}"
        )
    names = [n for group in rule.linear_sets for n in group] + list(rule.addends)
    if unknown := [n for n in names if n not in arguments]:
        raise ValueError(f"{func} has no tensor argument {unknown[0]!r}; it takes {', '.join(arguments)}")
    for name, term in zip(arguments, rule.inputs):
        if name in rule.addends and (reduced := [f for f in term if f in rule.reductions]):
            raise ValueError(
                f"{rule.text!r}: {name} is added to the result of reducing factor {reduced[0]!r}, so it cannot have "
                "that factor itself; write 1 there, or leave added out"
            )


def _engine_rule(rule: Rule, call: Call) -> EngineRule:
    """What the engine consumes, for the shapes of one call."""
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
    """A rule laid over the tensors of one call."""

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
        """One factor per dimension: `...` written out, its dimensions numbered from the last."""
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
        """Note the size of a factor; a length of 1 gives way to any other."""
        known = self.sizes.setdefault(factor, size) if factor else size
        if _same(known, size) or _is_one(size):
            return
        if not _is_one(known):
            raise self._mismatch(name, dim, factor, size, known)
        self.sizes[factor] = size

    def _mismatch(self, name: str, dim: int, factor: str, size: Any, known: Any) -> OperatorError:
        return OperatorError(
            f"{self.func}: by the rule {self.rule.text!r} dimension {dim} of {name} is of factor "
            f"{factor!r}, of length {known}, but its length is {size}; correct the rule (1 for a dimension that is "
            "never sharded) or the call"
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
        """Whether only even shards of the factor will do: averages weigh all alike, extrema have none of nothing."""
        return self.rule.reductions.get(factor, "sum") != "sum"


def _minor(factor: str) -> str:
    """A second factor, of length 1, of a dimension: the engine cuts a dimension of two factors evenly or not at all."""
    return f"{factor}'"


def _is_one(size: Any) -> bool:
    return isinstance(size, int) and size == 1


def _same(a: Any, b: Any) -> bool:
    return a is b or a == b


__all__ = ["TensorMeta", "fingerprint", "register_sharding"]
