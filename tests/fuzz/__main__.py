"""`python -m tests.fuzz eager --seconds 300 --seed 7 --out DIR`: random programs, and a script of each kind of failure.

    eager        on ranks as threads
    compiled     by the backend, passes included, static shapes
    dynamic      the same with dynamic=True, and batches of other lengths after the first
    inductor     static, with Inductor's code
    ranks        compiled for each rank in turn, static and dynamic, and compared; nothing runs

Hypothesis makes each failure small; its kind is known from then on, and the run goes on. The last line counts.
"""

import argparse
import time
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from .building import Recipe
from .crew import crew_of, stop_all
from .judging import Failure, judge_compiled, judge_eager, judge_ranks
from .recipes import cases, recipes
from .running import Setting

ROUND = 100
"""Programs between two looks at the clock."""


def judge(recipe: Recipe, setting: Setting | None, kind: str) -> bool:
    """Judge one program as its kind wants it; False if one device refuses it."""
    if setting is None:
        return judge_eager(recipe)
    return judge_ranks(recipe, setting) if kind == "ranks" else judge_compiled(recipe, setting, crew_of(setting.ranks))


def drawn(kind: str):
    """(recipe, setting) of a kind; eager programs have no setting."""
    if kind == "eager":
        return recipes().map(lambda recipe: (recipe, None))
    return st.one_of(cases("compiled"), cases("dynamic")) if kind == "ranks" else cases(kind)


def one_round(kind: str, number: int, known: dict[str, int], count: list[int], end: float, small: bool) -> None:
    """`ROUND` programs; raises failures that are not known, made small if `small`, and counts the others."""

    phases = [Phase.generate, Phase.shrink] if small else [Phase.generate]

    @seed(number)
    @settings(max_examples=ROUND, deadline=None, database=None, suppress_health_check=list(HealthCheck), phases=phases)
    @given(drawn(kind))
    def run(case):
        if time.monotonic() > end:
            return
        count[0] += 1
        try:
            count[1] += not judge(*case, kind)
        except Failure as error:
            if error.signature not in known:
                raise
            known[error.signature] += 1

    run()


def failures(error: BaseException) -> list[Failure]:
    """The failures that hypothesis raises: one, or several in a group, which may hold groups."""
    if isinstance(error, BaseExceptionGroup):
        return [found for e in error.exceptions for found in failures(e)]
    return [error] if isinstance(error, Failure) else []


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.split("\n")[0])
    parser.add_argument("kind", choices=("eager", "compiled", "dynamic", "inductor", "ranks"))
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("fuzz-findings"))
    parser.add_argument("--as-found", action="store_true", help="do not make failing programs small")
    given_ = parser.parse_args()
    given_.out.mkdir(parents=True, exist_ok=True)
    known: dict[str, int] = {}
    count = [0, 0]
    end, number = time.monotonic() + given_.seconds, given_.seed
    while time.monotonic() < end:
        try:
            one_round(given_.kind, number, known, count, end, not given_.as_found)
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
