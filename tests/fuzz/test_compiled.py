"""Random programs, compiled with the passes, on real ranks: values and gradients are one device's.

Nightly as many as `FUZZ_PROGRAMS` says, with the seed of `test_eager`.
"""

import pytest
from hypothesis import given, seed, settings

from tests.fuzz.crew import crew_of, stop_all
from tests.fuzz.judging import judge_compiled
from tests.fuzz.recipes import cases
from tests.fuzz.test_eager import PARTS, QUIET, first_seed, programs


@pytest.fixture(scope="module", autouse=True)
def _crews():
    yield
    stop_all()


def judge(case):
    recipe, setting = case
    judge_compiled(recipe, setting, crew_of(setting.ranks))


@pytest.mark.nightly
@settings(QUIET, derandomize=True, max_examples=25)
@given(case=cases("compiled"))
def test_compiled_programs(case):
    judge(case)


@pytest.mark.nightly
@settings(QUIET, derandomize=True, max_examples=4)
@given(case=cases("inductor"))
def test_programs_by_inductor(case):
    judge(case)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["compiled", "inductor"])
@pytest.mark.parametrize("part", range(PARTS))
def test_many_compiled_programs(part, kind):
    count = programs() // PARTS // (3 if kind == "compiled" else 30)

    @seed(first_seed() + part)
    @settings(QUIET, max_examples=max(count, 1))
    @given(case=cases(kind))
    def run(case):
        judge(case)

    run()
