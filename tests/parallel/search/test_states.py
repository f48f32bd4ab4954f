"""Prices of moves between states."""

import math
from itertools import product

import pytest

from dtensor.layout.cost import Network
from dtensor.parallel.search.states import Moves

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


def test_the_cheapest_way_has_several_moves():
    """Over a slow axis less is sent once the tensor is cut over the other one."""
    moves = Moves(Network.of((4, 4), (SLOW, SLOW)), (1024, 1024), 4)
    direct = moves.step(("sum", None), 0, None)
    assert moves.price(("sum", None), (None, None)) <= direct
    assert moves.price((0, 1), (1, 0)) > 0
