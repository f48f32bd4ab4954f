"""Plans a rule for calls of one kind: with tensors for the same arguments, and of the same numbers of dims.

    Rule("...,...->..."), two operands of 2 and 1 dims  ->  Plan: the factors of each dim, what is linear

A plan is made once and kept with its rule. `bind` adds the sizes of a call.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from ..errors import ArgumentError
from ..torch_private.core import OpOverload
from .notation import MANY, Argument, LibraryRule, Rule, Term, factors_of, several
from .rule import Dims, Inside

EVEN = ("avg", "max", "min")
"""Reduce ops for which a factor is sharded evenly or not at all, unless `local` sees to it: averages weigh all shards
equally, and an empty one has no extremum."""


@dataclass(frozen=True)
class Signature:
    """The tensors that an operator takes and returns; a list of them counts as one.

    Attributes:
        arguments: the place of each tensor argument, by its name.
        results: the places of tensors among all that it returns.
    """

    arguments: Mapping[str, int]
    results: tuple[int, ...]

    @property
    def returns(self) -> int:
        """The number of tensors that it returns."""
        return len(self.results)


@cache
def signature(func: OpOverload) -> Signature:
    """The signature of an operator."""
    schema = func._schema
    names = [a.name for a in schema.arguments if "Tensor" in str(a.type)]
    results = [i for i, r in enumerate(schema.returns) if "Tensor" in str(r.type)]
    return Signature({n: i for i, n in enumerate(names)}, tuple(results))


def check_schema(rule: Rule, func: OpOverload) -> None:
    """Raise ValueError if a rule cannot fit `func`, whatever the shapes."""
    tensors, text = signature(func), rule.parsed
    if len(text.inputs) != len(tensors.arguments):
        raise ArgumentError(
            f"{rule.text!r} has {len(text.inputs)} operands, {func} takes {len(tensors.arguments)} tensors "
            f"({', '.join(tensors.arguments)}): {func._schema}; write a term for each"
        )
    if len(text.outputs) != max(tensors.returns, 1):
        raise ArgumentError(
            f"{rule.text!r} has {len(text.outputs)} outputs, {func} returns {tensors.returns} tensors: "
            f"{func._schema}; write a term for each"
        )
    if len(func._schema.returns) > 1 and any("List" in str(r.type) for r in func._schema.returns):
        raise ArgumentError(
            f"{func} returns a list of tensors beside other results, which no rule can express: {func._schema}"
        )
    for argument in rule.arguments():
        if isinstance(argument, str) and argument not in tensors.arguments:
            raise ArgumentError(f"{func} has no tensor argument {argument!r}; it takes {', '.join(tensors.arguments)}")
    for argument in several(rule.added):
        place = tensors.arguments[argument] if isinstance(argument, str) else argument
        if reduced := [f for item in text.inputs[place] for f in rule.reductions if f == item or f in item]:
            raise ArgumentError(
                f"{rule.text!r}: {argument} is added to the result of reducing factor {reduced[0]!r}, so it cannot "
                "have that factor itself; write 1 there, or leave added out"
            )


class Kind(NamedTuple):
    """What a plan is for.

    Attributes:
        func: the operator.
        at: for each operand the place of its argument.
        others: places of arguments that are neither tensors of the call nor None, such as numbers.
        ndims: the number of dims of each operand and output; None for an output that is no tensor.
        gone: factors of a given size of 1, which are left out.
        linear: whether the operator is linear where its rule says so, as it rounds no operand.
    """

    func: OpOverload
    at: tuple[int, ...]
    others: frozenset[int]
    ndims: tuple[int | None, ...]
    gone: frozenset[str]
    linear: bool


@dataclass(frozen=True)
class Plan:
    """A rule for calls of one kind.

    Attributes:
        terms: the term of each operand and output.
        dims: the factors of each dim of these; None for a tensor with other dims than its term.
        order: the factors, in the order in which they are tried: those whose size is given, those that some dim has
            alone, others, and those that come last.
        taken: the factors of operands.
        even: the factors that need even shards.
        fields: the fields of `rule.Rule` but for factors and sizes.
    """

    terms: tuple[Term, ...]
    dims: tuple[Dims | None, ...]
    order: tuple[str, ...]
    taken: frozenset[str]
    even: tuple[str, ...]
    fields: Mapping[str, Any]


def plan(rule: Rule, kind: Kind) -> Plan:
    """The plan of a rule for calls of one kind.

    Raises:
        ValueError: the rule does not fit the operator's schema.
    """
    return _Planner(rule, kind).plan()


class _Planner:
    """Resolves what a rule says of arguments and factors for calls of one kind.

    Attributes:
        terms, dims: as in `Plan`.
        results: for each output the place of its term.
        many: the factors of `...`.
    """

    def __init__(self, rule: Rule, kind: Kind) -> None:
        self.rule: Rule = rule
        self.kind: Kind = kind
        check_schema(rule, kind.func)
        parsed, results = rule.parsed, signature(kind.func).results
        outputs = range(len(kind.ndims) - len(kind.at))
        several_terms = len(parsed.outputs) > 1
        self.results: list[int] = [results.index(k) if several_terms and k in results else 0 for k in outputs]
        self.terms: list[Term] = [parsed.inputs[p] for p in kind.at] + [parsed.outputs[i] for i in self.results]
        self.dims: list[Dims | None] = [
            None if n is None else _expanded(t, n, kind.gone) for t, n in zip(self.terms, kind.ndims)
        ]
        counts = [(n or 0) - len(t) + 1 for t, n in zip(self.terms[: len(kind.at)], kind.ndims) if "..." in t]
        self.many: list[str] = [f"...{k}" for k in range(max(counts, default=0), 0, -1)]

    def plan(self) -> Plan:
        rule = self.rule
        ins = [d for tensor in self.dims[: len(self.kind.at)] for d in tensor or ()]
        all_dims = [d for tensor in self.dims for d in tensor or ()]
        alone = [f for d in all_dims if len(d) == 1 for f in d]
        alone = [g for f in alone for g in (self.many if f in self.many else [f])]
        factors = [f for f in rule.sizes if f not in self.kind.gone] + alone + [f for d in all_dims for f in d]
        even: list[str] = []
        if not (isinstance(rule, LibraryRule) and rule.local):
            even = self._factors([f for f, op in rule.reductions.items() if op in EVEN])
        linear = rule.groups if self.kind.linear else ()
        fields = {
            "reduce": {g: op for f, op in rule.reductions.items() for g in self._factors([f])},
            "linear": tuple([g for g in map(self._operands, linear) if g]),
            "blocked": frozenset([*self._factors(factors_of(rule.blocked)), *map(beside, even)]),
            "addends": self._operands(several(rule.added)),
            "whole": frozenset[Any](),
        }
        last: list[str] = []
        if isinstance(rule, LibraryRule):
            fields |= self._further(rule)
            last = self._factors(factors_of(rule.last))
        order = dict.fromkeys([*(f for f in factors if f not in last), *last])
        taken = frozenset([f for d in ins for f in d])
        return Plan(tuple(self.terms), tuple(self.dims), tuple(order), taken, tuple(even), fields)

    def _further(self, rule: LibraryRule) -> dict[str, Any]:
        """The fields that only the library's own rules have."""
        outputs = list(enumerate(self.results))
        made = [n is not None for n in self.kind.ndims[len(self.kind.at) :]]
        kept = [(self._operands(several(group)), dict(ops)) for group, ops in rule.keeps]
        pairs = [(w[0], g) for w in rule.whole if isinstance(w, tuple) for g in self._factors([w[1]])]
        homes = {k: self._operands([rule.home[i]]) for k, i in outputs if i in rule.home and made[k]}
        factors, count = rule.all_reduces
        return {
            "keeps": tuple([(group, ops) for group, ops in kept if group]),
            "unread": self._operands(several(rule.unread)),
            "written": self._operands(several(rule.written)),
            "own_inputs": self._operands(several(rule.own_inputs)),
            "own_outputs": frozenset([k for k, i in outputs if i in rule.own_outputs]),
            "whole": frozenset([k for k, i in outputs if i in rule.whole])
            | {(k, g) for k, i in outputs for j, g in pairs if i == j},
            "home": {k: min(operands) for k, operands in homes.items() if operands},
            "local": rule.local,
            "across": None if rule.across is None else frozenset(self._factors(factors_of(rule.across))),
            "all_reduces": dict.fromkeys(self._factors(factors_of(factors)), count),
            "refuses_empty": frozenset(self._factors(factors_of(rule.refuses_empty))),
            "shape_arg": rule.shape_arg,
            "together": tuple(rule.together),
            "inside": self._inside(rule),
            "busiest": rule.busiest,
        }

    def _inside(self, rule: LibraryRule) -> dict[tuple[str, ...], tuple[Inside, ...]]:
        found: dict[tuple[str, ...], tuple[Inside, ...]] = {}
        for factors, op, arguments, often in rule.inside:
            key = tuple(self._factors(factors_of(factors)))
            found[key] = (*found.get(key, ()), (op, tuple(sorted(self._operands(arguments))), often))
        return found

    def _factors(self, given: Iterable[str]) -> list[str]:
        """Factors of the call: for `...` one for each of its dims."""
        return [g for f in given for g in (self.many if f == "..." else [f])]

    def _operands(self, arguments: Iterable[Argument]) -> frozenset[int]:
        """The operands that are these arguments, without those that are None; none at all if one is a number, say."""
        of = signature(self.kind.func).arguments
        places = [a if isinstance(a, int) else of[a] for a in arguments]
        if not self.kind.others.isdisjoint(places):
            return frozenset()
        return frozenset([k for k, place in enumerate(self.kind.at) if place in places])


def beside(factor: str) -> str:
    """A second factor, of length 1, for dims of one that needs even shards: the engine shards a dim of two factors
    evenly or not at all."""
    return f"{factor}'"


def _expanded(term: Term, ndim: int, gone: frozenset[str]) -> Dims | None:
    rest = ndim - sum(item not in MANY for item in term)
    if rest < 0 or (rest and not any(item in MANY for item in term)):
        return None
    dims: list[tuple[str, ...]] = []
    for item in term:
        if item == "...":
            dims += [(f"...{k}",) for k in range(rest, 0, -1)]
        elif item == "*":
            dims += [()] * rest
        else:
            dims.append(tuple([f for f in item if f not in gone]))
    return tuple(dims)


__all__ = ["Kind", "Plan", "Signature", "beside", "check_schema", "plan", "signature"]
