"""The page of a plan: one self-contained HTML file, with what `Plan.explain` says as tables and bars."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dtensor.errors import ArgumentError
from dtensor.parallel.whole_model.plan import Plan
from dtensor.parallel.whole_model.prediction import Prediction, amount, duration, summary
from dtensor.program.files import write_whole

from .rendering import rendered

FOUND = "this plan"


def write_page(plan: Plan, path: Path, title: str = "A plan") -> None:
    """Write the page of a plan.

    Raises:
        ValueError: nothing is predicted of the plan.
        OSError: the file cannot be written.
    """
    write_whole(path, page(plan, title))


def page(plan: Plan, title: str = "A plan") -> str:
    """Return the HTML of the page of a plan.

    Raises:
        ValueError: nothing is predicted of the plan.
    """
    p = plan.prediction
    if p is None:
        raise ArgumentError("nothing is predicted of this plan; dtensor.predict does that")
    others = [("others", "Other plans", _plans(p, {FOUND: (p.seconds, p.memory), **p.others}))]
    if p.what_if:
        others.append(("otherwise", "The best plan, if things were otherwise", _plans(p, p.what_if)))
    return rendered(
        "plan",
        title=title,
        plan=str(plan),
        summary=summary(p),
        bound=f"Within {p.gap:.1%} of the best there is, under this model of cost." if p.bound else "",
        tables=others,
        modules=_modules(p),
        moves=[(at, op, a, b, n, duration(s)) for at, op, a, b, n, s in p.moves],
        gathered=", ".join(p.gathered),
    )


def _plans(p: Prediction, plans: Mapping[str, tuple[float, float]]) -> list[dict[str, Any]]:
    most = max([seconds for seconds, _ in plans.values()])
    return [
        {
            "name": name,
            "time": duration(seconds),
            "ratio": f"{seconds / p.seconds:.2f}" if p.seconds else "",
            "memory": amount(memory),
            "width": round(100 * seconds / most, 1) if most else 0,
        }
        for name, (seconds, memory) in sorted(plans.items(), key=lambda item: item[1])
    ]


def _modules(p: Prediction) -> list[dict[str, Any]]:
    names = sorted({*p.modules, *p.held}, key=lambda n: (-sum(p.modules.get(n, (0.0, 0.0))), n))
    rows = [(n, *p.modules.get(n, (0.0, 0.0)), *p.held.get(n, (0.0, 0.0))) for n in names]
    longest = max([a + b for _, a, b, _, _ in rows], default=0.0) or 1.0
    largest = max([a + b for *_, a, b in rows], default=0.0) or 1.0
    return [
        {
            "name": name or "outside",
            "computing": duration(computing),
            "communicating": duration(communicating),
            "static": amount(static),
            "kept": amount(kept),
            "widths": [
                round(100 * x, 1)
                for x in (computing / longest, communicating / longest, static / largest, kept / largest)
            ],
        }
        for name, computing, communicating, static, kept in rows
    ]


__all__ = ["page", "write_page"]
