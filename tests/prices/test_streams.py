"""One stream that computes and one that sends, by hand."""

import pytest

from dtensor.prices.streams import Streams


def test_what_is_computed_meanwhile_hides_a_collective():
    """Sending that takes nothing of the processor: only what is left at the wait is exposed."""
    s = Streams()
    flight = s.start(3.0, 0.0)
    s.compute(2.0)
    s.wait(flight)
    assert (s.now, flight.exposed) == (3.0, 1.0)
    s.wait(flight)
    assert (s.now, flight.exposed) == (3.0, 1.0), "a second wait finds it there"


def test_sending_takes_a_part_of_the_processor():
    s = Streams()
    flight = s.start(4.0, 0.25)
    s.compute(1.5)
    assert (s.now, flight.exposed) == (2.0, 0.5)
    s.compute(3.0)  # half of it while the other two seconds are sent
    assert (s.now, flight.exposed) == (5.5, 1.0)
    assert s.end == 5.5


def test_all_of_the_processor():
    """Computation stands still, once: not while it is computed, and again where it is waited for."""
    s = Streams()
    first, second = s.start(2.0, 1.0), s.start(1.0, 1.0)
    s.compute(1.0)
    assert (s.now, first.exposed, second.exposed) == (4.0, 2.0, 1.0)
    s.wait(first)
    s.wait(second)
    assert s.now == 4.0


def test_collectives_queue():
    s = Streams()
    first = s.start(2.0, 0.0)
    s.compute(1.0)
    second = s.start(1.0, 0.0)
    assert (second.start, second.end) == (2.0, 3.0)
    s.wait(second)
    assert (first.exposed, second.exposed, s.now) == (0.0, 2.0, 3.0)
    last = s.start(1.0, 0.0)
    assert (last.start, s.now, s.end) == (3.0, 3.0, 4.0)


@pytest.mark.parametrize("taken", [0.0, 0.5, 1.0])
def test_nothing_takes_no_time(taken):
    s = Streams()
    s.start(1.0, taken)
    s.compute(0.0)
    assert s.now == 0.0
