"""Comparison: aligns two records, and finds the first operator whose difference is not explained.

    two runs -> pairs of values with the same key -> difference of each pair -> what its inputs and rounding explain
             -> findings, in the order of execution

The difference D of a pair is the estimated Frobenius norm of the difference of the two global tensors. An operator
passes on the relative differences r of its inputs and adds rounding:

    D <= scale * (ROUNDING * eps + GAIN * sum of r)

`eps` is that of the dtype, and `scale` the norm that the result would have if its terms did not cancel (`scales`): of a
difference of two large tensors neither the rounding nor the inputs' differences shrink with the result. What exceeds
this bound is a finding. Inputs are the nearest values that both runs have: redistributions, and operators that only one
of the runs executes, are passed through.

Before that, each run is compared with itself: a redistribution must not change the global tensor, and ranks that hold
copies must hold the same.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from ..records import fingerprint as fp
from ..records.fingerprint import Vector
from .aligning import aligned
from .locating import Region, holders, looks_like, region
from .readings import Reading, is_known, readings
from .scales import EXPONENTIAL, count, scale
from .values import Copy, Key, Run, Value

EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "bfloat16": 2.0**-8, "float16": 2.0**-11}
"""Relative rounding error of a dtype, up to a factor of two; that of the real part for complex ones."""
EPS |= {"complex128": EPS["float64"], "complex64": EPS["float32"], "complex32": EPS["float16"]}

ROUNDING = 8.0
"""How many times `eps` a result may differ by rounding alone, relative to its scale."""
GAIN = 10.0
"""How much an operator may enlarge the relative differences of its inputs."""
PASSED = 2.0
"""How much every operator that only one run has may enlarge them further."""
NORMALISING = ("addcdiv", "updated")
"""Results of optimizers that divide by the size of the gradient."""
NEAR = 0.05
"""Values of the same name whose relative difference is below this are taken for each other."""
MOST = 16
"""The most values of the same name that are tried in another order."""
FLOOR = 1e-12
"""What is below this, relative to the norm, is the rounding of the fingerprints themselves."""
LEAST = 1e-30
"""Norms below this count as zero."""


@dataclass
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
        certain: whether both runs have it equally often. Otherwise it may be another one that has the same name.
    """

    a: Value
    b: Value
    differences: tuple[tuple[Copy, Vector, float], ...]
    reading: str
    norm: float
    allowed: float = math.inf
    inputs: "tuple[Pair, ...]" = ()
    between: tuple[Value, ...] = ()
    certain: bool = True

    @cached_property
    def difference(self) -> float:
        """The norm of the largest difference; NaN if there was nothing to compare."""
        return max([d for _, _, d in self.differences], default=math.nan)

    @property
    def relative(self) -> float:
        """`difference` relative to the norm of `a`."""
        return 0.0 if self.difference == 0 else self.difference / max(self.norm, LEAST)

    @property
    def is_suspect(self) -> bool:
        """Whether the difference is larger than its inputs and rounding explain."""
        return self.certain and self.difference > self.allowed


@dataclass
class Finding:
    """A difference that is not explained.

    Attributes:
        what: "value" (the runs differ), "collective" (a redistribution changed the tensor), "replicas" (ranks that
            should hold the same do not) or "nonfinite" (NaN or infinity out of finite inputs).
        value: the value, in the run that has the fault.
        other: the value of the other run, or the input of the collective; None for the others.
        ranks: the ranks that hold what differs; all of its ranks if that is unknown.
        region: where in the global tensor; None if unknown.
        relative: the difference, relative to the norm.
        allowed: how large that might have been.
        said: what the difference looks like, such as "2 times as large".
        between: what was computed between the inputs that agree and the value.
        run: "A" if it is in the first run, else "B".
    """

    what: str
    value: Value
    other: Value | None
    ranks: tuple[int, ...]
    region: Region | None
    relative: float
    allowed: float
    said: str = ""
    between: tuple[Value, ...] = ()
    run: str = "B"


@dataclass
class Comparison:
    """What `compare` returns.

    Attributes:
        a, b: the runs.
        pairs: the values that both have, in the order of execution of `b`.
        findings: what is not explained, in the order of execution.
        only_a, only_b: values that only one of the runs has, inputs, redistributions and such left out.
    """

    a: Run
    b: Run
    pairs: list[Pair]
    findings: list[Finding]
    only_a: list[Value] = field(default_factory=list)
    only_b: list[Value] = field(default_factory=list)

    @property
    def first(self) -> Finding | None:
        """The first finding; None if the runs agree."""
        return self.findings[0] if self.findings else None


def compare(a: Run, b: Run) -> Comparison:
    """Compare two records.

    Args:
        a: the reference, such as the run on one device.
        b: the run in question.

    Returns:
        The aligned values and what is not explained.
    """
    keys, uncertain = aligned(a, b)
    pairs = {key: _pair(a.values[other], b.values[key], a, b) for key, other in keys.items()}
    _reordered(pairs, a, b)
    _read_as_usual(pairs, a, b)
    by_a = {pair.a.key: pair for pair in pairs.values()}
    for key, pair in pairs.items():
        _bound(pair, a, b, by_a, pairs)
        pair.certain = key not in uncertain
    findings = list(_differing(pairs.values(), a, b))
    seen = {f.value.key for f in findings}
    findings += [f for f in _of_itself(b) if f.value.key not in seen]
    if a.world > 1:
        findings += _of_itself(a, "A")
    findings.sort(key=lambda f: (f.value.order, f.run))
    only_a = [v for k, v in a.values.items() if k not in by_a and v.kind == "op"]
    only_b = [v for k, v in b.values.items() if k not in pairs and v.kind == "op"]
    return Comparison(a, b, list(pairs.values()), findings, only_a, only_b)


def _reordered(pairs: dict[Key, Pair], a: Run, b: Run) -> None:
    """Pair values again that only their order tells apart, where another order makes all of their differences small:
    compiled code runs independent operators in an order of its own."""
    families: dict[Key, list[Key]] = {}
    for key, pair in pairs.items():
        if pair.relative > NEAR:
            families.setdefault((*key[:4], *key[5:7]), []).append(key)
    for keys in families.values():
        if 1 < len(keys) <= MOST:
            _permuted(keys, pairs, a, b)


def _permuted(keys: Sequence[Key], pairs: dict[Key, Pair], a: Run, b: Run) -> None:
    left = [pairs[key].a for key in keys]
    found: dict[Key, Pair] = {}
    for key in keys:
        tried = [_pair(value, pairs[key].b, a, b) for value in left]
        tried = [pair for pair in tried if pair.differences]
        if not tried:
            return
        best = min(tried, key=lambda p: p.relative)
        if best.relative > NEAR:
            return
        found[key] = best
        left.remove(best.a)
    pairs |= found


def _pair(
    a: Value, b: Value, run_a: Run, run_b: Run, usual: Mapping[str, int] | None = None, strict: bool = True
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


def _read_as_usual(pairs: dict[Key, Pair], a: Run, b: Run) -> None:
    """Where no reading of plain tensors fits, take the one that fits most values of the same phase."""
    usual: dict[str, Counter[str]] = defaultdict(Counter)
    for pair in pairs.values():
        if pair.reading and pair.relative <= NEAR and pair.difference > 0:
            usual[pair.b.phase][pair.reading] += 1
    for key, pair in pairs.items():
        if pair.reading and pair.relative > NEAR:
            pairs[key] = _pair(pair.a, pair.b, a, b, usual[pair.b.phase])


def _read(a: Value, b: Value, x: Reading, y: Reading) -> Pair | None:
    reference = x.copies[0]
    found = []
    for copy in y.copies:
        if reference.vector is None or copy.vector is None or len(reference.vector) != len(copy.vector):
            return None
        found.append(_difference(copy, copy.vector - reference.vector, a, b))
    return Pair(a, b, tuple(found), y.said or x.said, a.norm)


def _alike(a: Value, b: Value) -> bool:
    """Whether two values of unknown readings are on the same ranks in the same way."""
    return [(c.ranks, c.shape, c.spec and c.spec.text) for c in a.copies] == [
        (c.ranks, c.shape, c.spec and c.spec.text) for c in b.copies
    ]


def _rank_by_rank(a: Value, b: Value) -> Pair:
    found = []
    for x, y in zip(a.copies, b.copies):
        if x.vector is not None and y.vector is not None and len(x.vector) == len(y.vector):
            found.append(_difference(y, y.vector - x.vector, a, b))
    return Pair(a, b, tuple(found), "rank by rank" if len(found) > 1 else "", a.norm)


def _difference(copy: Copy, vector: Vector, a: Value, b: Value) -> tuple[Copy, Vector, float]:
    norm = fp.norm(vector, b.seen if len(vector) == fp.length(b.seen) else _seen(copy, vector))
    if a.nonfinite != b.nonfinite and vector[fp.NONFINITE]:
        norm = math.inf
    if norm <= FLOOR * max(a.terms, b.terms):
        norm = 0.0
    return copy, vector, norm


def _seen(copy: Copy, vector: Vector) -> tuple[int, ...]:
    shape = copy.shape or (1,)
    return shape if fp.length(shape) == len(vector) else (*shape, 2)


def _bound(pair: Pair, a: Run, b: Run, by_a: Mapping[Key, Pair], by_b: Mapping[Key, Pair]) -> None:
    """Find what the pair was computed from, and how large its difference may be."""
    near_a, near_b = _nearest(pair.a, a, by_a), _nearest(pair.b, b, by_b)
    pair.inputs = tuple({id(p): p for p in [*[by_a[k] for k in near_a[0]], *[by_b[k] for k in near_b[0]]]}.values())
    pair.between = tuple([b.values[k] for k in near_b[1]])
    known = [p for p in pair.inputs if not math.isnan(p.difference)]
    if pair.b.exact:
        pair.allowed = 0.0 if all(p.difference == 0 for p in known) and known else math.inf
        if not pair.inputs:
            pair.allowed = 0.0
        return
    passed = sum([b.values[k].kind == "op" for k in near_b[1]]) + sum([a.values[k].kind == "op" for k in near_a[1]])
    relative = sum([_passed_on(p, pair) for p in known if not p.b.exact])
    if any(p.b.exact and p.difference > 0 for p in known):
        relative = math.inf
    eps = max(EPS.get(v.dtype, 0.0) for v in (pair.a, pair.b))
    values = [a.values[k] for k in near_a[0]]
    size = max(scale(pair.a, values), pair.norm)
    if pair.b.op in NORMALISING:
        relative += _by_element(known, pair)
    pair.allowed = size * (ROUNDING * eps + GAIN * relative) * PASSED ** min(passed, 8) if pair.inputs else 0.0
    if len(known) < len(pair.inputs) and not known:
        pair.allowed = math.inf


def _by_element(given: Sequence[Pair], result: Pair) -> float:
    """What an optimizer that divides a mean gradient by its own size adds to the relative difference of a parameter.

    Elements whose gradients are all rounding, such as those of a bias before a softmax, then differ as a whole, however
    small they are; a range of them is enough. They differ by no more than the step of the parameter.
    """
    ratios = []
    for pair in given:
        reference = pair.a.copies[0].vector
        for copy, vector, difference in pair.differences:
            if difference and reference is not None and len(reference) == len(vector):
                seen = _seen(copy, vector)
                apart, whole = fp.sizes(vector, seen)[0], fp.sizes(reference, seen)[0]
                ratios.append(float(np.nanmax(apart / np.maximum(whole, LEAST), initial=0.0)))
    step = result.a.copies[0].vector
    same = [p.a for p in given if p.a.module == result.a.module and p.a.seen == result.a.seen]
    before = same[0].copies[0].vector if same else None
    if step is None or before is None or len(step) != len(before):
        return 0.0
    moved = fp.norm(step - before, result.a.seen) / max(result.norm, LEAST)
    return moved * min(max(ratios, default=0.0), 1.0)


def _passed_on(given: Pair, result: Pair) -> float:
    """The relative difference that an input brings into a result. An exponential makes an absolute one of it."""
    if result.b.op not in EXPONENTIAL:
        return given.relative
    return max(given.relative, given.difference / math.sqrt(count(given.a)))


def _nearest(value: Value, run: Run, pairs: Mapping[Key, Pair]) -> tuple[list[Key], list[Key]]:
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


def _otherwise(pair: Pair, a: Run, b: Run) -> str:
    """What the ranks have instead, if that explains the difference."""
    if is_known(pair.b):
        return ""
    read = _pair(pair.a, pair.b, a, b, strict=False)
    if not read.difference <= pair.allowed:
        return ""
    each = "each rank has its own term of the sum, and nobody added them up"
    return each if read.reading == "terms" else f"right if read as {read.reading}"


def _differing(pairs: Iterable[Pair], a: Run, b: Run) -> Iterator[Finding]:
    for pair in pairs:
        if not pair.is_suspect:
            continue
        copy, vector, _ = max(pair.differences, key=lambda d: d[2])
        where = region(vector, _seen(copy, vector))
        wrong = [c for c, _, d in pair.differences if d > pair.allowed]
        terms = pair.b if copy.spec is not None and copy.spec.partial else None
        said, blamed = looks_like(pair.a.copies[0], copy, vector, terms)
        said = said or _otherwise(pair, a, b)
        relative, allowed = pair.relative, pair.allowed / max(pair.norm, LEAST)
        ranks = blamed or holders(wrong, where)
        yield Finding("value", pair.b, pair.a, ranks, where, relative, allowed, said, pair.between)


def _of_itself(run: Run, name: str = "B") -> Iterator[Finding]:
    """What is wrong within one run: redistributions that change the tensor, and replicas that differ."""
    for value in run.values.values():
        copies = [c for c in value.copies if c.vector is not None]
        if value.kind == "move":
            yield from _changed(run, value, copies, name)
        elif len(copies) > 1 and is_known(value):
            yield from _replicas(run, value, copies, name)


def _tolerance(value: Value, norm: float) -> float:
    return FLOOR * value.terms if value.exact else ROUNDING * EPS.get(value.dtype, 0.0) * norm


def _changed(run: Run, value: Value, copies: Sequence[Copy], name: str) -> Iterator[Finding]:
    source = run.values.get(value.inputs[0]) if value.inputs else None
    before = [] if source is None or not is_known(source) else [c for c in source.copies if c.vector is not None]
    if source is None or not before or not copies or before[0].shape != copies[0].shape:
        return
    reference = before[0].vector
    assert reference is not None
    norm = max(source.norm, source.terms)
    found = [(c, c.vector - reference) for c in copies if c.vector is not None and len(c.vector) == len(reference)]
    sized = [(c, v, fp.norm(v, _seen(c, v))) for c, v in found]
    allowed = _tolerance(value, norm)
    wrong = [s for s in sized if s[2] > allowed]
    if not wrong or _differ(before, source):
        return
    copy, vector, difference = max(wrong, key=lambda s: s[2])
    where = region(vector, _seen(copy, vector))
    norm = max(source.norm, LEAST)
    said, blamed = looks_like(before[0], copy, vector, source)
    if len(wrong) == len(copies) > 1 and all(_is_own_term(c, source) for c, _, _ in wrong):
        said, blamed = "each rank has its own term: nothing was reduced", tuple(sorted(source.parts))
    ranks = blamed or holders([c for c, _, _ in wrong], where)
    yield Finding("collective", value, source, ranks, where, difference / norm, allowed / norm, said, run=name)


def _is_own_term(copy: Copy, source: Value) -> bool:
    """Whether a reduced tensor is the term of one of the ranks that hold it."""
    whole = copy.vector
    if whole is None:
        return False
    terms = [source.parts[r].vector for r in copy.ranks if r in source.parts]
    known = [t for t in terms if len(t) == len(whole)]
    return any(np.allclose(t, whole, rtol=1e-9, atol=FLOOR * source.terms) for t in known)


def _differ(copies: Sequence[Copy], value: Value) -> bool:
    return any(_apart(c, copies[0]) > _tolerance(value, value.norm) for c in copies[1:])


def _apart(a: Copy, b: Copy) -> float:
    if a.vector is None or b.vector is None or len(a.vector) != len(b.vector):
        return 0.0
    return fp.norm(a.vector - b.vector, _seen(a, a.vector))


def _replicas(run: Run, value: Value, copies: Sequence[Copy], name: str) -> Iterator[Finding]:
    """Copies that differ, if those of the inputs do not."""
    if not _differ(copies, value):
        return
    inputs = [run.values[k] for k in value.inputs if k in run.values]
    for x in inputs:
        theirs = [c for c in x.copies if c.vector is not None]
        if len(theirs) > 1 and _differ(theirs, x):
            return
    agreeing = [[c for c in copies if _apart(c, one) <= _tolerance(value, value.norm)] for one in copies]
    most = max(agreeing, key=len)
    wrong = [c for c in copies if c not in most] if len(most) > 1 else list(copies)
    reference = most[0].vector
    copy = wrong[0] if wrong[0] is not most[0] else wrong[-1]
    assert reference is not None
    assert copy.vector is not None
    vector = copy.vector - reference
    where = region(vector, _seen(copy, vector))
    norm = max(value.norm, LEAST)
    yield Finding(
        "replicas", value, None, tuple(sorted({r for c in wrong for r in c.ranks})), where,
        fp.norm(vector, _seen(copy, vector)) / norm, _tolerance(value, norm) / norm, run=name,
    )  # fmt: skip


__all__ = ["EPS", "GAIN", "ROUNDING", "Comparison", "Finding", "Pair", "compare"]
