"""Random programs, compiled for each rank in turn: all ranks communicate alike, whatever their local sizes.

Nightly a twentieth of as many as `FUZZ_PROGRAMS` says of each kind, with the seed of `test_eager`.
"""

import pytest
from hypothesis import given, seed, settings

from tests.fuzz.judging import judge_ranks
from tests.fuzz.recipes import cases
from tests.fuzz.test_eager import PARTS, QUIET, first_seed, programs


@pytest.fixture(autouse=True)
def _nobody_to_agree_with(monkeypatch):
    monkeypatch.setenv("DTENSOR_AGREEMENT", "0")


@settings(QUIET, derandomize=True, max_examples=2)
@given(case=cases("compiled"))
def test_programs_for_all_ranks(case):
    judge_ranks(*case)


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("kind", ["compiled", "dynamic"])
def test_many_programs_for_all_ranks(part, kind):
    @seed(first_seed() + part)
    @settings(QUIET, max_examples=max(programs() // PARTS // 20, 1))
    @given(case=cases(kind))
    def run(case):
        judge_ranks(*case)

    run()
