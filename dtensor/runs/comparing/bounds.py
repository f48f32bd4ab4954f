"""Bounds: how large a difference may be, given those of the inputs and the rounding of the dtype.

An operator passes on the relative differences r of its inputs and adds rounding:

    D <= scale * (ROUNDING * eps + GAIN * sum of r)

`eps` is that of the dtype, and `scale` the norm that the result would have if its terms did not cancel (`scales`): of a
difference of two large tensors neither the rounding nor the inputs' differences shrink with the result. Norms of
differences are estimates, so of an input's the largest counts and of the result's their mean. Inputs are the nearest
values that both runs have: redistributions, and operators that only one of the runs executes, are passed through. Steps
of optimizers that divide gradients by their size may differ by more (`normalising`). `ROUNDING` and `GAIN` were chosen
so that clean runs stay below with a margin (CONTRIBUTING.md).
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

from .normalising import NORMALISING, with_steps
from .pairs import LEAST, Pair
from .scales import EXPONENTIAL, STEEP, count, roundings, scale
from .values import Key, RecordedRun, RecordedValue

EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "bfloat16": 2.0**-8, "float16": 2.0**-11}
"""Relative rounding error of a dtype, up to a factor of two; that of the real part for complex ones."""
EPS |= {"complex128": EPS["float64"], "complex64": EPS["float32"], "complex32": EPS["float16"]}

ROUNDING = 8.0
"""How many times `eps` a result may differ by rounding alone, relative to its scale."""
GAIN = 10.0
"""How much an operator may enlarge the relative differences of its inputs."""
PASSED = 2.0
"""How much every operator that only one run has may enlarge them further."""


def bound(pairs: Mapping[Key, Pair], a: RecordedRun, b: RecordedRun) -> None:
    """Find for each pair what it was computed from and how large its difference may be, and write it into the pair.

    Args:
        pairs: the pairs, by the key of `b`.
        a, b: the runs.
    """
    by_a = {pair.a.key: pair for pair in pairs.values()}
    users: dict[int, list[Pair]] = defaultdict(list)
    for pair in pairs.values():
        _bound(pair, a, b, by_a, pairs)
        for given in pair.inputs:
            users[id(given)].append(pair)
    for pair in pairs.values():
        if pair.is_suspect and _is_made_up_for(pair, users[id(pair)]):
            pair.certain = False


def _bound(pair: Pair, a: RecordedRun, b: RecordedRun, by_a: Mapping[Key, Pair], by_b: Mapping[Key, Pair]) -> None:
    """Find what the pair was computed from, and how large its difference may be."""
    near_a, near_b = _nearest(pair.a, a, by_a), _nearest(pair.b, b, by_b)
    pair.inputs = tuple({id(p): p for p in [*[by_a[k] for k in near_a[0]], *[by_b[k] for k in near_b[0]]]}.values())
    pair.between = tuple([b.values[k] for k in near_b[1]])
    ops = [b.values[k].kind == "op" for k in near_b[1]] + [a.values[k].kind == "op" for k in near_a[1]]
    pair.passed = sum(ops)
    pair.allowed = allowed(pair, pair.inputs, [a.values[k] for k in near_a[0]])


def allowed(pair: Pair, inputs: Sequence[Pair], values: Sequence[RecordedValue]) -> float:
    """How large the difference of a pair may be if these inputs differ as they do.

    Args:
        pair: the pair.
        inputs: the pairs whose differences count.
        values: what the value of the first run was computed from, for its scale.
    """
    known = [p for p in inputs if not math.isnan(p.difference)]
    if not pair.inputs:
        return 0.0
    if pair.b.exact:
        return 0.0 if known and all(p.difference == 0 for p in known) else math.inf
    if inputs and not known:
        return math.inf
    if any(p.b.exact and p.difference > 0 for p in known):
        return math.inf
    relative = sum([_passed_on(p, pair) for p in known if not p.b.exact])
    eps = max(EPS.get(v.dtype, 0.0) for v in (pair.a, pair.b))
    size = max(scale(pair.a, values), pair.norm)
    rounding, gain = ROUNDING * roundings(pair.a, values), GAIN * STEEP.get(pair.b.op, 1.0)
    found = size * (rounding * eps + gain * relative) * PASSED ** min(pair.passed, 8)
    return with_steps(found, pair, known) if pair.b.op in NORMALISING and pair.differences else found


def _is_made_up_for(pair: Pair, users: Sequence[Pair]) -> bool:
    """Whether a difference goes no further: what is computed from the value does not differ, in any of its users.

    Then the runs compute the same in another way, such as scaling one factor of a product instead of the other.
    """
    users = [user for user in users if not math.isnan(user.difference)]
    if not pair.passed or not users:
        return False
    others = [[p for p in user.inputs if p is not pair] for user in users]
    return all(
        user.difference <= allowed(user, given, [p.a for p in user.inputs]) for user, given in zip(users, others)
    )


def _passed_on(given: Pair, result: Pair) -> float:
    """The relative difference that an input brings into a result. An exponential makes an absolute one of it."""
    relative = given.at_most / max(given.norm, LEAST)
    if result.b.op not in EXPONENTIAL:
        return relative
    return max(relative, given.at_most / math.sqrt(count(given.a)))


def _nearest(value: RecordedValue, run: RecordedRun, pairs: Mapping[Key, Pair]) -> tuple[list[Key], list[Key]]:
    """The keys of the nearest ancestors that both runs have and can be judged, and of those passed through."""
    found: dict[Key, None] = {}
    passed: dict[Key, None] = {}
    queue = list(value.inputs)
    while queue:
        key = queue.pop(0)
        if key in found or key in passed or key not in run.values:
            continue
        pair = pairs.get(key)
        if pair is not None and not math.isnan(pair.difference) and key != value.key:
            found[key] = None
        else:
            passed[key] = None
            queue += run.values[key].inputs
    return list(found), list(passed)


__all__ = ["EPS", "GAIN", "ROUNDING", "allowed", "bound"]
