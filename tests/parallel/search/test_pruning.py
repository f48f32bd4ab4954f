"""What is ruled out before the solver runs, beside all solutions of small programs."""

from itertools import product

import numpy as np
import pytest

from dtensor.parallel.search.solving.pruning import Groups
from dtensor.parallel.search.solving.tableau import Tableau

SIZES = (2, 3, 3, 2, 4)


def tableau_of(sizes):
    tableau = Tableau()
    chosen = [tableau.one_state([(k,) for k in range(n)]) for n in sizes]
    return tableau, chosen


def drawn(seed, pairs):
    """Groups with random seconds, edges between pairs of them with random prices, and all solutions: the variables
    taken, and the seconds beside the fastest of each group."""
    rng = np.random.default_rng(seed)
    tableau, chosen = tableau_of(SIZES)
    groups = Groups(tableau)
    seconds = rng.integers(0, 10, sum(SIZES)).astype(float)
    slack, least = groups.slack(seconds)
    prices = {pair: rng.integers(0, 10, [SIZES[k] for k in pair]).astype(float) for pair in pairs}
    for matrix in prices.values():
        matrix[rng.random(matrix.shape) < 0.1] = np.inf
    edges = [groups.edge(chosen[a], chosen[b], matrix, float(a + b)) for (a, b), matrix in prices.items()]
    solutions = {}
    for picked in product(*[range(n) for n in SIZES]):
        variables = [tableau.groups[k][i] for k, i in enumerate(picked)]
        moves = sum(matrix[picked[a], picked[b]] for (a, b), matrix in prices.items())
        solutions[tuple(variables)] = sum(seconds[variables]) + moves - least
    return groups, slack, edges, solutions


def needed(solutions, room):
    return {k for variables, seconds in solutions.items() if seconds <= room for k in variables}


@pytest.mark.parametrize("room", [0.0, 4.0, 9.0, 20.0])
@pytest.mark.parametrize("seed", range(8))
def test_on_a_forest_all_is_ruled_out_that_no_solution_takes(seed, room):
    groups, slack, edges, solutions = drawn(seed, [(0, 1), (2, 1), (3, 4)])
    assert groups.slower(slack, edges, room) == set(range(sum(SIZES))) - needed(solutions, room)


@pytest.mark.parametrize("room", [0.0, 4.0, 9.0, 20.0])
@pytest.mark.parametrize("seed", range(8))
def test_what_a_solution_takes_is_not_ruled_out(seed, room):
    """Where edges close circles, or are parallel, or have one group at both ends."""
    pairs = [(0, 1), (1, 2), (2, 0), (3, 2), (2, 3), (3, 4), (4, 0), (1, 1)]
    groups, slack, edges, solutions = drawn(seed, pairs)
    gone = groups.slower(slack, edges, room)
    assert not gone & needed(solutions, room)


def test_several_forests_rule_out_more_than_one():
    more = 0
    for seed in range(8):
        groups, slack, edges, solutions = drawn(seed, [(0, 1), (1, 2), (2, 0), (3, 2), (3, 4), (4, 0)])
        useless = set(range(sum(SIZES))) - needed(solutions, 9.0)
        more += len(groups.slower(slack, edges, 9.0) & useless) - len(groups.slower(slack, edges[:4], 9.0) & useless)
    assert more > 0


def test_a_choice_says_a_state_for_each_variable():
    tableau, (chosen, other) = tableau_of((2, 2))
    del chosen[(1,)]
    with pytest.raises(AssertionError, match="for each variable"):
        Groups(tableau).edge(chosen, other, np.zeros((1, 2)), 1.0)
