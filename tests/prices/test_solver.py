"""The order in which programs are solved: relaxed, among what that touches, and among what may still be better."""

import pytest

from dtensor.prices.solver import INF, Columns, Model, Rows


def covering(costs, sets):
    """Choose sets that together have all of three elements."""
    columns, rows = Columns(), Rows()
    for cost in costs:
        columns.add(cost, integer=True)
    for element in range(3):
        rows.add({k: 1.0 for k, some in enumerate(sets) if element in some}, 1.0, INF)
    return Model(columns, rows, 1.0)


PAIRS = [(0, 1), (1, 2), (2, 0)]
ALL = (0, 1, 2)


def best(model, gap=1e-6):
    seen = []
    solve = model.solve

    def recorded(*args, **kwargs):
        seen.append(kwargs.get("without"))
        return solve(*args, **kwargs)

    model.solve = recorded
    return model.best(gap, 10.0, lambda never: set()), seen


def test_what_the_relaxed_solution_does_not_touch_is_taken_if_it_is_better():
    """Half of each pair costs 1.5, two pairs 2, and a whole one less than that; the last one cannot be better."""
    model = covering([1.0, 1.0, 1.0, 1.6, 2.1], [*PAIRS, ALL, ALL])
    found, seen = best(model)
    assert found.value == pytest.approx(1.6)
    assert found.x.round().tolist() == [0, 0, 0, 1, 0]
    assert model.bound == pytest.approx(1.6)
    assert [list(without) for without in seen[1:]] == [[False] * 3 + [True] * 2, [False] * 4 + [True]]


def test_what_is_near_enough_to_the_bound_is_the_end():
    model = covering([1.0, 1.0, 1.0, 1.6], [*PAIRS, ALL])
    found, seen = best(model, gap=0.3)
    assert (found.value, len(seen)) == (pytest.approx(2.0), 2)
    assert model.bound == pytest.approx(1.5)


def test_without_a_solution_no_bound_is_too_high():
    model = covering([1.0, 1.0], PAIRS[:1] + PAIRS[:1])
    assert best(model)[0] is None
    assert model.bound == INF


def test_a_solver_that_fails_leaves_what_was_found_before(monkeypatch):
    highspy = pytest.importorskip("highspy")
    run, runs = highspy.Highs.run, []

    def failing(self):
        runs.append(self)
        if len(runs) == 3:
            raise ValueError("vector::reserve")
        return run(self)

    monkeypatch.setattr(highspy.Highs, "run", failing)
    model = covering([1.0, 1.0, 1.0, 1.6], [*PAIRS, ALL])
    assert best(model)[0].value == pytest.approx(2.0)
    assert (model.bound, len(runs)) == (pytest.approx(1.5), 3)
