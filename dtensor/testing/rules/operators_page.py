"""Support: the page that says, for each operator of aten, how it runs on DTensors; `dtensor operators` prints it.

    recorded calls -> the decision that dispatch would make, with the first operand sharded -> a row of a table

All of it is asked of the engine: decisions, rules, candidates, the reasons in `WHOLE`. Nothing is computed or timed, so
that the page is the same every time. `docs/operators.md` is this page; a test holds it to that.
"""

import functools
import types
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ...dispatch.decision import Decision, decide
from ...dispatch.fallback import uncounted
from ...dispatch.plain_operands import implicit_replication
from ...errors import ShardingError
from ...rules import FAMILIES, RULES, WHOLE, base_name, is_in_place, rule_of
from ...rules.families.replicated import VALUES
from ...rules.pattern import Pattern
from ...rules.rule import Candidate, Rule, candidates
from ...torch_private.core import OpOverload
from .candidates import Case, OneAxis, State, call_and_rule, layout_of, placed, tensors
from .recording import recorded

HEAD = """\
# Operators

Written by `dtensor operators > docs/operators.md`; do not edit.

How each operator of aten runs on DTensors, as the engine decides for the calls that torch's operator database makes,
forward and backward, with an operand sharded on a mesh axis of two ranks:

- **native**: it has a sharding rule and runs on local tensors; nothing is gathered that the rule can keep.
- **decomposed**: it has no rule of its own and runs as other operators, which have: those of torch's decomposition, or
  ours.
- **replicated**: its operands are gathered and every rank runs it whole, for the reason given. One that is reduced to
  **values** gives numbers, or a shape, that depend on all values, and has to.

For a native operator, one call stands for all: the shapes of its tensors, in the order of the schema, then the ways to
cut it on one mesh axis, operands -> outputs (R: replicated, S(d): sharded on dimension d, P: Partial(sum), P(op):
Partial(op), `-`: no tensor), and the operands that may be Partial(sum), with the outputs Partial likewise. Operands
named together have to be so together. An in-place operator runs as the one that makes a new tensor.
"""

TABLE = "| operator | how | tensors | may be sharded | Partial(sum) |\n|---|---|---|---|---|"
DECOMPOSED = {"decompose", "implicit", "composite", "functional", "foreach", "out", "inplace_view"}
"""Kinds of decision that run as other operators."""


@dataclass(frozen=True)
class Row:
    """What the page says of one operator, and under which family."""

    family: str
    operator: str
    how: str
    tensors: str = ""
    sharded: str = ""
    partial: str = ""

    def __str__(self) -> Any:
        cells = (f"`{self.operator}`", self.how, self.tensors, self.sharded, self.partial)
        return f"| {' | '.join(cells)} |"


def operators_page() -> str:
    """The page, as Markdown. Takes as long as the operator database takes to run, some 20 seconds."""
    rows: dict[str, list[Row]] = defaultdict(list)
    for row in _rows():
        rows[row.family].append(row)
    about = {_short(m): (m.__doc__ or "").split("\n\n")[0].replace("\n", " ") for m in FAMILIES}
    parts = [HEAD, _counts([r for found in rows.values() for r in found])]
    for family in [*sorted(about), ""]:
        if rows[family]:
            title, text = (family.replace("_", " "), about[family]) if family else ("without a rule", "")
            body = "\n".join(map(str, sorted(rows[family], key=lambda r: r.operator)))
            parts.append("\n\n".join(p for p in (f"## {title.capitalize()}", text, f"{TABLE}\n{body}") if p) + "\n")
    return "\n".join([*parts, _others({r.operator.partition(".")[0] for found in rows.values() for r in found})])


def _rows() -> Iterator[Row]:
    calls = recorded()
    made = {base_name(f) for f in calls if not f._schema.is_mutable}
    for func, given in calls.items():
        repeats = torch.Tag.inplace_view in func.tags or (is_in_place(func) and base_name(func) in made)
        if not repeats and "_foreach_" not in str(func) and not any(a.is_out for a in func._schema.arguments):
            yield _row(func, [Case(func, args, kwargs=kwargs) for args, kwargs in given])


def _row(func: OpOverload, cases: list[Case]) -> Row:
    """The row of an operator, by the call with most candidates; a call that has to be refused says nothing."""
    name = str(func).removeprefix("aten.").removesuffix(".default")
    case = max(cases, key=lambda c: (all(x.numel() for x in tensors((c.args, c.kwargs))), len(_candidates(c))))
    decision = _decision(case)
    if rule_of(func) is None:
        how = _without(func, decision)
        return Row("", name, how)
    if decision is not None and decision.kind in DECOMPOSED:
        return Row(family_of(func), name, "decomposed")
    found = _candidates(case)
    shapes = " ".join(f"{list(x.shape)}" for x in tensors((case.args, case.kwargs)))
    cuts = "; ".join(_arrow(c) for c in found if c.factor is not None)
    return Row(family_of(func), name, "native", shapes, cuts or "nothing", _linear(case))


def _without(func: OpOverload, decision: Decision | None) -> str:
    short = base_name(func).removeprefix("aten::")
    if decision is not None and decision.kind in DECOMPOSED:
        return "decomposed"
    reason = WHOLE.get(short, "it has no rule")
    return f"{'values' if reason == VALUES else 'replicated'}: {reason}"


def _decision(case: Case) -> Decision | None:
    """What dispatch would do with the call, its first tensor that has dimensions sharded on the first; None if it
    cannot be done."""
    given = tensors((case.args, case.kwargs))
    first = next((i for i, x in enumerate(given) if x.dim()), None)
    states: list[State] = [0 if i == first else None for i in range(len(given))]
    args, kwargs = placed(case, OneAxis(2), states, given)
    try:
        with uncounted(), implicit_replication():
            return decide(case.func, args, kwargs)
    except (ShardingError, RuntimeError, IndexError):
        return None


def _rule(case: Case) -> Rule | None:
    try:
        return call_and_rule(case, OneAxis(2))[1] if rule_of(case.func) is not None else None
    except (ShardingError, RuntimeError, IndexError):
        return None


def _candidates(case: Case) -> list[Candidate]:
    rule = _rule(case)
    return [] if rule is None else candidates(rule)


def _arrow(candidate: Candidate) -> str:
    ins, outs = (" ".join(map(_text, states)) for states in (candidate.inputs, candidate.outputs))
    return f"{ins} -> {outs}"


def _text(state: State) -> str:
    return layout_of(state, 9).text


def _linear(case: Case) -> str:
    """Names of the operands that may be Partial(sum), those that have to be together joined by a plus."""
    rule = _rule(case)
    if rule is None:
        return ""
    names = [a.name for a in case.func._schema.arguments for _ in tensors(_given(case, a.name))]
    return ", ".join(" + ".join(names[i] for i in sorted(group)) for group in rule.linear)


def _given(case: Case, name: str) -> Any:
    index = [a.name for a in case.func._schema.arguments].index(name)
    return case.args[index] if index < len(case.args) else case.kwargs.get(name)


def family_of(func: OpOverload) -> str:
    """The module that holds an operator's rule: of the rule function, or of the table of patterns with its name."""
    make = rule_of(func)
    short = base_name(func).removeprefix("aten::")
    tables = {_short(m): v for m in FAMILIES for v in vars(m).values() if _has(v, short)}
    return next(iter(tables), "" if make is None else make.__module__.rpartition(".")[2])


def _has(table: Any, name: str) -> bool:
    """Whether `table` is one of patterns, with one for the operator of this name."""
    patterns = isinstance(table, dict) and any(isinstance(v, Pattern) for v in table.values())
    return patterns and any(str(key).partition(".")[0] == name for key in table)


def _short(module: types.ModuleType) -> str:
    return module.__name__.rpartition(".")[2]


def _counts(rows: list[Row]) -> str:
    count = {how: sum(r.how.startswith(how) for r in rows) for how in ("native", "decomposed", "replicated", "values")}
    return f"{len(rows)} operators: {', '.join(f'{n} {how}' for how, n in count.items())}.\n"


def _others(seen: set[str]) -> str:
    """What has a rule or a reason, but is not called by the database."""
    ruled = {n.removeprefix("aten::").partition(".")[0] for n in RULES if n.startswith("aten::")}
    names = sorted(n for n in ruled - seen if _exists(n))
    whole = [f"- `{n}`: {why}" for n, why in sorted(WHOLE.items()) if n not in seen and n not in ruled]
    listed = ", ".join(f"`{n}`" for n in names)
    head = "## Not called by the database\n\nNative, too, by rules that are tested by other calls: "
    return f"{head}{listed}.\n\nReplicated:\n\n" + "\n".join(whole) + "\n"


@functools.cache
def _exists(name: str) -> bool:
    return hasattr(torch.ops.aten, name)


__all__ = ["Row", "family_of", "operators_page"]
