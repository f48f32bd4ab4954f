"""`python -m tests.fuzz eager --seconds 300 --seed 7 --out DIR`: random programs, and a script of each kind of failure.

    eager        on ranks as threads
    compiled     by the backend, passes included, static shapes
    dynamic      the same with dynamic=True, and batches of other lengths after the first
    inductor     static, with Inductor's code

Hypothesis makes each failure small; its kind is known from then on, and the run goes on. The last line counts.
"""

import argparse
import time
from pathlib import Path

from hypothesis import HealthCheck, given, seed, settings

from .crew import crew_of, stop_all
from .judging import Failure, judge_compiled, judge_eager
from .recipes import cases, recipes

ROUND = 100
"""Programs between two looks at the clock."""


def one_round(kind: str, number: int, known: dict[str, int], count: list[int], end: float) -> None:
    """`ROUND` programs; raises failures that are not known, made small, and counts the others."""

    def judged(judge) -> None:
        if time.monotonic() > end:
            return
        count[0] += 1
        try:
            count[1] += not judge()
        except Failure as error:
            if error.signature not in known:
                raise
            known[error.signature] += 1

    @seed(number)
    @settings(max_examples=ROUND, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(cases(kind) if kind != "eager" else recipes().map(lambda r: (r, None)))
    def run(case):
        recipe, setting = case
        judged(lambda: judge_compiled(recipe, setting, crew_of(setting.ranks)) if setting else judge_eager(recipe))

    run()


def failures(error: BaseException) -> list[Failure]:
    """The failures that hypothesis raises: one, or several in a group, which may hold groups."""
    if isinstance(error, BaseExceptionGroup):
        return [found for e in error.exceptions for found in failures(e)]
    return [error] if isinstance(error, Failure) else []


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.split("\n")[0])
    parser.add_argument("kind", choices=("eager", "compiled", "dynamic", "inductor"))
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("fuzz-findings"))
    given_ = parser.parse_args()
    given_.out.mkdir(parents=True, exist_ok=True)
    known: dict[str, int] = {}
    count = [0, 0]
    end, number = time.monotonic() + given_.seconds, given_.seed
    while time.monotonic() < end:
        try:
            one_round(given_.kind, number, known, count, end)
        except BaseException as error:
            found = failures(error)
            if not found:
                raise
        else:
            found = []
        for error in found:
            known[error.signature] = 0
            path = given_.out / f"{given_.kind}-{number:04d}-{len(known):03d}.py"
            path.write_text(error.script)
            print(f"{path}: {error.signature}", flush=True)
        number += 1
    stop_all()
    for name, again in sorted(known.items(), key=lambda item: -item[1]):
        print(f"{again:5} more of {name}")
    print(f"{count[0]} programs, of which {count[1]} were refused by one device; seeds {given_.seed} to {number - 1}")


if __name__ == "__main__":
    main()
