"""Programs as the solver HiGHS takes them, and the solver, which is imported when it is needed."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy

INF = float("inf")

COST = 1e3
"""About what a solution costs in the solver's terms, whose tolerances are absolute: larger numbers take longer."""

TOUCHED = 1e-4
"""A variable that is larger than this in the relaxed solution may be one."""


@dataclass
class Columns:
    """Variables between 0 and an upper end, their costs in seconds, and which of them are integers."""

    cost: list[float] = field(default_factory=list[float])
    upper: list[float] = field(default_factory=list[float])
    integer: list[bool] = field(default_factory=list[bool])

    def add(self, cost: float = 0.0, integer: bool = False, upper: float = 1.0) -> int:
        """Add a variable, and return its index."""
        self.cost.append(cost)
        self.upper.append(upper)
        self.integer.append(integer)
        return len(self.cost) - 1


@dataclass
class Rows:
    """Constraints: the coefficients of all, where each starts, and the ends between which its sum is."""

    start: list[int] = field(default_factory=list[int])
    index: list[int] = field(default_factory=list[int])
    value: list[float] = field(default_factory=list[float])
    lower: list[float] = field(default_factory=list[float])
    upper: list[float] = field(default_factory=list[float])

    def add(self, terms: dict[int, float], lower: float, upper: float) -> None:
        """Add a constraint on the sum of `terms`, variable -> coefficient."""
        self.start.append(len(self.index))
        self.index += terms.keys()
        self.value += terms.values()
        self.lower.append(lower)
        self.upper.append(upper)


@dataclass
class Found:
    """A solution as the solver gives it.

    Attributes:
        value: its cost.
        bound: no solution costs less.
        x: the values of the variables.
        reduced: what it costs at least to make each variable one that is zero, if the program was relaxed.
    """

    value: float
    bound: float
    x: Any
    reduced: Any


def highs() -> Any:
    """The solver's module.

    Raises:
        ImportError: it is not installed.
    """
    try:
        import highspy
    except ImportError:
        raise ImportError(
            "whole graphs are decided by HiGHS, which is not installed; write: pip install highspy"
        ) from None
    return highspy


class Model:
    """A program as the solver takes it.

    HiGHS is given it without what cannot be taken, and does not look for more of that: its presolve takes longer than
    it saves in a network of flows, and in 1.14 and 1.15 it ends the process for some programs, or, with some of its
    rules off, calls them infeasible. Nor does it search in smaller programs, which it would presolve.

    Args:
        columns, rows: the program.
        scale: costs are multiplied by it.

    Attributes:
        bound: no solution costs less, as far as it was solved; inf if there is none.
    """

    def __init__(self, columns: Columns, rows: Rows, scale: float) -> None:
        self.cost: Any = numpy.array(columns.cost) * scale
        self.upper: Any = numpy.array(columns.upper)
        self.integer: Any = numpy.array(columns.integer)
        self.bound: float = 0.0
        self._lower, self._upper = numpy.array(rows.lower), numpy.array(rows.upper)
        self._index, self._value = numpy.array(rows.index), numpy.array(rows.value)
        self._row = numpy.repeat(numpy.arange(len(rows.lower)), numpy.diff([*rows.start, len(rows.index)]))

    def best(
        self, gap: float, limit: float, moves: Callable[[set[int]], set[int]], most: int | None = None
    ) -> Found | None:
        """Solve it in steps; None if no solution is found.

        First without integrality, which gives the bound; then with it, among the integers that the first solution takes
        at least in part. Only if that is too far from the bound, among all with which it may cost less.

        Args:
            gap: how far from the bound, as a fraction, a solution may be.
            limit: seconds.
            moves: for integers that are zero, which of the other variables a solution may need.
            most: the last step is for programs of at most this many variables; None for all.
        """
        began = time.monotonic()
        relaxed = self.solve(gap, limit, relaxed=True)
        if relaxed is None:
            return None
        self.bound = relaxed.value
        without = self.integer & (relaxed.x < TOUCHED)
        others = numpy.zeros(len(without), bool)
        others[list(moves(set(numpy.nonzero(without)[0].tolist())))] = True
        found = self.solve(gap / 2, limit - (time.monotonic() - began), without=without | ~(self.integer | others))
        left = limit - (time.monotonic() - began)
        if found is not None and most is not None and len(without) > most:
            return found
        if found is None or (found.value - self.bound > gap * found.value and left > 1):
            costs = INF if found is None else found.value
            more = self.solve(gap, left, without=relaxed.reduced > costs - relaxed.value, start=found)
            self.bound = self.bound if more is None else max(self.bound, min(costs, more.bound))
            found = more if found is None or (more is not None and more.value < found.value) else found
        return found

    def solve(
        self,
        gap: float,
        limit: float,
        *,
        relaxed: bool = False,
        without: Any = None,
        start: Found | None = None,
        most: int | None = None,
    ) -> Found | None:
        """Solve it; None if no solution is found.

        Args:
            gap: how far from the bound, as a fraction, a solution may be.
            limit: seconds.
            relaxed: without integrality.
            without: for each variable whether it is zero; None if any may be more.
            start: a solution, below which it is to be; it saves the solver most of its own heuristics.
            most: nodes of the search; unlike seconds, they are the same on all ranks.
        """
        kept = self.upper > 0
        if without is not None:
            kept &= ~without
        highspy = highs()
        solver = highspy.Highs()
        options: dict[str, Any] = {
            "output_flag": False,
            "threads": 1,
            "time_limit": max(1.0, limit),
            "mip_rel_gap": gap,
            "presolve": "off",
            "mip_heuristic_effort": 0.0,
            "solve_relaxation": relaxed,
            "solver": "simplex" if relaxed else "choose",
        }
        if most is not None:
            options["mip_max_nodes"] = most
        for name, value in options.items():
            solver.setOptionValue(name, value)
        solver.passModel(self._part(highspy, kept))
        if start is not None:
            known = highspy.HighsSolution()
            known.col_value = start.x[kept].tolist()
            solver.setSolution(known)
        try:
            solver.run()
        except ValueError:  # "vector::reserve", seen in 1.15 after seconds of branching
            return None
        info = solver.getInfo()
        if without is None and solver.getModelStatus() == highspy.HighsModelStatus.kInfeasible:
            self.bound = INF
        if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
            return None
        bound = info.objective_function_value if relaxed else info.mip_dual_bound
        x, reduced = numpy.zeros(len(kept)), numpy.zeros(len(kept))
        solution = solver.getSolution()
        x[kept], reduced[kept] = solution.col_value, solution.col_dual if relaxed else 0.0
        return Found(info.objective_function_value, bound, x, reduced)

    def _part(self, highspy: Any, kept: Any) -> Any:
        """The program of these variables, and the constraints on them."""
        terms = kept[self._index]
        row, index, value = self._row[terms], (numpy.cumsum(kept) - 1)[self._index[terms]], self._value[terms]
        used = (self._lower > 0) | (self._upper < 0)
        used[row] = True
        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_ = int(kept.sum()), int(used.sum())
        lp.col_cost_, lp.col_lower_, lp.col_upper_ = self.cost[kept], numpy.zeros(lp.num_col_), self.upper[kept]
        lp.row_lower_, lp.row_upper_ = self._lower[used], self._upper[used]
        lengths = numpy.bincount((numpy.cumsum(used) - 1)[row], minlength=lp.num_row_)
        lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        lp.a_matrix_.start_ = numpy.concatenate([[0], numpy.cumsum(lengths)])
        lp.a_matrix_.index_, lp.a_matrix_.value_ = index, value
        kind = highspy.HighsVarType
        lp.integrality_ = [kind.kInteger if i else kind.kContinuous for i in self.integer[kept]]
        return lp


__all__ = ["COST", "INF", "TOUCHED", "Columns", "Found", "Model", "Rows"]
