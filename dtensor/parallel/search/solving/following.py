"""Steps that need no variables of their own in the program, as they run in the states of their operands."""

from collections.abc import Mapping, Sequence

from ....prices.operators import is_elementwise
from ..choices import Option
from ..states import State
from ..steps import Step, Tensor
from .tableau import Chosen


def leader_of(step: Step, made: Mapping[Tensor, Chosen]) -> list[Tensor] | None:
    """The operands in whose state a step runs, if it needs no variables of its own; None if it may choose.

    A step that works element by element runs in the state in which its largest operands are made: what is moved
    before it can as well be moved before or after all steps that do so. So does a view that nothing else reads.
    """
    operands = [(k, next(iter(t))) for k, t in enumerate(step.sources) if not all(x.plain for x in t)]
    if not operands or any(len(t) != 1 for t in step.sources):
        return None
    most = max(t.like.numel for _, t in operands)
    found = [t for _, t in operands if t.like.numel == most]
    for t in found:
        if t not in made or t.step is None or t.count != step.count or t.step.backward != step.backward:
            return None
    if is_elementwise(step.like.func) and not step.in_place:
        return found
    (t, *others), out = found, step.outputs[0]
    alone = not others and len(operands) == 1 and len(t.users) == 1 and not t.saved
    return found if alone and out is not None and len(step.outputs) == 1 and t.like.bytes == out.like.bytes else None


def following(leaders: Sequence[Chosen], step: Step, options: Sequence[Option]) -> list[tuple[int, Option]]:
    """For each variable that decides the states of the leading operands, the option that they leave; empty if there is
    not exactly one for each."""
    states: dict[int, list[State]] = {}
    for chosen in leaders:
        for s, terms in chosen.items():
            for k in terms:
                states.setdefault(k, []).append(s)
    leading = [k for k, t in enumerate(step.sources) if len(t) == 1 and not all(x.plain for x in t)]
    most = max(next(iter(step.sources[k])).like.numel for k in leading)
    leading = [k for k in leading if next(iter(step.sources[k])).like.numel == most]
    rest = [k for k in range(len(step.sources)) if k not in leading]
    known: dict[tuple[State | None, ...], Option] = {}
    for o in options:
        if any("sum" in (o.inputs[k] or ()) for k in rest):
            continue
        key = tuple([o.inputs[k] for k in leading])
        if None in key or key in known:
            return []
        known[key] = o
    found: list[tuple[int, Option]] = []
    for k, given in states.items():
        if len(given) != len(leaders):
            return []  # they are not decided by the same variables
        o = known.get(tuple(given))
        if o is None:
            return []
        found.append((k, o))
    return found


__all__ = ["following", "leader_of"]
