"""From a solution of the program to the best plan that the engine follows.

The program chooses for each operator freely. What runs chooses greedily, operator by operator, so the plan tells it
where parameters are, and where activations have to be for it to follow; whatever it would do anyway is left out. The
price of a plan is that of what the engine does.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .choices import Choices
from .engine import Assignment, Engine, Run
from .known import priced
from .solving.program import Program, Solution
from .states import State, fits, fitting
from .steps import Step, Steps, Tensor, is_free, pattern
from .tape import INPUT, PARAMETER

SAME = 1e-3
"""Plans whose prices differ by less than this fraction count as equal; the shorter one is taken."""

ALIKE = 5e-3
"""The fraction of its time that a plan has to save, to be given arguments in different placements."""

SPARE = 0.1
"""The part of the memory of a rank that a plan leaves free, for what its prediction misses."""

UNDERCUT = 0.1
"""The fraction of its time that the engine may save where the program does not see it, as behind views."""

TURNS = 6
"""How often a program with a bound on memory is solved, each time with another guess of the bytes that it misses."""


@dataclass
class Best:
    """One search; the attributes are the arguments of `search`, as tensors and states.

    Attributes:
        below: only what takes fewer seconds is of interest.
        until: when the solver has to be done, by `time.monotonic`.
        least: bytes of the smallest plan that was tried.
        need: about the bytes that a plan takes at least; known if nothing fits.
        free: whether the bound on memory made no difference.
        short: whether it ruled out what would have been faster than `below`.
        rough: what was found for it, and its price; single activations may be better elsewhere.
    """

    engine: Engine
    pinned: dict[Tensor, State]
    memory: float | None
    gap: float
    until: float
    below: float = float("inf")
    least: float | None = None
    need: float = 0.0
    free: bool = True
    short: bool = False
    rough: tuple[Assignment, Run] | None = None
    _views: dict[Step, dict[State, State]] = field(default_factory=dict[Step, dict[State, State]])

    @property
    def steps(self) -> Steps:
        """The steps that are priced."""
        return self.engine.steps

    @property
    def choices(self) -> Choices:
        """The options of each step."""
        return self.engine.choices

    @property
    def usable(self) -> float:
        """Bytes that a plan may take, as predicted."""
        return float("inf") if self.memory is None else (1 - SPARE) * self.memory

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of ranks along the axes of the mesh."""
        return self.choices.network.sizes

    def _limit(self) -> float:
        """Seconds that one program may take: all that are left; half with a bound on memory, as others follow."""
        left = self.until - time.monotonic()
        return max(1.0, left if self.memory is None else left / 2)

    def found(self) -> tuple[Assignment, Run, float] | None:
        """The cheapest assignment that fits, what the engine does with it, and the bound; None if there is none."""
        bound = 0.0
        over = loose = 0.0  # bytes that the program misses, and so many that the last solution is allowed with them
        limits = [None, *[self.usable] * TURNS] if self.memory is not None else [None]
        for turn, memory in enumerate(limits):
            below = min(self.below, self._enough(memory))
            program = self._program(memory, over, below)
            solution = program.solve(gap=self.gap, limit=self._limit())
            if turn == 0:  # others count memory roughly
                bound = program.bound + self.engine.comparing
            if solution is None and turn == 0:  # nothing is faster than what takes more memory than there is
                continue
            if solution is None and over > 1.1 * loose:  # others may hold less beside what the program counts
                over = (loose + over) / 2
                continue
            if solution is None:  # too little time or memory
                break
            if solution.bound >= self.below:
                return None
            self.free = turn == 0
            made, run = self._settled(self._followed(solution), solution, bound)
            if self.least is None or run.at_most < self.least:
                self.least = run.at_most
            self.short = not self._holds(run)
            if not self.short:
                self.rough = self._shorter(made, run)
                return self._or_known(*self.rough, bound)
            more, left = 1.02 * (run.at_most - self.usable), self.usable - solution.held
            over, loose = over + more if memory is not None else 0.0, max(0.0, left)
            if over <= left:  # the same would be found again
                over = min(self.usable, left + more)
            if time.monotonic() > self.until:
                break
        self.free = self.memory is None
        replicated = Assignment(stored=dict(self.pinned))
        made, run, bound = self._or_known(replicated, self.engine.run(replicated), bound)
        if not self._holds(run) and self.below == float("inf"):
            made, run = self._smallest()
        return (made, run, bound) if self._holds(run) else None

    def finished(self, made: Assignment, run: Run, bound: float) -> tuple[Assignment, Run, float]:
        """What was found, with single changes that make it better."""
        if self.rough is None:
            return made, run, bound
        return self._or_known(*self._polished(*self.rough, bound), bound)

    def _smallest(self) -> tuple[Assignment, Run]:
        """The fastest of the assignments that take about as little memory as there can be."""
        self.need = self._program().least_memory(limit=self._limit())
        solution = self._program(1.02 * self.need).solve(gap=self.gap, limit=self._limit()) if self.need else None
        made = Assignment(stored=dict(self.pinned)) if solution is None else self._followed(solution)
        run = self.engine.run(made)
        self.least = min(run.at_most, run.at_most if self.least is None else self.least)
        return self._shorter(made, run) if self._holds(run) else (made, run)

    def _known(self) -> list[tuple[Assignment, Run]]:
        """The well-known plans that what is pinned allows, and their prices."""
        return [
            (a, run)
            for a, run in priced(self.engine).values()
            if all(a.stored.get(t, self.engine.whole) == s for t, s in self.pinned.items())
        ]

    def _enough(self, memory: float | None) -> float:
        """What takes as many seconds is of no interest, as a well-known plan that fits into this memory takes less."""
        fitting = [run.seconds for _, run in self._known() if memory is None or self._holds(run)]
        return (1 + UNDERCUT) * min(fitting, default=float("inf"))

    def _program(self, memory: float | None = None, over: float = 0.0, below: float = float("inf")) -> Program:
        """The program of what takes fewer seconds than `below`; `over`: bytes beside those that it counts."""
        how: dict[str, Any] = {"memory": memory, "transient": over, "fixed": self.pinned, "below": below}
        return Program(self.steps, self.choices, self.engine.regime, **how)

    def too_large(self) -> str:
        """What to say if nothing fits."""
        return (
            f"no plan found fits into {self.memory:,.0f} bytes, of which {SPARE:.0%} are spared for what predictions "
            f"miss: parameters, what belongs to them and what the backward reads take at least {self.need:,.0f}"
            + (f", and the smallest plan that was tried {self.least:,.0f}" if self.least is not None else "")
            + "; use more ranks or a smaller batch"
        )

    def _followed(self, solution: Solution) -> Assignment:
        """All that the solution says of parameters and of borders."""
        made = Assignment()
        for t in self.steps.tensors:
            if t in solution.states and t.step is None:
                made.stored[t] = solution.states[t]
            if t.kind == PARAMETER:
                uses = [solution.uses.get(u) for u in t.users if not u[0].backward]
                first = next((s for s in uses if s is not None), None)
                if first is not None and first != made.stored.get(t) and not any(isinstance(x, str) for x in first):
                    made.used[t] = first
        decided = self.steps.decided
        back = {decided[step]: step for step in decided if step.like.forward is not None}
        for step in self.steps.steps:
            out = step.outputs[0] if step.border else None
            if out is None or decided.get(step) is not step or out not in solution.states:
                continue
            if not out.like.dtype.is_floating_point:
                continue
            s = _first(self._wanted(out, solution), solution.states[out])
            grad = back[step].outputs[0] if step in back else None
            if not any(isinstance(x, str) for x in s):
                back_in = s
                if grad is not None and grad in solution.states:
                    back_in = _first(self._wanted(grad, solution), solution.states[grad])
                made.borders[step] = s, back_in
        return made

    def _settled(self, made: Assignment, solution: Solution, bound: float) -> tuple[Assignment, Run]:
        """The same, where users of an activation take it in different states, in that one which is cheapest for all."""
        run = self.engine.run(made)
        decided = self.steps.decided
        for step in reversed(decided):
            out, way = step.outputs[0], int(step.like.forward is not None)
            if out is None or step.like.again or decided[step] not in made.borders or out not in solution.states:
                continue
            ways = self._wanted(out, solution)
            for s in sorted(ways, key=str) if len(ways) > 1 else ():
                if run.least * (1 - self.gap) <= bound:
                    return made, run
                if s == made.borders[decided[step]][way] or (not way and any(isinstance(x, str) for x in s)):
                    continue
                pair = list(made.borders[decided[step]])
                pair[way] = s
                tried = replace(made, borders={**made.borders, decided[step]: (pair[0], pair[1])})
                cost = self.engine.run(tried)
                if cost.seconds < run.seconds * (1 - SAME):
                    made, run = tried, cost
        return made, run

    def _wanted(self, t: Tensor, solution: Solution, behind: frozenset[Tensor] = frozenset()) -> set[State]:
        """The states in which users of a tensor take it, be it behind borders or views.

        Args:
            behind: those on the way to it; a module that repeats may be next to itself.
        """
        found: set[State] = set()
        for user, k in t.users:
            if user.backward != (t.step is not None and t.step.backward):
                continue
            out, taken = user.outputs[0] if user.outputs else None, solution.uses.get((user, k))
            if out is None or out is t or out in behind or out not in solution.states or not is_free(user):
                found.update([taken] if taken is not None else [])
                continue
            wanted = self._wanted(out, solution, behind | {t})
            if user.border:
                found.add(_first(wanted, solution.states[out]))
            else:
                before = self._before(user)
                found.update([before[s] for s in wanted if s in before] or ([taken] if taken is not None else []))
        return found

    def _before(self, view: Step) -> dict[State, State]:
        """State of what a view makes -> that of what it is made of."""
        found = self._views.get(view)
        if found is None:
            pairs = [(o.outputs[0], o.inputs[0]) for o in self.choices.options(view)]
            found = self._views[view] = {a: b for a, b in pairs if a is not None and b is not None}
        return found

    def _shorter(self, made: Assignment, run: Run) -> tuple[Assignment, Run]:
        """The assignment without what changes nothing, by halves."""
        groups = self._groups(made)
        best, price = made, run

        def without(some: Sequence[tuple[str, str]]) -> bool:
            nonlocal best, price
            gone = {step for key in some for step in groups[key]}
            tried = replace(best, borders={s: v for s, v in best.borders.items() if s not in gone})
            cost = self.engine.run(tried)
            if cost.seconds <= run.seconds * (1 + SAME) and self._holds(cost):
                best, price = tried, cost
                return True
            return False

        def halves(some: list[tuple[str, str]]) -> None:
            if not some or without(some) or len(some) == 1:
                return
            halves(some[: len(some) // 2])
            halves(some[len(some) // 2 :])

        halves(list(groups))
        for t in list(best.used):
            tried = replace(best, used={k: v for k, v in best.used.items() if k is not t})
            cost = self.engine.run(tried)
            if cost.seconds <= run.seconds * (1 + SAME) and self._holds(cost):
                best, price = tried, cost
        return self._tidy(best, price)

    def _tidy(self, made: Assignment, run: Run) -> tuple[Assignment, Run]:
        """The same with inputs placed alike, and parameters cut along their first dim, where that costs nothing."""
        inputs = [t for t in self.steps.of_kind(INPUT) if t.like.ndim and t not in self.pinned]
        for s in sorted({made.stored[t] for t in inputs if t in made.stored}, key=str):
            alike = {t: fitting(s, t.like.ndim) for t in inputs}
            if not all(fits(s, t.like.shape, self.sizes) for t, s in alike.items()):
                continue
            tried = replace(made, stored={**made.stored, **alike})
            cost = self.engine.run(tried)
            if cost.seconds <= run.seconds * (1 + ALIKE) and self._holds(cost):
                made, run = tried, cost
                break
        for t, s in list(made.stored.items()):
            if t.kind == INPUT or t in self.pinned:
                continue
            used = made.used.get(t, self.engine.whole)  # or as it is stored, if not gathered whole for all that read it
            first = tuple([0 if isinstance(x, int) and u is None else x for x, u in zip(s, used)])
            if first == s or not fits(first, t.like.shape, self.sizes):
                continue
            tried = replace(made, stored={**made.stored, t: first})
            cost = self.engine.run(tried)
            if cost.seconds <= run.seconds * (1 + SAME) and self._holds(cost):
                made = tried
        return made, self.engine.run(made)

    def _holds(self, run: Run) -> bool:
        return run.at_most <= self.usable

    def _or_known(self, made: Assignment, run: Run, bound: float) -> tuple[Assignment, Run, float]:
        """That, or a well-known plan if one is cheaper."""
        for a, cost in self._known():
            if self._holds(cost) and (cost.seconds < run.seconds or not self._holds(run)):
                made, run = a, cost
        return made, run, min(bound, run.seconds)

    def _polished(self, made: Assignment, run: Run, bound: float) -> tuple[Assignment, Run]:
        """The same with single activations elsewhere, where that helps, until it is near enough to the bound."""
        states = sorted({s for pair in made.borders.values() for s in pair}, key=str)
        for group in self._groups(made).values():
            fitting = [s for s in states if all(fits(s, step.like.operands[0].shape, self.sizes) for step in group)]
            for s in fitting:
                for way in (0, 1):  # the tensor itself, or its gradient
                    if run.least * (1 - self.gap) <= bound:
                        return made, run
                    if way == 0 and any(isinstance(x, str) for x in s):
                        continue
                    moved = {k: (s, v[1]) if way == 0 else (v[0], s) for k, v in made.borders.items() if k in group}
                    tried = replace(made, borders={**made.borders, **moved})
                    cost = self.engine.run(tried)
                    if cost.seconds < run.seconds * (1 - SAME) and self._holds(cost):
                        made, run = tried, cost
        return made, run

    def _groups(self, made: Assignment) -> dict[tuple[str, str], list[Step]]:
        """The borders at which it moves something, by the name of the activation."""
        groups: dict[tuple[str, str], list[Step]] = {}
        for step in made.borders:
            groups.setdefault((pattern(step.like.path), step.like.what), []).append(step)
        return groups


def _first(wanted: set[State], made: State) -> State:
    """The only state that is wanted, or that in which the tensor is made."""
    return next(iter(wanted)) if len(wanted) == 1 else made


__all__ = ["SPARE", "Best"]
