"""Applies a rule in the notation to the tensors of a call, and registers the library's rules.

    Rule("mk,kn->mn"), a call on tensors of (5, 4) and (4, 3)  ->  rule.Rule: the factors of each dim, and their sizes

All rules go through `bind`, the library's and users'. A rule that does not fit its operator's schema or the tensors of
a call is an error.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cache, lru_cache, wraps
from typing import Any

from ..errors import ArgumentError, OperatorError
from ..mesh.tensor_spec import Spec
from ..torch_private.core import OpOverload
from ..torch_private.symbolic_sizes import differ, same_size
from . import rule as engine
from .call import BY_VALUE, RULES, Call, RuleFunction, positions
from .notation import MANY, Argument, LibraryRule, Rule, Term, factors_of, parse, several
from .rule import Dims

EVEN = ("avg", "max", "min")
"""Reduce ops for which a factor is sharded evenly or not at all, unless `local` sees to it: averages weigh all shards
equally, and an empty one has no extremum."""

RuleMaker = Callable[[Call], Rule | str]


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
    if len(text.outputs) != tensors.returns and (tensors.returns or text.outputs != ((),)):
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


@lru_cache(4096)
def plan_of(
    text: str, places: tuple[int, ...], ndims: tuple[int | None, ...], gone: frozenset[str]
) -> tuple[tuple[Dims | None, ...], tuple[str, ...], tuple[str, ...]]:
    """What a text gives for tensors of certain numbers of dims.

    Args:
        text: the text of the rule.
        places: for each operand the place of its term; for each output `~place`.
        ndims: their numbers of dims; None for an output that is no tensor.
        gone: factors that are left out.

    Returns:
        The factors of each dim, None for a tensor with other dims than its term; all factors of operands, in the order
        in which they are tried; and those of `...`.
    """
    parsed = parse(text)
    terms = [parsed.inputs[p] if p >= 0 else parsed.outputs[~p] for p in places]
    dims = [None if n is None else _expanded(t, n, gone) for t, n in zip(terms, ndims)]
    taken = [(t, n, d) for t, n, d, p in zip(terms, ndims, dims, places) if p >= 0]
    count = max([(n or 0) - len(t) + 1 for t, n, _ in taken if "..." in t], default=0)
    many = [f"...{k}" for k in range(count, 0, -1)]
    order: dict[str, None] = {}
    for f in [f for *_, d in taken for factors in d or () for f in factors]:
        order.update(dict.fromkeys(many if f in many else [f]))
    return tuple(dims), tuple(order), tuple(many)


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


def bind(rule: Rule, call: Call) -> engine.Rule:
    """The engine's rule of one call.

    Raises:
        ValueError: the rule does not fit the operator's schema.
        OperatorError: the tensors of the call have other dims than the rule.
    """
    return _Binding(rule, call).bound()


class _Binding:
    """Matches a rule to the tensors of one call.

    Attributes:
        arguments: the place of each tensor argument, by its name.
        at: for each operand the place of its argument.
        tensors: operands and outputs, None for an output that is no tensor.
        places: for each of them the place of its term; for outputs `~place`.
        others: places of arguments that are neither tensors of the call nor None, such as numbers.
        sizes: global size of each factor.
        dims: the factors of each dim of operands and outputs.
        many: the factors of `...`.
        empty: outputs that stand for no result, as empty tensors.
    """

    def __init__(self, rule: Rule, call: Call) -> None:
        self.rule: Rule = rule
        self.call: Call = call
        self.arguments: Mapping[str, int] = signature(call.func).arguments
        if len(rule.parsed.inputs) != len(self.arguments):
            check_schema(rule, call.func)
        self.at: list[int] = []
        self.others: set[int] = set()
        for name, value in (*zip(positions(call.func), call.args), *call.kwargs.items()):
            if value is not None and name in self.arguments:
                place = self.arguments[name]
                for item in value if isinstance(value, (list, tuple)) else (value,):
                    if isinstance(item, Spec):
                        self.at.append(place)
                    elif item is not None:
                        self.others.add(place)
        given = {f: call[s] if isinstance(s, str) else s for f, s in rule.sizes.items()}
        self.sizes: dict[str, Any] = {f: s for f, s in given.items() if not same_size(s, 1)}
        self.tensors: tuple[Any, ...] = (*call.operands, *call.wanted)
        count, results = len(rule.parsed.outputs), signature(call.func).results
        if count != max(len(results), 1) and results:
            check_schema(rule, call.func)
        outputs = range(len(self.tensors) - len(self.at))
        places = [*self.at, *(~results.index(k) if count > 1 and k in results else ~0 for k in outputs)]
        ndims = tuple([None if x is None else x.ndim for x in self.tensors])
        gone = frozenset([f for f in given if f not in self.sizes])
        dims, order, self.many = plan_of(rule.text, tuple(places), ndims, gone)
        self.places: list[int] = places
        self.dims: list[Dims | None] = list(dims)
        self.empty: set[int] = set()
        self._measure(order)

    def _measure(self, order: Iterable[str]) -> None:
        """Find the sizes of all factors, and check that the dims agree."""
        known, shared = dict(self.sizes), list[tuple[tuple[str, ...], Any]]()
        operands = len(self.at)
        for k, tensor in enumerate(self.tensors):
            if tensor is None:
                continue
            takes, dims, wrong = k < operands, self.dims[k], None
            if dims is None:
                wrong = self._misfit(k, tensor.shape)
            for dim, (factors, size) in enumerate(zip(dims or (), tensor.shape)):
                if len(factors) > 1:
                    shared.append((factors, size))
                    continue
                for f in factors:
                    before = known.get(f)
                    if before is None:
                        known.update({f: size} if takes or f in order else {})
                    elif before is size or same_size(before, size) or (takes and same_size(size, 1)):
                        continue
                    elif takes and same_size(before, 1):
                        known[f] = size
                    elif differ(before, size):
                        wrong = self._mismatch(k, dim, f, before, size)
            if wrong is not None:
                if tuple(tensor.shape) != (0,):
                    raise wrong
                self.dims[k] = ((),)
                self.empty.update([] if takes else [k - operands])
        for factors, size in shared:
            unknown = [f for f in factors if f not in known]
            if len(unknown) == 1:
                for f in factors:
                    size = size // known[f] if f in known else size
                known[unknown[0]] = size
        late = self._factors(self.rule.last) if isinstance(self.rule, LibraryRule) else []
        ordered = [*(f for f in order if f not in late), *late, *known]
        self.sizes.update({f: known[f] for f in ordered if f in known})

    def bound(self) -> engine.Rule:
        rule = self.rule
        even: list[str] = []
        if not (isinstance(rule, LibraryRule) and rule.local):
            even = self._factors([f for f, op in rule.reductions.items() if op in EVEN])
        blocked = self._factors(rule.blocked)
        fields = self._further(rule) if isinstance(rule, LibraryRule) else {}
        rounds = isinstance(rule, LibraryRule) and rule.rounds and not all(map(_is_real, self.call.operands))
        if self.empty:
            fields["whole"] = fields.get("whole", frozenset[int]()) | self.empty
        dims = [None if x is None else self._kept(d or (), x.shape, even) for d, x in zip(self.dims, self.tensors)]
        return engine.Rule(
            tuple(dims[: len(self.at)]),  # pyright: ignore[reportArgumentType]
            tuple(dims[len(self.at) :]),
            {**self.sizes, **{f"{f}'": 1 for f in even}},
            reduce={g: op for f, op in rule.reductions.items() for g in self._factors((f,))},
            linear=() if rounds else tuple([g for g in map(self._operands, rule.groups) if g]),
            blocked=frozenset([*blocked, *(f"{f}'" for f in even)]),
            addends=self._operands(several(rule.added)),
            **fields,
        )

    def _further(self, rule: LibraryRule) -> dict[str, Any]:
        """The fields of the engine's rule that only the library's own rules have."""
        fields: dict[str, Any] = {
            "local": rule.local,
            "shape_arg": rule.shape_arg,
            "unread": self._operands(several(rule.unread)),
            "written": self._operands(several(rule.written)),
        }
        if rule.keeps:
            kept = [(self._operands(several(group)), ops) for group, ops in rule.keeps]
            fields["keeps"] = tuple([(group, ops) for group, ops in kept if group])
        outputs = [(k, ~place) for k, place in enumerate(self.places[len(self.at) :])]
        if rule.whole:
            pairs = [(w[0], g) for w in rule.whole if isinstance(w, tuple) for g in self._factors((w[1],))]
            alone = [k for k, i in outputs if i in rule.whole]
            fields["whole"] = frozenset([*alone, *((k, g) for k, i in outputs for j, g in pairs if i == j)])
        if rule.home:
            homes = {k: self._operands((rule.home[i],)) for k, i in outputs if i in rule.home and self.call.wanted[k]}
            fields["home"] = {k: min(operands) for k, operands in homes.items() if operands}
        if rule.across is not None:
            fields["across"] = frozenset(self._factors(rule.across))
        if rule.all_reduces:
            fields["all_reduces"] = {g: n for f, n in rule.all_reduces.items() for g in self._factors((f,))}
        if rule.refuses_empty:
            fields["refuses_empty"] = frozenset(self._factors(rule.refuses_empty))
        return fields

    def _kept(self, dims: Dims, shape: tuple[Any, ...], even: list[str]) -> Dims:
        """The factors of dims, without those of broadcast dims of length 1 and of dims with one of unknown size.

        A factor that needs even shards gets another one, of length 1, beside it: the engine shards a dim of two factors
        evenly or not at all.
        """
        sizes, kept = self.sizes, list[tuple[str, ...]]()
        for factors, size in zip(dims, shape):
            for f in factors:
                full = sizes.get(f)
                if full is None or (full is not size and same_size(size, 1) and not same_size(full, 1)):
                    factors = ()
                elif f in even:
                    factors = (f, f"{f}'")
            kept.append(factors)
        return tuple(kept)

    def _factors(self, given: str | Iterable[str]) -> list[str]:
        """Factors of the call: those given, for `...` one for each of its dims."""
        if not given:
            return []
        found: list[str] = []
        for f in factors_of(given):
            found += self.many if f == "..." else [f]
        return found

    def _operands(self, arguments: Iterable[Argument]) -> frozenset[int]:
        """The operands that are these arguments, without those that are None; none at all if one is a number, say."""
        places = [a if isinstance(a, int) else self.arguments.get(a, -1) for a in arguments]
        if -1 in places:
            check_schema(self.rule, self.call.func)
        if not places or not self.others.isdisjoint(places):
            return frozenset()
        return frozenset([k for k, place in enumerate(self.at) if place in places])

    def _name(self, tensor: int) -> str:
        count = len(self.at)
        return list(self.arguments)[self.at[tensor]] if tensor < count else f"output {tensor - count}"

    def _misfit(self, tensor: int, shape: tuple[Any, ...]) -> OperatorError:
        parsed, place = self.rule.parsed, self.places[tensor]
        term = parsed.inputs[place] if place >= 0 else parsed.outputs[~place]
        dims = sum(item not in MANY for item in term)
        more = " or more" if dims < len(term) else ""
        return OperatorError(
            f"{self.call.func}: the rule {self.rule.text!r} gives {self._name(tensor)} {dims} dimensions{more}, but its "
            f"shape is {list(shape)}; correct the rule given to dtensor.register_sharding"
        )

    def _mismatch(self, tensor: int, dim: int, factor: str, known: Any, size: Any) -> OperatorError:
        return OperatorError(
            f"{self.call.func}: by the rule {self.rule.text!r} dimension {dim} of {self._name(tensor)} is factor "
            f"{factor!r}, of length {known}, but its length is {size}; correct the rule (write 1 for a dimension that "
            "is never sharded) or the call"
        )


def _is_real(tensor: Spec) -> bool:
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex


@cache
def _of_text(text: str) -> Rule:
    return Rule(text)


def rule_for(*names: str, by_value: bool = False) -> Callable[[RuleMaker], RuleFunction]:
    """Register a function that gives the rule of a call, or its text; a name without namespace is an aten operator.

    Args:
        names: the operators.
        by_value: whether the rule depends on the value of a float; see `BY_VALUE`.
    """

    def register(function: RuleMaker) -> RuleFunction:
        @wraps(function)
        def rule(call: Call) -> engine.Rule:
            made = function(call)
            return bind(_of_text(made) if isinstance(made, str) else made, call)

        for name in names:
            full = name if "::" in name else f"aten::{name}"
            RULES[full] = rule
            BY_VALUE.update({full} if by_value else ())
        return rule

    return register


def rule_table(module: str, table: Mapping[str, Rule | str], local: Callable[[Any], Any] | None = None) -> None:
    """Register a table from operator to rule; an entry for an overload takes precedence over one without.

    Args:
        module: the name of the module of the table.
        table: the rules, or their texts.
        local: `local` of all of them.
    """
    overloads: dict[str, dict[str, Rule]] = {}
    for key, value in table.items():
        rule = Rule(value) if isinstance(value, str) else value
        if local is not None:
            rule = LibraryRule(**{f.name: getattr(rule, f.name) for f in fields(rule) if f.init} | {"local": local})
        name, _, overload = key.partition(".")
        overloads.setdefault(name, {})[overload] = rule
    for name, rules in overloads.items():
        TABLES[name] = rules

        def by_table(call: Call, rules: dict[str, Rule] = rules) -> Rule:
            rule = rules.get(call.func._overloadname) or rules.get("")
            assert rule is not None, f"{call.func} has no rule in the table of {module}, which has {', '.join(rules)}"
            return rule

        by_table.__module__ = module
        rule_for(name)(by_table)


TABLES: dict[str, dict[str, Rule]] = {}
"""What the tables hold: operator -> overload, or "" for all -> rule."""

__all__ = ["TABLES", "bind", "check_schema", "rule_for", "rule_table", "signature"]
