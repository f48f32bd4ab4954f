"""Applies a rule in the notation to the tensors of a call, and registers the library's rules.

    Rule("mk,kn->mn"), a call on tensors of (5, 4) and (4, 3)  ->  rule.Rule: the factors of each dim, and their sizes

All rules go through `bind`, the library's and users'. A rule that does not fit its operator's schema or the tensors of
a call is an error.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import cache, wraps
from typing import Any

from ..errors import OperatorError
from ..mesh.tensor_spec import Spec
from ..torch_private.symbolic_sizes import differ, same_size
from . import rule as engine
from .call import BY_VALUE, RULES, Call, Output, RuleFunction, positions
from .notation import MANY, LibraryRule, Rule
from .plan import Kind, Plan, beside, plan, signature
from .rule import Dims

RuleMaker = Callable[[Call], Rule | str]


def bind(rule: Rule, call: Call) -> engine.Rule:
    """The engine's rule of one call.

    Raises:
        ValueError: the rule does not fit the operator's schema.
        OperatorError: the tensors of the call have other dims than the rule.
    """
    tensors = (*call.operands, *call.wanted)
    given = {f: call[s] if isinstance(s, str) else s for f, s in rule.sizes.items()} if rule.sizes else {}
    kind = _kind(rule, call, tensors, given)
    steps = rule.plans.get(kind)
    if steps is None:
        steps = rule.plans[kind] = plan(rule, kind)
    dims, sizes, empty = _measured(rule, steps, kind, tensors, {f: s for f, s in given.items() if f not in kind.gone})
    further = steps.fields if not empty else {**steps.fields, "whole": steps.fields["whole"] | empty}
    count = len(kind.at)
    return engine.Rule(dims[:count], dims[count:], sizes, **further)  # pyright: ignore[reportArgumentType]


def _kind(rule: Rule, call: Call, tensors: tuple[Any, ...], given: Mapping[str, Any]) -> Kind:
    arguments = signature(call.func).arguments
    at: list[int] = []
    others: set[int] = set()
    for name, value in (*zip(positions(call.func), call.args), *call.kwargs.items()):
        if value is not None and name in arguments:
            place = arguments[name]
            for item in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(item, Spec):
                    at.append(place)
                elif item is not None:
                    others.add(place)
    ndims = tuple([None if x is None else len(x.shape) for x in tensors])
    gone = frozenset([f for f, size in given.items() if same_size(size, 1)]) if given else frozenset[str]()
    rounds = isinstance(rule, LibraryRule) and rule.rounds
    linear = not rounds or all(o.dtype.is_floating_point or o.dtype.is_complex for o in call.operands)
    return Kind(call.func, tuple(at), frozenset(others), ndims, gone, linear)


def _measured(
    rule: Rule, steps: Plan, kind: Kind, tensors: tuple[Any, ...], sizes: dict[str, Any]
) -> tuple[tuple[Dims | None, ...], dict[str, Any], set[int]]:
    """The factors of the dims of tensors; the factors' sizes; and the outputs that stand for no result.

    A dim of length 1 gives way to any other. An empty tensor with other dims than its term stands for none.
    """
    count, exact = len(kind.at), not steps.even
    shared: list[tuple[tuple[str, ...], Any]] = []
    absent: set[int] = set()
    for k, tensor in enumerate(tensors):
        if tensor is None:
            continue
        wrong = _misfit(rule, steps, kind, k, tensor) if steps.dims[k] is None else None
        for dim, (factors, size) in enumerate(zip(steps.dims[k] or (), tensor.shape)):
            if len(factors) > 1:
                shared.append((factors, size))
                continue
            for f in factors:
                known = sizes.get(f)
                if known is size:
                    continue
                if known is None:
                    exact = exact and f in steps.taken
                    if f in steps.taken:
                        sizes[f] = size
                elif same_size(known, size):
                    continue
                elif k < count and (same_size(size, 1) or (same_size(known, 1) and _may_broadcast(tensor, f))):
                    exact = False
                    sizes[f] = known if same_size(size, 1) else size
                elif wrong is None and differ(known, size):
                    wrong = _mismatch(rule, kind, k, dim, f, known, size)
        if wrong is not None:
            if tuple(tensor.shape) != (0,):
                raise wrong
            absent.add(k)
    for factors, size in shared:
        unknown = [f for f in factors if f not in sizes]
        if len(unknown) == 1:
            for f in factors:
                size = size // sizes[f] if f in sizes else size
            sizes[unknown[0]] = size
        exact = exact and len(unknown) < 2
    sizes = {f: sizes[f] for f in steps.order if f in sizes}
    if exact and not absent:
        return steps.dims, sizes, absent
    dims = [
        None if x is None else ((),) if k in absent else _kept(d or (), x.shape, sizes, steps.even)
        for k, (d, x) in enumerate(zip(steps.dims, tensors))
    ]
    return (
        tuple(dims),
        {**sizes, **dict.fromkeys(map(beside, steps.even), 1)},
        {k - count for k in absent if k >= count},
    )


def _may_broadcast(tensor: Spec, factor: str) -> bool:
    """Whether a dim of length 1 gives way to that of the tensor: an empty vector beside named dims stands for none."""
    return factor.startswith("...") or tuple(tensor.shape) != (0,)


def _kept(dims: Dims, shape: tuple[Any, ...], sizes: Mapping[str, Any], even: tuple[str, ...]) -> Dims:
    """The factors of dims, without those of broadcast dims of length 1 and of dims with a factor of unknown size."""
    kept: list[tuple[str, ...]] = []
    for factors, size in zip(dims, shape):
        unknown = any(f not in sizes for f in factors)
        if unknown or (len(factors) == 1 and same_size(size, 1) and not same_size(sizes[factors[0]], 1)):
            kept.append(())
        else:
            kept.append(tuple([g for f in factors for g in ([f, beside(f)] if f in even else [f])]))
    return tuple(kept)


def _name(kind: Kind, tensor: int) -> str:
    count = len(kind.at)
    return list(signature(kind.func).arguments)[kind.at[tensor]] if tensor < count else f"output {tensor - count}"


def _misfit(rule: Rule, steps: Plan, kind: Kind, tensor: int, given: Spec | Output) -> OperatorError:
    term = steps.terms[tensor]
    dims = sum(item not in MANY for item in term)
    more = " or more" if dims < len(term) else ""
    return OperatorError(
        f"{kind.func}: the rule {rule.text!r} gives {_name(kind, tensor)} {dims} dimensions{more}, but its shape is "
        f"{list(given.shape)}; correct the rule given to dtensor.register_sharding"
    )


def _mismatch(rule: Rule, kind: Kind, tensor: int, dim: int, factor: str, known: Any, size: Any) -> OperatorError:
    return OperatorError(
        f"{kind.func}: by the rule {rule.text!r} dimension {dim} of {_name(kind, tensor)} is factor {factor!r}, of "
        f"length {known}, but its length is {size}; correct the rule (write 1 for a dimension that is never sharded) "
        "or the call"
    )


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
            options: dict[str, Any] = {f.name: getattr(rule, f.name) for f in fields(rule) if f.init}
            options["local"] = local
            rule = LibraryRule(**options)
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

__all__ = ["TABLES", "bind", "rule_for", "rule_table"]
