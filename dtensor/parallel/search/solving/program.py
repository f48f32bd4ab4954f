"""The search as a mixed-integer program.

    variables    for each step one of its options; for each tensor, how it moves from the state in which it is made to
                 the states in which it is used, as a flow over single moves
    minimise     moves that computation waits for + max(computation, moves that run beside it) in the forward and in
                 the backward + the optimizer's update (computation takes longer by what moves take of the processor)
    subject to   parameters and optimizer states fit into memory, with what the backward reads where it begins, and with
                 gradients where it ends

Moves of parameters and of their gradients run beside computation: they are known ahead of time, and share buckets, so
that their bytes count, and over each axis the start of one bucket. A move that several users need is paid once, as the
passes merge equal collectives, and what the forward moves is saved for the backward. Gathered parameters are not: the
backward gathers them again, and pays again.

The relaxation of a flow is tight, so that the bound is close to the optimum. HiGHS (Huangfu and Hall, "Parallelizing
the dual revised simplex method", 2018) solves it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..choices import Choices, Option, seconds_of_optimizer
from ..regime import USUAL, Regime, on_parts
from ..states import State, first_start, fits, parts
from ..steps import Step, Steps, Tensor, is_free
from ..tape import BUFFER, CONSTANT, INPUT, PARAMETER
from .following import Chosen, following, leader_of
from .solver import COST, INF, Columns, Model, Rows


@dataclass
class Solution:
    """What the solver found.

    Attributes:
        seconds: of a step, under the model of cost.
        bound: no assignment of states takes less, under the same model.
        states: tensor -> the state in which it is made.
        uses: (step, operand) -> the state in which it takes its operand; None if any.
        held: bytes that a rank holds, as far as the program counts them.
        variables, rows: size of the program.
    """

    seconds: float
    bound: float
    states: dict[Tensor, State]
    uses: dict[tuple[Step, int], State | None]
    held: float
    variables: int
    rows: int


MICRO = 1e6
"""Microseconds of a second, for rows, as coefficients far from 1 are not exact."""


@dataclass
class Phase:
    """Forward or backward.

    Attributes:
        busy: variable -> seconds of computation, and of moves that take the place of it.
        beside: variable -> seconds of moves that run beside computation.
    """

    busy: dict[int, float] = field(default_factory=dict[int, float])
    beside: dict[int, float] = field(default_factory=dict[int, float])


@dataclass(frozen=True)
class _Paid:
    """How moves are paid: beside computation or not, in which phase, how often again in the backward, and for so many
    bytes an element."""

    beside: bool
    backward: bool
    again: float
    itemsize: int


class Program:
    """The program of one search.

    Args:
        steps: the step to place.
        choices: the options on a mesh.
        regime: how it is run.
        memory: bytes that a rank may hold; None for any.
        transient: bytes held besides parameters, their gradients and states, and what is saved.
        fixed: tensor of a parameter or input -> the state that it must have.
        below: solutions of more seconds are of no interest, so that options and moves which only these have are left
            out.
    """

    def __init__(
        self,
        steps: Steps,
        choices: Choices,
        regime: Regime = USUAL,
        *,
        memory: float | None = None,
        transient: float = 0.0,
        fixed: dict[Tensor, State] | None = None,
        below: float = INF,
    ) -> None:
        self.all, self.choices, self.network = steps, choices, choices.network
        self.sizes, self.regime = self.network.sizes, regime
        self.training, self.kept = regime.training, regime.states
        self.fixed = fixed or {}
        self.partial = choices.made(steps.steps)
        self.columns, self.rows = Columns(), Rows()
        self.made: dict[Tensor, Chosen] = {}
        self.taken: dict[tuple[Step, int], Chosen] = {}
        self.led: set[tuple[Step, int]] = set()
        self.picked: dict[Step, list[tuple[int, Option]]] = {}
        self.phases = Phase(), Phase()
        self.priced = {step: self._priced(step) for step in steps.steps if not step.plain and not step.border}
        self.least = sum([min(took, default=0.0) for _, took in self.priced.values()])
        self.firsts: dict[tuple[bool, bool, int], int] = {}
        self.halfway: dict[int, float] = {}
        self.at_end: dict[int, float] = {}
        self._sources()
        self.room = max(0.0, below - self.least)
        for step in steps.steps:
            self._step(step)
        for tensor in steps.tensors:
            self._flows(tensor)
        for phase in self.phases:
            longer = self.columns.add(1.0 / MICRO, upper=INF)
            for seconds in (phase.busy, phase.beside):
                self.rows.add({longer: 1.0, **{k: -v * MICRO for k, v in seconds.items()}}, 0.0, INF)
        self._saved()
        if memory is not None:
            for held in (self.halfway, self.at_end):
                self.rows.add({k: v / memory for k, v in held.items()}, -INF, 1 - transient / memory)

    def all_states(self, tensor: Tensor, partial: bool = False) -> Iterator[State]:
        """The states in which a tensor may be stored, or used."""
        axes = len(self.sizes)
        found: list[State] = [()]
        for a in range(axes):
            n = self.sizes[a]
            entries: list[Any] = [None] if n == 1 else [None, *range(tensor.like.ndim), *(["sum"] if partial else [])]
            found = [(*s, e) for s in found for e in entries]
        return (s for s in found if fits(s, tensor.like.shape, self.sizes))

    def _one_of(self, terms: Sequence[int]) -> None:
        self.rows.add(dict.fromkeys(terms, 1.0), 1.0, 1.0)

    def _priced(self, step: Step) -> tuple[list[Option], list[float]]:
        """The options of a step, and the seconds that each takes."""
        options = self.choices.options(self.all.first.get(step, step), self.partial)
        return options, [(self.choices.seconds(step, o, self.regime.parts) + o.extra) * step.count for o in options]

    def _sources(self) -> None:
        machine, batch, learned = self.choices.machine, set(self.all.batch()), {p for _, p in self.all.gradients}
        for t in self.all.tensors:
            if t.kind not in (PARAMETER, BUFFER, INPUT) or t.step is not None:
                continue
            trained = t in learned
            chosen: Chosen = {}
            least = INF
            states = [self.fixed[t]] if t in self.fixed else list(self.all_states(t))
            if t in batch:  # if none divides, nothing is done in parts
                states = [s for s in states if self.regime.divides(t.like.shape, s, self.sizes)] or states
            for s in states:
                local = t.like.bytes / parts(s, self.sizes)
                cost = seconds_of_optimizer(local, machine, self.kept) if trained else 0.0
                k = self.columns.add(cost * t.count, integer=True)
                chosen[s] = {k: 1.0}
                least = min(least, cost * t.count)
                self.halfway[k] = local * t.count * (1 + self.kept if trained else 1)
                self.at_end[k] = local * t.count * (2 + self.kept if trained else 1)
            self._one_of([k for terms in chosen.values() for k in terms])
            self.made[t] = chosen
            self.least += least

    def _step(self, step: Step) -> None:
        if step.plain:
            return
        if step.border:
            self._hand_on(step)
            return
        options, took = self.priced[step]
        leader, picked = None, self.picked.get(self.all.first.get(step, step), [])
        follows = False
        if not picked:
            leader = leader_of(step, self.made)
            picked = [] if leader is None else following([self.made[t] for t in leader], step, options)
            follows = bool(picked)
        if not picked:
            fast = [o for o, seconds in zip(options, took) if seconds - min(took) <= self.room]
            picked = [(self.columns.add(0.0, integer=True), o) for o in fast]
            self._one_of([k for k, _ in picked])
        self.picked[step] = picked
        busy, seconds_of = self.phases[step.backward].busy, dict(zip(options, took))
        for k, o in picked:
            waited = o.extra * step.count
            self.columns.cost[k] += waited
            busy[k] = busy.get(k, 0.0) + seconds_of[o] - waited
        for i, source in enumerate(step.sources):
            self.taken[step, i] = _grouped([(k, o.inputs[i]) for k, o in picked])
            if follows and all(t in (leader or ()) for t in source):
                self.led.add((step, i))
        for j, t in enumerate(step.outputs):
            if t is not None:
                self.made[t] = _grouped([(k, o.outputs[j]) for k, o in picked])

    def _hand_on(self, step: Step) -> None:
        """A border: all that it gets are in one state."""
        out = step.outputs[0]
        assert out is not None
        sources = [t for t in step.sources[0] if not t.plain]
        if not sources:  # a plain tensor at a border
            out.kind = CONSTANT
            return
        t, same = sources[0], self.all.decided[step].outputs[0]
        if step.like.again and same in self.made:
            self.made[out] = self.taken[step, 0] = self.made[same]
            return
        if len(step.sources[0]) == 1 and len(t.users) == 1 and t.step is not None and t.count == step.count:
            self.made[out] = self.taken[step, 0] = self.made[t]
            self.led.add((step, 0))
            return
        chosen: Chosen = {}
        for s in self.all_states(out, partial=out.like.dtype.is_floating_point):
            chosen[s] = {self.columns.add(0.0, integer=True): 1.0}
        self._one_of([k for terms in chosen.values() for k in terms])
        self.made[out] = self.taken[step, 0] = chosen

    def _flows(self, t: Tensor) -> None:
        if t.plain or t not in self.made:
            return
        users = [
            (u, u.sources[k][t], self.taken.get((u, k))) for (u, k) in t.users if not u.plain and (u, k) not in self.led
        ]
        by_phase: dict[Any, list[tuple[Chosen, float]]] = {}
        for u, n, chosen in users:
            if chosen is None or None in chosen:
                continue
            by_phase.setdefault(u.backward, []).append((chosen, float(n)))
        if t.step is not None and is_free(t.step) and not t.step.border:
            # What is moved behind a view is moved before it as well, where a plan can say so.
            for chosen, _ in [user for phase in by_phase.values() for user in phase]:
                self._same(self.made[t], chosen)
            by_phase = {}
        if len(by_phase) > 1 and not any(self.all.beside(t, backward) for backward in by_phase):
            # What the forward moves is saved for the backward.
            by_phase = {False: [user for phase in by_phase.values() for user in phase]}
        for backward, phase in by_phase.items():
            again = 0.0
            if t in self.all.reread and self.training and not backward:
                # The backward gathers it again, if it does not anyway for what is recomputed there.
                forward, later = (max([n for _, n in by_phase.get(b, [])], default=0.0) for b in (False, True))
                again = max(0.0, 1.0 - later / forward)
            self._flow(t, phase, _Paid(self.all.beside(t, backward), backward, again, t.like.dtype.itemsize))
        for (g, p), n in self.all.gradients.items():
            if g is t:
                paid = _Paid(True, True, 0.0, self.regime.itemsize(t.like.dtype))
                self._flow(t, [(self.made[p], float(n))], paid)

    def _same(self, made: Chosen, wanted: Chosen) -> None:
        """A tensor is used in the state in which it is made."""
        for s in sorted({*made, *wanted}, key=str):
            terms = dict(made.get(s, {}))
            for k, v in wanted.get(s, {}).items():
                terms[k] = terms.get(k, 0.0) - v
            if terms := {k: v for k, v in terms.items() if v}:
                self.rows.add(terms, 0.0, 0.0)

    def _flow(self, t: Tensor, users: list[tuple[Chosen, float]], paid: "_Paid") -> None:
        """Flows of a tensor from the states in which it is made to those in which users take it.

        Several users share the move to a state in between, and each pays what else it needs.
        """
        made = self.made[t]
        if len(users) > 1:
            between: Chosen = {}
            for s in sorted({*made, *[s for chosen, _ in users for s in chosen]}, key=str):
                between[s] = {self.columns.add(0.0, integer=True): 1.0}
            self._one_of([k for terms in between.values() for k in terms])
            self._way(t, made, between, paid, max(n for _, n in users))
            made = between
        for chosen, n in users:
            self._way(t, made, chosen, paid, n)

    def _way(self, t: Tensor, made: Chosen, wanted: Chosen, paid: "_Paid", times: float) -> None:
        """A flow of a tensor from one set of states to another, so many times."""
        shared = paid.beside and (t in self.all.ahead or t in self.all.late)
        moves = self.choices.moves(t.like.shape, paid.itemsize, shared)
        balance: dict[State, dict[int, float]] = {}
        starting: dict[int, dict[int, float]] = {}
        for a, b, price in moves.between(frozenset(made), frozenset(wanted)):
            if not paid.beside and price * times > self.room:
                continue
            k = self.columns.add(0.0, upper=INF)
            balance.setdefault(a, {})[k] = -1.0
            balance.setdefault(b, {})[k] = 1.0
            axis, start = first_start(self.network, a, b)
            gradient = shared and t not in self.all.ahead
            taken = self.choices.machine.taken(self.network.links[axis], gradient)
            if paid.beside:
                self._pay(k, price * times, paid.backward, taken)
                self._pay(k, price * times * paid.again, True, taken)
            elif self.regime.parts > 1 and on_parts(a, b):
                self._pay(k, (price + (self.regime.parts - 1) * start) * times, paid.backward, taken)
            else:
                self.columns.cost[k] += price * times
            for backward in {paid.backward, paid.backward or paid.again > 0} if shared and start else ():
                first = self._first(gradient, backward, axis, start)
                starting.setdefault(first, {})[k] = 1.0
        for first, terms in starting.items():
            self.rows.add({**terms, first: -2.0}, -INF, 0.0)
        for s in sorted({*balance, *made, *wanted}, key=str):
            terms = dict(balance.get(s, {}))
            for k, v in made.get(s, {}).items():
                terms[k] = terms.get(k, 0.0) + v
            for k, v in wanted.get(s, {}).items():
                terms[k] = terms.get(k, 0.0) - v
            terms = {k: v for k, v in terms.items() if v}
            if terms:
                self.rows.add(terms, 0.0, 0.0)

    def _first(self, gradient: bool, backward: bool, axis: int, start: float) -> int:
        """The variable that says whether anything is in buckets: gradients or parameters, in a phase, over an axis."""
        found = self.firsts.get((gradient, backward, axis))
        if found is None:
            found = self.firsts[gradient, backward, axis] = self.columns.add(0.0, integer=True)
            self._pay(found, start, backward, self.choices.machine.taken(self.network.links[axis], gradient))
        return found

    def _pay(self, k: int, price: float, backward: bool, taken: float) -> None:
        """Pay for a move that runs beside computation, and takes part of the processor."""
        if price:
            phase = self.phases[backward]
            phase.beside[k] = phase.beside.get(k, 0.0) + price
            if taken:
                phase.busy[k] = phase.busy.get(k, 0.0) + taken * price

    def _saved(self) -> None:
        for t in self.all.tensors:
            if t.saved and t in self.made:
                for s, terms in self.made[t].items():
                    for k in terms:
                        self.halfway[k] = self.halfway.get(k, 0.0) + t.saved * t.like.bytes / parts(s, self.sizes)

    def least_memory(self, *, limit: float = 20.0) -> float:
        """A bound on the bytes that a rank holds at least, whatever the time."""
        self.columns.cost = [0.0] * len(self.columns.cost)
        most = self.columns.add(1.0, upper=INF)
        self.least = COST
        scale = max([*self.halfway.values(), *self.at_end.values()], default=1.0)
        for held in (self.halfway, self.at_end):
            self.rows.add({most: 1.0, **{k: -v / scale for k, v in held.items()}}, 0.0, INF)
        found = self.solve(gap=0.01, limit=limit)
        return 0.0 if found is None else found.bound * scale

    def solve(self, *, gap: float = 0.01, limit: float = 20.0) -> Solution | None:
        """Solve it.

        Args:
            gap: how far from the bound, as a fraction, a solution may be.
            limit: seconds.

        Returns:
            The best solution found; None if there is none.
        """
        scale = COST / (self.least or COST)
        found = Model(self.columns, self.rows, scale).best(gap, limit)
        if found is None:
            return None
        states = {t: _of(chosen, found.x) for t, chosen in self.made.items()}
        uses = {key: _of(chosen, found.x) for key, chosen in self.taken.items()}
        return Solution(
            found.value / scale,
            min(found.value, found.bound) / scale,
            {t: s for t, s in states.items() if s is not None},
            uses,
            max([sum([v * found.x[k] for k, v in held.items()]) for held in (self.halfway, self.at_end)]),
            len(self.columns.cost),
            len(self.rows.lower),
        )


def _grouped(items: Sequence[tuple[int, State | None]]) -> Any:
    found: dict[Any, dict[int, float]] = {}
    for k, s in items:
        found.setdefault(s, {})[k] = 1.0
    return found


def _of(chosen: Chosen, x: Any) -> State | None:
    return max(chosen, key=lambda s: sum([x[k] * v for k, v in chosen[s].items()]))


__all__ = ["Program", "Solution"]
