"""Prices of moves between states."""

import math
from itertools import product

import numpy as np
import pytest
import torch
from torch import nn

from dtensor.parallel.search.choices import Choices
from dtensor.parallel.search.recording import record
from dtensor.parallel.search.repeats import steps_of
from dtensor.parallel.search.states import Moves
from dtensor.prices.links import Network
from dtensor.prices.machine import MACHINES

from .programs import FAST, SLOW

ENTRIES = (None, 0, 1, "sum", "max")


@pytest.mark.parametrize("shape", [(8, 8), (7, 9)], ids=["even", "uneven"])
def test_every_move_has_a_price(shape):
    """Also one between terms of different kinds, and to shards of different lengths: several steps."""
    moves = Moves(Network.of((2, 4), (SLOW, SLOW)), shape, 4)
    states = list(product(ENTRIES, repeat=2))
    for a, b in product(states, repeat=2):
        assert 0 <= moves.price(a, b) < math.inf, (a, b)
        at, ways = a, dict(moves.way(a, b))
        following = dict(ways.keys())
        while at in following:
            at = following.pop(at)
        assert at == b
        assert not following


def test_what_lies_between_is_what_the_ways_are_made_of():
    moves = Moves(Network.of((2, 4), (SLOW, FAST)), (8, 8), 4)
    made, wanted = frozenset([("sum", None), (0, 1)]), frozenset([(None, None), (1, 0), ("max", 0)])
    expected = {}
    for a, b in product(made, wanted):
        expected |= moves.way(a, b)
    assert {(a, b): price for a, b, price in moves.between(made, wanted)} == pytest.approx(expected)


def test_prices_are_those_of_ways():
    moves = Moves(Network.of((2, 4), (SLOW, FAST)), (8, 8), 4)
    states = list(product(ENTRIES, repeat=2))
    expected = [[moves.price(a, b) for b in states] for a in states]
    np.testing.assert_allclose(moves.prices(states, states), expected)


def test_the_cheapest_way_has_several_moves():
    """Over a slow axis less is sent once the tensor is cut over the other one."""
    moves = Moves(Network.of((4, 4), (SLOW, SLOW)), (1024, 1024), 4)
    direct = moves.step(("sum", None), 0, None)
    assert moves.price(("sum", None), (None, None)) <= direct
    assert moves.price((0, 1), (1, 0)) > 0


@pytest.mark.parametrize("sizes", [(2, 2), (2, 1, 3)], ids=str)
def test_no_way_is_longer_than_one_over_another_state(sizes):
    moves = Moves(Network.of(sizes, (SLOW, *[FAST] * (len(sizes) - 1))), (12, 24), 4)
    states = list(product((None, 0, 1, "sum"), repeat=len(sizes)))
    price = {(a, b): moves.price(a, b) for a, b in product(states, repeat=2)}
    for a, b, via in product(states, repeat=3):
        assert price[a, b] <= price[a, via] + price[via, b] + 1e-12, (a, via, b)


def test_shards_that_are_not_contiguous_are_copied():
    """As are those that share a bucket and what an all-to-all exchanges, along whatever dim."""
    network, shape = Network.of((4,), (FAST,)), (1024, 1024)
    whole, part = 4 * 1024 * 1024, 1024 * 1024

    def copied(a, b, full=None):
        slow, free = Moves(network, shape, 4, memory=1.0, full=full), Moves(network, shape, 4, full=full)
        return (slow.step(a, 0, *b) - free.step(a, 0, *b)) / 2

    assert copied((0,), (None,)) == pytest.approx(0, abs=1)
    assert copied((1,), (None,)) == pytest.approx(whole)
    assert copied(("sum",), (0,)) == pytest.approx(0, abs=1)
    assert copied(("sum",), (1,)) == pytest.approx(whole)
    assert copied((0,), (1,)) == copied((1,), (0,)) == pytest.approx(2 * part)
    large, small = (2.0 * whole,), (0.5 * whole,)
    assert copied((0,), (None,), large) == copied((1,), (None,), large) == pytest.approx(whole + part)
    assert copied(("sum",), (None,), large) == pytest.approx(2 * whole)
    assert copied((0,), (None,), small) == pytest.approx(0, abs=1)


class Signs(nn.Module):
    """Negation makes a minimum of a maximum, but something has to make that first."""

    def __init__(self, largest):
        super().__init__()
        self.largest = largest

    def forward(self, x):
        return ((-x).amax(1) if self.largest else -x).sum()


@pytest.mark.parametrize(("largest", "kinds"), [(False, {"sum"}), (True, {"sum", "max", "min"})])
def test_only_partial_tensors_that_can_come_about_have_states(largest, kinds):
    steps = steps_of(record(Signs(largest), (torch.randn(4, 8),), training=False))
    choices = Choices(torch.device("cpu"), Network.of((2,), (FAST,)), MACHINES["cpu"])
    assert choices.made(steps.steps) == kinds
