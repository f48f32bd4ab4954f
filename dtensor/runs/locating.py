"""Locating: where in a tensor a difference lies, which ranks hold it, and what it looks like."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from . import fingerprint as fp
from .fingerprint import Vector
from .values import Copy, Value

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
    for along, length in zip(fp.sums(vector, shape), shape):
        sizes = np.abs(along)
        if np.isnan(sizes).any() or not sizes.max(initial=0.0):
            found.append((0, length))
            continue
        (where,) = np.nonzero(sizes >= SHARE * sizes.max())
        found.append((fp.bounds(length, int(where[0]))[0], fp.bounds(length, int(where[-1]))[1]))
    return Region(tuple(found), tuple(shape))


def holders(copies: Sequence[Copy], where: Region) -> tuple[int, ...]:
    """The ranks that hold some of a region in the copies that are wrong."""
    found: set[int] = set()
    for copy in copies:
        if copy.spec is None:
            found |= set(_of_parts(copy, where))
        else:
            found |= {r for r in copy.ranks if where.meets(copy.spec.box(r))}
    return tuple(sorted(found))


def _of_parts(copy: Copy, where: Region) -> list[int]:
    """Of ranks that each hold an equal part along the one dim whose sums are known: those that meet the region."""
    count = len(copy.ranks)
    cut = [d for d, (b, n) in enumerate(zip(where.bounds, where.shape)) if b != (0, n) and n % count == 0]
    if count == 1 or len(cut) != 1:
        return list(copy.ranks)
    (dim,) = cut
    part = where.shape[dim] // count
    a, b = where.bounds[dim]
    return [r for k, r in enumerate(copy.ranks) if max(a, k * part) < min(b, (k + 1) * part)]


def said(reference: Value, copy: Copy, difference: Vector, value: Value) -> str:
    """What a difference looks like: a multiple of the tensor itself, or of one rank's term of it."""
    if difference[fp.NONFINITE]:
        return f"{int(abs(difference[fp.NONFINITE]))} elements are NaN or infinite"
    whole = _sums(reference.copies[0].vector)
    mine = _sums(difference)
    if whole is not None and mine is not None and len(whole) == len(mine):
        factor = _factor(mine, whole)
        if factor is not None:
            return f"{_number(1 + factor)} times as large" if abs(1 + factor) > RATIO else "all zeros"
    if copy.spec is not None and copy.spec.partial and mine is not None:
        for part in value.parts.values():
            term = _sums(part.vector)
            factor = None if term is None or len(term) != len(mine) else _factor(mine, term)
            if factor is not None:
                right = 1 - factor
                return f"as if the term of rank {part.rank} counted {_number(1 / right) if right else 'less'} times"
    return ""


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


def _number(x: float) -> str:
    return f"{x:.3g}"


__all__ = ["Region", "holders", "region", "said"]
