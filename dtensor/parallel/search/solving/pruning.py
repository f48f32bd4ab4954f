"""What no solution of interest takes, as it turns out before the solver runs.

A solution takes one variable of each group. Its seconds are at least those of the fastest variable of each, with what
those that it takes are slower, and with the moves between their states. Without all moves but those of a forest over
the groups this is solved by messages to the roots and back (Bertelè and Brioschi, "Nonserial Dynamic Programming",
1972), which say for each variable what every solution with it takes. Forests of other moves rule out more.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

import numpy

from .tableau import Chosen, Tableau

FORESTS = 6
"""Forests that are tried; the first rules out most."""


@dataclass
class Edge:
    """What it takes to get from the state that one group decides to the state that another one does.

    Attributes:
        ends: the groups.
        rows, columns: for each variable of the first and of the second group, which state it stands for.
        prices: seconds from state to state; inf if there is no way.
        weight: how much depends on it, which decides what becomes a forest.
        used: in how many forests it was.
    """

    ends: tuple[int, int]
    rows: Any
    columns: Any
    prices: Any
    weight: float
    used: int = 0

    def other(self, group: int) -> int:
        """The other end."""
        return self.ends[1] if group == self.ends[0] else self.ends[0]

    def message(self, group: int, seconds: Any) -> Any:
        """What each variable of the other end takes at least, if those of one end take these seconds."""
        first = group == self.ends[0]
        here, there, prices = (self.rows, self.columns, self.prices) if first else self._back()
        least = numpy.full(len(prices), numpy.inf)
        numpy.minimum.at(least, here, seconds)
        return (least[:, None] + prices).min(0)[there]

    def _back(self) -> tuple[Any, Any, Any]:
        return self.columns, self.rows, self.prices.T


class Groups:
    """The groups of a tableau, by their variables."""

    def __init__(self, tableau: Tableau) -> None:
        self.groups: list[list[int]] = tableau.groups
        self._of, self._place = (numpy.zeros(len(tableau.columns.cost), int) for _ in range(2))
        for k, variables in enumerate(self.groups):
            self._of[variables], self._place[variables] = k, numpy.arange(len(variables))

    def edge(self, made: Chosen, wanted: Chosen, prices: Any, weight: float) -> Edge:
        """An edge between the groups that decide two choices; `prices` has their states in their order."""
        (a, rows), (b, columns) = self._states(made), self._states(wanted)
        return Edge((a, b), rows, columns, prices, weight)

    def _states(self, chosen: Chosen) -> tuple[int, Any]:
        numbered = [(k, i) for i, terms in enumerate(chosen.values()) for k in terms]
        variables, states = (numpy.array(some) for some in zip(*numbered))
        group = int(self._of[variables[0]])
        assert len(numbered) == len(self.groups[group]), "a choice says a state for each variable of its group"
        found = numpy.zeros(len(self.groups[group]), int)
        found[self._place[variables]] = states
        return group, found

    def slack(self, seconds: Any) -> tuple[list[Any], float]:
        """How much longer each variable takes than the fastest of its group; and the sum of the fastest."""
        took = [seconds[variables] for variables in self.groups]
        return [x - x.min() for x in took], sum([float(x.min()) for x in took])

    def slower(self, slack: list[Any], edges: Sequence[Edge], room: float) -> set[int]:
        """The variables with which every solution takes more than `room` seconds beside the sum of the fastest."""
        for _ in range(FORESTS):
            more = _along(slack, _forest(len(slack), edges), edges)
            slack = [numpy.where(x > room, numpy.inf, had) for x, had in zip(more, slack)]
        return {k for variables, x in zip(self.groups, slack) for k in numpy.array(variables)[numpy.isinf(x)].tolist()}


def _forest(groups: int, edges: Sequence[Edge]) -> list[tuple[int, int]]:
    """Each group with the edge by which it is reached from one before it, or -1: the heaviest forest of those edges
    that were used least (Prim, "Shortest connection networks and some generalizations", 1957)."""
    at: list[list[int]] = [[] for _ in range(groups)]
    for k, edge in enumerate(edges):
        for end in edge.ends:
            at[end].append(k)
    reached, order = set[int](), list[tuple[int, int]]()
    for root in range(groups):
        heap = [(0, 0.0, -1, root)]
        while heap:
            *_, k, group = heappop(heap)
            if group in reached:
                continue
            reached.add(group)
            order.append((group, k))
            for j in at[group]:
                heappush(heap, (edges[j].used, -edges[j].weight, j, edges[j].other(group)))
    for _, k in order:
        if k >= 0:
            edges[k].used += 1
    return order


def _along(slack: Sequence[Any], forest: Sequence[tuple[int, int]], edges: Sequence[Edge]) -> list[Any]:
    """What every solution with a variable takes at least, with the moves of a forest only."""
    total, sent = list(slack), dict[int, Any]()
    for group, k in reversed(forest):
        if k >= 0:
            above = edges[k].other(group)
            sent[k] = edges[k].message(group, total[group])
            total[above] = total[above] + sent[k]
    least = {group: total[group].min() for group, k in forest if k < 0}  # of each tree, by its root
    for group, k in forest:
        if k < 0:
            total[group] = total[group] + sum([x for root, x in least.items() if root != group])
        else:
            above = edges[k].other(group)
            never = numpy.isinf(total[above])
            rest = numpy.where(never, numpy.inf, total[above] - numpy.where(never, 0.0, sent[k]))
            total[group] = total[group] + edges[k].message(above, rest)
    return total


__all__ = ["Edge", "Groups"]
