"""Random programs, eager, on ranks as threads: values and gradients are one device's.

`FUZZ_PROGRAMS=10000 pytest -m nightly tests/fuzz` runs that many (the default), with another seed each time, which is
printed; `FUZZ_SEED` gives it.
"""

import functools
import os

import pytest
from hypothesis import HealthCheck, given, seed, settings

from tests.fuzz.judging import judge_eager
from tests.fuzz.recipes import recipes

QUIET = settings(max_examples=60, deadline=None, database=None, suppress_health_check=list(HealthCheck))


@settings(QUIET, derandomize=True)
@given(recipe=recipes())
def test_eager_programs(recipe):
    judge_eager(recipe)


PARTS = 20
"""Nightly tests are divided into so many, each with a seed of its own."""


def programs() -> int:
    """How many eager programs the nightly tests run."""
    return int(os.environ.get("FUZZ_PROGRAMS") or 10_000)


@functools.cache
def first_seed() -> int:
    """The seed of the first part; printed, as it is another one each time."""
    start = int(os.environ.get("FUZZ_SEED") or int.from_bytes(os.urandom(3), "big"))
    print(f"FUZZ_SEED={start}")
    return start


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(PARTS))
def test_many_eager_programs(part):
    @seed(first_seed() + part)
    @settings(QUIET, max_examples=max(programs() // PARTS, 1))
    @given(recipe=recipes())
    def run(recipe):
        judge_eager(recipe)

    run()
