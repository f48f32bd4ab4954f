"""Flows of tensors over single moves, from the states in which they are made to those in which they are used."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy

from ....prices.links import Network, wire_bytes
from ....prices.solver import INF
from ..choices import Choices
from ..regime import Regime, on_parts
from ..states import Moves, State, first_start
from ..steps import Step, Steps, Tensor, is_free
from ..tape import Value
from .pruning import Edge, Groups
from .tableau import Chosen, Tableau

UNSAID = 1e-4
"""The fraction by which moves seem dearer that a plan cannot tell the engine, so that others are taken if they cost the
same. The bound may be too high by as much."""


@dataclass(frozen=True)
class Paid:
    """How moves are paid: beside computation or not, in which phase, how often again in the backward, and for so many
    bytes an element."""

    beside: bool
    backward: bool
    again: float
    itemsize: int


@dataclass(frozen=True)
class Way:
    """A tensor moves, so many times, from the states in which it is made to those in which it is used; `said`: to or
    from a border of modules, at which a plan can say so."""

    tensor: Tensor
    made: Chosen
    wanted: Chosen
    paid: Paid
    times: float
    said: bool


@dataclass(frozen=True)
class _User:
    """What takes a tensor: in which states, so many times; see `Way.said`."""

    chosen: Chosen
    times: float
    said: bool


class Flows:
    """The flows of all tensors of a program.

    Args:
        steps, choices, regime: as of the program.
        tableau: they become part of it.
    """

    def __init__(self, steps: Steps, choices: Choices, regime: Regime, tableau: Tableau) -> None:
        self.all: Steps = steps
        self.choices: Choices = choices
        self.regime: Regime = regime
        self.network: Network = choices.network
        self.tableau: Tableau = tableau
        self.ways: list[Way] = []
        self.equal: list[tuple[Chosen, Chosen]] = []
        self.firsts: dict[tuple[bool, bool, int], int] = {}
        self.moves: list[tuple[Way, dict[tuple[State, State], int]]] = []
        self.read: dict[tuple[Tensor, bool], set[Value]] = {}
        for op in steps.tape.ops:
            for v in op.operands:
                self.read.setdefault((steps.which[v], op.backward), set()).add(v)

    def of(
        self, t: Tensor, made: Chosen, users: Mapping[tuple[Step, int], Chosen], stored: Mapping[Tensor, Chosen]
    ) -> None:
        """The ways of a tensor to the states in which users take it.

        Args:
            made: the states in which it is made.
            users: (step, operand) -> the states in which it takes the tensor.
            stored: parameter -> the states in which it may be stored, as gradients have to get there.
        """
        by_phase: dict[bool, list[_User]] = {}
        here = t.step is not None and t.step.border
        for (u, k), chosen in users.items():
            if None not in chosen:
                user = _User(chosen, float(u.sources[k][t]), here or u.border)
                by_phase.setdefault(u.backward, []).append(user)
        read = {backward: self.read.get((t, backward), set[Value]()) for backward in by_phase}
        if not self.regime.by_operator and t.step is not None and is_free(t.step) and not t.step.border:
            # What is moved behind a view is moved before it as well, where a plan can say so.
            self.equal += [(made, user.chosen) for phase in by_phase.values() for user in phase]
            by_phase = {}
        if len(by_phase) > 1 and not any(self.all.beside(t, backward) for backward in by_phase):
            # What the forward moves is saved for the backward.
            by_phase = {False: [user for phase in by_phase.values() for user in phase]}
            read = {False: set().union(*read.values())}
        for backward, phase in by_phase.items():
            again = 0.0
            if t in self.all.reread and self.regime.training and not backward:
                # The backward gathers it again, if it does not anyway for what is recomputed there.
                forward, later = (max([u.times for u in by_phase.get(b, [])], default=0.0) for b in (False, True))
                held = sum([self.all.which[v] is t for v in self.all.held]) / t.count
                again = max(0.0, 1.0 - held - later / forward)
            paid = Paid(self.all.beside(t, backward), backward, again, t.like.dtype.itemsize)
            self._shared(t, made, phase, paid, len(read[backward]))
        for (g, p), n in self.all.gradients.items():
            if g is t:
                paid = Paid(True, True, 0.0, self.regime.itemsize(t.like.dtype))
                self._shared(t, made, [_User(stored[p], float(n), True)], paid, n)

    def _shared(self, t: Tensor, made: Chosen, users: list["_User"], paid: Paid, times: int) -> None:
        """Several users share the move to a state in between, so many `times`, and each pays what else it needs."""
        if len(users) > 1:
            states = sorted({*made, *[s for user in users for s in user.chosen]}, key=str)
            between = self.tableau.one_state(states)
            self.ways.append(Way(t, made, between, paid, float(times), all(u.said for u in users)))
            made = between
        self.ways += [Way(t, made, user.chosen, paid, user.times, user.said) for user in users]

    def _moves(self, way: Way) -> Moves:
        return self.choices.moves(way.tensor.like.shape, way.paid.itemsize, self._in_buckets(way))

    def _in_buckets(self, way: Way) -> bool:
        return way.paid.beside and (way.tensor in self.all.ahead or way.tensor in self.all.late)

    def edges(self, groups: Groups) -> list[Edge]:
        """What computation waits for, and which states are the same."""
        found: list[Edge] = []
        for a, b in self.equal:
            prices = numpy.where([[s == t for t in b] for s in a], 0.0, INF)
            found.append(groups.edge(a, b, prices, INF))
        for way in self.ways:
            if not way.paid.beside and self.regime.parts == 1:
                prices = way.times * self._moves(way).prices([*way.made], [*way.wanted])
                found.append(groups.edge(way.made, way.wanted, prices, way.times * way.tensor.like.bytes))
        return found

    def add(self, never: Collection[int], room: float) -> None:
        """Add variables of moves, and constraints.

        Args:
            never: variables that are zero.
            room: single moves that take more seconds are left out.
        """
        for made, wanted in self.equal:
            self._balanced({}, without(made, never), without(wanted, never))
        for way in self.ways:
            self._add(way, without(way.made, never), without(way.wanted, never), room)

    def among(self, never: Collection[int]) -> set[int]:
        """The variables of moves on the cheapest ways between states, if some variables are zero."""
        found = set[int]()
        for way, moves in self.moves:
            made, wanted = without(way.made, never), without(way.wanted, never)
            between = self._moves(way).between(frozenset(made), frozenset(wanted))
            found.update([moves[a, b] for a, b, _ in between if (a, b) in moves])
        return found

    def sent(self, x: Any) -> float:
        """Bytes that a rank sends in a solution, as `wire_bytes` counts them."""
        total, sizes = 0.0, self.network.sizes
        for way, moves in self.moves:
            times = way.times * (1.0 + way.paid.again)
            for (a, b), k in moves.items():
                if x[k]:
                    sending = self._moves(way).sending(a, b)
                    total += x[k] * times * wire_bytes(sending.op, sending.bytes, sizes[sending.axis])
        return total

    def _add(self, way: Way, made: Chosen, wanted: Chosen, room: float) -> None:
        paid, columns, parts = way.paid, self.tableau.columns, self.regime.parts
        balance, moves = dict[State, dict[int, float]](), dict[tuple[State, State], int]()
        starting: dict[int, dict[int, float]] = {}
        gradient, shared = way.tensor not in self.all.ahead, self._in_buckets(way)
        for a, b, price in self._moves(way).between(frozenset(made), frozenset(wanted)):
            beside = paid.beside or (parts > 1 and on_parts(a, b))
            if not beside and price * way.times > room:
                continue
            k = moves[a, b] = columns.add(0.0, upper=INF)
            balance.setdefault(a, {})[k] = -1.0
            balance.setdefault(b, {})[k] = 1.0
            if not beside:
                said = way.said or self.regime.by_operator
                columns.cost[k] += price * way.times * (1.0 if said else 1 + UNSAID)
                continue
            axis, start = first_start(self.network, a, b)
            taken = self.choices.machine.taken(self.network.links[axis], gradient and shared)
            if paid.beside:
                self._pay(k, price * way.times, paid.backward, taken)
                self._pay(k, price * way.times * paid.again, True, taken)
            else:
                self._pay(k, (price + (parts - 1) * start) * way.times, paid.backward, taken)
            for backward in {paid.backward, paid.backward or paid.again > 0} if shared and start else ():
                first = self._first(gradient, backward, axis, start)
                starting.setdefault(first, {})[k] = 1.0
        for first, terms in starting.items():
            self.tableau.rows.add({**terms, first: -2.0}, -INF, 0.0)
        self.moves.append((way, moves))
        self._balanced(balance, made, wanted)

    def _balanced(self, balance: Chosen, made: Chosen, wanted: Chosen) -> None:
        """What comes into a state and is made in it goes out of it or is wanted in it."""
        for s in dict.fromkeys([*balance, *made, *wanted]):
            terms = dict(balance.get(s, {}))
            for chosen, sign in ((made, 1.0), (wanted, -1.0)):
                for k, v in chosen.get(s, {}).items():
                    terms[k] = terms.get(k, 0.0) + sign * v
            if terms := {k: v for k, v in terms.items() if v}:
                self.tableau.rows.add(terms, 0.0, 0.0)

    def _first(self, gradient: bool, backward: bool, axis: int, start: float) -> int:
        """The variable that says whether anything is in buckets: gradients or parameters, in a phase, over an axis."""
        found = self.firsts.get((gradient, backward, axis))
        if found is None:
            found = self.firsts[gradient, backward, axis] = self.tableau.columns.add(0.0, integer=True)
            self._pay(found, start, backward, self.choices.machine.taken(self.network.links[axis], gradient))
        return found

    def _pay(self, k: int, price: float, backward: bool, taken: float) -> None:
        """Pay for a move that runs beside computation, and takes part of the processor."""
        if price:
            phase = self.tableau.phases[backward]
            phase.beside[k] = phase.beside.get(k, 0.0) + price
            if taken:
                phase.busy[k] = phase.busy.get(k, 0.0) + taken * price


def without(chosen: Chosen, never: Collection[int]) -> Chosen:
    """The states in which a tensor may be, if some variables are zero."""
    found = {s: {k: v for k, v in terms.items() if k not in never} for s, terms in chosen.items()}
    return {s: terms for s, terms in found.items() if terms}


__all__ = ["Flows", "without"]
