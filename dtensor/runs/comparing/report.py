"""The report of a comparison, as text."""

import os
from collections import Counter
from collections.abc import Sequence

from .comparison import Comparison
from .findings import Finding
from .pairs import Pair
from .readings import is_known
from .values import RecordedRun, RecordedValue
from .whole_values import worst

MOST = 10
"""The number of findings after the first that are listed."""

TITLES = {
    "value": "First unexplained difference",
    "collective": "First unexplained difference: a redistribution changed the tensor",
    "replicas": "First unexplained difference: ranks that should hold the same do not",
    "nonfinite": "First NaN or infinity out of finite inputs",
}


def report(c: Comparison) -> str:
    """The report as text."""
    lines = [_run("A", c.a), _run("B", c.b), _counts(c), *_failed("A", c.a), *_failed("B", c.b)]
    if c.first is None:
        lines += ["", _agree(c)]
        return "\n".join(lines)
    lines += ["", *_first(c, c.first)]
    others = c.findings[1:]
    if others:
        lines += ["", f"{len(others)} more, in the order of execution:"]
        lines += [f"  {_line(f)}" for f in others[:MOST]]
        lines += [f"  ... and {len(others) - MOST} more"] if len(others) > MOST else []
    return "\n".join(lines)


def report_of_one(c: Comparison) -> str:
    """The report of `check`, of one run."""
    lines = [_run("B", c.b).removeprefix("B").strip(), f"{len(c.b.values):,} values"]
    if c.first is None:
        said = "Redistributions keep the tensor, replicas agree, and no operator makes NaN out of finite inputs."
        return "\n".join([*lines, "", said])
    more = [f"  {_line(f)}" for f in c.findings[1 : MOST + 1]]
    if more:
        more = ["", "More, in the order of execution:", *more]
    return "\n".join([*lines, "", *_first(c, c.first), *more])


def first(c: Comparison) -> str:
    """The first finding in one line; "" if there is none."""
    return _line(c.first) if c.first is not None else ""


def _run(name: str, run: RecordedRun) -> str:
    first = next(iter(run.headers.values()))
    program = " ".join([os.path.basename(word) if os.sep in word else word for word in first["program"]])
    ranks = f"{run.world} rank{'s' * (run.world > 1)}"
    return f"{name}  {run.folder}  {ranks}, {run.steps} step{'s' * (run.steps > 1)}, torch {first['torch']}, {program}"


def _failed(name: str, run: RecordedRun) -> list[str]:
    """What ended a run in the middle of its record, so that there is nothing of it to compare from there on."""
    ranks = "" if run.world == 1 else f" on rank {min(run.failed, default=0)}"
    return [f"{name} ended with an error{ranks}: {run.failed[min(run.failed)]}"] if run.failed else []


def _counts(c: Comparison) -> str:
    text = f"{len(c.pairs):,} values compared"
    for name, only in (("A", c.only_a), ("B", c.only_b)):
        if only:
            most = ", ".join([op for op, _ in Counter(v.op for v in only).most_common(4)])
            text += f"; {len(only):,} of {name} alone ({most}{', ...' if len({v.op for v in only}) > 4 else ''})"
    if c.a.steps != c.b.steps:
        text += (
            f"; A has {c.a.steps} steps and B {c.b.steps}, so only the first {min(c.a.steps, c.b.steps)} are compared"
        )
    unknown = sum([not p.differences for p in c.pairs])
    return text + (f"; {unknown} could not be judged" if unknown else "")


def _agree(c: Comparison) -> str:
    if not c.pairs:
        return "Nothing could be compared: the runs have no operator in common. Record the same program twice."
    if len(c.pairs) < max(len(c.only_a), len(c.only_b)):
        return "What was compared agrees, but most values are of one run alone. Are these records of the same program?"
    judged = [p for p in c.pairs if p.differences and p.certain and not p.b.exact]
    if not judged:
        return "The runs agree."
    largest = max(judged, key=lambda p: p.relative)
    most = f"{largest.relative:.1e} of its norm, of {largest.b}"
    return f"The runs agree. The largest difference is {most}; rounding explains it."


def _first(c: Comparison, f: Finding) -> list[str]:
    pair = next((p for p in c.pairs if p.b is f.value), None)
    where = [f"line       {f.value.line}"] if f.value.line else []
    found = [
        f"{TITLES[f.what]}: {f.value}, step {f.value.step}{' of A' if f.run == 'A' else ''}",
        *where,
        f"difference {_difference(f, pair)}",
        f"where      {where_of(f)}",
    ]
    if f.said:
        found.append(f"looks like {f.said}")
    if f.what == "value" and f.other is not None:
        found += [f"in A       {placed(f.other)}", f"in B       {placed(f.value, pair)}"]
    elif f.other is not None:
        found += [f"before     {placed(f.other)}", f"after      {placed(f.value)}"]
    else:
        found.append(f"placed     {placed(f.value)}")
    if pair is not None and pair.inputs:
        found += [f"inputs     {_inputs(pair)[0]}", *[f"           {line}" for line in _inputs(pair)[1:]]]
    if f.between:
        shown = [with_line(v) for v in reversed(f.between)][:4]
        found += [f"between    {shown[0]}", *[f"           {line}" for line in shown[1:]]]
    element = None if f.other is None or f.what != "value" else worst(f.other, f.value, c.a, c.b, *f.ranks[:1])
    if element is not None:
        found += [
            f"worst      {line}" if i == 0 else f"           {line}" for i, line in enumerate(str(element).split("\n"))
        ]
    hint = [] if element is not None else ["", *_next(f)]
    return [*[line if i == 0 else f"  {line}" for i, line in enumerate(found)], *hint]


def _difference(f: Finding, pair: Pair | None) -> str:
    if f.value.exact:
        return f"{f.relative:.1e} of its norm; {f.value.dtype} is not rounded, and its inputs are the same"
    if f.what == "nonfinite":
        return "its inputs are finite"
    if f.what == "replicas":
        return f"{f.relative:.1e} of its norm, where the inputs agree"
    return f"{f.relative:.1e} of its norm; {f.value.dtype} rounding and the inputs explain up to {f.allowed:.1e}"


def where_of(f: Finding) -> str:
    """The region of the tensor and the ranks that a finding is about."""
    ranks = f"rank {f.ranks[0]}" if len(f.ranks) == 1 else f"ranks {', '.join(map(str, f.ranks))}"
    region = "everywhere" if f.region is None else str(f.region)
    return f"{region}, on {ranks}" if f.ranks else region


def placed(value: RecordedValue, pair: Pair | None = None) -> str:
    """The type of a value, and how it is distributed."""
    spec = value.spec
    if spec is not None:
        return f"{value.dtype}{list(spec.shape)} on {spec}"
    if is_known(value):
        return f"{value.dtype}{list(value.first['g'])} on one rank"
    read = f", read as {pair.reading}" if pair is not None and pair.reading else ""
    return f"{value.dtype}{list(value.first['g'])} on each of {len(value.parts)} ranks, a plain tensor{read}"


def _inputs(pair: Pair) -> Sequence[str]:
    return [f"{with_line(p.b)}: differs by {p.relative:.1e}" for p in pair.inputs[:4]]


def with_line(value: RecordedValue) -> str:
    """A value, and the line of the program that computes it, if that is known."""
    return f"{value} {value.line}" if value.line else str(value)


def _line(f: Finding) -> str:
    said = f", {f.said}" if f.said else ""
    step = f"step {f.value.step} " if f.value.step else ""
    return f"{step}{with_line(f.value)}: {f.relative:.1e}, {where_of(f)}{said}"


def _next(f: Finding) -> list[str]:
    """What to run next."""
    pattern = f"{f.value.phase}/{f.value.module}/{f.value.op}"
    return [
        "To see the elements, record both again with whole values of this operator:",
        f"  dtensor record --values '{pattern}' FOLDER script.py",
    ]


__all__ = ["TITLES", "first", "placed", "report", "report_of_one", "where_of", "with_line"]
