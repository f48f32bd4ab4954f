"""What runs when in a half of a step, by hand: a link of 1 s for 10 bytes and 1 s to start, operators of 1 s."""

import pytest

from dtensor.parallel.search.schedule import Half
from dtensor.parallel.search.states import Sending
from dtensor.prices.links import Link, Network
from dtensor.prices.machine import Machine

LINK = Link(alpha=0.0, bandwidth=5.0, memory=1e3, launch=0.0, start=1.0)
MACHINE = Machine(flops=1.0, half=1.0, memory=1e9, launch=0.0)


def half(needs):
    made = Half(Network.of((2,), LINK), MACHINE, needs)
    for k in range(len(needs)):
        made.compute(k, 1.0)
    return made


def sending(op, bytes_):
    return Sending(op, 0, bytes_, 0.0, 0.0)


GATHER, SCATTER, REDUCE = (sending(op, 1e3) for op in ("all_gather", "reduce_scatter", "all_reduce"))
LARGE = 1.0 + 100.0  # half of the bytes are sent, an all-reduce sends them twice


def test_the_first_gather_and_the_last_reduction_are_exposed():
    made = half([[], [0], [1]])
    made.share(0, GATHER, gradient=False)
    made.share(2, SCATTER, gradient=True)
    assert made.seconds() == pytest.approx(LARGE + 3.0 + LARGE)
    assert made.beside == pytest.approx(2 * LARGE)
    assert made.least == pytest.approx(2 * LARGE)


def test_a_gather_starts_when_the_one_before_it_is_waited_for():
    made = half([[], [0], [1]])
    for k in range(3):
        made.share(k, GATHER, gradient=False)
    assert made.seconds() == pytest.approx(3 * LARGE + 1.0)


def test_small_collectives_share_a_bucket():
    """Ten bytes take a second, so that nine of a start each would take ten seconds more."""
    made = half([[]])
    for _ in range(9):
        made.share(0, sending("all_gather", 10.0), gradient=False)
    assert made.seconds() == pytest.approx(1.0 + 9.0 + 1.0)


def test_a_bucket_is_full():
    """At ten times its start, and of gradients that come later at four times."""
    made = half([[]])
    for _ in range(11):
        made.share(0, sending("all_gather", 10.0), gradient=False)
    assert made.seconds() == pytest.approx((1.0 + 10.0) + (1.0 + 1.0) + 1.0)
    made = half([[k - 1] if k else [] for k in range(6)])
    for k in range(6):
        made.share(k, sending("reduce_scatter", 10.0), gradient=True)
    assert made.seconds() == pytest.approx(5.0 + (1.0 + 5.0) + (1.0 + 1.0))


def test_what_is_sent_is_computed_first():
    """Operator 2 makes a gradient, 1 does not need to run before it, and computes while it is sent."""
    made = half([[], [0], [0], [1]])
    made.share(2, REDUCE, gradient=True)
    assert made.seconds() == pytest.approx(2.0 + 1.0 + 200.0)
    made = half([[], [0], [0], [1]])
    made.wait(1, 5.0, 0)  # then what stands before an operator that waits runs before it
    made.share(2, REDUCE, gradient=True)
    assert made.seconds() == pytest.approx(2.0 + 5.0 + 1.0 + 201.0 - 1.0)


def test_what_no_operator_waits_for_runs_beside():
    made = half([[], [0], [1]])
    made.send(1, 10.0, 0.5, 0)
    assert made.seconds() == pytest.approx(1.0 + 10.0)
    assert (made.beside, made.taken) == (10.0, 5.0)
