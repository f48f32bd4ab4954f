"""Locating: where in a tensor a difference lies, which ranks hold it, and what it looks like."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..records import fingerprint as fp
from ..records.fingerprint import Vector
from .values import Copy, RecordedValue

SHARE = 0.05
"""A range counts as differing if its sum is at least this share of the largest one of its dim."""
RATIO = 0.02
"""How exactly a difference must be a multiple of something to be called that."""


@dataclass(frozen=True)
class Region:
    """A part of a global tensor: for each dim the first and one past the last index."""

    bounds: tuple[tuple[int, int], ...]
    shape: tuple[int, ...]

    @property
    def is_everywhere(self) -> bool:
        """Whether it is the whole tensor."""
        return all(b == (0, n) for b, n in zip(self.bounds, self.shape))

    def meets(self, box: Sequence[tuple[int, int]]) -> bool:
        """Whether a shard holds some of it."""
        return all(max(a, c) < min(b, d) for (a, b), (c, d) in zip(self.bounds, box))

    def __str__(self) -> str:
        if self.is_everywhere:
            return "everywhere"
        cells = [":" if (a, b) == (0, n) else f"{a}:{b}" for (a, b), n in zip(self.bounds, self.shape)]
        return f"[{', '.join(cells)}]"


def region(vector: Vector, shape: Sequence[int]) -> Region:
    """The smallest box around the ranges that differ. Dims of which nothing is known count whole."""
    found = []
    for along, length in zip(fp.sizes(vector, shape), shape):
        if np.isnan(along).any() or not along.max(initial=0.0):
            found.append((0, length))
            continue
        (where,) = np.nonzero(along >= SHARE * along.max())
        found.append((fp.bounds(length, int(where[0]))[0], fp.bounds(length, int(where[-1]))[1]))
    return Region(tuple(found), tuple(shape))


def holders(copies: Sequence[Copy], where: Region) -> tuple[int, ...]:
    """The ranks that hold some of a region in the copies that are wrong."""
    found: set[int] = set()
    for copy in copies:
        found |= set(_holders(copy, where))
    return tuple(sorted(found))


def _holders(copy: Copy, where: Region) -> list[int]:
    if copy.spec is not None:
        return [r for r in copy.ranks if where.meets(copy.spec.box(r))]
    if not copy.parts:
        return list(copy.ranks)
    cut = [d for d, (n, m) in enumerate(zip(copy.parts[0].shape, copy.shape)) if n != m]
    (dim,) = cut
    found, size = [], copy.parts[0].shape[dim]
    a, b = where.bounds[dim]
    for k, part in enumerate(copy.parts):
        begin = max(a - k * size, 0), min(b - k * size, size)
        if begin[0] < begin[1]:
            bounds = (*where.bounds[:dim], begin, *where.bounds[dim + 1 :])
            found += _holders(part, Region(bounds, part.shape))
    return found


def looks_like(
    reference: Copy, copy: Copy, difference: Vector, terms: RecordedValue | None
) -> tuple[str, tuple[int, ...]]:
    """What a difference looks like: a multiple of the tensor itself, or of one rank's term of the sum that it is.

    Args:
        reference: the right tensor.
        copy: the wrong one.
        difference: the fingerprint of the difference.
        terms: a partial value whose sum the tensor is.

    Returns:
        A text, "" if it looks like nothing known, and the ranks that it blames, if any.
    """
    if difference[fp.NONFINITE]:
        return f"{int(abs(difference[fp.NONFINITE]))} more elements that are NaN or infinite", ()
    mine, whole = difference[fp.STATISTICS :], _sums(reference.vector)
    factor = None if whole is None or len(whole) != len(mine) else _factor(mine, whole)
    for part in terms.parts.values() if terms is not None and terms.spec is not None else ():
        term = _sums(part.vector)
        blamed = None if term is None or len(term) != len(mine) else _factor(mine, term)
        if blamed is not None and factor is None:
            as_is = terms is not None and copy.spec is not None and bool(copy.spec.partial)
            counted = 1 / (1 - blamed) if as_is and blamed != 1 else 1 + blamed
            return f"as if the term of rank {part.rank} counted {_times(counted)}", (part.rank,)
    if factor is None:
        return "", ()
    return f"{1 + factor:.6g} times as large" if abs(1 + factor) > RATIO else "all zeros", ()


def _times(x: float) -> str:
    return "not at all" if abs(x) < RATIO else "twice" if abs(x - 2) < RATIO else f"{x:.3g} times"


def _sums(vector: Vector | None) -> Vector | None:
    return None if vector is None else vector[fp.STATISTICS :]


def _factor(a: Vector, b: Vector) -> float | None:
    """The number by which `a` is a multiple of `b`, if it is one."""
    good = ~(np.isnan(a) | np.isnan(b))
    a, b = a[good], b[good]
    bb = float(np.dot(b, b))
    if not bb:
        return None
    factor = float(np.dot(a, b)) / bb
    rest = a - factor * b
    return factor if np.dot(rest, rest) <= RATIO**2 * np.dot(a, a) else None


__all__ = ["Region", "holders", "looks_like", "region"]
