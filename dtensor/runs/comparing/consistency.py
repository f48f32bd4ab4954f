"""Consistency: what is wrong within one run, whatever it is compared with.

A redistribution must not change the global tensor, and ranks that hold copies must hold the same. The inputs must have
been right: what is passed on is not reported again.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from ..records import fingerprint as fp
from .bounds import EPS, ROUNDING
from .findings import Finding
from .locating import holders, looks_like, region
from .pairs import FLOOR, LEAST, seen_of
from .readings import is_known
from .values import Copy, RecordedRun, RecordedValue

MAKE_INFINITIES = frozenset(
    ["masked_fill", "full", "full_like", "new_full", "fill", "where", "scalar_tensor", "log", "log2", "log10", "log1p"]
)
"""Operators that are often meant to return infinities."""


def inconsistencies(run: RecordedRun, name: str = "B") -> Iterator[Finding]:
    """What is wrong within one run: redistributions that change the tensor, replicas that differ, and operators that
    make NaN or infinities out of finite inputs."""
    for value in run.values.values():
        if value.nonfinite and value.op not in MAKE_INFINITIES:
            yield from _nonfinite(run, value, name)
        copies = [c for c in value.copies if c.vector is not None]
        if value.kind == "move":
            yield from _changed(run, value, copies, name)
        else:
            yield from _replicas(run, value, name)


def _nonfinite(run: RecordedRun, value: RecordedValue, name: str) -> Iterator[Finding]:
    inputs = [run.values[k] for k in value.inputs if k in run.values]
    if value.kind != "op" or not inputs or any(x.nonfinite for x in inputs):
        return
    ranks = tuple([r for r, part in sorted(value.parts.items()) if part.vector[fp.NONFINITE]])
    elements = f"{int(value.nonfinite):,} elements that are NaN or infinite, out of finite inputs"
    yield Finding("nonfinite", value, None, ranks, None, np.inf, 0.0, elements, run=name)


def _tolerance(value: RecordedValue, norm: float) -> float:
    return FLOOR * value.terms if value.exact else ROUNDING * EPS.get(value.dtype, 0.0) * norm


def _changed(run: RecordedRun, value: RecordedValue, copies: Sequence[Copy], name: str) -> Iterator[Finding]:
    source = run.values.get(value.inputs[0]) if value.inputs else None
    before = [] if source is None or not is_known(source) else [c for c in source.copies if c.vector is not None]
    if source is None or not before or not copies or before[0].shape != copies[0].shape:
        return
    reference = before[0].vector
    assert reference is not None
    norm = max(source.norm, source.terms)
    found = [(c, c.vector - reference) for c in copies if c.vector is not None and len(c.vector) == len(reference)]
    sized = [(c, v, fp.norm(v, seen_of(c, v))) for c, v in found]
    allowed = _tolerance(value, norm)
    wrong = [s for s in sized if s[2] > allowed]
    if not wrong or _differ(before, source):
        return
    copy, vector, difference = max(wrong, key=lambda s: s[2])
    where = region(vector, seen_of(copy, vector))
    norm = max(source.norm, LEAST)
    said, blamed = looks_like(before[0], copy, vector, source)
    if len(wrong) == len(copies) > 1 and all(_is_own_term(c, source) for c, _, _ in wrong):
        said, blamed = "each rank has its own term: nothing was reduced", tuple(sorted(source.parts))
    ranks = blamed or holders([c for c, _, _ in wrong], where)
    yield Finding("collective", value, source, ranks, where, difference / norm, allowed / norm, said, run=name)


def _is_own_term(copy: Copy, source: RecordedValue) -> bool:
    """Whether a reduced tensor is the term of one of the ranks that hold it."""
    whole = copy.vector
    if whole is None:
        return False
    terms = [source.parts[r].vector for r in copy.ranks if r in source.parts]
    known = [t for t in terms if len(t) == len(whole)]
    return any(np.allclose(t, whole, rtol=1e-9, atol=FLOOR * source.terms) for t in known)


def _differ(copies: Sequence[Copy], value: RecordedValue) -> bool:
    return any(_apart(c, copies[0]) > _tolerance(value, value.norm) for c in copies[1:])


def _apart(a: Copy, b: Copy) -> float:
    if a.vector is None or b.vector is None or len(a.vector) != len(b.vector):
        return 0.0
    return fp.norm(a.vector - b.vector, seen_of(a, a.vector))


def _replicas(run: RecordedRun, value: RecordedValue, name: str) -> Iterator[Finding]:
    """Copies on one mesh that differ, if those of the inputs do not."""
    differing = [group for group in _copies(value) if _differ(group, value)]
    if not differing:
        return
    inputs = [run.values[k] for k in value.inputs if k in run.values]
    if any(_differ(group, x) for x in inputs for group in _copies(x)):
        return
    ranks: set[int] = set()
    for group in differing:
        ranks |= {r for copy in _minority(group, value) for r in copy.ranks}
    group = differing[0]
    reference, copy = group[0], max(group[1:], key=lambda c: _apart(c, group[0]))
    assert reference.vector is not None
    assert copy.vector is not None
    vector = copy.vector - reference.vector
    norm = max(value.norm, LEAST)
    apart, allowed = _apart(copy, reference) / norm, _tolerance(value, norm) / norm
    where = region(vector, seen_of(copy, vector))
    yield Finding("replicas", value, None, tuple(sorted(ranks)), where, apart, allowed, run=name)


def _copies(value: RecordedValue) -> list[list[Copy]]:
    """The tensors that a spec says are the same, mesh by mesh."""
    groups = [[c for c in group if c.vector is not None and c.spec is not None] for group in value.groups]
    return [group for group in groups if len(group) > 1]


def _minority(group: Sequence[Copy], value: RecordedValue) -> list[Copy]:
    """The copies that the fewest agree with; all of them if no two agree."""
    agreeing = [[c for c in group if _apart(c, one) <= _tolerance(value, value.norm)] for one in group]
    most = max(agreeing, key=len)
    return [c for c in group if c not in most] if len(most) > 1 else list(group)


__all__ = ["inconsistencies"]
