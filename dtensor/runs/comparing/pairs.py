"""Pairs: the values that both runs have, with the fingerprint of their difference.

aligned values -> every reading of plain tensors that fits -> the smallest difference -> `Pair`
"""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ..records import fingerprint as fp
from ..records.fingerprint import Vector
from .aligning import aligned
from .readings import Reading, is_known, readings
from .values import Copy, Key, RecordedRun, RecordedValue

NEAR = 0.05
"""Values of the same name whose relative difference is below this are taken for each other."""
MOST = 16
"""The most values of the same name that are tried in another order."""
FLOOR = 1e-12
"""What is below this, relative to the norm, is the rounding of the fingerprints themselves."""
LEAST = 1e-30
"""Norms below this count as zero."""


@dataclass(repr=False)
class Pair:
    """A value that both runs have.

    Attributes:
        a, b: the value in each run.
        differences: the global tensors of `b` that were compared, each with the fingerprint of its difference from that
            of `a`, and with the norm of the difference.
        reading: how plain tensors of several ranks were read (`readings`); "" if specs say it.
        norm: norm of the tensor of `a`.
        allowed: how large the difference may be.
        inputs: the pairs that it was computed from.
        between: values of `b` between these and this one.
        passed: how many operators that only one run has lie between `inputs` and this one.
        certain: whether both runs have it equally often, and nothing shows that they compute it in another way.
    """

    a: RecordedValue
    b: RecordedValue
    differences: tuple[tuple[Copy, Vector, float], ...]
    reading: str
    norm: float
    allowed: float = math.inf
    inputs: "tuple[Pair, ...]" = ()
    between: tuple[RecordedValue, ...] = ()
    passed: int = 0
    certain: bool = True

    @cached_property
    def difference(self) -> float:
        """The norm of the largest difference; NaN if there was nothing to compare."""
        return max([d for _, _, d in self.differences], default=math.nan)

    @cached_property
    def at_most(self) -> float:
        """The largest estimate of the difference, for what it explains of others."""
        found = [fp.norm_at_most(vector, _summed(self.b, copy, vector)) for copy, vector, d in self.differences if d]
        return max([self.difference, *[n for n in found if not math.isnan(n)]])

    @property
    def relative(self) -> float:
        """`difference` relative to the norm of `a`."""
        return 0.0 if self.difference == 0 else self.difference / max(self.norm, LEAST)

    @property
    def is_suspect(self) -> bool:
        """Whether the difference is larger than its inputs and rounding explain."""
        return self.certain and self.difference > self.allowed

    def __repr__(self) -> str:
        allowed = self.allowed / max(self.norm, LEAST)
        return f"<Pair {self.b}, step {self.b.step}: differs by {self.relative:.1e} of its norm, {allowed:.1e} allowed>"


def pairs_of(a: RecordedRun, b: RecordedRun) -> dict[Key, Pair]:
    """The pairs of two runs by the key of `b`, in its order of execution."""
    keys, uncertain = aligned(a, b)
    pairs = {key: pair_of(a.values[other], b.values[key], a, b) for key, other in keys.items()}
    _reordered(pairs, a, b)
    _read_as_usual(pairs, a, b)
    for key, pair in pairs.items():
        pair.certain = key not in uncertain
    return pairs


def _reordered(pairs: dict[Key, Pair], a: RecordedRun, b: RecordedRun) -> None:
    """Pair values again that only their order tells apart, where another order makes all of their differences small:
    compiled code runs independent operators in an order of its own."""
    families: dict[Key, list[Key]] = {}
    for key, pair in pairs.items():
        if pair.relative > NEAR:
            families.setdefault((*key[:4], *key[5:7]), []).append(key)
    for keys in families.values():
        if 1 < len(keys) <= MOST:
            _permuted(keys, pairs, a, b)


def _permuted(keys: Sequence[Key], pairs: dict[Key, Pair], a: RecordedRun, b: RecordedRun) -> None:
    left = [pairs[key].a for key in keys]
    found: dict[Key, Pair] = {}
    for key in keys:
        tried = [pair_of(value, pairs[key].b, a, b) for value in left]
        tried = [pair for pair in tried if pair.differences]
        if not tried:
            return
        best = min(tried, key=lambda p: p.relative)
        if best.relative > NEAR:
            return
        found[key] = best
        left.remove(best.a)
    pairs |= found


def pair_of(
    a: RecordedValue,
    b: RecordedValue,
    run_a: RecordedRun,
    run_b: RecordedRun,
    usual: Mapping[str, int] | None = None,
    strict: bool = True,
) -> Pair:
    """Compare a value of two runs, in the reading of plain tensors that makes the difference smallest.

    Args:
        a, b: the value in each run.
        run_a, run_b: the runs.
        usual: how often each reading fits elsewhere. If it is given and no reading fits here, the most usual counts.
        strict: whether to leave out readings that an optimizer cannot work on.
    """
    if not is_known(a) and not is_known(b) and _alike(a, b):
        return _rank_by_rank(a, b)
    found: list[Pair] = []
    for shape in dict.fromkeys([c.shape for v in (a, b) if is_known(v) for c in v.copies]):
        for x in readings(a, shape, run_a.mesh, strict):
            for y in readings(b, shape, run_b.mesh, strict):
                pair = _read(a, b, x, y)
                if pair is not None:
                    found.append(pair)
    if not found:
        return Pair(a, b, (), "", a.norm)
    best = min(found, key=lambda p: p.difference)
    if best.relative > NEAR and usual is not None:
        return max(found, key=lambda p: usual.get(p.reading, 0))
    return best


def _read_as_usual(pairs: dict[Key, Pair], a: RecordedRun, b: RecordedRun) -> None:
    """Where no reading of plain tensors fits, take the one that fits most values of the same phase."""
    usual: dict[str, Counter[str]] = defaultdict(Counter)
    for pair in pairs.values():
        if pair.reading and pair.relative <= NEAR and pair.difference > 0:
            usual[pair.b.phase][pair.reading] += 1
    for key, pair in pairs.items():
        if pair.reading and pair.relative > NEAR:
            pairs[key] = pair_of(pair.a, pair.b, a, b, usual[pair.b.phase])


def _read(a: RecordedValue, b: RecordedValue, x: Reading, y: Reading) -> Pair | None:
    reference = x.copies[0]
    found = []
    for copy in y.copies:
        if reference.vector is None or copy.vector is None or len(reference.vector) != len(copy.vector):
            return None
        found.append(_difference(copy, copy.vector - reference.vector, a, b))
    return Pair(a, b, tuple(found), y.said or x.said, a.norm)


def _alike(a: RecordedValue, b: RecordedValue) -> bool:
    """Whether two values of unknown readings are on the same ranks in the same way."""
    return [(c.ranks, c.shape, c.spec and c.spec.text) for c in a.copies] == [
        (c.ranks, c.shape, c.spec and c.spec.text) for c in b.copies
    ]


def _rank_by_rank(a: RecordedValue, b: RecordedValue) -> Pair:
    found = []
    for x, y in zip(a.copies, b.copies):
        if x.vector is not None and y.vector is not None and len(x.vector) == len(y.vector):
            found.append(_difference(y, y.vector - x.vector, a, b))
    return Pair(a, b, tuple(found), "rank by rank" if len(found) > 1 else "", a.norm)


def _difference(copy: Copy, vector: Vector, a: RecordedValue, b: RecordedValue) -> tuple[Copy, Vector, float]:
    norm = fp.mean_norm(vector, _summed(b, copy, vector))
    if a.nonfinite != b.nonfinite and vector[fp.NONFINITE]:
        norm = math.inf
    if norm <= FLOOR * max(a.terms, b.terms):
        norm = 0.0
    return copy, vector, norm


def _summed(b: RecordedValue, copy: Copy, vector: Vector) -> tuple[int, ...]:
    """The shape that a fingerprint of a difference from `b` was made of."""
    return b.seen if len(vector) == fp.length(b.seen) else seen_of(copy, vector)


def seen_of(copy: Copy, vector: Vector) -> tuple[int, ...]:
    """The shape that a fingerprint of `copy` was made of: one dim more for complex numbers."""
    shape = copy.shape or (1,)
    return shape if fp.length(shape) == len(vector) else (*shape, 2)


__all__ = ["FLOOR", "LEAST", "NEAR", "Pair", "pair_of", "pairs_of", "seen_of"]
