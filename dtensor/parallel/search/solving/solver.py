"""Programs as the solver HiGHS takes them, and the solver, which is imported when it is needed."""

from dataclasses import dataclass, field
from typing import Any

import numpy

INF = float("inf")

COST = 1e3
"""About what a solution costs in the solver's terms, whose tolerances are absolute: larger numbers take longer."""

CRASHING = 1 << 9
"""The rule of presolve that is left out, of doubleton equations: with it HiGHS 1.14 and 1.15 end the process for some
programs. Nothing became slower without it."""

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
    """A solution as the solver gives it."""

    value: float
    bound: float
    x: Any


def highs() -> Any:
    """The solver's module.

    Raises:
        ImportError: it is not installed.
    """
    try:
        import highspy
    except ImportError:
        raise ImportError("dtensor.search needs the solver HiGHS; write: pip install 'dtensor[search]'") from None
    return highspy


def matrix(columns: Columns, rows: Rows, scale: float) -> Any:
    """A program as the solver takes it, with costs times `scale`."""
    highspy = highs()
    lp = highspy.HighsLp()
    n, m = len(columns.cost), len(rows.lower)
    lp.num_col_, lp.num_row_ = n, m
    lp.col_cost_ = numpy.array(columns.cost) * scale
    lp.col_lower_, lp.col_upper_ = numpy.zeros(n), numpy.array(columns.upper)
    lp.row_lower_, lp.row_upper_ = numpy.array(rows.lower), numpy.array(rows.upper)
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.start_ = numpy.array([*rows.start, len(rows.index)])
    lp.a_matrix_.index_ = numpy.array(rows.index)
    lp.a_matrix_.value_ = numpy.array(rows.value)
    kind = highspy.HighsVarType
    lp.integrality_ = [kind.kInteger if i else kind.kContinuous for i in columns.integer]
    return lp


def run(lp: Any, gap: float, limit: float, relaxed: bool = False) -> Found | None:
    """Solve a program; None if no solution is found."""
    highspy = highs()
    solver = highspy.Highs()
    options: dict[str, Any] = {
        "output_flag": False,
        "threads": 1,
        "time_limit": max(1.0, limit),
        "mip_rel_gap": gap,
        "presolve_rule_off": CRASHING,
        "solve_relaxation": relaxed,
        "solver": "simplex" if relaxed else "choose",
    }
    for name, value in options.items():
        solver.setOptionValue(name, value)
    solver.passModel(lp)
    solver.run()
    info = solver.getInfo()
    if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
        return None
    bound = info.objective_function_value if relaxed else info.mip_dual_bound
    x = numpy.array(solver.getSolution().col_value)
    return Found(info.objective_function_value, bound, x)


__all__ = ["COST", "INF", "TOUCHED", "Columns", "Found", "Rows", "matrix", "run"]
