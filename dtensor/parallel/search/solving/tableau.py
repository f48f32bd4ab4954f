"""What a program is made of, while it is made."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from ....prices.solver import Columns, Rows
from ..states import State

Chosen: TypeAlias = dict[State, dict[int, float]]
"""For each state the variables of which one is 1 where a tensor is in it."""


@dataclass
class Phase:
    """Forward or backward.

    Attributes:
        busy: variable -> seconds of computation, and of moves that take the place of it.
        beside: variable -> seconds of moves that run beside computation.
    """

    busy: dict[int, float] = field(default_factory=dict[int, float])
    beside: dict[int, float] = field(default_factory=dict[int, float])


@dataclass
class Tableau:
    """Variables and constraints, and what the variables stand for.

    Attributes:
        columns, rows: the program.
        groups: variables of which one is 1, such as those of the options of a step.
        phases: what takes time in the forward, and in the backward.
    """

    columns: Columns = field(default_factory=Columns)
    rows: Rows = field(default_factory=Rows)
    groups: list[list[int]] = field(default_factory=list[list[int]])
    phases: tuple[Phase, Phase] = field(default_factory=lambda: (Phase(), Phase()))

    def one_of(self, variables: Sequence[int]) -> None:
        """One of these variables is 1."""
        self.groups.append(list(variables))
        self.rows.add(dict.fromkeys(variables, 1.0), 1.0, 1.0)

    def one_state(self, states: Iterable[State]) -> Chosen:
        """Add a variable for each of these states, of which one is 1."""
        found: Chosen = {s: {self.columns.add(0.0, integer=True): 1.0} for s in states}
        self.one_of([k for terms in found.values() for k in terms])
        return found


__all__ = ["Chosen", "Phase", "Tableau"]
