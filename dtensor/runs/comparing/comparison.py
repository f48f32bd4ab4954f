"""Comparison: aligns two records, and finds the first operator whose difference is not explained.

two runs -> pairs of aligned values (`pairs`) -> how large each difference may be (`bounds`) -> findings
each run -> what is wrong in itself (`consistency`) -> findings
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from .bounds import bound
from .consistency import inconsistencies
from .findings import Finding
from .locating import holders, looks_like, region
from .pairs import LEAST, Pair, pair_of, pairs_of, seen_of
from .readings import is_known
from .values import RecordedRun, RecordedValue


@dataclass(repr=False)
class Comparison:
    """What `compare` returns.

    Attributes:
        a, b: the runs.
        pairs: the values that both have, in the order of execution of `b`.
        findings: what is not explained, in the order of execution.
        only_a, only_b: values that only one of the runs has, inputs, redistributions and such left out.
    """

    a: RecordedRun
    b: RecordedRun
    pairs: list[Pair]
    findings: list[Finding]
    only_a: list[RecordedValue] = field(default_factory=list)
    only_b: list[RecordedValue] = field(default_factory=list)

    @property
    def first(self) -> Finding | None:
        """The first finding; None if the runs agree."""
        return self.findings[0] if self.findings else None

    def __repr__(self) -> str:
        first = f", the first {self.first!r}" if self.first is not None else ""
        counts = f"{len(self.pairs):,} pairs, {len(self.findings)} findings"
        return f"<Comparison of {self.a!r} and {self.b!r}: {counts}{first}>"


def compare(a: RecordedRun, b: RecordedRun) -> Comparison:
    """Compare two records.

    Args:
        a: the reference, such as the run on one device.
        b: the run in question.

    Returns:
        The aligned values and what is not explained.
    """
    pairs = pairs_of(a, b)
    bound(pairs, a, b)
    findings = list(_differing(pairs.values(), a, b))
    seen = {f.value.key for f in findings}
    findings += [f for f in inconsistencies(b) if f.value.key not in seen]
    if a.world > 1:
        findings += inconsistencies(a, "A")
    findings.sort(key=lambda f: (f.value.order, f.run))
    in_a = {pair.a.key for pair in pairs.values()}
    only_a = [v for k, v in a.values.items() if k not in in_a and v.kind == "op"]
    only_b = [v for k, v in b.values.items() if k not in pairs and v.kind == "op"]
    return Comparison(a, b, list(pairs.values()), findings, only_a, only_b)


def check(run: RecordedRun) -> Comparison:
    """What is wrong within one run: its redistributions, its replicas, NaN and infinities."""
    return Comparison(run, run, [], list(inconsistencies(run)))


def _otherwise(pair: Pair, a: RecordedRun, b: RecordedRun) -> str:
    """What the ranks have instead, if that explains the difference."""
    if is_known(pair.b):
        return ""
    read = pair_of(pair.a, pair.b, a, b, strict=False)
    if not read.difference <= pair.allowed:
        return ""
    each = "each rank has its own term of the sum, and nobody added them up"
    return each if read.reading == "terms" else f"right if read as {read.reading}"


def _differing(pairs: Iterable[Pair], a: RecordedRun, b: RecordedRun) -> Iterator[Finding]:
    for pair in pairs:
        if not pair.is_suspect:
            continue
        copy, vector, _ = max(pair.differences, key=lambda d: d[2])
        where = region(vector, seen_of(copy, vector))
        wrong = [c for c, _, d in pair.differences if d > pair.allowed]
        terms = pair.b if copy.spec is not None and copy.spec.partial else None
        said, blamed = looks_like(pair.a.copies[0], copy, vector, terms)
        said = said or _otherwise(pair, a, b)
        relative, allowed = pair.relative, pair.allowed / max(pair.norm, LEAST)
        ranks = blamed or holders(wrong, where)
        yield Finding("value", pair.b, pair.a, ranks, where, relative, allowed, said, pair.between)


__all__ = ["Comparison", "check", "compare"]
