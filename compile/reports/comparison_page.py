"""The page of a comparison of two recorded runs: one self-contained HTML file, for people.

    report      the text of `dtensor compare`
    step        a dot for each value in the order of execution: its difference, with the bound that it may not exceed
    details     of the value that was clicked: where it is computed, how it is distributed, what it was computed from
    values      all of them in a table to sort and to search
    alone       what only one of the runs computes

Numbers are relative to the norm of the value in A. In JSON there is neither infinity nor NaN: infinity is the text
"Infinity", and a difference that could not be judged is null.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dtensor.program.files import write_whole
from dtensor.runs.comparing.comparison import Comparison
from dtensor.runs.comparing.findings import Finding
from dtensor.runs.comparing.pairs import LEAST, Pair
from dtensor.runs.comparing.report import TITLES, placed, report, where_of, with_line
from dtensor.runs.comparing.values import RecordedValue

from .rendering import rendered

PARTS = {
    "forward": "forward",
    "backward": "backward",
    "recompute": "backward",
    "gradient": "optimizer",
    "optimizer": "optimizer",
    "updated": "optimizer",
}
"""Phase -> the part of a step that it belongs to. Parameters are recorded where they are read first."""

NAMES = ("order", "step", "phase", "module", "op", "line")
"""What is told of every value, by the names of its attributes."""


@dataclass(frozen=True)
class Point:
    """A value on the page.

    Attributes:
        value: the value, in the run that the page names for it.
        pair: what it is compared with; None if only the finding is about it.
        findings: what is found about it.
    """

    value: RecordedValue
    pair: Pair | None
    findings: tuple[Finding, ...] = ()


def write_comparison(path: Path, c: Comparison) -> None:
    """Write the page of a comparison.

    Raises:
        OSError: it cannot be written.
    """
    write_whole(path, page(c))


def page(c: Comparison) -> str:
    """Return the HTML of the page of a comparison."""
    points = _points(c)
    numbers = {id(p.pair): k for k, p in enumerate(points) if p.pair is not None}
    where = {id(f): k for k, p in enumerate(points) for f in p.findings}
    data = {
        "points": [_described(p, numbers) for p in points],
        "bands": list(_bands(points)),
        "findings": [where[id(f)] for f in c.findings],
        "alone": [
            _of_value(v) | {"run": r, "b": placed(v)} for r, vs in (("A", c.only_a), ("B", c.only_b)) for v in vs
        ],
    }
    return rendered("comparison", data, a=c.a.folder.name, b=c.b.folder.name, report=report(c), found=len(c.findings))


def _points(c: Comparison) -> list[Point]:
    """The pairs in the order of execution of B, and among them the findings about other values."""
    pairs = sorted(c.pairs, key=lambda p: p.b.order)
    of_b, of_a = {id(p.b): p for p in pairs}, {id(p.a): p for p in pairs}
    told: dict[int, list[Finding]] = {}
    alone: list[tuple[float, Point]] = []
    for f in c.findings:
        pair = (of_b if f.run == "B" else of_a).get(id(f.value))
        if pair is not None:
            told.setdefault(id(pair), []).append(f)
            continue
        later = [p.b.order for p in pairs if p.a.order > f.value.order] if f.run == "A" else [f.value.order]
        alone.append((min(later, default=math.inf) - 0.5, Point(f.value, None, (f,))))
    found = [(float(p.b.order), Point(p.b, p, tuple(told.get(id(p), ())))) for p in pairs]
    return [point for _, point in sorted([*found, *alone], key=lambda entry: entry[0])]


def _of_value(v: RecordedValue) -> dict[str, Any]:
    dtype = f"{v.dtype}{list(v.first['g'])}"
    return {name: getattr(v, name) for name in NAMES} | {"number": v.first["n"], "type": dtype}


def _alone(run: str, values: Sequence[RecordedValue]) -> list[dict[str, Any]]:
    return [_of_value(v) | {"run": run, "b": placed(v)} for v in values]


def _described(point: Point, numbers: dict[int, int]) -> dict[str, Any]:
    pair, first = point.pair, next(iter(point.findings), None)
    described = _of_value(point.value) | {"findings": [_finding(f) for f in point.findings]}
    if pair is None:
        assert first is not None
        other = "" if first.other is None else placed(first.other)
        return described | {
            "a": other, "b": placed(point.value), "difference": _number(first.relative),
            "allowed": _number(first.allowed), "certain": True, "inputs": [],
        }  # fmt: skip
    return described | {
        "a": placed(pair.a),
        "b": placed(pair.b, pair),
        "difference": _number(pair.relative),
        "allowed": _number(_relative_bound(pair)),
        "norm": _number(pair.norm),
        "reading": pair.reading,
        "certain": pair.certain,
        "inputs": [numbers[id(p)] for p in pair.inputs if id(p) in numbers],
        "between": [with_line(v) for v in pair.between],
    }


def _relative_bound(pair: Pair) -> float:
    return pair.allowed / max(pair.norm, LEAST)


def _finding(f: Finding) -> dict[str, Any]:
    title = TITLES[f.what].removeprefix("First ")
    return {
        "title": title[:1].upper() + title[1:],
        "run": f.run,
        "where": where_of(f),
        "said": f.said,
        "difference": _number(f.relative),
        "allowed": _number(f.allowed),
    }


def _number(x: float) -> float | str | None:
    """A number as JSON has it."""
    if math.isnan(x):
        return None
    return "Infinity" if math.isinf(x) else float(f"{x:.4g}")


def _bands(points: Sequence[Point]) -> Iterator[dict[str, Any]]:
    """Parts of steps that follow each other: number of the first point and one past the last."""
    band: dict[str, Any] | None = None
    for k, point in enumerate(points):
        step, phase = point.value.step, point.value.phase
        part = PARTS.get(phase) or ("forward" if band is None or band["step"] != step else band["part"])
        if band is None or (band["step"], band["part"]) != (step, part):
            if band is not None:
                yield band
            band = {"step": step, "part": part, "from": k}
        band["to"] = k + 1
    if band is not None:
        yield band


__all__ = ["page", "write_comparison"]
