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

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from ....prices.solver import COST, INF, Columns, Model, Rows
from ..choices import Choices, Option, seconds_of_optimizer
from ..regime import USUAL, Regime
from ..states import State, fits, parts
from ..steps import Step, Steps, Tensor
from ..tape import BUFFER, CONSTANT, INPUT, PARAMETER
from .flows import Flows, without
from .following import following, leader_of
from .pruning import Groups
from .tableau import Chosen, Tableau


@dataclass
class Solution:
    """What the solver found.

    Attributes:
        seconds: of a step, under the model of cost.
        bound: no assignment of states takes less, under the same model.
        states: tensor -> the state in which it is made.
        uses: (step, operand) -> the state in which it takes its operand; None if any.
        held: bytes that a rank holds, as far as the program counts them.
        sent: bytes that a rank sends.
        variables, rows: size of the program.
    """

    seconds: float
    bound: float
    states: dict[Tensor, State]
    uses: dict[tuple[Step, int], State | None]
    held: float
    sent: float
    variables: int
    rows: int


MICRO = 1e6
"""Microseconds of a second, for rows, as coefficients far from 1 are not exact."""


class Program:
    """The program of one search.

    Args:
        steps: the step to place.
        choices: the options on a mesh.
        regime: how it is run.
        memory: bytes that a rank may hold; None for any.
        transient: bytes held besides parameters, their gradients and states, and what is saved.
        fixed: tensor of a parameter or input, or that a border hands on -> the state that it must have.
        returned: what leaves the program, so that partial sums are still to be added up.
        tangents: gradient with which the backward starts -> the result in whose state it is, with sums added up.
        below: solutions of more seconds are of no interest, so that what only these take is left out.

    Attributes:
        bound: no assignment of states takes less, as far as it was solved, be there one below `below` or not.
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
        returned: Sequence[Tensor] = (),
        tangents: Mapping[Tensor, Tensor] | None = None,
        below: float = INF,
    ) -> None:
        self.all: Steps = steps
        self.choices: Choices = choices
        self.regime: Regime = regime
        self.sizes: tuple[int, ...] = choices.network.sizes
        self.fixed: dict[Tensor, State] = fixed or {}
        self.below: float = below
        self.bound: float = 0.0
        self.partial: set[str] = choices.made(steps.steps)
        self.tableau: Tableau = Tableau()
        self.columns: Columns = self.tableau.columns
        self.rows: Rows = self.tableau.rows
        self.least: float = 0.0
        self.longer: set[int] = set()
        self.flows: Flows = Flows(steps, choices, regime, self.tableau)
        self.made: dict[Tensor, Chosen] = {}
        self.taken: dict[tuple[Step, int], Chosen] = {}
        self.led: set[tuple[Step, int]] = set()
        self.picked: dict[Step, list[tuple[int, Option]]] = {}
        self.halfway: dict[int, float] = {}
        self.at_end: dict[int, float] = {}
        self._sources()
        for step in steps.steps:
            self._step(step)
        for t in returned:
            self._leave(t)
        for t, result in (tangents or {}).items():
            self.made[t] = _added_up(self.made.get(result, {}))
        self._flows()
        for phase in self.tableau.phases:
            longer = self.columns.add(1.0 / MICRO, upper=INF)
            self.longer.add(longer)
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

    def _sources(self) -> None:
        machine, batch, learned = self.choices.machine, set(self.all.batch()), {p for _, p in self.all.gradients}
        for t in self.all.tensors:
            if t.kind not in (PARAMETER, BUFFER, INPUT) or t.step is not None:
                continue
            trained = t in learned
            chosen: Chosen = {}
            states = [self.fixed[t]] if t in self.fixed else list(self.all_states(t))
            if t in batch:  # if none divides, nothing is done in parts
                states = [s for s in states if self.regime.divides(t.like.shape, s, self.sizes)] or states
            for s in states:
                local = t.like.bytes / parts(s, self.sizes)
                cost = seconds_of_optimizer(local, machine, self.regime.states) if trained else 0.0
                k = self.columns.add(cost * t.count, integer=True)
                chosen[s] = {k: 1.0}
                self.halfway[k] = local * t.count * (1 + self.regime.states if trained else 1)
                self.at_end[k] = local * t.count * (2 + self.regime.states if trained else 1)
            self.tableau.one_of([k for terms in chosen.values() for k in terms])
            self.made[t] = chosen

    def _step(self, step: Step) -> None:
        if step.plain:
            return
        if step.border:
            self._hand_on(step)
            return
        options = self.choices.options(self.all.first.get(step, step), self.partial)
        leader, picked = None, self.picked.get(self.all.first.get(step, step), [])
        follows = False
        if not picked:
            leader = leader_of(step, self.made)
            picked = [] if leader is None else following([self.made[t] for t in leader], step, options)
            follows = bool(picked)
        if not picked:
            picked = [(self.columns.add(0.0, integer=True), o) for o in options]
            self.tableau.one_of([k for k, _ in picked])
        self.picked[step] = picked
        busy = self.tableau.phases[step.backward].busy
        for k, o in picked:
            self.columns.cost[k] += o.extra * step.count
            busy[k] = busy.get(k, 0.0) + self.choices.seconds(step, o, self.regime.parts) * step.count
        for i, source in enumerate(step.sources):
            self.taken[step, i] = _grouped([(k, o.inputs[i]) for k, o in picked])
            if follows and all(t in (leader or ()) for t in source):
                self.led.add((step, i))
        if self.regime.by_operator and step.in_place:  # what is written to stays where it is
            written = self.taken[step, 0]
            self.flows.equal += [
                (self.made[t], written) for t in step.sources[0] if t in self.made and None not in written
            ]
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
        if out in self.fixed:
            self.made[out] = self.taken[step, 0] = self.tableau.one_state([self.fixed[out]])
            return
        t, same = sources[0], self.all.decided[step].outputs[0]
        if step.like.again and same in self.made:
            self.made[out] = self.taken[step, 0] = self.made[same]
            return
        if len(step.sources[0]) == 1 and len(t.users) == 1 and t.step is not None and t.count == step.count:
            self.made[out] = self.taken[step, 0] = self.made[t]
            self.led.add((step, 0))
            return
        chosen = self.tableau.one_state(self.all_states(out, partial=out.like.dtype.is_floating_point))
        self.made[out] = self.taken[step, 0] = chosen

    def _leave(self, t: Tensor) -> None:
        """Pay for what is left to do where a tensor leaves the program as partial sums."""
        moves = self.choices.moves(t.like.shape, t.like.dtype.itemsize, False)
        for s, terms in self.made.get(t, {}).items():
            if any(isinstance(x, str) for x in s):
                price = min([moves.price(s, to) for to in self.all_states(t)])
                for k in terms:
                    self.columns.cost[k] += price * t.count

    def _flows(self) -> None:
        """Moves between what is made and what is taken, without what takes more seconds than is of interest."""
        for t in self.all.tensors:
            if not t.plain and t in self.made:
                users = [key for key in t.users if key in self.taken and key not in self.led]
                self.flows.of(t, self.made[t], {key: self.taken[key] for key in users}, self.made)
        seconds = numpy.array(self.columns.cost)
        for phase in self.tableau.phases:
            seconds[[*phase.busy]] += [*phase.busy.values()]
        groups = Groups(self.tableau)
        slack, self.least = groups.slack(seconds)
        room, never = self.below - self.least, set[int]()
        if room < INF:
            never = groups.slower(slack, self.flows.edges(groups), room)
        for k in never:
            self.columns.upper[k] = 0.0
        self.made = {t: without(chosen, never) for t, chosen in self.made.items()}
        self.taken = {key: without(chosen, never) for key, chosen in self.taken.items()}
        self.flows.add(never, room)

    def _others(self, never: set[int]) -> set[int]:
        """The variables beside those of choices that a solution may need, if some of these are zero."""
        return self.flows.among(never) | self.longer

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
        self.longer.add(most)
        self.least = COST
        scale = max([*self.halfway.values(), *self.at_end.values()], default=1.0)
        for held in (self.halfway, self.at_end):
            self.rows.add({most: 1.0, **{k: -v / scale for k, v in held.items()}}, 0.0, INF)
        found = self.solve(gap=0.01, limit=limit)
        return 0.0 if found is None else found.bound * scale

    def solve(self, *, gap: float = 0.01, limit: float = 20.0, most: int | None = None) -> Solution | None:
        """Solve it.

        Args:
            gap: how far from the bound, as a fraction, a solution may be.
            limit: seconds.
            most: programs of more variables are not searched further where that takes long, however far they are.

        Returns:
            The best solution found; None if there is none.
        """
        scale = COST / (self.least or COST)
        model = Model(self.columns, self.rows, scale)
        found = model.best(gap, limit, self._others, most)
        self.bound = min(model.bound / scale, self.below)
        if found is None:
            return None
        states = {t: _of(chosen, found.x) for t, chosen in self.made.items()}
        uses = {key: _of(chosen, found.x) for key, chosen in self.taken.items()}
        return Solution(
            found.value / scale,
            min(found.value, model.bound) / scale,
            {t: s for t, s in states.items() if s is not None},
            uses,
            max([sum([v * found.x[k] for k, v in held.items()]) for held in (self.halfway, self.at_end)]),
            self.flows.sent(found.x),
            len(self.columns.cost),
            len(self.rows.lower),
        )


def _grouped(items: Sequence[tuple[int, State | None]]) -> Any:
    found: dict[Any, dict[int, float]] = {}
    for k, s in items:
        found.setdefault(s, {})[k] = 1.0
    return found


def _added_up(chosen: Chosen) -> Chosen:
    """The same choice for a tensor that is replicated where the other is partial."""
    found: Chosen = {}
    for s, terms in chosen.items():
        found.setdefault(tuple([None if isinstance(x, str) else x for x in s]), {}).update(terms)
    return found


def _of(chosen: Chosen, x: Any) -> State | None:
    return max(chosen, key=lambda s: sum([x[k] * v for k, v in chosen[s].items()]))


__all__ = ["Program", "Solution"]
