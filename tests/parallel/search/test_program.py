"""The integer program: what may be left out of it."""

import pytest
import torch

from dtensor.parallel.search.choices import Choices
from dtensor.parallel.search.recording import record
from dtensor.parallel.search.repeats import steps_of
from dtensor.parallel.search.solving.program import Program
from dtensor.prices.links import Network
from dtensor.prices.machine import MACHINES
from dtensor.prices.solver import COST, Model

from .programs import FAST, MODELS, SLOW, made


@pytest.mark.parametrize("link", [SLOW, FAST], ids=["slow", "fast"])
@pytest.mark.parametrize("name", MODELS)
def test_what_takes_too_long_to_matter_is_left_out_and_the_best_stays(name, link):
    steps = steps_of(record(*made(name)))
    choices = Choices(torch.device("cpu"), Network.of((2, 2), link), MACHINES["cpu"])
    whole = Program(steps, choices)
    best = whole.solve(gap=1e-6)
    fewer = Program(steps, choices, below=1.01 * best.seconds)
    assert len(fewer.columns.cost) < len(whole.columns.cost)
    assert fewer.solve(gap=1e-6).seconds == pytest.approx(best.seconds, rel=1e-5)
    none = Program(steps, choices, below=0.98 * best.seconds)
    none.solve(gap=1e-6)
    assert 0.98 * best.seconds * (1 - 1e-9) <= none.bound


@pytest.mark.parametrize("link", [SLOW, FAST], ids=["slow", "fast"])
@pytest.mark.parametrize("name", MODELS)
def test_the_best_is_found_in_steps(name, link):
    steps = steps_of(record(*made(name)))
    program = Program(steps, Choices(torch.device("cpu"), Network.of((4,), link), MACHINES["cpu"]))
    at_once = Model(program.columns, program.rows, COST / program.least).solve(1e-6, 20.0)
    assert program.solve(gap=1e-6).seconds == pytest.approx(at_once.value * program.least / COST, rel=1e-5)
