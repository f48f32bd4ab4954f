"""Aligning: which value of one run is which value of the other.

First by key: same step, phase, module, operator, result and dtype, as often in one run as in the other. What is left,
such as the results of an operator that a compiler took apart, is aligned in its order among the values of the same
shape that are left in both; where their numbers differ, it is uncertain which is which.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping

from .values import Key, RecordedRun, RecordedValue

OWN = ("view", "from")
"""Kinds of values that belong to one run: the same tensor as another value, in the layout that is used next."""


def aligned(a: RecordedRun, b: RecordedRun) -> tuple[dict[Key, Key], set[Key]]:
    """Align the values of two runs.

    Returns:
        Keys of `b`, in the order of execution, with those of `a` that they are; and the keys of `b` of which that is
        uncertain.
    """
    in_a, in_b = ({k: v for k, v in run.values.items() if v.kind not in OWN} for run in (a, b))
    often_a, often_b = (Counter([key[:-1] for key in values]) for values in (in_a, in_b))
    found = {key: key for key in in_b if key in in_a and often_a[key[:-1]] == often_b[key[:-1]]}
    taken = set(found.values())
    left_a = _by_name({k: v for k, v in in_a.items() if k not in taken})
    left_b = _by_name({k: v for k, v in in_b.items() if k not in found})
    uncertain: set[Key] = set()
    for name, keys in left_b.items():
        others = left_a.get(name, [])
        found |= dict(zip(keys, others))
        if len(keys) != len(others):
            uncertain |= set(keys)
    return {key: found[key] for key in b.values if key in found}, uncertain


def _by_name(values: Mapping[Key, RecordedValue]) -> dict[tuple[object, ...], list[Key]]:
    found = defaultdict(list)
    for key, value in values.items():
        if value.kind != "move":
            shape = tuple(value.copies[0].shape) if value.copies else ()
            found[(value.step, value.phase, value.module, value.op, value.dtype, shape)].append(key)
    return found


__all__ = ["aligned"]
