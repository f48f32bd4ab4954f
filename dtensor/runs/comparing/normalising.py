"""Normalising optimizers: how much of a parameter's difference comes from dividing a gradient by its own size.

Adam steps by `rate * mean gradient / (root of mean square + epsilon)`: about `rate`, however small the gradient of an
element. One whose gradient is all rounding steps elsewhere as a whole, and one whose gradient has the size of
`epsilon` by a part of that. The norms of what gradients differ by do not show such elements. So

- if gradients differ by a share q of their size, and are spread evenly around zero, about a share q of the elements are
  no larger than their difference: the step may differ by sqrt(q) of its norm;
- a small tensor may by chance have more of them: `FEW` elements may differ by their whole step, in either direction, if
  the difference is explained without the ranges in which it is largest.
"""

import math
from collections.abc import Sequence

import numpy as np

from ..records import fingerprint as fp
from .pairs import LEAST, Pair, seen_of

NORMALISING = ("addcdiv", "updated")
"""Results of optimizers that divide by the size of the gradient."""
FEW = 4
"""So many elements may differ by their whole step."""
RANGES_OF_FEW = 0.1
"""The share of the ranges of a dim in which they lie. Where that is less than one range, they cannot be told apart."""


def with_steps(bound: float, result: Pair, given: Sequence[Pair]) -> float:
    """How large the difference of a parameter may be after a step.

    Args:
        bound: what it may be by rounding and by what an operator passes on of the differences of its inputs.
        result: the parameter after the step.
        given: the pairs that it was computed from.
    """
    step = _step(result, given)
    if not step:
        return bound
    bound += step * math.sqrt(min(_largest_share(given), 1.0))
    few = 2.0 * step * math.sqrt(FEW / max(math.prod(result.a.seen), 1))
    return min(bound / math.sqrt(max(1.0 - _concentration(result), LEAST)), bound + few)


def _step(result: Pair, given: Sequence[Pair]) -> float:
    """The norm of the step; 0 if it is not known."""
    after = result.a.copies[0].vector
    same = [p.a for p in given if p.a.module == result.a.module and p.a.seen == result.a.seen]
    before = same[0].copies[0].vector if same else None
    if after is None or before is None or len(after) != len(before):
        return 0.0
    return fp.norm(after - before, result.a.seen)


def _largest_share(given: Sequence[Pair]) -> float:
    """The largest relative difference of a range of the first dim of what a step is computed from: elements whose
    gradients are all rounding, such as those of a bias before a softmax, may be few of many."""
    ratios = [0.0]
    for pair in given:
        reference = pair.a.copies[0].vector
        for copy, vector, difference in pair.differences:
            if difference and reference is not None and len(reference) == len(vector):
                seen = seen_of(copy, vector)
                apart, whole = fp.sizes(vector, seen)[0], fp.sizes(reference, seen)[0]
                ratios.append(float(np.nanmax(apart / np.maximum(whole, LEAST), initial=0.0)))
    return max(ratios)


def _concentration(pair: Pair) -> float:
    """The share of the square of a difference that lies in the few ranges that differ most, in the dim in which it is
    least concentrated."""
    copy, vector, _ = max(pair.differences, key=lambda d: d[2])
    shares = []
    for along in fp.sizes(vector, seen_of(copy, vector)):
        squares = np.sort(along**2)[::-1]
        if not np.isnan(squares).any() and squares.sum():
            shares.append(float(squares[: int(RANGES_OF_FEW * len(squares))].sum() / squares.sum()))
    return min(shares, default=0.0)


__all__ = ["FEW", "NORMALISING", "with_steps"]
