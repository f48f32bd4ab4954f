"""What the engine would do with a step under a plan: the layouts it chooses operator by operator, and their price.

This is `dispatch` on a tape: the same rules and the same choice of the cheapest candidate for the operands at hand,
with the prices of the search. So a plan found can be compared with what will run, and plans of one's own with it.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from ...layout.machine import Machine
from ...rules.choose import choose
from .choices import Choices, Option, seconds_of_optimizer
from .states import Moves, State, bucket_bytes, bucketed, first_start, fitting, layout_of, parts, state_of
from .steps import Step, Steps, Tensor, is_free, pattern
from .tape import PARAMETER, Value

BUCKETS = 256e6
"""Bytes of gradients that are in buckets at once, at most, as sums that are still to be computed."""


@dataclass
class Assignment:
    """Where tensors are, in the terms of the search.

    Attributes:
        stored: tensor of parameters, buffers or inputs -> its state; all others are replicated.
        used: tensor of parameters -> the state in which the forward reads it.
        borders: border of the forward -> the state in which it hands a tensor on, and that of the gradient on its way
            back.
    """

    stored: dict[Tensor, State] = field(default_factory=dict[Tensor, State])
    used: dict[Tensor, State] = field(default_factory=dict[Tensor, State])
    borders: dict[Step, tuple[State, State]] = field(default_factory=dict[Step, tuple[State, State]])


@dataclass
class Run:
    """What the engine does with a step.

    Attributes:
        machine: what a rank computes with.
        computing: seconds of computation.
        waiting: seconds of moves that computation waits for.
        beside: seconds of moves of parameters and their gradients, in buckets.
        starts: (whether of gradients, mesh axis) -> seconds of the first bucket's start, which `beside` contains.
        updating: seconds of the optimizer.
        peak: the most bytes that a rank holds.
        static: bytes of parameters, gradients and optimizer states.
        by_path: name of a module, as a pattern -> seconds of computation, and of moves.
        held: likewise -> bytes of parameters with what belongs to them, and bytes kept for the backward.
        moves: (step, operand) -> from which state to which, how often, and seconds each.
        states: step -> states of its outputs, of the last operator like it.
    """

    machine: Machine
    computing: float = 0.0
    waiting: float = 0.0
    beside: float = 0.0
    updating: float = 0.0
    peak: float = 0.0
    static: float = 0.0
    by_path: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    held: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    moves: Counter[Any] = field(default_factory=Counter[Any])
    states: dict[Step, tuple[State | None, ...]] = field(default_factory=dict[Step, tuple[State | None, ...]])
    starts: dict[tuple[bool, int], float] = field(default_factory=dict[tuple[bool, int], float])

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return self.waiting + self.machine.together(self.computing, self.beside) + self.updating


class Engine:
    """Runs assignments on a tape.

    Args:
        steps: the step.
        choices: the mesh and its options.
        training: whether there is a backward and an optimizer.
        states: tensors of its size that the optimizer keeps for a parameter.
    """

    def __init__(self, steps: Steps, choices: Choices, *, training: bool = True, states: float = 2.0) -> None:
        self.steps, self.choices, self.training, self.kept = steps, choices, training, states
        self.bucketed = bucketed(choices.network, choices.choosing)
        self._bucket = max(map(bucket_bytes, choices.choosing.links))
        self.axes = len(choices.network.sizes)
        self.whole: State = (None,) * self.axes
        self._moves: dict[Any, Moves] = {}
        self._chosen: dict[Any, tuple[tuple[State, ...], tuple[State | None, ...], int, float, float]] = {}
        self._dying: dict[int, list[Any]] = {}
        for storage, index in steps.last.items():
            self._dying.setdefault(index, []).append(storage)
        own = {v.storage: v for v in steps.tape.values.values() if v.kind == PARAMETER}
        read: dict[tuple[Value, bool], int] = {}
        for index, op in enumerate(steps.tape.ops):
            read.update({(own[v.storage], op.backward): index for v in op.operands if v.storage in own})
        self._in_backward = {v for v, backward in read if backward}
        for key, index in read.items():  # a gathered parameter, and views of it
            self._dying.setdefault(index, []).append(key)

    def moves(self, v: Value, shared: bool) -> Moves:
        """Prices of moves of a tensor; `shared`: in buckets."""
        key = v.shape, v.dtype.itemsize, shared
        found = self._moves.get(key)
        if found is None:
            found = self._moves[key] = Moves(self.bucketed if shared else self.choices.network, *key[:2])
        return found

    def local(self, v: Value, state: State) -> float:
        """Bytes of a tensor that a rank holds."""
        return v.bytes / parts(state, self.choices.network.sizes)

    def run(self, given: Assignment) -> Run:
        """Price an assignment."""
        made = Run(self.choices.machine)
        states: dict[Value, State] = {}
        known: dict[tuple[Value, State, bool], bool] = {}
        read: dict[tuple[Value, bool], State] = {}
        held: dict[Any, float] = {}
        grown: dict[int, float] = {}
        makers: dict[Any, Step] = {}
        kept = False
        live = gathered = 0.0
        for v in self.steps.tape.values.values():
            t = self.steps.which[v]
            states[v] = given.stored.get(t, self.whole)
            mine = self.local(v, states[v])
            trained = v.kind == PARAMETER and self.training and v.name in self.steps.tape.gradients
            static = mine * (2 + self.kept if trained else 1)
            made.static += static
            made.held.setdefault(pattern(v.name.rpartition(".")[0]), [0.0, 0.0])[0] += static
            live -= mine if trained else 0.0  # its gradient, until there is one
            if trained:
                grown[self.steps.tape.gradients[v.name].storage] = mine
                made.updating += seconds_of_optimizer(mine, self.choices.machine, self.kept)
        most = live
        for index, op in enumerate(self.steps.tape.ops):
            step = self.steps.of[op]
            if op.backward and not kept:
                kept = True
                for storage, maker in makers.items():
                    made.held.setdefault(_pattern_of(maker), [0.0, 0.0])[1] += held.get(storage, 0.0)
            if step.plain:
                continue
            ins: list[State] = []
            for v in op.operands:
                s = states.get(v, self.whole)
                if v.kind == PARAMETER:
                    t = self.steps.which[v]
                    want = given.used.get(t)
                    if want is not None and want != s:
                        if (v, op.backward) not in read:
                            read[v, op.backward] = want
                            held[v, op.backward] = self.local(v, want)
                            gathered += 0.0 if op.backward else held[v, op.backward]
                            live += held[v, op.backward]
                            again = 2.0 if self.training and v.ndim > 1 and v not in self._in_backward else 1.0
                            self._pay(made, step, v, s, want, again)
                        s = want
                ins.append(s)
            if step.border:
                decided = given.borders.get(self.steps.decided[step], (ins[0], ins[0]))
                want = fitting(decided[op.forward is not None], op.operands[0].ndim)
                wanted, outs, took, extra = (want,), (want,), 0.0, 0.0
            else:
                wanted, outs, _, took, extra = self._choose(step, tuple(ins))
            copies = 0.0
            for v, a, b in zip(op.operands, ins, wanted):
                if a != b and (v, b, op.backward) not in known:
                    known[v, b, op.backward] = True
                    self._pay(made, step, v, a, b, 1.0)
                    if not op.backward and self.steps.which.get(v) in self.steps.ahead:
                        gathered += self.local(v, b)
                    if v.storage in held:  # what is moved is a new tensor
                        copies += self.local(v, b)
                        if step.border:
                            held[v.storage] += self.local(v, b)
            made.computing += took
            made.waiting += extra
            place = made.by_path.setdefault(_pattern_of(step), [0.0, 0.0])
            place[0] += took
            place[1] += extra
            made.states[step] = outs
            for v, s in zip(op.outputs, outs):
                if v is not None and s is not None:
                    states[v] = s
                    live += grown.pop(v.storage, 0.0)
                    if v.storage not in held and not is_free(step) and v.storage in self.steps.last:
                        held[v.storage] = self.local(v, s)
                        makers[v.storage] = step
                        live += held[v.storage]
            most = max(most, live + copies)
            live += copies if step.border else 0.0
            for gone in self._dying.get(index, ()):
                live -= held.pop(gone, 0.0)
        sent = 0.0
        for name, g in self.steps.tape.gradients.items():
            p = self.steps.tape.values[PARAMETER, name]
            step = self.steps.of.get(g.maker) if g.maker is not None else None
            if (s := states.get(g, self.whole)) != states[p]:
                self._pay(made, step, g, s, states[p], 1.0, gradient=True)
                sent += self.local(g, s)
        made.peak = made.static + max(most + min(gathered, self._bucket), live) + min(sent, BUCKETS)
        return made

    def _pay(
        self, made: Run, step: Step | None, v: Value, a: State, b: State, times: float, gradient: bool = False
    ) -> None:
        if a == b:
            return
        t = self.steps.which.get(v)
        beside = gradient or (t is not None and self.steps.beside(t, step is not None and step.backward))
        gradient = gradient or t in self.steps.late
        shared = gradient or t in self.steps.ahead
        moves = self.moves(v, shared)
        price = moves.price(a, b)
        made.moves[step, v.shape, a, b, price] += int(times)
        if beside:
            made.beside += price * times
            for way in moves.way(a, b) if shared else ():
                axis, start = first_start(self.choices.network, *way)
                start *= 1.0 if gradient else 1.0 + self.training
                before = made.starts.get((gradient, axis), 0.0)
                made.starts[gradient, axis] = max(before, start)
                made.beside += max(0.0, start - before)
        else:
            made.waiting += price * times
        if step is not None:
            made.by_path.setdefault(_pattern_of(step), [0.0, 0.0])[1] += price * times

    def _choose(self, step: Step, ins: tuple[State, ...]) -> Any:
        key = step, ins
        found = self._chosen.get(key)
        if found is None:
            found = self._chosen[key] = self._decide(step, ins)
        return found

    def _decide(self, step: Step, ins: tuple[State, ...]) -> Any:
        op = step.like
        if not op.operands:
            return (
                (),
                tuple([v and self.whole for v in op.outputs]),
                1,
                self.choices.seconds(step, Option((), (), 1)),
                0.0,
            )
        specs = [self.choices.spec(v, layout_of(s, v.ndim)) for v, s in zip(op.operands, ins)]
        rule = self.choices.rule(step)
        picked = choose(rule, specs, step.in_place, self.choices.choosing)
        wanted = tuple([state_of(x) for x in picked.inputs])
        outs = tuple([None if x is None or v is None else state_of(x) for x, v in zip(picked.outputs, op.outputs)])
        ways = {f: self._ways(axes) for f, axes in picked.axes.items()}
        split = 1
        for n in ways.values():
            split *= n
        option = Option(wanted, outs, split)
        extra = self.choices.across(step, rule, picked.axes)
        return wanted, outs, split, self.choices.seconds(step, option), extra

    def _ways(self, axes: tuple[int, ...]) -> int:
        n = 1
        for a in axes:
            n *= self.choices.network.sizes[a]
        return n


def _pattern_of(step: Step) -> str:
    return pattern(step.like.path)


__all__ = ["Assignment", "Engine", "Run"]
