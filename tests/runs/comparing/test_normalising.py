"""Steps of Adam: elements whose gradients are all rounding may step elsewhere; all other differences are reported."""

from pathlib import Path

import pytest
import torch

from dtensor.runs.comparing.bounds import allowed
from dtensor.runs.comparing.pairs import pair_of
from dtensor.runs.comparing.values import RecordedPart, RecordedRun, RecordedValue
from dtensor.runs.records import fingerprint as fp

SHAPE = (48, 32)
SIZE = 1e-3
"""Of gradients."""
RATE, EPSILON = 1e-3, 1e-8
RUN = RecordedRun(Path("run"), {0: {}}, {})


def value(op, x):
    line = {"k": "op", "d": "float32", "g": SHAPE, "s": 0, "p": "optimizer", "m": "weight", "o": op, "l": "", "n": 0}
    return RecordedValue((op,), 0, {0: RecordedPart(0, line, fp.fingerprint(x.float(), SHAPE, (0, 0)).numpy(), None)})


def pair(op, a, b):
    return pair_of(value(op, a), value(op, b), RUN, RUN)


def ratio(a, b, change=lambda p: p, rate=RATE):
    """How large the difference of a parameter is after the first step with gradients `a` and `b`, and, in the second
    run, with another rate or changed afterwards; in parts of what is allowed."""
    p = 0.02 * torch.randn(SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    sizes = a.abs() + EPSILON, b.abs() + EPSILON
    given = [pair("mul", p, p), pair("lerp", a, b), pair("add", *sizes)]
    result = pair("addcdiv", p - RATE * a / sizes[0], change(p - rate * b / sizes[1]))
    result.inputs = tuple(given)
    return result.difference / allowed(result, given, [g.a for g in given])


@pytest.fixture
def gradient():
    return SIZE * torch.randn(SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def rounded(x, by, seed=2):
    return x + SIZE * by * torch.randn(SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_rounding_is_explained(gradient):
    assert ratio(gradient, rounded(gradient, 1e-7)) < 0.3


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_few_elements_that_are_all_rounding_are_explained(gradient, count):
    """Few of many: the norm of the difference of the gradients does not show them."""
    places = torch.tensor([100, 777, 1400])[:count]
    gradient.view(-1)[places] = 1e-9
    other = rounded(gradient, 1e-7)
    other.view(-1)[places] = -1e-7
    assert ratio(gradient, other) < 1


def test_many_such_elements_are_not(gradient):
    """They would show in the difference of the gradients."""
    gradient.view(-1)[::10] = 1e-9
    other = rounded(gradient, 1e-7)
    other.view(-1)[::10] = -1e-9
    assert ratio(gradient, other) > 2


def test_more_of_them_are_explained_by_larger_differences_of_gradients(gradient):
    gradient.view(-1)[::10] *= 1e-3
    assert ratio(gradient, rounded(gradient, 1e-2)) < 0.7


@pytest.mark.parametrize("seed", range(20))
def test_tiny_gradients_are_explained(gradient, seed):
    """Of the size of epsilon, where steps are between none and a whole one."""
    gradient *= 1e-5
    assert ratio(gradient, gradient + 1e-5 * (rounded(gradient, 1e-6, seed) - gradient)) < 0.7


def test_another_rate_is_not(gradient):
    assert ratio(gradient, rounded(gradient, 1e-7), rate=1.02 * RATE) > 2


def test_a_parameter_in_bfloat16_is_not(gradient):
    assert ratio(gradient, rounded(gradient, 1e-7), lambda p: p.bfloat16().double()) > 2


def test_an_element_that_is_more_than_a_step_away_is_not(gradient):
    def changed(p):
        p[3, 5] += 20 * RATE
        return p

    assert ratio(gradient, rounded(gradient, 1e-7), changed) > 2


def test_a_row_that_steps_the_wrong_way_is_not(gradient):
    other = rounded(gradient, 1e-7)

    def changed(p):
        p[7] += 2 * RATE * gradient[7].sign()
        return p

    assert ratio(gradient, other, changed) > 1.3
